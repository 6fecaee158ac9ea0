// Which of the compiled tables this CPU can run. Each instruction set has a file (avx2.cpp), so
// that they are compiled beside each other.
#include "kernels/simd/simd_targets.h"
// The list of targets needs it first.
#include <hwy/detect_targets.h>

#if HWY_ARCH_X86
#include <cpuid.h>
#else
#include <bit>

#include "base/system.h"
#endif

#include "kernels/kernels.h"

namespace hybridopt {

// The tables of simd_kernels.h.
namespace N_AVX3 {
extern const KernelTable kTable;
}
namespace N_AVX2 {
extern const KernelTable kTable;
}
namespace N_SVE {
extern const KernelTable kTable;
}
namespace N_NEON {
extern const KernelTable kTable;
}

namespace {

#if HWY_ARCH_X86
// These check every instruction set that Highway lets the compiler use for a target, and that the
// system saves the registers of these instruction sets. Some compilers' __builtin_cpu_supports does
// not know f16c.
bool HasF16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool HasAvx2() {
  return __builtin_cpu_supports("ssse3") && __builtin_cpu_supports("sse4.1") &&
         __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("popcnt") &&
         __builtin_cpu_supports("avx") && __builtin_cpu_supports("avx2") &&
         __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2") &&
         __builtin_cpu_supports("fma") && HasF16c();
}

[[maybe_unused]] bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
}
#endif

// The tables that this CPU can run, the best one first.
struct Usable {
  const KernelTable* tables[3];
  size_t count = 0;

  Usable() {
#if HWY_TARGETS & HWY_AVX3
    if (HasAvx512()) tables[count++] = &N_AVX3::kTable;
#endif
#if HWY_TARGETS & HWY_AVX2
    if (HasAvx2()) tables[count++] = &N_AVX2::kTable;
#endif
#if HWY_TARGETS & HWY_SVE
    const uint64_t sve_bytes = system::SveVectorBytes();
    // SVE vectors of NEON's length are not faster than NEON. A length that is no power of two,
    // which the first SVE allowed, does not divide the number of the norm's lanes.
    if (sve_bytes > 16 && std::has_single_bit(sve_bytes)) tables[count++] = &N_SVE::kTable;
#endif
#if HWY_TARGETS & HWY_NEON
    tables[count++] = &N_NEON::kTable;
#endif
#if HWY_TARGETS & HWY_SVE
    if (sve_bytes == 16) tables[count++] = &N_SVE::kTable;
#endif
  }
};

}  // namespace

std::span<const KernelTable* const> SimdKernels() {
  static const Usable usable;
  return {usable.tables, usable.count};
}

}  // namespace hybridopt
