// The host device: params and gradients are in host memory, and the CPU updates them in place. The
// device has no queues, so it refuses the calls of the pipeline (streams, events, kernels).
#include <cinttypes>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_set>

#include "base/system.h"
#include "device/device.h"

namespace hybridopt {
namespace {

constexpr uint64_t kAlignment = 256;

Status Unsupported(const char* function) {
  return Status::Error(OFFLOAD_UNSUPPORTED,
                       "%s on the host device: params and gradients are in host memory, so the "
                       "host updates them itself and nothing is queued; ask unified() first",
                       function);
}

class HostDevice final : public Device {
 public:
  ~HostDevice() override {
    for (void* data : allocations_) std::free(data);
  }

  int32_t kind() const override { return OFFLOAD_DEVICE_HOST; }
  const char* name() const override { return "host memory"; }
  bool unified() const override { return true; }

  // The device has no memory of its own; the arenas count host memory.
  Result<DeviceMemory> Memory() const override { return DeviceMemory{0, 0}; }

  Result<void*> Allocate(uint64_t bytes) override;
  Status Free(void* data) override;
  // Reserved ranges are for state on the device; the host device has no such state.
  Result<void*> Reserve(uint64_t) override { return Unsupported("Reserve"); }
  void Unreserve(void*) override {}
  uint64_t page_bytes(uint64_t) const override { return kAlignment; }
  Result<DevicePages> TakePages(uint64_t, uint64_t) override { return Unsupported("TakePages"); }
  void FreePages(DevicePages&) override {}
  Status AppendPages(void*, DevicePages&) override { return Unsupported("AppendPages"); }
  void TruncatePages(void*, uint64_t) override {}
  Result<void*> Map(void* data, uint64_t bytes) override;
  Status CheckRange(const void* data, uint64_t bytes) const override;

  Status PinHost(void*, uint64_t) override { return Status(); }
  void UnpinHost(void*) override {}
  Result<std::atomic<uint64_t>*> NewFlag() override {
    std::lock_guard lock(mutex_);
    return &flags_.emplace_back(0);
  }

  Result<StreamHandle> CreateStream(const char*) override { return StreamHandle{nullptr}; }
  Status DestroyStream(StreamHandle stream) override { return CheckStream(stream); }
  void AbandonStream(StreamHandle) override {}
  Status CheckStream(StreamHandle stream) const override;
  Result<EventHandle> CreateEvent(const char*) override { return Unsupported("CreateEvent"); }
  void DestroyEvent(EventHandle) override {}

  Status Record(EventHandle, StreamHandle) override { return Unsupported("Record"); }
  Status StreamWait(StreamHandle, EventHandle) override { return Unsupported("StreamWait"); }
  Status StreamWaitFlag(StreamHandle, const std::atomic<uint64_t>*, uint64_t) override {
    return Unsupported("StreamWaitFlag");
  }
  Result<bool> Reached(EventHandle) override { return Unsupported("Reached"); }
  Status Wait(EventHandle, int64_t) override { return Unsupported("Wait"); }
  Result<double> Elapsed(EventHandle, EventHandle) override { return Unsupported("Elapsed"); }
  Status Synchronize(StreamHandle stream, int64_t) override { return CheckStream(stream); }
  Status AwaitAllStreams() override { return {}; }

  Status CopyToHost(StreamHandle stream, void* host, const void* device, uint64_t bytes) override {
    return Copy(stream, host, device, bytes);
  }
  Status CopyToDevice(StreamHandle stream, void* device, const void* host,
                      uint64_t bytes) override {
    return Copy(stream, device, host, bytes);
  }
  Status CopyRows(StreamHandle stream, const RowsCopy& copy) override;
  Status Fill(StreamHandle, void*, uint64_t, const Pattern&) override {
    return Unsupported("Fill");
  }
  Status FollowParams(StreamHandle, const void*, int32_t, uint64_t, float*) override {
    return Unsupported("FollowParams");
  }
  Status Norm(StreamHandle, const NormLaunch&) override { return Unsupported("Norm"); }
  Status SetVerdict(StreamHandle, const Verdict&, Verdict*) override {
    return Unsupported("SetVerdict");
  }
  Status Update(StreamHandle, const UpdateLaunch&) override { return Unsupported("Update"); }
  Status CheckMatrices() const override { return {}; }  // the workers update them
  uint64_t MatrixWorkspaceBytes(const MatrixShape&) const override { return 0; }
  Status UpdateMatrices(StreamHandle, const UpdateLaunch&) override {
    return Unsupported("UpdateMatrices");
  }
  Status SurveyChanges(StreamHandle, const ChangeSurvey&) override {
    return Unsupported("SurveyChanges");
  }
  Status CollectChanges(StreamHandle, const ChangeCollection&) override {
    return Unsupported("CollectChanges");
  }
  Status Run(StreamHandle stream, offload_stream_function_t function, void* user) override;

