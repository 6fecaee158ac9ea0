#include "device/cuda/memory.h"

#include <cinttypes>

namespace hybridopt::cuda {
namespace {

constexpr uint64_t kPageBytes = uint64_t{2} << 20;

}  // namespace

Result<void*> BlockMemory::Allocate(uint64_t bytes) {
  if (bytes == 0) return Status::Error(OFFLOAD_INVALID_ARGUMENT, "bytes is 0, expected at least 1");
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  HYBRIDOPT_TRY(fault_.Check(cudaMemGetInfo(&free_bytes, &total_bytes), "cudaMemGetInfo"));
  const auto full = [&] {
    return Status::Error(OFFLOAD_OUT_OF_DEVICE_MEMORY,
                         "asked for %" PRIu64
                         " bytes of device memory, %zu bytes of %zu are free; ask for less, free "
                         "some, or lower device_fraction",
                         bytes, free_bytes, total_bytes);
  };
  if (bytes > total_bytes) return full();  // rounding it could overflow
  const uint64_t rounded = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
  CUdeviceptr address = 0;
  HYBRIDOPT_TRY(fault_.Check(driver_.mem_address_reserve(&address, rounded, kPageBytes, 0, 0),
                             "cuMemAddressReserve"));
  CUmemGenericAllocationHandle handle = 0;
  const Status mapped = Map(address, rounded, &handle);
  if (!mapped.ok()) {
    (void)driver_.mem_address_free(address, rounded);
    return mapped.code() == OFFLOAD_OUT_OF_DEVICE_MEMORY ? full() : mapped;
  }
  void* const data = reinterpret_cast<void*>(address);
  std::lock_guard lock(mutex_);
  blocks_[data] = {rounded, handle};
  return data;
}

Status BlockMemory::Map(CUdeviceptr address, uint64_t bytes, CUmemGenericAllocationHandle* handle) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device_}};
  const CUresult created = driver_.mem_create(handle, bytes, &properties, 0);
  if (created == CUDA_ERROR_OUT_OF_MEMORY)
    return Status::Error(OFFLOAD_OUT_OF_DEVICE_MEMORY, "cuMemCreate: out of memory");
  HYBRIDOPT_TRY(fault_.Check(created, "cuMemCreate"));
  Status status = fault_.Check(driver_.mem_map(address, bytes, 0, *handle, 0), "cuMemMap");
  if (status.ok()) {
    CUmemAccessDesc access{};
    access.location = properties.location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    status = fault_.Check(driver_.mem_set_access(address, bytes, &access, 1), "cuMemSetAccess");
    if (!status.ok()) (void)driver_.mem_unmap(address, bytes);
  }
  if (!status.ok()) (void)driver_.mem_release(*handle);
  return status;
}

void BlockMemory::Unmap(CUdeviceptr address, uint64_t bytes, CUmemGenericAllocationHandle handle) {
  (void)driver_.mem_unmap(address, bytes);
  (void)driver_.mem_release(handle);
  (void)driver_.mem_address_free(address, bytes);
}

Status BlockMemory::Free(void* data) {
  if (data == nullptr) return {};
  std::lock_guard lock(mutex_);
  const auto found = blocks_.find(data);
  if (found == blocks_.end())
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "data is %p, expected an address that this device allocated and that has "
                         "not been freed yet",
                         data);
  if (!keep_mapped_)
    Unmap(reinterpret_cast<CUdeviceptr>(data), found->second.bytes, found->second.handle);
  blocks_.erase(found);
  return {};
}

void BlockMemory::FreeAll() {
  std::lock_guard lock(mutex_);
  for (const auto& [address, block] : blocks_)
    if (!keep_mapped_) Unmap(reinterpret_cast<CUdeviceptr>(address), block.bytes, block.handle);
  blocks_.clear();
}

void BlockMemory::KeepMapped() {
  std::lock_guard lock(mutex_);
  keep_mapped_ = true;
}

}  // namespace hybridopt::cuda
