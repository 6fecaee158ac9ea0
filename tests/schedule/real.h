// The C library's own functions that libc.cpp replaces, for threads that are no tasks and for the
// scheduler itself.
#pragma once

#include <pthread.h>
#include <sched.h>
#include <time.h>

#include <cstddef>

namespace hybridopt::schedule {

struct RealFunctions {
  decltype(&pthread_create) create;
  decltype(&pthread_join) join;
  decltype(&pthread_detach) detach;
  decltype(&pthread_mutex_lock) mutex_lock;
  decltype(&pthread_mutex_trylock) mutex_trylock;
  decltype(&pthread_mutex_unlock) mutex_unlock;
  decltype(&pthread_cond_wait) cond_wait;
  decltype(&pthread_cond_timedwait) cond_timedwait;
  decltype(&pthread_cond_clockwait) cond_clockwait;
  decltype(&pthread_cond_signal) cond_signal;
  decltype(&pthread_cond_broadcast) cond_broadcast;
  decltype(&pthread_cond_destroy) cond_destroy;
  decltype(&pthread_rwlock_rdlock) rwlock_rdlock;
  decltype(&pthread_rwlock_wrlock) rwlock_wrlock;
  decltype(&pthread_rwlock_unlock) rwlock_unlock;
  decltype(&pthread_once) once;
  decltype(&sched_yield) yield;
  decltype(&sched_setaffinity) setaffinity;
  decltype(&sched_getaffinity) getaffinity;
  decltype(&clock_gettime) gettime;
  decltype(&clock_nanosleep) clock_sleep;
  decltype(&nanosleep) sleep;
  long (*syscall)(long number, ...);
  ptrdiff_t (*getrandom)(void* data, size_t bytes, unsigned flags);
};

const RealFunctions& Real();

}  // namespace hybridopt::schedule
