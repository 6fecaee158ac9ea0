// The sums of squares, in the tree of kernels.h. A part of simd_kernels.h, like simd_rules.h.
#if defined(HYBRIDOPT_KERNELS_SIMD_NORM_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HYBRIDOPT_KERNELS_SIMD_NORM_H
#undef HYBRIDOPT_KERNELS_SIMD_NORM_H
#else
#define HYBRIDOPT_KERNELS_SIMD_NORM_H
#endif

#include <hwy/highway.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/kernels.h"
#include "kernels/simd/simd_unit.h"

#if HWY_NATIVE_FMA

HWY_BEFORE_NAMESPACE();
namespace hybridopt {
namespace HWY_NAMESPACE {
namespace {

// The norm's lanes are vectors of double. The product is exact, so an fma rounds as the addition
// does.
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

// AddRows adds the squares of `count` elements of one norm block, in rows of kNormLanes, to the
// block's lanes. Blocks are summed one after the other. Two blocks at once would be two streams of
// loads, each too short for the CPU's prefetcher, at half the speed (docs/PERFORMANCE.md).
#if HWY_HAVE_SCALABLE
// Adds the squares for kVectors vectors of lanes, 4, 2 or 1. SVE vectors cannot be array elements,
// so each vector is a variable.
template <int32_t kDtype, uint64_t kVectors>
HWY_INLINE void AddRowsOf(const Stored<kDtype>* grad, uint64_t count, double* lanes) {
  const uint64_t vector = hn::Lanes(F64());
  const uint64_t at1 = 1 % kVectors * vector, at2 = 2 % kVectors * vector;
  const uint64_t at3 = 3 % kVectors * vector;
  Double sums0 = hn::LoadU(F64(), lanes);
  Double sums1 = hn::LoadU(F64(), lanes + at1);
  Double sums2 = hn::LoadU(F64(), lanes + at2);
  Double sums3 = hn::LoadU(F64(), lanes + at3);
  for (uint64_t i = 0; i < count; i += kNormLanes) {
    sums0 = AddSquares<kDtype>(grad + i, sums0);
    if constexpr (kVectors > 1) sums1 = AddSquares<kDtype>(grad + i + at1, sums1);
    if constexpr (kVectors > 2) sums2 = AddSquares<kDtype>(grad + i + at2, sums2);
    if constexpr (kVectors > 2) sums3 = AddSquares<kDtype>(grad + i + at3, sums3);
  }
  hn::StoreU(sums0, F64(), lanes);
  if constexpr (kVectors > 1) hn::StoreU(sums1, F64(), lanes + at1);
  if constexpr (kVectors > 2) hn::StoreU(sums2, F64(), lanes + at2);
  if constexpr (kVectors > 2) hn::StoreU(sums3, F64(), lanes + at3);
}

template <int32_t kDtype>
HWY_INLINE void AddRows(const Stored<kDtype>* grad, uint64_t count, double* lanes) {
  const uint64_t vectors = kNormLanes / hn::Lanes(F64());
  if (vectors == 1) return AddRowsOf<kDtype, 1>(grad, count, lanes);
  if (vectors == 2) return AddRowsOf<kDtype, 2>(grad, count, lanes);
  for (uint64_t k = 0; k < kNormLanes; k += 4 * hn::Lanes(F64()))
    AddRowsOf<kDtype, 4>(grad + k, count, lanes + k);
}
#else
// Adds the squares of two vectors of elements. The cheapest way to widen bf16 is to shift the even
// elements up and to mask the odd ones. So consecutive lanes belong to the two vectors in turn.
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

template <int32_t kDtype>
HWY_INLINE void AddRows(const Stored<kDtype>* grad, uint64_t count, double* lanes) {
  constexpr uint64_t kPairElements = 2 * HWY_LANES(double);
  constexpr uint64_t kPairs = kNormLanes / kPairElements;
  Double sums0[kPairs], sums1[kPairs];
#pragma GCC unroll 4
  for (uint64_t k = 0; k < kPairs; ++k)
    LoadLanes<kDtype>(lanes + k * kPairElements, sums0[k], sums1[k]);
  for (uint64_t i = 0; i < count; i += kNormLanes) {
#pragma GCC unroll 4
    for (uint64_t k = 0; k < kPairs; ++k)
      AddPairOfSquares<kDtype>(grad + i + k * kPairElements, sums0[k], sums1[k]);
  }
#pragma GCC unroll 4
  for (uint64_t k = 0; k < kPairs; ++k)
    StoreLanes<kDtype>(sums0[k], sums1[k], lanes + k * kPairElements);
}
#endif

HWY_INLINE double SumLanes(double* lanes) {
  for (uint32_t half = kNormLanes / 2; half > 0; half /= 2) {
    for (uint32_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return std::isnan(lanes[0]) ? std::numeric_limits<double>::quiet_NaN() : lanes[0];
}

// The sum of one block of at most kNormBlockElements. The padding is zeros, which change no bit.
template <int32_t kDtype>
double SumBlock(const Stored<kDtype>* grad, uint64_t count) {
  double lanes[kNormLanes] = {};
  const uint64_t whole = count - count % kNormLanes;
  AddRows<kDtype>(grad, whole, lanes);
  if (whole < count) {
    Stored<kDtype> padded[kNormLanes] = {};
    std::memcpy(padded, grad + whole, (count - whole) * sizeof(padded[0]));
    AddRows<kDtype>(padded, kNormLanes, lanes);
  }
  return SumLanes(lanes);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace hybridopt
HWY_AFTER_NAMESPACE();

#endif  // HWY_NATIVE_FMA

#endif  // per-target include guard
