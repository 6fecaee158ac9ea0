// ChunkQueue: who updates which chunk of a step, and how many are done. Chunks lie in one order; an
// executor takes the first one that nobody has taken, so each chunk is taken once. They may finish
// in any order; what others are told is how many have finished without a gap, because streams wait
// for the chunks up to some place.
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
  // Between steps: how many chunks there are. Allocates.
  void UseChunks(uint32_t count) { done_.resize(count); }
  // Before a step.
  void Reset() {
    std::lock_guard lock(mutex_);
    done_.assign(done_.size(), false);
    taken_ = finished_ = 0;
    stopped_ = false;
  }

  // The next chunk, which is the caller's from now on; none when all are taken, or after Stop.
  std::optional<uint32_t> Take() {
    std::lock_guard lock(mutex_);
    if (stopped_ || taken_ == done_.size()) return std::nullopt;
    return taken_++;
  }
  // An executor has failed: the others end what they have taken.
  void Stop() {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }

  // The chunk's params and state are where they belong.
  void Finish(uint32_t chunk) {
    std::lock_guard lock(mutex_);
    HYBRIDOPT_CHECK(chunk < taken_ && !done_[chunk]);
    done_[chunk] = true;
    while (finished_ < taken_ && done_[finished_]) finished_ += 1;
  }
  // So many chunks are done, from the first one on.
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
