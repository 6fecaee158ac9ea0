#include "runtime/runner_pool.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "base/system.h"

namespace hybridopt {

struct RunnerPool::State {
  struct Runner {
    State* pool = nullptr;
    system::Thread thread;
    bool ended = true;  // there is no thread, or it is about to return

    void Run() { pool->RunTurns(*this); }
  };

  explicit State(int64_t patience) : patience_ns(patience) {}
  ~State();
  void RunTurns(Runner& runner);
  // These are called with the mutex locked.
  Task* TakeDue();
  void MakeDue(Task& task);
  void EndTurn(Task& task, bool next_is_due);
  void Rest(std::unique_lock<std::mutex>& lock);
  int64_t NextBeginNs() const;
  void Alert();
  Status StartRunner();
  Result<Runner*> UnusedRunner();
  uint32_t RunnerCount() const;

  const int64_t patience_ns;
  const uint64_t fork_generation = system::ForkGeneration();
  std::mutex mutex;                 // guards all below
  std::condition_variable alerted;  // idle runners wait for it
  std::condition_variable rested;   // Withdraw waits for it
  std::vector<std::unique_ptr<Runner>> runners;
  bool ending = false;
  Task* first_due = nullptr;
  Task* last_due = nullptr;
  uint32_t active = 0;   // turns that are running and have not called LetOthersRun: 0 or 1
  uint32_t waiting = 0;  // turns that are running and have called LetOthersRun
  uint32_t idle = 0;     // runners without a turn
  // While `waiting` is at most this number, the next turn begins at once. Each turn that begins
  // after patience_ns raises it to `waiting`, so the turns that wait already do not delay the next
  // ones.
  uint32_t waiting_allowed = kWaitingTogether;
  int64_t last_begin_ns = 0;  // when a turn last began
  // The time by which a runner (idle, alerted or just started) will look for due tasks.
  int64_t next_look_ns = INT64_MAX;
};

// ---------------------------------------------------------------------------------- the runners --

RunnerPool::State::~State() {
  {
    std::lock_guard lock(mutex);
    ending = true;
  }
  alerted.notify_all();
  for (const auto& runner : runners) runner->thread.Join();
}

// The body of a runner's thread. StartRunner has counted the runner as idle.
void RunnerPool::State::RunTurns(Runner& runner) {
  std::unique_lock lock(mutex);
  idle -= 1;
  next_look_ns = INT64_MAX;
  while (true) {
    if (Task* const task = TakeDue(); task != nullptr) {
      lock.unlock();
      const bool next_is_due = task->RunTurn();
      lock.lock();
      EndTurn(*task, next_is_due);
    } else if (ending || idle == kIdleRunnersMax) {
      break;
    } else {
      Rest(lock);
    }
  }
  runner.ended = true;
  Alert();  // this thread will not look again
}

// The next task whose turn may begin now, or NULL.
RunnerPool::Task* RunnerPool::State::TakeDue() {
  const int64_t begin_ns = NextBeginNs();
  if (begin_ns == INT64_MAX) return nullptr;
  const int64_t now_ns = system::NowNs();
  if (now_ns < begin_ns) return nullptr;
  waiting_allowed = std::max(waiting_allowed, waiting);
  last_begin_ns = now_ns;
  active += 1;
  Task* const task = first_due;
  first_due = task->next_;
  task->state_ = Task::State::kRunning;
  return task;
}

void RunnerPool::State::MakeDue(Task& task) {
  task.state_ = Task::State::kDue;
  task.next_ = nullptr;
  (first_due == nullptr ? first_due : last_due->next_) = &task;
  last_due = &task;
}

void RunnerPool::State::EndTurn(Task& task, bool next_is_due) {
  if (std::exchange(task.is_waiting_, false)) {
    waiting -= 1;
    waiting_allowed = std::min(waiting_allowed, waiting + kWaitingTogether);
  } else {
    active -= 1;
  }
  if (std::exchange(task.submitted_, false) || next_is_due) {
    MakeDue(task);
    return;
  }
  task.state_ = Task::State::kResting;
  rested.notify_all();
}

// Waits as an idle runner until there may be something to do.
void RunnerPool::State::Rest(std::unique_lock<std::mutex>& lock) {
  idle += 1;
  if (const int64_t begin_ns = NextBeginNs(); begin_ns < next_look_ns) {
    next_look_ns = begin_ns;
    alerted.wait_for(lock, std::chrono::nanoseconds(begin_ns - system::NowNs()));
  } else {
    alerted.wait(lock);
  }
  idle -= 1;
  next_look_ns = INT64_MAX;
}

// When the turn of the first due task may begin. INT64_MAX: no task is due, or another turn must
// end or call LetOthersRun first.
int64_t RunnerPool::State::NextBeginNs() const {
  if (first_due == nullptr || active > 0) return INT64_MAX;
  return waiting <= waiting_allowed ? 0 : last_begin_ns + patience_ns;
}

// Makes sure that an idle runner looks for due tasks in time. To be called when a turn may begin
// earlier than before, and when a runner ends.
void RunnerPool::State::Alert() {
  if (ending || NextBeginNs() >= next_look_ns) return;
  if (idle > 0)
    alerted.notify_one();
  else if (!StartRunner().ok())
    return;  // the existing runners look when their turns end
  next_look_ns = 0;
}

Status RunnerPool::State::StartRunner() {
  HYBRIDOPT_ASSIGN(Runner* const runner, UnusedRunner());
  // Joins the runner's earlier thread, which needs no lock any more.
  HYBRIDOPT_ASSIGN(runner->thread, system::Thread::Start<&Runner::Run>("hybridopt/run", runner));
  runner->ended = false;
  idle += 1;
  return {};
}

Result<RunnerPool::State::Runner*> RunnerPool::State::UnusedRunner() try {
  for (const auto& runner : runners)
    if (runner->ended) return runner.get();
  runners.push_back(std::make_unique<Runner>());
  runners.back()->pool = this;
  return runners.back().get();
} catch (const std::bad_alloc&) {
  return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY, "out of host memory for a thread");
}

