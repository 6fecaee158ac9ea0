#include "machine/timeline.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/check.h"
#include "base/system.h"

namespace hybridopt {
namespace {

constexpr int64_t kYearsNs = int64_t{1} << 59;  // the clock can still add this

}  // namespace

Timeline::Timeline(RunnerPool& runners, Execute execute, Settle settle,
                   std::atomic<uint64_t>& progress)
    : runners_(runners),
      execute_(std::move(execute)),
      settle_(std::move(settle)),
      fork_generation_(system::ForkGeneration()),
      progress_(progress),
      reached_(
          ProgressAt(1, 0)),  // a wait for all queued work ends at once, because none is queued
      issued_mark_(reached_) {
  SetReached(reached_);
  ReserveFailures();
}

Timeline::~Timeline() {
  (void)Drain([] { return Status(); });
}

Status Timeline::Drain(FunctionRef<Status()> check_stuck) {
  constexpr auto kRound = std::chrono::milliseconds(50);
  if (fork_generation_ != system::ForkGeneration())
    return {};  // the runners are in the parent only
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    while (!changed_.wait_for(lock, kRound, [this] { return !HasWork(); })) {
      HYBRIDOPT_TRY(PoisonIfStuck(check_stuck));
    }
  }
  runners_.Withdraw(*this);
  // From here on no stream may wait for this timeline.
  progress_.store(kReleased);
  issued_.store(kReleased);
  return {};
}

Result<uint32_t> Timeline::NextSlot() {
  HYBRIDOPT_TRY(CheckPoison());
  if (const uint32_t queued = this->queued(); queued >= kCapacity)
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "%u calls are queued, at most %u may be; wait for an earlier ticket",
                         queued, kCapacity);
  return static_cast<uint32_t>((submitted_.load() + 1) % kCapacity);
}

Result<uint64_t> Timeline::Submit() {
  std::lock_guard lock(mutex_);
  if (stopping_) return Status::Error(OFFLOAD_INVALID_STATE, "this optimizer is being destroyed");
  ReserveFailures();
  HYBRIDOPT_CHECK(ProgressAt(submitted_ + 3, 0) < kReleased);
  const uint64_t sequence = ++submitted_;
  runners_.Submit(*this);  // before Drain can see that the piece has run
  changed_.notify_all();   // wakes a runner in AwaitRound
  return sequence;
}

Status Timeline::Wait(uint64_t sequence, int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  HYBRIDOPT_TRY(AwaitOne(lock, sequence, timeout_ns));
  return OutcomeOf(sequence);
}

Status Timeline::Look(uint64_t sequence) {
  std::unique_lock lock(mutex_);
  return AwaitOne(lock, sequence, 0);
}

Status Timeline::AwaitOne(std::unique_lock<std::mutex>& lock, uint64_t sequence,
                          int64_t timeout_ns) {
  const auto completed = [&] { return executed_ >= sequence && (held_ == 0 || held_ != sequence); };
  return Await(lock, sequence, completed, timeout_ns);
}

Status Timeline::WaitForAll(int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  const uint64_t last = submitted_.load();
  HYBRIDOPT_TRY(AwaitUpTo(lock, last, timeout_ns));
  return TakeUnreported(last);
}

Status Timeline::AwaitAll() {
  std::unique_lock lock(mutex_);
  return AwaitUpTo(lock, submitted_.load(), -1);
}

Status Timeline::AwaitUpTo(std::unique_lock<std::mutex>& lock, uint64_t last, int64_t timeout_ns) {
  const auto completed = [&] { return executed_ >= last && (held_ == 0 || held_ > last); };
  return Await(lock, last, completed, timeout_ns);
}

Status Timeline::Await(std::unique_lock<std::mutex>& lock, uint64_t sequence,
                       FunctionRef<bool()> completed, int64_t timeout_ns) {
  // A caller that has seen a failure may write and free the memory it has lent. So a failure is not
  // returned while the background piece reads that memory.
  const auto done = [&] { return completed() || (CannotComplete(sequence) && !holds_streams_); };
  if (timeout_ns < 0) {
    changed_.wait(lock, done);
  } else if (!changed_.wait_for(lock, std::chrono::nanoseconds(std::min(timeout_ns, kYearsNs)),
                                done)) {
    return Status::Error(OFFLOAD_TIMED_OUT,
                         "ticket not complete after %.3f s; the work goes on, wait again",
                         static_cast<double>(timeout_ns) * 1e-9);
  }
  return completed() ? Status() : cause_;
}

