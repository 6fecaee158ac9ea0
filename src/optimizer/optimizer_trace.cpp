// Traces: how they begin and end. The parts of the optimizer record their events themselves.
#include <algorithm>

#include "machine/trace/trace_file.h"
#include "optimizer/optimizer.h"

namespace hybridopt {

Status Optimizer::StartTrace(uint64_t ring_bytes) {
  HYBRIDOPT_TRY(CheckCommitted());
  HYBRIDOPT_TRY(committed_->timeline->CheckPoison());
  if (trace().on())
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "a trace of this optimizer has been started already; end it with "
                         "offload_optimizer_trace_stop first");
  if (trace().started())
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "the last trace has not been written; give offload_optimizer_trace_stop a "
                         "path that can be written, or NULL to give the trace up");
  const uint64_t bytes = ring_bytes != 0 ? ring_bytes : Trace::kDefaultRingBytes;
  if (bytes < Trace::kLeastRingBytes || bytes > Trace::kMostRingBytes)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "ring_bytes is %llu, expected %llu to %llu (0 = %llu)",
                         static_cast<unsigned long long>(ring_bytes),
                         static_cast<unsigned long long>(Trace::kLeastRingBytes),
                         static_cast<unsigned long long>(Trace::kMostRingBytes),
                         static_cast<unsigned long long>(Trace::kDefaultRingBytes));
  return trace().Start(bytes);
}

Status Optimizer::StopTrace(const char* path, uint64_t* dropped) {
  HYBRIDOPT_TRY(CheckCommitted());
  if (!trace().started())
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "no trace has been started; call offload_optimizer_trace_start first");
  // A failure of queued work is for the calls that wait for this work. The trace shows what led to
  // it.
  if (trace().on()) (void)committed_->timeline->AwaitAll();
  trace().Stop();
  if (path != nullptr) {
    const TraceRecord record = trace().Record();
    HYBRIDOPT_TRY(WriteTrace(context_->files(), path, record, context_->device().name()));
    if (dropped != nullptr) *dropped = record.dropped;
  }
  trace().Forget();
  return {};
}

}  // namespace hybridopt
