// AddressPool: blocks of device memory whose addresses stay while their memory is given away.
//
//             Allocate           ReleaseMemory          TakeMemory
//   address   |== block ==|      |.. block ..|          |== block ==|
//   memory     pages              none                   new pages, other content
//
// CUDA graphs hold addresses, so that params must come back where they were.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "base/status.h"
#include "device/device.h"
#include "memory/device_window.h"

namespace hybridopt {

// Either all blocks have memory or none has. Thread-safe.
class AddressPool {
 public:
  // The device lives as long as the pool.
  static Result<std::shared_ptr<AddressPool>> Create(std::shared_ptr<Device> device);
  explicit AddressPool(std::shared_ptr<Device> device) : device_(std::move(device)) {}

  // See offload.h.
  Result<void*> Allocate(uint64_t bytes);
  Status ReleaseMemory();
  Status TakeMemory();
  // Frees a block of any pool of this process. In the child of a fork no pool of the parent is
  // found.
  static Status Free(void* data);
  // Allocate is not called any more. The pool lives until its last block has been freed.
  void Retire();

 private:
  Status TakeMemoryLocked();
  bool Has(void* data);
  bool IsUnused();
  Status FreeOwn(void* data);
  uint64_t BytesLocked() const;
  Status FullLocked(uint64_t bytes) const;

  const std::shared_ptr<Device> device_;
  std::mutex mutex_;                       // guards all below
  std::map<void*, DeviceWindow> windows_;  // by address
  bool is_released_ = false;
  bool is_retired_ = false;
};

}  // namespace hybridopt
