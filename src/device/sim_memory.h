// The simulated device's memory: an address space of its own, with a capacity.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>

#include "base/status.h"
#include "device/device.h"

namespace hybridopt {

// Device addresses lie in a region that faults on any access, so that host code which forgot a copy
// dies at once; the bytes lie elsewhere, at the same offsets (there are more addresses than bytes):
//
//   addresses_  |......[ allocation ]..........|   what callers hold; no page is accessible
//   backing_    |ffffff[ its bytes  ]ffffffffff|   what Translate gives to commands
//
// Fresh and freed bytes are 0xff, which is NaN in every dtype, so that stale use shows in bits. (Of
// blocks above 16 MiB, one line in each page.)
// Thread-safe. Commands only read the tables, under a shared lock: it does not order them among
// each other, so that a race detector still sees what the pipeline forgot to order.
class SimMemory {
 public:
  static Result<std::unique_ptr<SimMemory>> Create(uint64_t bytes);
  ~SimMemory();
  SimMemory(const SimMemory&) = delete;
  SimMemory& operator=(const SimMemory&) = delete;

  DeviceMemory Usage() const;
  Result<void*> Allocate(uint64_t bytes);
  Status Free(void* data);

  // Ranges of addresses outside the capacity, whose first bytes have memory that counts against it:
  // see Device::Reserve. Memory that comes or goes is poisoned.
  static constexpr uint64_t kPageBytes = 256;
  Result<void*> Reserve(uint64_t bytes);
  void Unreserve(void* range);
  Result<DevicePages> TakePages(uint64_t bytes);
  void FreePages(DevicePages& pages);
  Status AppendPages(void* range, DevicePages& pages);
  void TruncatePages(void* range, uint64_t bytes);

  // Where the bytes of a range inside one live allocation lie; INVALID_ARGUMENT if it is not one,
  // or not aligned.
  Result<void*> Translate(const void* data, uint64_t bytes, uint64_t alignment) const;

  // True if any of the range is a device address, allocated or not.
  bool Overlaps(const void* data, uint64_t bytes) const;

 private:
  SimMemory(uint64_t capacity, void* addresses, void* backing);

  struct Reserved {
    uint64_t bytes;
    char* backing;
    uint64_t backed_bytes;  // from the begin on
  };
  // The reserved range that holds the address, or the end. With mutex_ held.
  std::map<uintptr_t, Reserved>::const_iterator FindReserved(uintptr_t address) const;

  const uint64_t capacity_;
  char* const addresses_;
  char* const backing_;
  mutable std::shared_mutex mutex_;
  std::map<uint64_t, uint64_t> live_;  // offset -> bytes asked for; taken are whole units
  std::map<uint64_t, uint64_t> free_;  // offset -> bytes; neighbours are merged
  // Of the capacity. It is less than free_ holds: that has addresses, and reserved ranges take
  // memory too.
  uint64_t free_bytes_;
  std::map<uintptr_t, Reserved> reserved_;  // by address
};

}  // namespace hybridopt
