// SideThreads: threads of a context that do a piece of work while the thread that gave out this
// work goes on. An owner is an object that may give out work; all owners share the threads. The
// number of threads is the largest number of owners that there have been at one time, but at most
// kMost. If no thread is idle when work is given out, Await does the work on the calling thread, so
// that no owner waits for the work of another owner.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"

namespace hybridopt {

class SideThreads {
 public:
  // Equals RunnerPool::kWaitingTogether, the number of turns that may wait at the same time: each
  // of these turns may give out one piece of work.
  static constexpr uint32_t kMost = 8;

  // A piece of work that can be given out again once it has been awaited.
  class Work {
   public:
    Work() = default;
    virtual ~Work() = default;
    Work(const Work&) = delete;
    Work& operator=(const Work&) = delete;

   private:
    friend class SideThreads;
    enum class State { kResting, kGiven, kDone };
    virtual void Do() = 0;  // must not throw

    // Guarded by the mutex of the threads.
    State state_ = State::kResting;
    Work* next_ = nullptr;  // in the list of given work
  };

  SideThreads();
  ~SideThreads();  // requires that all work was awaited; in a forked child it leaves the threads
                   // alone
  SideThreads(const SideThreads&) = delete;
  SideThreads& operator=(const SideThreads&) = delete;

  // Counts one more owner, and starts a thread for it while there are fewer than kMost.
  // OUT_OF_HOST_MEMORY where the system refuses the first thread; then the owner does not count.
  Status AddOwner();
  void RemoveOwner();

  // Gives the work to an idle thread, if there is one.
  void Begin(Work& work);
  // Returns when the work has been done; does it now if no thread was idle. To be called once after
  // each Begin.
  void Await(Work& work);

  uint32_t threads() const;  // the threads that exist now

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hybridopt
