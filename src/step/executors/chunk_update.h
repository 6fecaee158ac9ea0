// ChunkUpdater: what the CPU workers do with one chunk. They share a chunk out element by element;
// each worker begins with its own part of the chunk, the memory that it touched first.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "runtime/work_pieces.h"
#include "runtime/worker_pool.h"
#include "state/capture.h"
#include "step/step_plan.h"
#include "storage/state_memory.h"

namespace hybridopt {

// Where a chunk's gradients and params are for the workers: in a staging slot, or, with both NULL,
// in place at the caller's addresses.
struct ChunkBuffers {
  std::byte* grads = nullptr;
  std::byte* params = nullptr;
};

// What one step does to the state on the host.
struct HostStep {
  const StepPlan& plan;
  std::span<const Coefficients> coefficients;  // with the verdict's factor in
  Capture* capture;                            // of the save that runs beside it, or NULL
};

// Calls visit(fragment, first, count) for each range of a fragment in `range`, which is counted in
// the elements that take part; first counts from the fragment's begin. The fragments hold `total`
// such elements; before(f) is how many of them come before fragment f.
template <typename Before, typename Visit>
void ForEachRange(std::span<const Fragment> fragments, uint64_t total, Before&& before,
                  const WorkRange& range, Visit&& visit) {
  if (range.begin == range.end) return;
  auto fragment =
      std::upper_bound(fragments.begin(), fragments.end(), range.begin,
                       [&](uint64_t element, const Fragment& f) { return element < before(f); });
  --fragment;  // nothing comes before the first fragment, so there is one before
  for (; fragment != fragments.end() && before(*fragment) < range.end; ++fragment) {
    const auto next = fragment + 1;
    const uint64_t fragment_end = next == fragments.end() ? total : before(*next);
    const uint64_t begin = std::max(range.begin, before(*fragment));
    const uint64_t end = std::min(range.end, fragment_end);
    if (begin < end) visit(*fragment, begin - before(*fragment), end - begin);
  }
}

class ChunkUpdater {
 public:
  ChunkUpdater(const ParamTable& table, const StateShape& shape, const StateMemory& memory,
               const KernelTable& kernels)
      : table_(table), shape_(shape), memory_(memory), kernels_(kernels) {}

  // What one worker does of the update of a chunk's active elements that `pieces` holds.
  void Update(const HostStep& step, uint32_t chunk, const ChunkBuffers& buffers, WorkPieces& pieces,
              uint32_t worker) const;
  // Returns when the running save has read what the update of these elements writes.
  void AwaitCapture(const HostStep& step, uint32_t chunk, const WorkRange& range) const;

  // One worker's part of giving a chunk its state: masters widened from the params, and, if
  // `moments`, moments at their first values. At commit this is the first touch of the memory.
  // Params with a NULL address are left alone.
  void Fill(std::span<const Fragment> fragments, uint64_t element_count,
            const ChunkBuffers& buffers, std::span<const Addresses> addresses, bool moments,
            uint32_t worker, uint32_t workers) const;

 private:
  template <typename Visit>
  void ForEachActiveRange(const HostStep& step, uint32_t chunk, const WorkRange& range,
                          Visit&& visit) const;
  void UpdatePiece(const HostStep& step, uint32_t chunk, const ChunkBuffers& buffers,
                   const WorkRange& piece) const;
  std::byte* ParamAt(const Fragment& fragment, const ChunkBuffers& buffers, void* data,
                     uint64_t first) const;
  // Masters, lower halves, or the param itself.
  std::byte* MasterAt(uint32_t id, uint64_t element, void* param) const;

  const ParamTable& table_;
  const StateShape& shape_;
  const StateMemory& memory_;
  const KernelTable& kernels_;
};

}  // namespace hybridopt
