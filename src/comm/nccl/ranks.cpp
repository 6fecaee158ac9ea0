// The comm table over NCCL, a small library of its own: nothing else of the project knows NCCL.
//
// Every call is a gather of bytes that is looked at until the timeout; then each rank combines all
// values by itself, in rank order. Nothing of NCCL's blocks: its communicator is a non-blocking
// one.
#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <memory>
#include <mutex>
#include <new>
#include <thread>

#include "comm/nccl/functions.h"

namespace hybridopt::nccl {
namespace {

// -------------------------------------------------------------------------------------- errors --

constexpr size_t kTextBytes = 512;
std::mutex last_error_mutex;
char last_error[kTextBytes];  // guarded by last_error_mutex

[[gnu::format(printf, 2, 3)]] int32_t Fail(int32_t code, const char* format, ...) {
  std::lock_guard lock(last_error_mutex);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, kTextBytes, format, arguments);
  va_end(arguments);
  return code;
}

int32_t FailCuda(const char* call, cudaError_t error) {
  (void)cudaGetLastError();
  const int32_t code = error == cudaErrorMemoryAllocation ? OFFLOAD_OUT_OF_DEVICE_MEMORY
                       : error == cudaErrorInsufficientDriver || error == cudaErrorNoDevice
                           ? OFFLOAD_UNSUPPORTED
                       : error == cudaErrorInvalidDevice ? OFFLOAD_INVALID_ARGUMENT
                                                         : OFFLOAD_COMM_FAILED;
  return Fail(code, "%s: %s (%s)", call, cudaGetErrorString(error), cudaGetErrorName(error));
}

#define TRY_CUDA(call)                                                                         \
  do {                                                                                         \
    if (const cudaError_t error = (call); error != cudaSuccess) return FailCuda(#call, error); \
  } while (false)

// --------------------------------------------------------------------------------------- ranks --

// The calling thread's device and capture mode are back afterwards.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    if (cudaGetDevice(&before_) != cudaSuccess) before_ = device;
    if (before_ != device) (void)cudaSetDevice(device);
    (void)cudaThreadExchangeStreamCaptureMode(&mode_);
    device_ = device;
  }
  ~OnDevice() {
    (void)cudaThreadExchangeStreamCaptureMode(&mode_);
    if (before_ != device_) (void)cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  int device_ = 0;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

using Clock = std::chrono::steady_clock;

Clock::time_point DeadlineAfter(int64_t timeout_ns) {
  constexpr int64_t kYearsNs = int64_t{1} << 59;  // far, but the clock can still count there
  return Clock::now() + std::chrono::nanoseconds(std::clamp<int64_t>(timeout_ns, 0, kYearsNs));
}

// Ranks come together within microseconds, or one has much left to do: then it gets the core.
void Pause(uint32_t looks) {
  if (looks < 1000) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

// Calls come from one thread at a time: the library's thread of the optimizer.
class NcclRanks {
 public:
  NcclRanks(const Functions& nccl, int rank, int world, int device)
      : nccl_(nccl), rank_(rank), world_(world), device_(device) {}

  ~NcclRanks() {
    const OnDevice on_device(device_);
    Abort();
    if (done_ != nullptr) (void)cudaEventDestroy(done_);
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
    if (device_memory_ != nullptr) (void)cudaFree(device_memory_);
    if (host_memory_ != nullptr) (void)cudaFreeHost(host_memory_);
  }
  NcclRanks(const NcclRanks&) = delete;
  NcclRanks& operator=(const NcclRanks&) = delete;

  int32_t Initialize(const UniqueId& id, int64_t timeout_ns) {
    const Clock::time_point deadline = DeadlineAfter(timeout_ns);
    const OnDevice on_device(device_);
    TRY_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    TRY_CUDA(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming));
    TRY_CUDA(cudaMalloc(&device_memory_, Bytes()));
    TRY_CUDA(cudaMallocHost(&host_memory_, Bytes()));
    Config config;
    const Outcome started = nccl_.init_rank(&communicator_, world_, id, rank_, &config);
    const int32_t status = AwaitNccl(started, "ncclCommInitRankConfig", deadline);
    failed_ = status != OFFLOAD_OK;
    return status;
  }

  int32_t rank() const { return rank_; }
  int32_t world() const { return world_; }

  // Combines each of the values over all ranks, in place, in rank order.
  template <typename T, typename Combine>
  int32_t Reduce(T* values, uint32_t count, int64_t timeout_ns, Combine combine) {
    if (failed_)
      return Fail(OFFLOAD_COMM_FAILED,
                  "an earlier call failed; its ranks are out of step for good");
    const OnDevice on_device(device_);
    const Clock::time_point deadline = DeadlineAfter(timeout_ns);
    for (uint32_t begin = 0; begin < count; begin += kValuesAtOnce) {
      const uint32_t portion = std::min(count - begin, kValuesAtOnce);
      std::copy_n(values + begin, portion, static_cast<T*>(host_memory_));
      if (int32_t status = Gather(portion * sizeof(T), deadline); status != OFFLOAD_OK) {
        failed_ = true;
        Abort();
        return status;
      }
      const T* const all = reinterpret_cast<const T*>(AllOf(host_memory_));
      for (uint32_t i = 0; i < portion; ++i) {
        values[begin + i] = all[i];
        for (int rank = 1; rank < world_; ++rank)
          values[begin + i] =
              combine(values[begin + i], all[static_cast<uint32_t>(rank) * portion + i]);
      }
    }
    return OFFLOAD_OK;
  }

  int32_t Barrier(int64_t timeout_ns) {
    int32_t nothing = 0;
    return Reduce(&nothing, 1, timeout_ns, [](int32_t a, int32_t) { return a; });
  }

 private:
  // What one gather carries of each rank. Fixed, so that no call allocates.
  static constexpr uint32_t kValuesAtOnce = 64;
  static constexpr size_t kOwnBytes = kValuesAtOnce * sizeof(double);

  // On either side: this rank's own values, then those of all ranks.
  size_t Bytes() const { return kOwnBytes * (1 + static_cast<size_t>(world_)); }
  static std::byte* AllOf(void* memory) { return static_cast<std::byte*>(memory) + kOwnBytes; }

  int32_t Gather(size_t bytes, Clock::time_point deadline) {
    TRY_CUDA(cudaMemcpyAsync(device_memory_, host_memory_, bytes, cudaMemcpyHostToDevice, stream_));
    const Outcome started = nccl_.all_gather(device_memory_, AllOf(device_memory_), bytes,
                                             kBytesType, communicator_, stream_);
    if (int32_t status = AwaitNccl(started, "ncclAllGather", deadline); status != OFFLOAD_OK)
      return status;
    TRY_CUDA(cudaMemcpyAsync(AllOf(host_memory_), AllOf(device_memory_),
                             bytes * static_cast<size_t>(world_), cudaMemcpyDeviceToHost, stream_));
    TRY_CUDA(cudaEventRecord(done_, stream_));
    for (uint32_t looks = 0;; ++looks) {
      const cudaError_t reached = cudaEventQuery(done_);
      if (reached == cudaSuccess) return OFFLOAD_OK;
      if (reached != cudaErrorNotReady) return FailCuda("cudaEventQuery", reached);
      Outcome error = kSuccess;
      (void)nccl_.async_error(communicator_, &error);
      if (error != kSuccess && error != kInProgress) return FailNccl("ncclAllGather", error);
      if (Clock::now() >= deadline) return TimedOut("ncclAllGather");
      Pause(looks);
    }
  }

  // Until a call that has been started is on its stream, or at an end.
  int32_t AwaitNccl(Outcome outcome, const char* call, Clock::time_point deadline) {
    for (uint32_t looks = 0; outcome == kInProgress; ++looks) {
      if (Clock::now() >= deadline) return TimedOut(call);
      Pause(looks);
      if (const Outcome asked = nccl_.async_error(communicator_, &outcome); asked != kSuccess)
        return FailNccl("ncclCommGetAsyncError", asked);
    }
    return outcome == kSuccess ? int32_t{OFFLOAD_OK} : FailNccl(call, outcome);
  }

  int32_t FailNccl(const char* call, Outcome error) const {
    return Fail(OFFLOAD_COMM_FAILED, "%s, rank %d of %d: %s", call, rank_, world_,
                nccl_.error_string(error));
  }
  int32_t TimedOut(const char* call) const {
    return Fail(OFFLOAD_TIMED_OUT, "%s, rank %d of %d: not all ranks came in time", call, rank_,
                world_);
  }

  // Ends NCCL's kernels wherever they are. It waits for no other rank, so it serves to end a good
  // communicator too.
  void Abort() {
    if (communicator_ != nullptr) (void)nccl_.abort(communicator_);
    communicator_ = nullptr;
  }

  const Functions& nccl_;
  const int rank_;
  const int world_;
  const int device_;
  bool failed_ = false;
  Communicator* communicator_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t done_ = nullptr;
  void* device_memory_ = nullptr;
  void* host_memory_ = nullptr;  // pinned
};

int32_t Sum(void* user, double* values, uint32_t count, int64_t timeout_ns) {
  return static_cast<NcclRanks*>(user)->Reduce(values, count, timeout_ns,
                                               [](double a, double b) { return a + b; });
}

int32_t Max(void* user, int32_t* values, uint32_t count, int64_t timeout_ns) {
  return static_cast<NcclRanks*>(user)->Reduce(values, count, timeout_ns,
                                               [](int32_t a, int32_t b) { return std::max(a, b); });
}

int32_t Barrier(void* user, int64_t timeout_ns) {
  return static_cast<NcclRanks*>(user)->Barrier(timeout_ns);
}

}  // namespace
}  // namespace hybridopt::nccl

