// The targets for which Google Highway includes a file again. To be included before Highway's
// foreach_target.h. Only targets with a true fused multiply-add are built, because only they give
// the bits of the specification. Only Highway's headers are used: its library keeps process-wide
// state about the CPU.
#pragma once

#define HWY_COMPILE_ALL_ATTAINABLE
#define HWY_DISABLE_PCLMUL_AES
// SSE has no fused multiply-add. What Highway numbers below AVX3 (AVX3_DL, AVX3_ZEN4, ...) is newer
// than AVX-512 and has no instruction that is used here. AVX-512's instructions for bf16 flush
// denormals to zero. HWY_SVE works with vectors of any length: SVE2 and the targets for one length
// have no instruction that is used here either. A file with the kernels of one instruction set
// skips the others. A build with sanitizers has AVX2 alone: they make each take minutes to compile.
#if defined(HYBRIDOPT_SIMD_TARGET)
#define HYBRIDOPT_SKIPPED_TARGETS ((HWY_AVX3 | HWY_AVX2 | HWY_SVE) & ~HYBRIDOPT_SIMD_TARGET)
#elif defined(HYBRIDOPT_ONE_SIMD_TARGET)
#define HYBRIDOPT_SKIPPED_TARGETS HWY_AVX3
#else
#define HYBRIDOPT_SKIPPED_TARGETS 0
#endif
#define HWY_DISABLED_TARGETS                                                                 \
  (HWY_SSSE3 | HWY_SSE4 | (HWY_AVX3 - 1) | HWY_SVE2 | HWY_SVE_256 | HWY_SVE2_128 | HWY_RVV | \
   HWY_WASM | HWY_WASM_EMU256 | HYBRIDOPT_SKIPPED_TARGETS)

#ifdef __FAST_MATH__
#error "The arithmetic is exact: build without -ffast-math."
#endif
