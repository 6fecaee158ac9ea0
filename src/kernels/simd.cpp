// Every instruction set from this one source: Google Highway includes it again for each target
// and the end of the file lists the tables. Only targets with a true fused multiply-add are built,
// because only they give the bits of reference.cpp; the line order of the rules is the same there.
//
// Only Highway's headers are used: its library keeps process-wide state about the CPU.
#define HWY_COMPILE_ALL_ATTAINABLE
#define HWY_DISABLE_PCLMUL_AES
// SSE has no fused multiply-add. AVX3_DL would add nothing that is used here; nor would AVX-512's
// instructions for bf16, which flush denormals to zero. HWY_SVE takes vectors of any length: SVE2
// and the targets for one length would add nothing either.
#define HWY_DISABLED_TARGETS                                                              \
  (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | \
   HWY_WASM | HWY_WASM_EMU256)

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/simd.cpp"
#include <hwy/foreach_target.h>
// foreach_target.h comes first; it includes this file again, once per target.
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "kernels/convert.h"
#include "kernels/kernels.h"
#include "kernels/rounding.h"
#include "kernels/table.h"

#ifdef __FAST_MATH__
#error "The arithmetic is exact: build without -ffast-math."
#endif

// The static target that Highway insists on may be one without fused multiply-add: no code then.
#if HWY_NATIVE_FMA

