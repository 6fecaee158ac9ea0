// Reshard: which elements of stored shards go to which elements of a wanted shard. All shards may
// have any boxes and ranges. Pure.
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

// Calls visit for every segment, one stored shard after the other, and stops at the first failure.
// Within a pair of boxes `source` and `destination` ascend. The segments are not stored, because
// there may be as many segments as elements. All shards must have the same global shape.
Status ForEachSegment(std::span<const Shard* const> stored, const Shard& wanted,
                      FunctionRef<Status(const Segment&)> visit);

// OK if the stored shards hold each element of the wanted shard exactly once. Otherwise
// CHECKPOINT_MISMATCH names the first element that is missing, or CHECKPOINT_CORRUPT names two
// stored shards that hold the same element, and that element. The text does not name the param.
Status CheckCoverage(std::span<const Shard* const> stored, const Shard& wanted);

// OK if no two stored shards hold the same element; otherwise CHECKPOINT_CORRUPT as in
// CheckCoverage.
Status CheckDisjoint(std::span<const Shard* const> stored);

}  // namespace hybridopt::checkpoint
