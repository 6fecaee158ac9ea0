// WatchedDevice: passes every call on to another device. A test can see which calls the library has
// made, or leave out the wait for one producer.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "../forwarding_device.h"

namespace hybridopt {

// The observations of a WatchedDevice and the test's orders to it. Outlives the device.
class Watch {
 public:
  // From now on counts the calls of this thread that block until the device has reached some point.
  void CountHostWaits() { caller_ = std::this_thread::get_id(); }
  int host_waits() const { return host_waits_; }
  // Waits by any thread for an event or a stream, and norms that the device was to make.
  int waits() const { return waits_; }
  int norms() const { return norms_; }

  // From now on work does not wait for this stream.
  void DropWaitsFor(StreamHandle stream) { dropped_ = stream; }

  // Where host memory was copied to, and what flags streams were made to wait for, in order.
  std::vector<void*> copies_up() const { return Locked(copies_up_); }
  std::vector<uint64_t> flags_awaited() const { return Locked(flags_awaited_); }

 private:
  friend class WatchedDevice;
  template <typename T>
  std::vector<T> Locked(const std::vector<T>& items) const {
    std::lock_guard lock(mutex_);
    return items;
  }

  std::thread::id caller_;
  std::atomic<int> host_waits_ = 0;
  std::atomic<int> waits_ = 0;
  std::atomic<int> norms_ = 0;
  std::atomic<StreamHandle> dropped_ = nullptr;
  mutable std::mutex mutex_;
  std::map<EventHandle, StreamHandle> recorded_on_;
  std::vector<void*> copies_up_;
  std::vector<uint64_t> flags_awaited_;
};

class WatchedDevice final : public ForwardingDevice {
 public:
  WatchedDevice(std::unique_ptr<Device> device, Watch& watch)
      : ForwardingDevice(std::move(device)), watch_(watch) {}

  Status Record(EventHandle event, StreamHandle stream) override {
    {
      std::lock_guard lock(watch_.mutex_);
      watch_.recorded_on_[event] = stream;
    }
    return ForwardingDevice::Record(event, stream);
  }
  Status StreamWait(StreamHandle stream, EventHandle event) override {
    if (IsDropped(event)) return {};
    return ForwardingDevice::StreamWait(stream, event);
  }
  Status StreamWaitFlag(StreamHandle stream, const std::atomic<uint64_t>* flag,
                        uint64_t value) override {
    {
      std::lock_guard lock(watch_.mutex_);
      watch_.flags_awaited_.push_back(value);
    }
    return ForwardingDevice::StreamWaitFlag(stream, flag, value);
  }
  Status Wait(EventHandle event, int64_t timeout_ns) override {
    CountWait();
    if (IsDropped(event)) return {};
    return ForwardingDevice::Wait(event, timeout_ns);
  }
  Status Synchronize(StreamHandle stream, int64_t timeout_ns) override {
    CountWait();
    return ForwardingDevice::Synchronize(stream, timeout_ns);
  }
  Status Norm(StreamHandle stream, const NormLaunch& launch) override {
    watch_.norms_ += 1;
    return ForwardingDevice::Norm(stream, launch);
  }
  Status CopyToDevice(StreamHandle stream, void* device, const void* host,
                      uint64_t bytes) override {
    {
      std::lock_guard lock(watch_.mutex_);
      watch_.copies_up_.push_back(device);
    }
    return ForwardingDevice::CopyToDevice(stream, device, host, bytes);
  }

 private:
  bool IsDropped(EventHandle event) {
    std::lock_guard lock(watch_.mutex_);
    const StreamHandle behind = watch_.recorded_on_[event];
    return behind != nullptr && behind == watch_.dropped_;
  }
  void CountWait() {
    watch_.waits_ += 1;
    if (watch_.caller_ == std::this_thread::get_id()) watch_.host_waits_ += 1;
  }

  Watch& watch_;
};

}  // namespace hybridopt