HWY_BEFORE_NAMESPACE();
namespace hybridopt {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using F32 = hn::ScalableTag<float>;
using U32 = hn::ScalableTag<uint32_t>;
using U16 = hn::ScalableTag<uint16_t>;
using HalfU16 = hn::Rebind<uint16_t, F32>;
using HalfF16 = hn::Rebind<hwy::float16_t, F32>;
using Float = hn::Vec<F32>;

// A constant, but where only the CPU knows how long its vectors are (SVE). There, vectors are no
// members of structs and arrays either.
HWY_INLINE HWY_MAYBE_UNUSED uint64_t Lanes() { return hn::Lanes(F32()); }
// The loop's unit: two vectors of fp32, one full vector of bf16 or fp16.
HWY_INLINE HWY_MAYBE_UNUSED uint64_t Unit() { return 2 * Lanes(); }
constexpr uint64_t kUnitMax = 2 * HWY_LANES(float);

template <int32_t kDtype>
using Stored = typename Element<kDtype>::Stored;

// One vector of elements on its way through a rule.
struct Value {
  Float& grad;
  Float& param;
  Float& moment0;
  Float& moment1;
};

HWY_INLINE Float Broadcast(float value) { return hn::Set(F32(), value); }

HWY_INLINE Float Lerp(Float old, Float next, float keep, float weight) {
  const Float factor = Broadcast(weight < 0.5f ? weight : keep);
  return weight < 0.5f ? hn::MulAdd(factor, hn::Sub(next, old), old)
                       : hn::MulAdd(factor, hn::Sub(old, next), next);
}

// value < max ? value : max. Instruction sets define Min differently for NaN; x86's is this.
HWY_INLINE Float AtMost(Float value, Float max) {
#if HWY_ARCH_X86
  return hn::Min(value, max);
#else
  return hn::IfThenElse(hn::Lt(value, max), value, max);
#endif
}

HWY_INLINE Float Saturate(Float value) { return AtMost(value, Broadcast(FLT_MAX)); }

HWY_INLINE void Adam(const Coefficients& c, const Value& x) {
  const Float grad = hn::MulAdd(Broadcast(c.l2_decay), x.param, x.grad);
  x.moment0 = Lerp(x.moment0, grad, c.keep0, c.weight0);
  const Float square = Saturate(hn::Mul(grad, grad));
  x.moment1 = Lerp(x.moment1, square, c.keep1, c.weight1);
  const Float root = hn::Sqrt(x.moment1);
  const Float denominator =
      hn::MulAdd(root, Broadcast(c.inverse_sqrt_bias_correction2), Broadcast(c.eps));
  const Float quotient = hn::Div(x.moment0, denominator);
  Float update = hn::MulAdd(Broadcast(c.step_size), quotient, Broadcast(0.0f));
  update = hn::MulAdd(Broadcast(c.decoupled_decay), x.param, update);
  x.param = hn::Sub(x.param, update);
}

HWY_INLINE void SgdMomentum(const Coefficients& c, const Value& x) {
  const Float grad = hn::MulAdd(Broadcast(c.l2_decay), x.param, x.grad);
  const Float weighted = hn::Mul(Broadcast(c.weight0), grad);
  x.moment0 = hn::MulAdd(Broadcast(c.keep0), x.moment0, weighted);
  const Float direction =
      c.nesterov ? hn::MulAdd(Broadcast(c.nesterov_momentum), x.moment0, grad) : x.moment0;
  const Float update = hn::MulAdd(Broadcast(c.step_size), direction, Broadcast(0.0f));
  x.param = hn::Sub(x.param, update);
}

HWY_INLINE void SgdPlain(const Coefficients& c, const Value& x) {
  const Float grad = hn::MulAdd(Broadcast(c.l2_decay), x.param, x.grad);
  const Float update = hn::MulAdd(Broadcast(c.step_size), grad, Broadcast(0.0f));
  x.param = hn::Sub(x.param, update);
}

HWY_INLINE void Lion(const Coefficients& c, const Value& x) {
  const Float zero = Broadcast(0.0f);
  const Float interpolated = Lerp(x.moment0, x.grad, c.keep0, c.weight0);
  const Float not_positive = hn::IfThenElse(hn::Lt(interpolated, zero), Broadcast(-1.0f), zero);
  const Float sign = hn::IfThenElse(hn::Gt(interpolated, zero), Broadcast(1.0f), not_positive);
  Float update = hn::MulAdd(Broadcast(c.step_size), sign, zero);
  update = hn::MulAdd(Broadcast(c.decoupled_decay), x.param, update);
  x.param = hn::Sub(x.param, update);
  x.moment0 = Lerp(x.moment0, x.grad, c.keep1, c.weight1);
}

HWY_INLINE void Adagrad(const Coefficients& c, const Value& x) {
  const Float grad = hn::MulAdd(Broadcast(c.l2_decay), x.param, x.grad);
  x.moment0 = Saturate(hn::MulAdd(grad, grad, x.moment0));
  const Float root = hn::Sqrt(x.moment0);
  const Float denominator = hn::Add(root, Broadcast(c.eps));
  const Float quotient = hn::Div(grad, denominator);
  const Float update = hn::MulAdd(Broadcast(c.step_size), quotient, Broadcast(0.0f));
  x.param = hn::Sub(x.param, update);
}

template <Rule kRule>
HWY_INLINE void Apply(const Coefficients& c, const Value& x) {
  if constexpr (kRule == Rule::kAdam) Adam(c, x);
  if constexpr (kRule == Rule::kSgdMomentum) SgdMomentum(c, x);
  if constexpr (kRule == Rule::kSgdPlain) SgdPlain(c, x);
  if constexpr (kRule == Rule::kLion) Lion(c, x);
  if constexpr (kRule == Rule::kAdagrad) Adagrad(c, x);
}

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

// How the kernel stores moments. What is one fixed thing for a whole span is no branch in its loop.
enum class MomentForm { kFp32, kNearest, kStochastic };

// A unit is read into two vectors: its halves, or, where `kPaired`, its even and its odd elements.
// Pairs are cheaper where all arrays have elements of 16 bits: to widen and to pack them takes a
// shift and a mask.
template <Rule kRule, int32_t kGradDtype, bool kSplit, MomentForm kForm>
inline constexpr bool kPaired = kSplit&& kGradDtype == OFFLOAD_BF16 &&
                                (kForm != MomentForm::kFp32 || !kHasMoment0<kRule>);

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

// Packs the lower halves.
template <bool kInPairs>
HWY_INLINE hn::Vec<U16> PackLower(hn::Vec<U32> first, hn::Vec<U32> second) {
  const auto even = hn::BitCast(U16(), first);
  if constexpr (kInPairs)
    return hn::OddEven(hn::BitCast(U16(), hn::ShiftLeft<16>(second)), even);
  else
    return hn::ConcatEven(U16(), hn::BitCast(U16(), second), even);
}

// Rounding NaN takes a compare and a choice for each value. So all of a unit are looked at
// together, and what follows comes twice: where there may be a NaN, and where there is none.
// Infinities of both signs may be taken for one.
HWY_INLINE bool MayHaveNan(Float first, Float second) {
  return !hn::AllFalse(F32(), hn::IsNaN(hn::Add(first, second)));
}

// `nan` for a NaN, else `bits`, the value rounded.
template <bool kMayBeNan>
HWY_INLINE hn::Vec<U32> UnlessNan(Float value, hn::Vec<U32> nan, hn::Vec<U32> bits) {
  if constexpr (!kMayBeNan) return bits;
  return hn::IfThenElse(hn::RebindMask(U32(), hn::IsNaN(value)), nan, bits);
}

HWY_INLINE hn::Vec<U32> Quieted(hn::Vec<U32> nan) {
  return hn::Or(nan, hn::Set(U32(), 0x00400000));
}

// bf16 in the upper half of each lane; the lower half is rubbish. `half` and `ties_to_even` are
// 0x7FFF and 1, or 0x8000 and 0 for ties away from zero.
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

// A run's roundings: of the param, and its first element's counter and tweak.
struct RunRounding {
  Rounding rounding;
  uint32_t counter;
  uint32_t tweak;
};

// The random bits of a unit's vectors, for moment0 and for moment1.
struct Draw {
  hn::Vec<U32>& first0;
  hn::Vec<U32>& second0;
  hn::Vec<U32>& first1;
  hn::Vec<U32>& second1;
};

// What is left of rounding.h's RandomBits once counters are mixed: its lower and its upper half.
// Xor and shift of the tweak are done on its one number.
HWY_INLINE void FinishRandomBits(hn::Vec<U32> x, uint32_t tweak, hn::Vec<U32>& lower,
                                 hn::Vec<U32>& upper) {
  x = hn::Xor3(x, hn::ShiftRight<13>(x), hn::Set(U32(), tweak ^ (tweak >> 13)));
  x = hn::Mul(x, hn::Set(U32(), kHashFactor2));
  upper = hn::ShiftRight<16>(x);
  lower = hn::And(hn::Xor(x, upper), hn::Set(U32(), 0xFFFF));
}

HWY_INLINE hn::Vec<U32> MixCounters(hn::Vec<U32> counters) {
  return hn::Add(hn::Mul(counters, hn::Set(U32(), kHashFactor0)),
                 hn::Mul(hn::ShiftRight<16>(counters), hn::Set(U32(), kHashFactor1)));
}

// RandomBits of a unit whose first element's counter is `counter`.
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
  FinishRandomBits(first, tweak, draw.first0, draw.first1);
  FinishRandomBits(second, tweak, draw.second0, draw.second1);
}