uint32_t RunnerPool::State::RunnerCount() const {
  return static_cast<uint32_t>(std::count_if(runners.begin(), runners.end(),
                                             [](const auto& runner) { return !runner->ended; }));
}

// ------------------------------------------------------------------------ called by all threads --

RunnerPool::RunnerPool(int64_t patience_ns) : state_(std::make_unique<State>(patience_ns)) {}

RunnerPool::~RunnerPool() {
  // A child of fork does not have the threads, which may have held the mutex.
  if (state_->fork_generation != system::ForkGeneration()) (void)state_.release();
}

Status RunnerPool::Start() {
  std::lock_guard lock(state_->mutex);
  return state_->RunnerCount() > 0 ? Status() : state_->StartRunner();
}

void RunnerPool::Submit(Task& task) {
  std::lock_guard lock(state_->mutex);
  if (task.state_ == Task::State::kDue) return;
  if (task.state_ == Task::State::kRunning) {
    task.submitted_ = true;
    return;
  }
  state_->MakeDue(task);
  state_->Alert();
}

void RunnerPool::LetOthersRun(Task& task) {
  std::lock_guard lock(state_->mutex);
  if (std::exchange(task.is_waiting_, true)) return;
  state_->active -= 1;
  state_->waiting += 1;
  state_->Alert();
}

void RunnerPool::Withdraw(Task& task) {
  std::unique_lock lock(state_->mutex);
  state_->rested.wait(lock, [&] { return task.state_ == Task::State::kResting; });
}

uint32_t RunnerPool::runners() const {
  std::lock_guard lock(state_->mutex);
  return state_->RunnerCount();
}

}  // namespace hybridopt
