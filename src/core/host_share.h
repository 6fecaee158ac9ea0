// HostShare: what the CPU workers do with the host share of one chunk. Workers split a chunk by
// element, always alike, so that each meets the memory it touched first.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "core/placement.h"
#include "core/state_memory.h"
#include "runtime/worker_pool.h"

namespace hybridopt {

// Workers' parts of a chunk start at multiples of this many elements.
inline constexpr uint64_t kWorkGrainElements = 64;

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

// A part of a chunk, counted in its elements.
struct ChunkPart {
  uint64_t begin;
  uint64_t count;
};

// Calls visit(fragment, first, count) for each stretch of a part of the chunk that falls to this
// worker; first counts from the fragment's begin.
template <typename Visit>
void ForEachStretch(const Placement& placement, const Chunk& chunk, const ChunkPart& part,
                    uint32_t worker, uint32_t workers, Visit&& visit) {
  WorkRange range = RangeOfWorker(part.count, kWorkGrainElements, worker, workers);
  if (range.begin == range.end) return;
  range.begin += part.begin;
  range.end += part.begin;
  const std::span<const Fragment> fragments(&placement.fragments[chunk.first_fragment],
                                            chunk.fragment_count);
  auto fragment = std::upper_bound(
      fragments.begin(), fragments.end(), range.begin,
      [](uint64_t element, const Fragment& f) { return element < f.first_element; });
  --fragment;  // the first fragment starts at element 0, so there is one before
  for (; fragment != fragments.end() && fragment->first_element < range.end; ++fragment) {
    const uint64_t begin = std::max(range.begin, fragment->first_element);
    const uint64_t end = std::min(range.end, fragment->first_element + fragment->count);
    visit(*fragment, begin - fragment->first_element, end - begin);
  }
}

class HostShare {
 public:
  HostShare(const ParamTable& table, const Placement& placement, const StateMemory& memory,
            const KernelTable& kernels);

  // One worker's share of the update of a part of a chunk.
  void Update(const Chunk& chunk, const ChunkPart& part, const ChunkBuffers& buffers,
              std::span<const StepParam> params, std::span<const Coefficients> coefficients,
              uint32_t worker, uint32_t workers) const;

  // One worker's part of giving a chunk its state: masters widened from the params, moments zero
  // (Adagrad's sum: its initial value). At commit this is the first touch of the memory. Params
  // with a NULL address are left alone.
  void Fill(const Chunk& chunk, const ChunkBuffers& buffers, std::span<const Addresses> addresses,
            const FirstState& first_state, uint32_t worker, uint32_t workers) const;

 private:
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
