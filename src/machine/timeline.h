// Timeline: the queue of one optimizer's work, and the waits for that work.
//
// The context's runners run the work, first in first out, one piece at a time. Each piece has a
// sequence number, counted from 1. A piece completes when it has run. If it fails, the timeline is
// poisoned: no later piece runs. Two 64-bit words that only grow show the progress inside a piece.
// One tells which mark has been reached; device streams wait for it without the host. The other
// tells which mark has been issued; a thread waits for it before it makes a stream wait.
//
// One piece at a time, a save, may continue in the background: it completes late, and later pieces
// do not wait for it. While it reads memory that streams may write, the two words do not change.
// A piece may also fail alone, because of its files: then it completes with that status, and the
// timeline is not poisoned.
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
  // Does a turn of the background piece (runner_pool.h) after Wake. If `failure`, a later piece has
  // failed and the background piece must end now. When the background piece has completed, Settle
  // calls Release.
  using Settle = std::function<Status(bool failure)>;

  // `runners` has been started. `progress` must outlive every stream that may wait for it.
  Timeline(RunnerPool& runners, Execute execute, Settle settle, std::atomic<uint64_t>& progress);
  ~Timeline() override;  // drains
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Returns when all queued work has run and the background piece has ended; at once in a forked
  // child, which has no runners. No other call may follow. While it waits, it calls check_stuck
  // again and again. If that fails, Drain poisons the timeline with this failure and returns it,
  // although a runner still runs the piece that is stuck. The timeline and the context must then
  // live as long as the process.
  Status Drain(FunctionRef<Status()> check_stuck);

  // The slot that the next Submit will queue. The earlier work of this slot has been executed, and
  // nothing reads it any more. INVALID_STATE when kCapacity pieces are queued, POISONED after a
  // failure.
  Result<uint32_t> NextSlot();
  // Queues the slot that NextSlot has given, and returns its sequence number.
  Result<uint64_t> Submit();

  // OK when the piece has completed. If it or an earlier piece failed, returns that failure, but
  // only after the background piece has read all memory that streams may write (ReleaseStreams).
  // TIMED_OUT after timeout_ns (0 does not wait, negative waits without limit). Any thread may call
  // it.
  Status Wait(uint64_t sequence, int64_t timeout_ns);
  // What Wait would return now. A failure of this piece alone is not returned.
  Status Look(uint64_t sequence);
  // Waits for all pieces that have been submitted before this call. If pieces failed alone, returns
  // the first of these failures that no call has returned yet; each is returned once.
  Status WaitForAll(int64_t timeout_ns);
  // Waits for the same pieces, without limit, and returns no failure of a piece alone.
  Status AwaitAll();

  // Called while the piece runs: the piece continues in the background, and completes when Release
  // is called. Until then a runner calls Settle every `round_ns` if there is no other work (0:
  // never). With `holds_streams` the two words do not grow until ReleaseStreams is called, so that
  // the streams that wait for these words do not write memory that the piece still reads. Only one
  // piece at a time may be in the background.
  void Hold(uint64_t sequence, int64_t round_ns, bool holds_streams);
  void ReleaseStreams();  // any thread may call it, also several times
  // Execute or Settle calls this when the background piece has completed. A `failure` that is not
  // OK poisons the timeline before any waiting thread can see that the piece has completed.
  void Release(Status failure);
  // Asks for a call of Settle. Any thread may call it.
  void Wake();
  // Execute calls this before it waits for anything other than the workers, so that other runners
  // run the work of other optimizers meanwhile. Execute may call it several times, and need not
  // call it while there is a background piece. Settle need not call it.
  void LetOthersRun() { runners_.LetOthersRun(*this); }
  // Poisons the timeline while no work is queued: a call that is not one of the queued pieces has
  // failed half way.
  void Fail(Status cause) { Poison(submitted_ + 1, std::move(cause)); }
  // Called before the piece completes: the piece has failed alone, with this status. The timeline
  // keeps the last kFailuresKept of these.
  void Report(uint64_t sequence, Status failure);
  static constexpr size_t kFailuresKept = 64;
  // Blocks the calling thread until a mark has been issued. If a failure prevents that, returns
  // POISONED with the cause. While it waits, it calls check_stuck again and again; if that fails,
  // it poisons the timeline with this failure and returns it, as Drain does.
  Status AwaitIssued(uint64_t sequence, uint64_t mark, FunctionRef<Status()> check_stuck);
  bool HasReached(uint64_t sequence, uint64_t mark) const {
    return progress_.load() >= ProgressAt(sequence, mark);
  }

  uint64_t submitted() const { return submitted_.load(); }
  // The number of pieces that wait, run, or continue in the background. After a failure no piece
  // waits.
  uint32_t queued() const;
  bool idle() const { return queued() == 0; }
  // POISONED with the cause in its text after a failure, else OK.
  Status CheckPoison() const;

  // The value of the words that releases every waiting stream. It is not the largest 64-bit number,
  // because a device may compare the words as counters that wrap around.
  static constexpr uint64_t kReleased = INT64_MAX;
  // Marks inside a piece. Mark 0 is the start of the piece. When the piece completes, all its marks
  // are reached and issued.
  static constexpr uint64_t kMarks = uint64_t{1} << 24;
  static uint64_t ProgressAt(uint64_t sequence, uint64_t mark) { return sequence * kMarks + mark; }
  // Issued: the work up to this mark has been queued on streams. Reached: that work is done. Any
  // thread may call these. Issued ignores a mark below the last one.
  void Issued(uint64_t sequence, uint64_t mark);
  void Reached(uint64_t sequence, uint64_t mark);
  const std::atomic<uint64_t>& progress() const { return progress_; }

 private:
  enum class Turn { kNone, kSettle, kExecute };
  bool RunTurn() override;
  bool ExecutePiece(uint64_t sequence);
  bool SettleBackground(bool failure);
  void Poison(uint64_t sequence, Status cause);
  // To be called with mutex_ held.
  Turn NextTurn() const;
  void AwaitRound(std::unique_lock<std::mutex>& lock);
  bool HasWork() const;
  void PoisonLocked(uint64_t sequence, Status cause);
  Status PoisonIfStuck(FunctionRef<Status()> check_stuck);
  void ReserveFailures();
  void SetReached(uint64_t progress);
  void PublishWords();
  bool CannotComplete(uint64_t sequence) const;
  Status Await(std::unique_lock<std::mutex>& lock, uint64_t sequence, FunctionRef<bool()> completed,
               int64_t timeout_ns);
  Status AwaitUpTo(std::unique_lock<std::mutex>& lock, uint64_t last, int64_t timeout_ns);
  Status AwaitOne(std::unique_lock<std::mutex>& lock, uint64_t sequence, int64_t timeout_ns);
  Status OutcomeOf(uint64_t sequence);
  Status TakeUnreported(uint64_t sequence);

  RunnerPool& runners_;
  const Execute execute_;
  const Settle settle_;
  const uint64_t fork_generation_;
  std::atomic<uint64_t>& progress_;  // the word for marks that have been reached
  std::atomic<uint64_t> issued_;     // the word for marks that have been issued
  std::atomic<uint64_t> submitted_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Status cause_;         // of the failure; guarded by mutex_, as all below
  uint64_t failed_ = 0;  // the piece that failed; 0: none, or the background piece
  bool stopping_ = false;
  bool in_turn_ = false;        // a runner runs a piece, or settles the background
  bool ended_ = false;          // a turn has failed: there are no more turns
  uint64_t executed_ = 0;       // the last piece that has run
  uint64_t held_ = 0;           // the piece that goes on in the background; 0: none
  int64_t round_ns_ = 0;        // how often Settle is called for it
  bool awake_ = false;          // Wake was called: Settle has something to do
  bool holds_streams_ = false;  // the background piece reads memory that streams may write
  // The next values of the two words. PublishWords copies them there unless streams are held.
  uint64_t reached_;
  uint64_t issued_mark_;
  struct Failure {
    uint64_t sequence;
    Status status;
    bool reported;  // a call has returned it
  };
  std::vector<Failure> failures_;    // of pieces that failed on their own, in order
  std::vector<uint64_t> forgotten_;  // the sequence numbers of earlier ones, in order
};

}  // namespace hybridopt
