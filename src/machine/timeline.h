// Timeline: the order of one optimizer's queued work, and who waits for it.
//
// The context's runners run the work, first in first out, one piece at a time. Each piece has a
// sequence number, from 1; a piece completes when it has run, or it fails and poisons all that
// comes after. Progress inside a piece shows in two 64-bit words that only grow: what has been
// reached, so that device streams can wait on it without the host, and what has been issued, which
// threads wait for before they put a stream behind it.
//
// One piece at a time may go on in the background (a save): it completes late, and later ones do
// not wait for it. While it reads what streams may write, the words stand still. And a piece may
// fail on its own (its files): then it completes with that status, and nothing else suffers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "base/function_ref.h"
#include "base/status.h"
#include "runtime/runner_pool.h"

namespace hybridopt {

class Timeline : private RunnerPool::Task {
 public:
  static constexpr uint32_t kCapacity = 256;

  // Runs the work that was put into `slot` (0 to kCapacity - 1).
  using Execute = std::function<Status(uint32_t slot, uint64_t sequence)>;
  // Brings the background to its end, as Wake has asked for, or, after `failure` of a later piece,
  // in any case. It calls Release.
  using Settle = std::function<Status(bool failure)>;

  // `runners` has been started, and `progress` outlives every stream that may wait on it.
  Timeline(RunnerPool& runners, Execute execute, Settle settle, std::atomic<uint64_t>& progress);
  ~Timeline() override;  // drains
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Returns when all that is queued has run and the background has ended; at once in a forked
  // child, which has no runners. The last call, unless check_stuck fails, which is asked meanwhile:
  // then the timeline is poisoned with that failure, which also comes back, and a runner goes on
  // with the piece that is stuck. The timeline and the context must then live as long as the
  // process.
  Status Drain(FunctionRef<Status()> check_stuck);

  // The slot that the next Submit will queue; its earlier content has been executed, and is no
  // longer read. INVALID_STATE when kCapacity pieces are queued, POISONED after a failure.
  Result<uint32_t> NextSlot();
  // Queues that slot and gives its sequence number.
  Result<uint64_t> Submit();

  // OK once the piece has completed; the cause if it or an earlier one failed, as soon as the
  // background has read what it holds streams for; TIMED_OUT after timeout_ns (0 only looks,
  // negative waits without limit). Any thread.
  Status Wait(uint64_t sequence, int64_t timeout_ns);
  // Whether it has completed, as Wait would say now; a failure that is its own is not told.
  Status Look(uint64_t sequence);
  // Waits for all that is submitted now; of the failures that concern nobody else the first that
  // nobody has been told of, once each.
  Status WaitForAll(int64_t timeout_ns);

  // Said while the piece runs: it completes when Release is called, and until then Settle is called
  // every `round_ns` where nothing else is to be done; 0: not. With `holds_streams` the word stays
  // at the piece's start until ReleaseStreams. One at a time.
  void Hold(uint64_t sequence, int64_t round_ns, bool holds_streams);
  void ReleaseStreams();  // any thread, any number of times
  // The background piece has completed; called by Execute or Settle. A `failure` that is not OK is
  // more than the piece's own: it poisons the timeline before any waiter learns that the piece has
  // completed.
  void Release(Status failure);
  // The background has come so far that Settle has something to do. Any thread.
  void Wake();
  // Said by Execute before it waits for anything but the workers: other optimizers' work goes on
  // meanwhile. Any number of times. Settle need not say it, nor Execute beside the background.
  void LetOthersRun() { runners_.LetOthersRun(*this); }
  // Said before the piece completes: it has failed, and that is nobody else's concern. Why is
  // remembered of the last kFailuresKept.
  void Report(uint64_t sequence, Status failure);
  static constexpr size_t kFailuresKept = 64;
  // Waits until a mark has been issued, on the calling thread; the cause if it never will.
  Status AwaitIssued(uint64_t sequence, uint64_t mark);
  bool HasReached(uint64_t sequence, uint64_t mark) const {
    return progress_.load() >= ProgressAt(sequence, mark);
  }

  uint64_t submitted() const { return submitted_.load(); }
  // Pieces that are waiting, running or in the background; after a failure what is still going on.
  uint32_t queued() const;
  bool idle() const { return queued() == 0; }
  // POISONED with the cause in its text after a failure, else OK.
  Status CheckPoison() const;

  // What lets every stream go. A device may compare as counters that wrap around, so it is not the
  // largest number there is.
  static constexpr uint64_t kReleased = INT64_MAX;
  // Marks inside a piece: mark 0 is its start; all marks are reached, and issued, when it
  // completes.
  static constexpr uint64_t kMarks = uint64_t{1} << 24;
  static uint64_t ProgressAt(uint64_t sequence, uint64_t mark) { return sequence * kMarks + mark; }
  // The work behind which a stream must stand has been queued on other streams. Any thread; a mark
  // below the last one changes nothing.
  void Issued(uint64_t sequence, uint64_t mark);
  void Reached(uint64_t sequence, uint64_t mark);
  const std::atomic<uint64_t>& progress() const { return progress_; }

 private:
  enum class Turn { kNone, kSettle, kExecute };
  bool RunTurn() override;
  bool ExecutePiece(uint64_t sequence);
  bool SettleBackground(bool failure);
  void Poison(uint64_t sequence, Status cause);
  // These with mutex_ held.
  Turn NextTurn() const;
  void AwaitRound(std::unique_lock<std::mutex>& lock);
  bool HasWork() const;
  void PoisonLocked(uint64_t sequence, Status cause);
  void ReserveFailures();
  void Show(uint64_t progress);
  void ShowWords();
  bool Suffers(uint64_t sequence) const;
  Status Await(std::unique_lock<std::mutex>& lock, uint64_t sequence, FunctionRef<bool()> completed,
               int64_t timeout_ns);
  Status AwaitOne(std::unique_lock<std::mutex>& lock, uint64_t sequence, int64_t timeout_ns);
  Status OutcomeOf(uint64_t sequence);
  Status Untold(uint64_t sequence);

  RunnerPool& runners_;
  const Execute execute_;
  const Settle settle_;
  const uint64_t fork_generation_;
  std::atomic<uint64_t>& progress_;
  std::atomic<uint64_t> issued_;
  std::atomic<uint64_t> submitted_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Status cause_;         // of the failure; guarded by mutex_, as all below
  uint64_t failed_ = 0;  // the piece that failed; 0: none, or the background
  bool stopping_ = false;
  bool in_turn_ = false;        // a runner runs a piece, or settles the background
  bool ended_ = false;          // a turn has failed: there is none any more
  uint64_t executed_ = 0;       // the last piece that has run
  uint64_t held_ = 0;           // the piece that goes on in the background; 0: none
  int64_t round_ns_ = 0;        // how often Settle is called for it
  bool awake_ = false;          // Settle has something to do
  bool holds_streams_ = false;  // the background reads what streams may write
  uint64_t reached_;            // what the words will say when nothing holds them
  uint64_t issued_mark_;
  struct Failure {
    uint64_t sequence;
    Status status;
    bool told;
  };
  std::vector<Failure> failures_;    // of pieces that failed on their own, in order
  std::vector<uint64_t> forgotten_;  // earlier ones, in order: that they failed, not why
};

}  // namespace hybridopt
