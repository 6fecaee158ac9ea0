// StepPipeline: one optimizer step, from gradients that are ready to params that are written.
//
//   caller's stream  ...backward | ready
//   compute stream               | norm -> verdict | update of what the device holds
//   down stream                  | chunk 0 | chunk 1 | chunk 2 | ...
//   CPU workers                                 | chunk 0 | chunk 1 | ...
//   up stream                                             | chunk 0 | chunk 1 | ...
//
// The gradients of the first chunks are copied down before the verdict is known, at most as many
// chunks as the staging ring has slots; nothing is written before the verdict. cpu_executor.h shows
// how the workers update these chunks. StreamedExecutor takes other chunks from the same queue and
// copies their state to the device. EarlyUpdates may have updated some chunks before the step; the
// step keeps these updates if the verdict is the assumed one. If params are in host memory there
// are no streams: the workers compute the norm, then update everything in one pass. Gradients that
// the host holds already (move/mover.h) are read there; those that the device needs are copied up
// first.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "comm/comm.h"
#include "machine/context.h"
#include "machine/host_norm_sums.h"
#include "machine/lanes.h"
#include "place/capture.h"
#include "state/move_table.h"
#include "step/executors/aside_copier.h"
#include "step/executors/chunk_queue.h"
#include "step/executors/chunk_update.h"
#include "step/executors/cpu_executor.h"
#include "step/executors/device_executor.h"
#include "step/executors/early_updates.h"
#include "step/executors/streamed_executor.h"
#include "step/step_plan.h"

namespace hybridopt {

// The objects that a step works with. All of them must outlive the pipeline. `residence` and
// `chunks` change between steps; the caller then calls UseChunks.
struct StepParts {
  const ParamTable& table;
  const StateShape& shape;
  const Residence& residence;
  const ChunkTable& chunks;
  const StateMemory& memory;
  const SwapMemory& swap;
  Lanes& lanes;
  HostNormSums& host_norm_sums;
  StepCounts& step_counts;
  const Comm& comm;
  const ChangeLog& changes;
};

// A running step reports its progress to these, in marks (StepPipeline::kDevicePart). Any thread
// calls them.
struct StepMarks {
  // The work that writes the params up to this mark is queued on streams of the lanes. The mark may
  // be below an earlier one.
  FunctionRef<void(uint64_t mark)> issued;
  // The params up to this mark are at their addresses.
  FunctionRef<void(uint64_t mark)> reached;
};

class StepPipeline : private ChunkProgress {
 public:
  StepPipeline(Context& context, const StepParts& parts, uint64_t rounding_seed);

  // Reserves a thread that works beside the caller of Run, and takes memory for early updates. To
  // be called once, before the first Run.
  Status Start();
  // To be called after the residence has changed: chunks and staging ring may have changed with it.
  void UseChunks();

  // `ready` is an event recorded after the gradients; NULL if there are no streams. `capture`
  // belongs to the running save, which the step must not overtake; NULL if no save runs. Run does
  // not allocate. After an error the state is undefined.
  Status Run(const StepRequest& request, EventHandle ready, Capture* capture,
             const StepMarks& marks, offload_step_result_t* result);

  // These notify early_updates.h. GradsComing: before an offload copies gradients; `groups` are
  // those at the time of the offload's call. GradsArrived: after these copies. UndoEarly: before
  // other work that reads or changes what a step does.
  Status GradsComing(std::span<const MoveItem> grads, std::span<const offload_group_t> groups,
                     Capture* capture);
  Status GradsArrived() { return early_.BeginArrived(); }
  Status UndoEarly() { return early_.Undo(); }
  // Waits for the workers that update chunks early. To be called before any object that they use is
  // destroyed.
  void CloseEarly() { early_.Close(); }
  // The bytes of pinned memory for early updates.
  static uint64_t EarlyBytes(const ParamTable& table, const StateShape& shape) {
    return EarlyUpdates::RoomBytes(table, shape);
  }
  uint64_t early_elements_wanted() const { return early_.elements_wanted(); }
  void AddNodeBytes(NodeBytes* sum) const { early_.AddNodeBytes(sum); }

