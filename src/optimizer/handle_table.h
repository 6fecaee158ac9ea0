// HandleTable: what the ABI's handles stand for. A handle is not a pointer but a number that only
// looks like one, so that NULL, destroyed, foreign and forked ones are told apart and refused
// without ever being followed:
//
//   63      56 55      48 47                          24 23                 0
//   |  kind   |  fork    |         generation          |       slot         |
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "base/prim.h"
#include "base/status.h"

namespace hybridopt {

enum class HandleKind : uint8_t { kContext = 1, kOptimizer = 2 };

template <typename Object, HandleKind kKind>
class HandleTable {
 public:
  // The table of this process. After fork the child gets a fresh one: the parent's may have been
  // locked at that moment. It is never destroyed, so that threads may still use it at exit.
  static HandleTable& Instance() {
    static std::atomic<HandleTable*> current = new HandleTable(nullptr);
    HandleTable* table = current.load();
    if (table->fork_ == prim::ForkGeneration()) return *table;
    auto* fresh = new HandleTable(table);
    if (current.compare_exchange_strong(table, fresh)) return *fresh;
    delete fresh;
    return *table;
  }

  explicit HandleTable(HandleTable* inherited) : inherited_(inherited) {}

  void* Insert(std::shared_ptr<Object> object) {
    std::lock_guard lock(mutex_);
    uint64_t slot = 0;
    while (slot < entries_.size() && entries_[slot].object != nullptr) ++slot;
    if (slot == entries_.size()) entries_.emplace_back();
    Entry& entry = entries_[slot];
    entry.generation = (entry.generation + 1) & kGenerationMask;
    entry.object = std::move(object);
    return reinterpret_cast<void*>(Bits(slot, entry.generation));
  }

  // `name` is the parameter's, for the error text.
  Result<std::shared_ptr<Object>> Find(const void* handle, const char* name) {
    HYBRIDOPT_TRY(CheckForm(handle, name));
    std::lock_guard lock(mutex_);
    HYBRIDOPT_ASSIGN(Entry * entry, Locate(handle, name));
    return entry->object;
  }

  // Takes the object out; its handle is refused from now on. `may_go` can object.
  template <typename Check>
  Result<std::shared_ptr<Object>> Remove(const void* handle, const char* name, Check&& may_go) {
    HYBRIDOPT_TRY(CheckForm(handle, name));
    std::lock_guard lock(mutex_);
    HYBRIDOPT_ASSIGN(Entry * entry, Locate(handle, name));
    HYBRIDOPT_TRY(may_go(*entry->object));
    return std::move(entry->object);
  }

 private:
  struct Entry {
    uint64_t generation = 0;
    std::shared_ptr<Object> object;
  };
  static constexpr uint64_t kSlotBits = 24;
  static constexpr uint64_t kSlotMask = (uint64_t{1} << kSlotBits) - 1;
  static constexpr uint64_t kGenerationMask = kSlotMask;

  uint64_t Bits(uint64_t slot, uint64_t generation) const {
    return static_cast<uint64_t>(kKind) << 56 | (fork_ & 0xff) << 48 | generation << kSlotBits |
           slot;
  }

  // What can be told without looking at the table.
  Status CheckForm(const void* handle, const char* name) const {
    if (handle == nullptr)
      return Status::Error(OFFLOAD_INVALID_ARGUMENT, "%s is NULL, expected a handle", name);
    const uint64_t bits = reinterpret_cast<uint64_t>(handle);
    if (bits >> 56 != static_cast<uint64_t>(kKind))
      return Status::Error(OFFLOAD_INVALID_ARGUMENT, "%s is %p, which is not a handle of that kind",
                           name, handle);
    if ((bits >> 48 & 0xff) != (fork_ & 0xff))
      return Status::Error(OFFLOAD_INVALID_STATE,
                           "%s was made before fork() and belongs to the parent process; make a "
                           "new one in the child",
                           name);
    return {};
  }

  Result<Entry*> Locate(const void* handle, const char* name) {
    const uint64_t bits = reinterpret_cast<uint64_t>(handle);
    const uint64_t slot = bits & kSlotMask;
    if (slot < entries_.size() && entries_[slot].object != nullptr &&
        Bits(slot, entries_[slot].generation) == bits)
      return &entries_[slot];
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "%s is %p, which has been destroyed or was never given out", name, handle);
  }

  const uint64_t fork_ = prim::ForkGeneration();
  // The parent process's table: never used, but leak checkers see that it is not lost.
  [[maybe_unused]] HandleTable* const inherited_;
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

}  // namespace hybridopt
