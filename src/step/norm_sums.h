// NormSums: the sums of squares of gradients that the host has, block by block in the fixed tree of
// kernels.h. The device makes them before a gradient comes down; the workers make those of sums
// that were added up on the host, and the step itself those of params in host memory.
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

// The blocks of one param, added in order.
inline double AddBlocks(const double* blocks, uint64_t count) {
  double sum = 0;
  for (uint64_t block = 0; block < NormBlocksOf(count); ++block) sum += blocks[block];
  return sum;
}

class NormSums {
 public:
  NormSums(uint64_t block_count, uint32_t workers) : blocks_(block_count), pieces_(workers) {}

  // The workers sum these gradients, in registration order and none empty. Addresses are host
  // addresses here.
  Status Sum(Context& context, std::span<const NormInput> inputs);
  // Those of one gradient, which the device has made.
  void Take(uint64_t first_block, std::span<const double> blocks) {
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
