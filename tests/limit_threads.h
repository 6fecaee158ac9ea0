// A process that the system gives no more threads.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

namespace hybridopt {

// Leaves this process room for `threads` more threads. The system counts threads by user, and
// root's not at all, so the process becomes `user`: one that no other process is.
inline bool LimitThreads(rlim_t threads, uid_t user) {
  if (geteuid() == 0 && setresuid(user, user, user) != 0) return false;
  rlimit limit;
  getrlimit(RLIMIT_NPROC, &limit);
  limit.rlim_cur = geteuid() == user ? 1 + threads : 1;
  return setrlimit(RLIMIT_NPROC, &limit) == 0;
}

}  // namespace hybridopt
