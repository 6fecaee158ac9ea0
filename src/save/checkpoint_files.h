// How this release's optimizers show in a checkpoint: shared by save and load.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/format/format.h"
#include "state/param_table.h"
#include "state/shape.h"

namespace hybridopt {

// A manifest of one rank, without files and params.
checkpoint::Manifest NewManifest(int32_t algorithm, uint64_t step, uint32_t world,
                                 bool masters_only, std::span<const offload_group_t> groups);

// "part-00001-of-00004.json": what a rank tells rank 0. None is left in a checkpoint.
std::string PartFileName(uint32_t rank, uint32_t world);

// How a state array's elements are stored.
checkpoint::Dtype StoredDtype(int32_t dtype);

// The slot of a kind that the algorithm keeps.
StateSlot SlotOf(int32_t algorithm, int32_t kind);

// The global shape as a vector.
std::vector<int64_t> ShapeOf(const Shard& shard);

}  // namespace hybridopt
