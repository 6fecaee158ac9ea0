// NormSums: the sums of squares of gradients that the host has, block by block in the fixed tree of
// kernels.h. They are made when a gradient lands, or by the step itself where params are in host
// memory.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "device/device.h"
#include "machine/context.h"
#include "runtime/work_pieces.h"
#include "state/placement.h"

namespace hybridopt {

inline uint64_t NormBlocksOf(uint64_t count) {
  return (count + kNormBlockElements - 1) / kNormBlockElements;
}

// The blocks of one param, added in order.
inline double AddBlocks(const double* blocks, uint64_t count) {
  double sum = 0;
  for (uint64_t block = 0; block < NormBlocksOf(count); ++block) sum += blocks[block];
  return sum;
}

class NormSums {
 public:
  NormSums(const Placement& placement, uint32_t workers)
      : blocks_(placement.lanes.norm_blocks), pieces_(workers) {}

  // The workers sum these gradients, in registration order and none empty. Addresses are host
  // addresses here.
  Status Sum(Context& context, std::span<const NormInput> inputs);

  const double* blocks(uint64_t first_block) const { return blocks_.data() + first_block; }

 private:
  void SumPiece(const KernelTable& kernels, std::span<const NormInput> inputs,
                const WorkRange& piece);

  std::vector<double> blocks_;
  WorkPieces pieces_;
};

}  // namespace hybridopt
