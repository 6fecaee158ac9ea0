// HostNormSums: sums of squares of the gradients that are on the host, one sum for each norm block,
// in the fixed tree of kernels.h. When a move offloads gradients, the device computes their sums
// beside the copies (Mover::OffloadGrads says when the workers compute them instead). The workers
// compute the sums of gradients that were accumulated on the host and, in a step on the `host`
// device, the sums of all gradients.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "device/device.h"
#include "machine/context.h"
#include "runtime/work_pieces.h"

namespace hybridopt {

// Adds the block sums of one param, in order. `count` is the param's elements.
inline double AddBlocks(const double* blocks, uint64_t count) {
  double sum = 0;
  for (uint64_t block = 0; block < NormBlocksOf(count); ++block) sum += blocks[block];
  return sum;
}

class HostNormSums {
 public:
  HostNormSums(uint64_t block_count, uint32_t workers) : blocks_(block_count), pieces_(workers) {}

  // Has the workers compute the block sums of these gradients, which are in registration order, not
  // empty, and in host memory.
  Status Sum(Context& context, std::span<const NormInput> inputs);
  // Stores the block sums of one gradient, which the device has computed.
  void Set(uint64_t first_block, std::span<const double> blocks) {
    std::copy(blocks.begin(), blocks.end(), blocks_.begin() + static_cast<ptrdiff_t>(first_block));
  }

  const double* blocks(uint64_t first_block) const { return blocks_.data() + first_block; }

 private:
  void SumPiece(const KernelTable& kernels, std::span<const NormInput> inputs,
                const WorkRange& piece);

  std::vector<double> blocks_;
  WorkPieces pieces_;
};

}  // namespace hybridopt
