// Context: one device, the threads and the CPU's kernels. Several optimizers may share a context.
#pragma once

#include <atomic>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "base/files.h"
#include "base/status.h"
#include "device/device.h"
#include "kernels/kernels.h"
#include "machine/link.h"
#include "memory/numa.h"
#include "memory/numa_policy.h"
#include "runtime/runner_pool.h"
#include "runtime/side_threads.h"
#include "runtime/topology.h"
#include "runtime/worker_pool.h"

namespace hybridopt {

class Context {
 public:
  static Result<std::shared_ptr<Context>> Create(const offload_context_options_t& options);
  // Takes the device as an argument, so that tests can pass a faulty one.
  Context(const offload_context_options_t& options, std::unique_ptr<Device> device,
          const KernelTable& kernels, Seats seats = ChooseSeats({.local_world = 1}).value(),
          Result<Numa> numa = Numa::Open());
  ~Context();

  Device& device() { return *device_; }
  const Device& device() const { return *device_; }
  Link& link() { return link_; }
  WorkerPool& workers() { return workers_; }
  RunnerPool& runners() { return runners_; }
  SideThreads& side_threads() { return side_threads_; }
  const KernelTable& kernels() const { return kernels_; }
  int64_t device_timeout_ns() const { return device_timeout_ns_; }
  // Waits for an event of the device. DEVICE_FAILED after device_timeout_ns; the text says that
  // `waiter`, such as "a save", waited for `what`, and on which stream.
  Status AwaitEvent(EventHandle event, const char* waiter, const char* what);
  // The failure that AwaitEvent returns, made from the status TIMED_OUT of Device::Wait.
  Status NoProgressOnEvent(const Status& timed_out, const char* waiter, const char* what) const;
  // The nodes on which memory should be: that of state, which the workers touch first, and pinned
  // memory, which all workers use.
  const PageWish& state_pages() const { return pages_.state; }
  const PageWish& pinned_pages() const { return pages_.pinned; }

  // Device memory for the caller (offload_device_alloc); FreeForCaller frees only that.
  Result<void*> AllocateForCaller(uint64_t bytes);
  Status FreeForCaller(void* data);
  // Streams for the caller. DestroyStreamForCaller destroys only those: a stale handle may have the
  // value of an optimizer's stream.
  Result<StreamHandle> CreateStreamForCaller();
  Status DestroyStreamForCaller(StreamHandle stream);

  // Pinned memory under the cap. INVALID_ARGUMENT says how many bytes are needed and what can be
  // made smaller: `shrinks`, for example names of options.
  Status CheckPinned(uint64_t bytes, const char* shrinks) const;
  Status ReservePinned(uint64_t bytes, const char* shrinks);
  void ReleasePinned(uint64_t bytes);
  uint64_t PinnedBytesLeft() const;

  bool allow_pageable() const { return allow_pageable_; }
  // How many ranks share this machine, this one among them.
  uint32_t local_world() const { return seats_.local_world; }
  // Notes that the context works, but not as well as it could: logs a warning, and shows the text
  // in context_info from now on.
  void Note(const char* text);

  // The file system for checkpoints; tests replace it before the first use.
  system::Files& files() const { return *files_; }
  void UseFiles(system::Files& files) { files_ = &files; }

  void OptimizerCreated() { optimizers_ += 1; }
  void OptimizerDestroyed() { optimizers_ -= 1; }
  uint32_t optimizers() const { return optimizers_; }
  void StashCreated() { stashes_ += 1; }
  void StashDestroyed() { stashes_ -= 1; }
  uint32_t stashes() const { return stashes_; }
  void ExchangeCreated() { exchanges_ += 1; }
  void ExchangeDestroyed() { exchanges_ -= 1; }
  uint32_t exchanges() const { return exchanges_; }

  Result<offload_context_info_t> Info() const;
  void Log(int32_t level, const char* text) const;

 private:
  Status CheckPinnedLocked(uint64_t bytes, const char* shrinks) const;
  int32_t NumaRung() const;
  std::string Notes() const;

  const uint64_t pinned_bytes_max_;
  const int64_t device_timeout_ns_;
  const offload_log_function_t log_;
  void* const log_user_;
  const KernelTable& kernels_;
  std::unique_ptr<Device> device_;
  std::list<std::unique_ptr<Device>> kept_device_{1};  // a node for the list left_behind
  Link link_;
  const Seats seats_;
  WorkerPool workers_;
  const Result<Numa> numa_;
  const NumaPolicy pages_;
  const bool allow_pageable_;
  system::Files* files_ = &system::SystemFiles();
  mutable std::mutex notes_mutex_;
  std::set<std::string> notes_;  // guarded by notes_mutex_
  mutable std::mutex pinned_mutex_;
  uint64_t pinned_bytes_ = 0;  // guarded by pinned_mutex_
  std::atomic<uint32_t> optimizers_ = 0;
  std::atomic<uint32_t> stashes_ = 0;
  std::atomic<uint32_t> exchanges_ = 0;
  std::mutex given_out_mutex_;
  std::set<void*> allocations_;     // guarded by given_out_mutex_
  std::set<StreamHandle> streams_;  // guarded by given_out_mutex_
  SideThreads side_threads_;        // runners give them work
  RunnerPool runners_;              // last: its threads end before what they use
};

}  // namespace hybridopt