// A moment in bf16 in the upper half of each lane. `random` is below 2^16.
template <MomentForm kForm, bool kIsSum, bool kMayBeNan>
HWY_INLINE hn::Vec<U32> RoundMoment(Float value, hn::Vec<U32> random) {
  if constexpr (kIsSum) value = AtMost(value, Broadcast(0x1.FEp127f));  // no NaN is left
  const auto bits = hn::BitCast(U32(), value);
  auto rounded = hn::Add(bits, random);
  if constexpr (kForm == MomentForm::kNearest) {
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(U32(), 1));
    rounded = hn::Add(hn::Add(bits, odd), hn::Set(U32(), 0x7FFF));
  }
  return UnlessNan < kMayBeNan && !kIsSum > (value, Quieted(bits), rounded);
}

template <MomentForm kForm>
using StoredMoment = std::conditional_t<kForm == MomentForm::kFp32, float, uint16_t>;

template <MomentForm kForm, bool kInPairs>
HWY_INLINE void LoadMoments(const void* moments, uint64_t begin, Float& first, Float& second) {
  constexpr int32_t kDtype = kForm == MomentForm::kFp32 ? OFFLOAD_FP32 : OFFLOAD_BF16;
  LoadUnit<kDtype, kInPairs>(static_cast<const StoredMoment<kForm>*>(moments) + begin, first,
                             second);
}

// Stores a unit of moments.
template <MomentForm kForm, bool kInPairs, bool kIsSum, bool kMayBeNan>
HWY_INLINE void StoreMoments(Float first, Float second, hn::Vec<U32> random_first,
                             hn::Vec<U32> random_second, void* moments, uint64_t begin) {
  auto* stored = static_cast<StoredMoment<kForm>*>(moments) + begin;
  if constexpr (kForm == MomentForm::kFp32) {
    hn::StoreU(first, F32(), stored);
    hn::StoreU(second, F32(), stored + Lanes());
  } else {
    const auto packed =
        PackUpper<kInPairs>(RoundMoment<kForm, kIsSum, kMayBeNan>(first, random_first),
                            RoundMoment<kForm, kIsSum, kMayBeNan>(second, random_second));
    hn::StoreU(packed, U16(), stored);
  }
}

template <bool kSplit, bool kInPairs>
HWY_INLINE void LoadMasters(const UpdateSpan& span, uint64_t begin, Float& first, Float& second) {
  if constexpr (kSplit) {
    const hn::RebindToSigned<U32> i32;
    const auto* high = static_cast<const uint16_t*>(span.param) + begin;
    const auto* low = static_cast<const int16_t*>(span.master) + begin;
    LoadUnit<OFFLOAD_BF16, kInPairs>(high, first, second);
    const auto join = [&](Float rounded, hn::Vec<hn::RebindToSigned<U32>> lost) HWY_ATTR {
      return hn::BitCast(F32(), hn::Add(hn::BitCast(i32, rounded), lost));
    };
    if constexpr (kInPairs) {
      const auto pairs = hn::BitCast(i32, hn::LoadU(hn::RebindToSigned<U16>(), low));
      first = join(first, hn::ShiftRight<16>(hn::ShiftLeft<16>(pairs)));
      second = join(second, hn::ShiftRight<16>(pairs));
    } else {
      const hn::RebindToSigned<HalfU16> half_i16;
      first = join(first, hn::PromoteTo(i32, hn::LoadU(half_i16, low)));
      second = join(second, hn::PromoteTo(i32, hn::LoadU(half_i16, low + Lanes())));
    }
  } else {
    LoadUnit<OFFLOAD_FP32, false>(static_cast<const float*>(span.master) + begin, first, second);
  }
}

