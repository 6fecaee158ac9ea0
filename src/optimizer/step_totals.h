// Adds what a step's result and the totals both have. Written by bindings/generate_abi.py; do not
// edit.
#pragma once

#include "offload.h"

namespace hybridopt {

inline void AddToTotals(const offload_step_result_t& result, offload_stats_t& totals) {
  totals.total_seconds += result.total_seconds;
  totals.norm_seconds += result.norm_seconds;
  totals.grads_down_seconds += result.grads_down_seconds;
  totals.update_seconds += result.update_seconds;
  totals.params_up_seconds += result.params_up_seconds;
  totals.device_update_seconds += result.device_update_seconds;
  totals.stall_seconds += result.stall_seconds;
  totals.grads_down_bytes += result.grads_down_bytes;
  totals.params_up_bytes += result.params_up_bytes;
  totals.cpu_elements += result.cpu_elements;
  totals.streamed_elements += result.streamed_elements;
  totals.state_up_bytes += result.state_up_bytes;
  totals.state_down_bytes += result.state_down_bytes;
  totals.state_up_seconds += result.state_up_seconds;
  totals.streamed_update_seconds += result.streamed_update_seconds;
  totals.state_down_seconds += result.state_down_seconds;
  totals.cpu_idle_seconds += result.cpu_idle_seconds;
  totals.streamed_idle_seconds += result.streamed_idle_seconds;
  totals.early_elements += result.early_elements;
  totals.undone_elements += result.undone_elements;
}

}  // namespace hybridopt
