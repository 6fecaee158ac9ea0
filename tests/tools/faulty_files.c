/* Preloaded into the tool, to do what disks do. HYBRIDOPT_TEST_FAULT says what:
 *
 *   sync     no directory can be synced; files are synced as ever
 *   read:N   the N-th read of a file gives other bytes than are there
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char* fault(void) {
  const char* what = getenv("HYBRIDOPT_TEST_FAULT");
  return what != NULL ? what : "";
}

__attribute__((visibility("default"))) int fsync(int file) {
  struct stat status;
  if (strcmp(fault(), "sync") != 0 || fstat(file, &status) != 0 || !S_ISDIR(status.st_mode))
    return (int)syscall(SYS_fsync, file);
  errno = EIO;
  return -1;
}

__attribute__((visibility("default"))) ssize_t pread(int file, void* data, size_t bytes,
                                                     off_t offset) {
  static long reads;
  const long call = __atomic_add_fetch(&reads, 1, __ATOMIC_RELAXED);
  const ssize_t got = syscall(SYS_pread64, file, data, bytes, offset);
  if (strncmp(fault(), "read:", 5) == 0 && call == atol(fault() + 5))
    for (ssize_t i = 0; i < got; ++i) ((unsigned char*)data)[i] ^= 1;
  return got;
}
