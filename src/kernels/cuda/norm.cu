// The norm in the fixed tree of kernels.h, the verdict on it, and the small kernels.
#include <cmath>

#include "kernels/convert.h"
#include "kernels/cuda/cuda_kernels.h"
#include "kernels/cuda/ordered_sum.h"
#include "kernels/cuda/piece.h"

namespace hybridopt::cuda {
namespace {

// Threads of a block that sums. The number is small, so that several blocks share even a small
// param.
constexpr uint32_t kThreads = 64;
constexpr uint32_t kTotalThreads = 128;
constexpr uint32_t kSmallThreads = 256;
constexpr uint64_t kSmallBlocksMax = 4096;
constexpr uint32_t kWarp = 32;
constexpr uint32_t kAllThreads = 0xffffffff;
constexpr uint32_t kRowsAtOnce = 8;

// A thread reads 16 bytes of each row of kNormLanes elements, and sums the lanes of these elements.
template <int32_t kDtype>
constexpr uint32_t kLanesOfThread = 16 / sizeof(typename Element<kDtype>::Stored);
template <int32_t kDtype>
constexpr uint32_t kThreadsOfBlock = kNormLanes / kLanesOfThread<kDtype>;

__host__ __device__ uint64_t NormBlocks(uint64_t count) {
  return (count + kNormBlockElements - 1) / kNormBlockElements;
}

// The product of two fp32 numbers is exact in double, so the fma rounds as the addition does.
__device__ double AddSquare(double sum, float value) {
  return __fma_rn(static_cast<double>(value), static_cast<double>(value), sum);
}

template <int32_t kDtype>
__device__ void SumBlock(const NormRow& row, uint32_t group, double* block_sums) {
  using Stored = typename Element<kDtype>::Stored;
  constexpr uint32_t kLanes = kLanesOfThread<kDtype>;
  constexpr uint32_t kParts = kThreadsOfBlock<kDtype>;
  const uint64_t block = uint64_t{group} * (kThreads / kParts) + threadIdx.x / kParts;
  const uint32_t part = threadIdx.x % kParts;
  const uint64_t begin = block * kNormBlockElements;
  // Threads without a norm block take part too, because all threads of a warp take part in its sum.
  const uint64_t left = begin < row.count ? row.count - begin : 0;
  const auto count = static_cast<uint32_t>(min(left, kNormBlockElements));
  const Stored* const elements = static_cast<const Stored*>(row.grad) + begin + part * kLanes;
  double lanes[kLanes] = {};
  uint32_t first = 0;  // element of the block at which the next row starts
  if (row.vectors) {
    const uint32_t whole = count / (kRowsAtOnce * kNormLanes) * (kRowsAtOnce * kNormLanes);
    for (; first < whole; first += kRowsAtOnce * kNormLanes) {
      Piece<Stored, kLanes> pieces[kRowsAtOnce];
#pragma unroll
      for (uint32_t r = 0; r < kRowsAtOnce; ++r)
        pieces[r] = LoadPiece<kLanes>(elements, first + r * kNormLanes);
#pragma unroll
      for (uint32_t r = 0; r < kRowsAtOnce; ++r)
#pragma unroll
        for (uint32_t l = 0; l < kLanes; ++l)
          lanes[l] = AddSquare(lanes[l], Element<kDtype>::Widen(pieces[r].at[l]));
    }
  }
  for (; first < count; first += kNormLanes)
#pragma unroll
    for (uint32_t l = 0; l < kLanes; ++l)
      if (first + part * kLanes + l < count)
        lanes[l] = AddSquare(lanes[l], Element<kDtype>::Widen(elements[first + l]));
#pragma unroll
  for (uint32_t half = kNormLanes / 2; half > 0; half /= 2) {
#pragma unroll
    for (uint32_t l = 0; l < kLanes; ++l) {
      if (half >= kLanes) {
        lanes[l] =
            __dadd_rn(lanes[l], __shfl_down_sync(kAllThreads, lanes[l], half / kLanes, kWarp));
      } else if (l < half) {
        lanes[l] = __dadd_rn(lanes[l], lanes[l + half]);
      }
    }
  }
  if (part == 0 && count > 0)
    block_sums[row.first_block + block] =
        isnan(lanes[0]) ? __longlong_as_double(0x7ff8000000000000) : lanes[0];
}

__global__ void __launch_bounds__(kThreads)
    BlockSums(const NormRow* __restrict__ rows, uint32_t row_count, double* block_sums) {
  uint32_t first = 0;
  uint32_t last = row_count - 1;
  while (first < last) {  // binary search for the last row that starts at this group or before
    const uint32_t middle = (first + last + 1) / 2;
    if (rows[middle].first_group <= blockIdx.x) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  const NormRow& row = rows[first];
  const uint32_t group = blockIdx.x - row.first_group;
  switch (row.dtype) {
    case OFFLOAD_FP32:
      return SumBlock<OFFLOAD_FP32>(row, group, block_sums);
    case OFFLOAD_BF16:
      return SumBlock<OFFLOAD_BF16>(row, group, block_sums);
    case OFFLOAD_FP16:
      return SumBlock<OFFLOAD_FP16>(row, group, block_sums);
  }
}

// One thread block per param adds the param's block sums in order. It stores the result in place of
// the param's first block sum.
__global__ void ParamSums(const NormRow* __restrict__ rows, double* block_sums) {
  const NormRow& row = rows[blockIdx.x];
  double* const sums = block_sums + row.first_block;
  const double sum = SumInOrder<kTotalThreads>(sums, NormBlocks(row.count));
  if (threadIdx.x == 0) sums[0] = sum;
}

// The function Decide of norm.cpp.
__device__ Verdict Decide(double sum_squares, double grad_scale, double grad_norm_max) {
  const double norm = __ddiv_rn(__dsqrt_rn(sum_squares), grad_scale);
  if (!isfinite(sum_squares)) {
    // The same NaN as on the host, so that results have the same bits.
    return {isnan(norm) ? __longlong_as_double(0x7ff8000000000000) : norm, 1.0, 0.0f, 1};
  }
  double clip = 1.0;
  if (grad_norm_max > 0.0) {
    const double factor = __ddiv_rn(grad_norm_max, __dadd_rn(norm, 1e-6));
    clip = factor < 1.0 ? factor : 1.0;
  }
  return {norm, clip, __double2float_rn(__ddiv_rn(clip, grad_scale)), 0};
}

// One warp adds the params' sums in order.
__global__ void VerdictOfSums(const NormRow* __restrict__ rows, uint32_t row_count,
                              const double* block_sums, NormTotal total, Verdict* verdict) {
  double sum = total.first ? 0.0 : verdict->grad_norm;
  for (uint32_t begin = 0; begin < row_count; begin += kWarp) {
    const uint32_t id = begin + threadIdx.x;
    const double mine = id < row_count ? block_sums[rows[id].first_block] : 0.0;
    const uint32_t held = min(kWarp, row_count - begin);
    for (uint32_t i = 0; i < held; ++i)
      sum = __dadd_rn(sum, __shfl_sync(kAllThreads, mine, static_cast<int>(i), kWarp));
  }
  __syncwarp();
  if (threadIdx.x != 0) return;
  if (total.last) {
    *verdict = Decide(sum, total.grad_scale, total.grad_norm_max);
  } else {
    verdict->grad_norm = sum;
  }
}

__global__ void SetVerdict(Verdict value, Verdict* verdict) { *verdict = value; }

template <typename T>
__global__ void Fill(T* destination, uint64_t count, T value) {
  const uint64_t step = uint64_t{gridDim.x} * kSmallThreads;
  for (uint64_t i = uint64_t{blockIdx.x} * kSmallThreads + threadIdx.x; i < count; i += step)
    destination[i] = value;
}

template <int32_t kDtype>
__global__ void FollowParams(const void* params, uint64_t count, float* masters) {
  const auto* const elements = static_cast<const typename Element<kDtype>::Stored*>(params);
  const uint64_t step = uint64_t{gridDim.x} * kSmallThreads;
  for (uint64_t i = uint64_t{blockIdx.x} * kSmallThreads + threadIdx.x; i < count; i += step)
    FollowParam<kDtype>(elements[i], &masters[i]);
}

uint32_t SmallBlocks(uint64_t count) {
  const uint64_t blocks = (count + kSmallThreads - 1) / kSmallThreads;
  return static_cast<uint32_t>(blocks < kSmallBlocksMax ? blocks : kSmallBlocksMax);
}

}  // namespace

uint32_t NormGroups(uint64_t count, int32_t dtype) {
  const uint32_t parts =
      dtype == OFFLOAD_FP32 ? kThreadsOfBlock<OFFLOAD_FP32> : kThreadsOfBlock<OFFLOAD_BF16>;
  const uint64_t blocks_at_once = kThreads / parts;
  return static_cast<uint32_t>((NormBlocks(count) + blocks_at_once - 1) / blocks_at_once);
}

cudaError_t LaunchBlockSums(cudaStream_t stream, const NormRow* rows, uint32_t row_count,
                            uint32_t groups, double* block_sums) {
  BlockSums<<<groups, kThreads, 0, stream>>>(rows, row_count, block_sums);
  return cudaGetLastError();
}

cudaError_t LaunchVerdictOfSums(cudaStream_t stream, const NormRow* rows, uint32_t row_count,
                                double* block_sums, const NormTotal& total, Verdict* verdict) {
  if (row_count > 0) ParamSums<<<row_count, kTotalThreads, 0, stream>>>(rows, block_sums);
  VerdictOfSums<<<1, kWarp, 0, stream>>>(rows, row_count, block_sums, total, verdict);
  return cudaGetLastError();
}

cudaError_t LaunchSetVerdict(cudaStream_t stream, const Verdict& value, Verdict* verdict) {
  SetVerdict<<<1, 1, 0, stream>>>(value, verdict);
  return cudaGetLastError();
}

cudaError_t LaunchFill(cudaStream_t stream, void* destination, uint64_t count,
                       const Pattern& pattern) {
  if (count == 0) return cudaSuccess;
  const uint32_t blocks = SmallBlocks(count);
  switch (pattern.bytes) {
    case 4:
      Fill<<<blocks, kSmallThreads, 0, stream>>>(static_cast<uint32_t*>(destination), count,
                                                 pattern.bits);
      break;
    case 2:
      Fill<<<blocks, kSmallThreads, 0, stream>>>(static_cast<uint16_t*>(destination), count,
                                                 static_cast<uint16_t>(pattern.bits));
      break;
    default:
      Fill<<<blocks, kSmallThreads, 0, stream>>>(static_cast<uint8_t*>(destination), count,
                                                 static_cast<uint8_t>(pattern.bits));
  }
  return cudaGetLastError();
}

cudaError_t LaunchFollowParams(cudaStream_t stream, const void* params, int32_t dtype,
                               uint64_t count, float* masters) {
  if (count == 0) return cudaSuccess;
  const auto kernel = dtype == OFFLOAD_FP32   ? FollowParams<OFFLOAD_FP32>
                      : dtype == OFFLOAD_BF16 ? FollowParams<OFFLOAD_BF16>
                                              : FollowParams<OFFLOAD_FP16>;
  kernel<<<SmallBlocks(count), kSmallThreads, 0, stream>>>(params, count, masters);
  return cudaGetLastError();
}

cudaError_t LoadUpdateKernels();   // update.cu
cudaError_t LoadMatrixKernels();   // matrix.cu
cudaError_t LoadChangesKernels();  // changes.cu

cudaError_t LoadKernels() {
  const void* const kernels[] = {
      reinterpret_cast<const void*>(BlockSums),
      reinterpret_cast<const void*>(ParamSums),
      reinterpret_cast<const void*>(VerdictOfSums),
      reinterpret_cast<const void*>(SetVerdict),
      reinterpret_cast<const void*>(Fill<uint32_t>),
      reinterpret_cast<const void*>(Fill<uint16_t>),
      reinterpret_cast<const void*>(Fill<uint8_t>),
      reinterpret_cast<const void*>(FollowParams<OFFLOAD_FP32>),
      reinterpret_cast<const void*>(FollowParams<OFFLOAD_BF16>),
      reinterpret_cast<const void*>(FollowParams<OFFLOAD_FP16>),
  };
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  for (const auto load : {LoadUpdateKernels, LoadMatrixKernels, LoadChangesKernels}) {
    const cudaError_t error = load();
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace hybridopt::cuda
