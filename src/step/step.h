// StepPipeline: one optimizer step, from gradients that are ready to params that are written.
//
//   caller's stream  ...backward | ready
//   compute stream               | norm -> verdict | update of what the device holds
//   down stream                  | chunk 0 | chunk 1 | chunk 2 | ...
//   CPU workers                                 | chunk 0 | chunk 1 | ...
//   up stream                                             | chunk 0 | chunk 1 | ...
//
// Chunks come down before the verdict is known, as far as the staging ring reaches; nothing is
// written before it is. How they go through the workers is told in chunk_pipeline.h. Other chunks
// are taken by streamed_executor.h from the same queue: their state goes to the device. Where
// params are in host memory there are no streams: the workers make the norm, then one pass over
// everything. Gradients that the host holds already (moves.h) are read where they are; what
// the device updates goes up first.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "comm/comm.h"
#include "machine/context.h"
#include "machine/lanes.h"
#include "state/capture.h"
#include "step/executors/chunk_pipeline.h"
#include "step/executors/chunk_queue.h"
#include "step/executors/chunk_update.h"
#include "step/executors/device_executor.h"
#include "step/executors/streamed_executor.h"
#include "step/norm_sums.h"
#include "step/step_plan.h"

namespace hybridopt {

// What a step works on, and where its parts are. All of it outlives the pipeline. `residence` and
// `chunks` change between steps; UseChunks tells.
struct StepParts {
  const ParamTable& table;
  const StateShape& shape;
  const Residence& residence;
  const ChunkTable& chunks;
  const StateMemory& memory;
  const SwapMemory& swap;
  Lanes& lanes;
  NormSums& norm_sums;
  StepCounts& step_counts;
  const Comm& comm;
};

class StepPipeline {
 public:
  StepPipeline(Context& context, const StepParts& parts, uint64_t rounding_seed);

  // Starts the thread that it needs besides the caller of Run, before the first Run.
  Status Start() { return streamed_.Start(); }
  // Says that the residence, and with it chunks and the staging ring, has changed.
  void UseChunks();

  // `ready` is recorded behind the gradients; NULL where there are no streams. `capture` is the
  // save that the step must not overtake; NULL if none is running. `reached` is told the marks of a
  // param's progress: kDeviceDone, then one more per chunk. Does not allocate. After an error the
  // state is undefined.
  Status Run(const StepRequest& request, EventHandle ready, Capture* capture,
             FunctionRef<void(uint64_t mark)> reached, offload_step_result_t* result);

  // Whether the step looks at all gradients first, those of other ranks included.
  static bool NeedsNorm(const StepRequest& request) {
    return request.grad_norm_max > 0 || (request.flags & OFFLOAD_STEP_ASSUME_FINITE) == 0;
  }

  // The mark at which the device's own update is done. At kDeviceDone + n the first n chunks are
  // too.
  static constexpr uint64_t kDeviceDone = 1;

  static constexpr uint32_t kMaxQueuedSteps = 8;
  // Bytes of the tables here and of the queued requests, for the plan.
  static uint64_t ScratchBytes(const ParamTable& table, const StateShape& shape);

 private:
  void CountStep(const Verdict& verdict, offload_step_result_t* result);
  void ScaleCoefficients(const Verdict& verdict);
  HostStep HostStepNow() const { return {plan_, host_coefficients_, capture_}; }

  Status RunInPlace(const StepRequest& request, offload_step_result_t* result, Verdict* verdict);
  void AwaitCaptureOfDevice();
  void AwaitBorrowed(offload_step_result_t* result);
  Status AwaitGradients(EventHandle ready);
  Status RunStaged(const StepRequest& request, EventHandle ready, offload_step_result_t* result,
                   Verdict* verdict);
  void TakeAhead();
  Status RunChunks(offload_step_result_t* result);
  Status Finished(uint32_t chunk);

  bool VerdictOnDevice() const;
  Status QueueVerdict(const StepRequest& request);
  Result<Verdict> AwaitVerdict(const StepRequest& request);
  void ListNormInputs();
  Result<Verdict> DecideOnHost(const StepRequest& request, const double* landed_blocks);

  Context& context_;
  Device& device_;
  const ParamTable& table_;  // counts, dtypes and groups' ids only: addresses come with requests
  const StateShape& shape_;
  Lanes& lanes_;
  NormSums& norm_sums_;
  StepCounts& step_counts_;
  const Comm& comm_;
  StepPlan plan_;
  const ChunkUpdater updater_;
  ChunkQueue queue_;
  ChunkPipeline chunks_;
  StreamedExecutor streamed_;
  DeviceExecutor device_executor_;
  WorkPieces pieces_;  // of a step in place
  bool has_replicas_ = false;

  // Of the running step. Their capacity is taken when the pipeline is made.
  Capture* capture_ = nullptr;
  std::optional<FunctionRef<void(uint64_t mark)>> reached_;
  std::mutex finished_mutex_;    // held while a chunk is noted, so that marks only grow
  bool device_updated_ = false;  // guarded by finished_mutex_
  std::vector<Coefficients> host_coefficients_;  // the plan's, with the verdict's factor in
  std::vector<NormInput> norm_inputs_;
};

}  // namespace hybridopt
