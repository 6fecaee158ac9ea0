#include "memory/address_pool.h"

#include <atomic>
#include <cinttypes>
#include <utility>
#include <vector>

#include "base/system.h"

namespace hybridopt {
namespace {

// All pools that have a handle or a block. It is never destroyed, because torch frees blocks at any
// time, at exit too.
class Pools {
 public:
  // In the child of a fork it is empty: another thread of the parent may have locked the old one.
  static Pools& Instance() {
    static std::atomic<Pools*> current = new Pools(nullptr);
    Pools* pools = current.load();
    if (pools->fork_ == system::ForkGeneration()) return *pools;
    auto* fresh = new Pools(pools);
    if (current.compare_exchange_strong(pools, fresh)) return *fresh;
    delete fresh;
    return *pools;
  }

  void Add(std::shared_ptr<AddressPool> pool) {
    std::lock_guard lock(mutex_);
    pools_.push_back(std::move(pool));
  }

  template <typename Wanted>
  std::shared_ptr<AddressPool> Find(Wanted&& wanted) {
    std::lock_guard lock(mutex_);
    for (const auto& pool : pools_)
      if (wanted(*pool)) return pool;
    return nullptr;
  }

  void Remove(const AddressPool* removed) {
    std::shared_ptr<AddressPool> last;  // destroyed after the lock has been given back
    std::lock_guard lock(mutex_);
    for (auto pool = pools_.begin(); pool != pools_.end(); ++pool) {
      if (pool->get() != removed) continue;
      last = std::move(*pool);
      pools_.erase(pool);
      return;
    }
  }

 private:
  explicit Pools(Pools* inherited) : inherited_(inherited) {}

  const uint64_t fork_ = system::ForkGeneration();
  [[maybe_unused]] Pools* const inherited_;  // reachable for leak checkers
  std::mutex mutex_;
  std::vector<std::shared_ptr<AddressPool>> pools_;
};

// Blocks and the memory that has been taken for them. All of it is freed at the end.
struct TakenPages {
  explicit TakenPages(Device& from) : device(from) {}
  TakenPages(const TakenPages&) = delete;
  TakenPages& operator=(const TakenPages&) = delete;
  ~TakenPages() {
    for (auto& [window, pages] : blocks) {
      device.FreePages(pages);
      window->Shrink(0);
    }
  }

  Device& device;
  std::vector<std::pair<DeviceWindow*, DevicePages>> blocks;
};

}  // namespace

Result<std::shared_ptr<AddressPool>> AddressPool::Create(std::shared_ptr<Device> device) {
  if (device->unified())
    return Status::Error(OFFLOAD_UNSUPPORTED,
                         "a pool keeps addresses of device memory, and the context's device is "
                         "OFFLOAD_DEVICE_HOST, which has none; make the context with "
                         "OFFLOAD_DEVICE_CUDA or OFFLOAD_DEVICE_SIM");
  auto pool = std::make_shared<AddressPool>(std::move(device));
  Pools::Instance().Add(pool);
  return pool;
}

Result<void*> AddressPool::Allocate(uint64_t bytes) {
  if (bytes == 0) return Status::Error(OFFLOAD_INVALID_ARGUMENT, "bytes is 0, expected at least 1");
  HYBRIDOPT_ASSIGN(const DeviceMemory memory, device_->Memory());
  std::lock_guard lock(mutex_);
  if (is_retired_) return Status::Error(OFFLOAD_INVALID_STATE, "another thread destroys the pool");
  if (is_released_)
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "the memory of the pool is released; call offload_pool_take_memory first");
  if (bytes > memory.total_bytes) return FullLocked(bytes);  // addresses may not suffice either
  HYBRIDOPT_ASSIGN(DeviceWindow window, DeviceWindow::Reserve(*device_, bytes));
  HYBRIDOPT_ASSIGN(DevicePages pages, window.Take(0, bytes));
  const Status grown = window.Grow(pages);
  if (!grown.ok()) {
    device_->FreePages(pages);
    return grown;
  }
  void* const data = window.data();
  windows_.emplace(data, std::move(window));
  return data;
}

Status AddressPool::ReleaseMemory() {
  HYBRIDOPT_TRY(device_->AwaitAllStreams());
  std::lock_guard lock(mutex_);
  for (auto& [data, window] : windows_) window.Shrink(0);
  is_released_ = true;
  return {};
}

Status AddressPool::TakeMemory() {
  std::lock_guard lock(mutex_);
  if (!is_released_) return {};
  const Status status = TakeMemoryLocked();
  is_released_ = !status.ok();
  return status.code() == OFFLOAD_OUT_OF_DEVICE_MEMORY ? FullLocked(BytesLocked()) : status;
}

Status AddressPool::TakeMemoryLocked() {
  TakenPages taken(*device_);
  taken.blocks.reserve(windows_.size());
  for (auto& [data, window] : windows_) {
    taken.blocks.emplace_back(&window, DevicePages{});
    HYBRIDOPT_ASSIGN(taken.blocks.back().second, window.Take(0, window.bytes()));
  }
  for (auto& [window, pages] : taken.blocks) HYBRIDOPT_TRY(window->Grow(pages));
  taken.blocks.clear();  // they stay
  return {};
}

Status AddressPool::Free(void* data) {
  if (data == nullptr) return {};
  const std::shared_ptr<AddressPool> owner =
      Pools::Instance().Find([&](AddressPool& pool) { return pool.Has(data); });
  if (owner == nullptr)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "data is %p, expected the address of a block of a pool that has not been "
                         "freed yet",
                         data);
  HYBRIDOPT_TRY(owner->FreeOwn(data));
  if (owner->IsUnused()) Pools::Instance().Remove(owner.get());
  return {};
}

void AddressPool::Retire() {
  {
    std::lock_guard lock(mutex_);
    is_retired_ = true;
  }
  if (IsUnused()) Pools::Instance().Remove(this);
}

bool AddressPool::Has(void* data) {
  std::lock_guard lock(mutex_);
  return windows_.contains(data);
}

bool AddressPool::IsUnused() {
  std::lock_guard lock(mutex_);
  return is_retired_ && windows_.empty();
}

Status AddressPool::FreeOwn(void* data) {
  HYBRIDOPT_TRY(device_->AwaitAllStreams());
  std::lock_guard lock(mutex_);
  windows_.erase(data);
  return {};
}

// All memory of the blocks, in whole pages.
uint64_t AddressPool::BytesLocked() const {
  uint64_t bytes = 0;
  for (const auto& [data, window] : windows_)
    bytes += DeviceWindow::PageBytes(*device_, window.bytes(), window.bytes());
  return bytes;
}

Status AddressPool::FullLocked(uint64_t bytes) const {
  HYBRIDOPT_ASSIGN(const DeviceMemory memory, device_->Memory());
  return Status::Error(OFFLOAD_OUT_OF_DEVICE_MEMORY,
                       "asked for %" PRIu64 " bytes of device memory for a pool, %" PRIu64
                       " bytes of %" PRIu64
                       " are free; free some, and try again: nothing has been taken",
                       bytes, memory.free_bytes, memory.total_bytes);
}

}  // namespace hybridopt
