// The floating-point mode of an application that was built with fast math: denormals become zero.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>

namespace hybridopt {

inline void SetFlushToZero() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // FTZ, DAZ
#elif defined(__aarch64__)
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  asm volatile("msr fpcr, %0" ::"r"(mode | uint64_t{1} << 24));
#endif
}

// Tests results instead of the mode: a denormal operand and a denormal result.
inline bool FlushesToZero() {
  volatile float smallest = 1e-40f, half = 0.5f, normal = 1.5e-38f;
  volatile float from_denormal = smallest * 1e10f, to_denormal = normal * half;
  return from_denormal == 0.0f || to_denormal == 0.0f;
}

}  // namespace hybridopt
