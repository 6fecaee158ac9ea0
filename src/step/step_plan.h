// StepPlan: what one step does: which params take part, with which coefficients, which executor
// updates each of their elements, and by which route gradient and param get there. Pure, and made
// for every step without an allocation.
//
//   executor  state is        gradient                       param
//   device    on the device   there, or up from the host     there
//   cpu       on the host     down, or on the host already   up; where masters are split, down
//                                                            first
//   streamed  on the host,    there, or up from the host     there
//             up and down
//
// Which of the last two updates a chunk is settled while the step runs (chunk_queue.h).
// Where params are in host memory the cpu updates everything in place, and nothing travels.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/coefficients.h"
#include "state/lifecycle.h"
#include "state/step_counts.h"
#include "storage/chunk_table.h"
#include "storage/swap_memory.h"

namespace hybridopt {

// A step as it was when it was queued.
struct StepRequest {
  uint32_t flags = 0;
  double grad_scale = 1;
  double grad_norm_max = 0;
  std::vector<Addresses> addresses;
  std::vector<HostGrad> host_grads;
  std::vector<offload_group_t> groups;
};

// One param's part in a step.
struct StepParam {
  Addresses addresses;
  const std::byte* host_grad;  // the gradient, where the host holds it; else NULL
  int32_t grad_dtype;          // as it is there
  uint32_t coefficients;       // index of its coefficients
  bool active;                 // has a gradient, and elements
  Rounding rounding;

  bool GradComesDown() const { return active && host_grad == nullptr; }
};

class StepPlan {
 public:
  // `residence` and `chunks` are those of the timeline: UseChunks tells when they have changed.
  StepPlan(const ParamTable& table, const StateShape& shape, const Residence& residence,
           const ChunkTable& chunks, const SwapMemory& swap, uint64_t rounding_seed);
  static uint64_t Bytes(const ParamTable& table, const StateShape& shape);
  void UseChunks();

  // Step counts are read and not changed: the step may still be skipped.
  void Make(const StepRequest& request, const StepCounts& step_counts);

  std::span<const StepParam> params() const { return params_; }
  const StepParam& param(uint32_t id) const { return params_[id]; }
  // grad_factor holds maximize's sign.
  std::span<const Coefficients> coefficients() const { return coefficients_; }
  bool host_holds_grads() const { return host_holds_grads_; }

  // Which elements the device updates: the first so many.
  uint64_t device_count(uint32_t id) const {
    return params_[id].active ? residence_.device_count(id) : 0;
  }
  // What is on the host.
  const ChunkTable& chunks() const { return chunks_; }
  uint32_t chunk_count() const { return static_cast<uint32_t>(chunks_.chunks.size()); }
  std::span<const Fragment> fragments(uint32_t chunk) const {
    return chunks_.FragmentsOf(chunks_.chunks[chunk]);
  }
  bool ParamComesDown(uint32_t id) const {
    return params_[id].active && IsSplit(shape_.params[id].layout) && !shape_.options.unified;
  }
  bool params_come_down() const { return params_come_down_; }  // of a chunk of the cpu's
  // Elements that take part: all of a chunk's, and those of its fragments before this one. Workers
  // get equal parts of them.
  uint64_t active_count(uint32_t chunk) const { return active_in_chunk_[chunk]; }
  uint64_t ActiveBefore(const Fragment& fragment) const {
    return active_before_[static_cast<size_t>(&fragment - chunks_.fragments.data())];
  }

 private:
  uint32_t CoefficientsFor(const offload_group_t& group, uint32_t group_id, uint64_t step);
  void CountActive();

  const ParamTable& table_;  // counts, dtypes and groups' ids only: addresses come with requests
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
  bool host_holds_grads_ = false;
  bool params_come_down_ = false;
};

}  // namespace hybridopt
