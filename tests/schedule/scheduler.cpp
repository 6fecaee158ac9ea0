#include "scheduler.h"

#include <cxxabi.h>
#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "../random.h"
#include "real.h"

namespace hybridopt::schedule {

struct Task {
  enum class State { kReady, kBlocked, kEnded };

  uint32_t number = 0;
  void* (*body)(void*) = nullptr;
  void* argument = nullptr;
  void* result = nullptr;
  pthread_t thread{};
  State state = State::kReady;
  const char* what = "";  // it is blocked by
  const void* object = nullptr;
  int64_t deadline_ns = kNever;
  bool woken = false;
  uint64_t priority = 0;
  uint64_t held_until = 0;  // this many points, unless no other task is ready
  std::vector<void*> callers;
  alignas(64) std::atomic<uint32_t> turn = 0;  // 1: it may run
};

namespace {

constexpr int64_t kStartNs = 1'000'000'000'000;
constexpr int64_t kPointNs = 10;
constexpr int64_t kLookNs = 100;
constexpr int64_t kYieldNs = 500;
// How far time may jump although some task could run, as on a machine that is busy elsewhere.
constexpr int64_t kStallNsMax = 2'000'000;
constexpr uint64_t kChangesMax = 6;
// The most points for which a task that hesitates lets the others run.
constexpr uint64_t kHeldPointsMax = 4096;

thread_local Task* current = nullptr;

void (*on_failure)() = nullptr;

void AwaitTurn(Task& task) {
  while (task.turn.load(std::memory_order_acquire) == 0)
    Real().syscall(SYS_futex, &task.turn, FUTEX_WAIT_PRIVATE, 0, nullptr, nullptr, 0);
  task.turn.store(0, std::memory_order_relaxed);
  current = &task;
}

void GiveTurn(Task& task) {
  task.turn.store(1, std::memory_order_release);
  Real().syscall(SYS_futex, &task.turn, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

std::string NameOf(void* address) {
  Dl_info info{};
  if (dladdr(address, &info) == 0 || info.dli_sname == nullptr) return "?";
  int status = 0;
  std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status), &std::free);
  return status == 0 ? name.get() : info.dli_sname;
}

class Scheduler {
 public:
  explicit Scheduler(uint64_t seed);
  // Threads that are left wait for their turn as long as the process lives.
  ~Scheduler() {
    for (auto& task : tasks_)
      if (task->state != Task::State::kEnded) (void)task.release();
  }
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  Task* Add(void* (*body)(void*), void* argument);
  void Remove(Task* task) { tasks_.erase(tasks_.begin() + IndexOf(task)); }
  void Point();
  void Yield();
  void Hesitate();
  bool Block(const char* what, const void* object, int64_t deadline_ns);
  uint32_t Wake(const void* object, uint32_t count);
  void End();
  void Bury();
  void AwaitOthers();
  void LeaveThreads() { leaves_threads_ = true; }
  [[noreturn]] void Fail(const std::string& text);

  uint64_t Draw(uint64_t bound) { return random_.Below(bound); }
  int64_t NowNs() { return now_ns_ += kLookNs; }
  int64_t now_ns() const { return now_ns_; }
  Summary summary() const;

 private:
  ptrdiff_t IndexOf(const Task* task) const;
  void PassTime();
  void CollectReady();
  void PassTurnTo(Task& next);
  Task& Next(const Task* last_choice = nullptr);
  Task& NextByPriority();
  int64_t EarliestDeadlineNs() const;
  void MaybeStall();
  void Count(int64_t ns);
  void Lower(Task& task) {
    task.priority = --lowest_;
    is_stale_ = true;
  }
  void Note(uint64_t value) { trace_ = (trace_ ^ value) * 0x100000001b3; }
  void Print(const Task& task) const;

