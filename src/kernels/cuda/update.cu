// The update of many params in one launch. A thread block finds its row by its tile, then runs the
// code of that row's dtypes.
#include "kernels/cuda/element.h"
#include "kernels/cuda/launch.h"

namespace hybridopt::cuda {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kBlocksOfProcessor = 4;  // at least; enough bytes under way to fill the memory
constexpr uint64_t kStride = kThreads * kQuad;  // elements that a thread block reads at once

// The last row that starts at this tile or before.
__device__ const UpdateRow& RowOfTile(const UpdateRow* rows, uint32_t row_count, uint32_t tile) {
  uint32_t first = 0;
  uint32_t last = row_count - 1;
  while (first < last) {
    const uint32_t middle = (first + last + 1) / 2;
    if (rows[middle].first_tile <= tile) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return rows[first];
}

template <Rule kRule, int32_t kGradDtype, int32_t kParamDtype>
__device__ void UpdateTile(const UpdateRow& row, const Coefficients& c, uint64_t begin,
                           uint64_t end) {
  const Arrays<kRule, kGradDtype, kParamDtype> arrays(row.span);
  uint64_t done = begin;
  if (row.vectors) {
    const uint64_t whole = begin + (end - begin) / kQuad * kQuad;
    done = whole;
    // Two quads at a time: both are under way before the first is needed.
    for (uint64_t first = begin + threadIdx.x * kQuad; first < whole; first += 2 * kStride) {
      const uint64_t second = first + kStride;
      auto a = arrays.Load(first);
      if (second < whole) {
        auto b = arrays.Load(second);
        arrays.UpdateAndStore(c, first, a);
        arrays.UpdateAndStore(c, second, b);
      } else {
        arrays.UpdateAndStore(c, first, a);
      }
    }
  }
  for (uint64_t i = done + threadIdx.x; i < end; i += kThreads) arrays.UpdateOne(c, i);
}

template <Rule kRule, int32_t kGradDtype>
__device__ void UpdateTile(const UpdateRow& row, const Coefficients& c, uint64_t begin,
                           uint64_t end) {
  switch (row.param_dtype) {
    case OFFLOAD_FP32:
      return UpdateTile<kRule, kGradDtype, OFFLOAD_FP32>(row, c, begin, end);
    case OFFLOAD_BF16:
      return UpdateTile<kRule, kGradDtype, OFFLOAD_BF16>(row, c, begin, end);
    case OFFLOAD_FP16:
      return UpdateTile<kRule, kGradDtype, OFFLOAD_FP16>(row, c, begin, end);
  }
}

template <Rule kRule>
__global__ void __launch_bounds__(kThreads, kBlocksOfProcessor)
    Update(const UpdateRow* __restrict__ rows, uint32_t row_count, const Verdict* verdict) {
  if (verdict->skip != 0) return;
  const UpdateRow& row = RowOfTile(rows, row_count, blockIdx.x);
  Coefficients c = row.coefficients;
  c.grad_factor = __fmul_rn(c.grad_factor, verdict->grad_factor);
  const uint64_t begin = (blockIdx.x - row.first_tile) * kTileElements;
  const uint64_t end = min(begin + kTileElements, row.span.count);
  switch (row.grad_dtype) {
    case OFFLOAD_FP32:
      return UpdateTile<kRule, OFFLOAD_FP32>(row, c, begin, end);
    case OFFLOAD_BF16:
      return UpdateTile<kRule, OFFLOAD_BF16>(row, c, begin, end);
    case OFFLOAD_FP16:
      return UpdateTile<kRule, OFFLOAD_FP16>(row, c, begin, end);
  }
}

using UpdateKernel = void (*)(const UpdateRow*, uint32_t, const Verdict*);
constexpr UpdateKernel kKernels[kRuleCount] = {Update<Rule::kAdam>, Update<Rule::kSgdMomentum>,
                                               Update<Rule::kSgdPlain>, Update<Rule::kLion>,
                                               Update<Rule::kAdagrad>};

}  // namespace

cudaError_t LaunchUpdate(cudaStream_t stream, Rule rule, const UpdateRow* rows, uint32_t row_count,
                         uint32_t tiles, const Verdict* verdict) {
  kKernels[static_cast<int32_t>(rule)]<<<tiles, kThreads, 0, stream>>>(rows, row_count, verdict);
  return cudaGetLastError();
}

cudaError_t LoadUpdateKernels() {
  for (UpdateKernel kernel : kKernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace hybridopt::cuda
