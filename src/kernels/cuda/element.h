// One element on its way through a rule, and how it is read and written. reference.cpp, line by
// line: the intrinsics are single correctly rounded operations that the compiler does not contract.
#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/convert.h"
#include "kernels/kernels.h"
#include "kernels/table.h"

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

// ---------------------------------------------------------------------- four elements at once --

inline constexpr uint32_t kQuad = 4;

template <typename T>
struct alignas(kQuad * sizeof(T)) Quad {
  T at[kQuad];
};

template <typename T>
__device__ Quad<T> LoadQuad(const T* array, uint64_t first) {
  return *reinterpret_cast<const Quad<T>*>(array + first);
}

template <typename T>
__device__ void StoreQuad(T* array, uint64_t first, const Quad<T>& quad) {
  *reinterpret_cast<Quad<T>*>(array + first) = quad;
}

// A span whose element types are known.
template <Rule kRule, int32_t kGradDtype, int32_t kParamDtype>
struct Arrays {
  using Grad = Element<kGradDtype>;
  using Param = Element<kParamDtype>;

  __device__ explicit Arrays(const UpdateSpan& span)
      : grad(static_cast<const typename Grad::Stored*>(span.grad)),
        param(static_cast<typename Param::Stored*>(span.param)),
        master(static_cast<float*>(span.master)),
        moment0(static_cast<float*>(span.moment0)),
        moment1(static_cast<float*>(span.moment1)) {}

  // What is read of four elements, before anything is written.
  struct Loaded {
    Quad<typename Grad::Stored> grad;
    Quad<float> master;
    Quad<float> moment0;
    Quad<float> moment1;
  };

  __device__ Loaded Load(uint64_t first) const {
    Loaded loaded;
    loaded.grad = LoadQuad(grad, first);
    loaded.master = LoadQuad(master, first);
    if constexpr (kHasMoment0<kRule>) loaded.moment0 = LoadQuad(moment0, first);
    if constexpr (kHasMoment1<kRule>) loaded.moment1 = LoadQuad(moment1, first);
    return loaded;
  }

  __device__ void UpdateAndStore(const Coefficients& c, uint64_t first, Loaded& loaded) const {
    Quad<typename Param::Stored> rounded;
#pragma unroll
    for (uint32_t i = 0; i < kQuad; ++i) {
      Value x = {Grad::Widen(loaded.grad.at[i]), loaded.master.at[i], 0.0f, 0.0f};
      if constexpr (kHasMoment0<kRule>) x.moment0 = loaded.moment0.at[i];
      if constexpr (kHasMoment1<kRule>) x.moment1 = loaded.moment1.at[i];
      Apply<kRule>(c, x);
      if constexpr (kHasMoment0<kRule>) loaded.moment0.at[i] = x.moment0;
      if constexpr (kHasMoment1<kRule>) loaded.moment1.at[i] = x.moment1;
      loaded.master.at[i] = x.param;
      rounded.at[i] = Param::Round(x.param);
    }
    if constexpr (kHasMoment0<kRule>) StoreQuad(moment0, first, loaded.moment0);
    if constexpr (kHasMoment1<kRule>) StoreQuad(moment1, first, loaded.moment1);
    StoreQuad(master, first, loaded.master);
    StoreQuad(param, first, rounded);
  }

  __device__ void UpdateOne(const Coefficients& c, uint64_t i) const {
    Value x = {Grad::Widen(grad[i]), master[i], 0.0f, 0.0f};
    if constexpr (kHasMoment0<kRule>) x.moment0 = moment0[i];
    if constexpr (kHasMoment1<kRule>) x.moment1 = moment1[i];
    Apply<kRule>(c, x);
    if constexpr (kHasMoment0<kRule>) moment0[i] = x.moment0;
    if constexpr (kHasMoment1<kRule>) moment1[i] = x.moment1;
    master[i] = x.param;
    param[i] = Param::Round(x.param);
  }

  const typename Grad::Stored* grad;
  typename Param::Stored* param;
  float* master;
  float* moment0;
  float* moment1;
};

}  // namespace hybridopt::cuda
