// Device memory of the CUDA device.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>

#include "base/status.h"
#include "device/cuda/driver.h"

namespace hybridopt::cuda {

// Blocks of whole 2 MiB pages, mapped one by one. cudaFree would wait for every stream of the
// device, those of the caller included that wait for the very step which frees: freeing here waits
// for nobody. Thread-safe; callers are inside a Scope.
class BlockMemory {
 public:
  BlockMemory(const Driver& driver, Fault& fault, int device)
      : driver_(driver), fault_(fault), device_(device) {}
  ~BlockMemory() = default;
  BlockMemory(const BlockMemory&) = delete;
  BlockMemory& operator=(const BlockMemory&) = delete;

  Result<void*> Allocate(uint64_t bytes);
  Status Free(void* data);
  void FreeAll();
  // Something that cannot be stopped may still use what is freed from now on: it stays mapped.
  void KeepMapped();

 private:
  Status Map(CUdeviceptr address, uint64_t bytes, CUmemGenericAllocationHandle* handle);
  void Unmap(CUdeviceptr address, uint64_t bytes, CUmemGenericAllocationHandle handle);

  struct Block {
    uint64_t bytes;
    CUmemGenericAllocationHandle handle;
  };
  const Driver& driver_;
  Fault& fault_;
  const int device_;
  std::mutex mutex_;
  std::map<void*, Block> blocks_;  // guarded by mutex_
  bool keep_mapped_ = false;       // guarded by mutex_
};

}  // namespace hybridopt::cuda
