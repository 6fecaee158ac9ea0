// DeviceExecutor: updates the elements whose state is on the device, on the compute stream.
#pragma once

#include <cstdint>
#include <vector>

#include "machine/lanes.h"
#include "place/state_memory.h"
#include "state_io/change_log.h"
#include "step/step_plan.h"

namespace hybridopt {

class DeviceExecutor {
 public:
  DeviceExecutor(const ParamTable& table, const StateShape& shape, const StateMemory& memory,
                 Lanes& lanes, const ChangeLog& changes);
  static uint64_t Bytes(const StateShape& shape);

  // Queues all device updates of the plan on the compute stream: one launch for each rule (SGD
  // params with and without momentum have different rules), then, one by one, the params whose
  // gradients the host holds. The plan must not change until these updates have run.
  Status Queue(const StepPlan& plan);
  // Whether the updates have run.
  Result<bool> Updated() { return lanes_.device().Reached(lanes_.device_updated.end); }
  // Waits for the updates. Adds their time to *seconds.
  Status Await(double* seconds);

 private:
  DeviceUpdate UpdateOf(const StepPlan& plan, uint32_t id) const;
  void Add(const DeviceUpdate& whole, uint32_t id, uint64_t begin, uint64_t count);
  Status Launch(const StepPlan& plan, Rule rule, size_t first);
  Status QueueFromHost(const StepPlan& plan, uint32_t id);

  const ParamTable& table_;
  const StateShape& shape_;
  const StateMemory& memory_;
  Lanes& lanes_;
  const ChangeLog& changes_;
  // State of the running step. Launches read the list while more updates are added to it, so that
  // it must not be reallocated: the constructor reserves its capacity.
  std::vector<DeviceUpdate> updates_;
};

}  // namespace hybridopt