// One vector of a unit of masters, NaNs with their quiet bit set and their lower half 0.
template <bool kMayBeNan>
HWY_INLINE hn::Vec<U32> WithoutLowNan(Float value) {
  const auto bits = hn::BitCast(U32(), value);
  return UnlessNan<kMayBeNan>(value, hn::And(Quieted(bits), hn::Set(U32(), 0xFFFF0000)), bits);
}

// Stores a unit of masters as their two halves. Both have just been read: no store past the caches.
template <bool kInPairs, bool kMayBeNan>
HWY_INLINE void StoreHalves(Float first, Float second, const UpdateSpan& span, uint64_t begin) {
  const auto first_bits = WithoutLowNan<kMayBeNan>(first);
  const auto second_bits = WithoutLowNan<kMayBeNan>(second);
  const auto half = hn::Set(U32(), 0x8000);
  const auto params = PackUpper<kInPairs>(hn::Add(first_bits, half), hn::Add(second_bits, half));
  hn::StoreU(params, U16(), static_cast<uint16_t*>(span.param) + begin);
  hn::StoreU(PackLower<kInPairs>(first_bits, second_bits), U16(),
             static_cast<uint16_t*>(span.master) + begin);
}

// Updates the unit at `begin`, but stores nothing.
template <Rule kRule, int32_t kGradDtype, bool kSplit, MomentForm kForm>
HWY_INLINE void UpdateUnit(const Coefficients& c, const UpdateSpan& span, uint64_t begin,
                           const Value& first, const Value& second) {
  constexpr bool kInPairs = kPaired<kRule, kGradDtype, kSplit, kForm>;
  const auto* grad = static_cast<const Stored<kGradDtype>*>(span.grad);
  LoadUnit<kGradDtype, kInPairs>(grad + begin, first.grad, second.grad);
  first.grad = hn::Mul(first.grad, Broadcast(c.grad_factor));
  second.grad = hn::Mul(second.grad, Broadcast(c.grad_factor));
  LoadMasters<kSplit, kInPairs>(span, begin, first.param, second.param);
  if constexpr (kHasMoment0<kRule>)
    LoadMoments<kForm, kInPairs>(span.moment0, begin, first.moment0, second.moment0);
  if constexpr (kHasMoment1<kRule>)
    LoadMoments<kForm, kInPairs>(span.moment1, begin, first.moment1, second.moment1);
  Apply<kRule>(c, first);
  Apply<kRule>(c, second);
}

template <Rule kRule, MomentForm kForm, bool kInPairs, bool kMayBeNan>
HWY_INLINE void StoreUnitMoments(const Value& first, const Value& second, const UpdateSpan& span,
                                 const RunRounding& run, uint64_t begin) {
  auto first0 = hn::Zero(U32()), second0 = first0, first1 = first0, second1 = first0;
  if constexpr (kForm == MomentForm::kStochastic)
    RandomBitsOfUnit<kInPairs>(run.counter + static_cast<uint32_t>(begin), run.tweak,
                               {first0, second0, first1, second1});
  if constexpr (kHasMoment0<kRule>)
    StoreMoments<kForm, kInPairs, kMoment0IsSum<kRule>, kMayBeNan>(
        first.moment0, second.moment0, first0, second0, span.moment0, begin);
  if constexpr (kHasMoment1<kRule>)
    StoreMoments<kForm, kInPairs, true, kMayBeNan>(first.moment1, second.moment1, first1, second1,
                                                   span.moment1, begin);
}

// How a unit's params and masters are stored.
struct ParamStore {
  bool in_place;  // the param is the master
  bool stream;    // the step does not read the low-precision param again: it goes past the caches
};

template <Rule kRule, int32_t kGradDtype, int32_t kParamDtype, bool kSplit, MomentForm kForm,
          bool kMayBeNan>
HWY_INLINE void StoreUnit(const Value& first, const Value& second, const UpdateSpan& span,
                          const RunRounding& run, const ParamStore& store, uint64_t begin) {
  constexpr bool kInPairs = kPaired<kRule, kGradDtype, kSplit, kForm>;
  StoreUnitMoments<kRule, kForm, kInPairs, kMayBeNan>(first, second, span, run, begin);
  if constexpr (kSplit) {
    StoreHalves<kInPairs, kMayBeNan>(first.param, second.param, span, begin);
  } else {
    auto* master = static_cast<float*>(span.master) + begin;
    auto* param = static_cast<Stored<kParamDtype>*>(span.param) + begin;
    hn::StoreU(first.param, F32(), master);
    hn::StoreU(second.param, F32(), master + Lanes());
    if constexpr (kParamDtype != OFFLOAD_FP32) {
      const auto packed = Pack<kParamDtype, kMayBeNan>(first.param, second.param, run.rounding);
      if (store.stream) {
        hn::Stream(packed, U16(), param);
      } else {
        hn::StoreU(packed, U16(), param);
      }
    } else if (!store.in_place) {
      hn::StoreU(first.param, F32(), param);
      hn::StoreU(second.param, F32(), param + Lanes());
    }
  }
}

