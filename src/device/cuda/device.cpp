// The CUDA device. A StreamHandle is a cudaStream_t. Every call works in a Scope, so that the
// calling thread keeps its own device, and every wait has a bound.
#include "device/device.h"

#include <algorithm>
#include <atomic>
#include <bitset>
#include <cctype>
#include <cinttypes>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/function_ref.h"
#include "base/system.h"
#include "device/cuda/driver.h"
#include "device/cuda/matrices.h"
#include "device/cuda/memory.h"
#include "device/cuda/poll.h"
#include "device/cuda/stream_name.h"
#include "device/cuda/tables.h"
#include "device/cuda/update_rows.h"
#include "kernels/cuda/cuda_kernels.h"

namespace hybridopt {
namespace cuda {
namespace {

constexpr uint64_t kFlagStrideBytes = 64;  // each flag has its own cache line
constexpr uint64_t kFlagPageBytes = 4096;
// How long an abandoned stream may take to end. CUDA cannot stop a stream; the library can only
// wait.
constexpr int64_t kDrainNs = 2'000'000'000;

// An event and its label. Its handle is its address.
struct Event {
  cudaEvent_t event = nullptr;
  std::string label;
  std::atomic<StreamHandle> stream = nullptr;  // of the latest record
};

Event& EventOf(EventHandle event) {
  HYBRIDOPT_CHECK(event != nullptr);
  return *reinterpret_cast<Event*>(event);
}

template <typename... Pointers>
bool MultiplesOf(uint64_t bytes, Pointers... pointers) {
  return ((reinterpret_cast<uintptr_t>(pointers) % bytes == 0) && ...);
}

class CudaDevice final : public Device {
 public:
  static Result<std::unique_ptr<Device>> Create(const CudaOptions& options);
  ~CudaDevice() override;

  int32_t kind() const override { return OFFLOAD_DEVICE_CUDA; }
  const char* name() const override { return name_.c_str(); }
  const char* pci_id() const override { return pci_id_.c_str(); }
  bool unified() const override { return false; }
  bool shares_queues() const override { return true; }
  // The driver takes about 50 us to queue the copies and events of a chunk, and no worker works in
  // that time.
  uint64_t default_chunk_elements() const override { return uint64_t{1} << 22; }

  Result<DeviceMemory> Memory() const override;
  Result<void*> Allocate(uint64_t bytes) override;
  Status Free(void* data) override;
  Result<void*> Reserve(uint64_t bytes) override;
  void Unreserve(void* range) override;
  uint64_t page_bytes(uint64_t range_bytes) const override {
    return BlockMemory::PageBytes(range_bytes);
  }
  Result<DevicePages> TakePages(uint64_t range_bytes, uint64_t bytes) override;
  void FreePages(DevicePages& pages) override;
  Status AppendPages(void* range, DevicePages& pages) override;
  void TruncatePages(void* range, uint64_t bytes) override;
  Result<void*> Map(void* data, uint64_t bytes) override;
  Status CheckRange(const void* data, uint64_t bytes) const override;

  Status PinHost(void* data, uint64_t bytes) override;
  void UnpinHost(void* data) override;
  Result<std::atomic<uint64_t>*> NewFlag() override;

  Result<StreamHandle> CreateStream(const char* label) override;
  Status DestroyStream(StreamHandle stream) override;
  void AbandonStream(StreamHandle stream) override;
  Status CheckStream(StreamHandle stream) const override;
  Result<EventHandle> CreateEvent(const char* label) override;
  void DestroyEvent(EventHandle event) override;

  Status Record(EventHandle event, StreamHandle stream) override;
  Status StreamWait(StreamHandle stream, EventHandle event) override;
  Status StreamWaitFlag(StreamHandle stream, const std::atomic<uint64_t>* flag,
                        uint64_t value) override;
  Result<bool> Reached(EventHandle event) override;
  Status Wait(EventHandle event, int64_t timeout_ns) override;
  Result<double> Elapsed(EventHandle begin, EventHandle end) override;
  Status Synchronize(StreamHandle stream, int64_t timeout_ns) override;
  Status AwaitAllStreams() override;

