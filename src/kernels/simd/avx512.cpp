// The kernels for AVX-512.
#ifdef __x86_64__
#define HYBRIDOPT_SIMD_TARGET HWY_AVX3
#include "kernels/simd/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/simd/avx512.cpp"
#include <hwy/foreach_target.h>
// foreach_target.h comes first; it includes this file again, once per target.
#include "kernels/simd/simd_kernels.h"
#endif