// Whether something of the unit is rounded to bf16 that may be NaN.
template <Rule kRule, int32_t kParamDtype, MomentForm kForm>
HWY_INLINE bool RoundsNan(const Value& first, const Value& second) {
  constexpr bool kParams = kParamDtype == OFFLOAD_BF16;
  constexpr bool kMoments =
      kForm != MomentForm::kFp32 && kHasMoment0<kRule> && !kMoment0IsSum<kRule>;
  // All rules but Lion, which takes the sign, make a NaN of the param where the moment is one.
  constexpr bool kParamsTell = kParams && kRule != Rule::kLion;
  bool nan = false;
  if constexpr (kParams) nan = MayHaveNan(first.param, second.param);
  if constexpr (kMoments && !kParamsTell) nan = nan || MayHaveNan(first.moment0, second.moment0);
  return nan;
}

// Updates whole units: span.count is a multiple of Unit(). The arguments are copies, so that no
// store below can alias them.
template <Rule kRule, int32_t kGradDtype, int32_t kParamDtype, bool kSplit, MomentForm kForm>
void UpdateUnits(const Coefficients c, const UpdateSpan span, const RunRounding run) {
  const auto param_address = reinterpret_cast<uintptr_t>(span.param);
  const ParamStore store = {span.param == span.master,
                            param_address % (Unit() * sizeof(uint16_t)) == 0};
  for (uint64_t i = 0; i < span.count; i += Unit()) {
    Float grad0 = Broadcast(0), param0 = grad0, first0 = grad0, second0 = grad0;
    Float grad1 = grad0, param1 = grad0, first1 = grad0, second1 = grad0;
    const Value first = {grad0, param0, first0, second0};
    const Value second = {grad1, param1, first1, second1};
    UpdateUnit<kRule, kGradDtype, kSplit, kForm>(c, span, i, first, second);
    if (HWY_UNLIKELY((RoundsNan<kRule, kParamDtype, kForm>(first, second)))) {
      StoreUnit<kRule, kGradDtype, kParamDtype, kSplit, kForm, true>(first, second, span, run,
                                                                     store, i);
    } else {
      StoreUnit<kRule, kGradDtype, kParamDtype, kSplit, kForm, false>(first, second, span, run,
                                                                      store, i);
    }
  }
}

// A padded copy of the last elements of an array.
template <typename T>
struct Tail {
  T values[kUnitMax] = {};

  void CopyIn(const void* source, uint64_t begin, uint64_t count) {
    std::memcpy(values, static_cast<const T*>(source) + begin, count * sizeof(T));
  }
  void CopyOut(void* destination, uint64_t begin, uint64_t count) const {
    std::memcpy(static_cast<T*>(destination) + begin, values, count * sizeof(T));
  }
};

// The last elements, fewer than a unit, run the loop's own code on padded copies. Padding is zero,
// which every rule maps to finite numbers.
template <Rule kRule, int32_t kGradDtype, int32_t kParamDtype, bool kSplit, MomentForm kForm>
void UpdateTail(const Coefficients& c, const UpdateSpan& span, const RunRounding& run,
                uint64_t begin, uint64_t count) {
  Tail<Stored<kGradDtype>> grad;
  Tail<Stored<kParamDtype>> param;
  Tail<std::conditional_t<kSplit, uint16_t, float>> master;
  Tail<StoredMoment<kForm>> moment0;
  Tail<StoredMoment<kForm>> moment1;
  grad.CopyIn(span.grad, begin, count);
  if constexpr (kSplit) param.CopyIn(span.param, begin, count);
  master.CopyIn(span.master, begin, count);
  if constexpr (kHasMoment0<kRule>) moment0.CopyIn(span.moment0, begin, count);
  if constexpr (kHasMoment1<kRule>) moment1.CopyIn(span.moment1, begin, count);
  RunRounding rest = run;
  rest.counter += static_cast<uint32_t>(begin);
  UpdateUnits<kRule, kGradDtype, kParamDtype, kSplit, kForm>(
      c, {grad.values, param.values, master.values, moment0.values, moment1.values, Unit()}, rest);
  if constexpr (kHasMoment0<kRule>) moment0.CopyOut(span.moment0, begin, count);
  if constexpr (kHasMoment1<kRule>) moment1.CopyOut(span.moment1, begin, count);
  master.CopyOut(span.master, begin, count);
  param.CopyOut(span.param, begin, count);
}

