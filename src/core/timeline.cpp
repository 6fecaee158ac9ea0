#include "core/timeline.h"

#include <algorithm>
#include <chrono>

#include "base/prim.h"

namespace hybridopt {

Timeline::Timeline(Execute execute, std::atomic<uint64_t>& progress)
    : execute_(std::move(execute)), fork_generation_(prim::ForkGeneration()), progress_(progress) {
  progress_.store(ProgressAt(1, 0));  // who waits for "all that is queued" waits for nothing yet
}

Timeline::~Timeline() { Drain(); }

void Timeline::Drain() {
  if (fork_generation_ != prim::ForkGeneration()) return;  // the thread runs in the parent only
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (thread_.has_value()) prim::JoinThread(*thread_);
  thread_.reset();
  // Streams that still wait, for whatever reason, must not wait for ever.
  progress_.store(UINT64_MAX);
}

Result<uint32_t> Timeline::NextSlot() {
  HYBRIDOPT_TRY(CheckPoison());
  const uint64_t queued = submitted_.load() - completed_.load();
  if (queued >= kCapacity)
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "%llu calls are queued, at most %u may be; wait for an earlier ticket",
                         static_cast<unsigned long long>(queued), kCapacity);
  return static_cast<uint32_t>((submitted_.load() + 1) % kCapacity);
}

Result<uint64_t> Timeline::Submit() {
  if (!thread_.has_value()) {
    HYBRIDOPT_ASSIGN(thread_, prim::StartThread(
                                  [](void* self) -> void* {
                                    static_cast<Timeline*>(self)->Loop();
                                    return nullptr;
                                  },
                                  this));
  }
  uint64_t sequence = 0;
  {
    std::lock_guard lock(mutex_);
    sequence = ++submitted_;
  }
  changed_.notify_all();
  return sequence;
}

Status Timeline::Wait(uint64_t sequence, int64_t timeout_ns) {
  const auto done = [&] { return completed_.load() >= sequence || !cause_.ok(); };
  std::unique_lock lock(mutex_);
  constexpr int64_t kYearsNs = int64_t{1} << 59;  // far, but the clock can still count there
  if (timeout_ns < 0) {
    changed_.wait(lock, done);
  } else if (!changed_.wait_for(lock, std::chrono::nanoseconds(std::min(timeout_ns, kYearsNs)),
                                done)) {
    return Status::Error(OFFLOAD_TIMED_OUT,
                         "ticket not complete after %.3f s; the work goes on, wait again",
                         static_cast<double>(timeout_ns) * 1e-9);
  }
  return completed_.load() >= sequence ? Status() : cause_;
}

bool Timeline::idle() const {
  std::lock_guard lock(mutex_);
  return completed_.load() == submitted_.load() || !cause_.ok();
}

Status Timeline::CheckPoison() const {
  std::lock_guard lock(mutex_);
  if (cause_.ok()) return {};
  return Status::Error(OFFLOAD_POISONED, "earlier queued work failed, destroy this optimizer: %s",
                       cause_.message().c_str());
}

void Timeline::Loop() {
  prim::NameThisThread("hybridopt/line");
  prim::ResetFloatingPointMode();
  for (uint64_t sequence = 1;; ++sequence) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return submitted_.load() >= sequence || stopping_; });
      if (submitted_.load() < sequence) return;
    }
    progress_.store(ProgressAt(sequence, 0));
    Status status = execute_(static_cast<uint32_t>(sequence % kCapacity), sequence);
    const bool failed = !status.ok();
    Finish(sequence, std::move(status));
    if (failed) return;
  }
}

void Timeline::Finish(uint64_t sequence, Status status) {
  {
    std::lock_guard lock(mutex_);
    if (status.ok()) {
      completed_.store(sequence);
    } else {
      cause_ = std::move(status);
    }
  }
  // After a failure every stream is let go: a hung device would be worse than a wrong value that
  // the caller is told about.
  progress_.store(cause_.ok() ? ProgressAt(sequence + 1, 0) : UINT64_MAX);
  changed_.notify_all();
}

}  // namespace hybridopt
