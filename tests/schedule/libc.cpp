// The C library's functions for threads and time, with the scheduler behind them. An executable's
// definitions have precedence over those of all libraries, so std::mutex, std::thread,
// std::atomic::wait and the rest of C++ come here too. For threads that are no tasks these
// functions do what they always do. A mutex that a task holds is marked in the fields that the C
// library uses, so that both agree when the run ends.
#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>

#include <cstdarg>
#include <cstring>

#include "real.h"
#include "scheduler.h"

namespace hybridopt::schedule {
namespace {

constexpr int64_t kSecondNs = 1'000'000'000;
constexpr int64_t kRealTimeOffsetNs = 1'700'000'000 * kSecondNs;

template <typename Function>
void Find(const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

RealFunctions FindAll() {
  RealFunctions real{};
  Find("pthread_create", real.create);
  Find("pthread_join", real.join);
  Find("pthread_detach", real.detach);
  Find("pthread_mutex_lock", real.mutex_lock);
  Find("pthread_mutex_trylock", real.mutex_trylock);
  Find("pthread_mutex_unlock", real.mutex_unlock);
  Find("pthread_cond_wait", real.cond_wait);
  Find("pthread_cond_timedwait", real.cond_timedwait);
  Find("pthread_cond_clockwait", real.cond_clockwait);
  Find("pthread_cond_signal", real.cond_signal);
  Find("pthread_cond_broadcast", real.cond_broadcast);
  Find("pthread_cond_destroy", real.cond_destroy);
  Find("pthread_rwlock_rdlock", real.rwlock_rdlock);
  Find("pthread_rwlock_wrlock", real.rwlock_wrlock);
  Find("pthread_rwlock_unlock", real.rwlock_unlock);
  Find("pthread_once", real.once);
  Find("sched_yield", real.yield);
  Find("sched_setaffinity", real.setaffinity);
  Find("sched_getaffinity", real.getaffinity);
  Find("clock_gettime", real.gettime);
  Find("clock_nanosleep", real.clock_sleep);
  Find("nanosleep", real.sleep);
  Find("syscall", real.syscall);
  Find("getrandom", real.getrandom);
  return real;
}

int64_t InNs(const timespec& time) { return time.tv_sec * kSecondNs + time.tv_nsec; }

// Translates a deadline to the scheduler's time.
int64_t DeadlineNs(clockid_t clock, const timespec& time) {
  return InNs(time) - (clock == CLOCK_REALTIME ? kRealTimeOffsetNs : 0);
}

// ---------------------------------------------------------------------------------------- mutex --

bool IsHeldByThisTask(const pthread_mutex_t* mutex) {
  return mutex->__data.__lock != 0 && mutex->__data.__owner == static_cast<int>(TaskNumber() + 1);
}

void Take(pthread_mutex_t* mutex) {
  mutex->__data.__lock = 1;
  mutex->__data.__owner = static_cast<int>(TaskNumber() + 1);
}

// True: it is held once more.
bool TakeAgain(pthread_mutex_t* mutex) {
  if (!IsHeldByThisTask(mutex) || (mutex->__data.__kind & 3) != PTHREAD_MUTEX_RECURSIVE)
    return false;
  ++mutex->__data.__count;
  return true;
}

void Lock(pthread_mutex_t* mutex) {
  while (mutex->__data.__lock != 0) Block("mutex", mutex, kNever);
  Take(mutex);
}

void Unlock(pthread_mutex_t* mutex) {
  if (!IsHeldByThisTask(mutex)) Fail("a thread unlocks a mutex that it does not hold");
  mutex->__data.__lock = 0;
  mutex->__data.__owner = 0;
  Wake(mutex, 1);
}

// -------------------------------------------------------------------------- condition variables --

int Wait(pthread_cond_t* condition, pthread_mutex_t* mutex, int64_t deadline_ns) {
  Hesitate();
  Unlock(mutex);
  bool woken = true;
  if (Whim())
    Yield();
  else
    woken = Block("condition variable", condition, deadline_ns);
  Lock(mutex);
  return woken ? 0 : ETIMEDOUT;
}

// -------------------------------------------------------------------------------------- futexes --

long Failed(int error) {
  errno = error;
  return -1;
}

long WaitAt(const uint32_t* word, uint32_t value, int64_t deadline_ns) {
  Hesitate();
  if (__atomic_load_n(word, __ATOMIC_SEQ_CST) != value) return Failed(EAGAIN);
  if (Whim()) return Failed(EINTR);
  return Block("word", word, deadline_ns) ? 0 : Failed(ETIMEDOUT);
}

long Futex(const uint32_t* word, int operation, uint32_t value, const timespec* timeout) {
  switch (operation & FUTEX_CMD_MASK) {
    case FUTEX_WAIT:
      return WaitAt(word, value, timeout == nullptr ? kNever : NowNs() + InNs(*timeout));
    case FUTEX_WAIT_BITSET: {
      const clockid_t clock =
          (operation & FUTEX_CLOCK_REALTIME) != 0 ? CLOCK_REALTIME : CLOCK_MONOTONIC;
      return WaitAt(word, value, timeout == nullptr ? kNever : DeadlineNs(clock, *timeout));
    }
    case FUTEX_WAKE:
    case FUTEX_WAKE_BITSET: {
      Point();
      return Wake(word, value);
    }
    default:
      Fail("a futex operation that the scheduler does not know");
  }
}

// -------------------------------------------------------------------------------------- threads --

// The program's handle of a thread. The thread itself is joined when it ends, and its number may
// then be reused.
static_assert(sizeof(pthread_t) == sizeof(Task*));
Task* TaskOf(pthread_t thread) { return reinterpret_cast<Task*>(thread); }

int Sleep(int64_t deadline_ns) {
  Point();
  Block("time", nullptr, deadline_ns);
  return 0;
}

}  // namespace

const RealFunctions& Real() {
  static const RealFunctions real = FindAll();
  return real;
}

}  // namespace hybridopt::schedule

using namespace hybridopt::schedule;

#pragma GCC visibility push(default)
extern "C" {

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes, void* (*body)(void*),
                   void* argument) {
  if (!IsTask()) return Real().create(thread, attributes, body, argument);
  Task* const task = NewTask(body, argument);
  const int error = StartThread(task, attributes);
  if (error != 0) {
    DropTask(task);
    return error;
  }
  *thread = reinterpret_cast<pthread_t>(task);
  Point();
  return 0;
}

int pthread_join(pthread_t thread, void** result) {
  if (!IsTask()) return Real().join(thread, result);
  Point();
  void* const value = Join(TaskOf(thread));
  if (result != nullptr) *result = value;
  return 0;
}

int pthread_detach(pthread_t thread) { return IsTask() ? 0 : Real().detach(thread); }

int pthread_mutex_lock(pthread_mutex_t* mutex) noexcept {
  if (!IsTask()) return Real().mutex_lock(mutex);
  Point();
  if (!TakeAgain(mutex)) Lock(mutex);
  return 0;
}

int pthread_mutex_trylock(pthread_mutex_t* mutex) noexcept {
  if (!IsTask()) return Real().mutex_trylock(mutex);
  Point();
  if (TakeAgain(mutex)) return 0;
  if (mutex->__data.__lock != 0) return EBUSY;
  Take(mutex);
  return 0;
}

int pthread_mutex_unlock(pthread_mutex_t* mutex) noexcept {
  if (!IsTask()) return Real().mutex_unlock(mutex);
  if (mutex->__data.__count > 0) {
    --mutex->__data.__count;
    return 0;
  }
  Unlock(mutex);
  Point();
  return 0;
}

int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  if (!IsTask()) return Real().cond_wait(condition, mutex);
  return Wait(condition, mutex, kNever);
}