// Updates elements whose indices follow each other.
template <Rule kRule, int32_t kGradDtype, int32_t kParamDtype, bool kSplit, MomentForm kForm>
void UpdateRun(const Coefficients& c, const UpdateSpan& span, const RunRounding& run) {
  const uint64_t tail = span.count % Unit();
  UpdateSpan units = span;
  units.count = span.count - tail;
  UpdateUnits<kRule, kGradDtype, kParamDtype, kSplit, kForm>(c, units, run);
  if (tail != 0)
    UpdateTail<kRule, kGradDtype, kParamDtype, kSplit, kForm>(c, span, run, units.count, tail);
}

// The norm's lanes are vectors of double. An fma of an exact product rounds as the addition does.
using F64 = hn::CappedTag<double, kNormLanes>;
using Double = hn::Vec<F64>;

template <int32_t kDtype>
HWY_INLINE Double LoadDouble(const Stored<kDtype>* source) {
  const hn::Rebind<float, F64> f32;
  if constexpr (kDtype == OFFLOAD_FP32) {
    return hn::PromoteTo(F64(), hn::LoadU(f32, source));
  } else {
    const auto stored = hn::LoadU(hn::Rebind<uint16_t, F64>(), source);
    if constexpr (kDtype == OFFLOAD_BF16) {
      const auto wide = hn::PromoteTo(hn::Rebind<uint32_t, F64>(), stored);
      return hn::PromoteTo(F64(), hn::BitCast(f32, hn::ShiftLeft<16>(wide)));
    } else {
      const hn::Rebind<hwy::float16_t, F64> f16;
      return hn::PromoteTo(F64(), hn::PromoteTo(f32, hn::BitCast(f16, stored)));
    }
  }
}

template <int32_t kDtype>
HWY_INLINE Double AddSquares(const Stored<kDtype>* grad, Double sums) {
  const Double value = LoadDouble<kDtype>(grad);
  return hn::MulAdd(value, value, sums);
}

// AddRows adds the squares of the first `count` elements (rows of kNormLanes) of kBlocks blocks to
// the lanes of each.
#if HWY_HAVE_SCALABLE
// Blocks go side by side: a lane's additions must wait for each other, those of other blocks need
// not.
constexpr uint64_t kBlocksTogether = 4;

// One vector of lanes after the other: what is no array element can be a variable.
template <int32_t kDtype, uint64_t kBlocks>
HWY_INLINE void AddRows(const Stored<kDtype>* grad, uint64_t count, double (*lanes)[kNormLanes]) {
  static_assert(kBlocks == 1 || kBlocks == kBlocksTogether);
  const Stored<kDtype>* blocks[kBlocksTogether];
  for (uint64_t block = 0; block < kBlocksTogether; ++block)
    blocks[block] = grad + block % kBlocks * kNormBlockElements;
  for (uint64_t k = 0; k < kNormLanes; k += hn::Lanes(F64())) {
    Double sums0 = hn::LoadU(F64(), lanes[0] + k);
    Double sums1 = hn::LoadU(F64(), lanes[1 % kBlocks] + k);
    Double sums2 = hn::LoadU(F64(), lanes[2 % kBlocks] + k);
    Double sums3 = hn::LoadU(F64(), lanes[3 % kBlocks] + k);
    for (uint64_t i = k; i < count; i += kNormLanes) {
      sums0 = AddSquares<kDtype>(blocks[0] + i, sums0);
      if constexpr (kBlocks == 1) continue;
      sums1 = AddSquares<kDtype>(blocks[1] + i, sums1);
      sums2 = AddSquares<kDtype>(blocks[2] + i, sums2);
      sums3 = AddSquares<kDtype>(blocks[3] + i, sums3);
    }
    hn::StoreU(sums0, F64(), lanes[0] + k);
    if constexpr (kBlocks == 1) continue;
    hn::StoreU(sums1, F64(), lanes[1 % kBlocks] + k);
    hn::StoreU(sums2, F64(), lanes[2 % kBlocks] + k);
    hn::StoreU(sums3, F64(), lanes[3 % kBlocks] + k);
  }
}
#else
// Memory is read in order: two blocks side by side would be two streams, each too short for the
// CPU to fetch ahead, at half the speed (docs/PERFORMANCE.md).
constexpr uint64_t kBlocksTogether = 1;

// The squares of two vectors of elements. bf16 widens cheapest in pairs, the even ones shifted up
// and the odd ones masked, so that its lanes alternate between both.
template <int32_t kDtype>
HWY_INLINE void AddPairOfSquares(const Stored<kDtype>* grad, Double& sums0, Double& sums1) {
  if constexpr (kDtype == OFFLOAD_BF16) {
    const hn::Rebind<uint32_t, F64> u32;
    const hn::Rebind<float, F64> f32;
    const auto pairs =
        hn::BitCast(u32, hn::LoadU(hn::Repartition<uint16_t, decltype(u32)>(), grad));
    const auto even = hn::ShiftLeft<16>(pairs);
    const auto odd = hn::And(pairs, hn::Set(u32, 0xFFFF0000));
    const Double value0 = hn::PromoteTo(F64(), hn::BitCast(f32, even));
    const Double value1 = hn::PromoteTo(F64(), hn::BitCast(f32, odd));
    sums0 = hn::MulAdd(value0, value0, sums0);
    sums1 = hn::MulAdd(value1, value1, sums1);
  } else {
    sums0 = AddSquares<kDtype>(grad, sums0);
    sums1 = AddSquares<kDtype>(grad + hn::Lanes(F64()), sums1);
  }
}

