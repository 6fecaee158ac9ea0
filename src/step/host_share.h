// HostShare: what the CPU workers do with the host share of one chunk. Workers split a chunk by
// element, each first doing its part of the chunk, so that it meets the memory it touched first.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "runtime/work_pieces.h"
#include "runtime/worker_pool.h"
#include "state/capture.h"
#include "state/placement.h"
#include "state/state_memory.h"

namespace hybridopt {

// Where a chunk's gradients and params are for the workers: in a staging slot, or, with both NULL,
// in place at the caller's addresses.
struct ChunkBuffers {
  std::byte* grads = nullptr;
  std::byte* params = nullptr;
};

// One param's part in a step.
struct StepParam {
  Addresses addresses;
  const std::byte* host_grad;  // the gradient, where the host holds it; else NULL
  int32_t grad_dtype;          // as it is there
  uint32_t coefficients;       // index of its coefficients
  bool active;                 // has a gradient, and elements
  Rounding rounding;
};

// What Fill gives a param's state.
struct FirstState {
  bool moments = true;  // false: masters only
};

// The elements that a step updates, counted so that workers get equal parts of them: those of
// params without a gradient count nothing.
class ActiveElements {
 public:
  explicit ActiveElements(const Placement& placement)
      : placement_(placement),
        before_(placement.fragments.size()),
        in_chunk_(placement.chunks.size()) {}
  static uint64_t Bytes(const Placement& placement) {
    return (placement.fragments.size() + placement.chunks.size()) * sizeof(uint64_t);
  }

  void Count(std::span<const StepParam> params);
  // Active elements of the fragment's chunk that come before it.
  uint64_t before(const Fragment& fragment) const {
    return before_[static_cast<size_t>(&fragment - placement_.fragments.data())];
  }
  uint64_t in_chunk(uint32_t chunk) const { return in_chunk_[chunk]; }

 private:
  const Placement& placement_;
  std::vector<uint64_t> before_;    // per fragment
  std::vector<uint64_t> in_chunk_;  // per chunk
};

// What one step does to the host share.
struct HostStep {
  std::span<const StepParam> params;
  const ActiveElements& active;
  std::span<const Coefficients> coefficients;  // with the verdict's factor in
  Capture* capture;                            // of the save that runs beside it, or NULL
};

inline std::span<const Fragment> FragmentsOf(const Placement& placement, const Chunk& chunk) {
  return {&placement.fragments[chunk.first_fragment], chunk.fragment_count};
}

// Calls visit(fragment, first, count) for each stretch of `range`, which is counted in the elements
// that take part; first counts from the fragment's begin. The fragments hold `total` such elements;
// before(f) is how many of them come before fragment f.
template <typename Before, typename Visit>
void ForEachStretch(std::span<const Fragment> fragments, uint64_t total, Before&& before,
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

class HostShare {
 public:
  HostShare(const ParamTable& table, const Placement& placement, const StateMemory& memory,
            const KernelTable& kernels);

  // What one worker does of the update of a chunk's active elements that `pieces` holds.
  void Update(const HostStep& step, uint32_t chunk, const ChunkBuffers& buffers, WorkPieces& pieces,
              uint32_t worker) const;
  // Returns when the running save has read what the update of these elements writes.
  void AwaitCapture(const HostStep& step, uint32_t chunk, const WorkRange& range) const;

  // One worker's part of giving a chunk its state: masters widened from the params, moments zero
  // (Adagrad's sum: its initial value). At commit this is the first touch of the memory. Params
  // with a NULL address are left alone.
  void Fill(const Chunk& chunk, const ChunkBuffers& buffers, std::span<const Addresses> addresses,
            const FirstState& first_state, uint32_t worker, uint32_t workers) const;

 private:
  // ForEachStretch over the chunk's active elements.
  template <typename Visit>
  void ForEachActiveStretch(const HostStep& step, uint32_t chunk, const WorkRange& range,
                            Visit&& visit) const;
  void UpdatePiece(const HostStep& step, uint32_t chunk, const ChunkBuffers& buffers,
                   const WorkRange& piece) const;

  // A param's fixed facts, side by side for the workers.
  struct Target {
    Rule rule;
    StateLayout layout;
    int32_t param_dtype;
    ToFp32Function widen;
    std::array<std::byte*, kStateSlots> state;  // NULL: no such array
    std::array<int32_t, kStateSlots> state_dtype;
    double initial_moment0;  // rounded by a worker: the caller's rounding mode may be any
    uint64_t device_count;
    uint32_t param_bytes;  // an element
  };
  // The stretch's element counted in the param's host share.
  static uint64_t HostElement(const Target& target, const Fragment& fragment, uint64_t first) {
    return fragment.begin - target.device_count + first;
  }
  // That element's place in one of the state arrays, or NULL where the param keeps none.
  static std::byte* StateAt(const Target& target, StateSlot slot, uint64_t element) {
    if (target.state[slot] == nullptr) return nullptr;
    return target.state[slot] + element * DtypeBytes(target.state_dtype[slot]);
  }
  static std::byte* ParamAt(const Target& target, const Fragment& fragment,
                            const ChunkBuffers& buffers, void* data, uint64_t first) {
    if (buffers.params != nullptr)
      return buffers.params + fragment.param_offset + first * target.param_bytes;
    return static_cast<std::byte*>(data) + (fragment.begin + first) * target.param_bytes;
  }
  static const std::byte* GradAt(const StepParam& param, const Fragment& fragment,
                                 const ChunkBuffers& buffers, uint64_t first) {
    const uint64_t bytes = DtypeBytes(param.grad_dtype);
    if (param.host_grad != nullptr) return param.host_grad + (fragment.begin + first) * bytes;
    if (buffers.grads != nullptr) return buffers.grads + fragment.grad_offset + first * bytes;
    return static_cast<const std::byte*>(param.addresses.grad) + (fragment.begin + first) * bytes;
  }

  // Masters, lower halves, or the param itself.
  static std::byte* MasterAt(const Target& target, uint64_t element, void* param) {
    if (IsSplit(target.layout)) return StateAt(target, kMasterLow, element);
    std::byte* const master = StateAt(target, kMaster, element);
    return master != nullptr ? master : static_cast<std::byte*>(param);
  }

  const KernelTable& kernels_;
  const Placement& placement_;
  std::vector<Target> targets_;
};

}  // namespace hybridopt
