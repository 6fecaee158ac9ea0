// Vectors of fp32 and the rules on them, in the line order of reference.cpp. A part of simd.cpp,
// which includes it again for each instruction set, as Highway wants it.
#if defined(HYBRIDOPT_KERNELS_SIMD_RULES_H) == defined(HWY_TARGET_TOGGLE)
#ifdef HYBRIDOPT_KERNELS_SIMD_RULES_H
#undef HYBRIDOPT_KERNELS_SIMD_RULES_H
#else
#define HYBRIDOPT_KERNELS_SIMD_RULES_H
#endif

#include <hwy/highway.h>

#include <cfloat>

#include "kernels/convert.h"
#include "kernels/kernels.h"

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

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace hybridopt
HWY_AFTER_NAMESPACE();

#endif  // HWY_NATIVE_FMA

#endif  // per-target include guard
