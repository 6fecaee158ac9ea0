// ChunkQueue: which executor updates which chunk of a step, and how many chunks are done. The
// chunks have one order; an executor takes the first one that no executor has taken, so each chunk
// is taken once. Chunks may finish in any order. The queue reports how many have finished without a
// gap, because streams wait for all chunks up to some point.
//
//   chunks   | done | done | cpu | done | streamed | cpu | free | free | ...
//                          ^ finished() = 2              ^ the next to be taken
//
// Thread-safe.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "base/check.h"

namespace hybridopt {

class ChunkQueue {
 public:
  // Sets the number of chunks, between steps. Allocates.
  void UseChunks(uint32_t count) { done_.resize(count); }
  // To be called before each step.
  void Reset() {
    std::lock_guard lock(mutex_);
    done_.assign(done_.size(), false);
    taken_ = finished_ = 0;
    stopped_ = false;
  }

  // Takes the next chunk, which the caller must then update; none if all have been taken, or after
  // Stop.
  std::optional<uint32_t> Take() {
    std::lock_guard lock(mutex_);
    if (stopped_ || taken_ == done_.size()) return std::nullopt;
    return taken_++;
  }
  // To be called when an executor has failed: Take gives no more chunks, and the others finish
  // those that they have taken.
  void Stop() {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }

  // To be called when the chunk's params and state are at their addresses.
  void Finish(uint32_t chunk) {
    std::lock_guard lock(mutex_);
    HYBRIDOPT_CHECK(chunk < taken_ && !done_[chunk]);
    done_[chunk] = true;
    while (finished_ < taken_ && done_[finished_]) finished_ += 1;
  }
  // How many chunks are done without a gap, from the first one on.
  uint32_t finished() const {
    std::lock_guard lock(mutex_);
    return finished_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<bool> done_;  // per chunk
  uint32_t taken_ = 0;
  uint32_t finished_ = 0;
  bool stopped_ = false;
};

}  // namespace hybridopt