Status Timeline::OutcomeOf(uint64_t sequence) {
  for (Failure& failure : failures_) {
    if (failure.sequence != sequence) continue;
    failure.reported = true;
    return failure.status;
  }
  if (std::binary_search(forgotten_.begin(), forgotten_.end(), sequence))
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "the save or load of this ticket failed, and why has been forgotten: the "
                         "last %zu failures are remembered; wait for each ticket soon",
                         kFailuresKept);
  return {};
}

void Timeline::Report(uint64_t sequence, Status failure) {
  std::lock_guard lock(mutex_);
  if (failures_.size() == kFailuresKept) {
    forgotten_.push_back(failures_.front().sequence);
    failures_.erase(failures_.begin());
  }
  failures_.push_back({sequence, std::move(failure), false});
}

// Reserves room for the failures of all queued pieces, so that Report needs no memory.
void Timeline::ReserveFailures() {
  constexpr size_t kPiecesMax = kCapacity + 1;  // one in the background
  failures_.reserve(kFailuresKept);
  const size_t wanted = forgotten_.size() + kPiecesMax;
  if (forgotten_.capacity() < wanted) forgotten_.reserve(2 * wanted);
}

Status Timeline::TakeUnreported(uint64_t sequence) {
  for (Failure& failure : failures_) {
    if (failure.reported || failure.sequence > sequence) continue;
    failure.reported = true;
    return failure.status;
  }
  return {};
}

void Timeline::Hold(uint64_t sequence, int64_t round_ns, bool holds_streams) {
  std::lock_guard lock(mutex_);
  HYBRIDOPT_CHECK(held_ == 0);
  held_ = sequence;
  round_ns_ = round_ns;
  holds_streams_ = holds_streams;
}

void Timeline::ReleaseStreams() {
  {
    std::lock_guard lock(mutex_);
    holds_streams_ = false;
    PublishWords();
  }
  changed_.notify_all();
}

void Timeline::Release(Status failure) {
  {
    std::lock_guard lock(mutex_);
    holds_streams_ = false;
    PublishWords();
    held_ = 0;
    awake_ = false;
    if (!failure.ok()) PoisonLocked(0, std::move(failure));
  }
  changed_.notify_all();
}

void Timeline::Wake() {
  std::lock_guard lock(mutex_);
  if (held_ == 0 || ended_) return;
  awake_ = true;
  runners_.Submit(*this);
  changed_.notify_all();  // wakes a runner in AwaitRound
}

void Timeline::Reached(uint64_t sequence, uint64_t mark) {
  std::lock_guard lock(mutex_);
  SetReached(ProgressAt(sequence, mark));
}

void Timeline::Issued(uint64_t sequence, uint64_t mark) {
  std::lock_guard lock(mutex_);
  issued_mark_ = std::max(issued_mark_, ProgressAt(sequence, mark));
  PublishWords();
}

void Timeline::SetReached(uint64_t progress) {
  reached_ = progress;
  issued_mark_ = std::max(issued_mark_, progress);
  PublishWords();
}

void Timeline::PublishWords() {
  if (holds_streams_) return;
  progress_.store(reached_);
  issued_.store(issued_mark_);
}

// Marks are issued about every 100 us without a notification, so this polls.
Status Timeline::AwaitIssued(uint64_t sequence, uint64_t mark, FunctionRef<Status()> check_stuck) {
  constexpr int kLooksBeforeNaps = 1000;
  constexpr int kNapsBeforeChecks = 500;
  constexpr auto kNap = std::chrono::microseconds(20);
  for (int looks = 0; issued_.load() < ProgressAt(sequence, mark); ++looks) {
    if (looks < kLooksBeforeNaps) {
      std::this_thread::yield();
    } else {
      HYBRIDOPT_TRY(CheckPoison());  // while streams are held, poison does not change the words
      if (looks % kNapsBeforeChecks == 0) {
        std::lock_guard lock(mutex_);
        HYBRIDOPT_TRY(PoisonIfStuck(check_stuck));
      }
      std::this_thread::sleep_for(kNap);
    }
  }
  return CheckPoison();
}

uint32_t Timeline::queued() const {
  std::lock_guard lock(mutex_);
  const uint64_t to_run = cause_.ok() ? submitted_.load() - executed_ : 0;
  // The background piece's own turn is over, so `to_run` does not count it.
  const bool in_background = held_ != 0 && held_ <= executed_;
  return static_cast<uint32_t>(to_run) + (in_background ? 1 : 0);
}

