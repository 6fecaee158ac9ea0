// Mover: copies params, gradients and states between device and host, adds gradients up on the
// host, and has MasterFill fill masters from params. When the mover runs a move, Lifecycle has
// already decided that the move is allowed.
//
// One move offloads the gradients of many params. While the down stream copies them, the device
// computes the block sums of their norms on its compute stream. A later step makes its verdict from
// these sums:
//
//   compute stream | block sums of all params | copy of the sums to the host
//   down stream    | param 0 | param 1 | param 2 | ...
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "machine/context.h"
#include "machine/host_norm_sums.h"
#include "machine/lanes.h"
#include "move/master_fill.h"
#include "place/state_memory.h"
#include "place/swap_memory.h"
#include "state/lifecycle.h"
#include "state_io/change_log.h"

namespace hybridopt {

// A queued move, with all values that it needs, as they were at the time of the call.
struct MoveRequest {
  Move move;
  std::vector<MoveItem> items;
  std::shared_ptr<const std::vector<offload_group_t>> groups;
  uint32_t producer_count = 0;
  bool frees_device_memory = false;   // the move offloads the last states that are on the device
  bool brings_device_memory = false;  // the move reloads the first states: sets pages, scratch
  // Device memory for states and for the lanes. The call takes this memory; the move, when it runs,
  // gives it to StateMemory and to Lanes.
  TakenPages pages;
  LaneScratch scratch;
};

class Mover {
 public:
  Mover(Context& context, const ParamTable& table, const StateShape& shape,
        const Residence& residence, StateMemory& memory, Lanes& lanes, const SwapMemory& swap,
        HostNormSums& host_norm_sums, MasterFill& master_fill, ChangeLog& changes);

  // How many bytes the tables of a mover take; the plan counts them.
  static uint64_t ScratchBytes(const ParamTable& table) {
    return table.size() * (kStateSlots * sizeof(Copy) + sizeof(NormInput));
  }

  // To be called before Run. `ready` has one event for each stream of the caller that produces data
  // to be moved. Such a stream may itself be waiting until a save has read borrowed memory;
  // `await_borrowed` waits for that, see Lanes::WaitForCaller.
  Status AwaitProducers(const MoveRequest& request, std::span<const EventHandle> ready,
                        FunctionRef<Result<bool>()> await_borrowed);
  // Adds the number of copied bytes to *bytes.
  Status Run(MoveRequest& request, uint64_t* bytes);

 private:
  struct Copy {
    std::byte* device;
    std::byte* host;
    uint64_t bytes;
  };
  struct GradPiece;
  class GradPieces;

  Status RunMove(MoveRequest& request, uint64_t* bytes);
  Status CopyResource(const MoveRequest& request, uint64_t* bytes);
  void ListParams(const MoveRequest& request);
  void ListGrads(const MoveRequest& request);
  void ListStates(const MoveRequest& request);
  Status CopyListed(Direction direction, uint64_t* bytes);
  Status AwaitPieces(uint32_t pieces);
  Status CopyByWorkers(Direction direction);
  Status OffloadGrads(const MoveRequest& request, uint64_t* bytes);
  Status QueueBlockSums(const MoveRequest& request);
  void KeepBlockSums(const MoveRequest& request);
  Status BlockSumsOnHost(const MoveRequest& request, int32_t dtype);
  Status Accumulate(const MoveRequest& request, uint64_t* bytes);
  Status AddInPlace(std::span<const MoveItem> items);
  Status AddStaged(std::span<const MoveItem> items);
  Status AddByWorkers(const GradPiece& piece, const std::byte* grad);
  const std::byte* GradAddress(const MoveItem& item, uint64_t element) const;
  void Add(const GradPiece& piece, const std::byte* grad) const;
  Status UseDeviceMemory(MoveRequest& request);

  Context& context_;
  Device& device_;
  const ParamTable& table_;
  const StateShape& shape_;
  const Residence& residence_;
  StateMemory& memory_;
  Lanes& lanes_;
  const SwapMemory& swap_;
  HostNormSums& host_norm_sums_;
  MasterFill& master_fill_;
  ChangeLog& changes_;
  // The copies of the running move.
  std::vector<Copy> copies_;
  std::vector<NormInput> norm_inputs_;
};

}  // namespace hybridopt
