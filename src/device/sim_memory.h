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
// dies at once; the bytes lie elsewhere, at the same offsets:
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

  // Where the bytes of a range inside one live allocation lie; INVALID_ARGUMENT if it is not one,
  // or not aligned.
  Result<void*> Translate(const void* data, uint64_t bytes, uint64_t alignment) const;

  // True if any of the range is a device address, allocated or not.
  bool Overlaps(const void* data, uint64_t bytes) const;

 private:
  SimMemory(uint64_t capacity, void* addresses, void* backing);

  const uint64_t capacity_;
  char* const addresses_;
  char* const backing_;
  mutable std::shared_mutex mutex_;
  std::map<uint64_t, uint64_t> live_;  // offset -> bytes asked for; taken are whole units
  std::map<uint64_t, uint64_t> free_;  // offset -> bytes; neighbours are merged
  uint64_t free_bytes_;
};

}  // namespace hybridopt
