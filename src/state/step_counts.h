// StepCounts: how many steps have updated each param, and how many the optimizer has applied.
// Steps, loads and offload_optimizer_set_step_count write the counts, and saves read them: in turns
// of the timeline, or while no work is queued.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "checkpoint/format/format.h"

namespace hybridopt {

// Counts stop at 2^53: coefficients are computed from a count as a double, which cannot represent
// 2^53 + 1, and checkpoints hold no larger number.
class StepCounts {
 public:
  explicit StepCounts(uint32_t param_count) : counts_(param_count) {}

  uint64_t of(uint32_t param) const { return counts_[param]; }
  void set(uint32_t param, uint64_t count) {
    counts_[param] = std::min(count, checkpoint::kStepsMax);
  }
  std::span<const uint64_t> all() const { return counts_; }
  uint64_t applied() const { return applied_; }
  void set_applied(uint64_t steps) { applied_ = std::min(steps, checkpoint::kStepsMax); }

 private:
  std::vector<uint64_t> counts_;
  uint64_t applied_ = 0;
};

}  // namespace hybridopt