template <int32_t kDtype>
HWY_INLINE void LoadLanes(const double* lanes, Double& sums0, Double& sums1) {
  if constexpr (kDtype == OFFLOAD_BF16) {
    hn::LoadInterleaved2(F64(), lanes, sums0, sums1);
  } else {
    sums0 = hn::LoadU(F64(), lanes);
    sums1 = hn::LoadU(F64(), lanes + hn::Lanes(F64()));
  }
}

template <int32_t kDtype>
HWY_INLINE void StoreLanes(Double sums0, Double sums1, double* lanes) {
  if constexpr (kDtype == OFFLOAD_BF16) {
    hn::StoreInterleaved2(sums0, sums1, F64(), lanes);
  } else {
    hn::StoreU(sums0, F64(), lanes);
    hn::StoreU(sums1, F64(), lanes + hn::Lanes(F64()));
  }
}

template <int32_t kDtype, uint64_t kBlocks>
HWY_INLINE void AddRows(const Stored<kDtype>* grad, uint64_t count, double (*lanes)[kNormLanes]) {
  static_assert(kBlocks == 1);
  constexpr uint64_t kPairElements = 2 * HWY_LANES(double);
  constexpr uint64_t kPairs = kNormLanes / kPairElements;
  Double sums0[kPairs], sums1[kPairs];
#pragma GCC unroll 4
  for (uint64_t k = 0; k < kPairs; ++k)
    LoadLanes<kDtype>(lanes[0] + k * kPairElements, sums0[k], sums1[k]);
  for (uint64_t i = 0; i < count; i += kNormLanes) {
#pragma GCC unroll 4
    for (uint64_t k = 0; k < kPairs; ++k)
      AddPairOfSquares<kDtype>(grad + i + k * kPairElements, sums0[k], sums1[k]);
  }
#pragma GCC unroll 4
  for (uint64_t k = 0; k < kPairs; ++k)
    StoreLanes<kDtype>(sums0[k], sums1[k], lanes[0] + k * kPairElements);
}
#endif

