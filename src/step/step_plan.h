// StepPlan: what one step does: which params it updates, by which rules and coefficients, which
// executor updates each element, and on which tier or through which copies the executor gets the
// gradient and the param. Pure. A plan is made for every step, without allocating.
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
  Rule rule;                   // the rule of the update
  uint32_t coefficients;       // index into coefficients(); of matrices: that of the first part
  bool active;                 // it has a gradient and elements, so the step updates it
  Rounding rounding;
  std::span<const NsStep> ns_steps;  // of a param of matrices

  bool GradComesDown() const { return active && host_grad == nullptr; }
};

class StepPlan {
 public:
  // `residence` and `chunks` belong to the timeline. When they have changed, the caller calls
  // UseChunks.
  StepPlan(const ParamTable& table, const StateShape& shape, const Residence& residence,
           const ChunkTable& chunks, const SwapMemory& swap, uint64_t rounding_seed);
  static uint64_t Bytes(const ParamTable& table, const StateShape& shape);
  void UseChunks();

  // Does not change the step counts, because the step may still be skipped.
  void Make(const StepRequest& request, const StepCounts& step_counts);

  std::span<const StepParam> params() const { return params_; }
  const StepParam& param(uint32_t id) const { return params_[id]; }
  // With maximize, grad_factor is negative.
  std::span<const Coefficients> coefficients() const { return coefficients_; }
  // Computes the coefficients for updates on the host: those of the plan, multiplied by the
  // verdict's factor.
  void ScaleCoefficients(float grad_factor, std::vector<Coefficients>* scaled) const {
    scaled->assign(coefficients_.begin(), coefficients_.end());
    for (Coefficients& coefficients : *scaled) coefficients.grad_factor *= grad_factor;
  }
  bool host_holds_grads() const { return host_holds_grads_; }

  // The number of the param's elements that the device updates: its first elements.
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
  // Active elements are the elements of active params. These return the number of active elements
  // in a chunk, and in the chunk's fragments before this one. Workers get equal parts of a chunk's
  // active elements.
  uint64_t active_count(uint32_t chunk) const { return active_in_chunk_[chunk]; }
  uint64_t ActiveBefore(const Fragment& fragment) const {
    return active_before_[static_cast<size_t>(&fragment - chunks_.fragments.data())];
  }

 private:
  uint32_t CoefficientsFor(const offload_group_t& group, uint32_t id, uint64_t step);
  void FillNsSteps(std::span<const offload_group_t> groups);
  void CountActive();

  const ParamTable& table_;  // only for counts, dtypes and group ids; addresses are in the requests
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
  std::vector<Memo> memos_;                // per group: the coefficients that were computed last
  std::vector<NsStep> ns_steps_;           // per group: kNsStepsMost; empty without matrices
  std::vector<uint64_t> active_before_;    // per fragment
  std::vector<uint64_t> active_in_chunk_;  // per chunk
  std::vector<uint64_t> held_in_chunk_;    // of these, elements whose gradients the host holds
  bool host_holds_grads_ = false;
  bool params_come_down_ = false;
};

// Chooses, for each param, whether its gradient stays on the device until the step has read it. It
// stays if the device will update most of the param: the state is on the device, or the state is in
// the part `streamed_share` of the host share that will be streamed. That part is spread evenly
// over the order of updates, so that both executors advance at the same pace. The gradients of the
// last `early_elements` in that order do not stay: a backward pass makes them first, and they are
// needed on the host for updates before the step.
void ChooseGradsToKeep(const ParamTable& table, const StateShape& shape, const Residence& residence,
                       double streamed_share, uint64_t early_elements, std::span<uint8_t> keep);

}  // namespace hybridopt
