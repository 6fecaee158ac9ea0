// ChunkUpdater: the CPU workers' update of one chunk. The workers divide its elements among
// themselves; each worker begins with a part of its own, because it was the first to touch the
// memory of this part. Then all workers together update the chunk's matrices, one after the other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "kernels/matrix/newton_schulz.h"
#include "place/capture.h"
#include "place/state_memory.h"
#include "runtime/phased_work.h"
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

// What the workers share while they update a chunk.
struct ChunkWork {
  explicit ChunkWork(uint32_t workers) : pieces(workers) {}
  // Another thread uses it only from Begin on, so that a list of them may be made by copies.
  ChunkWork(ChunkWork&& other) noexcept : pieces(std::move(other.pieces)) {}

  WorkPieces pieces;
  PhasedWork phases;  // of all matrices
  // The matrix that is being updated: which fragment it is in, its first element there, and which
  // part of it.
  WorkRange range{};
  size_t fragment = 0;
  uint64_t first = 0;
  uint32_t part = 0;
  MatrixUpdate matrix{};  // the addresses of all of it
  // None before its first phase, which makes it and copies what has to be put aside.
  std::optional<MatrixUpdate> update;
  std::optional<NewtonSchulz> newton_schulz;
  uint32_t phase = 0;  // of newton_schulz
};

class ChunkUpdater {
 public:
  ChunkUpdater(const ParamTable& table, const StateShape& shape, const StateMemory& memory,
               const KernelTable& kernels, const ChangeLog& changes)
      : table_(table),
        shape_(shape),
        memory_(memory),
        kernels_(kernels),
        changes_(changes),
        workspace_room_(Bytes(shape)),
        workspace_(AlignedIn(workspace_room_)) {}
  static uint64_t Bytes(const StateShape& shape) {
    return shape.host_matrix_bytes > 0 ? shape.host_matrix_bytes + kWorkspaceAlignment : 0;
  }

  // To be called before the workers begin to update these active elements of a chunk. A worker
  // begins a chunk only after it has ended its part of the optimizer's previous chunk, so all
  // chunks share one workspace.
  void Begin(const StepPlan& plan, uint32_t chunk, const WorkRange& range, ChunkWork& work) const;
  // One worker's part of that update.
  void Update(const HostStep& step, uint32_t chunk, const ChunkBuffers& buffers, ChunkWork& work,
              uint32_t worker) const;
  // One worker's part of copying the state of a chunk back.
  void Restore(std::span<const Fragment> fragments, uint64_t element_count, const StateAreas& old,
               WorkPieces& pieces, uint32_t worker) const;
  // To be called before the update of these elements: while a save runs, reserves room for what it
  // still has to read of them (Capture::PutAside). The update copies that.
  void PutAside(const HostStep& step, uint32_t chunk, const WorkRange& range) const;
  // After it. If no worker has begun, nothing has been put aside.
  void Copied(const HostStep& step, uint32_t chunk, const WorkRange& range,
              bool begun = true) const;
  // Where params are in host memory: puts aside, on this thread, what the running save borrows of a
  // param and nothing has put aside yet.
  void PutBorrowedAside(Capture& capture, uint32_t id, const void* params) const;

 private:
  static constexpr uint64_t kWorkspaceAlignment = 256;
  static std::byte* AlignedIn(std::vector<std::byte>& room);

  template <typename Visit>
  void ForEachActiveRange(const HostStep& step, uint32_t chunk, const WorkRange& range,
                          Visit&& visit) const;
  void UpdatePiece(const HostStep& step, uint32_t chunk, const ChunkBuffers& buffers,
                   const WorkRange& piece) const;
  bool FindMatrix(const StepPlan& plan, uint32_t chunk, ChunkWork& work) const;
  void BeginMatrix(const HostStep& step, uint32_t chunk, const ChunkBuffers& buffers,
                   ChunkWork& work) const;
  void BeginPart(const HostStep& step, uint32_t chunk, ChunkWork& work) const;
  uint64_t NextPhase(const HostStep& step, uint32_t chunk, ChunkWork& work) const;
  // What an update gets, of elements of a fragment. Puts aside what is to be, before that.
  struct Prepared {
    UpdateSpan span;
    SpanTypes types;
    NotedBits noted;
  };
  Prepared Prepare(const HostStep& step, const Fragment& fragment, const ChunkBuffers& buffers,
                   uint64_t first, uint64_t count) const;
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
  std::vector<std::byte> workspace_room_;
  std::byte* const workspace_;  // of the matrix that is being updated
};

}  // namespace hybridopt