Status Timeline::CheckPoison() const {
  std::lock_guard lock(mutex_);
  if (cause_.ok()) return {};
  return Status::Error(OFFLOAD_POISONED, "earlier queued work failed, destroy this optimizer: %s",
                       cause_.message().c_str());
}

// ---------------------------------------------------------------------------------- on a runner --

bool Timeline::RunTurn() {
  std::unique_lock lock(mutex_);
  AwaitRound(lock);
  const Turn turn = NextTurn();
  if (turn != Turn::kNone) {
    // This turn may wait for the background piece, and so for files or other ranks.
    if (held_ != 0) LetOthersRun();
    in_turn_ = true;
    const uint64_t sequence = executed_ + 1;
    lock.unlock();
    const bool succeeded =
        turn == Turn::kExecute ? ExecutePiece(sequence) : SettleBackground(false);
    lock.lock();
    in_turn_ = false;
    ended_ = !succeeded;
    if (succeeded && turn == Turn::kExecute) {
      executed_ = sequence;
      SetReached(ProgressAt(sequence + 1, 0));
    }
    changed_.notify_all();
  }
  return NextTurn() != Turn::kNone;
}

// If the background piece has rounds, waits until the next one is due or there is other work.
void Timeline::AwaitRound(std::unique_lock<std::mutex>& lock) {
  if (held_ == 0 || round_ns_ == 0 || awake_ || executed_ < submitted_.load()) return;
  LetOthersRun();
  const auto due = [this] { return awake_ || executed_ < submitted_.load(); };
  changed_.wait_for(lock, std::chrono::nanoseconds(round_ns_), due);
}

// The background piece comes first: threads that wait for it have waited longest.
Timeline::Turn Timeline::NextTurn() const {
  if (ended_) return Turn::kNone;
  if (awake_) return Turn::kSettle;
  if (executed_ < submitted_.load()) return Turn::kExecute;
  return held_ != 0 && round_ns_ != 0 ? Turn::kSettle : Turn::kNone;
}

bool Timeline::HasWork() const {
  return !ended_ && (in_turn_ || held_ != 0 || executed_ < submitted_.load());
}

// Returns false if the piece failed.
bool Timeline::ExecutePiece(uint64_t sequence) {
  Status status = execute_(static_cast<uint32_t>(sequence % kCapacity), sequence);
  if (status.ok()) return true;
  // The poison is set before the background piece ends, because that may take long. The background
  // piece still completes if it can.
  Poison(sequence, std::move(status));
  (void)SettleBackground(true);
  return false;
}

// Returns false if the background piece failed and has poisoned the timeline.
bool Timeline::SettleBackground(bool failure) {
  {
    std::lock_guard lock(mutex_);
    awake_ = false;
    if (held_ == 0) return true;
    LetOthersRun();
  }
  Status status = settle_(failure);
  if (status.ok()) return true;
  Poison(0, std::move(status));
  return false;
}

// Whether a failure prevents a piece from completing: no piece after a failed one runs. The
// background piece completes, unless it is the piece that has failed.
bool Timeline::CannotComplete(uint64_t sequence) const {
  return !cause_.ok() && (sequence > executed_ || failed_ == 0);
}

// A failure releases every waiting stream: a wrong value is better than a device that hangs,
// because the caller learns of the failure. The background piece ends by itself, so it may hold
// streams while it reads.
void Timeline::Poison(uint64_t sequence, Status cause) {
  {
    std::lock_guard lock(mutex_);
    PoisonLocked(sequence, std::move(cause));
  }
  changed_.notify_all();
}

// Poisons the timeline if check_stuck fails: a runner is then inside a piece that does not end.
// Does nothing while a save in the background may still read the caller's memory.
Status Timeline::PoisonIfStuck(FunctionRef<Status()> check_stuck) {
  Status stuck = holds_streams_ ? Status() : check_stuck();
  if (stuck.ok()) return stuck;
  PoisonLocked(0, stuck);
  changed_.notify_all();
  return stuck;
}

void Timeline::PoisonLocked(uint64_t sequence, Status cause) {
  if (cause_.ok()) cause_ = std::move(cause);  // the first failure is kept
  failed_ = sequence;
  SetReached(kReleased);
}

}  // namespace hybridopt
