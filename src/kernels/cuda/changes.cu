// The survey and the collection of changes (kernels/changes/tiles.h): a thread block reads a tile,
// and each of its threads has the bits of 32 elements.
#include "kernels/changes/content_hash.h"
#include "kernels/cuda/cuda_kernels.h"

namespace hybridopt::cuda {
namespace {

constexpr uint32_t kBits = 32;
constexpr uint32_t kThreads = kChangeTileElements / kBits;
constexpr uint32_t kWarp = 32;
constexpr uint32_t kWarps = kThreads / kWarp;
constexpr uint32_t kAllThreads = 0xffffffff;

// The last row that starts at this thread block or before it.
__device__ const ChangeRow& RowOfBlock(const ChangeRow* rows, uint32_t row_count) {
  uint32_t first = 0;
  uint32_t last = row_count - 1;
  while (first < last) {
    const uint32_t middle = (first + last + 1) / 2;
    if (rows[middle].first_block <= blockIdx.x) {
      first = middle;
    } else {
      last = middle - 1;
    }
  }
  return rows[first];
}

// The bits of this thread's elements.
__device__ uint32_t ChangedOf(const ChangePart& part, uint64_t tile) {
  const uint64_t element = tile * kChangeTileElements + threadIdx.x * kBits;
  uint32_t changed = 0;
  if (element >= part.count) return changed;
  for (const uint64_t* words : part.bits.words)
    if (words != nullptr) changed |= reinterpret_cast<const uint32_t*>(words)[element / kBits];
  return changed;
}

// This thread's share of the tile's hash.
template <typename Stored>
__device__ uint64_t HashOf(const ChangeRow& row, uint64_t tile) {
  constexpr uint64_t kDistance = 0x9E3779B97F4A7C15;
  constexpr uint32_t kOfWord = sizeof(uint64_t) / sizeof(Stored);
  constexpr uint32_t kWords = kChangeTileElements / kOfWord;
  const auto* const elements =
      static_cast<const Stored*>(row.part.elements) + tile * kChangeTileElements;
  const uint64_t first_word = (row.part.first_tile + tile) * kWords + 1;
  const uint64_t left = row.part.count - tile * kChangeTileElements;
  uint64_t sum = 0;
  if (row.words != 0 && left >= kChangeTileElements) {
    const auto* const words = reinterpret_cast<const uint64_t*>(elements);
#pragma unroll
    for (uint32_t i = 0; i < kWords / kThreads; ++i) {
      const uint32_t word = i * kThreads + threadIdx.x;
      sum += MixBits(words[word] + (first_word + word) * kDistance);
    }
    return sum;
  }
  const auto count = static_cast<uint32_t>(min(left, kChangeTileElements));
  for (uint32_t word = threadIdx.x; word * kOfWord < count; word += kThreads) {
    uint64_t value = 0;
    for (uint32_t i = 0; i < kOfWord && word * kOfWord + i < count; ++i)
      value |= uint64_t{elements[word * kOfWord + i]} << (i * 8 * sizeof(Stored));
    sum += MixBits(value + (first_word + word) * kDistance);
  }
  return sum;
}

// What some threads of a tile have found; elements are 1 more, so that 0 means none.
struct Found {
  uint64_t hash;
  uint32_t count;
  uint32_t first;
  uint32_t last;
  uint32_t largest_gap;
};

// What the threads of this warp have found. `before` is the last changed element of earlier threads
// in the tile, and 1 more.
__device__ Found FoundByWarp(uint64_t hash, uint32_t changed, uint32_t before) {
  uint32_t gap = 0;
  for (uint32_t left = changed; left != 0; left &= left - 1) {
    const uint32_t element = threadIdx.x * kBits + static_cast<uint32_t>(__ffs(left));
    if (before != 0) gap = max(gap, element - before);
    before = element;
  }
  for (uint32_t half = kWarp / 2; half > 0; half /= 2)
    hash += __shfl_down_sync(kAllThreads, hash, half, kWarp);
  const uint32_t none = 0xffffffff;
  const uint32_t first =
      changed != 0 ? threadIdx.x * kBits + static_cast<uint32_t>(__ffs(changed)) : none;
  Found found;
  found.hash = hash;
  found.count = __reduce_add_sync(kAllThreads, static_cast<uint32_t>(__popc(changed)));
  found.first = __reduce_min_sync(kAllThreads, first);
  found.last = __reduce_max_sync(kAllThreads, changed != 0 ? before : 0);
  found.largest_gap = __reduce_max_sync(kAllThreads, gap);
  return found;
}

// The last changed element, and 1 more, of the threads of the tile before this one; 0: none.
__device__ uint32_t LastBefore(uint32_t changed, uint32_t* last_of_warp) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t warp = threadIdx.x / kWarp;
  uint32_t last = changed == 0 ? 0
                               : threadIdx.x * kBits + kBits -
                                     static_cast<uint32_t>(__clz(static_cast<int>(changed)));
  for (uint32_t distance = 1; distance < kWarp; distance *= 2) {
    const uint32_t other = __shfl_up_sync(kAllThreads, last, distance, kWarp);
    if (lane >= distance) last = max(last, other);
  }
  uint32_t before = __shfl_up_sync(kAllThreads, last, 1, kWarp);
  if (lane == 0) before = 0;
  if (lane == kWarp - 1) last_of_warp[warp] = last;
  __syncthreads();
  for (uint32_t i = 0; i < warp; ++i) before = max(before, last_of_warp[i]);
  return before;
}

__global__ void __launch_bounds__(kThreads)
    SurveyChanges(const ChangeRow* __restrict__ rows, uint32_t row_count, ChangeTile* tiles) {
  __shared__ uint32_t last_of_warp[kWarps];
  __shared__ Found of_warp[kWarps];
  const ChangeRow& row = RowOfBlock(rows, row_count);
  const uint64_t tile = blockIdx.x - row.first_block;
  const uint64_t hash = row.part.element_bytes == sizeof(uint16_t) ? HashOf<uint16_t>(row, tile)
                                                                   : HashOf<uint32_t>(row, tile);
  const uint32_t changed = ChangedOf(row.part, tile);
  const Found found = FoundByWarp(hash, changed, LastBefore(changed, last_of_warp));
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = found;
  __syncthreads();
  if (threadIdx.x != 0) return;
  Found all = of_warp[0];
  for (uint32_t i = 1; i < kWarps; ++i) {
    all.hash += of_warp[i].hash;
    all.count += of_warp[i].count;
    all.first = min(all.first, of_warp[i].first);
    all.last = max(all.last, of_warp[i].last);
    all.largest_gap = max(all.largest_gap, of_warp[i].largest_gap);
  }
  ChangeTile result{};
  result.hash = all.hash;
  if (all.count > 0) {
    result.count = static_cast<uint16_t>(all.count);
    result.first = static_cast<uint16_t>(all.first - 1);
    result.last = static_cast<uint16_t>(all.last - 1);
    result.largest_gap = static_cast<uint16_t>(all.largest_gap);
  }
  tiles[blockIdx.x] = result;
}

// How many elements have changed of the threads of the tile before this one.
__device__ uint32_t CountBefore(uint32_t changed, uint32_t* count_of_warp) {
  const uint32_t lane = threadIdx.x % kWarp;
  const uint32_t warp = threadIdx.x / kWarp;
  const auto mine = static_cast<uint32_t>(__popc(changed));
  uint32_t count = mine;
  for (uint32_t distance = 1; distance < kWarp; distance *= 2) {
    const uint32_t other = __shfl_up_sync(kAllThreads, count, distance, kWarp);
    if (lane >= distance) count += other;
  }
  if (lane == kWarp - 1) count_of_warp[warp] = count;
  __syncthreads();
  uint32_t before = count - mine;
  for (uint32_t i = 0; i < warp; ++i) before += count_of_warp[i];
  return before;
}

__device__ void WriteIndex(const ChangeOutput& output, uint32_t at, uint64_t index) {
  if (output.index_bytes == sizeof(uint64_t)) {
    reinterpret_cast<uint64_t*>(output.indices)[at] = index;
  } else {
    reinterpret_cast<uint32_t*>(output.indices)[at] = static_cast<uint32_t>(index);
  }
}

template <typename Stored>
__global__ void __launch_bounds__(kThreads)
    CollectChanges(const ChangeRow* __restrict__ rows, uint32_t row_count,
                   const uint32_t* __restrict__ starts, uint16_t* offsets, Stored* values) {
  __shared__ uint32_t count_of_warp[kWarps];
  const ChangeRow& row = RowOfBlock(rows, row_count);
  const uint64_t tile = blockIdx.x - row.first_block;
  const uint32_t changed = ChangedOf(row.part, tile);
  uint32_t to = starts[blockIdx.x] + CountBefore(changed, count_of_warp);
  const auto* const elements =
      static_cast<const Stored*>(row.part.elements) + tile * kChangeTileElements;
  const ChangeOutput& output = row.part.output;
  if (output.indices != nullptr) {
    to -= starts[row.first_block];
    auto* const values_to = reinterpret_cast<Stored*>(output.values);
    const uint64_t begin = (row.part.first_tile + tile) * kChangeTileElements;
    for (uint32_t left = changed; left != 0; left &= left - 1, ++to) {
      const uint32_t element = threadIdx.x * kBits + static_cast<uint32_t>(__ffs(left)) - 1;
      WriteIndex(output, to, begin + element);
      values_to[to] = elements[element];
    }
    return;
  }
  for (uint32_t left = changed; left != 0; left &= left - 1, ++to) {
    const uint32_t element = threadIdx.x * kBits + static_cast<uint32_t>(__ffs(left)) - 1;
    offsets[to] = static_cast<uint16_t>(element);
    values[to] = elements[element];
  }
}

}  // namespace

