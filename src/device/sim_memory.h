// The simulated device's memory: an address space of its own, with a capacity.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>

#include "base/status.h"
#include "device/device.h"

namespace hybridopt {

// Device addresses are in a range that faults on any access, so that host code which forgot a copy
// fails at once. The bytes are elsewhere, at the same offsets (there are more addresses than
// bytes):
//
//   addresses_  |......[ allocation ]..........|   what callers hold; no page is accessible
//   backing_    |ffffff[ its bytes  ]ffffffffff|   what Translate gives to commands
//
// New and freed bytes are 0xff, which is NaN in every dtype, so that the use of stale bytes changes
// results. (In blocks above 16 MiB, one cache line of each page.) Thread-safe. Commands only read
// the tables, under a shared lock. This lock does not order commands among each other, so that a
// race detector still finds commands that the pipeline forgot to order.
class SimMemory {
 public:
  static Result<std::unique_ptr<SimMemory>> Create(uint64_t bytes);
  ~SimMemory();
  SimMemory(const SimMemory&) = delete;
  SimMemory& operator=(const SimMemory&) = delete;

  DeviceMemory Usage() const;
  Result<void*> Allocate(uint64_t bytes);
  Status Free(void* data);

  // Reserved ranges of addresses (Device::Reserve) are outside the capacity. Their first bytes may
  // have memory, which counts towards the capacity and is poisoned when it is appended and when it
  // is freed.
  static constexpr uint64_t kPageBytes = 256;
  Result<void*> Reserve(uint64_t bytes);
  void Unreserve(void* range);
  Result<DevicePages> TakePages(uint64_t bytes);
  void FreePages(DevicePages& pages);
  Status AppendPages(void* range, DevicePages& pages);
  void TruncatePages(void* range, uint64_t bytes);

  // The bytes behind a range of device addresses; INVALID_ARGUMENT if the range is not inside one
  // live allocation, or is not aligned.
  Result<void*> Translate(const void* data, uint64_t bytes, uint64_t alignment) const;

  // True if some address of the range is a device address, allocated or not.
  bool Overlaps(const void* data, uint64_t bytes) const;

 private:
  SimMemory(uint64_t capacity, void* addresses, void* backing);

  struct Reserved {
    uint64_t bytes;
    char* backing;
    uint64_t backed_bytes;  // from the start of the range
  };
  // The reserved range that contains the address, or the end. The caller holds mutex_.
  std::map<uintptr_t, Reserved>::const_iterator FindReserved(uintptr_t address) const;

  const uint64_t capacity_;
  char* const addresses_;
  char* const backing_;
  mutable std::shared_mutex mutex_;
  std::map<uint64_t, uint64_t> live_;  // offset -> bytes asked for; whole units are taken
  std::map<uint64_t, uint64_t> free_;  // offset -> bytes; neighbours are merged
  // Free bytes of the capacity. The sum of free_ is larger: it counts addresses, of which there are
  // more than memory, and reserved ranges take memory too.
  uint64_t free_bytes_;
  std::map<uintptr_t, Reserved> reserved_;  // by address
};

}  // namespace hybridopt
