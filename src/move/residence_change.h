// ResidenceChange: moves the state of some elements to another tier, between two steps.
//
//   device -> host: the down stream copies into staging slots, the workers copy out of them
//   host -> device: the workers copy into staging slots, the up stream copies out of them
//   host -> host:   the workers copy
//   disk -> others: an area of a file after the other comes into memory; from there as above
//   any -> disk:    as to the host, into the ring of the new files, from where threads write
//
// The call (offload_optimizer_set_fractions) takes the memory that the new residence needs
// and the old one does not have. After the copies the change frees the memory that is no longer
// needed. In memory an element has the same address under every residence of its tier, so elements
// that stay there are not touched. Files of state are made anew, because records are parts of
// chunks, and chunks change; the old files stay as they are until all has been copied.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "machine/context.h"
#include "machine/lanes.h"
#include "place/state_locator.h"
#include "runtime/parallel_copy.h"
#include "state/chunk_table.h"
#include "state_io/change_log.h"

namespace hybridopt {

// A queued change, with all values that it needs, as they were at the time of the call.
struct ResidenceRequest {
  Residence residence;
  ChunkTable chunks;
  std::vector<ParamLocation> locations;  // per param
  bool on_device = true;                 // false while states are offloaded: the device has none
  bool streams_state = false;            // whether the streamed executor needs pinned state
  TakenPages pages;                      // memory for the states that come to the device
  std::optional<LaneRing> ring;          // set if the new residence needs another ring
  std::optional<LaneScratch> scratch;    // set if the new residence needs other scratch memory
  std::optional<SwapStates> swap;        // set if states may be offloaded
  std::unique_ptr<DiskMemory> disk;      // of `chunks`; set if state may be on disk
  // The figures of the plan after the change.
  uint64_t host_bytes = 0;
  uint64_t device_bytes = 0;
  uint64_t staging_bytes = 0;
};

class ResidenceChanger {
 public:
  // `residence` and `chunks` are those that the optimizer's steps use; Run replaces them.
  ResidenceChanger(Context& context, const ParamTable& table, const StateShape& shape,
                   Residence& residence, ChunkTable& chunks, StateMemory& memory, Lanes& lanes,
                   SwapMemory& swap, ChangeLog& changes)
      : context_(context),
        device_(context.device()),
        table_(table),
        shape_(shape),
        residence_(residence),
        chunks_(chunks),
        memory_(memory),
        lanes_(lanes),
        swap_(swap),
        changes_(changes) {}

  // After Run the caller must tell all users of the chunks and of the ring that both have changed.
  Status Run(ResidenceRequest& request);

 private:
  struct Copy {
    std::byte* from;
    std::byte* to;
    uint64_t bytes;
  };
  // The part of a copy that goes through one staging slot, and its offset in the slot.
  struct Piece {
    Copy copy;
    uint64_t slot_offset;
  };
  struct Batch {  // the pieces that share one staging slot
    std::vector<Piece> pieces;
    uint64_t bytes = 0;
  };

  // Where the state of a range is to go: in memory, to contiguous addresses.
  struct Target {
    uint32_t param;
    StateSlot slot;
    ElementRange range;
    std::byte* to;
    bool on_device;
  };
  Status CopyBetweenMemories(const ResidenceRequest& request);
  Status CopyFromDisk(const ResidenceRequest& request);
  Status CopyToDisk(const ResidenceRequest& request);
  Status CopyArrays(const ResidenceRequest& request, uint32_t id, const ElementRange& range,
                    Tier from, Tier to);
  Status Add(const ResidenceRequest& request, const Target& target);
  Status MakeCopies();
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
  ChangeLog& changes_;

  // Copies that MakeCopies is to make.
  std::vector<Copy> down_;
  std::vector<Copy> up_;
  std::vector<Copy> on_host_;
};

}  // namespace hybridopt
