// LeakyDevice: the simulated device with one kind of wait left out. A test of the tests: the
// pipeline must give wrong bits on it.
#pragma once

#include <atomic>
#include <chrono>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../labelled_device.h"

namespace hybridopt {

// A step has one more wait for the gradients, kReady. In a step this wait only starts the clock:
// later work of the step waits for later events, on streams that already wait for the gradients. A
// move of gradients does need this wait.
enum class Leak {
  kNone,
  kDownBehindGradients,     // StreamWait of the down stream on the caller's gradients
  kComputeBehindGradients,  // StreamWait of the compute stream on them
  kLanded,                  // Wait for a chunk's gradients, or a check whether they are there
  kUploaded,                // the same for its params, before its slot and its mark are released
  kVerdict,                 // Wait for norm and verdict
  kDeviceUpdated,           // Wait for the device's own update, or a check
  kCallersStream,           // StreamWaitFlag of the caller's stream
  kBehindDeviceUpdate,      // StreamWait of the caller's stream on the device's own update,
  kBehindParamsUp,          // on the copy of params to the device,
  kBehindStreamedUpdate,    // and on the update of chunks whose state streams
  kReady,                   // Wait for the gradients by the timeline's thread
  kMoved,                   // Wait for gradients that are offloaded
  kSummed,                  // Wait for the sums of their norms
  // The waits of the streamed executor. It has one more, for state that goes up in a step that is
  // then skipped: only the lifetime of memory depends on it (ASkippedStepEndsBehindItsCopies).
  kUpdateBehindVerdict,  // StreamWait of the streamed update on the verdict
  kUpdateBehindState,    // StreamWait of the streamed update on the state's copy to the device
  kDownBehindUpdate,     // StreamWait of the state's copy to the host on the update
  kStateDown,            // Wait for the state's copy to the host
};

class LeakyDevice final : public LabelledDevice {
 public:
  // Leaks only while `leaking`, which outlives the device.
  // A thread that waits on the host for an event labelled `slow_event` is held up for a while.
  LeakyDevice(std::unique_ptr<Device> device, Leak leak, const std::atomic<bool>& leaking,
              bool shares_queues, std::string slow_event)
      : LabelledDevice(std::move(device)),
        leak_(leak),
        leaking_(leaking),
        shares_queues_(shares_queues),
        slow_event_(std::move(slow_event)) {}

  // Returns true so that the host makes the caller's streams wait for steps, as on a real device.
  bool shares_queues() const override {
    return shares_queues_ || ForwardingDevice::shares_queues();
  }

