#include "device/cuda/memory.h"

#include <cinttypes>

#include "base/system.h"

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
  if (bytes > total_bytes) return full();  // rounding up such a number could overflow
  const uint64_t rounded = system::RoundUp(bytes, kPageBytes);
  CUdeviceptr address = 0;
  HYBRIDOPT_TRY(fault_.Check(driver_.mem_address_reserve(&address, rounded, kPageBytes, 0, 0),
                             "cuMemAddressReserve"));
  CUmemGenericAllocationHandle handle = 0;
  Status mapped = Create(rounded, &handle);
  if (mapped.ok()) {
    mapped = Map(address, rounded, handle);
    if (!mapped.ok()) (void)driver_.mem_release(handle);
  }
  if (!mapped.ok()) {
    (void)driver_.mem_address_free(address, rounded);
    return mapped.code() == OFFLOAD_OUT_OF_DEVICE_MEMORY ? full() : mapped;
  }
  void* const data = reinterpret_cast<void*>(address);
  std::lock_guard lock(mutex_);
  blocks_[data] = {rounded, handle};
  return data;
}

Status BlockMemory::Create(uint64_t bytes, CUmemGenericAllocationHandle* handle) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device_}};
  const CUresult created = driver_.mem_create(handle, bytes, &properties, 0);
  if (created == CUDA_ERROR_OUT_OF_MEMORY)
    return Status::Error(OFFLOAD_OUT_OF_DEVICE_MEMORY, "cuMemCreate: out of memory");
  return fault_.Check(created, "cuMemCreate");
}

Status BlockMemory::Map(CUdeviceptr address, uint64_t bytes, CUmemGenericAllocationHandle handle) {
  HYBRIDOPT_TRY(fault_.Check(driver_.mem_map(address, bytes, 0, handle, 0), "cuMemMap"));
  CUmemAccessDesc access{};
  access.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device_}};
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  Status status =
      fault_.Check(driver_.mem_set_access(address, bytes, &access, 1), "cuMemSetAccess");
  if (!status.ok()) (void)driver_.mem_unmap(address, bytes);
  return status;
}

uint64_t BlockMemory::PageBytes(uint64_t range_bytes) {
  constexpr uint64_t kPagesMost = 256;
  uint64_t page_bytes = kPageBytes;
  while (page_bytes * kPagesMost < range_bytes) page_bytes *= 2;
  return page_bytes;
}

Result<void*> BlockMemory::Reserve(uint64_t bytes) {
  const uint64_t page_bytes = PageBytes(bytes);
  const uint64_t rounded = system::RoundUp(bytes, page_bytes);
  CUdeviceptr address = 0;
  HYBRIDOPT_TRY(fault_.Check(driver_.mem_address_reserve(&address, rounded, page_bytes, 0, 0),
                             "cuMemAddressReserve"));
  void* const range = reinterpret_cast<void*>(address);
  std::lock_guard lock(mutex_);
  ranges_[range] = {rounded, page_bytes, {}};
  return range;
}

void BlockMemory::Unreserve(void* range) {
  if (range == nullptr) return;
  std::lock_guard lock(mutex_);
  const auto found = ranges_.find(range);
  if (found == ranges_.end()) return;
  if (!keep_mapped_) {
    Truncate(range, found->second, 0);
    (void)driver_.mem_address_free(reinterpret_cast<CUdeviceptr>(range), found->second.bytes);
  }
  ranges_.erase(found);
}

Result<DevicePages> BlockMemory::TakePages(uint64_t range_bytes, uint64_t bytes) {
  const uint64_t page_bytes = PageBytes(range_bytes);
  DevicePages pages;
  while (pages.bytes < bytes) {
    CUmemGenericAllocationHandle handle = 0;
    const Status created = Create(page_bytes, &handle);
    if (!created.ok()) {
      FreePages(pages);
      if (created.code() != OFFLOAD_OUT_OF_DEVICE_MEMORY) return created;
      size_t free_bytes = 0, total_bytes = 0;
      (void)cudaMemGetInfo(&free_bytes, &total_bytes);
      return Status::Error(OFFLOAD_OUT_OF_DEVICE_MEMORY,
                           "asked for %" PRIu64
                           " bytes of device memory, %zu bytes of %zu are free; ask for less, free "
                           "some, or lower device_fraction",
                           bytes, free_bytes, total_bytes);
    }
    pages.handles.push_back(handle);
    pages.bytes += page_bytes;
  }
  return pages;
}

void BlockMemory::FreePages(DevicePages& pages) {
  for (CUmemGenericAllocationHandle handle : pages.handles) (void)driver_.mem_release(handle);
  pages = {};
}

Status BlockMemory::AppendPages(void* range, DevicePages& pages) {
  std::lock_guard lock(mutex_);
  Range& to = ranges_.at(range);
  for (size_t page = 0; page < pages.handles.size(); ++page) {
    const CUdeviceptr address =
        reinterpret_cast<CUdeviceptr>(range) + to.pages.size() * to.page_bytes;
    const Status mapped = Map(address, to.page_bytes, pages.handles[page]);
    if (!mapped.ok()) {
      pages.handles.erase(pages.handles.begin(), pages.handles.begin() + static_cast<long>(page));
      pages.bytes = pages.handles.size() * to.page_bytes;
      return mapped;
    }
    to.pages.push_back(pages.handles[page]);
  }
  pages = {};
  return {};
}

void BlockMemory::TruncatePages(void* range, uint64_t bytes) {
  std::lock_guard lock(mutex_);
  Truncate(range, ranges_.at(range), bytes);
}

void BlockMemory::Truncate(void* address, Range& range, uint64_t bytes) {
  while (range.pages.size() * range.page_bytes > bytes) {
    const uint64_t offset = (range.pages.size() - 1) * range.page_bytes;
    if (!keep_mapped_) {
      (void)driver_.mem_unmap(reinterpret_cast<CUdeviceptr>(address) + offset, range.page_bytes);
      (void)driver_.mem_release(range.pages.back());
    }
    range.pages.pop_back();
  }
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
  for (auto& [address, range] : ranges_) {
    if (keep_mapped_) continue;
    Truncate(address, range, 0);
    (void)driver_.mem_address_free(reinterpret_cast<CUdeviceptr>(address), range.bytes);
  }
  ranges_.clear();
}

void BlockMemory::KeepMapped() {
  std::lock_guard lock(mutex_);
  keep_mapped_ = true;
}

}  // namespace hybridopt::cuda