  Status CopyToHost(StreamHandle stream, void* host, const void* device, uint64_t bytes) override {
    return Copy(stream, host, device, bytes, host, "copy to the host");
  }
  Status CopyToDevice(StreamHandle stream, void* device, const void* host,
                      uint64_t bytes) override {
    return Copy(stream, device, host, bytes, host, "copy to the device");
  }
  Status CopyRows(StreamHandle stream, const RowsCopy& copy) override;
  Status Fill(StreamHandle stream, void* device, uint64_t count, const Pattern& pattern) override;
  Status FollowParams(StreamHandle stream, const void* params, int32_t dtype, uint64_t count,
                      float* masters) override;
  Status Norm(StreamHandle stream, const NormLaunch& launch) override;
  Status SetVerdict(StreamHandle stream, const Verdict& value, Verdict* device) override;
  Status Update(StreamHandle stream, const UpdateLaunch& launch) override;
  Status CheckMatrices() const override;
  std::string matrix_products() const override { return matrices_->Version() + " on " + name_; }
  uint64_t MatrixWorkspaceBytes(const MatrixShape& shape) const override {
    return Matrices::WorkspaceBytes(shape);
  }
  Status PrepareMatrices(StreamHandle stream, const MatrixShape& shape, void* workspace) override;
  Status UpdateMatrices(StreamHandle stream, const UpdateLaunch& launch) override;
  Status SurveyChanges(StreamHandle stream, const ChangeSurvey& launch) override;
  Status CollectChanges(StreamHandle stream, const ChangeCollection& launch) override;
  Status Run(StreamHandle stream, offload_stream_function_t function, void* user) override;

 private:
  using LaunchRows =
      FunctionRef<cudaError_t(const ChangeRow* rows, uint32_t count, uint32_t blocks)>;
  CudaDevice(const CudaOptions& options, const Driver& driver)
      : options_(options), driver_(driver), memory_(driver_, fault_, options.device_index) {}

  Status Initialize();
  Status CheckAttributes(CUdevice device);
  Scope Enter() const { return Scope(driver_, context_); }
  Status Check(cudaError_t error, const char* what, StreamHandle stream) const;
  std::string LabelOf(StreamHandle stream) const;
  Result<bool> StreamDone(StreamHandle stream) const;
  Result<bool> EventDone(const Event& event) const;
  void Forget(StreamHandle stream);
  Status Copy(StreamHandle stream, void* to, const void* from, uint64_t bytes, const void* host,
              const char* what);
  Status AwaitIfPageable(StreamHandle stream, const void* host);
  Status SumBlocks(StreamHandle stream, const NormLaunch& launch, size_t begin, size_t* end);
  Status UpdateSome(StreamHandle stream, const UpdateLaunch& launch, const UpdateKind& kind,
                    size_t begin, size_t* end);
  Status ReadChanges(StreamHandle stream, std::span<const ChangePart> parts, const char* what,
                     LaunchRows launch);

  const CudaOptions options_;
  const Driver driver_;
  const uint64_t fork_generation_ = system::ForkGeneration();
  CUcontext context_ = nullptr;  // the primary one, which the runtime and frameworks use
  std::string name_;
  std::string pci_id_;
  mutable Fault fault_;
  BlockMemory memory_;
  std::unique_ptr<Tables> tables_;
  std::unique_ptr<Matrices> matrices_;

  mutable std::mutex mutex_;                     // guards all below
  std::map<StreamHandle, std::string> streams_;  // created by this device, with their labels
  std::byte* flags_ = nullptr;                   // the page from which NewFlag takes flags
  uint64_t flags_taken_ = 0;                     // flags taken from that page
  bool stuck_ = false;                           // an abandoned stream still runs
};

// ------------------------------------------------------------------------------------- creating --

Result<std::unique_ptr<Device>> CudaDevice::Create(const CudaOptions& options) {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0)
    return Status::Error(OFFLOAD_UNSUPPORTED,
                         "options.device_kind is OFFLOAD_DEVICE_CUDA, but there is no CUDA device "
                         "here: %s; install an NVIDIA driver of CUDA 12.4 or newer, or use "
                         "OFFLOAD_DEVICE_HOST or OFFLOAD_DEVICE_SIM",
                         error != cudaSuccess ? TextOf(error).c_str() : "no device is visible");
  if (options.device_index < 0 || options.device_index >= count)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.device_index is %d, expected 0 to %d: %d CUDA devices are "
                         "visible (CUDA_VISIBLE_DEVICES counts)",
                         options.device_index, count - 1, count);
  HYBRIDOPT_ASSIGN(const Driver driver, Driver::Find());
  std::unique_ptr<CudaDevice> device(new CudaDevice(options, driver));
  HYBRIDOPT_TRY(device->Initialize());
  return std::unique_ptr<Device>(std::move(device));
}

Status CudaDevice::Initialize() {
  CUdevice device = 0;
  HYBRIDOPT_TRY(fault_.Check(driver_.device_get(&device, options_.device_index), "cuDeviceGet"));
  HYBRIDOPT_TRY(CheckAttributes(device));
  CUcontext context = nullptr;
  HYBRIDOPT_TRY(
      fault_.Check(driver_.primary_ctx_retain(&context, device), "cuDevicePrimaryCtxRetain"));
  context_ = context;
  const Scope scope = Enter();
  cudaDeviceProp properties{};
  HYBRIDOPT_TRY(fault_.Check(cudaGetDeviceProperties(&properties, options_.device_index),
                             "cudaGetDeviceProperties"));
  name_ = properties.name;
  char pci_id[32] = "";
  HYBRIDOPT_TRY(fault_.Check(cudaDeviceGetPCIBusId(pci_id, sizeof(pci_id), options_.device_index),
                             "cudaDeviceGetPCIBusId"));
  for (const char* c = pci_id; *c != '\0'; ++c)
    pci_id_ += static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));  // as in sysfs
  HYBRIDOPT_TRY(fault_.Check(LoadKernels(), "loading the kernels"));
  HYBRIDOPT_ASSIGN(tables_, Tables::Create(fault_));
  matrices_ = std::make_unique<Matrices>(*this, fault_);
  return {};
}

