// ChunkQueue: which executor updates which chunk of a step, and how far the chunks are. The chunks
// have one order; an executor takes the first one that no executor has taken, so each chunk is
// taken once. If the gradients of some chunks are on the host and those of others on the device,
// each executor first takes the chunks that are near it, then those of the other one. A chunk is
// issued when the work that writes its params is queued on a stream, and finished when its params
// and state are at their addresses. Both may happen in any order. The queue reports how many chunks
// are issued, or finished, without a gap, because streams wait for all chunks up to some point.
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
#include <vector>

#include "base/check.h"
#include "base/status.h"
#include "device/device.h"

namespace hybridopt {

// Who may update the chunks.
enum class Executor : uint8_t {
  kCpu,
  kStreamed,
  kEarly  // the CPU workers, which have updated them before the step
};
template <typename T>
using PerExecutor = std::array<T, 3>;

// What executors tell of the chunks that they have taken. Any thread.
class ChunkProgress {
 public:
  // `written` is recorded behind the work that writes the chunk's params.
  virtual void Issued(uint32_t chunk, EventHandle written) = 0;
  virtual Status Finished(uint32_t chunk) = 0;

 protected:
  ~ChunkProgress() = default;
};

class ChunkQueue {
 public:
  // The bytes of the tables of `chunks`.
  static uint64_t Bytes(uint64_t chunks) { return chunks * sizeof(Chunk) + 2 * (chunks / 8); }
  // Sets the number of chunks, between steps. Allocates.
  void UseChunks(uint32_t count) {
    std::lock_guard lock(mutex_);
    issued_.done.resize(count);
    chunks_.resize(count);
    finished_.done.resize(count);
  }
  // To be called before each step.
  void Reset() {
    std::lock_guard lock(mutex_);
    for (Stage* stage : {&issued_, &finished_}) {
      stage->done.assign(stage->done.size(), false);
      stage->count = 0;
    }
    chunks_.assign(chunks_.size(), {});
    first_free_ = 0;
    first_preferred_ = {};
    issues_ = 0;
    stopped_ = false;
  }
  // Which executor takes a chunk before others, between Reset and the first Take. By default both
  // take it alike.
  void Prefer(uint32_t chunk, Executor executor) {
    std::lock_guard lock(mutex_);
    chunks_[chunk].preferred = executor;
  }

  // Takes the next chunk, which the caller must then update; none if all have been taken, or after
  // Stop.
  std::optional<uint32_t> Take(Executor executor) {
    std::lock_guard lock(mutex_);
    if (stopped_) return std::nullopt;
    const auto is_free = [&](uint32_t chunk) { return !chunks_[chunk].taken_by.has_value(); };
    uint32_t& preferred = first_preferred_[static_cast<size_t>(executor)];
    while (preferred < chunks_.size() &&
           !(is_free(preferred) && chunks_[preferred].preferred.value_or(executor) == executor))
      preferred += 1;
    while (first_free_ < chunks_.size() && !is_free(first_free_)) first_free_ += 1;
    const uint32_t chunk = preferred < chunks_.size() ? preferred : first_free_;
    if (chunk == chunks_.size()) return std::nullopt;
    chunks_[chunk].taken_by = executor;
    return chunk;
  }
  // Takes this chunk, which is free; gives it back, before any executor is told of it.
  void TakeThis(uint32_t chunk, Executor executor) {
    std::lock_guard lock(mutex_);
    HYBRIDOPT_CHECK(!chunks_[chunk].taken_by.has_value());
    chunks_[chunk].taken_by.emplace(executor);
  }
  void GiveBack(uint32_t chunk) {
    std::lock_guard lock(mutex_);
    chunks_[chunk].taken_by.reset();
    first_free_ = std::min(first_free_, chunk);
    for (uint32_t& preferred : first_preferred_) preferred = std::min(preferred, chunk);
  }
  // Who has taken the chunk, which somebody has.
  Executor TakenBy(uint32_t chunk) const {
    std::lock_guard lock(mutex_);
    return *chunks_[chunk].taken_by;
  }
  // To be called when an executor has failed: Take gives no more chunks, and the others finish
  // those that they have taken.
  void Stop() {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }

  // These give how many chunks have come as far without a gap, from the first one on.
  uint32_t Issue(uint32_t chunk, EventHandle written) {
    std::lock_guard lock(mutex_);
    Chunk& issued = chunks_[chunk];
    issued.last[static_cast<size_t>(*issued.taken_by)] = {++issues_, written};
    const uint32_t before = issued_.count, count = Mark(chunk, &issued_);
    for (uint32_t next = std::max(before, 1u); next < count; ++next)
      for (size_t i = 0; i < issued.last.size(); ++i)
        if (chunks_[next].last[i].issue < chunks_[next - 1].last[i].issue)
          chunks_[next].last[i] = chunks_[next - 1].last[i];
    return count;
  }
  uint32_t Finish(uint32_t chunk) {
    std::lock_guard lock(mutex_);
    return Mark(chunk, &finished_);
  }
  // For each executor the event behind all of its chunks among the first `count`, which have been
  // issued; NULL if it has none. An executor's work runs in the order in which it was issued.
  PerExecutor<EventHandle> WrittenUpTo(uint64_t count) const {
    std::lock_guard lock(mutex_);
    const uint64_t issued = std::min<uint64_t>(count, issued_.count);
    if (issued == 0) return {};
    const PerExecutor<Written>& last = chunks_[issued - 1].last;
    PerExecutor<EventHandle> events{};
    std::transform(last.begin(), last.end(), events.begin(),
                   [](const Written& written) { return written.event; });
    return events;
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
  struct Written {
    uint32_t issue = 0;  // counts from 1; 0: nothing has been issued
    EventHandle event = nullptr;
  };
  struct Chunk {
    std::optional<Executor> preferred;
    std::optional<Executor> taken_by;
    // The last issue of each executor: for this chunk alone, and once all chunks before it have
    // been issued too, for all of them.
    PerExecutor<Written> last;
  };
  uint32_t Mark(uint32_t chunk, Stage* stage) {
    HYBRIDOPT_CHECK(chunks_[chunk].taken_by.has_value() && !stage->done[chunk]);
    stage->done[chunk] = true;
    while (stage->count < chunks_.size() && stage->done[stage->count]) stage->count += 1;
    return stage->count;
  }

  mutable std::mutex mutex_;
  Stage issued_, finished_;
  std::vector<Chunk> chunks_;
  uint32_t first_free_ = 0;                  // none before it is free
  uint32_t issues_ = 0;                      // so far
  PerExecutor<uint32_t> first_preferred_{};  // none before it is free and preferred
  bool stopped_ = false;
};

}  // namespace hybridopt
