// ChunkUpdater: the CPU workers' update of one chunk. The workers divide its elements among
// themselves; each worker begins with a part of its own, because it was the first to touch the
// memory of this part.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "place/capture.h"
#include "place/state_memory.h"
#include "runtime/work_pieces.h"
#include "runtime/worker_pool.h"
#include "state_io/change_log.h"
#include "step/step_plan.h"

namespace hybridopt {

// A copy of the state of a chunk: an area for each array, laid out as in a slot of the device's
// ring.
using StateAreas = std::array<std::byte*, kStateSlots>;

// The places of a chunk's gradients and params: in a staging slot, or at the caller's addresses if
// both are NULL. If `old` is not NULL, the update first copies the state to it.
struct ChunkBuffers {
  std::byte* grads = nullptr;
  std::byte* params = nullptr;
  const StateAreas* old = nullptr;
};

// The values of one step for the state on the host.
struct HostStep {
  const StepPlan& plan;
  std::span<const Coefficients> coefficients;  // the plan's, times the verdict's factor
  Capture* capture;                            // of a save that runs at the same time, or NULL
  bool follow_params = false;  // masters first follow params that other code has written
};

class ChunkUpdater {
 public:
  ChunkUpdater(const ParamTable& table, const StateShape& shape, const StateMemory& memory,
               const KernelTable& kernels, const ChangeLog& changes)
      : table_(table), shape_(shape), memory_(memory), kernels_(kernels), changes_(changes) {}

  // One worker's part of the update of a chunk's active elements; `pieces` divides them among the
  // workers.
  void Update(const HostStep& step, uint32_t chunk, const ChunkBuffers& buffers, WorkPieces& pieces,
              uint32_t worker) const;
  // One worker's part of copying the state of a chunk back.
  void Restore(std::span<const Fragment> fragments, uint64_t element_count, const StateAreas& old,
               WorkPieces& pieces, uint32_t worker) const;
  // Before the update of these elements: while a save runs, gives room to what it has still to
  // read of them (Capture::PutAside). The update copies that there.
  void PutAside(const HostStep& step, uint32_t chunk, const WorkRange& range) const;
  // After it. If no worker has begun, nothing has been put aside.
  void Copied(const HostStep& step, uint32_t chunk, const WorkRange& range,
              bool begun = true) const;
  // Where params are in host memory: puts aside, on this thread, what the running save borrows of a
  // param and nothing has put aside yet.
  void PutBorrowedAside(Capture& capture, uint32_t id, const void* params) const;

 private:
  template <typename Visit>
  void ForEachActiveRange(const HostStep& step, uint32_t chunk, const WorkRange& range,
                          Visit&& visit) const;
  void UpdatePiece(const HostStep& step, uint32_t chunk, const ChunkBuffers& buffers,
                   const WorkRange& piece) const;
  template <typename Call>
  void CallCapture(const HostStep& step, uint32_t chunk, const WorkRange& range, Call&& call) const;
  void CopyAside(const Capture& capture, uint32_t id, Tier tier, const WorkRange& range,
                 const std::byte* params) const;
  template <typename Visit>
  void ForEachArray(const Fragment& fragment, uint64_t first, uint64_t count, const StateAreas& old,
                    Visit&& visit) const;
  // The address of the master, of its lower half, or of the param that is its own master.
  std::byte* MasterAt(Tier tier, uint32_t id, uint64_t element, void* param) const;

  const ParamTable& table_;
  const StateShape& shape_;
  const StateMemory& memory_;
  const KernelTable& kernels_;
  const ChangeLog& changes_;
};

}  // namespace hybridopt