Status CudaDevice::CheckAttributes(CUdevice device) {
  struct Need {
    CUdevice_attribute attribute;
    int least;
    const char* what;
  };
  constexpr Need kNeeds[] = {
      {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 8, "compute capability 8.0 or higher"},
      {CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM, 1,
       "host memory at the host's addresses"},
      {CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS, 1, "streams that wait for memory"},
      {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1, "virtual memory management"},
  };
  for (const Need& need : kNeeds) {
    int got = 0;
    HYBRIDOPT_TRY(fault_.Check(driver_.device_get_attribute(&got, need.attribute, device),
                               "cuDeviceGetAttribute"));
    if (got < need.least)
      return Status::Error(OFFLOAD_UNSUPPORTED,
                           "CUDA device %d has not got %s; use another device, or "
                           "OFFLOAD_DEVICE_HOST or OFFLOAD_DEVICE_SIM",
                           options_.device_index, need.what);
  }
  return {};
}

CudaDevice::~CudaDevice() {
  if (fork_generation_ != system::ForkGeneration()) {
    // CUDA does not survive fork: all objects belong to the parent.
    (void)tables_.release();
    (void)matrices_.release();
    memory_.KeepMapped();
    return;
  }
  if (context_ == nullptr) return;
  const Scope scope = Enter();
  while (!streams_.empty()) AbandonStream(streams_.begin()->first);
  // Pages of flags are not freed, because a stream of the caller may still read a flag.
  if (stuck_) {
    (void)tables_.release();
    (void)matrices_.release();
  }
  tables_.reset();
  matrices_.reset();
  memory_.FreeAll();
  CUdevice device = 0;
  (void)driver_.device_get(&device, options_.device_index);
  (void)driver_.primary_ctx_release(device);
}

// --------------------------------------------------------------------------------------- memory --

Result<DeviceMemory> CudaDevice::Memory() const {
  const Scope scope = Enter();
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  HYBRIDOPT_TRY(fault_.Check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo"));
  return DeviceMemory{total_bytes, free_bytes};
}

Result<void*> CudaDevice::Allocate(uint64_t bytes) {
  const Scope scope = Enter();
  return memory_.Allocate(bytes);
}

Status CudaDevice::Free(void* data) {
  const Scope scope = Enter();
  return memory_.Free(data);
}

Result<void*> CudaDevice::Reserve(uint64_t bytes) {
  const Scope scope = Enter();
  return memory_.Reserve(bytes);
}

void CudaDevice::Unreserve(void* range) {
  const Scope scope = Enter();
  memory_.Unreserve(range);
}

Result<DevicePages> CudaDevice::TakePages(uint64_t range_bytes, uint64_t bytes) {
  const Scope scope = Enter();
  return memory_.TakePages(range_bytes, bytes);
}

void CudaDevice::FreePages(DevicePages& pages) {
  const Scope scope = Enter();
  memory_.FreePages(pages);
}

Status CudaDevice::AppendPages(void* range, DevicePages& pages) {
  const Scope scope = Enter();
  return memory_.AppendPages(range, pages);
}

void CudaDevice::TruncatePages(void* range, uint64_t bytes) {
  const Scope scope = Enter();
  memory_.TruncatePages(range, bytes);
}

Result<void*> CudaDevice::Map(void*, uint64_t) {
  return Status::Error(OFFLOAD_UNSUPPORTED,
                       "the host cannot see the memory of a CUDA device; use "
                       "offload_device_upload and offload_device_download");
}

// The driver knows to which memory an address belongs, but not always where an allocation ends. So
// the first and the last byte are checked.
Status CudaDevice::CheckRange(const void* data, uint64_t bytes) const {
  if (bytes == 0) return {};
  const Scope scope = Enter();
  const auto first = reinterpret_cast<CUdeviceptr>(data);
  for (const CUdeviceptr address : {first, first + bytes - 1}) {
    CUmemorytype type{};
    int ordinal = -1;
    CUpointer_attribute asked[] = {CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                   CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL};
    void* answers[] = {&type, &ordinal};
    HYBRIDOPT_TRY(fault_.Check(driver_.pointer_get_attributes(2, asked, answers, address),
                               "cuPointerGetAttributes"));
    if (type == CU_MEMORYTYPE_DEVICE && ordinal == options_.device_index) continue;
    const char* const where = type == CU_MEMORYTYPE_DEVICE ? "memory of another CUDA device"
                              : type == CU_MEMORYTYPE_HOST ? "pinned host memory"
                                                           : "not in this device's memory";
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "%" PRIu64
                         " bytes at address %p: %s%s, expected a range inside one live "
                         "allocation of CUDA device %d",
                         bytes, data, address == first ? "" : "the end is ", where,
                         options_.device_index);
  }
  return {};
}

