// What an optimizer's state and pipeline take: settled from a device fraction before any memory is
// taken, at commit and at each change of the fraction.
#pragma once

#include <vector>

#include "machine/context.h"
#include "storage/chunk_table.h"

namespace hybridopt {

// What follows from a device fraction.
struct Arrangement {
  double device_fraction = 0;
  Residence residence;
  ChunkTable chunks;
  LaneSizes lanes;
  bool lacks_room = false;      // the device has too little for a ring that nobody asked for
  uint64_t unpinned_bytes = 0;  // state that a ring on the device would need pinned and cannot have
};

Arrangement Arrange(const ParamTable& table, const StateShape& shape, double device_fraction);

// All of the plan but `fits`.
Result<offload_plan_t> PlanOf(const Context& context, const ParamTable& table,
                              const StateShape& shape, const Arrangement& arrangement);

// Replaces what the plan tells of NUMA nodes.
void SetNodeBytes(const NodeBytes& bytes, offload_plan_t& plan);

// OUT_OF_DEVICE_MEMORY or OUT_OF_HOST_MEMORY where so much is not free; the text starts with what
// needs it.
Status CheckDeviceRoom(const Context& context, const char* what, double device_fraction,
                       uint64_t bytes);
Status CheckHostRoom(const char* what, uint64_t bytes);

// The state itself on a tier, without padding: of each param.
std::vector<uint64_t> StateBytes(const ParamTable& table, const StateShape& shape,
                                 const Residence& residence, Tier tier);

double MiB(uint64_t bytes);

}  // namespace hybridopt
