// ChunkQueue: which executor updates which chunk of a step, and how far the chunks are. The chunks
// have one order; an executor takes the first one that no executor has taken, so each chunk is
// taken once. A chunk is issued when the work that writes its params is queued on a stream, and
// finished when its params and state are at their addresses. Both may happen in any order. The
// queue reports how many chunks are issued, or finished, without a gap, because streams wait for
// all chunks up to some point.
//
//   chunks   | finished | issued | cpu | finished | streamed | cpu | free | free | ...
//                       ^ 1      ^ 2 without a gap                 ^ the next to be taken
//
// Thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/status.h"
#include "device/device.h"

namespace hybridopt {

// Who may update the chunks.
enum class Executor { kCpu, kStreamed };
template <typename T>
using PerExecutor = std::array<T, 2>;

// What executors tell of the chunks that they have taken. Any thread.
class ChunkProgress {
 public:
  // `written` is recorded behind the work that writes the chunk's params.
  virtual void Issued(uint32_t chunk, Executor executor, EventHandle written) = 0;
  virtual Status Finished(uint32_t chunk) = 0;

 protected:
  ~ChunkProgress() = default;
};

class ChunkQueue {
 public:
  // Sets the number of chunks, between steps. Allocates.
  void UseChunks(uint32_t count) {
    issued_.done.resize(count);
    written_.resize(count);
    finished_.done.resize(count);
  }
  // To be called before each step.
  void Reset() {
    std::lock_guard lock(mutex_);
    for (Stage* stage : {&issued_, &finished_}) {
      stage->done.assign(stage->done.size(), false);
      stage->count = 0;
    }
    taken_ = 0;
    stopped_ = false;
  }

  // Takes the next chunk, which the caller must then update; none if all have been taken, or after
  // Stop.
  std::optional<uint32_t> Take() {
    std::lock_guard lock(mutex_);
    if (stopped_ || taken_ == finished_.done.size()) return std::nullopt;
    return taken_++;
  }
  // To be called when an executor has failed: Take gives no more chunks, and the others finish
  // those that they have taken.
  void Stop() {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }

  // These give how many chunks have come as far without a gap, from the first one on.
  uint32_t Issue(uint32_t chunk, Executor executor, EventHandle written) {
    std::lock_guard lock(mutex_);
    written_[chunk] = {executor, written};
    return Mark(chunk, &issued_);
  }
  uint32_t Finish(uint32_t chunk) {
    std::lock_guard lock(mutex_);
    return Mark(chunk, &finished_);
  }
  // For each executor the event behind its last chunk of the first `count`, all of them issued;
  // NULL if it has none. An executor's chunks are written in order.
  PerExecutor<EventHandle> Written(uint64_t count) const {
    std::lock_guard lock(mutex_);
    PerExecutor<EventHandle> last{};
    // From the end: few chunks lie between the last ones of the two.
    for (uint64_t chunk = std::min<uint64_t>(count, issued_.count); chunk > 0; --chunk) {
      const auto& [executor, written] = written_[chunk - 1];
      EventHandle& found = last[static_cast<size_t>(executor)];
      if (found == nullptr) found = written;
      if (last[0] != nullptr && last[1] != nullptr) break;
    }
    return last;
  }
  uint32_t finished() const {
    std::lock_guard lock(mutex_);
    return finished_.count;
  }

 private:
  struct Stage {
    std::vector<bool> done;  // per chunk
    uint32_t count = 0;      // without a gap
  };
  uint32_t Mark(uint32_t chunk, Stage* stage) {
    HYBRIDOPT_CHECK(chunk < taken_ && !stage->done[chunk]);
    stage->done[chunk] = true;
    while (stage->count < taken_ && stage->done[stage->count]) stage->count += 1;
    return stage->count;
  }

  mutable std::mutex mutex_;
  Stage issued_, finished_;
  std::vector<std::pair<Executor, EventHandle>> written_;  // per chunk that is issued
  uint32_t taken_ = 0;
  bool stopped_ = false;
};

}  // namespace hybridopt