Status CudaDevice::PinHost(void* data, uint64_t bytes) {
  const Scope scope = Enter();
  const cudaError_t error =
      cudaHostRegister(data, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (error == cudaErrorMemoryAllocation || error == cudaErrorOperatingSystem) {
    (void)cudaGetLastError();
    HYBRIDOPT_TRY(fault_.status());
    return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY,
                         "cannot pin %" PRIu64
                         " bytes, more than the system or this process's container lets the "
                         "driver pin: cudaHostRegister: %s",
                         bytes, TextOf(error).c_str());
  }
  if (error == cudaErrorInvalidValue || error == cudaErrorHostMemoryAlreadyRegistered) {
    (void)cudaGetLastError();
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "cannot pin %" PRIu64
                         " bytes at %p, expected host memory of which nothing is pinned yet: "
                         "cudaHostRegister: %s",
                         bytes, data, TextOf(error).c_str());
  }
  return fault_.Check(error, "cudaHostRegister");
}

void CudaDevice::UnpinHost(void* data) {
  const Scope scope = Enter();
  {
    // Memory to which a stuck stream may still copy stays pinned, so that the system gives none of
    // its pages to other code.
    std::lock_guard lock(mutex_);
    if (stuck_) return;
  }
  (void)fault_.Check(cudaHostUnregister(data), "cudaHostUnregister");
}

Result<std::atomic<uint64_t>*> CudaDevice::NewFlag() {
  std::lock_guard lock(mutex_);
  if (flags_ == nullptr || flags_taken_ == kFlagPageBytes / kFlagStrideBytes) {
    HYBRIDOPT_ASSIGN(void* page, system::MapPages(kFlagPageBytes, false));
    const Scope scope = Enter();
    const Status pinned = fault_.Check(
        cudaHostRegister(page, kFlagPageBytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
        "cudaHostRegister of a page of flags");
    if (!pinned.ok()) {
      system::UnmapPages(page, kFlagPageBytes);
      return pinned;
    }
    flags_ = static_cast<std::byte*>(page);
    flags_taken_ = 0;
  }
  return new (flags_ + kFlagStrideBytes * flags_taken_++) std::atomic<uint64_t>(0);
}

// -------------------------------------------------------------------------------------- streams --

// The pipeline's own streams have the highest priority: they have few kernels, and the caller's
// streams wait for these.
Result<StreamHandle> CudaDevice::CreateStream(const char* label) {
  const Scope scope = Enter();
  int lowest = 0;
  int highest = 0;
  HYBRIDOPT_TRY(fault_.Check(cudaDeviceGetStreamPriorityRange(&lowest, &highest),
                             "cudaDeviceGetStreamPriorityRange"));
  const bool callers = std::strcmp(label, kCallersStreamLabel) == 0;
  const bool background = std::strcmp(label, kBackgroundStreamLabel) == 0;
  cudaStream_t stream = nullptr;
  HYBRIDOPT_TRY(fault_.Check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking,
                                                          callers      ? 0
                                                          : background ? lowest
                                                                       : highest),
                             "cudaStreamCreateWithPriority"));
  if (!callers) NameStream(stream, label);
  std::lock_guard lock(mutex_);
  streams_[stream] = label;
  return static_cast<StreamHandle>(stream);
}