  // Makes later work on that stream of the caller wait for the work that writes the params up to a
  // mark that has been issued. If a later step runs, the stream may wait for more than that. Any
  // thread may call this.
  Status PutBehind(StreamHandle stream, uint64_t mark) const;

  // Whether the step, before it updates, needs the norm of all gradients, including those of other
  // ranks.
  static bool NeedsNorm(const StepRequest& request) {
    return request.grad_norm_max > 0 || (request.flags & OFFLOAD_STEP_ASSUME_FINITE) == 0;
  }

  // The mark of the device share. Mark kDevicePart + n stands for the device share and the first n
  // chunks.
  static constexpr uint64_t kDevicePart = 1;

  static constexpr uint32_t kMaxQueuedSteps = 8;
  // Bytes of this class's tables and of the queued requests, for the plan.
  static uint64_t ScratchBytes(const ParamTable& table, const StateShape& shape);

 private:
  void CountStep(const Verdict& verdict, offload_step_result_t* result);
  HostStep HostStepNow() const { return {plan_, host_coefficients_, capture_}; }

  // Reads state on disk ahead, in the order of chunks, from before the verdict is known.
  void BeginDisk();
  Status EndDisk() { return memory_.disk() != nullptr ? memory_.disk()->End() : Status(); }

  Status RunInPlace(const StepRequest& request, offload_step_result_t* result, Verdict* verdict);
  Status UpdateThroughDiskRing(const HostStep& step, offload_step_result_t* result);
  Status UpdateInPlace(const HostStep& step, uint32_t chunk, const WorkRange& range);
  Status PutDeviceShareAside();
  Status PutBorrowedAside(offload_step_result_t* result);
  Status AwaitGradients(EventHandle ready);
  Status RunStaged(const StepRequest& request, EventHandle ready, offload_step_result_t* result,
                   Verdict* verdict);
  bool CpuTakes() const { return shape_.options.cpu_updates || !streamed_.on(); }
  void TakeAhead();
  void PreferExecutors();
  void TakeInTurns();
  Status DecideEarly(const Verdict& verdict, offload_step_result_t* result);
  Status RunChunks(offload_step_result_t* result);
  void Issued(uint32_t chunk, EventHandle written) override;
  Status Finished(uint32_t chunk) override;

  bool VerdictOnDevice() const;
  Status QueueVerdict(const StepRequest& request);
  Result<Verdict> AwaitVerdict(const StepRequest& request);
  void ListNormInputs();
  Result<Verdict> DecideOnHost(const StepRequest& request, const double* landed_blocks);

  Context& context_;
  Device& device_;
  const ParamTable& table_;  // only for counts, dtypes and group ids; addresses are in the requests
  const StateShape& shape_;
  Lanes& lanes_;
  HostNormSums& host_norm_sums_;
  StepCounts& step_counts_;
  const Comm& comm_;
  const StateMemory& memory_;
  StepPlan plan_;
  const ChunkUpdater updater_;
  AsideCopier aside_;
  ChunkQueue queue_;
  CpuExecutor cpu_executor_;
  StreamedExecutor streamed_;
  DeviceExecutor device_executor_;
  EarlyUpdates early_;
  ChunkWork work_;  // for a step in host memory
  bool has_replicas_ = false;

  // State of the running step. The constructor reserves the capacity of the lists.
  Capture* capture_ = nullptr;
  const StepMarks* marks_ = nullptr;
  std::mutex finished_mutex_;    // held while Finished sets a mark, so that marks only grow
  bool device_updated_ = false;  // guarded by finished_mutex_
  std::vector<Coefficients> host_coefficients_;  // the plan's, times the verdict's factor
  std::vector<NormInput> norm_inputs_;
};

}  // namespace hybridopt
