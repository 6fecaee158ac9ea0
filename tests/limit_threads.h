// Makes the system refuse further threads to this process.
#pragma once

#include <sys/resource.h>
#include <unistd.h>

namespace hybridopt {

// Allows this process `threads` more threads. The system counts threads by user, and does not count
// root's, so the process becomes `user`, which must have no other process.
inline bool LimitThreads(rlim_t threads, uid_t user) {
  if (geteuid() == 0 && setresuid(user, user, user) != 0) return false;
  rlimit limit;
  getrlimit(RLIMIT_NPROC, &limit);
  limit.rlim_cur = geteuid() == user ? 1 + threads : 1;
  return setrlimit(RLIMIT_NPROC, &limit) == 0;
}

}  // namespace hybridopt
