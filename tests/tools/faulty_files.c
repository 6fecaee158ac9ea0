/* Preloaded into the tool, to do what disks and memory do. HYBRIDOPT_TEST_FAULT says what:
 *
 *   sync     no directory can be synced; files are synced as usual
 *   read:N   the N-th read of a file gives other bytes than are there
 *   fail:N:E the N-th of all calls below but malloc() fails with errno E
 *   memory:N the N-th call of malloc() fails, counted from the first of the other calls
 *   hang     no write of a file ends
 *
 * HYBRIDOPT_TEST_CALLS names a file that is told at the end how many calls there were, and how many
 * of malloc().
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static const char* fault(void) {
  const char* what = getenv("HYBRIDOPT_TEST_FAULT");
  return what != NULL ? what : "";
}

static long calls, allocations;

static int fails(void) {
  const long call = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
  long failing = 0;
  int error = 0;
  if (sscanf(fault(), "fail:%ld:%d", &failing, &error) != 2 || call != failing) return 0;
  errno = error;
  return 1;
}

__attribute__((destructor)) static void tell_calls(void) {
  const char* path = getenv("HYBRIDOPT_TEST_CALLS");
  FILE* file = path != NULL ? fopen(path, "w") : NULL;
  if (file == NULL) return;
  fprintf(file, "%ld %ld", calls, allocations);
  fclose(file);
}

// Sanitizers have an allocator of their own.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
void* __libc_malloc(size_t bytes);

__attribute__((visibility("default"))) void* malloc(size_t bytes) {
  if (__atomic_load_n(&calls, __ATOMIC_RELAXED) > 0) {
    const long call = __atomic_add_fetch(&allocations, 1, __ATOMIC_RELAXED);
    if (strncmp(fault(), "memory:", 7) == 0 && call == atol(fault() + 7)) {
      errno = ENOMEM;
      return NULL;
    }
  }
  return __libc_malloc(bytes);
}
#endif

__attribute__((visibility("default"))) int open(const char* path, int flags, ...) {
  va_list arguments;
  va_start(arguments, flags);
  const unsigned mode = (flags & O_CREAT) != 0 ? va_arg(arguments, unsigned) : 0;
  va_end(arguments);
  return fails() ? -1 : (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);
}

__attribute__((visibility("default"))) ssize_t pwrite(int file, const void* data, size_t bytes,
                                                      off_t offset) {
  while (strcmp(fault(), "hang") == 0) pause();
  return fails() ? -1 : syscall(SYS_pwrite64, file, data, bytes, offset);
}

__attribute__((visibility("default"))) int fallocate(int file, int mode, off_t offset,
                                                     off_t bytes) {
  return fails() ? -1 : (int)syscall(SYS_fallocate, file, mode, offset, bytes);
}

__attribute__((visibility("default"))) int ftruncate(int file, off_t bytes) {
  return fails() ? -1 : (int)syscall(SYS_ftruncate, file, bytes);
}

__attribute__((visibility("default"))) int mkdir(const char* path, mode_t mode) {
  return fails() ? -1 : (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode);
}

__attribute__((visibility("default"))) int unlinkat(int directory, const char* path, int flags) {
  return fails() ? -1 : (int)syscall(SYS_unlinkat, directory, path, flags);
}

__attribute__((visibility("default"))) int rmdir(const char* path) {
  return fails() ? -1 : (int)syscall(SYS_unlinkat, AT_FDCWD, path, AT_REMOVEDIR);
}

__attribute__((visibility("default"))) int flock(int file, int operation) {
  return fails() ? -1 : (int)syscall(SYS_flock, file, operation);
}

__attribute__((visibility("default"))) DIR* opendir(const char* path) {
  if (fails()) return NULL;
  const int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  return file < 0 ? NULL : fdopendir(file);
}

__attribute__((visibility("default"))) int fsync(int file) {
  struct stat status;
  if (fails()) return -1;
  if (strcmp(fault(), "sync") != 0 || fstat(file, &status) != 0 || !S_ISDIR(status.st_mode))
    return (int)syscall(SYS_fsync, file);
  errno = EIO;
  return -1;
}

__attribute__((visibility("default"))) ssize_t pread(int file, void* data, size_t bytes,
                                                     off_t offset) {
  static long reads;
  const long call = __atomic_add_fetch(&reads, 1, __ATOMIC_RELAXED);
  if (fails()) return -1;
  const ssize_t got = syscall(SYS_pread64, file, data, bytes, offset);
  if (strncmp(fault(), "read:", 5) == 0 && call == atol(fault() + 5))
    for (ssize_t i = 0; i < got; ++i) ((unsigned char*)data)[i] ^= 1;
  return got;
}
