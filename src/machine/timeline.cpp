#include "machine/timeline.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/check.h"
#include "base/prim.h"

namespace hybridopt {
namespace {

constexpr int64_t kYearsNs = int64_t{1} << 59;  // far, but the clock can still count there

}  // namespace

Timeline::Timeline(RunnerPool& runners, Execute execute, Settle settle,
                   std::atomic<uint64_t>& progress)
    : runners_(runners),
      execute_(std::move(execute)),
      settle_(std::move(settle)),
      fork_generation_(prim::ForkGeneration()),
      progress_(progress),
      reached_(ProgressAt(1, 0)),  // who waits for "all that is queued" waits for nothing yet
      issued_mark_(reached_) {
  Show(reached_);
  ReserveFailures();
}

Timeline::~Timeline() {
  (void)Drain([] { return Status(); });
}

Status Timeline::Drain(FunctionRef<Status()> check_stuck) {
  constexpr auto kRound = std::chrono::milliseconds(50);
  if (fork_generation_ != prim::ForkGeneration()) return {};  // the runners are in the parent only
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    while (!changed_.wait_for(lock, kRound, [this] { return !HasWork(); })) {
      // A save in the background may still read what is the caller's.
      Status stuck = holds_streams_ ? Status() : check_stuck();
      if (stuck.ok()) continue;
      PoisonLocked(0, stuck);
      changed_.notify_all();
      return stuck;
    }
  }
  runners_.Withdraw(*this);
  // Streams that still wait, for whatever reason, must not wait for ever.
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
  const uint64_t sequence = ++submitted_;
  runners_.Submit(*this);  // before Drain can see that the piece has run
  changed_.notify_all();   // a runner may await a round of the background
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
  const auto completed = [&] { return executed_ >= last && (held_ == 0 || held_ > last); };
  HYBRIDOPT_TRY(Await(lock, last, completed, timeout_ns));
  return Untold(last);
}

Status Timeline::Await(std::unique_lock<std::mutex>& lock, uint64_t sequence,
                       FunctionRef<bool()> completed, int64_t timeout_ns) {
  // Who is told of a failure may write and free what was lent, so nothing may read it any more.
  const auto done = [&] { return completed() || (Suffers(sequence) && !holds_streams_); };
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
    failure.told = true;
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

// Room for all that is queued, so that Report needs no memory.
void Timeline::ReserveFailures() {
  constexpr size_t kPiecesMax = kCapacity + 1;  // one in the background
  failures_.reserve(kFailuresKept);
  const size_t wanted = forgotten_.size() + kPiecesMax;
  if (forgotten_.capacity() < wanted) forgotten_.reserve(2 * wanted);
}

Status Timeline::Untold(uint64_t sequence) {
  for (Failure& failure : failures_) {
    if (failure.told || failure.sequence > sequence) continue;
    failure.told = true;
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
    ShowWords();
  }
  changed_.notify_all();
}

void Timeline::Release(Status failure) {
  {
    std::lock_guard lock(mutex_);
    holds_streams_ = false;
    ShowWords();
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
  changed_.notify_all();  // a runner may await a round of the background
}

void Timeline::Reached(uint64_t sequence, uint64_t mark) {
  std::lock_guard lock(mutex_);
  Show(ProgressAt(sequence, mark));
}

void Timeline::Issued(uint64_t sequence, uint64_t mark) {
  std::lock_guard lock(mutex_);
  issued_mark_ = std::max(issued_mark_, ProgressAt(sequence, mark));
  ShowWords();
}

void Timeline::Show(uint64_t progress) {
  reached_ = progress;
  issued_mark_ = std::max(issued_mark_, progress);
  ShowWords();
}

void Timeline::ShowWords() {
  if (holds_streams_) return;
  progress_.store(reached_);
  issued_.store(issued_mark_);
}

// Marks come every 100 us or so, and nobody is told of them: they are looked for.
Status Timeline::AwaitIssued(uint64_t sequence, uint64_t mark) {
  constexpr int kLooksBeforeNaps = 1000;
  constexpr auto kNap = std::chrono::microseconds(20);
  for (int looks = 0; issued_.load() < ProgressAt(sequence, mark); ++looks) {
    if (looks < kLooksBeforeNaps) {
      std::this_thread::yield();
    } else {
      HYBRIDOPT_TRY(CheckPoison());  // streams may still be held then
      std::this_thread::sleep_for(kNap);
    }
  }
  return CheckPoison();
}

uint32_t Timeline::queued() const {
  std::lock_guard lock(mutex_);
  const uint64_t to_run = cause_.ok() ? submitted_.load() - executed_ : 0;
  const bool beside = held_ != 0 && held_ <= executed_;  // it is not running itself any more
  return static_cast<uint32_t>(to_run) + (beside ? 1 : 0);
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
    // What runs beside the background may wait for it, and so for files or other ranks.
    if (held_ != 0) LetOthersRun();
    in_turn_ = true;
    const uint64_t sequence = executed_ + 1;
    lock.unlock();
    const bool passed = turn == Turn::kExecute ? ExecutePiece(sequence) : SettleBackground(false);
    lock.lock();
    in_turn_ = false;
    ended_ = !passed;
    if (passed && turn == Turn::kExecute) {
      executed_ = sequence;
      Show(ProgressAt(sequence + 1, 0));
    }
    changed_.notify_all();
  }
  return NextTurn() != Turn::kNone;
}

// Where the background has rounds, waits until the next one is due or there is something else to
// do.
void Timeline::AwaitRound(std::unique_lock<std::mutex>& lock) {
  if (held_ == 0 || round_ns_ == 0 || awake_ || executed_ < submitted_.load()) return;
  LetOthersRun();
  const auto due = [this] { return awake_ || executed_ < submitted_.load(); };
  changed_.wait_for(lock, std::chrono::nanoseconds(round_ns_), due);
}

// The background goes first: whoever waits for it has waited longest.
Timeline::Turn Timeline::NextTurn() const {
  if (ended_) return Turn::kNone;
  if (awake_) return Turn::kSettle;
  if (executed_ < submitted_.load()) return Turn::kExecute;
  return held_ != 0 && round_ns_ != 0 ? Turn::kSettle : Turn::kNone;
}

bool Timeline::HasWork() const {
  return !ended_ && (in_turn_ || held_ != 0 || executed_ < submitted_.load());
}

// False if it failed.
bool Timeline::ExecutePiece(uint64_t sequence) {
  Status status = execute_(static_cast<uint32_t>(sequence % kCapacity), sequence);
  if (status.ok()) return true;
  // Told at once, for the background may take long. It does not suffer if it can help it.
  Poison(sequence, std::move(status));
  (void)SettleBackground(true);
  return false;
}

// False if it failed and has poisoned all.
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

// Whether a piece that has not completed never will: what is queued behind a failure does not run,
// and the background ends unless the failure is its own.
bool Timeline::Suffers(uint64_t sequence) const {
  return !cause_.ok() && (sequence > executed_ || failed_ == 0);
}

// After a failure every stream is let go: a hung device would be worse than a wrong value that the
// caller is told about. The background ends by itself, so it may hold them for as long as it reads.
void Timeline::Poison(uint64_t sequence, Status cause) {
  {
    std::lock_guard lock(mutex_);
    PoisonLocked(sequence, std::move(cause));
  }
  changed_.notify_all();
}

void Timeline::PoisonLocked(uint64_t sequence, Status cause) {
  if (cause_.ok()) cause_ = std::move(cause);  // the first one counts
  failed_ = sequence;
  Show(kReleased);
}

}  // namespace hybridopt
