// Optimizer: one member function for each call of the ABI. Its states are registering -> committed
// -> (perhaps) poisoned.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "comm/comm.h"
#include "machine/context.h"
#include "machine/ticket_numbers.h"
#include "optimizer/committed.h"
#include "state/param_table.h"
#include "state_io/change_indices.h"
#include "state_io/change_reader.h"
#include "state_io/state_writer.h"

namespace hybridopt {

// Elements [first, first + count) of one state of a param, as a caller names them.
struct StateKindElements {
  uint32_t param;
  int32_t kind;
  uint64_t first;
  uint64_t count;
};

class Optimizer {
 public:
  static Result<std::shared_ptr<Optimizer>> Create(std::shared_ptr<Context> context,
                                                   const offload_optimizer_options_t& options);
  Optimizer(std::shared_ptr<Context> context, const offload_optimizer_options_t& options);
  ~Optimizer();  // finishes queued work
  // Finishes queued work while other threads may still be in calls. Calls that wait for that work
  // return, and no more work can be queued. COMM_FAILED if a comm function does not return: then
  // the thread that called the comm function may use this optimizer for ever.
  Status Close();

  Result<uint32_t> AddGroup(const offload_group_t& group);
  Status SetGroup(uint32_t id, const offload_group_t& group);
  Result<uint32_t> AddParams(std::span<const ParamInput> params);
  Status Bind(std::span<const offload_binding_t> bindings);
  // An empty list for the bindings of one call. It keeps its capacity, so that a bind before every
  // step does not allocate.
  std::vector<offload_binding_t>& ClearedBindings() {
    bindings_.clear();
    return bindings_;
  }

  Result<offload_plan_t> Plan() const;
  Status Commit(StreamHandle stream);

  Result<offload_ticket_t> Step(const offload_step_options_t& options);
  // `params` and `streams` come from the options; a null span of params means all params.
  // Implemented in optimizer_moves.cpp.
  Result<offload_ticket_t> MoveResource(Move move, std::span<const uint32_t> params,
                                        std::span<const offload_stream_t> streams);
  // Queues an empty request: only the work that the dispatcher does before any request.
  Result<offload_ticket_t> QueueNothing();
  // Changes, between two steps, which tier holds which state. Implemented in
  // optimizer_fraction.cpp.
  Result<offload_ticket_t> SetDeviceFraction(double device_fraction);
  Result<offload_ticket_t> SetFractions(double device_fraction, double disk_fraction);
  // These two are implemented in optimizer_checkpoint.cpp.
  Result<offload_ticket_t> Save(const offload_save_options_t& options);
  Result<offload_ticket_t> Load(const offload_load_options_t& options);
  Result<offload_step_result_t> StepResult(offload_ticket_t ticket) const;
  Status Wait(offload_ticket_t ticket, int64_t timeout_ns);
  Status StreamWait(offload_ticket_t ticket, StreamHandle stream, std::span<const uint32_t> params);

  // These are implemented in optimizer_state.cpp.
  Result<offload_state_view_t> State(uint32_t param, int32_t kind) const;
  Status ReadState(const StateKindElements& asked, float* values);
  Status WriteState(const StateKindElements& asked, const float* values);
  Status SetStepCount(uint32_t param, uint64_t step_count);
  // These three are implemented in optimizer_changes.cpp. A null span of params means all params.
  // Changes writes *out, and `bytes` of it also where the caller's buffer is too small.
  Status Changes(std::span<const uint32_t> params, const offload_changes_options_t& options,
                 offload_changes_t& out);
  Status AcknowledgeChanges(uint64_t take);
  Status MarkChanged(std::span<const uint32_t> params);
  offload_stats_t Stats() const;
  // These two are implemented in optimizer_trace.cpp. A path of NULL gives the trace up; `dropped`
  // may be NULL.
  Status StartTrace(uint64_t ring_bytes);
  Status StopTrace(const char* path, uint64_t* dropped);
  Status GradsToKeep(std::span<uint8_t> keep) const;

