// The specification of all kernels: the rules of rules.inc on one number at a time, norms and
// conversions. Every other implementation gives the same bits.
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/convert.h"
#include "kernels/kernels.h"
#include "kernels/stochastic_rounding.h"
#include "kernels/table.h"

#ifdef __FAST_MATH__
#error "The arithmetic is exact: build without -ffast-math."
#endif

namespace hybridopt {
namespace {

// The operations that rules.inc is written in, on one number.
#define HYBRIDOPT_RULE inline
using Float = float;
inline float Broadcast(float value) { return value; }
inline float Sum(float a, float b) { return a + b; }
inline float Difference(float a, float b) { return a - b; }
inline float Product(float a, float b) { return a * b; }
inline float Quotient(float a, float b) { return a / b; }
inline float Root(float value) { return std::sqrt(value); }
inline float Fma(float a, float b, float c) { return std::fma(a, b, c); }
inline float Lerp(float old, float next, float keep, float weight) {
  return weight < 0.5f ? std::fma(weight, next - old, old) : std::fma(keep, old - next, next);
}
inline float Saturate(float value) { return value < FLT_MAX ? value : FLT_MAX; }
inline float IfAbove(float a, float b, float yes, float no) { return a > b ? yes : no; }

#include "kernels/rules.inc"

template <int32_t kDtype>
double SumSquaresOfBlock(const typename Element<kDtype>::Stored* grad, uint64_t count) {
  double lanes[kNormLanes] = {};
  for (uint64_t i = 0; i < count; ++i) {
    const double value = Element<kDtype>::Widen(grad[i]);
    lanes[i % kNormLanes] += value * value;  // the product of two fp32 numbers is exact in double
  }
  for (uint32_t half = kNormLanes / 2; half > 0; half /= 2) {
    for (uint32_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  // Which of two NaNs an addition returns depends on the instruction, so all NaNs are replaced by
  // one.
  return std::isnan(lanes[0]) ? std::numeric_limits<double>::quiet_NaN() : lanes[0];
}

// Stores a moment. A sum of squares is kept finite.
template <bool kBf16>
struct Moment {
  using Stored = float;
  static float Widen(float stored) { return stored; }
  template <bool kIsSum>
  static float Round(float value, const Rounding&, uint32_t) {
    return value;
  }
};

template <>
struct Moment<true> {
  using Stored = uint16_t;
  static float Widen(uint16_t stored) { return Bf16ToFp32(stored); }
  template <bool kIsSum>
  static uint16_t Round(float value, const Rounding& rounding, uint32_t random) {
    if (kIsSum) value = value < kBf16Max ? value : kBf16Max;
    return rounding.stochastic ? Fp32ToBf16Randomly(value, random) : Fp32ToBf16(value);
  }
};

uint32_t RandomBitsOf(const UpdateSpan& span, uint64_t element) {
  if (!span.rounding.stochastic) return 0;
  const uint64_t index = IndexOf(span.order, element);
  return RandomBits(CounterOf(span.rounding, index), TweakOf(span.rounding, index));
}

// Stores the param and, if masters are not split, the master.
template <int32_t kParamDtype, bool kSplit>
struct Weights {
  using Param = Element<kParamDtype>;
  static float Load(const UpdateSpan& span, uint64_t i) {
    return static_cast<const float*>(span.master)[i];
  }
  static void Store(const UpdateSpan& span, uint64_t i, float value) {
    static_cast<float*>(span.master)[i] = value;
    const bool ties_away = kParamDtype == OFFLOAD_BF16 && span.rounding.ties_away;
    static_cast<typename Param::Stored*>(span.param)[i] =
        ties_away ? Fp32ToBf16TiesAway(value) : Param::Round(value);
  }
};

template <>
struct Weights<OFFLOAD_BF16, true> {
  static float Load(const UpdateSpan& span, uint64_t i) {
    return JoinHalves(static_cast<const uint16_t*>(span.param)[i],
                      static_cast<const uint16_t*>(span.master)[i]);
  }
  static void Store(const UpdateSpan& span, uint64_t i, float value) {
    static_cast<uint16_t*>(span.param)[i] = Fp32ToBf16TiesAway(value);
    static_cast<uint16_t*>(span.master)[i] = LowHalf(value);
  }
};

struct Kernels {
  template <Rule kRule, int32_t kGradDtype, int32_t kParamDtype, StateLayout kLayout>
  static void Update(const Coefficients& c, const UpdateSpan& span) {
    using Grad = Element<kGradDtype>;
    using Weight = Weights<kParamDtype, IsSplit(kLayout)>;
    using Stored = Moment<HasBf16Moments(kLayout)>;
    const auto* grad = static_cast<const typename Grad::Stored*>(span.grad);
    auto* moment0 = static_cast<typename Stored::Stored*>(span.moment0);
    auto* moment1 = static_cast<typename Stored::Stored*>(span.moment1);
    for (uint64_t i = 0; i < span.count; ++i) {
      float new_param = Weight::Load(span, i);
      float new_moment0 = kHasMoment0<kRule> ? Stored::Widen(moment0[i]) : 0.0f;
      float new_moment1 = kHasMoment1<kRule> ? Stored::Widen(moment1[i]) : 0.0f;
      Apply<kRule>(c, Grad::Widen(grad[i]) * c.grad_factor, new_param, new_moment0, new_moment1);
      const uint32_t random = HasBf16Moments(kLayout) ? RandomBitsOf(span, i) : 0;
      if constexpr (kHasMoment0<kRule>)
        moment0[i] = Stored::template Round<kMoment0IsSum<kRule>>(new_moment0, span.rounding,
                                                                  random & 0xFFFF);
      if constexpr (kHasMoment1<kRule>)
        moment1[i] =
            Stored::template Round<kMoment1IsSum<kRule>>(new_moment1, span.rounding, random >> 16);
      Weight::Store(span, i, new_param);
    }
  }

  static void Publish() {}

  static void CopyPastCaches(void* to, const void* from, uint64_t bytes) {
    std::memcpy(to, from, bytes);
  }

  template <int32_t kDtype>
  static void SumSquares(const void* grad, uint64_t count, double* block_sums) {
    const auto* elements = static_cast<const typename Element<kDtype>::Stored*>(grad);
    for (uint64_t begin = 0; begin < count; begin += kNormBlockElements) {
      const uint64_t left = count - begin;
      *block_sums++ = SumSquaresOfBlock<kDtype>(
          elements + begin, left < kNormBlockElements ? left : kNormBlockElements);
    }
  }

  template <int32_t kDtype>
  static void ToFp32(const void* source, uint64_t count, float* destination) {
    const auto* elements = static_cast<const typename Element<kDtype>::Stored*>(source);
    for (uint64_t i = 0; i < count; ++i) destination[i] = Element<kDtype>::Widen(elements[i]);
  }

  template <int32_t kDtype>
  static void Accumulate(const void* grad, uint64_t count, float* sum) {
    const auto* elements = static_cast<const typename Element<kDtype>::Stored*>(grad);
    for (uint64_t i = 0; i < count; ++i) sum[i] = sum[i] + Element<kDtype>::Widen(elements[i]);
  }

  template <int32_t kDtype>
  static void FollowParams(const void* param, uint64_t count, float* master) {
    const auto* elements = static_cast<const uint16_t*>(param);
    for (uint64_t i = 0; i < count; ++i) FollowParam<kDtype>(elements[i], &master[i]);
  }
};

constexpr KernelTable kTable = MakeTable<Kernels>("reference");

}  // namespace

const KernelTable& ReferenceKernels() { return kTable; }

}  // namespace hybridopt
