// ChunkUpdater: what the CPU workers do with one chunk. They divide its elements among themselves;
// each worker begins with a part of its own, whose memory it touched first.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "place/state_memory.h"
#include "runtime/work_pieces.h"
#include "runtime/worker_pool.h"
#include "state/capture.h"
#include "step/step_plan.h"

namespace hybridopt {

// Where the state of a chunk is put aside: an area for each array, laid out as in a slot of the
// device's ring.
using StateAreas = std::array<std::byte*, kStateSlots>;

// Where the workers find a chunk's gradients and params: in a staging slot, or, if both are NULL,
// at the caller's addresses. The update first copies the state to `old`, unless it is NULL.
struct ChunkBuffers {
  std::byte* grads = nullptr;
  std::byte* params = nullptr;
  const StateAreas* old = nullptr;
};

// What one step does to the state on the host.
struct HostStep {
  const StepPlan& plan;
  std::span<const Coefficients> coefficients;  // those of the plan times the verdict's factor
  Capture* capture;                            // of the save that runs at the same time, or NULL
  bool follow_params = false;  // masters first become equal to params that others have written
};

class ChunkUpdater {
 public:
  ChunkUpdater(const ParamTable& table, const StateShape& shape, const StateMemory& memory,
               const KernelTable& kernels)
      : table_(table), shape_(shape), memory_(memory), kernels_(kernels) {}

  // One worker's part of the update of a chunk's active elements, which `pieces` hands out.
  void Update(const HostStep& step, uint32_t chunk, const ChunkBuffers& buffers, WorkPieces& pieces,
              uint32_t worker) const;
  // One worker's part of copying the state of a chunk back.
  void Restore(std::span<const Fragment> fragments, uint64_t element_count, const StateAreas& old,
               WorkPieces& pieces, uint32_t worker) const;
  // Returns when the running save has read what the update of these elements writes.
  void AwaitCapture(const HostStep& step, uint32_t chunk, const WorkRange& range) const;

 private:
  template <typename Visit>
  void ForEachActiveRange(const HostStep& step, uint32_t chunk, const WorkRange& range,
                          Visit&& visit) const;
  void UpdatePiece(const HostStep& step, uint32_t chunk, const ChunkBuffers& buffers,
                   const WorkRange& piece) const;
  template <typename Visit>
  void ForEachArray(const Fragment& fragment, uint64_t first, uint64_t count, const StateAreas& old,
                    Visit&& visit) const;
  // The address of the master, of its lower half, or of the param that is its own master.
  std::byte* MasterAt(Tier tier, uint32_t id, uint64_t element, void* param) const;

  const ParamTable& table_;
  const StateShape& shape_;
  const StateMemory& memory_;
  const KernelTable& kernels_;
};

}  // namespace hybridopt
