// How much memory an optimizer's state and pipeline need: computed from the fractions, before any
// memory is taken, at commit and at each change of the fractions.
#pragma once

#include <vector>

#include "machine/context.h"
#include "machine/lanes.h"
#include "state/chunk_table.h"

namespace hybridopt {

// Everything that follows from the fractions.
struct Arrangement {
  ByTier<double> fractions;  // see Residence
  Residence residence;
  ChunkTable chunks;
  LaneSizes lanes;
  // Whether the device has too little memory for a ring that the options do not ask for.
  bool lacks_room = false;
  // Bytes of state that a ring on the device needs to be pinned, but the cap does not allow.
  uint64_t unpinned_bytes = 0;
};

// The default size of the device's ring, in chunks of the largest size.
uint32_t DefaultStreamChunks(const StateShape& shape);
// Computes the sizes from which the pipeline's lanes are made.
LaneSizes LaneSizesOf(const StateShape& shape, const Residence& residence,
                      const ChunkTable& chunks);

Arrangement Arrange(const ParamTable& table, const StateShape& shape,
                    const ByTier<double>& fractions);

// Pinned memory that commit takes, without the state that is pinned for a ring.
inline uint64_t PinnedBytesOf(const StateShape& shape, const offload_plan_t& plan) {
  const uint64_t disk_bytes = shape.options.streams_disk() ? plan.host_disk_bytes : 0;
  return disk_bytes + plan.staging_bytes + plan.host_params_bytes + plan.host_grads_bytes +
         plan.host_swap_bytes + plan.host_early_bytes + plan.host_save_bytes;
}

// The whole plan except the field `fits`.
Result<offload_plan_t> PlanOf(const Context& context, const ParamTable& table,
                              const StateShape& shape, const Arrangement& arrangement);

// Replaces the plan's bytes on NUMA nodes.
void SetNodeBytes(const NodeBytes& bytes, offload_plan_t& plan);

// OUT_OF_DEVICE_MEMORY or OUT_OF_HOST_MEMORY if these bytes are not free. The text starts with
// `what`, which names the user of the memory. `available` is the plan's host_available_bytes: to
// read it again would take a dozen files of the system.
Status CheckDeviceRoom(const Context& context, const char* what, double device_fraction,
                       uint64_t bytes);
Status CheckHostRoom(const char* what, uint64_t bytes, uint64_t available);

// The bytes of each param's state on a tier, without padding.
std::vector<uint64_t> StateBytes(const StateShape& shape, const Residence& residence, Tier tier);

}  // namespace hybridopt
