// The comm table over NCCL, in a small library of its own: no other part of the project uses NCCL.
//
// Every call is polled until the timeout. The communicator is non-blocking, so that no call of NCCL
// blocks.
#include <memory>
#include <new>

#include "comm/adaptors/nccl_functions.h"
#include "comm/adaptors/ranks.h"

namespace hybridopt::adaptor {
namespace {

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

// Makes a device current in its scope, and restores the calling thread's device and capture mode
// afterwards.
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

constexpr int64_t kAbortNs = 1'000'000'000;

class NcclRanks final : public Ranks {
 public:
  NcclRanks(const NcclFunctions& nccl, int32_t rank, int32_t world, int device)
      : Ranks(rank, world, Memory::kDevice), nccl_(nccl), device_(device) {}

  ~NcclRanks() override {
    const OnDevice on_device(device_);
    Abort();
    if (done_ != nullptr) (void)cudaEventDestroy(done_);
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
    if (device_buffer_ != nullptr) (void)cudaFree(device_buffer_);
    if (host_buffer_ != nullptr) (void)cudaFreeHost(host_buffer_);
  }

  int32_t Initialize(const offload_nccl_id_t& id, int64_t timeout_ns) {
    const Clock::time_point deadline = DeadlineAfter(timeout_ns);
    const OnDevice on_device(device_);
    TRY_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    TRY_CUDA(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming));
    TRY_CUDA(cudaMalloc(&device_buffer_, BufferBytes()));
    TRY_CUDA(cudaMallocHost(&host_buffer_, BufferBytes()));
    NcclConfig config;
    const NcclOutcome started = nccl_.init_rank(&communicator_, world(), id, rank(), &config);
    return AwaitNccl(started, "ncclCommInitRankConfig", deadline);
  }

 private:
  std::byte* buffer() override { return static_cast<std::byte*>(host_buffer_); }

  int32_t Gather(size_t bytes, Clock::time_point deadline) override {
    const OnDevice on_device(device_);
    const int32_t status = GatherOnDevice(bytes, deadline);
    if (status != OFFLOAD_OK) Abort();
    return status;
  }

  int32_t GatherOnDevice(size_t bytes, Clock::time_point deadline) {
    std::byte* const all = AllOf(static_cast<std::byte*>(device_buffer_));
    TRY_CUDA(cudaMemcpyAsync(device_buffer_, host_buffer_, bytes, cudaMemcpyHostToDevice, stream_));
    const NcclOutcome started =
        nccl_.all_gather(device_buffer_, all, bytes, kNcclBytes, communicator_, stream_);
    if (int32_t status = AwaitNccl(started, "ncclAllGather", deadline); status != OFFLOAD_OK)
      return status;
    TRY_CUDA(cudaMemcpyAsync(AllOf(buffer()), all, bytes * static_cast<size_t>(world()),
                             cudaMemcpyDeviceToHost, stream_));
    return AwaitStream(stream_, "ncclAllGather", deadline);
  }

  int32_t Carry(const offload_message_t* messages, uint32_t count, void* stream,
                Clock::time_point deadline) override {
    const OnDevice on_device(device_);
    auto* const queue = static_cast<cudaStream_t>(stream);
    const int32_t status = CarryOnStream(messages, count, queue, deadline);
    if (status == OFFLOAD_OK) return status;
    Abort();
    // Aborted kernels end soon, and until then they may use the messages' memory.
    Poll poll(DeadlineAfter(kAbortNs));
    while (cudaStreamQuery(queue) == cudaErrorNotReady && poll.Again()) {
    }
    return status;
  }

  // All messages are one group: NCCL sends and receives them at the same time.
  int32_t CarryOnStream(const offload_message_t* messages, uint32_t count, cudaStream_t stream,
                        Clock::time_point deadline) {
    NcclOutcome started = nccl_.group_start();
    for (uint32_t i = 0; i < count && !IsError(started); ++i) {
      const offload_message_t& message = MessageAt(messages, i);
      started = message.sends != 0 ? nccl_.send(message.data, message.bytes, kNcclBytes,
                                                message.rank, communicator_, stream)
                                   : nccl_.receive(message.data, message.bytes, kNcclBytes,
                                                   message.rank, communicator_, stream);
    }
    const NcclOutcome ended = nccl_.group_end();
    if (IsError(started)) return FailNccl("ncclSend and ncclRecv", started);
    if (int32_t status = AwaitNccl(ended, "ncclGroupEnd", deadline); status != OFFLOAD_OK)
      return status;
    return AwaitStream(stream, "ncclSend and ncclRecv", deadline);
  }