int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                           const timespec* time) {
  if (!IsTask()) return Real().cond_timedwait(condition, mutex, time);
  return Wait(condition, mutex, DeadlineNs(CLOCK_REALTIME, *time));
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* time) {
  if (!IsTask()) return Real().cond_clockwait(condition, mutex, clock, time);
  return Wait(condition, mutex, DeadlineNs(clock, *time));
}

int pthread_cond_signal(pthread_cond_t* condition) noexcept {
  if (!IsTask()) return Real().cond_signal(condition);
  Point();
  Wake(condition, 1);
  return 0;
}

int pthread_cond_broadcast(pthread_cond_t* condition) noexcept {
  if (!IsTask()) return Real().cond_broadcast(condition);
  Point();
  Wake(condition, UINT32_MAX);
  return 0;
}

// The C library's function would wait for the waiters that it knows; it knows no tasks.
int pthread_cond_destroy(pthread_cond_t* condition) noexcept {
  return IsTask() ? 0 : Real().cond_destroy(condition);
}

int pthread_rwlock_rdlock(pthread_rwlock_t* lock) noexcept {
  if (!IsTask()) return Real().rwlock_rdlock(lock);
  Point();
  while (lock->__data.__cur_writer != 0) Block("lock", lock, kNever);
  ++lock->__data.__readers;
  return 0;
}

