/* Preloaded into the tool: no directory can be synced, files are synced as ever. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

__attribute__((visibility("default"))) int fsync(int file) {
  struct stat status;
  if (fstat(file, &status) != 0 || !S_ISDIR(status.st_mode)) return (int)syscall(SYS_fsync, file);
  errno = EIO;
  return -1;
}
