// Capture: how far a running save has read the state. The save reads all arrays in the order of its
// file, and advances a position. A step that runs after the save waits for that position before it
// overwrites what the save still has to read.
//
//   file   | head | p0.master | p0.exp_avg | p0.exp_avg_sq | p1.master | ...
//                                              ^ position: the save has read all before it
//
// Most of what a save reads is memory of the library. Params that are masters, or upper halves of
// masters, are memory of the caller: the save borrows this memory. The caller may write its params
// as soon as a step that was queued after the save has completed. So such a step completes only
// after the save has read all borrowed memory.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace hybridopt {

class Capture {
 public:
  explicit Capture(uint32_t param_count) : params_(param_count) {}

  // Sets where a param's last array begins in the file, and the bytes of one element. A param
  // without an array is not saved, and Await does not wait for it.
  void SetLastArray(uint32_t param, uint64_t begin, uint64_t element_bytes) {
    params_[param] = {begin, element_bytes};
  }

  // Sets the position after the last borrowed byte. The initial value 0 means that the save borrows
  // nothing.
  void SetBorrowedEnd(uint64_t position) { borrowed_end_ = position; }
  bool borrows() const { return borrowed_end_ > 0; }
  // Whether the save has read all borrowed memory.
  bool has_read_borrowed() const { return position_.load() >= borrowed_end_; }

  // The save calls this while it reads; positions only grow.
  void Advance(uint64_t position) {
    position_.store(position);
    WakeWaiters();
  }
  // The save calls this when it will read no more memory, whether it succeeded or failed.
  void End() {
    position_.store(UINT64_MAX);
    WakeWaiters();
  }

  // Whether the save has read the first `end` elements of all of the param's arrays.
  bool HasRead(uint32_t param, uint64_t end) const {
    return position_.load() >= PositionOf(param, end);
  }
  // Returns when the save has read the first `end` elements of all of the param's arrays.
  void Await(uint32_t param, uint64_t end) { AwaitPosition(PositionOf(param, end)); }
  // These wait for at most timeout_ns; a negative timeout waits without limit. AwaitBorrowed
  // returns whether the save has read all borrowed memory, AwaitAll whether it has read all memory.
  bool AwaitBorrowed(int64_t timeout_ns = -1) { return AwaitPosition(borrowed_end_, timeout_ns); }
  bool AwaitAll(int64_t timeout_ns) { return AwaitPosition(UINT64_MAX, timeout_ns); }

 private:
  struct LastArray {
    uint64_t begin = 0;
    uint64_t element_bytes = 0;
  };
  uint64_t PositionOf(uint32_t param, uint64_t end) const {
    return params_[param].begin + end * params_[param].element_bytes;
  }
  bool AwaitPosition(uint64_t position, int64_t timeout_ns = -1) {
    if (position_.load() >= position) return true;
    const auto read = [&] { return position_.load() >= position; };
    std::unique_lock lock(mutex_);
    waiting_ += 1;
    if (timeout_ns < 0)
      advanced_.wait(lock, read);
    else
      advanced_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), read);
    waiting_ -= 1;
    return read();
  }
  // Wakes the threads that wait. A thread that begins to wait at the same time has either seen the
  // new position, or is counted in waiting_ before it is read here.
  void WakeWaiters() {
    if (waiting_.load() == 0) return;
    { std::lock_guard lock(mutex_); }
    advanced_.notify_all();
  }

  std::vector<LastArray> params_;
  uint64_t borrowed_end_ = 0;
  std::atomic<uint64_t> position_ = 0;
  std::atomic<uint32_t> waiting_ = 0;  // the number of waiting threads
  std::mutex mutex_;
  std::condition_variable advanced_;
};

}  // namespace hybridopt
