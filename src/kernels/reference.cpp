// The specification of all kernels: the rules of rules.inc on one number at a time, norms and
// conversions. Every other implementation gives the same bits.
#include <cfloat>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/convert.h"
#include "kernels/kernels.h"
#include "kernels/matrix/product.h"
#include "kernels/stochastic_rounding.h"
#include "kernels/table.h"

#ifdef __FAST_MATH__
#error "The arithmetic is exact: build without -ffast-math."
#endif

namespace hybridopt {
namespace {

// The operations in which rules.inc is written, on one number.
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
  // If two NaNs are added, the instruction decides which of them is the result. So every NaN is
  // replaced by the same NaN.
  return std::isnan(lanes[0]) ? std::numeric_limits<double>::quiet_NaN() : lanes[0];
}

uint32_t RandomBitsOf(const UpdateSpan& span, uint64_t element) {
  if (!span.rounding.stochastic) return 0;
  const uint64_t index = IndexOf(span.order, element);
  return RandomBits(CounterOf(span.rounding, index), TweakOf(span.rounding, index));
}

// Whether the param may be another one if its master changes.
template <int32_t kDtype>
bool MayDiffer(float old, float now) {
  if constexpr (kDtype == OFFLOAD_FP32)
    return std::bit_cast<uint32_t>(old) != std::bit_cast<uint32_t>(now);
  if (std::isnan(old + now)) return true;
  if constexpr (kDtype == OFFLOAD_FP16) return Fp32ToFp16(old) != Fp32ToFp16(now);
  return IsTieOfBf16(old) || IsTieOfBf16(now) || Fp32ToBf16(old) != Fp32ToBf16(now);
}

// Sets or clears the bit of an element; the bits of earlier elements have been written.
void Note(uint8_t* bits, uint64_t i, bool changed) {
  if (i % 8 == 0) bits[i / 8] = 0;
  bits[i / 8] |= static_cast<uint8_t>(changed << (i % 8));
}

// Reads and stores the master and the param that it is rounded to.
template <int32_t kParamDtype, Format kFormat>
struct Weights {
  using Param = Element<kParamDtype>;
  using Master = Codec<kFormat>;
  using Stored = typename Master::Stored;

  static float Load(const UpdateSpan& span, uint64_t i) {
    const Stored stored = static_cast<const Stored*>(span.master)[i];
    if constexpr (Master::kBesideParam)
      return Master::Decode(stored, static_cast<const uint16_t*>(span.param)[i]);
    else
      return Master::Decode(stored);
  }
  static void Store(const UpdateSpan& span, uint64_t i, float value, uint32_t random) {
    const float kept = Master::Keep(value, span.rounding.stochastic, random);
    const bool ties_away =
        Master::kBesideParam || (kParamDtype == OFFLOAD_BF16 && span.rounding.ties_away);
    const auto param = static_cast<typename Param::Stored>(ties_away ? Fp32ToBf16TiesAway(kept)
                                                                     : Param::Round(kept));
    auto& stored_param = static_cast<typename Param::Stored*>(span.param)[i];
    if (span.changed != nullptr) {
      if constexpr (Master::kBesideParam)
        Note(span.changed, i, stored_param != param);
      else
        Note(span.changed, i, MayDiffer<kParamDtype>(Load(span, i), kept));
    }
    static_cast<Stored*>(span.master)[i] = Master::Encode(kept);
    stored_param = param;
  }
};

struct Kernels {
  template <Rule kRule, SpanTypes kTypes>
  static void Update(const Coefficients& c, const UpdateSpan& span) {
    using Grad = Element<kTypes.grad_dtype>;
    using Weight = Weights<kTypes.param_dtype, kTypes.formats.master>;
    using Moment0 = Codec<kTypes.formats.moment0>;
    using Moment1 = Codec<kTypes.formats.moment1>;
    const auto* grad = static_cast<const typename Grad::Stored*>(span.grad);
    auto* moment0 = static_cast<typename Moment0::Stored*>(span.moment0);
    auto* moment1 = static_cast<typename Moment1::Stored*>(span.moment1);
    const bool stochastic = span.rounding.stochastic;
    for (uint64_t i = 0; i < span.count; ++i) {
      float new_param = Weight::Load(span, i);
      float new_moment0 = kHasMoment0<kRule> ? Moment0::Decode(moment0[i]) : 0.0f;
      float new_moment1 = kHasMoment1<kRule> ? Moment1::Decode(moment1[i]) : 0.0f;
      Apply<kRule>(c, Grad::Widen(grad[i]) * c.grad_factor, new_param, new_moment0, new_moment1);
      const uint32_t random = RoundsState<kRule>(kTypes.formats) ? RandomBitsOf(span, i) : 0;
      if constexpr (kHasMoment0<kRule>)
        moment0[i] = Moment0::template EncodeMoment<kMoment0IsSum<kRule>>(new_moment0, stochastic,
                                                                          random & 0xFFFF);
      if constexpr (kHasMoment1<kRule>)
        moment1[i] = Moment1::template EncodeMoment<kMoment1IsSum<kRule>>(new_moment1, stochastic,
                                                                          random >> 16);
      Weight::Store(span, i, new_param, MasterBits(random));
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
  static void FollowParams(const void* param, uint64_t count, float* master, uint8_t* changed) {
    const auto* elements = static_cast<const typename Element<kDtype>::Stored*>(param);
    for (uint64_t i = 0; i < count; ++i) {
      const float before = master[i];
      FollowParam<kDtype>(elements[i], &master[i]);
      if (changed != nullptr) Note(changed, i, MayDiffer<kDtype>(before, master[i]));
    }
  }

  static void MultiplyTile(const MatrixProduct& product, uint64_t tile) {
    hybridopt::MultiplyTile(product, tile);
  }
};

constexpr KernelTable kTable = MakeTable<Kernels>("reference");

}  // namespace

const KernelTable& ReferenceKernels() { return kTable; }

}  // namespace hybridopt
