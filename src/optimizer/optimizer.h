// Optimizer: registering -> committed -> (perhaps) poisoned. The ABI's calls, one to one.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "comm/comm.h"
#include "machine/context.h"
#include "machine/lanes.h"
#include "machine/timeline.h"
#include "optimizer/plan.h"
#include "save/checkpoints.h"
#include "state/lifecycle.h"
#include "state/param_table.h"
#include "step/moves.h"
#include "step/residence_change.h"
#include "step/step.h"
#include "storage/state_memory.h"

namespace hybridopt {

class Optimizer {
 public:
  static Result<std::shared_ptr<Optimizer>> Create(std::shared_ptr<Context> context,
                                                   const offload_optimizer_options_t& options);
  Optimizer(std::shared_ptr<Context> context, const offload_optimizer_options_t& options);
  ~Optimizer();  // finishes queued work
  // Finishes queued work while other threads may still be in calls: those that wait for it return,
  // and nothing more can be queued. COMM_FAILED if a comm function does not return: then the thread
  // that is in it uses this optimizer for ever.
  Status Close();

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
  // Streams and params of the options as spans; params without an address mean all.
  Result<offload_ticket_t> MoveResource(Move move, std::span<const uint32_t> params,
                                        std::span<const offload_stream_t> streams);
  // Changes which tier holds which state, between two steps. Bodies of this and of what serves it
  // are in optimizer_residence.cpp.
  Result<offload_ticket_t> SetDeviceFraction(double device_fraction);
  // Bodies of these two are in optimizer_checkpoint.cpp.
  Result<offload_ticket_t> Save(const offload_save_options_t& options);
  Result<offload_ticket_t> Load(const offload_load_options_t& options);
  Result<offload_step_result_t> StepResult(offload_ticket_t ticket) const;
  Status Wait(offload_ticket_t ticket, int64_t timeout_ns);
  Status StreamWait(offload_ticket_t ticket, StreamHandle stream, std::span<const uint32_t> params);

  // Bodies of these are in optimizer_state.cpp.
  Result<offload_state_view_t> State(uint32_t param, int32_t kind) const;
  Status SetStepCount(uint32_t param, uint64_t step_count);
  offload_stats_t Stats() const;

 private:
  // What one slot of the timeline holds.
  using Request = std::variant<std::monostate, StepRequest*, MoveRequest, ResidenceRequest,
                               SaveRequest, LoadRequest>;

  // What commit takes. The timeline comes last, so that its work ends before what it works on.
  struct Committed {
    StateShape shape;
    Arrangement decided;              // by the calls made so far
    uint64_t residence_sequence = 0;  // of the last call that changed it
    Residence residence;              // of the timeline: what queued work has done so far
    ChunkTable chunks;                // likewise
    std::unique_ptr<StateMemory> memory;
    std::unique_ptr<SwapMemory> swap;
    std::unique_ptr<NormSums> norm_sums;
    std::optional<StepCounts> step_counts;
    std::unique_ptr<StepPipeline> pipeline;
    std::unique_ptr<Mover> mover;
    std::unique_ptr<ResidenceChanger> residence_changer;
    std::unique_ptr<Checkpoints> checkpoints;
    std::unique_ptr<Lanes> lanes;  // behind all that its streams may still read and write
    std::unique_ptr<Lifecycle> lifecycle;
    std::array<Request, Timeline::kCapacity> requests;
    std::array<StepRequest, StepPipeline::kMaxQueuedSteps> steps;  // used in turn
    std::atomic<uint64_t> steps_queued = 0;                        // since commit
    std::atomic<uint64_t> steps_done = 0;
    std::atomic<uint64_t> last_step = 0;  // its sequence number
    std::vector<uint32_t> all_ids;
    std::optional<uint32_t> partial_param;  // the first that is a part of its tensor
    bool device_memory_held = true;         // as of the calls made so far
    std::atomic<uint64_t> planned_device_bytes = 0;
    std::atomic<uint64_t> pinned_state_bytes = 0;  // held for the device's ring
    uint64_t host_state_bytes = 0;                 // of the host share, without padding
    uint64_t device_state_bytes = 0;               // of the device share, without padding
    std::vector<bool> momentum_free;               // per group: committed without a momentum_buffer
    std::unique_ptr<Timeline> timeline;
  };

  Status CheckRoom(const offload_plan_t& plan) const;
  Result<offload_plan_t> Settle(const StateShape& shape, Arrangement& arrangement) const;
  bool LeavesRoom(const offload_plan_t& plan) const;
  Status CheckStreams(const StateShape& shape, const Arrangement& arrangement) const;
  Status PinStates(Committed& committed);
  Status PinForStreams(Committed& committed);
  Status CheckChunkCount(const StateShape& shape) const;
  Status TakeMemory(Committed& committed);
  void MakeParts(Committed& committed);
  void FillTables(Committed& committed) const;
  void CountStateBytes(Committed& committed) const;
  NodeBytes FoundNodeBytes() const;
  Status CheckCommitted() const;
  Status CheckIdle() const;
  Status CheckStepOptions(const offload_step_options_t& options) const;
  void FillStep(const offload_step_options_t& options, StepRequest& request) const;
  Status RecordProducers(uint32_t slot, std::span<const offload_stream_t> streams);
  Status TakeDeviceMemory(MoveRequest& request);
  void FillMove(Move move, std::span<const uint32_t> ids, MoveRequest& request);
  void ReleaseAddresses(Move move, std::span<const uint32_t> ids);
  offload_ticket_t TicketOf(uint64_t sequence) const;
  Status Execute(uint32_t slot, uint64_t sequence);
  Status ExecuteRequest(uint32_t slot, uint64_t sequence);
  Status ExecuteStep(const StepRequest& request, uint32_t slot, uint64_t sequence);
  Status ExecuteMove(MoveRequest& request, uint32_t slot);
  Status TakeForResidence(const Arrangement& wanted, const offload_plan_t& plan,
                          ResidenceRequest& request) const;
  Status ExecuteResidenceChange(ResidenceRequest& request);
  uint64_t MarkOf(uint32_t param, uint64_t sequence) const;
  EventHandle ReadyEvent(uint32_t slot) const;
  Status Settle(bool failure);
  std::vector<ParamLocation> LocationsNow() const;
  void Remember(uint64_t sequence, const offload_step_result_t& result);
  // The sequence number of a ticket of this optimizer; 0 stands for the last one.
  Result<uint64_t> SequenceOf(offload_ticket_t ticket) const;

  const std::shared_ptr<Context> context_;
  const offload_optimizer_options_t options_;
  Comm comm_;
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
