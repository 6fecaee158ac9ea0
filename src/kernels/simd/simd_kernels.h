// The kernels for one instruction set and their table. Each instruction set has a file that
// includes this one (avx2.cpp), so that they are compiled beside each other. As in reference.cpp,
// the rules are those of rules.inc.
#if defined(HYBRIDOPT_KERNELS_SIMD_KERNELS_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HYBRIDOPT_KERNELS_SIMD_KERNELS_H
#undef HYBRIDOPT_KERNELS_SIMD_KERNELS_H
#else
#define HYBRIDOPT_KERNELS_SIMD_KERNELS_H
#endif

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "kernels/kernels.h"
#include "kernels/matrix/product.h"
#include "kernels/simd/simd_norm.h"
#include "kernels/simd/simd_rules.h"
#include "kernels/simd/simd_unit.h"
#include "kernels/simd/span_units.h"
#include "kernels/stochastic_rounding.h"
#include "kernels/table.h"

// Highway includes this file for the static target too, which has a table only if it is the one
// that the including file asks for.
#if HWY_TARGET == HYBRIDOPT_SIMD_TARGET

HWY_BEFORE_NAMESPACE();
namespace hybridopt {
namespace HWY_NAMESPACE {

void MultiplyTile(const MatrixProduct& product, uint64_t tile);  // simd_product.cpp

namespace {

// Whether all arrays of a unit have elements that can be read in pairs.
template <Rule kRule, SpanTypes kTypes>
constexpr bool IsPaired() {
  return VectorCodec<kTypes.formats.master>::kCanPair && kTypes.grad_dtype == OFFLOAD_BF16 &&
         (VectorCodec<kTypes.formats.moment0>::kCanPair || !kHasMoment0<kRule>);
}

// Computes the update of the unit at `begin` and stores nothing.
template <Rule kRule, SpanTypes kTypes, bool kMayBeNan>
HWY_INLINE void UpdateUnit(const Coefficients& c, const UpdateSpan& span, uint64_t begin,
                           const Value& first, const Value& second) {
  constexpr bool kInPairs = IsPaired<kRule, kTypes>();
  const auto* grad = static_cast<const Stored<kTypes.grad_dtype>*>(span.grad);
  LoadUnit<kTypes.grad_dtype, kInPairs>(grad + begin, first.grad, second.grad);
  first.grad = hn::Mul(first.grad, Broadcast(c.grad_factor));
  second.grad = hn::Mul(second.grad, Broadcast(c.grad_factor));
  VectorCodec<kTypes.formats.master>::template LoadMasters<kInPairs, kMayBeNan>(
      span, begin, first.param, second.param);
  if constexpr (kHasMoment0<kRule>)
    VectorCodec<kTypes.formats.moment0>::template LoadMoments<kInPairs>(
        span.moment0, begin, first.moment0, second.moment0);
  if constexpr (kHasMoment1<kRule>)
    VectorCodec<kTypes.formats.moment1>::template LoadMoments<kInPairs>(
        span.moment1, begin, first.moment1, second.moment1);
  Apply<kRule>(c, first.grad, first.param, first.moment0, first.moment1);
  Apply<kRule>(c, second.grad, second.param, second.moment0, second.moment1);
}

template <Rule kRule, SpanTypes kTypes, bool kRandomly, bool kMayBeNan, bool kNotes>
HWY_INLINE void StoreUnit(const Value& first, const Value& second, const UpdateSpan& span,
                          const RangeRounding& range, const ParamStore& store, uint64_t begin) {
  constexpr bool kInPairs = IsPaired<kRule, kTypes>();
  auto first0 = hn::Zero(U32()), second0 = first0, first1 = first0, second1 = first0;
  auto first_master = first0, second_master = first0;
  if constexpr (kRandomly)
    RandomBitsOfUnit<kInPairs>(range.counter + static_cast<uint32_t>(begin), range.tweak,
                               {first0, second0, first1, second1, first_master, second_master});
  if constexpr (kHasMoment0<kRule>)
    VectorCodec<kTypes.formats.moment0>::template StoreMoments<kRandomly, kInPairs,
                                                               kMoment0IsSum<kRule>, kMayBeNan>(
        first.moment0, second.moment0, first0, second0, span.moment0, begin);
  if constexpr (kHasMoment1<kRule>)
    VectorCodec<kTypes.formats.moment1>::template StoreMoments<kRandomly, kInPairs,
                                                               kMoment1IsSum<kRule>, kMayBeNan>(
        first.moment1, second.moment1, first1, second1, span.moment1, begin);
  VectorCodec<kTypes.formats.master>::template StoreMasters<kTypes.param_dtype, kRandomly, kInPairs,
                                                            kMayBeNan, kNotes>(
      first.param, second.param, span, range.rounding, store, begin, first_master, second_master);
}

// Whether a value that the unit rounds to bf16 may be NaN.
template <Rule kRule, SpanTypes kTypes>
HWY_INLINE bool RoundsNan(const Value& first, const Value& second) {
  constexpr bool kParams = kTypes.param_dtype == OFFLOAD_BF16;
  constexpr bool kMoments =
      kHasMoment0<kRule> && !kMoment0IsSum<kRule> && Codec<kTypes.formats.moment0>::kIsRounded;
  constexpr bool kParamsTell = kParams && AlgorithmOf(kRule).nan_reaches_param;
  bool nan = false;
  if constexpr (kParams) nan = MayHaveNan(first.param, second.param);
  if constexpr (kMoments && !kParamsTell) nan = nan || MayHaveNan(first.moment0, second.moment0);
  return nan;
}

// Updates one unit. Without kMayBeNan it stores nothing and returns false if a value may be NaN;
// with kMayBeNan it tests every value.
template <Rule kRule, SpanTypes kTypes, bool kRandomly, bool kMayBeNan, bool kNotes>
HWY_INLINE bool TryUnit(const Coefficients& c, const UpdateSpan& span, const RangeRounding& range,
                        const ParamStore& store, uint64_t begin) {
  Float grad0 = Broadcast(0), param0 = grad0, first0 = grad0, second0 = grad0;
  Float grad1 = grad0, param1 = grad0, first1 = grad0, second1 = grad0;
  const Value first = {grad0, param0, first0, second0};
  const Value second = {grad1, param1, first1, second1};
  UpdateUnit<kRule, kTypes, kMayBeNan>(c, span, begin, first, second);
  if (!kMayBeNan && HWY_UNLIKELY((RoundsNan<kRule, kTypes>(first, second)))) return false;
  StoreUnit<kRule, kTypes, kRandomly, kMayBeNan, kNotes>(first, second, span, range, store, begin);
  return true;
}

template <Rule kRule, SpanTypes kTypes, bool kRandomly>
HWY_NOINLINE void UpdateNanUnit(Coefficients c, UpdateSpan span, RangeRounding range,
                                ParamStore store, uint64_t begin) {
  TryUnit<kRule, kTypes, kRandomly, true, true>(c, span, range, store, begin);
}

// Updates whole units: an UpdateUnitsFunction. The arguments are copies, here and in the functions
// called, so that no store can alias them. Notes have a loop of their own, so that updates without
// them need no instruction for them.
template <Rule kRule, SpanTypes kTypes, bool kRandomly, bool kNotes>
void UpdateUnits(const Coefficients c, const UpdateSpan span, const RangeRounding range) {
  const auto param_address = reinterpret_cast<uintptr_t>(span.param);
  const ParamStore store = {span.param == span.master,
                            param_address % (Unit() * sizeof(uint16_t)) == 0};
  const auto try_unit = [&](uint64_t i) HWY_ATTR {
    return TryUnit<kRule, kTypes, kRandomly, false, kNotes>(c, span, range, store, i);
  };
  for (uint64_t i = 0; i < span.count; i += Unit()) {
#if HWY_HAVE_SCALABLE
    // Without this call gcc 12 increments the counter of the loop below before the store.
    if (!try_unit(i)) TryUnit<kRule, kTypes, kRandomly, true, kNotes>(c, span, range, store, i);
#else
    // A call inside the loop would use the registers of the loop's constants.
    while (i < span.count && try_unit(i)) i += Unit();
    if (i < span.count) UpdateNanUnit<kRule, kTypes, kRandomly>(c, span, range, store, i);
#endif
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

// Whether the params of a unit equal their rounded masters, and none is NaN or, in bf16, a tie.
template <int32_t kDtype>
HWY_INLINE bool AreRounded(const uint16_t* param, const float* master) {
  const Float first = hn::LoadU(F32(), master), second = hn::LoadU(F32(), master + Lanes());
  if (HWY_UNLIKELY(MayHaveNan(first, second))) return false;
  const auto stored = hn::LoadU(U16(), param);
  if constexpr (kDtype == OFFLOAD_FP16)
    return hn::AllTrue(U16(), hn::Eq(Pack<kDtype, false>(first, second, {}), stored));
  const auto half = hn::Set(U32(), 0x8000);
  const auto first_bits = hn::Add(hn::BitCast(U32(), first), half);
  const auto second_bits = hn::Add(hn::BitCast(U32(), second), half);
  const auto rounded = hn::Eq(PackUpper<false>(first_bits, second_bits), stored);
  const auto no_tie = hn::Ne(PackLower<false>(first_bits, second_bits), hn::Zero(U16()));
  return hn::AllTrue(U16(), hn::And(rounded, no_tie));
}

template <Rule kRule, SpanTypes kTypes>
constexpr UnitsFunctions kToNearest = {UpdateUnits<kRule, kTypes, false, false>,
                                       UpdateUnits<kRule, kTypes, false, true>};

template <Rule kRule, SpanTypes kTypes>
constexpr UnitsFunctions kAtRandom = [] {
  if constexpr (RoundsState<kRule>(kTypes.formats))
    return UnitsFunctions{UpdateUnits<kRule, kTypes, true, false>,
                          UpdateUnits<kRule, kTypes, true, true>};
  return UnitsFunctions{};
}();

struct Kernels {
  template <Rule kRule, SpanTypes kTypes>
  static void Update(const Coefficients& c, const UpdateSpan& span) {
    static_assert(kUnitMax <= kUnitMost);
    UpdateInUnits({kTypes, Unit(), kToNearest<kRule, kTypes>, kAtRandom<kRule, kTypes>}, c, span);
  }

  static void Publish() { hwy::FlushStream(); }

  static void CopyPastCaches(void* to, const void* from, uint64_t bytes) {
    const hn::ScalableTag<uint8_t> vector;
    const uint64_t vector_bytes = hn::Lanes(vector);
    auto* const target = static_cast<uint8_t*>(to);
    const auto* const source = static_cast<const uint8_t*>(from);
    const uint64_t past_boundary = reinterpret_cast<uintptr_t>(to) % vector_bytes;
    uint64_t done = std::min((vector_bytes - past_boundary) % vector_bytes, bytes);
    std::memcpy(target, source, done);
    for (; done + vector_bytes <= bytes; done += vector_bytes)
      hn::Stream(hn::LoadU(vector, source + done), vector, target + done);
    std::memcpy(target + done, source + done, bytes - done);
  }

  template <int32_t kDtype>
  static void SumSquares(const void* grad, uint64_t count, double* block_sums) {
    const auto* elements = static_cast<const Stored<kDtype>*>(grad);
    for (uint64_t i = 0; i < count; i += kNormBlockElements)
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

  // The bits of a unit are whole bytes.
  template <int32_t kDtype>
  static void FollowParams(const void* param, uint64_t count, float* master, uint8_t* changed) {
    const FollowParamsFunction follow = ReferenceKernels().FollowParams(kDtype);
    if constexpr (kDtype == OFFLOAD_FP32) {
      follow(param, count, master, changed);
    } else {
      const auto* elements = static_cast<const uint16_t*>(param);
      for (uint64_t begin = 0; begin < count; begin += Unit()) {
        const uint64_t now = std::min(Unit(), count - begin);
        uint8_t* const noted = changed == nullptr ? nullptr : changed + begin / 8;
        if (now < Unit() || HWY_UNLIKELY(!AreRounded<kDtype>(elements + begin, master + begin)))
          follow(elements + begin, now, master + begin, noted);
        else if (noted != nullptr)
          std::memset(noted, 0, Unit() / 8);
      }
    }
  }

  static void MultiplyTile(const MatrixProduct& product, uint64_t tile) {
    HWY_NAMESPACE::MultiplyTile(product, tile);
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

#endif  // HWY_TARGET == HYBRIDOPT_SIMD_TARGET

#endif  // per-target include guard
