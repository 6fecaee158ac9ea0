// An optimizer's entries in a manifest: the code that save and load share.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/format/format.h"
#include "state/param_table.h"
#include "state/shape.h"

namespace hybridopt {

// Makes the manifest of one rank, without files and params.
checkpoint::Manifest NewManifest(int32_t algorithm, uint64_t step, uint32_t world,
                                 bool masters_only, std::span<const offload_group_t> groups);

// "part-00001-of-00004.json": the file by which a rank gives its part of the manifest to rank 0. A
// finished checkpoint has no such file.
std::string PartFileName(uint32_t rank, uint32_t world);

// The slot in which the algorithm keeps this kind of state.
StateSlot SlotOf(int32_t algorithm, int32_t kind);

// The global shape as a vector.
std::vector<int64_t> ShapeOf(const Shard& shard);

}  // namespace hybridopt
