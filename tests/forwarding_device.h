// ForwardingDevice: passes every call on to another device. Tests derive from it and override the
// calls that they observe, refuse or leave out; ForwardingDevice::X calls the wrapped device.
#pragma once

#include <memory>
#include <utility>

#include "device/device.h"

namespace hybridopt {

class ForwardingDevice : public Device {
 public:
  explicit ForwardingDevice(std::unique_ptr<Device> device) : device_(std::move(device)) {}

  bool Stop() override { return device_->Stop(); }
  int32_t kind() const override { return device_->kind(); }
  const char* name() const override { return device_->name(); }
  const char* pci_id() const override { return device_->pci_id(); }
  bool unified() const override { return device_->unified(); }
  bool shares_queues() const override { return device_->shares_queues(); }
  void DiscardHost(void* data, uint64_t bytes) override { device_->DiscardHost(data, bytes); }
  uint64_t pin_piece_bytes() const override { return device_->pin_piece_bytes(); }
  uint64_t default_chunk_elements() const override { return device_->default_chunk_elements(); }

  Result<DeviceMemory> Memory() const override { return device_->Memory(); }
  Result<void*> Allocate(uint64_t bytes) override { return device_->Allocate(bytes); }
  Status Free(void* data) override { return device_->Free(data); }
  Result<void*> Map(void* data, uint64_t bytes) override { return device_->Map(data, bytes); }
  Result<void*> Reserve(uint64_t bytes) override { return device_->Reserve(bytes); }
  void Unreserve(void* range) override { device_->Unreserve(range); }
  uint64_t page_bytes(uint64_t range_bytes) const override {
    return device_->page_bytes(range_bytes);
  }
  Result<DevicePages> TakePages(uint64_t range_bytes, uint64_t bytes) override {
    return device_->TakePages(range_bytes, bytes);
  }
  void FreePages(DevicePages& pages) override { device_->FreePages(pages); }
  Status AppendPages(void* range, DevicePages& pages) override {
    return device_->AppendPages(range, pages);
  }
  void TruncatePages(void* range, uint64_t bytes) override { device_->TruncatePages(range, bytes); }
  Status CheckRange(const void* data, uint64_t bytes) const override {
    return device_->CheckRange(data, bytes);
  }
  Status PinHost(void* data, uint64_t bytes) override { return device_->PinHost(data, bytes); }
  void UnpinHost(void* data) override { device_->UnpinHost(data); }
  Result<std::atomic<uint64_t>*> NewFlag() override { return device_->NewFlag(); }

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

  Status Record(EventHandle event, StreamHandle stream) override {
    return device_->Record(event, stream);
  }
  Status StreamWait(StreamHandle stream, EventHandle event) override {
    return device_->StreamWait(stream, event);
  }
  Status StreamWaitFlag(StreamHandle stream, const std::atomic<uint64_t>* flag,
                        uint64_t value) override {
    return device_->StreamWaitFlag(stream, flag, value);
  }
  Result<bool> Reached(EventHandle event) override { return device_->Reached(event); }
  Status Wait(EventHandle event, int64_t timeout_ns) override {
    return device_->Wait(event, timeout_ns);
  }
  Result<double> Elapsed(EventHandle begin, EventHandle end) override {
    return device_->Elapsed(begin, end);
  }
  Status Synchronize(StreamHandle stream, int64_t timeout_ns) override {
    return device_->Synchronize(stream, timeout_ns);
  }
  Status AwaitAllStreams() override { return device_->AwaitAllStreams(); }

  Status CopyToHost(StreamHandle stream, void* host, const void* device, uint64_t bytes) override {
    return device_->CopyToHost(stream, host, device, bytes);
  }
  Status CopyToDevice(StreamHandle stream, void* device, const void* host,
                      uint64_t bytes) override {
    return device_->CopyToDevice(stream, device, host, bytes);
  }
  Status CopyRows(StreamHandle stream, const RowsCopy& copy) override {
    return device_->CopyRows(stream, copy);
  }
  Status Fill(StreamHandle stream, void* device, uint64_t count, const Pattern& pattern) override {
    return device_->Fill(stream, device, count, pattern);
  }
  Status FollowParams(StreamHandle stream, const void* params, int32_t dtype, uint64_t count,
                      float* masters) override {
    return device_->FollowParams(stream, params, dtype, count, masters);
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
  Status CheckMatrices() const override { return device_->CheckMatrices(); }
  std::string matrix_products() const override { return device_->matrix_products(); }
  Status PrepareMatrices(StreamHandle stream, const MatrixShape& shape, void* workspace) override {
    return device_->PrepareMatrices(stream, shape, workspace);
  }
  uint64_t MatrixWorkspaceBytes(const MatrixShape& shape) const override {
    return device_->MatrixWorkspaceBytes(shape);
  }
  Status UpdateMatrices(StreamHandle stream, const UpdateLaunch& launch) override {
    return device_->UpdateMatrices(stream, launch);
  }
  Status SurveyChanges(StreamHandle stream, const ChangeSurvey& launch) override {
    return device_->SurveyChanges(stream, launch);
  }
  Status CollectChanges(StreamHandle stream, const ChangeCollection& launch) override {
    return device_->CollectChanges(stream, launch);
  }
  Status Run(StreamHandle stream, offload_stream_function_t function, void* user) override {
    return device_->Run(stream, function, user);
  }

 private:
  const std::unique_ptr<Device> device_;
};

}  // namespace hybridopt
