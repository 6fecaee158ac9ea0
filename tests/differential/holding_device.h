// HoldingDevice: one executor of a step waits until the other has done its part.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "../labelled_device.h"

namespace hybridopt {

// Holds back each thread that waits for one kind of event, until another kind has been recorded
// often enough since Close.
class HoldingDevice final : public LabelledDevice {
 public:
  HoldingDevice(std::unique_ptr<Device> device, std::string held, std::string counted)
      : LabelledDevice(std::move(device)), held_(std::move(held)), counted_(std::move(counted)) {}

  void Close(int until) {
    std::lock_guard lock(mutex_);
    left_ = until;
  }
  // Each slot has two such events; the second one marks its end.
  Status Record(EventHandle event, StreamHandle stream) override {
    HYBRIDOPT_TRY(ForwardingDevice::Record(event, stream));
    std::lock_guard lock(mutex_);
    if (LabelOf(event) == counted_ && left_ > 0) left_ -= 1;
    changed_.notify_all();
    return {};
  }
  Status Wait(EventHandle event, int64_t timeout_ns) override {
    if (LabelOf(event) == held_) HYBRIDOPT_TRY(AwaitTheOther());
    return ForwardingDevice::Wait(event, timeout_ns);
  }

 private:
  // Even on a slow machine the other executor reaches its next event within a minute.
  Status AwaitTheOther() {
    std::unique_lock lock(mutex_);
    for (int left = left_; left > 0; left = left_) {
      changed_.wait_for(lock, std::chrono::seconds(60), [&] { return left_ < left; });
      if (left_ == left)
        return Status::Error(OFFLOAD_DEVICE_FAILED, "the other executor leaves %d events", left);
    }
    return {};
  }

  const std::string held_;
  const std::string counted_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int left_ = 0;  // guarded by mutex_
};

}  // namespace hybridopt
