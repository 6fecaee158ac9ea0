#include "device/cuda/stream_name.h"

#ifdef HYBRIDOPT_HAS_NVTX
#include <nvtx3/nvToolsExtCudaRt.h>

#include <cstdio>
#endif

namespace hybridopt::cuda {

#ifdef HYBRIDOPT_HAS_NVTX
void NameStream(cudaStream_t stream, const char* name) {
  char full[64];
  std::snprintf(full, sizeof full, "hybridopt %s", name);
  nvtxNameCudaStreamA(stream, full);
}
#else
void NameStream(cudaStream_t, const char*) {}
#endif

}  // namespace hybridopt::cuda
