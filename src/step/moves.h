// Mover: carries params, gradients and states between device and host, and fills masters from
// params. What may be moved when is lifecycle.h's business; here it is only done.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "machine/context.h"
#include "machine/lanes.h"
#include "state/lifecycle.h"
#include "state/placement.h"
#include "state/state_memory.h"
#include "state/swap_memory.h"
#include "step/host_share.h"
#include "step/norm_sums.h"

namespace hybridopt {

struct MoveItem {
  uint32_t param;
  void* address;  // of its data or gradient when the call was made
  bool first;     // accumulating: the host holds nothing of it yet
};

// A move as it was when it was queued.
struct MoveRequest {
  Move move;
  std::vector<MoveItem> items;
  uint32_t producer_count = 0;
  bool frees_device_memory = false;
  bool brings_device_memory = false;
  void* block = nullptr;    // that memory, until the move has begun
  void* scratch = nullptr;  // likewise
};

class Mover {
 public:
  Mover(Context& context, const ParamTable& table, const Placement& placement, StateMemory& memory,
        Lanes& lanes, const SwapMemory& swap, NormSums& norm_sums);

  // Bytes of the tables here, for the plan.
  static uint64_t ScratchBytes(const ParamTable& table) {
    return table.size() * (kStateSlots * sizeof(Copy) + sizeof(NormInput) + sizeof(Addresses));
  }

  // Fills masters from the params (after the work on `stream`) and moments with their first value.
  Status Initialize(std::span<const Addresses> addresses, StreamHandle stream);

  // `ready` are the events behind the producers' work, which may wait for a save: see
  // Lanes::WaitForCaller. Adds to *bytes what went over.
  Status Run(MoveRequest& request, std::span<const EventHandle> ready,
             FunctionRef<Result<bool>()> await_borrowed, uint64_t* bytes);

 private:
  struct Copy {
    std::byte* device;
    std::byte* host;
    uint64_t bytes;
  };
  enum class Direction { kDown, kUp };

  Status AwaitProducers(const MoveRequest& request, std::span<const EventHandle> ready,
                        FunctionRef<Result<bool>()> await_borrowed);
  void ListParams(const MoveRequest& request);
  void ListGrads(const MoveRequest& request);
  void ListStates(const MoveRequest& request);
  Status CopyListed(Direction direction, uint64_t* bytes);
  Status CopyByWorkers(Direction direction, uint64_t total_bytes);
  Status SumLanded(const MoveRequest& request, int32_t dtype);
  Status Accumulate(const MoveRequest& request, uint64_t* bytes);
  Status AccumulateStaged(const MoveItem& item);
  Status Add(const std::byte* grad, int32_t dtype, float* sum, uint64_t count, bool first);
  void UseDeviceMemory(MoveRequest& request);
  Status Refresh(const MoveRequest& request);
  Status FillChunk(uint32_t chunk, std::span<const Addresses> addresses,
                   const FirstState& first_state);
  Status FillDeviceShare(uint32_t id, void* data, bool moments, float first_moment0);
  Status AwaitDevice();

  Context& context_;
  Device& device_;
  const ParamTable& table_;
  const Placement& placement_;
  StateMemory& memory_;
  Lanes& lanes_;
  const SwapMemory& swap_;
  NormSums& norm_sums_;
  const HostShare host_share_;
  std::vector<Copy> copies_;  // of the running move
  std::vector<NormInput> norm_inputs_;
  std::vector<Addresses> addresses_;  // of a refresh; NULL for params it leaves alone
};

}  // namespace hybridopt
