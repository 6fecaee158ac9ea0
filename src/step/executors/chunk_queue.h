// ChunkQueue: which executor updates which chunk of a step, and how far the chunks have come. The
// chunks have one order. An executor takes the first chunk that no executor has taken, so each
// chunk is taken once. If the gradients of some chunks are on the host and those of others on the
// device, each executor first takes the chunks whose gradients are near it, then the other chunks.
// A chunk is issued when the work that writes its params is queued on a stream. A chunk is finished
// when its params and state are at their addresses. Chunks may be issued, and finished, in any
// order. Streams wait for all chunks up to some point; so the queue counts how many chunks, from
// the first one on, are issued, or finished, without a gap.
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

// The executors that may update chunks.
enum class Executor : uint8_t {
  kCpu,
  kStreamed,
  kEarly  // the CPU workers, before the step
};
template <typename T>
using PerExecutor = std::array<T, 3>;

// Executors report their progress on the chunks that they have taken. Any thread may call these.
class ChunkProgress {
 public:
  // `written` is recorded after the work that writes the chunk's params.
  virtual void Issued(uint32_t chunk, EventHandle written) = 0;
  virtual Status Finished(uint32_t chunk) = 0;

 protected:
  ~ChunkProgress() = default;
};

class ChunkQueue {
 public:
  // The bytes of the tables for `chunks` chunks.
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
  // Between Reset and the first Take: the executor takes the chunks that it is preferred for before
  // other chunks. By default both executors are preferred.
  void Prefer(uint32_t chunk, Executor executor) {
    std::lock_guard lock(mutex_);
    chunks_[chunk].preferred = executor;
  }

  // Takes the next chunk; the caller must then update it. Returns none if all chunks have been
  // taken, or after Stop.
  std::optional<uint32_t> Take(Executor executor) {
    return TakeIf(executor, [](uint32_t) { return true; });
  }
  // The same, but leaves a chunk for which fits(chunk) is false.
  template <typename Fits>
  std::optional<uint32_t> TakeIf(Executor executor, Fits&& fits) {
    std::lock_guard lock(mutex_);
    if (stopped_) return std::nullopt;
    const auto is_free = [&](uint32_t chunk) { return !chunks_[chunk].taken_by.has_value(); };
    uint32_t& preferred = first_preferred_[static_cast<size_t>(executor)];
    while (preferred < chunks_.size() &&
           !(is_free(preferred) && chunks_[preferred].preferred.value_or(executor) == executor))
      preferred += 1;
    while (first_free_ < chunks_.size() && !is_free(first_free_)) first_free_ += 1;
    const uint32_t chunk = preferred < chunks_.size() ? preferred : first_free_;
    if (chunk == chunks_.size() || !fits(chunk)) return std::nullopt;
    chunks_[chunk].taken_by = executor;
    return chunk;
  }
  // Takes this chunk, which must be free. GiveBack makes it free again; no executor may have been
  // told of it in between.
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
  // The executor that has taken the chunk. The chunk must have been taken.
  Executor TakenBy(uint32_t chunk) const {
    std::lock_guard lock(mutex_);
    return *chunks_[chunk].taken_by;
  }
  // To be called when an executor has failed: Take returns no more chunks, and the other executors
  // finish the chunks that they have taken.
  void Stop() {
    std::lock_guard lock(mutex_);
    stopped_ = true;
  }

  // These return how many chunks, from the first one on, are issued (or finished) without a gap.
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
  // Per executor: the event after all of its chunks among the first `count` chunks, which must have
  // been issued; NULL if it has none. An executor's work runs in the order in which it was issued.
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
    uint32_t issue = 0;  // issues are numbered from 1; 0: nothing has been issued
    EventHandle event = nullptr;
  };
  struct Chunk {
    std::optional<Executor> preferred;
    std::optional<Executor> taken_by;
    // Per executor: its last issue among this chunk and, when all earlier chunks have been issued
    // too, among all chunks up to this one.
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
  uint32_t first_free_ = 0;                  // no chunk before it is free
  uint32_t issues_ = 0;                      // the number of issues so far
  PerExecutor<uint32_t> first_preferred_{};  // no free chunk before it prefers the executor
  bool stopped_ = false;
};

}  // namespace hybridopt