cudaError_t LaunchSurveyChanges(cudaStream_t stream, const ChangeRow* rows, uint32_t row_count,
                                uint32_t blocks, ChangeTile* tiles) {
  SurveyChanges<<<blocks, kThreads, 0, stream>>>(rows, row_count, tiles);
  return cudaGetLastError();
}

cudaError_t LaunchCollectChanges(cudaStream_t stream, const ChangeRow* rows, uint32_t row_count,
                                 uint32_t blocks, uint64_t element_bytes, const uint32_t* starts,
                                 uint16_t* offsets, std::byte* values) {
  if (element_bytes == sizeof(uint16_t)) {
    CollectChanges<<<blocks, kThreads, 0, stream>>>(rows, row_count, starts, offsets,
                                                    reinterpret_cast<uint16_t*>(values));
  } else {
    CollectChanges<<<blocks, kThreads, 0, stream>>>(rows, row_count, starts, offsets,
                                                    reinterpret_cast<uint32_t*>(values));
  }
  return cudaGetLastError();
}

cudaError_t LoadChangesKernels() {
  const void* const kernels[] = {
      reinterpret_cast<const void*>(SurveyChanges),
      reinterpret_cast<const void*>(CollectChanges<uint16_t>),
      reinterpret_cast<const void*>(CollectChanges<uint32_t>),
  };
  for (const void* kernel : kernels) {
    cudaFuncAttributes attributes;
    const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

}  // namespace hybridopt::cuda
