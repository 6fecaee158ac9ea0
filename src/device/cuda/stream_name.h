// What NVIDIA's profilers call a stream.
#pragma once

#include <cuda_runtime_api.h>

namespace hybridopt::cuda {

// "hybridopt " and the name of what runs on it. Nothing without a profiler.
void NameStream(cudaStream_t stream, const char* name);

}  // namespace hybridopt::cuda
