// bf16 and fp16 to and from fp32, in integer arithmetic alone, so that no floating-point mode can
// change a bit. Rounding is to nearest, ties to even. Denormals are converted exactly. A NaN stays
// NaN with its sign and the top bits of its payload. Vectors use the CPU's own conversions where
// they give the same bits.
#pragma once

#include <bit>
#include <cstdint>

#include "offload.h"

// CUDA's kernels use these functions too.
#ifdef __CUDACC__
#define HYBRIDOPT_EVERYWHERE __host__ __device__
#else
#define HYBRIDOPT_EVERYWHERE
#endif

namespace hybridopt {

inline constexpr float kBf16Max = 0x1.FEp127f;

HYBRIDOPT_EVERYWHERE inline float Bf16ToFp32(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

HYBRIDOPT_EVERYWHERE inline uint16_t Fp32ToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  // Rounding a NaN could carry from its payload into its sign, so its quiet bit is set instead.
  if (is_nan) return static_cast<uint16_t>((bits >> 16) | 0x0040);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// The same, but exact ties are rounded away from zero. Then the rounding error fits in 16 bits: it
// is the lower half, read as a signed number.
HYBRIDOPT_EVERYWHERE inline uint16_t Fp32ToBf16TiesAway(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const bool is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
  if (is_nan) return static_cast<uint16_t>((bits >> 16) | 0x0040);
  return static_cast<uint16_t>((bits + 0x8000) >> 16);
}

// A signalling NaN becomes quiet, as it does in the conversion instructions of x86 and Arm.
HYBRIDOPT_EVERYWHERE inline float Fp16ToFp32(uint16_t half) {
  const uint32_t sign = uint32_t{half & 0x8000u} << 16;
  const uint32_t exponent = (half >> 10) & 0x1F;
  const uint32_t mantissa = half & 0x3FF;
  if (exponent == 0x1F) {
    const uint32_t quiet = mantissa != 0 ? 0x00400000 : 0;
    return std::bit_cast<float>(sign | 0x7F800000 | quiet | (mantissa << 13));
  }
  if (exponent != 0)
    return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
  if (mantissa == 0) return std::bit_cast<float>(sign);
  // A denormal of fp16 is a normal fp32 number: its leading bit becomes the implicit one.
  const uint32_t shift = static_cast<uint32_t>(std::countl_zero(mantissa)) - 21;
  const uint32_t fraction = (mantissa << shift) & 0x3FF;
  return std::bit_cast<float>(sign | ((113 - shift) << 23) | (fraction << 13));
}

HYBRIDOPT_EVERYWHERE inline uint16_t Fp32ToFp16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  uint32_t half;
  if (magnitude > 0x7F800000) {  // NaN
    half = 0x7E00 | ((magnitude >> 13) & 0x3FF);
  } else if (magnitude >= 0x477FF000) {  // 65520 and above round to infinity
    half = 0x7C00;
  } else if (magnitude >= 0x38800000) {  // 2^-14 and above are normal
    half = (magnitude - 0x38000000 + 0xFFF + ((magnitude >> 13) & 1)) >> 13;
  } else {  // a multiple of 2^-24
    const uint32_t shift = 126 - (magnitude >> 23);
    const uint32_t significand = (magnitude & 0x007FFFFF) | 0x00800000;
    half = shift > 24
               ? 0
               : (significand + (1u << (shift - 1)) - 1 + ((significand >> shift) & 1)) >> shift;
  }
  return static_cast<uint16_t>(sign | half);
}

// The storage type of a dtype, and its conversions to and from fp32.
template <int32_t kDtype>
struct Element;

template <>
struct Element<OFFLOAD_FP32> {
  using Stored = float;
  HYBRIDOPT_EVERYWHERE static float Widen(float stored) { return stored; }
  HYBRIDOPT_EVERYWHERE static float Round(float value) { return value; }
};

template <>
struct Element<OFFLOAD_BF16> {
  using Stored = uint16_t;
  HYBRIDOPT_EVERYWHERE static float Widen(uint16_t stored) { return Bf16ToFp32(stored); }
  HYBRIDOPT_EVERYWHERE static uint16_t Round(float value) { return Fp32ToBf16(value); }
};

template <>
struct Element<OFFLOAD_FP16> {
  using Stored = uint16_t;
  HYBRIDOPT_EVERYWHERE static float Widen(uint16_t stored) { return Fp16ToFp32(stored); }
  HYBRIDOPT_EVERYWHERE static uint16_t Round(float value) { return Fp32ToFp16(value); }
};

// Whether the two bf16 numbers nearest to it are equally far.
HYBRIDOPT_EVERYWHERE inline bool IsTieOfBf16(float value) {
  return (std::bit_cast<uint32_t>(value) & 0xFFFF) == 0x8000;
}

// One element of FollowParamsFunction (kernels.h).
template <int32_t kDtype>
HYBRIDOPT_EVERYWHERE void FollowParam(typename Element<kDtype>::Stored param, float* master) {
  if constexpr (kDtype == OFFLOAD_FP32) {
    *master = param;
  } else {
    bool is_rounded = Element<kDtype>::Round(*master) == param;
    if constexpr (kDtype == OFFLOAD_BF16)
      is_rounded = is_rounded || Fp32ToBf16TiesAway(*master) == param;
    if (!is_rounded) *master = Element<kDtype>::Widen(param);
  }
}

}  // namespace hybridopt
