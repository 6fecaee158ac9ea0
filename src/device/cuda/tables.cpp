#include "device/cuda/tables.h"

#include "base/system.h"
#include "device/cuda/poll.h"

namespace hybridopt::cuda {

Result<std::unique_ptr<Tables>> Tables::Create(Fault& fault) {
  std::unique_ptr<Tables> tables(new Tables(fault));
  HYBRIDOPT_TRY(fault.Check(cudaMallocHost(&tables->host_, kBytes * kCount),
                            "cudaMallocHost for launch tables"));
  HYBRIDOPT_TRY(
      fault.Check(cudaMalloc(&tables->device_, kBytes * kCount), "cudaMalloc for launch tables"));
  for (cudaEvent_t& event : tables->done_)
    HYBRIDOPT_TRY(fault.Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                              "cudaEventCreate for launch tables"));
  return tables;
}

Tables::~Tables() {
  for (cudaEvent_t event : done_)
    if (event != nullptr) (void)cudaEventDestroy(event);
  if (device_ != nullptr) (void)cudaFree(device_);
  if (host_ != nullptr) (void)cudaFreeHost(host_);
}

Result<Tables::Table> Tables::Take(int64_t timeout_ns) {
  Table table{};
  const auto find = [&]() -> Result<bool> {
    std::lock_guard lock(mutex_);
    for (uint32_t i = 0; i < kCount; ++i) {
      const uint32_t index = (next_ + i) % kCount;
      if (taken_[index]) continue;
      const cudaError_t error = cudaEventQuery(done_[index]);
      if (error == cudaErrorNotReady) continue;
      HYBRIDOPT_TRY(fault_.Check(error, "cudaEventQuery of a launch table"));
      taken_[index] = true;
      next_ = (index + 1) % kCount;
      table = {index, static_cast<std::byte*>(host_) + index * kBytes,
               static_cast<std::byte*>(device_) + index * kBytes};
      return true;
    }
    return false;
  };
  HYBRIDOPT_ASSIGN(const bool found, PollUntil(find, timeout_ns));
  if (found) return table;
  return Status::Error(OFFLOAD_DEVICE_FAILED,
                       "%u launches are queued and none ended within %.1f s (device_timeout_ns of "
                       "the context); is a stream given to a step stuck?",
                       kCount, static_cast<double>(timeout_ns) * 1e-9);
}

Status Tables::Send(const Table& table, uint64_t bytes, cudaStream_t stream) {
  return fault_.Check(
      cudaMemcpyAsync(table.device, table.host, bytes, cudaMemcpyHostToDevice, stream),
      "cudaMemcpyAsync of a launch table");
}

Status Tables::GiveBack(const Table& table, cudaStream_t stream) {
  const Status status = fault_.Check(cudaEventRecord(done_[table.index], stream),
                                     "cudaEventRecord of a launch table");
  std::lock_guard lock(mutex_);
  taken_[table.index] = false;
  return status;
}

}  // namespace hybridopt::cuda