std::string CudaDevice::LabelOf(StreamHandle stream) const {
  std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  if (found != streams_.end()) return found->second;
  return stream == nullptr ? "NULL" : "the caller's";
}

Status CudaDevice::Check(cudaError_t error, const char* what, StreamHandle stream) const {
  if (error == cudaSuccess) return fault_.status();
  return fault_.Check(error, what, LabelOf(stream).c_str());
}

Result<bool> CudaDevice::StreamDone(StreamHandle stream) const {
  const cudaError_t error = cudaStreamQuery(Of(stream));
  if (error == cudaErrorNotReady) return false;
  HYBRIDOPT_TRY(Check(error, "cudaStreamQuery", stream));
  return true;
}

Status CudaDevice::Synchronize(StreamHandle stream, int64_t timeout_ns) {
  const Scope scope = Enter();
  HYBRIDOPT_ASSIGN(const bool done, PollUntil([&] { return StreamDone(stream); }, timeout_ns));
  if (done) return {};
  return Status::Error(OFFLOAD_TIMED_OUT,
                       "work queued on stream \"%s\" was not done within %" PRId64
                       " ns; it goes on, wait again",
                       LabelOf(stream).c_str(), timeout_ns);
}

Status CudaDevice::AwaitAllStreams() {
  const Scope scope = Enter();
  return fault_.Check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

Status CudaDevice::DestroyStream(StreamHandle stream) {
  if (stream == nullptr) return {};
  {
    std::lock_guard lock(mutex_);
    if (streams_.count(stream) == 0)
      return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                           "stream is %p, expected NULL or a stream that this device created and "
                           "that has not been destroyed",
                           stream);
  }
  HYBRIDOPT_TRY(Synchronize(stream, options_.timeout_ns));
  Forget(stream);
  return {};
}

void CudaDevice::Forget(StreamHandle stream) {
  const Scope scope = Enter();
  {
    std::lock_guard lock(mutex_);
    streams_.erase(stream);
  }
  (void)cudaStreamDestroy(Of(stream));  // returns at once; queued work still runs
}

// CUDA cannot drop queued work. If it does not end soon, all memory that it may touch is kept.
void CudaDevice::AbandonStream(StreamHandle stream) {
  if (stream == nullptr) return;
  if (Synchronize(stream, kDrainNs).code() == OFFLOAD_TIMED_OUT) {
    memory_.KeepMapped();
    std::lock_guard lock(mutex_);
    stuck_ = true;
  }
  Forget(stream);
}

// Accepts any cudaStream_t that is not being captured.
Status CudaDevice::CheckStream(StreamHandle stream) const {
  const Scope scope = Enter();
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  HYBRIDOPT_TRY(
      Check(cudaStreamIsCapturing(Of(stream), &capture), "cudaStreamIsCapturing", stream));
  if (capture != cudaStreamCaptureStatusNone)
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "stream %p is capturing a graph, which steps, moves and copies of a stash "
                         "cannot be part of; "
                         "call this outside the capture",
                         stream);
#if CUDART_VERSION >= 12080
  int device = options_.device_index;
  const bool special =
      stream == nullptr || Of(stream) == cudaStreamLegacy || Of(stream) == cudaStreamPerThread;
  if (!special && cudaStreamGetDevice(Of(stream), &device) != cudaSuccess) {
    (void)cudaGetLastError();  // an older driver does not support the question
    device = options_.device_index;
  }
  if (device != options_.device_index)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "stream %p is of CUDA device %d, but the context is on device %d", stream,
                         device, options_.device_index);
#endif
  return {};
}

// --------------------------------------------------------------------------------------- events --

Result<EventHandle> CudaDevice::CreateEvent(const char* label) {
  const Scope scope = Enter();
  auto event = std::make_unique<Event>();
  event->label = label;
  HYBRIDOPT_TRY(fault_.Check(cudaEventCreateWithFlags(&event->event, cudaEventDefault),
                             "cudaEventCreate", label));
  return reinterpret_cast<EventHandle>(event.release());
}

void CudaDevice::DestroyEvent(EventHandle event) {
  if (event == nullptr) return;
  const Scope scope = Enter();
  (void)cudaEventDestroy(EventOf(event).event);
  delete &EventOf(event);
}

Status CudaDevice::Record(EventHandle event, StreamHandle stream) {
  const Scope scope = Enter();
  EventOf(event).stream = stream;
  return Check(cudaEventRecord(EventOf(event).event, Of(stream)), "cudaEventRecord", stream);
}

