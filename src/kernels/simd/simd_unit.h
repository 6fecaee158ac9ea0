// Reads, rounds and stores units, which are two vectors of elements, and the vector codecs of all
// formats. A part of simd_kernels.h, like simd_rules.h.
#if defined(HYBRIDOPT_KERNELS_SIMD_UNIT_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HYBRIDOPT_KERNELS_SIMD_UNIT_H
#undef HYBRIDOPT_KERNELS_SIMD_UNIT_H
#else
#define HYBRIDOPT_KERNELS_SIMD_UNIT_H
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <type_traits>

#include "kernels/convert.h"
#include "kernels/formats/format.h"
#include "kernels/kernels.h"
#include "kernels/simd/simd_rules.h"
#include "kernels/simd/span_units.h"
#include "kernels/stochastic_rounding.h"
#include "kernels/table.h"

#if HWY_NATIVE_FMA

HWY_BEFORE_NAMESPACE();
namespace hybridopt {
namespace HWY_NAMESPACE {
namespace {

template <int32_t kDtype>
HWY_INLINE Float LoadWide(const Stored<kDtype>* source) {
  if constexpr (kDtype == OFFLOAD_FP32) {
    return hn::LoadU(F32(), source);
  } else if constexpr (kDtype == OFFLOAD_BF16) {
    const auto wide = hn::PromoteTo(U32(), hn::LoadU(HalfU16(), source));
    return hn::BitCast(F32(), hn::ShiftLeft<16>(wide));
  } else {
    return hn::PromoteTo(F32(), hn::BitCast(HalfF16(), hn::LoadU(HalfU16(), source)));
  }
}

// A unit is read into two vectors: its halves, or, if IsPaired() (simd_kernels.h), its even and its
// odd elements. Pairs are cheaper if all arrays have elements of 16 bits: one shift and one mask
// widen or pack them.
template <int32_t kDtype, bool kInPairs>
HWY_INLINE void LoadUnit(const Stored<kDtype>* source, Float& first, Float& second) {
  if constexpr (kInPairs) {
    static_assert(kDtype == OFFLOAD_BF16);
    const auto pairs = hn::BitCast(U32(), hn::LoadU(U16(), source));
    first = hn::BitCast(F32(), hn::ShiftLeft<16>(pairs));
    second = hn::BitCast(F32(), hn::And(pairs, hn::Set(U32(), 0xFFFF0000)));
  } else {
    first = LoadWide<kDtype>(source);
    second = LoadWide<kDtype>(source + Lanes());
  }
}

// Packs the upper halves of a unit's lanes.
template <bool kInPairs>
HWY_INLINE hn::Vec<U16> PackUpper(hn::Vec<U32> first, hn::Vec<U32> second) {
  const auto odd = hn::BitCast(U16(), second);
  if constexpr (kInPairs)
    return hn::OddEven(odd, hn::BitCast(U16(), hn::ShiftRight<16>(first)));
  else
    return hn::ConcatOdd(U16(), odd, hn::BitCast(U16(), first));
}

// Packs the lower halves of a unit's lanes.
template <bool kInPairs>
HWY_INLINE hn::Vec<U16> PackLower(hn::Vec<U32> first, hn::Vec<U32> second) {
  const auto even = hn::BitCast(U16(), first);
  if constexpr (kInPairs)
    return hn::OddEven(hn::BitCast(U16(), hn::ShiftLeft<16>(second)), even);
  else
    return hn::ConcatEven(U16(), hn::BitCast(U16(), second), even);
}

// Rounding a NaN needs a compare and a select for each value. So this tests all values of a unit
// together, and the code that follows exists twice: for units that may have a NaN, and for units
// that have none. Infinities of both signs together may look like a NaN.
HWY_INLINE bool MayHaveNan(Float first, Float second) {
  return !hn::AllFalse(F32(), hn::IsNaN(hn::Add(first, second)));
}

// Returns `nan` if the value is NaN, else `bits`, which are the bits of the rounded value.
template <bool kMayBeNan>
HWY_INLINE hn::Vec<U32> UnlessNan(Float value, hn::Vec<U32> nan, hn::Vec<U32> bits) {
  if constexpr (!kMayBeNan) return bits;
  return hn::IfThenElse(hn::RebindMask(U32(), hn::IsNaN(value)), nan, bits);
}

HWY_INLINE hn::Vec<U32> Quieted(hn::Vec<U32> nan) {
  return hn::Or(nan, hn::Set(U32(), 0x00400000));
}

// Rounds to bf16 in the upper half of each lane; the lower half is undefined. `half` and
// `ties_to_even` are 0x7FFF and 1, or 0x8000 and 0 for ties away from zero.
template <bool kMayBeNan>
HWY_INLINE hn::Vec<U32> RoundToBf16(Float value, hn::Vec<U32> half, hn::Vec<U32> ties_to_even) {
  const auto bits = hn::BitCast(U32(), value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), ties_to_even);
  return UnlessNan<kMayBeNan>(value, Quieted(bits), hn::Add(hn::Add(bits, half), odd));
}

// Rounds and packs one unit.
template <int32_t kDtype, bool kMayBeNan>
HWY_INLINE hn::Vec<U16> Pack(Float low, Float high, const Rounding& rounding) {
  if constexpr (kDtype == OFFLOAD_BF16) {
    const auto half = hn::Set(U32(), rounding.ties_away ? 0x8000 : 0x7FFF);
    const auto ties_to_even = hn::Set(U32(), rounding.ties_away ? 0 : 1);
    return PackUpper<false>(RoundToBf16<kMayBeNan>(low, half, ties_to_even),
                            RoundToBf16<kMayBeNan>(high, half, ties_to_even));
  } else {
    const auto low_half = hn::BitCast(HalfU16(), hn::DemoteTo(HalfF16(), low));
    const auto high_half = hn::BitCast(HalfU16(), hn::DemoteTo(HalfF16(), high));
    return hn::Combine(U16(), high_half, low_half);
  }
}

// The random bits of a unit's vectors, for moment0, for moment1 and for masters.
struct Draw {
  hn::Vec<U32>& first0;
  hn::Vec<U32>& second0;
  hn::Vec<U32>& first1;
  hn::Vec<U32>& second1;
  hn::Vec<U32>& first_master;
  hn::Vec<U32>& second_master;
};

// The last part of RandomBits in stochastic_rounding.h, after the counters have been mixed: gives
// the lower and the upper half of its bits, and MasterBits. Xor and shift of the tweak are computed
// once, as a scalar.
HWY_INLINE void FinishRandomBits(hn::Vec<U32> x, uint32_t tweak, hn::Vec<U32>& lower,
                                 hn::Vec<U32>& upper, hn::Vec<U32>& master) {
  x = hn::Xor3(x, hn::ShiftRight<13>(x), hn::Set(U32(), tweak ^ (tweak >> 13)));
  x = hn::Mul(x, hn::Set(U32(), kHashFactor2));
  upper = hn::ShiftRight<16>(x);
  x = hn::Xor(x, upper);
  lower = hn::And(x, hn::Set(U32(), 0xFFFF));
  master = hn::ShiftRight<24>(hn::Mul(x, hn::Set(U32(), kHashFactor3)));
}

HWY_INLINE hn::Vec<U32> MixCounters(hn::Vec<U32> counters) {
  return hn::Add(hn::Mul(counters, hn::Set(U32(), kHashFactor0)),
                 hn::Mul(hn::ShiftRight<16>(counters), hn::Set(U32(), kHashFactor1)));
}

// RandomBits for a unit; `counter` belongs to the unit's first element.
template <bool kInPairs>
HWY_INLINE void RandomBitsOfUnit(uint32_t counter, uint32_t tweak, const Draw& draw) {
  constexpr uint32_t kStep = kInPairs ? 2 : 1;
  const uint32_t ahead = kInPairs ? 1 : static_cast<uint32_t>(Lanes());
  const auto offsets = hn::Mul(hn::Iota(U32(), 0), hn::Set(U32(), kStep));
  hn::Vec<U32> first, second;
  if (HWY_LIKELY((counter & 0xFFFF) + Unit() <= 0x10000)) {
    const uint32_t mixed = counter * kHashFactor0 + (counter >> 16) * kHashFactor1;
    first = hn::Add(hn::Set(U32(), mixed), hn::Mul(offsets, hn::Set(U32(), kHashFactor0)));
    second = hn::Add(first, hn::Set(U32(), ahead * kHashFactor0));
  } else {
    first = MixCounters(hn::Add(hn::Set(U32(), counter), offsets));
    second = MixCounters(hn::Add(hn::Set(U32(), counter + ahead), offsets));
  }
  FinishRandomBits(first, tweak, draw.first0, draw.first1, draw.first_master);
  FinishRandomBits(second, tweak, draw.second0, draw.second1, draw.second_master);
}

// Handles a zero that other code has written (formats/split.inc). Joined with a negative lower
// half, its bits would be those of a NaN, so the result is replaced by zero.
HWY_INLINE Float KeepZero(Float upper, Float joined) {
  const auto zeroed = hn::And(hn::Eq(upper, Broadcast(0)), hn::IsNaN(joined));
  return hn::IfThenElse(zeroed, upper, joined);
}

// The masters of a unit, from their bf16 params and from `lost`, the part that rounding to these
// params has lost.
template <bool kInPairs, bool kMayBeNan>
HWY_INLINE void JoinMasters(const UpdateSpan& span, uint64_t begin, hn::Vec<I32> first_lost,
                            hn::Vec<I32> second_lost, Float& first, Float& second) {
  Float first_upper, second_upper;
  LoadUnit<OFFLOAD_BF16, kInPairs>(static_cast<const uint16_t*>(span.param) + begin, first_upper,
                                   second_upper);
  first = hn::BitCast(F32(), hn::Add(hn::BitCast(I32(), first_upper), first_lost));
  second = hn::BitCast(F32(), hn::Add(hn::BitCast(I32(), second_upper), second_lost));
  if constexpr (kMayBeNan) {
    first = KeepZero(first_upper, first);
    second = KeepZero(second_upper, second);
  }
}

// The same for pairs: `lost` has the lower halves of all elements of the unit, in order.
template <bool kMayBeNan>
HWY_INLINE void JoinPairs(const UpdateSpan& span, uint64_t begin, hn::Vec<I16> lost, Float& first,
                          Float& second) {
  const auto pairs = hn::BitCast(I32(), lost);
  JoinMasters<true, kMayBeNan>(span, begin, hn::ShiftRight<16>(hn::ShiftLeft<16>(pairs)),
                               hn::ShiftRight<16>(pairs), first, second);
}

// Prepares the bits of one vector of a unit of masters: NaNs get their quiet bit set and 0 as lower
// half.
template <bool kMayBeNan>
HWY_INLINE hn::Vec<U32> WithoutLowNan(Float value, hn::Vec<U32> bits) {
  const auto nan = hn::And(Quieted(hn::BitCast(U32(), value)), hn::Set(U32(), 0xFFFF0000));
  return UnlessNan<kMayBeNan>(value, nan, bits);
}

// How the params and masters of a unit are stored.
struct ParamStore {
  bool in_place;  // the param is the master
  bool stream;    // store past the caches: the step does not read the param again
};

// A vector whose lanes have an upper half other than 0 where masters may be rounded to other params
// of bf16. Half of the last bit that stays is added to both: then the upper halves differ if the
// roundings away from zero do, and a lower half is 0, which 1 less makes large, if the master is a
// tie.
template <bool kMayBeNan>
HWY_INLINE hn::Vec<U32> MayRoundToOthers(Float old, Float now) {
  const auto half = hn::Set(U32(), 0x8000), low = hn::Set(U32(), 0xFFFF);
  const auto old_bits = hn::Add(hn::BitCast(U32(), old), half);
  const auto now_bits = hn::Add(hn::BitCast(U32(), now), half);
  const auto least = hn::Min(hn::And(old_bits, low), hn::And(now_bits, low));
  const auto others = hn::Or(hn::Xor(old_bits, now_bits), hn::Sub(least, hn::Set(U32(), 1)));
  return UnlessNan<kMayBeNan>(hn::Add(old, now), hn::Set(U32(), 0xFFFFFFFF), others);
}

// A mask of 16-bit lanes for two vectors of 32-bit lanes.
HWY_INLINE hn::Mask<U16> MaskOfUnit(hn::Mask<U32> first, hn::Mask<U32> second) {
  const auto both = PackUpper<false>(hn::VecFromMask(U32(), first), hn::VecFromMask(U32(), second));
  return hn::Ne(both, hn::Zero(U16()));
}

// Which params of a unit may be others if their masters, now at `before`, change to these. Without
// kMayBeNan neither is NaN.
template <int32_t kDtype, bool kMayBeNan>
HWY_INLINE hn::Mask<U16> MayDiffer(const float* before, Float first, Float second) {
  const Float old_first = hn::LoadU(F32(), before), old_second = hn::LoadU(F32(), before + Lanes());
  if constexpr (kDtype == OFFLOAD_BF16) {
    const auto others = PackUpper<false>(MayRoundToOthers<kMayBeNan>(old_first, first),
                                         MayRoundToOthers<kMayBeNan>(old_second, second));
    return hn::Ne(others, hn::Zero(U16()));
  } else if constexpr (kDtype == OFFLOAD_FP16) {
    const auto differ = hn::Ne(Pack<OFFLOAD_FP16, true>(old_first, old_second, {}),
                               Pack<OFFLOAD_FP16, true>(first, second, {}));
    const auto nan = [](Float old, Float now)
                         HWY_ATTR { return hn::RebindMask(U32(), hn::IsNaN(hn::Add(old, now))); };
    return hn::Or(differ, MaskOfUnit(nan(old_first, first), nan(old_second, second)));
  } else {
    return MaskOfUnit(hn::Ne(hn::BitCast(U32(), old_first), hn::BitCast(U32(), first)),
                      hn::Ne(hn::BitCast(U32(), old_second), hn::BitCast(U32(), second)));
  }
}

// Writes which params of a unit may be others: whole bytes.
HWY_INLINE void NoteUnit(hn::Mask<U16> changed, const UpdateSpan& span, uint64_t begin) {
  hn::StoreMaskBits(U16(), changed, span.changed + begin / 8);
}

// Stores the masters of a unit, rounded to bf16, as params. The params have just been read and are
// in the caches, so they are not stored past the caches.
template <bool kInPairs, bool kNotes>
HWY_INLINE void StoreUpperHalves(hn::Vec<U32> first, hn::Vec<U32> second, const UpdateSpan& span,
                                 uint64_t begin) {
  const auto half = hn::Set(U32(), 0x8000);
  const auto params = PackUpper<kInPairs>(hn::Add(first, half), hn::Add(second, half));
  auto* const stored = static_cast<uint16_t*>(span.param) + begin;
  if constexpr (kNotes)
    if (span.changed != nullptr) NoteUnit(hn::Ne(params, hn::LoadU(U16(), stored)), span, begin);
  hn::StoreU(params, U16(), stored);
}

// The codec of a format, in vectors. A format of masters defines LoadMasters and StoreMasters; a
// format of moments defines LoadMoments and StoreMoments. With kNotes StoreMasters notes which
// params may change, if the span has a place for that.
template <Format kFormat>
struct VectorCodec;

#define HYBRIDOPT_IN_VECTORS
#include "kernels/formats/table.inc"
#undef HYBRIDOPT_IN_VECTORS

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace hybridopt
HWY_AFTER_NAMESPACE();

#endif  // HWY_NATIVE_FMA

#endif  // per-target include guard
