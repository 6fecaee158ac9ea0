// One element on its way through a rule. reference.cpp, line by line: the intrinsics are single
// correctly rounded operations that the compiler does not contract.
#pragma once

#include <cfloat>

#include "kernels/kernels.h"

namespace hybridopt::cuda {

struct Value {
  float grad;
  float param;
  float moment0;
  float moment1;
};

__device__ inline float Lerp(float old, float next, float keep, float weight) {
  return weight < 0.5f ? __fmaf_rn(weight, __fsub_rn(next, old), old)
                       : __fmaf_rn(keep, __fsub_rn(old, next), next);
}

__device__ inline float Saturate(float value) { return value < FLT_MAX ? value : FLT_MAX; }

__device__ inline void Adam(const Coefficients& c, Value& x) {
  const float grad = __fmaf_rn(c.l2_decay, x.param, x.grad);
  x.moment0 = Lerp(x.moment0, grad, c.keep0, c.weight0);
  const float square = Saturate(__fmul_rn(grad, grad));
  x.moment1 = Lerp(x.moment1, square, c.keep1, c.weight1);
  const float root = __fsqrt_rn(x.moment1);
  const float denominator = __fmaf_rn(root, c.inverse_sqrt_bias_correction2, c.eps);
  const float quotient = __fdiv_rn(x.moment0, denominator);
  float update = __fmaf_rn(c.step_size, quotient, 0.0f);
  update = __fmaf_rn(c.decoupled_decay, x.param, update);
  x.param = __fsub_rn(x.param, update);
}

__device__ inline void SgdMomentum(const Coefficients& c, Value& x) {
  const float grad = __fmaf_rn(c.l2_decay, x.param, x.grad);
  const float weighted = __fmul_rn(c.weight0, grad);
  x.moment0 = __fmaf_rn(c.keep0, x.moment0, weighted);
  const float direction = c.nesterov ? __fmaf_rn(c.nesterov_momentum, x.moment0, grad) : x.moment0;
  const float update = __fmaf_rn(c.step_size, direction, 0.0f);
  x.param = __fsub_rn(x.param, update);
}

__device__ inline void SgdPlain(const Coefficients& c, Value& x) {
  const float grad = __fmaf_rn(c.l2_decay, x.param, x.grad);
  const float update = __fmaf_rn(c.step_size, grad, 0.0f);
  x.param = __fsub_rn(x.param, update);
}

__device__ inline void Lion(const Coefficients& c, Value& x) {
  const float interpolated = Lerp(x.moment0, x.grad, c.keep0, c.weight0);
  const float sign = interpolated > 0.0f ? 1.0f : interpolated < 0.0f ? -1.0f : 0.0f;
  float update = __fmaf_rn(c.step_size, sign, 0.0f);
  update = __fmaf_rn(c.decoupled_decay, x.param, update);
  x.param = __fsub_rn(x.param, update);
  x.moment0 = Lerp(x.moment0, x.grad, c.keep1, c.weight1);
}

__device__ inline void Adagrad(const Coefficients& c, Value& x) {
  const float grad = __fmaf_rn(c.l2_decay, x.param, x.grad);
  x.moment0 = Saturate(__fmaf_rn(grad, grad, x.moment0));
  const float root = __fsqrt_rn(x.moment0);
  const float denominator = __fadd_rn(root, c.eps);
  const float quotient = __fdiv_rn(grad, denominator);
  const float update = __fmaf_rn(c.step_size, quotient, 0.0f);
  x.param = __fsub_rn(x.param, update);
}

template <Rule kRule>
__device__ void Apply(const Coefficients& c, Value& x) {
  x.grad = __fmul_rn(x.grad, c.grad_factor);
  if constexpr (kRule == Rule::kAdam) Adam(c, x);
  if constexpr (kRule == Rule::kSgdMomentum) SgdMomentum(c, x);
  if constexpr (kRule == Rule::kSgdPlain) SgdPlain(c, x);
  if constexpr (kRule == Rule::kLion) Lion(c, x);
  if constexpr (kRule == Rule::kAdagrad) Adagrad(c, x);
}

}  // namespace hybridopt::cuda