using hybridopt::nccl::Fail;
using hybridopt::nccl::Functions;
using hybridopt::nccl::NcclRanks;

int32_t offload_nccl_get_id(offload_nccl_id_t* id) try {
  if (id == nullptr)
    return Fail(OFFLOAD_INVALID_ARGUMENT, "id is NULL, expected where to write it");
  std::string why;
  const Functions* const nccl = hybridopt::nccl::Find(&why);
  if (nccl == nullptr) return Fail(OFFLOAD_UNSUPPORTED, "%s", why.c_str());
  const auto outcome = nccl->get_unique_id(id);
  if (outcome == hybridopt::nccl::kSuccess) return OFFLOAD_OK;
  return Fail(OFFLOAD_COMM_FAILED, "ncclGetUniqueId: %s", nccl->error_string(outcome));
} catch (const std::bad_alloc&) {
  return Fail(OFFLOAD_OUT_OF_HOST_MEMORY, "no memory to look for libnccl");
}

int32_t offload_nccl_create(const offload_nccl_id_t* id, int32_t rank, int32_t world,
                            int32_t device_index, int64_t timeout_ns, offload_comm_t* table) try {
  if (id == nullptr || table == nullptr)
    return Fail(OFFLOAD_INVALID_ARGUMENT, "%s is NULL, expected an address",
                id == nullptr ? "id" : "table");
  if (world < 1 || rank < 0 || rank >= world)
    return Fail(OFFLOAD_INVALID_ARGUMENT,
                "rank is %d of world %d, expected a world of at least 1 and a rank below it", rank,
                world);
  std::string why;
  const Functions* const nccl = hybridopt::nccl::Find(&why);
  if (nccl == nullptr) return Fail(OFFLOAD_UNSUPPORTED, "%s", why.c_str());
  auto ranks = std::make_unique<NcclRanks>(*nccl, rank, world, device_index);
  if (int32_t status = ranks->Initialize(*id, timeout_ns); status != OFFLOAD_OK) return status;
  offload_comm_t made{};
  made.struct_size = sizeof(made);
  made.rank = ranks->rank();
  made.world = ranks->world();
  made.sum = hybridopt::nccl::Sum;
  made.max = hybridopt::nccl::Max;
  made.barrier = hybridopt::nccl::Barrier;
  made.user = ranks.release();
  *table = made;
  return OFFLOAD_OK;
} catch (const std::bad_alloc&) {
  return Fail(OFFLOAD_OUT_OF_HOST_MEMORY, "no memory for the table");
}

int32_t offload_nccl_destroy(offload_comm_t* table) {
  if (table == nullptr || table->sum != hybridopt::nccl::Sum || table->user == nullptr)
    return Fail(OFFLOAD_INVALID_ARGUMENT,
                "table is %s, expected one of offload_nccl_create that has not been destroyed",
                table == nullptr ? "NULL" : "not such a one");
  delete static_cast<NcclRanks*>(table->user);
  *table = {};
  return OFFLOAD_OK;
}

const char* offload_nccl_last_error(void) {
  thread_local char text[hybridopt::nccl::kTextBytes];
  std::lock_guard lock(hybridopt::nccl::last_error_mutex);
  std::copy_n(hybridopt::nccl::last_error, hybridopt::nccl::kTextBytes, text);
  return text;
}
