// WatchedDevice: a device that passes everything on to another one, and lets a test see what the
// library asked for, or leaves out the wait for one producer.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "device/device.h"

namespace hybridopt {

// What a WatchedDevice has seen and is told to do. Outlives the device.
class Watch {
 public:
  // From now on: calls by this thread that block it until the device has got somewhere.
  void CountHostWaits() { caller_ = std::this_thread::get_id(); }
  int host_waits() const { return host_waits_; }

  // Work that waits for this stream no longer does.
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
  std::atomic<StreamHandle> dropped_ = nullptr;
  mutable std::mutex mutex_;
  std::map<EventHandle, StreamHandle> recorded_on_;
  std::vector<void*> copies_up_;
  std::vector<uint64_t> flags_awaited_;
};

class WatchedDevice final : public Device {
 public:
  WatchedDevice(std::unique_ptr<Device> device, Watch& watch)
      : device_(std::move(device)), watch_(watch) {}

  Status Record(EventHandle event, StreamHandle stream) override {
    {
      std::lock_guard lock(watch_.mutex_);
      watch_.recorded_on_[event] = stream;
    }
    return device_->Record(event, stream);
  }
  Status StreamWait(StreamHandle stream, EventHandle event) override {
    {
      std::lock_guard lock(watch_.mutex_);
      const StreamHandle behind = watch_.recorded_on_[event];
      if (behind != nullptr && behind == watch_.dropped_) return {};
    }
    return device_->StreamWait(stream, event);
  }
  Status StreamWaitFlag(StreamHandle stream, const std::atomic<uint64_t>* flag,
                        uint64_t value) override {
    {
      std::lock_guard lock(watch_.mutex_);
      watch_.flags_awaited_.push_back(value);
    }
    return device_->StreamWaitFlag(stream, flag, value);
  }
  Status Wait(EventHandle event, int64_t timeout_ns) override {
    CountWait();
    return device_->Wait(event, timeout_ns);
  }
  Status Synchronize(StreamHandle stream, int64_t timeout_ns) override {
    CountWait();
    return device_->Synchronize(stream, timeout_ns);
  }
  Status CopyToDevice(StreamHandle stream, void* device, const void* host,
                      uint64_t bytes) override {
    {
      std::lock_guard lock(watch_.mutex_);
      watch_.copies_up_.push_back(device);
    }
    return device_->CopyToDevice(stream, device, host, bytes);
  }

  int32_t kind() const override { return device_->kind(); }
  const char* name() const override { return device_->name(); }
  bool unified() const override { return device_->unified(); }
  Result<DeviceMemory> Memory() const override { return device_->Memory(); }
  Result<void*> Allocate(uint64_t bytes) override { return device_->Allocate(bytes); }
  Status Free(void* data) override { return device_->Free(data); }
  Result<void*> Map(void* data, uint64_t bytes) override { return device_->Map(data, bytes); }
  Status CheckRange(const void* data, uint64_t bytes) const override {
    return device_->CheckRange(data, bytes);
  }
  Status PinHost(void* data, uint64_t bytes) override { return device_->PinHost(data, bytes); }
  void UnpinHost(void* data) override { device_->UnpinHost(data); }
  Result<StreamHandle> CreateStream(const char* label) override {
    return device_->CreateStream(label);
  }
  Status DestroyStream(StreamHandle stream) override { return device_->DestroyStream(stream); }
  void AbandonStream(StreamHandle stream) override { device_->AbandonStream(stream); }
  Status CheckStream(StreamHandle stream) const override { return device_->CheckStream(stream); }
  Result<EventHandle> CreateEvent(const char* label) override {
    return device_->CreateEvent(label);
  }
  void DestroyEvent(EventHandle event) override { device_->DestroyEvent(event); }
  Result<double> Elapsed(EventHandle begin, EventHandle end) override {
    return device_->Elapsed(begin, end);
  }
  Status CopyToHost(StreamHandle stream, void* host, const void* device, uint64_t bytes) override {
    return device_->CopyToHost(stream, host, device, bytes);
  }
  Status Fill(StreamHandle stream, float* device, uint64_t count, float value) override {
    return device_->Fill(stream, device, count, value);
  }
  Status ToFp32(StreamHandle stream, const void* source, int32_t dtype, uint64_t count,
                float* destination) override {
    return device_->ToFp32(stream, source, dtype, count, destination);
  }
  Status Norm(StreamHandle stream, const NormLaunch& launch) override {
    return device_->Norm(stream, launch);
  }
  Status SetVerdict(StreamHandle stream, const Verdict& value, Verdict* device) override {
    return device_->SetVerdict(stream, value, device);
  }
  Status Update(StreamHandle stream, const UpdateLaunch& launch) override {
    return device_->Update(stream, launch);
  }
  Status Run(StreamHandle stream, offload_stream_function_t function, void* user) override {
    return device_->Run(stream, function, user);
  }

 private:
  void CountWait() {
    if (watch_.caller_ == std::this_thread::get_id()) watch_.host_waits_ += 1;
  }

  const std::unique_ptr<Device> device_;
  Watch& watch_;
};

}  // namespace hybridopt