  Status StreamWait(StreamHandle stream, EventHandle event) override {
    if (Leaks(Leak::kDownBehindGradients, stream, "down") && !HasLabel(event, "state updated"))
      return {};
    if (Leaks(Leak::kComputeBehindGradients, stream, "device update")) return {};
    if (Leaks(Leak::kUpdateBehindVerdict, event, "verdict set")) return {};
    if (Leaks(Leak::kUpdateBehindState, event, "state up")) return {};
    const bool by_down = HasLabel(stream, "down");  // else by the caller's stream
    if (by_down && Leaks(Leak::kDownBehindUpdate, event, "state updated")) return {};
    if (!by_down && Leaks(Leak::kBehindStreamedUpdate, event, "state updated")) return {};
    if (Leaks(Leak::kBehindDeviceUpdate, event, "device updated")) return {};
    if (Leaks(Leak::kBehindParamsUp, event, "params uploaded")) return {};
    return ForwardingDevice::StreamWait(stream, event);
  }
  Status StreamWaitFlag(StreamHandle stream, const std::atomic<uint64_t>* flag,
                        uint64_t value) override {
    if (leaking_ && leak_ == Leak::kCallersStream) return {};
    return ForwardingDevice::StreamWaitFlag(stream, flag, value);
  }
  Result<bool> Reached(EventHandle event) override {
    if (Leaks(Leak::kLanded, event, "gradients landed")) return true;
    if (Leaks(Leak::kUploaded, event, "params uploaded")) return true;
    if (Leaks(Leak::kDeviceUpdated, event, "device updated")) return true;
    return ForwardingDevice::Reached(event);
  }
  Status Wait(EventHandle event, int64_t timeout_ns) override {
    if (leaking_ && HasLabel(event, slow_event_))
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    if (Leaks(Leak::kLanded, event, "gradients landed")) return {};
    if (Leaks(Leak::kUploaded, event, "params uploaded")) return {};
    if (Leaks(Leak::kStateDown, event, "state down")) return {};
    if (Leaks(Leak::kVerdict, event, "verdict known")) return {};
    if (Leaks(Leak::kVerdict, event, "moved")) return {};  // commit waits for these
    if (Leaks(Leak::kDeviceUpdated, event, "device updated")) return {};
    if (Leaks(Leak::kReady, event, "caller ready")) return {};
    if (Leaks(Leak::kMoved, event, "moved")) return {};
    if (Leaks(Leak::kSummed, event, "gradients summed")) return {};
    return ForwardingDevice::Wait(event, timeout_ns);
  }
  // If a wait is missing, the caller of a launch may overwrite the launch's lists while the device
  // reads them. The device gets copies of these lists, so that a missing wait shows in the computed
  // bits only.
  Status Update(StreamHandle stream, const UpdateLaunch& launch) override {
    if (!leaking_) return ForwardingDevice::Update(stream, launch);
    if (leak_ == Leak::kBehindDeviceUpdate) HYBRIDOPT_TRY(HoldUp(stream));
    UpdateLaunch kept = launch;
    kept.updates = Keep(launch.updates, updates_);
    kept.coefficients = Keep(launch.coefficients, coefficients_);
    return ForwardingDevice::Update(stream, kept);
  }
  Status Norm(StreamHandle stream, const NormLaunch& launch) override {
    if (!leaking_) return ForwardingDevice::Norm(stream, launch);
    NormLaunch kept = launch;
    kept.inputs = Keep(launch.inputs, norm_inputs_);
    return ForwardingDevice::Norm(stream, kept);
  }
  // Delayed, so that a missing wait for the verdict shows: copies of state to the device take time
  // too.
  Status SetVerdict(StreamHandle stream, const Verdict& value, Verdict* device) override {
    if (leaking_ && leak_ == Leak::kUpdateBehindVerdict) HYBRIDOPT_TRY(HoldUp(stream));
    return ForwardingDevice::SetVerdict(stream, value, device);
  }
  // An event for which no thread has waited has no time yet; returning an error for it would reveal
  // the leak.
  Result<double> Elapsed(EventHandle begin, EventHandle end) override {
    if (leak_ != Leak::kNone) return 0.0;
    return ForwardingDevice::Elapsed(begin, end);
  }

 private:
  // Queues commands that have no effect, only delays.
  Status HoldUp(StreamHandle stream) {
    HYBRIDOPT_ASSIGN(const EventHandle nobodys, ForwardingDevice::CreateEvent("nobody's"));
    for (int i = 0; i < 50; ++i) HYBRIDOPT_TRY(ForwardingDevice::Record(nobodys, stream));
    return {};
  }
  // A copy of a launch's list that lives as long as the device.
  template <typename T>
  std::span<const T> Keep(std::span<const T> list, std::deque<std::vector<T>>& kept) {
    std::lock_guard lock(mutex_);
    return kept.emplace_back(list.begin(), list.end());
  }
  bool Leaks(Leak leak, const void* handle, const char* label) {
    return leak == leak_ && leaking_ && HasLabel(handle, label);
  }
  bool HasLabel(const void* handle, const std::string& label) const {
    return LabelOf(handle) == label;
  }

  const Leak leak_;
  const std::atomic<bool>& leaking_;
  const bool shares_queues_;
  const std::string slow_event_;
  std::mutex mutex_;
  // The lists of all launches; guarded by mutex_.
  std::deque<std::vector<DeviceUpdate>> updates_;
  std::deque<std::vector<Coefficients>> coefficients_;
  std::deque<std::vector<NormInput>> norm_inputs_;
};

}  // namespace hybridopt
