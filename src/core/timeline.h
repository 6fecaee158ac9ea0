// Timeline: the order of one optimizer's queued work, and who waits for it.
//
// One thread runs the work, first in first out. Each piece has a sequence number, from 1; a piece
// completes, or it fails and poisons all that comes after. Progress inside a piece shows in one
// 64-bit word that only grows, so that device streams can wait on it without the host.
#pragma once

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>

#include "base/status.h"

namespace hybridopt {

class Timeline {
 public:
  static constexpr uint32_t kCapacity = 256;

  // Runs the work that was put into `slot` (0 to kCapacity - 1).
  using Execute = std::function<Status(uint32_t slot, uint64_t sequence)>;

  // `progress` outlives every stream that may wait on it.
  Timeline(Execute execute, std::atomic<uint64_t>& progress);
  ~Timeline();  // drains
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Runs what is queued, then ends the thread; in a forked child leaves it alone. The last call.
  void Drain();

  // The slot that the next Submit will queue; its earlier content is no longer read.
  // INVALID_STATE when kCapacity pieces are queued, POISONED after a failure.
  Result<uint32_t> NextSlot();
  // Queues that slot and gives its sequence number. Starts the thread the first time.
  Result<uint64_t> Submit();

  // OK once the piece has completed; the cause if it or an earlier one failed; TIMED_OUT after
  // timeout_ns (0 only looks, negative waits without limit). Any thread.
  Status Wait(uint64_t sequence, int64_t timeout_ns);

  uint64_t submitted() const { return submitted_.load(); }
  uint64_t completed() const { return completed_.load(); }
  bool idle() const;  // nothing queued or running
  // POISONED with the cause in its text after a failure, else OK.
  Status CheckPoison() const;

  // Marks inside a piece: mark 0 is its start; all marks are reached when it completes.
  static constexpr uint64_t kMarks = uint64_t{1} << 24;
  static uint64_t ProgressAt(uint64_t sequence, uint64_t mark) { return sequence * kMarks + mark; }
  void Reached(uint64_t sequence, uint64_t mark) { progress_.store(ProgressAt(sequence, mark)); }
  const std::atomic<uint64_t>& progress() const { return progress_; }

 private:
  void Loop();
  void Finish(uint64_t sequence, Status status);

  const Execute execute_;
  const uint64_t fork_generation_;
  std::atomic<uint64_t>& progress_;
  std::atomic<uint64_t> submitted_ = 0;
  std::atomic<uint64_t> completed_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  Status cause_;  // of the failure; guarded by mutex_
  bool stopping_ = false;
  std::optional<pthread_t> thread_;  // started by the first Submit
};

}  // namespace hybridopt
