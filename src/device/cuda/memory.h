// Device memory of the CUDA device.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "base/status.h"
#include "device/cuda/driver.h"
#include "device/device.h"

namespace hybridopt::cuda {

// Blocks of whole 2 MiB pages, each mapped separately. cudaFree would wait for every stream of the
// device, even for a stream of the caller that waits for the step that calls cudaFree. A free of
// these blocks waits for no stream. Thread-safe; callers must be inside a Scope.
class BlockMemory {
 public:
  BlockMemory(const Driver& driver, Fault& fault, int device)
      : driver_(driver), fault_(fault), device_(device) {}
  ~BlockMemory() = default;
  BlockMemory(const BlockMemory&) = delete;
  BlockMemory& operator=(const BlockMemory&) = delete;

  Result<void*> Allocate(uint64_t bytes);
  Status Free(void* data);
  void FreeAll();  // frees reserved ranges too

  // See Device::Reserve. Large ranges have larger pages, because each page has a handle of its own.
  static uint64_t PageBytes(uint64_t range_bytes);
  Result<void*> Reserve(uint64_t bytes);
  void Unreserve(void* range);
  Result<DevicePages> TakePages(uint64_t range_bytes, uint64_t bytes);
  void FreePages(DevicePages& pages);
  Status AppendPages(void* range, DevicePages& pages);
  void TruncatePages(void* range, uint64_t bytes);
  // To be called when work that cannot be stopped may still use memory: blocks that are freed from
  // now on stay mapped.
  void KeepMapped();

 private:
  Status Create(uint64_t bytes, CUmemGenericAllocationHandle* handle);
  Status Map(CUdeviceptr address, uint64_t bytes, CUmemGenericAllocationHandle handle);
  void Unmap(CUdeviceptr address, uint64_t bytes, CUmemGenericAllocationHandle handle);

  struct Block {
    uint64_t bytes;
    CUmemGenericAllocationHandle handle;
  };
  struct Range {
    uint64_t bytes;
    uint64_t page_bytes;
    std::vector<CUmemGenericAllocationHandle> pages;  // in order, from the start of the range
  };
  void Truncate(void* address, Range& range, uint64_t bytes);

  const Driver& driver_;
  Fault& fault_;
  const int device_;
  std::mutex mutex_;
  std::map<void*, Range> ranges_;  // guarded by mutex_
  std::map<void*, Block> blocks_;  // guarded by mutex_
  bool keep_mapped_ = false;       // guarded by mutex_
};

}  // namespace hybridopt::cuda