int pthread_rwlock_wrlock(pthread_rwlock_t* lock) noexcept {
  if (!IsTask()) return Real().rwlock_wrlock(lock);
  Point();
  while (lock->__data.__cur_writer != 0 || lock->__data.__readers != 0) Block("lock", lock, kNever);
  lock->__data.__cur_writer = static_cast<int>(TaskNumber() + 1);
  return 0;
}

int pthread_rwlock_unlock(pthread_rwlock_t* lock) noexcept {
  if (!IsTask()) return Real().rwlock_unlock(lock);
  if (lock->__data.__cur_writer != 0)
    lock->__data.__cur_writer = 0;
  else
    --lock->__data.__readers;
  Wake(lock, UINT32_MAX);
  Point();
  return 0;
}

int pthread_once(pthread_once_t* once, void (*function)()) {
  if (!IsTask()) return Real().once(once, function);
  constexpr int kRuns = 1, kDone = 2;  // as the C library has it
  Point();
  while (*once == kRuns) Block("once", once, kNever);
  if (*once == kDone) return 0;
  *once = kRuns;
  function();
  *once = kDone;
  Wake(once, UINT32_MAX);
  return 0;
}

int sched_yield() noexcept {
  if (!IsTask()) return Real().yield();
  Yield();
  return 0;
}

// A run stays on its CPU even if the library asks for another, and the library sees the same two
// CPUs on every machine.
int sched_setaffinity(pid_t thread, size_t bytes, const cpu_set_t* cpus) noexcept {
  return IsTask() ? 0 : Real().setaffinity(thread, bytes, cpus);
}

int sched_getaffinity(pid_t thread, size_t bytes, cpu_set_t* cpus) noexcept {
  if (!IsTask()) return Real().getaffinity(thread, bytes, cpus);
  std::memset(cpus, 0, bytes);
  *reinterpret_cast<unsigned char*>(cpus) = 3;
  return 0;
}

int clock_gettime(clockid_t clock, timespec* time) noexcept {
  if (!IsTask()) return Real().gettime(clock, time);
  Point();
  const int64_t now_ns = NowNs() + (clock == CLOCK_REALTIME ? kRealTimeOffsetNs : 0);
  *time = {now_ns / kSecondNs, now_ns % kSecondNs};
  return 0;
}

int clock_nanosleep(clockid_t clock, int flags, const timespec* time, timespec* left) {
  if (!IsTask()) return Real().clock_sleep(clock, flags, time, left);
  return Sleep((flags & TIMER_ABSTIME) != 0 ? DeadlineNs(clock, *time) : NowNs() + InNs(*time));
}

int nanosleep(const timespec* time, timespec* left) {
  if (!IsTask()) return Real().sleep(time, left);
  return Sleep(NowNs() + InNs(*time));
}

ssize_t getrandom(void* data, size_t bytes, unsigned flags) {
  if (!IsTask()) return Real().getrandom(data, bytes, flags);
  for (size_t i = 0; i < bytes; ++i)
    static_cast<unsigned char*>(data)[i] = static_cast<unsigned char>(Draw(256));
  return static_cast<ssize_t>(bytes);
}

long syscall(long number, ...) noexcept {
  va_list arguments;
  va_start(arguments, number);
  long argument[6];
  for (long& value : argument) value = va_arg(arguments, long);
  va_end(arguments);
  if (!IsTask() || number != SYS_futex)
    return Real().syscall(number, argument[0], argument[1], argument[2], argument[3], argument[4],
                          argument[5]);
  return Futex(reinterpret_cast<const uint32_t*>(argument[0]), static_cast<int>(argument[1]),
               static_cast<uint32_t>(argument[2]), reinterpret_cast<const timespec*>(argument[3]));
}

}  // extern "C"
#pragma GCC visibility pop
