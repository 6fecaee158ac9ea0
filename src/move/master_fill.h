// MasterFill: fills masters from params, and at commit moments with their initial values.
//
//   what the device holds | the compute stream converts and fills
//   what the host holds   | the down stream copies the params of a chunk to a staging slot, the
//                         | workers convert and fill; chunk by chunk
//
// Params that are in host memory are converted where they are.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "machine/context.h"
#include "machine/lanes.h"
#include "place/state_memory.h"
#include "state/chunk_table.h"
#include "state/move_table.h"
#include "state_io/change_log.h"

namespace hybridopt {

class MasterFill {
 public:
  // `residence` and `chunks` belong to the timeline: a queued change of residence changes them when
  // it runs.
  MasterFill(Context& context, const ParamTable& table, const StateShape& shape,
             const Residence& residence, const ChunkTable& chunks, StateMemory& memory,
             Lanes& lanes, const ChangeLog& changes)
      : context_(context),
        device_(context.device()),
        table_(table),
        shape_(shape),
        residence_(residence),
        chunks_(chunks),
        memory_(memory),
        lanes_(lanes),
        changes_(changes),
        addresses_(table.size()) {}

  static uint64_t ScratchBytes(const ParamTable& table) { return table.size() * sizeof(Addresses); }

  // Waits for the work on `stream`, then fills masters from the params and moments with their
  // initial values.
  Status Initialize(std::span<const Addresses> addresses, StreamHandle stream);
  // Fills the masters of these params.
  Status Refresh(std::span<const MoveItem> params);

 private:
  Status FillOnDevice(uint32_t id, void* data, bool moments);
  Status FillChunks(std::span<const Addresses> addresses, bool moments);
  Status FillChunk(const Chunk& chunk, std::span<const Addresses> addresses, bool moments);
  void FillOnHost(const Chunk& chunk, std::byte* staged, std::span<const Addresses> addresses,
                  bool moments, uint32_t worker) const;
  Status AwaitDevice();

  Context& context_;
  Device& device_;
  const ParamTable& table_;
  const StateShape& shape_;
  const Residence& residence_;
  const ChunkTable& chunks_;
  StateMemory& memory_;
  Lanes& lanes_;
  const ChangeLog& changes_;
  std::vector<float> first_moments_;  // per group: initial values
  std::vector<Addresses> addresses_;  // per param; NULL for params that a refresh does not change
};

}  // namespace hybridopt
