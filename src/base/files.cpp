// The file system's calls on Linux.
#include "base/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <mutex>
#include <system_error>
#include <vector>

namespace hybridopt::system {
namespace {

// Returns the result of a system call, or -errno if the call failed.
template <typename Number>
Number OrErrno(Number returned) {
  return returned < 0 ? static_cast<Number>(-errno) : returned;
}

int FlagsOf(Files::Open how) {
  switch (how) {
    case Files::Open::kRead:
      return O_RDONLY | O_NONBLOCK;  // without O_NONBLOCK open() of a pipe waits for a writer
    case Files::Open::kReadDirect:
      return O_RDONLY | O_NONBLOCK | O_DIRECT;
    case Files::Open::kCreate:
      return O_WRONLY | O_CREAT | O_EXCL;
    case Files::Open::kCreateDirect:
      return O_WRONLY | O_CREAT | O_EXCL | O_DIRECT;
    case Files::Open::kScratch:
      return O_RDWR;
    case Files::Open::kScratchDirect:
      return O_RDWR | O_DIRECT;
    case Files::Open::kDirectory:
      return O_RDONLY | O_DIRECTORY;
    case Files::Open::kOwnDirectory:
      return O_RDONLY | O_DIRECTORY | O_NOFOLLOW;
  }
  return O_RDONLY;
}

// The files that may have a lock, and those without a name. A lock, and the room of a file without
// a name, live as long as any process has the file open. A forked child inherits its parent's open
// files, so it would keep both after the parent has died: the child closes them.
class OwnFiles {
 public:
  static OwnFiles& Instance() { return instance_; }

  // Opens a file that no forked child inherits; -errno on failure.
  int Open(const char* path, int flags) {
    for (;;) {
      const uint64_t forks = forks_;
      MakeRoom();
      const int file = open(path, flags, 0600);
      if (file < 0) return -errno;
      {
        std::lock_guard lock(mutex_);
        open_.push_back(file);
        if (forks == forks_) return file;
      }
      Close(file);  // the process forked between the two calls
    }
  }
  int Close(int file) {
    {
      std::lock_guard lock(mutex_);
      if (std::erase(open_, file) > 0) return OrErrno(close(file));
    }
    return OrErrno(close(file));  // without the mutex, because close() may take long
  }

 private:
  // Makes room for one more file, before it is opened, because this may throw and every open file
  // must be listed.
  void MakeRoom() {
    std::lock_guard lock(mutex_);
    open_.reserve(open_.size() + 1);
  }
  OwnFiles() {
    (void)pthread_atfork(
        [] {
          Instance().mutex_.lock();
          Instance().forks_ += 1;
        },
        [] { Instance().mutex_.unlock(); },
        [] {
          for (const int file : Instance().open_) close(file);
          Instance().open_.clear();
          Instance().mutex_.unlock();
        });
  }

  // Made when the library is loaded: File::~File comes here, where there may be no memory and
  // nothing may throw. It is never destroyed, because threads may still use it at exit.
  static OwnFiles& instance_;