Status CudaDevice::StreamWait(StreamHandle stream, EventHandle event) {
  const Scope scope = Enter();
  return Check(cudaStreamWaitEvent(Of(stream), EventOf(event).event, 0), "cudaStreamWaitEvent",
               stream);
}

// The driver compares flags as counters that wrap around, so the value of a released flag
// (Timeline::kReleased) may be at most 2^63 - 1 ahead.
Status CudaDevice::StreamWaitFlag(StreamHandle stream, const std::atomic<uint64_t>* flag,
                                  uint64_t value) {
  HYBRIDOPT_CHECK(flag != nullptr);
  const Scope scope = Enter();
  const CUresult error = driver_.stream_wait_value64(
      Of(stream), reinterpret_cast<CUdeviceptr>(flag), value, CU_STREAM_WAIT_VALUE_GEQ);
  return Check(static_cast<cudaError_t>(error), "cuStreamWaitValue64", stream);
}

Result<bool> CudaDevice::Reached(EventHandle event) {
  const Scope scope = Enter();
  return EventDone(EventOf(event));
}

Result<bool> CudaDevice::EventDone(const Event& event) const {
  const cudaError_t error = cudaEventQuery(event.event);
  if (error == cudaErrorNotReady) return false;
  HYBRIDOPT_TRY(Check(error, "cudaEventQuery", event.stream));
  return true;
}

Status CudaDevice::Wait(EventHandle event, int64_t timeout_ns) {
  const Scope scope = Enter();
  const Event& waited = EventOf(event);
  HYBRIDOPT_ASSIGN(const bool done, PollUntil([&] { return EventDone(waited); }, timeout_ns));
  if (done) return {};
  return Status::Error(OFFLOAD_TIMED_OUT,
                       "event \"%s\" on stream \"%s\" was not reached within %" PRId64 " ns",
                       waited.label.c_str(), LabelOf(waited.stream).c_str(), timeout_ns);
}

Result<double> CudaDevice::Elapsed(EventHandle begin, EventHandle end) {
  const Scope scope = Enter();
  float milliseconds = 0;
  const cudaError_t error =
      cudaEventElapsedTime(&milliseconds, EventOf(begin).event, EventOf(end).event);
  if (error == cudaErrorNotReady || error == cudaErrorInvalidResourceHandle) {
    (void)cudaGetLastError();
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "event \"%s\" or \"%s\" has no time: it was not recorded, or its latest "
                         "record has not been reached; wait for it first",
                         EventOf(begin).label.c_str(), EventOf(end).label.c_str());
  }
  HYBRIDOPT_TRY(fault_.Check(error, "cudaEventElapsedTime"));
  return static_cast<double>(milliseconds) * 1e-3;
}

// ------------------------------------------------------------------------------------- commands --

Status CudaDevice::Copy(StreamHandle stream, void* to, const void* from, uint64_t bytes,
                        const void* host, const char* what) {
  if (bytes == 0) return {};
  const Scope scope = Enter();
  HYBRIDOPT_TRY(AwaitIfPageable(stream, host));
  const cudaMemcpyKind kind = host == to ? cudaMemcpyDeviceToHost : cudaMemcpyHostToDevice;
  return Check(cudaMemcpyAsync(to, from, bytes, kind, Of(stream)), what, stream);
}

// A copy of memory that is not pinned blocks inside the driver until the stream reaches the copy,
// without a bound. So this function first waits for the stream, with a bound.
Status CudaDevice::AwaitIfPageable(StreamHandle stream, const void* host) {
  cudaPointerAttributes attributes{};
  HYBRIDOPT_TRY(
      Check(cudaPointerGetAttributes(&attributes, host), "cudaPointerGetAttributes", stream));
  if (attributes.type != cudaMemoryTypeUnregistered) return {};
  const Status status = Synchronize(stream, options_.timeout_ns);
  if (status.code() != OFFLOAD_TIMED_OUT) return status;
  return Status::Error(OFFLOAD_DEVICE_FAILED,
                       "a copy of memory that is not pinned waits for its stream: %s",
                       status.message().c_str());
}

