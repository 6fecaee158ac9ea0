// LeakyDevice: the simulated device with one kind of wait left out. A test of the tests: whoever
// runs the pipeline on it must see wrong bits.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "device/device.h"

namespace hybridopt {

// The pipeline has one more wait, of its thread for the gradients: it only starts the clock, what
// follows waits for later events on the streams that are behind the gradients anyway.
enum class Leak {
  kNone,
  kDownBehindGradients,     // StreamWait of the down stream on the caller's gradients
  kComputeBehindGradients,  // StreamWait of the compute stream on them
  kLanded,                  // Wait for a chunk's gradients
  kUploaded,       // Wait for a chunk's params, before its slot and its mark are given free
  kVerdict,        // Wait for norm and verdict
  kDeviceUpdated,  // Wait for the device's own update
  kCallersStream,  // StreamWaitFlag of the caller's stream
  kReady,          // Wait for the gradients by the timeline's thread
};

class LeakyDevice final : public Device {
 public:
  // Leaks only while `leaking`, which outlives the device.
  LeakyDevice(std::unique_ptr<Device> device, Leak leak, const std::atomic<bool>& leaking)
      : device_(std::move(device)), leak_(leak), leaking_(leaking) {}

  Result<StreamHandle> CreateStream(const char* label) override {
    Result<StreamHandle> stream = device_->CreateStream(label);
    if (stream.ok()) SetLabel(stream.value(), label);
    return stream;
  }
  Result<EventHandle> CreateEvent(const char* label) override {
    Result<EventHandle> event = device_->CreateEvent(label);
    if (event.ok()) SetLabel(event.value(), label);
    return event;
  }

  Status StreamWait(StreamHandle stream, EventHandle event) override {
    if (Leaks(Leak::kDownBehindGradients, stream, "gradients down")) return {};
    if (Leaks(Leak::kComputeBehindGradients, stream, "device update")) return {};
    return device_->StreamWait(stream, event);
  }
  Status StreamWaitFlag(StreamHandle stream, const std::atomic<uint64_t>* flag,
                        uint64_t value) override {
    if (leaking_ && leak_ == Leak::kCallersStream) return {};
    return device_->StreamWaitFlag(stream, flag, value);
  }
  Status Wait(EventHandle event, int64_t timeout_ns) override {
    if (Leaks(Leak::kLanded, event, "gradients landed")) return {};
    if (Leaks(Leak::kUploaded, event, "params uploaded")) return {};
    if (Leaks(Leak::kVerdict, event, "verdict known")) return {};
    if (Leaks(Leak::kVerdict, event, "moved")) return {};  // commit waits for these
    if (Leaks(Leak::kDeviceUpdated, event, "device updated")) return {};
    return device_->Wait(event, timeout_ns);
  }
  // An event that was not waited for has no time yet: that must not be what gives the leak away.
  Result<double> Elapsed(EventHandle begin, EventHandle end) override {
    if (leak_ != Leak::kNone) return 0.0;
    return device_->Elapsed(begin, end);
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
  Status DestroyStream(StreamHandle stream) override { return device_->DestroyStream(stream); }
  void AbandonStream(StreamHandle stream) override { device_->AbandonStream(stream); }
  Status CheckStream(StreamHandle stream) const override { return device_->CheckStream(stream); }
  void DestroyEvent(EventHandle event) override { device_->DestroyEvent(event); }
  Status Record(EventHandle event, StreamHandle stream) override {
    return device_->Record(event, stream);
  }
  Status Synchronize(StreamHandle stream, int64_t timeout_ns) override {
    return device_->Synchronize(stream, timeout_ns);
  }
  Status CopyToHost(StreamHandle stream, void* host, const void* device, uint64_t bytes) override {
    return device_->CopyToHost(stream, host, device, bytes);
  }
  Status CopyToDevice(StreamHandle stream, void* device, const void* host,
                      uint64_t bytes) override {
    return device_->CopyToDevice(stream, device, host, bytes);
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
  void SetLabel(const void* handle, const char* label) {
    std::lock_guard lock(mutex_);
    labels_[handle] = label;
  }
  bool Leaks(Leak leak, const void* handle, const char* label) {
    if (leak != leak_ || !leaking_) return false;
    std::lock_guard lock(mutex_);
    const auto found = labels_.find(handle);
    return found != labels_.end() && found->second == label;
  }

  const std::unique_ptr<Device> device_;
  const Leak leak_;
  const std::atomic<bool>& leaking_;
  std::mutex mutex_;
  std::map<const void*, std::string> labels_;  // of streams and events; guarded by mutex_
};

}  // namespace hybridopt