  std::mutex mutex_;  // held while the process forks
  std::vector<int> open_;
  std::atomic<uint64_t> forks_ = 0;
};

OwnFiles& OwnFiles::instance_ = *new OwnFiles;

// A file system may have no files without a name. Then the file loses its name at once.
int OpenScratch(const std::string& directory, int flags) {
  const int file = OwnFiles::Instance().Open(directory.c_str(), flags | O_TMPFILE | O_EXCL);
  if (file != -EOPNOTSUPP && file != -EISDIR) return file;
  const std::string path = directory + "/hybridopt-" + std::to_string(RandomBits());
  const int named = OwnFiles::Instance().Open(path.c_str(), flags | O_CREAT | O_EXCL);
  if (named >= 0) (void)unlink(path.c_str());
  return named;
}

// Reads the names in the directory and closes it, also if there is no memory for them.
int ReadNames(DIR* directory, std::vector<std::string>* names) {
  const std::unique_ptr<DIR, int (*)(DIR*)> closed(directory, closedir);
  names->clear();
  errno = 0;
  while (const dirent* entry = readdir(directory)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names->push_back(name);
  }
  return -errno;
}

}  // namespace

int Files::OpenFile(const std::string& path, Open how) {
  const int flags = FlagsOf(how) | O_CLOEXEC;
  if (how == Open::kOwnDirectory) return OwnFiles::Instance().Open(path.c_str(), flags);
  if (how == Open::kScratch || how == Open::kScratchDirect) return OpenScratch(path, flags);
  return OrErrno(open(path.c_str(), flags, 0666));
}

int Files::Close(int file) { return OwnFiles::Instance().Close(file); }

int64_t Files::Size(int file) {
  struct stat status;
  if (fstat(file, &status) < 0) return -errno;
  if (S_ISDIR(status.st_mode)) return -EISDIR;
  return S_ISREG(status.st_mode) ? static_cast<int64_t>(status.st_size) : -ESPIPE;
}

int64_t Files::Read(int file, void* data, uint64_t bytes, uint64_t offset) {
  return OrErrno(static_cast<int64_t>(pread(file, data, bytes, static_cast<off_t>(offset))));
}

int64_t Files::Write(int file, const void* data, uint64_t bytes, uint64_t offset) {
  return OrErrno(static_cast<int64_t>(pwrite(file, data, bytes, static_cast<off_t>(offset))));
}

int Files::Allocate(int file, uint64_t bytes) {
  return OrErrno(fallocate(file, 0, 0, static_cast<off_t>(bytes)));
}

int Files::Truncate(int file, uint64_t bytes) {
  return OrErrno(ftruncate(file, static_cast<off_t>(bytes)));
}

int Files::Sync(int file) { return OrErrno(fsync(file)); }

int Files::UseCache(int file) {
  const int flags = fcntl(file, F_GETFL);
  return flags < 0 ? -errno : OrErrno(fcntl(file, F_SETFL, flags & ~O_DIRECT));
}

int Files::Lock(int file) { return OrErrno(flock(file, LOCK_EX | LOCK_NB)); }
int Files::Unlock(int file) { return OrErrno(flock(file, LOCK_UN)); }

int Files::WorkingDirectory(std::string* path) {
  char text[PATH_MAX];
  if (getcwd(text, sizeof(text)) == nullptr) return -errno;
  *path = text;
  return 0;
}

int Files::Look(const std::string& path) {
  struct stat status;
  return OrErrno(lstat(path.c_str(), &status));
}

int64_t Files::Identity(int file) {
  struct stat status;
  return fstat(file, &status) < 0 ? -errno : static_cast<int64_t>(status.st_ino & INT64_MAX);
}

int64_t Files::IdentityOf(const std::string& path) {
  struct stat status;
  return lstat(path.c_str(), &status) < 0 ? -errno
                                          : static_cast<int64_t>(status.st_ino & INT64_MAX);
}

int Files::MakeDirectory(const std::string& path) { return OrErrno(mkdir(path.c_str(), 0777)); }

int Files::List(const std::string& path, std::vector<std::string>* names) {
  DIR* const directory = opendir(path.c_str());
  return directory == nullptr ? -errno : ReadNames(directory, names);
}

int Files::ListOpen(int directory, std::vector<std::string>* names) {
  // The directory is opened again, because an open directory keeps its read position.
  const int file = openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) return -errno;
  if (DIR* const opened = fdopendir(file); opened != nullptr) return ReadNames(opened, names);
  const int error = errno;
  close(file);
  return -error;
}

// Uses the system call, because not every C library has the function.
int Files::RenameNoReplace(const std::string& from, const std::string& to) {
  constexpr unsigned kNoReplace = 1;
  return OrErrno(static_cast<int>(
      syscall(SYS_renameat2, AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), kNoReplace)));
}

int Files::Rename(const std::string& from, const std::string& to) {
  return OrErrno(std::rename(from.c_str(), to.c_str()));
}

int Files::Remove(const std::string& path) { return OrErrno(unlink(path.c_str())); }
int Files::RemoveIn(int directory, const std::string& name) {
  return OrErrno(unlinkat(directory, name.c_str(), 0));
}
int Files::RemoveDirectory(const std::string& path) { return OrErrno(rmdir(path.c_str())); }

Files& SystemFiles() {
  static Files files;
  return files;
}

std::string ErrorText(int error) { return std::generic_category().message(error); }

uint64_t RandomBits() {
  uint64_t bits = 0;
  // The system may refuse; then the clock and the process id are used.
  if (getrandom(&bits, sizeof(bits), GRND_NONBLOCK) == sizeof(bits)) return bits;
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return static_cast<uint64_t>(now.tv_nsec) * 0x9e3779b97f4a7c15 ^
         static_cast<uint64_t>(getpid()) << 32 ^ static_cast<uint64_t>(now.tv_sec);
}

}  // namespace hybridopt::system