 private:
  Status CheckBesideDisk(double disk_fraction, const char* of) const;
  Status CheckRoom(const StateShape& shape, const offload_plan_t& plan) const;
  Result<StateShape> MakeShape() const;
  Result<offload_plan_t> FitRing(const StateShape& shape, Arrangement& arrangement) const;
  bool LeavesRoom(const StateShape& shape, const offload_plan_t& plan) const;
  Status CheckStateMayStream(const StateShape& shape, const Arrangement& arrangement) const;
  Status CheckCpuUpdates(const StateShape& shape, const Status& pinned) const;
  Status PinStates(Committed& committed);
  Status PrepareMatrices(Committed& committed);
  Status CheckChunkCount(const StateShape& shape) const;
  Status CheckCommitted() const;
  Status ClaimState() const;
  Status CheckParam(uint32_t param) const;
  // `what` is the caller's name for the list.
  Status CheckParams(const char* what, std::span<const uint32_t> params) const;
  Status CheckTracking() const;
  Result<std::vector<uint32_t>> ParamsToTake(std::span<const uint32_t> params) const;
  Status AwaitCaller(StreamHandle stream);
  Result<ChangeSource> SourceOfChanges(uint32_t id, const offload_changes_options_t& options,
                                       const ChangeIndices& indices);
  void LayOutChanges(std::span<const uint32_t> ids, const offload_changes_options_t& options,
                     const ChangeReader& reader, std::span<ChangeIndices> indices,
                     offload_changes_t& out);
  Status CollectChanges(std::span<const uint32_t> ids, const offload_changes_options_t& options,
                        ChangeReader& reader, std::span<const ChangeIndices> indices,
                        offload_changes_t& out);
  Status CheckOnDevice(std::span<const uint32_t> ids,
                       const offload_changes_options_t& options) const;
  Status CheckBuffer(const offload_changes_options_t& options, uint64_t bytes) const;
  void MarkRebound(std::span<const offload_binding_t> bindings);
  Result<StateSlot> FindSlot(uint32_t param, int32_t kind, Format master) const;
  Result<StateElements> ElementsOf(const StateKindElements& asked, const float* values) const;
  Status CheckStepOptions(const offload_step_options_t& options) const;
  void FillStep(const offload_step_options_t& options, StepRequest& request) const;
  Status RecordProducers(uint32_t slot, std::span<const offload_stream_t> streams);
  Status TakeDeviceMemory(MoveRequest& request);
  void FillMove(Move move, std::span<const uint32_t> ids, MoveRequest& request);
  void ReleaseAddresses(Move move, std::span<const uint32_t> ids);
  Result<uint32_t> NextSlot();
  offload_ticket_t TicketOf(uint64_t sequence) const;
  Status Execute(uint32_t slot, uint64_t sequence);
  Status Settle(bool failure);
  Status InTurn(const char* what, FunctionRef<Status()> work);
  bool MayWait(uint32_t slot) const;
  Status ExecuteRequest(uint32_t slot, uint64_t sequence);
  Status ExecuteStep(const StepRequest& request, uint32_t slot, uint64_t sequence);
  Status OffloadGrads(MoveRequest& request, uint32_t slot);
  Status AwaitBeforeMove(const MoveRequest& request, uint32_t slot);
  Status RunMove(MoveRequest& request);
  Status TakeForResidence(const Arrangement& wanted, const offload_plan_t& plan,
                          ResidenceRequest& request) const;
  Status ExecuteResidenceChange(ResidenceRequest& request);
  Status AwaitIssued(uint64_t sequence, uint64_t mark);
  uint64_t MarkOf(std::span<const uint32_t> params, uint64_t sequence) const;
  EventHandle ReadyEvent(uint32_t slot) const;
  Trace& trace() const { return committed_->lanes->trace(); }
  ParamLocation LocationOf(uint32_t param) const;
  std::vector<ParamLocation> LocationsNow() const;
  void Remember(uint64_t sequence, const offload_step_result_t& result);
  // The sequence number of a ticket of this optimizer; ticket 0 means the last one.
  Result<uint64_t> SequenceOf(offload_ticket_t ticket) const;

  const std::shared_ptr<Context> context_;
  const std::string disk_paths_;               // what options_.disk_paths points to
  const offload_optimizer_options_t options_;  // without comm
  Comm comm_;
  ParamTable table_;
  std::vector<offload_binding_t> bindings_;  // of the running offload_optimizer_bind

  mutable std::mutex tickets_mutex_;
  TicketNumbers tickets_;  // of sequence numbers; guarded by tickets_mutex_

  mutable std::mutex results_mutex_;
  struct Remembered {
    uint64_t sequence = 0;
    offload_step_result_t result{};
  };
  std::array<Remembered, 64> results_;  // guarded by results_mutex_
  offload_stats_t stats_{};             // guarded by results_mutex_
  // The part of the host share that was streamed through the device in the last step that updated
  // the host share. Guarded by results_mutex_.
  double streamed_share_ = 0;

  std::vector<offload_change_t> changes_;  // of the last take, for the caller to read

  std::unique_ptr<Committed> committed_;
  std::atomic<bool> is_committed_ = false;  // for the calls that any thread may make at any time
};

}  // namespace hybridopt
