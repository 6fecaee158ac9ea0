// Scheduler: controls time and threads in a test program. While `RunSchedule` runs, one thread at a
// time runs, and the scheduler chooses it. The calling thread, and all threads that are started
// meanwhile, are its tasks. Clocks advance only when the scheduler advances them. All choices come
// from one seed, so the same seed gives the same run, byte for byte of the caller's memory.
//
//   heap.cpp      notices accesses to objects that have been deleted
//   libc.cpp      puts the scheduler behind mutexes, condition variables, futexes, sleeps, clocks
//   accesses.cpp  puts it behind every atomic operation of the code that is compiled for it
//
// Each of these calls is a point at which another task may go on. Between two points a task runs
// alone, so the scheduler explores sequentially consistent orders; the thread sanitizer covers
// orders that only a weaker memory model allows.
//
// A run ends the process, after a report on stderr that names the seed, if
//   - no task can run and no deadline is left (deadlock),
//   - it takes more than kPointsMax points (livelock: some tasks wait for each other by looking),
//   - a thread is left that does not end when the body has returned (a deadlock of that thread),
//     unless the body has said LeaveThreads.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <string>

#include "base/function_ref.h"

namespace hybridopt::schedule {

constexpr uint64_t kPointsMax = 5'000'000;

struct Summary {
  uint64_t points = 0;    // places where another task could have gone on
  uint64_t switches = 0;  // places where another task did go on
  uint64_t tasks = 0;
  uint64_t trace = 0;  // a hash of every choice: two runs with the same trace were the same
};

// Runs `body` as the first task. `seed` decides all choices, beside HYBRIDOPT_TEST_SEED.
Summary RunSchedule(uint64_t seed, FunctionRef<void()> body);

// For the body and the threads that it starts: ends the run as a failure, with this text.
[[noreturn]] void Fail(const std::string& text);

// For the body: threads that are waiting when the body returns may wait for ever.
void LeaveThreads();

// A failure calls this function after its report, before it ends the process. May be NULL.
void OnFailure(void (*function)());

// -------------------------------------- for libc.cpp and accesses.cpp: the operations of a task --

constexpr int64_t kNever = INT64_MAX;

// Whether the calling thread is a task. If it is not, the functions below must not be called.
bool IsTask();
// A point at which another task may go on.
void Point();
// Another task goes on here if one can.
void Yield();
// As Point, between a check and the action that follows it. Sometimes all other tasks run for long
// here, because a lost wake-up needs that.
void Hesitate();
// Stops this task until another one wakes `object`, or until the deadline. `what` is for the
// report. False: the deadline has passed.
bool Block(const char* what, const void* object, int64_t deadline_ns);
// Wakes up to `count` of the tasks that are blocked at `object`. Returns how many.
uint32_t Wake(const void* object, uint32_t count);
// Sometimes true: then operations that may fail or end without a cause do so.
bool Whim();
// A random number of this run, below `bound`.
uint64_t Draw(uint64_t bound);
int64_t NowNs();
uint32_t TaskNumber();
// The functions in which this task is, for the report. `caller` is an address in the caller of
// each.
void Enter(void* caller);
void Leave();

// Ends the run if an object that a task has deleted was written after that.
void CheckDeleted();

struct Task;
Task* NewTask(void* (*body)(void*), void* argument);
// As pthread_create does; the thread runs when the task's turn comes.
int StartThread(Task* task, const pthread_attr_t* attributes);
void DropTask(Task* task);  // no thread has been started for it
// Blocks until the task has ended; returns the result of its body.
void* Join(Task* task);

}  // namespace hybridopt::schedule
