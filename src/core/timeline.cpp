#include "core/timeline.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/check.h"
#include "base/prim.h"

namespace hybridopt {
namespace {

constexpr int64_t kYearsNs = int64_t{1} << 59;  // far, but the clock can still count there

}  // namespace

Timeline::Timeline(Execute execute, Settle settle, std::atomic<uint64_t>& progress)
    : execute_(std::move(execute)),
      settle_(std::move(settle)),
      fork_generation_(prim::ForkGeneration()),
      progress_(progress) {
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
  progress_.store(kReleased);
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
  std::unique_lock lock(mutex_);
  HYBRIDOPT_TRY(Await(lock, sequence, timeout_ns));
  return OutcomeOf(sequence);
}

Status Timeline::WaitForAll(int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  const uint64_t sequence = submitted_.load();
  HYBRIDOPT_TRY(Await(lock, sequence, timeout_ns));
  return Untold(sequence);
}

Status Timeline::Await(std::unique_lock<std::mutex>& lock, uint64_t sequence, int64_t timeout_ns) {
  const auto done = [&] { return completed_.load() >= sequence || Suffers(sequence); };
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

Status Timeline::OutcomeOf(uint64_t sequence) {
  for (Failure& failure : failures_) {
    if (failure.sequence != sequence) continue;
    failure.told = true;
    return failure.status;
  }
  return {};
}

void Timeline::Report(uint64_t sequence, Status failure) {
  std::lock_guard lock(mutex_);
  if (failures_.size() == kFailuresKept) failures_.pop_front();
  failures_.push_back({sequence, std::move(failure), false});
}

Status Timeline::Untold(uint64_t sequence) {
  for (Failure& failure : failures_) {
    if (failure.told || failure.sequence > sequence) continue;
    failure.told = true;
    return failure.status;
  }
  return {};
}

void Timeline::Hold(uint64_t sequence, int64_t round_ns) {
  std::lock_guard lock(mutex_);
  HYBRIDOPT_CHECK(held_ == 0);
  held_ = sequence;
  round_ns_ = round_ns;
}

void Timeline::Release() {
  {
    std::lock_guard lock(mutex_);
    held_ = 0;
    awake_ = false;
    completed_.store(executed_);
  }
  changed_.notify_all();
}

void Timeline::Wake() {
  {
    std::lock_guard lock(mutex_);
    awake_ = held_ != 0;
  }
  changed_.notify_all();
}

// Marks come every 100 us or so, and nobody is told of them: they are looked for.
Status Timeline::AwaitMark(uint64_t sequence, uint64_t mark) {
  constexpr int kLooksBeforeNaps = 1000;
  constexpr auto kNap = std::chrono::microseconds(20);
  for (int looks = 0; progress_.load() < ProgressAt(sequence, mark); ++looks) {
    if (looks < kLooksBeforeNaps) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
  return CheckPoison();
}

bool Timeline::idle() const {
  std::lock_guard lock(mutex_);
  return completed_.load() == submitted_.load() || (!cause_.ok() && held_ == 0);
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
  for (uint64_t sequence = 1;;) {
    const Turn turn = NextTurn(sequence);
    if (turn == Turn::kEnd) return;
    if (turn == Turn::kSettle) {
      if (!SettleBackground(false)) return;
      continue;
    }
    progress_.store(ProgressAt(sequence, 0));
    Status status = execute_(static_cast<uint32_t>(sequence % kCapacity), sequence);
    if (!status.ok()) {
      // Told at once, for the background may take long. It does not suffer if it can help it.
      Poison(sequence, std::move(status));
      (void)SettleBackground(true);
      return;
    }
    Passed(sequence++);
  }
}

// The background goes first: whoever waits for it has waited longest.
Timeline::Turn Timeline::NextTurn(uint64_t sequence) {
  std::unique_lock lock(mutex_);
  const auto due = [&] {
    return awake_ || submitted_.load() >= sequence || (stopping_ && held_ == 0);
  };
  if (held_ == 0 || round_ns_ == 0)
    changed_.wait(lock, due);
  else if (!changed_.wait_for(lock, std::chrono::nanoseconds(round_ns_), due))
    return Turn::kSettle;
  if (awake_) return Turn::kSettle;
  return submitted_.load() >= sequence ? Turn::kExecute : Turn::kEnd;
}

// False if it failed and has poisoned all.
bool Timeline::SettleBackground(bool failure) {
  {
    std::lock_guard lock(mutex_);
    awake_ = false;
    if (held_ == 0) return true;
  }
  Status status = settle_(failure);
  if (status.ok()) return true;
  Poison(0, std::move(status));
  return false;
}

void Timeline::Passed(uint64_t sequence) {
  {
    std::lock_guard lock(mutex_);
    executed_ = sequence;
    if (held_ == 0) completed_.store(sequence);
  }
  // Streams that wait for what is done need not wait for the background.
  progress_.store(ProgressAt(sequence + 1, 0));
  changed_.notify_all();
}

// Whether a piece that has not completed never will.
bool Timeline::Suffers(uint64_t sequence) const {
  return !cause_.ok() && (sequence >= failed_ || held_ == 0);
}

void Timeline::Poison(uint64_t sequence, Status cause) {
  {
    std::lock_guard lock(mutex_);
    if (cause_.ok()) {
      cause_ = std::move(cause);
      failed_ = sequence;
    }
  }
  // After a failure every stream is let go: a hung device would be worse than a wrong value that
  // the caller is told about.
  progress_.store(kReleased);
  changed_.notify_all();
}

}  // namespace hybridopt
