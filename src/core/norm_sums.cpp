#include "core/norm_sums.h"

#include <algorithm>

namespace hybridopt {

Status NormSums::Sum(Context& context, std::span<const NormInput> inputs) {
  uint64_t total = 0;
  for (const NormInput& input : inputs) total += NormBlocksOf(input.count);
  const uint32_t workers = context.workers().threads();
  return context.workers().Run([&](uint32_t worker) {
    const WorkRange range = RangeOfWorker(total, 1, worker, workers);
    uint64_t block = 0;  // the input's first, counted through all inputs
    for (const NormInput& input : inputs) {
      const uint64_t blocks = NormBlocksOf(input.count);
      const uint64_t begin = std::max(range.begin, block) - block;
      const uint64_t end = std::min(range.end, block + blocks);
      block += blocks;
      if (end <= block - blocks + begin) continue;
      const uint64_t first = begin * kNormBlockElements;
      const uint64_t last = std::min(input.count, (end - (block - blocks)) * kNormBlockElements);
      context.kernels().SumSquares(input.dtype)(
          static_cast<const std::byte*>(input.grad) + first * DtypeBytes(input.dtype), last - first,
          blocks_.data() + input.first_block + begin);
    }
  });
}

}  // namespace hybridopt
