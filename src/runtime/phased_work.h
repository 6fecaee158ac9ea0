// PhasedWork: work in phases that workers share. A phase has independent pieces, which any worker
// may do; the next phase begins when all pieces of this one are done. A worker may come late or not
// at all: the phases go on without it. Workers that find no piece wait for the next phase.
#pragma once

#include <atomic>
#include <cstdint>

namespace hybridopt {

class PhasedWork {
 public:
  // To be called before the workers begin: the pieces of the first phase. 0: there is no work.
  void Begin(uint64_t pieces) { Open(pieces); }

  // Does pieces until there are no more phases. `run(piece)` does a piece, 0 to pieces - 1, of the
  // phase that is open. When all pieces of a phase are done, one worker calls next(), which
  // prepares the next phase and returns its pieces; 0: the work is done.
  template <typename Run, typename Next>
  void Take(Run&& run, Next&& next) {
    for (uint64_t left = left_.load(std::memory_order_acquire); left != kDone;) {
      if (left == 0) {
        left_.wait(0, std::memory_order_acquire);
        left = left_.load(std::memory_order_acquire);
        continue;
      }
      // The phase stays open until the taken piece is done.
      if (!left_.compare_exchange_weak(left, left - 1, std::memory_order_acquire)) continue;
      run(left - 1);
      if (undone_.fetch_sub(1, std::memory_order_acq_rel) == 1) Open(next());
      left = left_.load(std::memory_order_acquire);
    }
  }

 private:
  static constexpr uint64_t kDone = UINT64_MAX;

  void Open(uint64_t pieces) {
    undone_.store(pieces, std::memory_order_relaxed);
    left_.store(pieces > 0 ? pieces : kDone, std::memory_order_release);
    left_.notify_all();
  }

  std::atomic<uint64_t> left_ = kDone;  // pieces of the open phase that nobody has taken
  std::atomic<uint64_t> undone_ = 0;    // pieces of the open phase that are not done
};

}  // namespace hybridopt
