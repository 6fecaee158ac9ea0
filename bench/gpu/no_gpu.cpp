// Replaces gpu.cpp in a build without CUDA.
#include <cstdio>
#include <cstdlib>

#include "suites.h"

namespace bench {

void MeasureGpu(const Settings&, Report&) {
  std::fprintf(stderr, "hybridopt_bench: --gpu: this build has no CUDA (HYBRIDOPT_CUDA)\n");
  std::exit(1);
}

void MeasureGpuExecutors(const Settings& settings, Report& report) { MeasureGpu(settings, report); }

}  // namespace bench
