// LabelledDevice: remembers the labels with which streams and events were made, so that tests can
// tell for what a call is. Thread-safe.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "forwarding_device.h"

namespace hybridopt {

class LabelledDevice : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  Result<StreamHandle> CreateStream(const char* label) override {
    Result<StreamHandle> stream = ForwardingDevice::CreateStream(label);
    if (stream.ok()) SetLabel(stream.value(), label);
    return stream;
  }
  Result<EventHandle> CreateEvent(const char* label) override {
    Result<EventHandle> event = ForwardingDevice::CreateEvent(label);
    if (event.ok()) SetLabel(event.value(), label);
    return event;
  }

 protected:
  // "" of a stream or event that was not made through this device.
  std::string LabelOf(const void* handle) const {
    std::lock_guard lock(labels_mutex_);
    const auto found = labels_.find(handle);
    return found != labels_.end() ? found->second : "";
  }

 private:
  void SetLabel(const void* handle, const char* label) {
    std::lock_guard lock(labels_mutex_);
    labels_[handle] = label;
  }

  mutable std::mutex labels_mutex_;
  std::map<const void*, std::string> labels_;  // guarded by labels_mutex_
};

}  // namespace hybridopt
