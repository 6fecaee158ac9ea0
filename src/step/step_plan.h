// StepPlan: what one step does: which params it updates, by which rules and coefficients, which
// executor updates each element, and by which route gradient and param travel. Pure. It is made for
// every step without an allocation.
//
//   executor  state is        gradient                       param
//   device    on the device   there, or up from the host     there
//   cpu       on the host     down, or on the host already   up; masters beside params: down
//                                                            first
//   streamed  on the host,    there, or up from the host     there
//             up and down
//
// While the step runs the cpu and the streamed executor take chunks from one queue (chunk_queue.h).
// If params are in host memory the cpu updates everything in place, and nothing is copied.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/coefficients.h"
#include "place/swap_memory.h"
#include "state/chunk_table.h"
#include "state/lifecycle.h"
#include "state/step_counts.h"

namespace hybridopt {

// A queued step, with addresses and hyperparameters as of its call.
struct StepRequest {
  uint32_t flags = 0;
  double grad_scale = 1;
  double grad_norm_max = 0;
  std::vector<Addresses> addresses;
  std::vector<HostGrad> host_grads;
  std::vector<offload_group_t> groups;
};

// What a step does with one param.
struct StepParam {
  Addresses addresses;
  const std::byte* host_grad;  // the gradient if the host holds it, else NULL
  int32_t grad_dtype;          // the dtype in which it is stored there
  Rule rule;                   // by which the step updates the param
  uint32_t coefficients;       // index into coefficients()
  bool active;                 // has a gradient and elements: the step updates it
  Rounding rounding;

  bool GradComesDown() const { return active && host_grad == nullptr; }
};

class StepPlan {
 public:
  // `residence` and `chunks` are the timeline's; the caller calls UseChunks after they have
  // changed.
  StepPlan(const ParamTable& table, const StateShape& shape, const Residence& residence,
           const ChunkTable& chunks, const SwapMemory& swap, uint64_t rounding_seed);
  static uint64_t Bytes(const ParamTable& table, const StateShape& shape);
  void UseChunks();

  // Does not change the step counts, because the step may still be skipped.
  void Make(const StepRequest& request, const StepCounts& step_counts);

  std::span<const StepParam> params() const { return params_; }
  const StepParam& param(uint32_t id) const { return params_[id]; }
  // For maximize grad_factor is negative.
  std::span<const Coefficients> coefficients() const { return coefficients_; }
  // Those that updates on the host use: with this factor of the verdict.
  void ScaleCoefficients(float grad_factor, std::vector<Coefficients>* scaled) const {
    scaled->assign(coefficients_.begin(), coefficients_.end());
    for (Coefficients& coefficients : *scaled) coefficients.grad_factor *= grad_factor;
  }
  bool host_holds_grads() const { return host_holds_grads_; }

  // How many elements of the param the device updates: its first ones.
  uint64_t device_count(uint32_t id) const {
    return params_[id].active ? residence_.range(id, Tier::kDevice).count : 0;
  }
  // The chunks of the elements whose state is on the host.
  const ChunkTable& chunks() const { return chunks_; }
  uint32_t chunk_count() const { return static_cast<uint32_t>(chunks_.chunks.size()); }
  std::span<const Fragment> fragments(uint32_t chunk) const {
    return chunks_.FragmentsOf(chunks_.chunks[chunk]);
  }
  bool ParamComesDown(uint32_t id) const {
    return params_[id].active && shape_.params[id].beside_param() && !shape_.options.unified;
  }
  bool params_come_down() const {
    return params_come_down_;
  }  // with the gradients of a chunk that the cpu updates
  // Whether the host holds the gradients of most of the chunk's active elements.
  bool IsHeld(uint32_t chunk) const { return 2 * held_in_chunk_[chunk] > active_in_chunk_[chunk]; }
  // Active elements are those of active params. These return how many are in a chunk, and how many
  // in its fragments before this one. Workers get equal parts of a chunk's active elements.
  uint64_t active_count(uint32_t chunk) const { return active_in_chunk_[chunk]; }
  uint64_t ActiveBefore(const Fragment& fragment) const {
    return active_before_[static_cast<size_t>(&fragment - chunks_.fragments.data())];
  }

 private:
  uint32_t CoefficientsFor(const offload_group_t& group, uint32_t group_id, uint64_t step);
  void CountActive();

  const ParamTable& table_;  // for counts, dtypes and group ids only; addresses are in the requests
  const StateShape& shape_;
  const Residence& residence_;
  const ChunkTable& chunks_;
  const SwapMemory& swap_;
  const uint64_t rounding_seed_;

  std::vector<StepParam> params_;
  std::vector<Coefficients> coefficients_;
  struct Memo {
    uint64_t step;
    uint32_t coefficients;
  };
  std::vector<Memo> memos_;                // per group: the coefficients computed last
  std::vector<uint64_t> active_before_;    // per fragment
  std::vector<uint64_t> active_in_chunk_;  // per chunk
  std::vector<uint64_t> held_in_chunk_;    // of these, whose gradients the host holds
  bool host_holds_grads_ = false;
  bool params_come_down_ = false;
};

// For each param whether its gradient is better left on the device until the step has read it,
// because the device will update most of the param: it has the state, or the state is among the
// `streamed_share` of the host share that will stream. That part is spread evenly over the order
// of updates, so that both executors come forward at the same pace. The last `early_elements` in
// that order are not kept: a backward pass makes their gradients first, and what is updated before
// the step comes down.
void ChooseGradsToKeep(const ParamTable& table, const StateShape& shape, const Residence& residence,
                       double streamed_share, uint64_t early_elements, std::span<uint8_t> keep);

}  // namespace hybridopt
