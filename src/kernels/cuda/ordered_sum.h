// A sum of doubles in their order, which a thread block makes. All its threads read, and the first
// one adds.
#pragma once

#include <cstdint>

namespace hybridopt::cuda {

constexpr uint32_t kSumTile = 1024;

// Returns the sum in the block's first thread, and 0 in the others. `kThreads` is the number of
// threads of the block.
template <uint32_t kThreads>
__device__ double SumInOrder(const double* values, uint64_t count) {
  __shared__ double tile[kSumTile];
  double sum = 0;
  for (uint64_t begin = 0; begin < count; begin += kSumTile) {
    const auto held = static_cast<uint32_t>(min(uint64_t{kSumTile}, count - begin));
    for (uint32_t i = threadIdx.x; i < held; i += kThreads) tile[i] = values[begin + i];
    __syncthreads();
    if (threadIdx.x == 0)
      for (uint32_t i = 0; i < held; ++i) sum = __dadd_rn(sum, tile[i]);
    __syncthreads();
  }
  return sum;
}

}  // namespace hybridopt::cuda
