// WorkPieces: divides elements among workers while they work. Each worker begins with a part of its
// own. A worker gets the same part in every job, because it was the first to touch the memory of
// this part. A worker that has finished its part takes pieces of the other parts, so that the
// workers do not wait long for a worker whose CPU is used by another program.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "base/function_ref.h"
#include "base/status.h"
#include "runtime/worker_pool.h"

namespace hybridopt {

// Workers' parts of a chunk start at multiples of this many elements.
inline constexpr uint64_t kWorkGrainElements = 64;
// What a worker takes at a time in a step: about 50 us of work.
inline constexpr uint64_t kWorkPieceElements = 256 * kWorkGrainElements;

class WorkPieces {
 public:
  explicit WorkPieces(uint32_t workers) : parts_(workers) {}

  // To be called before the workers begin. Parts are cut at multiples of `grain` elements; pieces
  // have `piece_elements`, a multiple of `grain`.
  void Reset(const WorkRange& whole, uint64_t grain, uint64_t piece_elements) {
    is_one_piece_ = whole.end - whole.begin <= piece_elements;
    piece_elements_ = piece_elements;
    const uint32_t workers = static_cast<uint32_t>(parts_.size());
    for (uint32_t worker = 0; worker < workers; ++worker) {
      const WorkRange part = RangeOfWorker(whole.end - whole.begin, grain, worker, workers);
      parts_[worker].next.store(whole.begin + part.begin, std::memory_order_relaxed);
      parts_[worker].end = whole.begin + part.end;
    }
  }

  // Each worker calls body(worker), which calls Take; returns when all workers have ended. If there
  // is only one piece, the calling thread calls body(0), because waking the workers takes longer.
  Status Share(WorkerPool& workers, FunctionRef<void(uint32_t worker)> body) const {
    if (!is_one_piece_) return workers.Run(body);
    body(0);
    return {};
  }

  // Calls visit(piece) for one piece after the other, until all pieces have been taken.
  template <typename Visit>
  void Take(uint32_t worker, Visit&& visit) {
    const uint32_t workers = static_cast<uint32_t>(parts_.size());
    for (uint32_t i = 0; i < workers; ++i) {
      Part& part = parts_[(worker + i) % workers];
      // A load comes first, so that the cache line of an empty part can stay in every worker's
      // cache.
      while (part.next.load(std::memory_order_relaxed) < part.end) {
        const uint64_t begin = part.next.fetch_add(piece_elements_, std::memory_order_relaxed);
        if (begin >= part.end) break;
        visit(WorkRange{begin, std::min(begin + piece_elements_, part.end)});
      }
    }
  }

 private:
  struct alignas(64) Part {
    std::atomic<uint64_t> next{0};
    uint64_t end = 0;
  };
  std::vector<Part> parts_;
  uint64_t piece_elements_ = 0;
  bool is_one_piece_ = false;
};

}  // namespace hybridopt
