// HandleTable: the objects behind the ABI's handles. A handle is a number in the form of a pointer.
// It is never dereferenced, so that a call can refuse a handle that is NULL, was destroyed, is of
// another kind or was made before a fork:
//
//   63      56 55      48 47                          24 23                 0
//   |  kind   |  fork    |         generation          |       slot         |
//
// No handle is given out twice: when all generations of a slot have been used, the slot is not used
// again.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/status.h"
#include "base/system.h"

namespace hybridopt {

enum class HandleKind : uint8_t {
  kContext = 1,
  kOptimizer = 2,
  kStash = 3,
  kPool = 4,
  kExchange = 5
};

// An object behind a handle, and how many calls are using it now.
template <typename Object>
struct HandleTarget {
  explicit HandleTarget(std::shared_ptr<Object> made) : object(std::move(made)) {}

  void AwaitLastUse() const {
    for (uint32_t now = uses.load(); now != 0; now = uses.load()) uses.wait(now);
  }

  std::shared_ptr<Object> object;
  std::atomic<uint32_t> uses = 0;
};

// One call's use of an object. Destroying the handle waits until no call uses the object any more.
template <typename Object>
class HandleUse {
 public:
  // To be called with the table locked, so that no other thread removes the object meanwhile.
  explicit HandleUse(std::shared_ptr<HandleTarget<Object>> target) : target_(std::move(target)) {
    target_->uses += 1;
  }
  HandleUse(HandleUse&& other) = default;
  HandleUse& operator=(HandleUse&& other) = delete;
  ~HandleUse() {
    if (target_ == nullptr) return;  // moved from
    if (target_->uses.fetch_sub(1) == 1) target_->uses.notify_all();
  }

  Object* operator->() const { return target_->object.get(); }
  Object& operator*() const { return *target_->object; }
  // For calls after which the object must stay alive.
  const std::shared_ptr<Object>& shared() const { return target_->object; }

 private:
  std::shared_ptr<HandleTarget<Object>> target_;
};

// Generations of a slot count from 1 to kGenerationMax.
template <typename Object, HandleKind kKind, uint64_t kGenerationMax = (uint64_t{1} << 24) - 1,
          uint64_t kSlots = uint64_t{1} << 24>
class HandleTable {
 public:
  using Use = HandleUse<Object>;

  // The table of this process. After fork the child gets a new table, because another thread of the
  // parent may have locked the old one at the time of the fork. The table is never destroyed, so
  // that threads may still use it at exit.
  static HandleTable& Instance() {
    static std::atomic<HandleTable*> current = new HandleTable(nullptr);
    HandleTable* table = current.load();
    if (table->fork_ == system::ForkGeneration()) return *table;
    auto* fresh = new HandleTable(table);
    if (current.compare_exchange_strong(table, fresh)) return *fresh;
    delete fresh;
    return *table;
  }

  explicit HandleTable(HandleTable* inherited, uint64_t fork = system::ForkGeneration())
      : fork_(fork), inherited_(inherited) {}

  // INVALID_STATE if all handles have been given out before.
  Result<void*> Insert(std::shared_ptr<Object> object) {
    if (fork_ > kForkMask)
      return Status::Error(OFFLOAD_INVALID_STATE,
                           "this process is the child of %llu forks in a row, at most %llu can be "
                           "told apart; start a new program (exec)",
                           static_cast<unsigned long long>(fork_),
                           static_cast<unsigned long long>(kForkMask));
    auto target = std::make_shared<Target>(std::move(object));
    std::lock_guard lock(mutex_);
    uint64_t slot = 0;
    while (slot < entries_.size() && !entries_[slot].is_usable()) ++slot;
    if (slot == kSlots)
      return Status::Error(OFFLOAD_INVALID_STATE,
                           "all %llu handles of this kind are in use or used up; destroy some, or "
                           "start a new process",
                           static_cast<unsigned long long>(kSlots));
    if (slot == entries_.size()) entries_.emplace_back();
    // Destroy must not allocate, so room for all objects whose close may fail is reserved here.
    const size_t room = left_behind_.size() + objects_ + 1;
    if (left_behind_.capacity() < room) left_behind_.reserve(2 * room);
    objects_ += 1;
    Entry& entry = entries_[slot];
    entry.generation += 1;
    entry.target = std::move(target);
    return reinterpret_cast<void*>(Bits(slot, entry.generation));
  }

