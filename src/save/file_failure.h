// The consequences of a failed save or load: its ticket reports the failure, or the optimizer is
// poisoned.
#pragma once

#include <new>
#include <utility>

#include "machine/context.h"
#include "machine/timeline.h"

namespace hybridopt {

// Turns std::bad_alloc into a status, so that this rank still takes part in the other ranks' rounds
// and the optimizer stays usable.
template <typename Call>
auto CatchBadAlloc(const char* what, Call&& call) -> decltype(call()) try {
  return call();
} catch (const std::bad_alloc&) {
  return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY,
                       "out of host memory for the tables of a %s; nothing was changed", what);
}

// Reports the failure of the save or load with this sequence number. If only that save or load
// fails, for example because a disk is full, logs the failure and returns OK. Returns the failure
// of a broken device or a lost rank, which poisons the optimizer; it is logged where it poisons.
inline Status ReportFailure(const Context& context, Timeline& timeline, uint64_t sequence,
                            Status failure) {
  const bool ends_optimizer =
      failure.code() == OFFLOAD_DEVICE_FAILED || failure.code() == OFFLOAD_COMM_FAILED;
  if (!ends_optimizer) context.Log(OFFLOAD_LOG_ERROR, failure.message().c_str());
  timeline.Report(sequence, failure);
  return ends_optimizer ? failure : Status();
}

}  // namespace hybridopt