Status CudaDevice::CopyRows(StreamHandle stream, const RowsCopy& copy) {
  constexpr uint64_t kStrideMax = INT32_MAX;  // CUDA refuses rows that are further apart
  if (copy.to_bytes() == 0) return {};
  const Scope scope = Enter();
  if (copy.rows > 1 && copy.to_stride <= kStrideMax && copy.from_stride <= kStrideMax)
    return Check(cudaMemcpy2DAsync(copy.to, copy.to_stride, copy.from, copy.from_stride,
                                   copy.row_bytes, copy.rows, cudaMemcpyDeviceToDevice, Of(stream)),
                 "copy of rows", stream);
  auto* to = static_cast<std::byte*>(copy.to);
  const auto* from = static_cast<const std::byte*>(copy.from);
  for (uint64_t row = 0; row < copy.rows; ++row, to += copy.to_stride, from += copy.from_stride)
    HYBRIDOPT_TRY(
        Check(cudaMemcpyAsync(to, from, copy.row_bytes, cudaMemcpyDeviceToDevice, Of(stream)),
              "copy of a row", stream));
  return {};
}

Status CudaDevice::Fill(StreamHandle stream, void* device, uint64_t count, const Pattern& pattern) {
  const Scope scope = Enter();
  return Check(LaunchFill(Of(stream), device, count, pattern), "fill", stream);
}

Status CudaDevice::FollowParams(StreamHandle stream, const void* params, int32_t dtype,
                                uint64_t count, float* masters) {
  const Scope scope = Enter();
  return Check(LaunchFollowParams(Of(stream), params, dtype, count, masters), "follow params",
               stream);
}

Status CudaDevice::SetVerdict(StreamHandle stream, const Verdict& value, Verdict* device) {
  const Scope scope = Enter();
  return Check(LaunchSetVerdict(Of(stream), value, device), "set the verdict", stream);
}

// Uses as many tables as the inputs need. Without gradients the verdict is that of a sum of 0.
Status CudaDevice::Norm(StreamHandle stream, const NormLaunch& launch) {
  const Scope scope = Enter();
  size_t begin = 0;
  do {
    HYBRIDOPT_TRY(SumBlocks(stream, launch, begin, &begin));
  } while (begin < launch.inputs.size());
  return {};
}

Status CudaDevice::SumBlocks(StreamHandle stream, const NormLaunch& launch, size_t begin,
                             size_t* end) {
  HYBRIDOPT_ASSIGN(const Tables::Table table, tables_->Take(options_.timeout_ns));
  auto* const rows = static_cast<NormRow*>(table.host);
  uint32_t count = 0;
  uint32_t groups = 0;
  size_t next = begin;
  for (; next < launch.inputs.size() && (count + 1) * sizeof(NormRow) <= Tables::kBytes; ++next) {
    const NormInput& input = launch.inputs[next];
    if (input.count == 0) continue;
    rows[count++] = {input.grad,
                     input.count,
                     input.first_block,
                     groups,
                     static_cast<uint8_t>(input.dtype),
                     static_cast<uint8_t>(MultiplesOf(16, input.grad))};
    groups += NormGroups(input.count, input.dtype);
  }
  *end = next;
  const auto* const there = static_cast<const NormRow*>(table.device);
  const NormTotal total{begin == 0, next == launch.inputs.size(), launch.grad_scale,
                        launch.grad_norm_max};
  Status status;
  if (count > 0) {
    status = tables_->Send(table, count * sizeof(NormRow), Of(stream));
    if (status.ok())
      status = Check(LaunchBlockSums(Of(stream), there, count, groups, launch.block_sums),
                     "sum of squares", stream);
  }
  if (status.ok() && launch.verdict != nullptr)
    status = Check(
        LaunchVerdictOfSums(Of(stream), there, count, launch.block_sums, total, launch.verdict),
        "verdict", stream);
  const Status given_back = tables_->GiveBack(table, Of(stream));
  return status.ok() ? given_back : status;
}

// Updates with different rules or formats need separate launches.
Status CudaDevice::Update(StreamHandle stream, const UpdateLaunch& launch) {
  const Scope scope = Enter();
  std::bitset<kUpdateKindCount> queued;
  for (size_t i = 0; i < launch.updates.size(); ++i) {
    const UpdateKind kind = KindOf(launch.rule, launch.updates[i]);
    if (launch.updates[i].span.count == 0 || queued[NumberOf(kind)]) continue;
    queued.set(NumberOf(kind));
    for (size_t begin = i; begin < launch.updates.size();)
      HYBRIDOPT_TRY(UpdateSome(stream, launch, kind, begin, &begin));
  }
  return {};
}

