// Optimizer: registering -> committed -> (perhaps) poisoned. The ABI's calls, one to one.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/context.h"
#include "core/lanes.h"
#include "core/param_table.h"
#include "core/placement.h"
#include "core/state_memory.h"
#include "core/step.h"
#include "core/timeline.h"

namespace hybridopt {

class Optimizer {
 public:
  static Result<std::shared_ptr<Optimizer>> Create(std::shared_ptr<Context> context,
                                                   const offload_optimizer_options_t& options);
  Optimizer(std::shared_ptr<Context> context, const offload_optimizer_options_t& options);
  ~Optimizer();  // finishes queued work

  Result<uint32_t> AddGroup(const offload_group_t& group);
  Status SetGroup(uint32_t id, const offload_group_t& group);
  Result<uint32_t> AddParams(std::span<const ParamInput> params);
  Status Bind(std::span<const offload_binding_t> bindings);
  // Room for the bindings of one call, kept so that a bind before every step allocates nothing.
  std::vector<offload_binding_t>& ClearedBindings() {
    bindings_.clear();
    return bindings_;
  }

  Result<offload_plan_t> Plan() const;
  Status Commit(StreamHandle stream);

  Result<offload_ticket_t> Step(const offload_step_options_t& options);
  Result<offload_step_result_t> StepResult(offload_ticket_t ticket) const;
  Status Wait(offload_ticket_t ticket, int64_t timeout_ns);
  Status StreamWait(offload_ticket_t ticket, StreamHandle stream, std::span<const uint32_t> params);

  Result<offload_state_view_t> State(uint32_t param, int32_t kind) const;
  offload_stats_t Stats() const;

 private:
  // What commit takes. The timeline comes last, so that its work ends before what it works on.
  struct Committed {
    Placement placement;
    std::unique_ptr<StateMemory> memory;
    std::unique_ptr<StepPipeline> pipeline;
    std::unique_ptr<Lanes> lanes;  // behind the pipeline: streams may still read its tables
    std::array<StepRequest, Timeline::kCapacity> requests;
    std::vector<bool> momentum_free;  // per group: committed without a momentum_buffer
    std::unique_ptr<Timeline> timeline;
  };

  PlacementOptions MakePlacementOptions() const;
  Status CheckRoom(const offload_plan_t& plan) const;
  Status CheckCommitted() const;
  Status FillRequest(const offload_step_options_t& options, StepRequest& request) const;
  Status Execute(uint32_t slot, uint64_t sequence);
  void Remember(uint64_t sequence, const offload_step_result_t& result);
  // The sequence number of a ticket of this optimizer; 0 stands for the last one.
  Result<uint64_t> SequenceOf(offload_ticket_t ticket) const;

  const std::shared_ptr<Context> context_;
  const offload_optimizer_options_t options_;
  const uint64_t ticket_tag_;  // tells this optimizer's tickets from others'
  ParamTable table_;
  std::vector<offload_binding_t> bindings_;  // of the running offload_optimizer_bind

  mutable std::mutex results_mutex_;
  struct Remembered {
    uint64_t sequence = 0;
    offload_step_result_t result{};
  };
  std::array<Remembered, 64> results_;  // guarded by results_mutex_
  offload_stats_t stats_{};             // guarded by results_mutex_

  std::unique_ptr<Committed> committed_;
  std::atomic<bool> is_committed_ = false;  // for the calls that any thread may make at any time
};

}  // namespace hybridopt