  const uint64_t seed_;
  Random random_;
  std::vector<std::unique_ptr<Task>> tasks_;  // in the order of their numbers
  std::vector<Task*> ready_;
  Task* last_ended_ = nullptr;  // its thread is still ending
  bool leaves_threads_ = false;
  uint32_t next_number_ = 0;
  int64_t now_ns_ = kStartNs;
  int64_t next_deadline_ns_ = kNever;  // at or before the earliest one
  uint64_t points_ = 0;
  uint64_t switches_ = 0;
  uint64_t trace_ = 0xcbf29ce484222325;
  // Two modes. By priority: the ready task with the highest priority runs, and at some points,
  // which are drawn before the run, its priority falls below all others. If a bug needs an order of
  // d operations, this finds it with a probability that decreases with the number of tasks and with
  // points^(d - 1), and with nothing else. Otherwise: about every `patience_` points any ready task
  // goes on.
  bool by_priority_ = false;
  bool is_stale_ = true;  // a task has become ready, or its priority lower
  uint64_t patience_ = 1;
  uint64_t points_left_ = 0;
  std::vector<uint64_t> changes_;  // descending
  uint64_t lowest_ = uint64_t{1} << 32;
};

std::unique_ptr<Scheduler> scheduler;

Scheduler::Scheduler(uint64_t seed) : seed_(seed), random_(seed) {
  by_priority_ = random_.OneIn(2);
  patience_ = uint64_t{2} << random_.Below(9);
  const uint64_t length = uint64_t{128} << random_.Below(10);
  for (uint64_t change = random_.Below(kChangesMax); change > 0; --change)
    changes_.push_back(1 + random_.Below(length));
  std::sort(changes_.rbegin(), changes_.rend());
}

Task* Scheduler::Add(void* (*body)(void*), void* argument) {
  auto task = std::make_unique<Task>();
  task->number = next_number_++;
  task->body = body;
  task->argument = argument;
  task->priority = (uint64_t{1} << 33) + random_.Below(uint64_t{1} << 30);
  tasks_.push_back(std::move(task));
  is_stale_ = true;
  return tasks_.back().get();
}

ptrdiff_t Scheduler::IndexOf(const Task* task) const {
  return std::find_if(tasks_.begin(), tasks_.end(),
                      [&](const auto& other) { return other.get() == task; }) -
         tasks_.begin();
}

// -------------------------------------------------------------------------------------- choices --

int64_t Scheduler::EarliestDeadlineNs() const {
  int64_t earliest = kNever;
  for (const auto& task : tasks_)
    if (task->state == Task::State::kBlocked) earliest = std::min(earliest, task->deadline_ns);
  return earliest;
}

// Tasks whose deadline has come become ready.
void Scheduler::PassTime() {
  if (now_ns_ < next_deadline_ns_) return;
  for (const auto& task : tasks_) {
    if (task->state != Task::State::kBlocked || task->deadline_ns > now_ns_) continue;
    task->state = Task::State::kReady;
    task->woken = false;
  }
  next_deadline_ns_ = EarliestDeadlineNs();
}

void Scheduler::CollectReady() {
  ready_.clear();
  for (const auto& task : tasks_)
    if (task->state == Task::State::kReady) ready_.push_back(task.get());
  const auto first_held = std::stable_partition(
      ready_.begin(), ready_.end(), [&](const Task* task) { return task->held_until <= points_; });
  if (first_held != ready_.begin()) ready_.erase(first_held, ready_.end());
}

void Scheduler::MaybeStall() {
  if (next_deadline_ns_ == kNever || next_deadline_ns_ - now_ns_ > kStallNsMax) return;
  if (!random_.OneIn(16)) return;
  now_ns_ = std::max(now_ns_, next_deadline_ns_);
}

Task& Scheduler::NextByPriority() {
  return **std::max_element(ready_.begin(), ready_.end(), [](const Task* one, const Task* other) {
    return one->priority < other->priority;
  });
}

// The task that runs next: one that is ready; if none is, time passes until a task is ready.
// `last_choice` runs next only if no other task is ready.
Task& Scheduler::Next(const Task* last_choice) {
  MaybeStall();
  PassTime();
  CollectReady();
  while (ready_.empty()) {
    next_deadline_ns_ = EarliestDeadlineNs();
    if (next_deadline_ns_ == kNever) Fail("deadlock: no thread can run");
    now_ns_ = std::max(now_ns_, next_deadline_ns_);
    PassTime();
    CollectReady();
  }
  is_stale_ = false;
  if (by_priority_) return NextByPriority();
  if (ready_.size() > 1)
    ready_.erase(std::remove(ready_.begin(), ready_.end(), last_choice), ready_.end());
  return *ready_[random_.Below(ready_.size())];
}

void Scheduler::PassTurnTo(Task& next) {
  Task& self = *current;
  Note(points_ << 8 ^ next.number);
  if (&next == &self) return;
  ++switches_;
  GiveTurn(next);
  AwaitTurn(self);
  Bury();
}

void Scheduler::Count(int64_t ns) {
  now_ns_ += ns;
  if (now_ns_ >= next_deadline_ns_) is_stale_ = true;
  if (++points_ > kPointsMax) Fail("livelock: the run takes more points than any should");
}

void Scheduler::Point() {
  Count(kPointNs);
  if (by_priority_) {
    if (!changes_.empty() && points_ >= changes_.back()) {
      changes_.pop_back();
      Lower(*current);
    }
    if (is_stale_) PassTurnTo(Next());
  } else if (points_left_-- == 0) {
    points_left_ = random_.Below(2 * patience_);
    PassTurnTo(Next());
  }
}

void Scheduler::Yield() {
  Count(kYieldNs);
  Lower(*current);
  PassTurnTo(Next(current));
}

void Scheduler::Hesitate() {
  Count(kPointNs);
  if (random_.OneIn(8)) {
    Lower(*current);
    current->held_until = points_ + random_.Below(kHeldPointsMax);
    PassTurnTo(Next(current));
  }
}

bool Scheduler::Block(const char* what, const void* object, int64_t deadline_ns) {
  Task& self = *current;
  ++points_;
  if (deadline_ns <= now_ns_) return false;
  self.state = Task::State::kBlocked;
  self.what = what;
  self.object = object;
  self.deadline_ns = deadline_ns;
  next_deadline_ns_ = std::min(next_deadline_ns_, deadline_ns);
  PassTurnTo(Next());
  self.object = nullptr;
  return self.woken;
}

uint32_t Scheduler::Wake(const void* object, uint32_t count) {
  std::vector<Task*> blocked;
  for (const auto& task : tasks_)
    if (task->state == Task::State::kBlocked && task->object == object)
      blocked.push_back(task.get());
  random_.Shuffle(blocked);
  if (blocked.size() > count) blocked.resize(count);
  for (Task* task : blocked) {
    task->state = Task::State::kReady;
    task->woken = true;
    is_stale_ = true;
  }
  return static_cast<uint32_t>(blocked.size());
}

void Scheduler::End() {
  Task& self = *current;
  self.state = Task::State::kEnded;
  Wake(&self, UINT32_MAX);
  if (&self == tasks_[0].get()) {  // RunSchedule goes on
    current = nullptr;
    return;
  }
  Task& next = Next();
  Note(points_ << 8 ^ next.number);
  ++switches_;
  last_ended_ = &self;
  current = nullptr;
  GiveTurn(next);
}

// The C library's work at the end of a thread must not run at the same time as the next task.
void Scheduler::Bury() {
  if (Task* const task = std::exchange(last_ended_, nullptr); task != nullptr)
    Real().join(task->thread, nullptr);
}

void Scheduler::AwaitOthers() {
  if (leaves_threads_) return;
  for (size_t i = 1; i < tasks_.size(); ++i)
    while (tasks_[i]->state != Task::State::kEnded) Block("the end of", tasks_[i].get(), kNever);
}

Summary Scheduler::summary() const { return {points_, switches_, next_number_, trace_}; }

// ------------------------------------------------------------------------------------- failures --

void Scheduler::Print(const Task& task) const {
  const char* const mark = &task == current ? "  <- running" : "";
  if (task.state == Task::State::kBlocked) {
    std::fprintf(stderr, "  thread %u waits for %s %p", task.number, task.what, task.object);
    if (task.deadline_ns != kNever)
      std::fprintf(stderr, " until %" PRId64 " ns", task.deadline_ns - kStartNs);
    std::fprintf(stderr, "\n");
  } else {
    std::fprintf(stderr, "  thread %u is ready%s\n", task.number, mark);
  }
  for (size_t i = task.callers.size(); i > 0; --i) {
    const std::string name = NameOf(task.callers[i - 1]);
    if (name != "?" && name.find("std::__") == std::string::npos)
      std::fprintf(stderr, "      in %s\n", name.c_str());
  }
}

void Scheduler::Fail(const std::string& text) {
  std::fprintf(stderr,
               "\nSchedule %" PRIu64 " of HYBRIDOPT_TEST_SEED=%" PRIu64
               " failed: %s\n"
               "%s, %" PRIu64 " points, %" PRIu64 " switches, %" PRId64 " ns since the start\n",
               seed_, TestSeed(), text.c_str(), by_priority_ ? "By priority" : "Any task next",
               points_, switches_, now_ns_ - kStartNs);
  for (const auto& task : tasks_)
    if (task->state != Task::State::kEnded) Print(*task);
  std::fflush(nullptr);
  current = nullptr;  // the rest is not a part of the run
  if (on_failure != nullptr) on_failure();
  std::fflush(nullptr);
  _exit(1);
}

// All threads of a run take turns, which is quickest on one CPU.
class OneCpu {
 public:
  OneCpu() {
    CPU_ZERO(&before_);
    if (sched_getaffinity(0, sizeof(before_), &before_) != 0) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof(one), &one);
  }
  ~OneCpu() { sched_setaffinity(0, sizeof(before_), &before_); }

