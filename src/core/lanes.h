// Lanes: the streams, events, staging slots and device scratch that one optimizer's pipeline runs
// on. All of it is made at commit; a step only uses it.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "core/context.h"
#include "core/placement.h"
#include "core/timeline.h"
#include "memory/arena.h"
#include "memory/staging.h"

namespace hybridopt {

// A stretch of work on a stream, timed by the device.
struct TimedEvent {
  EventHandle begin = nullptr;
  EventHandle end = nullptr;
};

class Lanes {
 public:
  static Result<std::unique_ptr<Lanes>> Create(Context& context, const Placement& placement);
  ~Lanes();

  // The staging ring, in host memory.
  static uint64_t PinnedBytes(const Placement& placement);
  // Bytes on the device for norm sums and the verdict.
  static uint64_t DeviceScratchBytes(const Placement& placement);

  // The pipeline's own waits: bounded, and a wait that runs out is a failure of the device.
  Status Wait(EventHandle event, const char* what);
  Result<double> Seconds(const TimedEvent& event);

  Device& device() { return context_.device(); }
  StagingRing& ring() { return ring_; }

  StreamHandle down = nullptr;                           // device to host
  StreamHandle up = nullptr;                             // host to device
  StreamHandle compute = nullptr;                        // norm and updates on the device
  std::vector<TimedEvent> landed;                        // per slot: grads have come down
  std::vector<TimedEvent> uploaded;                      // per slot: params have gone up
  std::array<EventHandle, Timeline::kCapacity> ready{};  // per queued step: gradients are there
  TimedEvent device_updated;
  EventHandle verdict_known = nullptr;
  double* block_sums = nullptr;       // device
  Verdict* device_verdict = nullptr;  // device
  Verdict* host_verdict = nullptr;    // pinned

 private:
  explicit Lanes(Context& context) : context_(context) {}
  Status CreateAll(const Placement& placement);
  Result<StreamHandle> NewStream(const char* label);
  Status NewEvent(const char* label, EventHandle* event);
  Status NewTimedEvent(const char* label, TimedEvent* event);

  Context& context_;
  std::vector<StreamHandle> streams_;  // to destroy
  std::vector<EventHandle> events_;    // to destroy
  void* scratch_ = nullptr;            // device
  uint64_t pinned_bytes_ = 0;          // reserved in the context
  StagingRing ring_;
  StagingRing verdict_page_;
};

}  // namespace hybridopt
