// The work of device_work.h on a GPU: kernels with a thread for each element, and NCCL.
#include <cuda_runtime.h>
#include <nccl.h>

#include "device_work.h"

namespace {

void must_cuda(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  fail(std::string(call) + "\n" + cudaGetErrorName(error) + ": " + cudaGetErrorString(error));
}
void must_nccl(ncclResult_t result, const char* call) {
  if (result != ncclSuccess) fail(std::string(call) + "\n" + ncclGetErrorString(result));
}
#define MUST_CUDA(call) must_cuda(call, #call)
#define MUST_NCCL(call) must_nccl(call, #call)

template <typename Pass>
__global__ void for_each(uint64_t count, Pass pass) {
  const uint64_t i = uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) pass(i);
}

class GpuWork final : public DeviceWork {
 public:
  GpuWork(cudaStream_t stream, MPI_Comm ranks, int device) : stream_(stream) {
    MUST_CUDA(cudaSetDevice(device));  // NCCL takes the thread's device
    int rank = 0;
    MPI_Comm_rank(ranks, &rank);
    MPI_Comm_size(ranks, &world_);
    ncclUniqueId id;
    if (rank == 0) MUST_NCCL(ncclGetUniqueId(&id));
    MPI_Bcast(&id, sizeof id, MPI_BYTE, 0, ranks);
    MUST_NCCL(ncclCommInitRank(&nccl_, world_, id, rank));
  }
  ~GpuWork() override {
    MUST_CUDA(cudaStreamSynchronize(stream_));
    MUST_NCCL(ncclCommDestroy(nccl_));
  }
  GpuWork(const GpuWork&) = delete;
  GpuWork& operator=(const GpuWork&) = delete;

  void queue(const MicroBatch& micro_batch) override {
    forward_backward(micro_batch,
                     [this](uint64_t count, const auto& pass) { launch(count, pass); });
  }

  void add(float* sum, const float* other, uint64_t count) override {
    launch(count, AddPass{sum, other});
  }

  void exchange(const float* mine, float* received, uint64_t count) override {
    MUST_NCCL(ncclGroupStart());
    for (int rank = 0; rank < world_; ++rank) {
      MUST_NCCL(ncclSend(mine + rank * count, count, ncclFloat, rank, nccl_, stream_));
      MUST_NCCL(ncclRecv(received + rank * count, count, ncclFloat, rank, nccl_, stream_));
    }
    MUST_NCCL(ncclGroupEnd());
  }

  void gather(uint16_t* params, uint64_t count) override {
    int rank = 0;
    MUST_NCCL(ncclCommUserRank(nccl_, &rank));
    MUST_NCCL(ncclAllGather(params + rank * count, params, count, ncclBfloat16, nccl_, stream_));
  }

 private:
  template <typename Pass>
  void launch(uint64_t count, const Pass& pass) {
    constexpr unsigned kThreads = 256;
    const unsigned blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
    for_each<<<blocks, kThreads, 0, stream_>>>(count, pass);
    MUST_CUDA(cudaGetLastError());
  }

  cudaStream_t stream_;
  ncclComm_t nccl_ = nullptr;
  int world_ = 0;
};

}  // namespace

std::unique_ptr<DeviceWork> make_gpu_work(offload_stream_t stream, MPI_Comm ranks, int device) {
  return std::make_unique<GpuWork>(static_cast<cudaStream_t>(stream), ranks, device);
}