 private:
  cpu_set_t before_;
};

}  // namespace

Summary RunSchedule(uint64_t seed, FunctionRef<void()> body) {
  const OneCpu one_cpu;
  scheduler = std::make_unique<Scheduler>(seed);
  const auto run = [](void* first) -> void* {
    (*static_cast<FunctionRef<void()>*>(first))();
    scheduler->AwaitOthers();
    CheckDeleted();
    return nullptr;
  };
  // On a thread of its own: where its stack lies does not depend on the environment.
  Task* const first = NewTask(run, &body);
  if (StartThread(first, nullptr) != 0) scheduler->Fail("the first thread does not start");
  GiveTurn(*first);
  Real().join(first->thread, nullptr);
  return scheduler->summary();
}

void Fail(const std::string& text) { scheduler->Fail(text); }
void LeaveThreads() { scheduler->LeaveThreads(); }
void OnFailure(void (*function)()) { on_failure = function; }

bool IsTask() { return current != nullptr; }
void Point() { scheduler->Point(); }
void Yield() { scheduler->Yield(); }
void Hesitate() { scheduler->Hesitate(); }
bool Block(const char* what, const void* object, int64_t deadline_ns) {
  return scheduler->Block(what, object, deadline_ns);
}
uint32_t Wake(const void* object, uint32_t count) { return scheduler->Wake(object, count); }
bool Whim() { return scheduler->Draw(32) == 0; }
uint64_t Draw(uint64_t bound) { return scheduler->Draw(bound); }
int64_t NowNs() { return scheduler->NowNs(); }
uint32_t TaskNumber() { return current->number; }
void Enter(void* caller) { current->callers.push_back(caller); }
void Leave() {
  if (!current->callers.empty()) current->callers.pop_back();
}

Task* NewTask(void* (*body)(void*), void* argument) { return scheduler->Add(body, argument); }
void DropTask(Task* task) { scheduler->Remove(task); }

int StartThread(Task* task, const pthread_attr_t* attributes) {
  const auto run = [](void* started) -> void* {
    Task& self = *static_cast<Task*>(started);
    AwaitTurn(self);
    scheduler->Bury();
    self.result = self.body(self.argument);
    scheduler->End();
    return nullptr;
  };
  return Real().create(&task->thread, attributes, run, task);
}

void* Join(Task* task) {
  while (task->state != Task::State::kEnded) Block("the end of", task, kNever);
  return task->result;
}

}  // namespace hybridopt::schedule