Status CudaDevice::UpdateSome(StreamHandle stream, const UpdateLaunch& launch,
                              const UpdateKind& kind, size_t begin, size_t* end) {
  HYBRIDOPT_ASSIGN(const Tables::Table table, tables_->Take(options_.timeout_ns));
  auto* const rows = static_cast<UpdateRow*>(table.host);
  uint32_t count = 0;
  uint32_t tiles = 0;
  size_t next = begin;
  for (; next < launch.updates.size() && (count + 1) * sizeof(UpdateRow) <= Tables::kBytes;
       ++next) {
    const DeviceUpdate& update = launch.updates[next];
    HYBRIDOPT_CHECK(update.coefficients < launch.coefficients.size());
    if (update.span.count == 0 || NumberOf(KindOf(launch.rule, update)) != NumberOf(kind)) continue;
    rows[count++] = RowOf(update, launch.coefficients[update.coefficients], tiles);
    tiles += static_cast<uint32_t>((update.span.count + kTileElements - 1) / kTileElements);
  }
  *end = next;
  Status status;
  if (count > 0) {
    status = tables_->Send(table, count * sizeof(UpdateRow), Of(stream));
    if (status.ok())
      status = Check(LaunchUpdate(Of(stream), kind, static_cast<const UpdateRow*>(table.device),
                                  count, tiles, launch.verdict),
                     "update", stream);
  }
  const Status given_back = tables_->GiveBack(table, Of(stream));
  return status.ok() ? given_back : status;
}

// Opens cuBLASLt, so that a program that updates no matrices does not load it.
Status CudaDevice::CheckMatrices() const {
  const Scope scope = Enter();
  return matrices_->Open();
}

Status CudaDevice::PrepareMatrices(StreamHandle stream, const MatrixShape& shape, void* workspace) {
  const Scope scope = Enter();
  return matrices_->Prepare(stream, shape, workspace);
}

Status CudaDevice::UpdateMatrices(StreamHandle stream, const UpdateLaunch& launch) {
  const Scope scope = Enter();
  for (const DeviceUpdate& one : launch.updates)
    HYBRIDOPT_TRY(matrices_->Update(stream, MatrixOf(launch, one), launch.verdict));
  return {};
}

Status CudaDevice::SurveyChanges(StreamHandle stream, const ChangeSurvey& launch) {
  return ReadChanges(stream, launch.parts, "survey of changes",
                     [&](const ChangeRow* rows, uint32_t count, uint32_t blocks) {
                       return LaunchSurveyChanges(Of(stream), rows, count, blocks, launch.tiles);
                     });
}

Status CudaDevice::CollectChanges(StreamHandle stream, const ChangeCollection& launch) {
  return ReadChanges(stream, launch.parts, "collection of changes",
                     [&](const ChangeRow* rows, uint32_t count, uint32_t blocks) {
                       return LaunchCollectChanges(Of(stream), rows, count, blocks,
                                                   launch.parts[0].element_bytes, launch.starts,
                                                   launch.offsets, launch.values);
                     });
}

Status CudaDevice::ReadChanges(StreamHandle stream, std::span<const ChangePart> parts,
                               const char* what, LaunchRows launch) {
  static_assert(kChangePartsMost * sizeof(ChangeRow) <= Tables::kBytes);
  HYBRIDOPT_CHECK(parts.size() <= kChangePartsMost);
  const Scope scope = Enter();
  HYBRIDOPT_ASSIGN(const Tables::Table table, tables_->Take(options_.timeout_ns));
  auto* const rows = static_cast<ChangeRow*>(table.host);
  uint32_t count = 0;
  uint32_t blocks = 0;
  for (const ChangePart& part : parts) {
    if (part.count == 0) continue;
    rows[count++] = {part, blocks, MultiplesOf(8, part.elements)};
    blocks += static_cast<uint32_t>(part.tiles());
  }
  Status status;
  if (count > 0) {
    status = tables_->Send(table, count * sizeof(ChangeRow), Of(stream));
    if (status.ok())
      status =
          Check(launch(static_cast<const ChangeRow*>(table.device), count, blocks), what, stream);
  }
  const Status given_back = tables_->GiveBack(table, Of(stream));
  return status.ok() ? given_back : status;
}

// Not supported: after an error of the device CUDA calls no host callback, so a thread that waits
// for the callback would wait for ever.
Status CudaDevice::Run(StreamHandle, offload_stream_function_t, void*) {
  return Status::Error(OFFLOAD_UNSUPPORTED,
                       "functions do not run on the streams of a CUDA device; queue a kernel, or "
                       "cudaLaunchHostFunc, on the stream yourself");
}

}  // namespace
}  // namespace cuda

Result<std::unique_ptr<Device>> CreateCudaDevice(const CudaOptions& options) {
  return cuda::CudaDevice::Create(options);
}

}  // namespace hybridopt
