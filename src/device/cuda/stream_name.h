// What NVIDIA's profilers call a stream.
#pragma once

#include <cuda_runtime_api.h>

namespace hybridopt::cuda {

// Names the stream "hybridopt " and `name`. Does nothing without a profiler.
void NameStream(cudaStream_t stream, const char* name);

}  // namespace hybridopt::cuda
