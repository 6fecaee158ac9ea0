// Reshard: which elements of stored shards go where in a wanted shard, for any boxes and ranges of
// both. Pure.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "base/shard.h"
#include "base/status.h"

namespace hybridopt::checkpoint {

// `count` elements that are contiguous in both shards.
struct Segment {
  uint32_t shard;        // index of the stored shard
  uint64_t source;       // first element, counted in the stored shard
  uint64_t destination;  // first element, counted in the wanted shard
  uint64_t count;        // above 0
};

// Calls visit for every segment, stored shard by stored shard, and stops at the first failure.
// Within a pair of boxes `source` and `destination` ascend. Does not store the segments, because
// there may be as many as elements. All shards have one global shape.
Status ForEachSegment(std::span<const Shard* const> stored, const Shard& wanted,
                      FunctionRef<Status(const Segment&)> visit);

// Whether the stored shards hold each element of the wanted one exactly once. Else
// CHECKPOINT_MISMATCH names the first element that is missing, or CHECKPOINT_CORRUPT two stored
// shards that both hold an element and where. The text does not name the param.
Status CheckCoverage(std::span<const Shard* const> stored, const Shard& wanted);

// Whether no two of them hold the same element: CHECKPOINT_CORRUPT as above.
Status CheckDisjoint(std::span<const Shard* const> stored);

}  // namespace hybridopt::checkpoint