  // `name` is the name of the parameter, for the error text.
  Result<Use> Find(const void* handle, const char* name) {
    HYBRIDOPT_TRY(CheckForm(handle, name));
    std::lock_guard lock(mutex_);
    HYBRIDOPT_ASSIGN(Entry * entry, Locate(handle, name));
    return Use(entry->target);
  }

  // If may_destroy(object) returns an error, returns it. Otherwise refuses the handle from now on,
  // calls close(object), which makes all calls that use the object return, waits for these calls,
  // and releases the object. If close fails, the object is never destroyed, because a thread still
  // uses it.
  template <typename MayDestroy, typename Close>
  Status Destroy(const void* handle, const char* name, MayDestroy&& may_destroy, Close&& close) {
    HYBRIDOPT_TRY(CheckForm(handle, name));
    std::shared_ptr<Target> target;
    {
      std::lock_guard lock(mutex_);
      HYBRIDOPT_ASSIGN(Entry * entry, Locate(handle, name));
      HYBRIDOPT_TRY(may_destroy(*entry->target->object));
      target = std::move(entry->target);
    }
    Status closed = close(*target->object);
    target->AwaitLastUse();
    {
      std::lock_guard lock(mutex_);
      if (!closed.ok()) left_behind_.push_back(target->object);
      objects_ -= 1;
    }
    target->object.reset();
    return closed;
  }

 private:
  using Target = HandleTarget<Object>;
  struct Entry {
    uint64_t generation = 0;
    std::shared_ptr<Target> target;  // NULL: the slot has no object
    bool is_usable() const { return target == nullptr && generation < kGenerationMax; }
  };
  static constexpr uint64_t kSlotBits = 24;
  static constexpr uint64_t kSlotMask = (uint64_t{1} << kSlotBits) - 1;
  static constexpr uint64_t kForkMask = 0xff;

  uint64_t Bits(uint64_t slot, uint64_t generation) const {
    return static_cast<uint64_t>(kKind) << 56 | fork_ << 48 | generation << kSlotBits | slot;
  }

  // Checks the handle as far as that is possible without the table.
  Status CheckForm(const void* handle, const char* name) const {
    if (handle == nullptr)
      return Status::Error(OFFLOAD_INVALID_ARGUMENT, "%s is NULL, expected a handle", name);
    const uint64_t bits = reinterpret_cast<uint64_t>(handle);
    if (bits >> 56 != static_cast<uint64_t>(kKind))
      return Status::Error(OFFLOAD_INVALID_ARGUMENT, "%s is %p, which is not a handle of that kind",
                           name, handle);
    if ((bits >> 48 & kForkMask) != fork_)
      return Status::Error(OFFLOAD_INVALID_STATE,
                           "%s was made before fork() and belongs to the parent process; make a "
                           "new one in the child",
                           name);
    return {};
  }

  Result<Entry*> Locate(const void* handle, const char* name) {
    const uint64_t bits = reinterpret_cast<uint64_t>(handle);
    const uint64_t slot = bits & kSlotMask;
    if (slot < entries_.size() && entries_[slot].target != nullptr &&
        Bits(slot, entries_[slot].generation) == bits)
      return &entries_[slot];
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "%s is %p, which has been destroyed or was never given out", name, handle);
  }

  const uint64_t fork_;
  // The table of the parent process. It is not used; the pointer keeps it reachable for leak
  // checkers.
  [[maybe_unused]] HandleTable* const inherited_;
  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::vector<std::shared_ptr<Object>> left_behind_;
  size_t objects_ = 0;  // objects that have not been destroyed
};

}  // namespace hybridopt
