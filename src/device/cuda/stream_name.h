// The names of streams in NVIDIA's profilers.
#pragma once

#include <cuda_runtime_api.h>

namespace hybridopt::cuda {

// Names the stream "hybridopt <name>". Does nothing without a profiler.
void NameStream(cudaStream_t stream, const char* name);

}  // namespace hybridopt::cuda
