// Overlap: whether boxes share an element. Comparing each with each takes too long for the many
// shards of a large world, and for what a forged checkpoint may claim.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <utility>

#include "base/shard.h"

namespace hybridopt {

struct OverlapSearch {
  std::optional<std::pair<uint32_t, uint32_t>> found;  // indices of two boxes, the lower one first
  uint64_t looked_at = 0;  // boxes and pairs of boxes: what the search has cost
};

// Finds two boxes that share an element, if there are any; boxes without elements share none. n
// boxes of which none overlap cost about n log n for each dimension that tells them apart.
OverlapSearch FindOverlap(std::span<const Box> boxes, uint32_t dimensions);

}  // namespace hybridopt
