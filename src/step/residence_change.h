// ResidenceChange: the state of some elements changes its tier, between two steps.
//
//   device -> host   down stream, staging slots, workers       host -> device   the other way round
//
// The memory that the new residence needs beyond the old one is taken by the call
// (offload_optimizer_set_device_fraction); what is no longer needed is given back when the content
// has been copied. Both tiers keep an element at the same address whatever the residence is, so
// that elements which stay are not touched.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "machine/context.h"
#include "machine/lanes.h"
#include "runtime/parallel_copy.h"
#include "storage/chunk_table.h"
#include "storage/state_locator.h"

namespace hybridopt {

// A change as it was when it was queued.
struct ResidenceRequest {
  Residence residence;
  ChunkTable chunks;
  std::vector<ParamLocation> locations;  // per param
  bool on_device = true;                 // some states are not offloaded: the device holds memory
  bool streams = false;                  // what the host holds is to be pinned
  TakenPages pages;                      // what the device's part grows by
  std::optional<LaneRing> ring;          // where another one is needed
  std::optional<LaneScratch> scratch;    // likewise
  std::optional<SwapStates> swap;        // where states may be offloaded
  // What the plan says from then on.
  uint64_t host_bytes = 0;
  uint64_t device_bytes = 0;
  uint64_t staging_bytes = 0;
};

class ResidenceChanger {
 public:
  // `residence` and `chunks` are those of the timeline.
  ResidenceChanger(Context& context, const ParamTable& table, const StateShape& shape,
                   Residence& residence, ChunkTable& chunks, StateMemory& memory, Lanes& lanes,
                   SwapMemory& swap)
      : context_(context),
        device_(context.device()),
        table_(table),
        shape_(shape),
        residence_(residence),
        chunks_(chunks),
        memory_(memory),
        lanes_(lanes),
        swap_(swap) {}

  // Whoever uses chunks or the ring must be told afterwards.
  Status Run(ResidenceRequest& request);

 private:
  struct Copy {
    std::byte* from;
    std::byte* to;
    uint64_t bytes;
  };
  // A part of a copy, and where in a staging slot it lies.
  struct Piece {
    Copy copy;
    uint64_t slot_offset;
  };
  struct Batch {  // what one staging slot holds
    std::vector<Piece> pieces;
    uint64_t bytes = 0;
  };

  void List(const ResidenceRequest& request);
  void ListParam(const ResidenceRequest& request, uint32_t id);
  std::vector<Batch> Cut(const std::vector<Copy>& copies);
  Status CopyDown();
  Status CopyUp();
  Status CopyOnHost();
  Status QueueDown(const Batch& batch, uint32_t slot);

  Context& context_;
  Device& device_;
  const ParamTable& table_;
  const StateShape& shape_;
  Residence& residence_;
  ChunkTable& chunks_;
  StateMemory& memory_;
  Lanes& lanes_;
  SwapMemory& swap_;

  // Of the running change.
  std::vector<Copy> down_;
  std::vector<Copy> up_;
  std::vector<Copy> on_host_;
};

}  // namespace hybridopt
