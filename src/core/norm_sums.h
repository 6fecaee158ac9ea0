// NormSums: the sums of squares of gradients that the host has, block by block in the fixed tree of
// kernels.h. They are made when a gradient lands, or by the step itself where params are in host
// memory.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/context.h"
#include "core/placement.h"
#include "device/device.h"

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
  explicit NormSums(const Placement& placement) : blocks_(placement.norm_blocks) {}

  // The workers sum these gradients, whose addresses are host addresses here.
  Status Sum(Context& context, std::span<const NormInput> inputs);

  const double* blocks(uint64_t first_block) const { return blocks_.data() + first_block; }

 private:
  std::vector<double> blocks_;
};

}  // namespace hybridopt