  // Waits until a stream has reached its end, to which `call` has been queued.
  int32_t AwaitStream(cudaStream_t stream, const char* call, Clock::time_point deadline) {
    TRY_CUDA(cudaEventRecord(done_, stream));
    Poll poll(deadline);
    for (;;) {
      const cudaError_t reached = cudaEventQuery(done_);
      if (reached == cudaSuccess) return OFFLOAD_OK;
      if (reached != cudaErrorNotReady) return FailCuda("cudaEventQuery", reached);
      NcclOutcome error = kNcclSuccess;
      (void)nccl_.async_error(communicator_, &error);
      if (IsError(error)) return FailNccl(call, error);
      if (!poll.Again()) return TimedOut(call);
    }
  }

  static bool IsError(NcclOutcome outcome) {
    return outcome != kNcclSuccess && outcome != kNcclInProgress;
  }

  // Waits until a call that has been started is queued on its stream or has failed.
  int32_t AwaitNccl(NcclOutcome outcome, const char* call, Clock::time_point deadline) {
    Poll poll(deadline);
    while (outcome == kNcclInProgress) {
      if (!poll.Again()) return TimedOut(call);
      if (const NcclOutcome asked = nccl_.async_error(communicator_, &outcome);
          asked != kNcclSuccess)
        return FailNccl("ncclCommGetAsyncError", asked);
    }
    return outcome == kNcclSuccess ? int32_t{OFFLOAD_OK} : FailNccl(call, outcome);
  }

  int32_t FailNccl(const char* call, NcclOutcome error) const {
    return Fail(OFFLOAD_COMM_FAILED, "%s, rank %d of %d: %s", call, rank(), world(),
                nccl_.error_string(error));
  }

  // Aborts NCCL's kernels. Unlike ncclCommDestroy it does not wait for other ranks, so it also ends
  // a communicator that works.
  void Abort() {
    if (communicator_ != nullptr) (void)nccl_.abort(communicator_);
    communicator_ = nullptr;
  }

  const NcclFunctions& nccl_;
  const int device_;
  NcclCommunicator* communicator_ = nullptr;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t done_ = nullptr;
  void* device_buffer_ = nullptr;
  void* host_buffer_ = nullptr;  // pinned
};

}  // namespace
}  // namespace hybridopt::adaptor

using hybridopt::adaptor::Fail;
using hybridopt::adaptor::FindNccl;
using hybridopt::adaptor::kNcclSuccess;
using hybridopt::adaptor::LastError;
using hybridopt::adaptor::NcclFunctions;
using hybridopt::adaptor::NcclOutcome;
using hybridopt::adaptor::NcclRanks;
using hybridopt::adaptor::Ranks;

int32_t offload_nccl_get_id(offload_nccl_id_t* id) try {
  if (id == nullptr)
    return Fail(OFFLOAD_INVALID_ARGUMENT, "id is NULL, expected where to write it");
  std::string why;
  const NcclFunctions* const nccl = FindNccl(&why);
  if (nccl == nullptr) return Fail(OFFLOAD_UNSUPPORTED, "%s", why.c_str());
  const NcclOutcome outcome = nccl->get_unique_id(id);
  if (outcome == kNcclSuccess) return OFFLOAD_OK;
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
  const NcclFunctions* const nccl = FindNccl(&why);
  if (nccl == nullptr) return Fail(OFFLOAD_UNSUPPORTED, "%s", why.c_str());
  auto ranks = std::make_unique<NcclRanks>(*nccl, rank, world, device_index);
  if (int32_t status = ranks->Initialize(*id, timeout_ns); status != OFFLOAD_OK) return status;
  *table = ranks.release()->Table();
  return OFFLOAD_OK;
} catch (const std::bad_alloc&) {
  return Fail(OFFLOAD_OUT_OF_HOST_MEMORY, "no memory for the table");
}

int32_t offload_nccl_destroy(offload_comm_t* table) {
  Ranks* const ranks = Ranks::Of(table, "offload_nccl_create");
  if (ranks == nullptr) return OFFLOAD_INVALID_ARGUMENT;
  *table = {};
  delete ranks;
  return OFFLOAD_OK;
}

const char* offload_nccl_last_error(void) { return LastError(); }