HWY_INLINE double SumLanes(double* lanes) {
  for (uint32_t half = kNormLanes / 2; half > 0; half /= 2) {
    for (uint32_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return std::isnan(lanes[0]) ? std::numeric_limits<double>::quiet_NaN() : lanes[0];
}

template <int32_t kDtype>
void SumWholeBlocks(const Stored<kDtype>* grad, double* block_sums) {
  double lanes[kBlocksTogether][kNormLanes] = {};
  AddRows<kDtype, kBlocksTogether>(grad, kNormBlockElements, lanes);
  for (uint64_t block = 0; block < kBlocksTogether; ++block)
    block_sums[block] = SumLanes(lanes[block]);
}

// The sum of one block of at most kNormBlockElements. Padding adds zeros, which change no bit.
template <int32_t kDtype>
double SumBlock(const Stored<kDtype>* grad, uint64_t count) {
  double lanes[1][kNormLanes] = {};
  const uint64_t whole = count - count % kNormLanes;
  AddRows<kDtype, 1>(grad, whole, lanes);
  if (whole < count) {
    Stored<kDtype> padded[kNormLanes] = {};
    std::memcpy(padded, grad + whole, (count - whole) * sizeof(padded[0]));
    AddRows<kDtype, 1>(padded, kNormLanes, lanes);
  }
  return SumLanes(lanes[0]);
}

struct Kernels {
  template <Rule kRule, int32_t kGradDtype, int32_t kParamDtype, StateLayout kLayout>
  static void Update(const Coefficients& c, const UpdateSpan& span) {
    constexpr bool kSplit = IsSplit(kLayout);
    if constexpr (!HasBf16Moments(kLayout)) {
      UpdateRun<kRule, kGradDtype, kParamDtype, kSplit, MomentForm::kFp32>(c, span,
                                                                           {span.rounding, 0, 0});
    } else if (!span.rounding.stochastic) {
      UpdateRun<kRule, kGradDtype, kParamDtype, kSplit, MomentForm::kNearest>(
          c, span, {span.rounding, 0, 0});
    } else {
      ForEachRun(span.order, span.count, [&](uint64_t begin, uint64_t count, uint64_t index) {
        UpdateSpan run = Advanced(span, {kGradDtype, kParamDtype, kLayout}, begin);
        run.count = count;
        UpdateRun<kRule, kGradDtype, kParamDtype, kSplit, MomentForm::kStochastic>(
            c, run,
            {span.rounding, CounterOf(span.rounding, index), TweakOf(span.rounding, index)});
      });
    }
  }

  static void Publish() { hwy::FlushStream(); }

  template <int32_t kDtype>
  static void SumSquares(const void* grad, uint64_t count, double* block_sums) {
    const auto* elements = static_cast<const Stored<kDtype>*>(grad);
    constexpr uint64_t kElementsTogether = kBlocksTogether * kNormBlockElements;
    uint64_t i = 0;
    for (; i + kElementsTogether <= count; i += kElementsTogether, block_sums += kBlocksTogether)
      SumWholeBlocks<kDtype>(elements + i, block_sums);
    for (; i < count; i += kNormBlockElements)
      *block_sums++ = SumBlock<kDtype>(elements + i, std::min(count - i, kNormBlockElements));
  }

  template <int32_t kDtype>
  static void ToFp32(const void* source, uint64_t count, float* destination) {
    const auto* elements = static_cast<const Stored<kDtype>*>(source);
    const uint64_t whole = count - count % Lanes();
    for (uint64_t i = 0; i < whole; i += Lanes()) {
      hn::StoreU(LoadWide<kDtype>(elements + i), F32(), destination + i);
    }
    if (whole == count) return;
    Tail<Stored<kDtype>> narrow;
    Tail<float> wide;
    narrow.CopyIn(source, whole, count - whole);
    hn::StoreU(LoadWide<kDtype>(narrow.values), F32(), wide.values);
    wide.CopyOut(destination, whole, count - whole);
  }

  template <int32_t kDtype>
  static void Accumulate(const void* grad, uint64_t count, float* sum) {
    const auto* elements = static_cast<const Stored<kDtype>*>(grad);
    const uint64_t whole = count - count % Lanes();
    for (uint64_t i = 0; i < whole; i += Lanes()) {
      const Float old = hn::LoadU(F32(), sum + i);
      hn::StoreU(hn::Add(old, LoadWide<kDtype>(elements + i)), F32(), sum + i);
    }
    if (whole == count) return;
    Tail<Stored<kDtype>> narrow;
    Tail<float> wide;
    narrow.CopyIn(grad, whole, count - whole);
    wide.CopyIn(sum, whole, count - whole);
    const Float old = hn::LoadU(F32(), wide.values);
    hn::StoreU(hn::Add(old, LoadWide<kDtype>(narrow.values)), F32(), wide.values);
    wide.CopyOut(sum, whole, count - whole);
  }
};

#if HWY_TARGET == HWY_AVX3
constexpr const char* kIsa = "avx512";
#elif HWY_TARGET == HWY_AVX2
constexpr const char* kIsa = "avx2";
#elif HWY_TARGET == HWY_SVE
constexpr const char* kIsa = "sve";
#else
constexpr const char* kIsa = "neon";
#endif

}  // namespace

extern const KernelTable kTable;
constexpr KernelTable kTable = MakeTable<Kernels>(kIsa);

}  // namespace HWY_NAMESPACE
}  // namespace hybridopt
HWY_AFTER_NAMESPACE();

#endif  // HWY_NATIVE_FMA

#if HWY_ONCE

#if HWY_ARCH_X86
#include <cpuid.h>
#else
#include <bit>

#include "base/prim.h"
#endif

namespace hybridopt {
namespace {

#if HWY_ARCH_X86
// All that Highway lets the compiler use for a target, and that the system saves the registers.
// Some compilers' __builtin_cpu_supports does not know f16c.
bool HasF16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool HasAvx2() {
  return __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.1") &&
         __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt") &&
         __builtin_cpu_supports("avx") && __builtin_cpu_supports("avx2") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("fma") && HasF16c();
}

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}
#endif

// The tables this CPU runs, best first.
struct Usable {
  const KernelTable* tables[3];
  size_t count = 0;

  Usable() {
#if HWY_TARGETS & HWY_AVX3
    if (HasAvx512()) tables[count++] = &N_AVX3::kTable;
#endif
#if HWY_TARGETS & HWY_AVX2
    if (HasAvx2()) tables[count++] = &N_AVX2::kTable;
#endif
#if HWY_TARGETS & HWY_SVE
    const uint64_t sve_bytes = prim::SveVectorBytes();
    // Vectors of NEON's length would gain nothing. A length that is no power of two, as the first
    // SVE allowed, does not divide the norm's lanes.
    if (sve_bytes > 16 && std::has_single_bit(sve_bytes)) tables[count++] = &N_SVE::kTable;
#endif
#if HWY_TARGETS & HWY_NEON
    tables[count++] = &N_NEON::kTable;
#endif
#if HWY_TARGETS & HWY_SVE
    if (sve_bytes == 16) tables[count++] = &N_SVE::kTable;
#endif
  }
};

}  // namespace

std::span<const KernelTable* const> SimdKernels() {
  static const Usable usable;
  return {usable.tables, usable.count};
}

}  // namespace hybridopt

#endif  // HWY_ONCE
