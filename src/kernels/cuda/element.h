// The rules on the GPU. Each intrinsic is one correctly rounded operation; the compiler does not
// contract several of them into one.
#pragma once

#include <cfloat>

#include "kernels/kernels.h"

namespace hybridopt::cuda {

// The operations in which rules.inc is written, on one number.
#define HYBRIDOPT_RULE __device__ inline
using Float = float;
__device__ inline float Broadcast(float value) { return value; }
__device__ inline float Sum(float a, float b) { return __fadd_rn(a, b); }
__device__ inline float Difference(float a, float b) { return __fsub_rn(a, b); }
__device__ inline float Product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float Quotient(float a, float b) { return __fdiv_rn(a, b); }
__device__ inline float Root(float value) { return __fsqrt_rn(value); }
__device__ inline float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ inline float Lerp(float old, float next, float keep, float weight) {
  return weight < 0.5f ? __fmaf_rn(weight, __fsub_rn(next, old), old)
                       : __fmaf_rn(keep, __fsub_rn(old, next), next);
}
__device__ inline float Saturate(float value) { return value < FLT_MAX ? value : FLT_MAX; }
__device__ inline float IfAbove(float a, float b, float yes, float no) { return a > b ? yes : no; }

#include "kernels/rules.inc"

}  // namespace hybridopt::cuda
