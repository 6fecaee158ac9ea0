// The kernels for NEON.
#ifdef __aarch64__
#define HYBRIDOPT_SIMD_TARGET HWY_NEON
#include "kernels/simd/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/simd/neon.cpp"
#include <hwy/foreach_target.h>
// foreach_target.h comes first; it includes this file again, once per target.
#include "kernels/simd/simd_kernels.h"
#endif
