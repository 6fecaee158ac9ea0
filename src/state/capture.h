// Capture: how far a running save has come in reading state. A save reads all arrays in the order
// of its file; a step that runs behind it asks here before it overwrites anything.
//
//   file   | head | p0.master | p0.exp_avg | p0.exp_avg_sq | p1.master | ...
//                                              ^ position: up to here nobody needs memory any more
//
// What it reads is the library's, but for params that are masters, or halves of them: these are
// borrowed from the caller, who may write them when a step behind the save has completed.
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

  // A param's last array in the file: its place there, and what an element takes. Params without
  // one are not saved and never waited for.
  void SetLastArray(uint32_t param, uint64_t begin, uint64_t element_bytes) {
    params_[param] = {begin, element_bytes};
  }

  // Up to here it reads what is the caller's; 0, as before this is said: nowhere.
  void SetBorrowedEnd(uint64_t position) { borrowed_end_ = position; }
  bool borrows() const { return borrowed_end_ > 0; }
  // Whether all of that has been read.
  bool gave_back() const { return position_.load() >= borrowed_end_; }

  // Told by the save as it goes; positions grow.
  void Advance(uint64_t position) {
    position_.store(position);
    Tell();
  }
  // The save needs nothing any more, whether it went well or not.
  void End() {
    position_.store(UINT64_MAX);
    Tell();
  }

  // Returns when the first `end` elements of all of the param's arrays have been read.
  void Await(uint32_t param, uint64_t end) { AwaitPosition(PositionOf(param, end)); }
  // For at most so long, if not negative; whether all that is borrowed, or all, has been read.
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
  // Whoever is about to wait has seen the new position or is seen here.
  void Tell() {
    if (waiting_.load() == 0) return;
    { std::lock_guard lock(mutex_); }
    advanced_.notify_all();
  }

  std::vector<LastArray> params_;
  uint64_t borrowed_end_ = 0;
  std::atomic<uint64_t> position_ = 0;
  std::atomic<uint32_t> waiting_ = 0;  // threads
  std::mutex mutex_;
  std::condition_variable advanced_;
};

}  // namespace hybridopt
