// RunnerPool: the threads that run the queued work of all optimizers of one context.
//
// A task is an optimizer's timeline. It has turns, one at a time. As a rule one thread (a runner)
// runs the turns of all tasks, in the order in which they became due. A turn that may have to wait
// for something outside of the CPU (the device, other ranks, a disk) says so with LetOthersRun:
// then the next turn begins on another runner, so that no task waits for what another task waits
// for. The pool starts a runner only where no idle one is left:
//
// - kWaitingTogether such turns may go on at the same time, and the next one begins at once;
// - while more of them go on, one more begins every patience_ns, however many there are.
//
// So the number of runners depends on how many turns wait at the same time, and not on how many
// tasks there are. At most kIdleRunnersMax runners stay when there is nothing to do.
#pragma once

#include <cstdint>
#include <memory>

#include "base/status.h"

namespace hybridopt {

class RunnerPool {
 public:
  static constexpr uint32_t kWaitingTogether = 8;
  static constexpr uint32_t kIdleRunnersMax = kWaitingTogether + 2;
  static constexpr int64_t kPatienceNs = 5'000'000;

  class Task {
   public:
    Task() = default;
    virtual ~Task() = default;
    Task(const Task&) = delete;
    Task& operator=(const Task&) = delete;

   private:
    friend class RunnerPool;
    enum class State { kResting, kDue, kRunning };
    // Runs one turn. Returns whether the next one is due. Must not throw.
    virtual bool RunTurn() = 0;

    // Guarded by the pool's mutex.
    State state_ = State::kResting;
    bool submitted_ = false;   // Submit was called while the task was running
    bool is_waiting_ = false;  // the task is running and has called LetOthersRun
    Task* next_ = nullptr;     // in the list of due tasks
  };

  explicit RunnerPool(int64_t patience_ns = kPatienceNs);
  ~RunnerPool();  // requires that all tasks have been withdrawn; in a forked child it leaves the
                  // threads alone
  RunnerPool(const RunnerPool&) = delete;
  RunnerPool& operator=(const RunnerPool&) = delete;

  // Starts the first runner. OUT_OF_HOST_MEMORY where the system refuses the thread. The pool has a
  // runner from then on; where the system refuses another one, turns begin when earlier ones end.
  Status Start();
  // Makes a turn of the task due. If the task is running, it gets one more turn afterwards.
  // Requires a successful Start. Any thread may call this.
  void Submit(Task& task);
  // Called by a running turn: from here until the turn ends it may wait, and other turns may begin.
  // Further calls in the same turn have no effect.
  void LetOthersRun(Task& task);
  // Returns when the task is neither running nor due. No thread may submit the task during this
  // call or after it.
  void Withdraw(Task& task);

  uint32_t runners() const;  // the threads that exist now

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace hybridopt