 private:
  Status Copy(StreamHandle stream, void* destination, const void* source, uint64_t bytes);

  std::mutex mutex_;
  std::unordered_set<void*> allocations_;
  std::deque<std::atomic<uint64_t>> flags_;
};

Result<void*> HostDevice::Allocate(uint64_t bytes) {
  if (bytes == 0) {
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "bytes is 0, expected at least 1");
  }
  const uint64_t available = system::AvailableBytes();
  const uint64_t rounded = system::RoundUp(bytes, kAlignment);
  std::unique_ptr<void, decltype(&std::free)> data(nullptr, &std::free);
  // The system would grant a request beyond the free memory now, and end the process at first
  // touch.
  if (bytes <= available && rounded >= bytes) data.reset(std::aligned_alloc(kAlignment, rounded));
  if (data == nullptr) {
    return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY,
                         "asked for %" PRIu64 " bytes of host memory, %" PRIu64
                         " bytes are available; ask for less or free some",
                         bytes, available);
  }
  std::lock_guard lock(mutex_);
  allocations_.insert(data.get());
  return data.release();
}

Status HostDevice::Free(void* data) {
  if (data == nullptr) return Status();
  {
    std::lock_guard lock(mutex_);
    if (allocations_.erase(data) == 0) {
      return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                           "data is %p, expected an address that this device allocated and that "
                           "has not been freed yet",
                           data);
    }
  }
  std::free(data);
  return Status();
}

Result<void*> HostDevice::Map(void* data, uint64_t bytes) {
  HYBRIDOPT_TRY(CheckRange(data, bytes));
  return data;
}

// Callers may pass any memory, so only NULL is known to be wrong.
Status HostDevice::CheckRange(const void* data, uint64_t bytes) const {
  if (data != nullptr || bytes == 0) return Status();
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "%" PRIu64 " bytes at NULL, expected an address in host memory", bytes);
}

Status HostDevice::CheckStream(StreamHandle stream) const {
  if (stream == nullptr) return Status();
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "stream is %p, but the host device has only the NULL stream", stream);
}

Status HostDevice::Run(StreamHandle stream, offload_stream_function_t function, void* user) {
  HYBRIDOPT_TRY(CheckStream(stream));
  if (function == nullptr) {
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "function is NULL, expected a function to run");
  }
  function(user);
  return Status();
}

Status HostDevice::Copy(StreamHandle stream, void* destination, const void* source,
                        uint64_t bytes) {
  HYBRIDOPT_TRY(CheckStream(stream));
  HYBRIDOPT_TRY(CheckRange(destination, bytes));
  HYBRIDOPT_TRY(CheckRange(source, bytes));
  if (bytes == 0) return Status();
  // Both sides are host memory here, so a caller may name one array twice.
  std::memmove(destination, source, bytes);
  return Status();
}

Status HostDevice::CopyRows(StreamHandle stream, const RowsCopy& copy) {
  HYBRIDOPT_TRY(CheckStream(stream));
  HYBRIDOPT_TRY(CheckRange(copy.to, copy.to_bytes()));
  HYBRIDOPT_TRY(CheckRange(copy.from, copy.from_bytes()));
  auto* to = static_cast<std::byte*>(copy.to);
  const auto* from = static_cast<const std::byte*>(copy.from);
  for (uint64_t row = 0; row < copy.rows; ++row, to += copy.to_stride, from += copy.from_stride)
    std::memcpy(to, from, copy.row_bytes);
  return Status();
}

}  // namespace

std::unique_ptr<Device> CreateHostDevice() { return std::make_unique<HostDevice>(); }

}  // namespace hybridopt
