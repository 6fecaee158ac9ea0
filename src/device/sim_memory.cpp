#include "device/sim_memory.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <iterator>
#include <mutex>

#include "base/check.h"
#include "base/system.h"

namespace hybridopt {
namespace {

constexpr uint64_t kBlockAlignment = 256;
constexpr int kPoison = 0xff;

// In blocks above this size only one cache line of every page is poisoned. To poison all bytes
// would take as long as a copy of the block, and code that uses such a large stale block reads NaN
// anyway.
constexpr uint64_t kFullPoisonBytesMax = uint64_t{16} << 20;
constexpr uint64_t kPoisonLineBytes = 64;
constexpr uint64_t kPoisonStrideBytes = 4096;

void Poison(char* data, uint64_t bytes) {
  if (bytes <= kFullPoisonBytesMax) {
    std::memset(data, kPoison, bytes);
    return;
  }
  for (uint64_t offset = 0; offset < bytes; offset += kPoisonStrideBytes)
    std::memset(data + offset, kPoison, std::min(kPoisonLineBytes, bytes - offset));
}

// A GPU has far more addresses than memory, so that a large block can use free memory on both sides
// of a block in the middle. The simulation has twice as many addresses as memory, unless the
// capacity is larger than any machine's.
uint64_t AddressBytes(uint64_t capacity) {
  return capacity <= uint64_t{1} << 50 ? 2 * capacity : capacity;
}

}  // namespace

Result<std::unique_ptr<SimMemory>> SimMemory::Create(uint64_t bytes) {
  const uint64_t capacity = bytes / kBlockAlignment * kBlockAlignment;
  if (capacity == 0) {
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "sim_memory_bytes is %" PRIu64 ", expected at least %" PRIu64, bytes,
                         kBlockAlignment);
  }
  const uint64_t address_bytes = AddressBytes(capacity);
  HYBRIDOPT_ASSIGN(void* addresses, system::ReserveAddresses(address_bytes));
  Result<void*> backing = system::MapPages(address_bytes);
  if (!backing.ok()) {
    system::UnmapPages(addresses, address_bytes);
    return backing.status();
  }
  return std::unique_ptr<SimMemory>(new SimMemory(capacity, addresses, backing.value()));
}

SimMemory::SimMemory(uint64_t capacity, void* addresses, void* backing)
    : capacity_(capacity),
      addresses_(static_cast<char*>(addresses)),
      backing_(static_cast<char*>(backing)),
      free_{{0, AddressBytes(capacity)}},
      free_bytes_(capacity) {}

SimMemory::~SimMemory() {
  for (const auto& [address, range] : reserved_) {
    system::UnmapPages(reinterpret_cast<void*>(address), range.bytes);
    system::UnmapPages(range.backing, range.bytes);
  }
  system::UnmapPages(addresses_, AddressBytes(capacity_));
  system::UnmapPages(backing_, AddressBytes(capacity_));
}

DeviceMemory SimMemory::Usage() const {
  std::shared_lock lock(mutex_);
  return DeviceMemory{capacity_, free_bytes_};
}

Result<void*> SimMemory::Allocate(uint64_t bytes) {
  if (bytes == 0) {
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "bytes is 0, expected at least 1");
  }
  uint64_t offset = 0;
  uint64_t taken = 0;
  {
    std::unique_lock lock(mutex_);
    // No request beyond the capacity is rounded, so rounding cannot overflow.
    taken = bytes <= capacity_ ? system::RoundUp(bytes, kBlockAlignment) : bytes;
    const auto hole = std::find_if(free_.begin(), free_.end(),
                                   [&](const auto& run) { return run.second >= taken; });
    if (hole == free_.end() || taken > free_bytes_) {
      uint64_t largest = 0;
      for (const auto& run : free_) largest = std::max(largest, run.second);
      return Status::Error(OFFLOAD_OUT_OF_DEVICE_MEMORY,
                           "asked for %" PRIu64 " bytes of device memory, %" PRIu64
                           " bytes of %" PRIu64 " are free, %" PRIu64
                           " of them in one piece; ask for less, free some, or give the "
                           "simulated device more sim_memory_bytes",
                           bytes, free_bytes_, capacity_, std::min(largest, free_bytes_));
    }
    offset = hole->first;
    live_.emplace(offset, bytes);  // at first: this may throw, and nothing has changed yet
    if (hole->second == taken) {
      free_.erase(hole);
    } else {
      auto rest = free_.extract(hole);
      rest.key() += taken;
      rest.mapped() -= taken;
      free_.insert(std::move(rest));
    }
    free_bytes_ -= taken;
  }
  Poison(backing_ + offset, taken);
  return static_cast<void*>(addresses_ + offset);
}

Status SimMemory::Free(void* data) {
  if (data == nullptr) return Status();
  const uint64_t offset =
      reinterpret_cast<uintptr_t>(data) - reinterpret_cast<uintptr_t>(addresses_);
  decltype(live_)::node_type freed;  // moved from one table to the other, so that Free cannot throw
  {
    std::unique_lock lock(mutex_);
    freed = live_.extract(offset);
    if (freed.empty()) {
      return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                           "data is %p, expected an address that this device allocated and that "
                           "has not been freed yet",
                           data);
    }
  }
  const uint64_t bytes = system::RoundUp(freed.mapped(), kBlockAlignment);
  freed.mapped() = bytes;
  // Here the range is neither live nor free, so that no allocation gets bytes that are being
  // poisoned.
  Poison(backing_ + offset, bytes);
  std::unique_lock lock(mutex_);
  free_bytes_ += bytes;
  auto run = free_.insert(std::move(freed)).position;
  if (const auto next = std::next(run); next != free_.end() && offset + bytes == next->first) {
    run->second += next->second;
    free_.erase(next);
  }
  if (run != free_.begin()) {
    const auto previous = std::prev(run);
    if (previous->first + previous->second == offset) {
      previous->second += run->second;
      free_.erase(run);
    }
  }
  return Status();
}

