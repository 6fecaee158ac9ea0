// StepPipeline: one optimizer step, from gradients that are ready to params that are written.
//
//   caller's stream  ...backward | ready
//   compute stream               | norm -> verdict | update of the device share
//   down stream                  | chunk 0 | chunk 1 | chunk 2 | ...
//   CPU workers                                 | chunk 0 | chunk 1 | ...
//   up stream                                             | chunk 0 | chunk 1 | ...
//
// Chunks come down before the verdict is known, as far as the staging ring reaches; nothing is
// written before it is. How they go through the workers is told in chunk_pipeline.h. Where params
// are in host memory there are no streams: the workers make the norm, then one pass over
// everything. Gradients that the host holds already (moves.h) are read where they are; the device's
// share of them goes up first.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "comm/comm.h"
#include "machine/context.h"
#include "machine/lanes.h"
#include "state/capture.h"
#include "state/lifecycle.h"
#include "state/placement.h"
#include "state/state_memory.h"
#include "state/step_counts.h"
#include "state/swap_memory.h"
#include "step/chunk_pipeline.h"
#include "step/host_share.h"
#include "step/norm_sums.h"

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

class StepPipeline {
 public:
  StepPipeline(Context& context, const ParamTable& table, const Placement& placement,
               const StateMemory& memory, Lanes& lanes, const SwapMemory& swap, NormSums& norm_sums,
               const Comm& comm, StepCounts& step_counts, uint64_t rounding_seed);

  // `ready` is recorded behind the gradients; NULL where there are no streams. `capture` is the
  // save that the step must not overtake; NULL if none is running. `reached` is told the marks of a
  // param's progress: kDeviceShareDone, then one more per chunk. Does not allocate. After an error
  // the state is undefined.
  Status Run(const StepRequest& request, EventHandle ready, Capture* capture,
             FunctionRef<void(uint64_t mark)> reached, offload_step_result_t* result);

  // Whether the step looks at all gradients first, those of other ranks included.
  static bool NeedsNorm(const StepRequest& request) {
    return request.grad_norm_max > 0 || (request.flags & OFFLOAD_STEP_ASSUME_FINITE) == 0;
  }

  static constexpr uint64_t kDeviceShareDone = 1;
  // The mark at which the param is all written.
  uint64_t MarkOf(uint32_t param) const {
    return kDeviceShareDone + placement_.params[param].last_chunk_end;
  }

  static constexpr uint32_t kMaxQueuedSteps = 8;
  // Bytes of the tables here and of one queued request, for the plan.
  static uint64_t ScratchBytes(const ParamTable& table, const Placement& placement);

 private:
  static uint64_t MaxDeviceUpdates(const ParamTable& table, const Placement& placement);
  void Prepare(const StepRequest& request);
  uint32_t CoefficientsFor(const offload_group_t& group, uint32_t group_id, uint64_t step);
  void CountStep(const Verdict& verdict, offload_step_result_t* result);
  void ScaleCoefficients(const Verdict& verdict);
  HostStep HostStepNow() const { return {params_, active_, host_coefficients_, capture_}; }

  Status RunInPlace(const StepRequest& request, offload_step_result_t* result, Verdict* verdict);
  void AwaitCaptureOfDeviceShare();
  void AwaitBorrowed(offload_step_result_t* result);
  Status AwaitGradients(EventHandle ready);
  Status RunStaged(const StepRequest& request, EventHandle ready,
                   FunctionRef<void(uint64_t)> reached, offload_step_result_t* result,
                   Verdict* verdict);

  bool VerdictOnDevice() const;
  Status QueueVerdict(const StepRequest& request);
  Result<Verdict> AwaitVerdict(const StepRequest& request);
  void ListNormInputs();
  Result<Verdict> DecideOnHost(const StepRequest& request, const double* landed_blocks);

  Status QueueDeviceUpdates();
  DeviceUpdate DeviceUpdateOf(uint32_t id) const;
  void AddDeviceUpdates(const DeviceUpdate& whole, uint32_t id, uint64_t begin, uint64_t count);
  Status QueueUpdate(Rule rule, size_t first);
  Status QueueUpdateFromHost(uint32_t id);

  Status AwaitDeviceShare(FunctionRef<void(uint64_t)> reached, offload_step_result_t* result);

  Context& context_;
  Device& device_;
  const ParamTable& table_;  // counts, dtypes and groups' ids only: addresses come with requests
  const Placement& placement_;
  const StateMemory& memory_;
  Lanes& lanes_;
  const SwapMemory& swap_;
  NormSums& norm_sums_;
  const Comm& comm_;
  StepCounts& step_counts_;
  const uint64_t rounding_seed_;
  const HostShare host_share_;
  ChunkPipeline chunks_;
  WorkPieces pieces_;  // of a step in place
  bool has_replicas_ = false;

  Capture* capture_ = nullptr;  // of the running step
  // Of the running step. Their capacity is taken when the pipeline is made.
  std::vector<StepParam> params_;
  ActiveElements active_;
  std::vector<Coefficients> coefficients_;       // grad_factor: maximize's sign
  std::vector<Coefficients> host_coefficients_;  // the same, with the verdict's factor in
  struct Memo {
    uint64_t step;
    uint32_t coefficients;
  };
  std::vector<Memo> memos_;  // per group: the coefficients computed last
  std::vector<NormInput> norm_inputs_;
  std::vector<DeviceUpdate> device_updates_;
};

}  // namespace hybridopt
