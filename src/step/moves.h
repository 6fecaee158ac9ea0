// Mover: carries params, gradients and states between device and host, and fills masters from
// params. What may be moved when is lifecycle.h's business; here it is only done.
//
// Gradients of many params leave in one move. The device makes the block sums of their norms, from
// which a later step makes its verdict, while they come down:
//
//   device update stream | sums of all params | the sums come down
//   down stream          | param 0 | param 1 | param 2 | ...
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "machine/context.h"
#include "machine/lanes.h"
#include "state/lifecycle.h"
#include "step/executors/chunk_update.h"
#include "step/norm_sums.h"
#include "storage/state_memory.h"
#include "storage/swap_memory.h"

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
  TakenPages pages;     // that memory, until the move has begun
  LaneScratch scratch;  // likewise
};

class Mover {
 public:
  Mover(Context& context, const ParamTable& table, const StateShape& shape,
        const Residence& residence, const ChunkTable& chunks, StateMemory& memory, Lanes& lanes,
        const SwapMemory& swap, NormSums& norm_sums);

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
  struct GradPiece;
  class GradPieces;

  Status AwaitProducers(const MoveRequest& request, std::span<const EventHandle> ready,
                        FunctionRef<Result<bool>()> await_borrowed);
  Status Carry(const MoveRequest& request, uint64_t* bytes);
  void ListParams(const MoveRequest& request);
  void ListGrads(const MoveRequest& request);
  void ListStates(const MoveRequest& request);
  Status CopyListed(Direction direction, uint64_t* bytes);
  Status CopyByWorkers(Direction direction);
  Status OffloadGrads(const MoveRequest& request, uint64_t* bytes);
  Status QueueSums(const MoveRequest& request);
  void TakeSums(const MoveRequest& request);
  Status SumLanded(const MoveRequest& request, int32_t dtype);
  Status Accumulate(const MoveRequest& request, uint64_t* bytes);
  Status AddInPlace(std::span<const MoveItem> items);
  Status AddStaged(std::span<const MoveItem> items);
  Status AddByWorkers(const GradPiece& piece, const std::byte* grad);
  const std::byte* GradAddress(const MoveItem& item, uint64_t element) const;
  void Add(const GradPiece& piece, const std::byte* grad) const;
  Status UseDeviceMemory(MoveRequest& request);
  Status Refresh(const MoveRequest& request);
  Status FillChunk(const Chunk& chunk, std::span<const Addresses> addresses, bool moments);
  Status FillOnDevice(uint32_t id, void* data, bool moments, float first_moment0);
  Status AwaitDevice();

  Context& context_;
  Device& device_;
  const ParamTable& table_;
  const StateShape& shape_;
  const Residence& residence_;
  const ChunkTable& chunks_;
  StateMemory& memory_;
  Lanes& lanes_;
  const SwapMemory& swap_;
  NormSums& norm_sums_;
  const ChunkUpdater updater_;
  std::vector<Copy> copies_;  // of the running move
  std::vector<NormInput> norm_inputs_;
  std::vector<Addresses> addresses_;  // of a refresh; NULL for params it leaves alone
};

}  // namespace hybridopt