Result<void*> SimMemory::Reserve(uint64_t bytes) {
  HYBRIDOPT_ASSIGN(void* const addresses, system::ReserveAddresses(bytes));
  Result<void*> backing = system::ReserveAddresses(bytes);
  Status status = backing.status();
  if (status.ok()) status = system::BackPages(backing.value(), bytes);
  if (!status.ok()) {
    system::UnmapPages(addresses, bytes);
    if (backing.ok()) system::UnmapPages(backing.value(), bytes);
    return status;
  }
  std::unique_lock lock(mutex_);
  reserved_[reinterpret_cast<uintptr_t>(addresses)] = {bytes, static_cast<char*>(backing.value()),
                                                       0};
  return addresses;
}

void SimMemory::Unreserve(void* range) {
  if (range == nullptr) return;
  TruncatePages(range, 0);
  std::unique_lock lock(mutex_);
  const auto found = reserved_.find(reinterpret_cast<uintptr_t>(range));
  HYBRIDOPT_CHECK(found != reserved_.end());
  system::UnmapPages(range, found->second.bytes);
  system::UnmapPages(found->second.backing, found->second.bytes);
  reserved_.erase(found);
}

Result<DevicePages> SimMemory::TakePages(uint64_t bytes) {
  std::unique_lock lock(mutex_);
  if (bytes > free_bytes_)
    return Status::Error(OFFLOAD_OUT_OF_DEVICE_MEMORY,
                         "asked for %" PRIu64 " bytes of device memory, %" PRIu64
                         " bytes of %" PRIu64
                         " are free; ask for less, free some, or give the simulated device more "
                         "sim_memory_bytes",
                         bytes, free_bytes_, capacity_);
  free_bytes_ -= bytes;
  return DevicePages{bytes, {}};
}

void SimMemory::FreePages(DevicePages& pages) {
  std::unique_lock lock(mutex_);
  free_bytes_ += pages.bytes;
  pages = {};
}

Status SimMemory::AppendPages(void* range, DevicePages& pages) {
  std::unique_lock lock(mutex_);
  Reserved& reserved = reserved_.at(reinterpret_cast<uintptr_t>(range));
  Poison(reserved.backing + reserved.backed_bytes,
         std::min(pages.bytes, reserved.bytes - reserved.backed_bytes));
  reserved.backed_bytes += pages.bytes;
  pages = {};
  return {};
}

void SimMemory::TruncatePages(void* range, uint64_t bytes) {
  std::unique_lock lock(mutex_);
  Reserved& reserved = reserved_.at(reinterpret_cast<uintptr_t>(range));
  if (bytes >= reserved.backed_bytes) return;
  Poison(reserved.backing + bytes, std::min(reserved.backed_bytes, reserved.bytes) - bytes);
  free_bytes_ += reserved.backed_bytes - bytes;
  reserved.backed_bytes = bytes;
}

std::map<uintptr_t, SimMemory::Reserved>::const_iterator SimMemory::FindReserved(
    uintptr_t address) const {
  auto range = reserved_.upper_bound(address);
  if (range == reserved_.begin()) return reserved_.end();
  --range;
  return address - range->first < range->second.bytes ? range : reserved_.end();
}

Result<void*> SimMemory::Translate(const void* data, uint64_t bytes, uint64_t alignment) const {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const auto bad = [&](const char* why) {
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "%" PRIu64
                         " bytes at address %p: %s, expected a range inside one live "
                         "device allocation",
                         bytes, data, why);
  };
  if (!Overlaps(data, 1)) return bad("not in this device's memory");
  if (address % alignment != 0) return bad("not aligned to its elements");
  std::shared_lock lock(mutex_);
  if (const auto range = FindReserved(address); range != reserved_.end()) {
    const uint64_t inside = address - range->first;
    if (inside >= range->second.backed_bytes) return bad("no memory lies behind it");
    if (bytes > range->second.backed_bytes - inside) return bad("runs past the end of its memory");
    return static_cast<void*>(range->second.backing + inside);
  }
  const uint64_t offset = address - reinterpret_cast<uintptr_t>(addresses_);
  auto allocation = live_.upper_bound(offset);
  if (allocation == live_.begin()) return bad("freed or never allocated");
  --allocation;
  const uint64_t inside = offset - allocation->first;
  if (inside >= allocation->second) return bad("freed or never allocated");
  if (bytes > allocation->second - inside) return bad("runs past the end of its allocation");
  return static_cast<void*>(backing_ + offset);
}

bool SimMemory::Overlaps(const void* data, uint64_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const auto first = reinterpret_cast<uintptr_t>(addresses_);
  if (begin < first ? bytes > first - begin : begin - first < AddressBytes(capacity_) && bytes > 0)
    return true;
  std::shared_lock lock(mutex_);
  const auto next = reserved_.lower_bound(begin);
  return (next != reserved_.end() && bytes > next->first - begin) ||
         (bytes > 0 && FindReserved(begin) != reserved_.end());
}

}  // namespace hybridopt
