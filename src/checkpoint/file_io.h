// One file of a checkpoint, written or read in large blocks that bypass the page cache if the file
// system allows it, and files of text. Short reads, short writes and interrupted calls are
// continued; every other failure is IO_FAILED with the path and the system's error.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/files.h"
#include "base/status.h"
#include "base/system.h"

namespace hybridopt::checkpoint {

// Reads and writes that bypass the page cache start and end at multiples of this number, in memory
// and in the file.
inline constexpr uint64_t kDirectAlignment = 4096;

constexpr uint64_t RoundUpToDirect(uint64_t bytes) {
  return system::RoundUp(bytes, kDirectAlignment);
}

class File {
 public:
  static Result<File> Create(system::Files& files, std::string path);  // must not exist
  static Result<File> Open(system::Files& files, std::string path);    // opens for reading
  // A file without a name in this directory, for reading and writing; path() is the directory.
  static Result<File> Scratch(system::Files& files, std::string directory);
  ~File();  // closes the file
  File(File&& other) noexcept { *this = std::move(other); }
  File& operator=(File&& other) noexcept;

  const std::string& path() const { return path_; }
  bool is_direct() const { return direct_; }  // it bypasses the page cache
  Result<uint64_t> Size();

  // Reserves space on disk, if the file system can do that.
  Status Allocate(uint64_t bytes);
  // Writes all bytes; they are aligned to kDirectAlignment. Different threads may write different
  // ranges.
  Status Write(const std::byte* data, uint64_t bytes, uint64_t offset);
  Status Truncate(uint64_t bytes);
  // A failed sync is never repeated: the system may have dropped the data that it could not write.
  Status Sync();
  Status Close();

  // Reads all bytes, or only those before the end of the file, and returns their number. The
  // alignment is that of writes.
  Result<uint64_t> Read(std::byte* data, uint64_t bytes, uint64_t offset);

 private:
  File(system::Files& files, std::string path, int file, bool direct)
      : files_(&files), path_(std::move(path)), file_(file), direct_(direct) {}
  static Result<File> Open(system::Files& files, std::string path, system::Files::Open direct,
                           system::Files::Open cached, const char* what);
  // Whether a call that was made with `direct` must be repeated through the page cache; if so,
  // switches the file to the page cache.
  bool GoThroughCache(int64_t error, bool direct);

  system::Files* files_ = nullptr;
  std::string path_;
  int file_ = -1;
  std::atomic<bool> direct_ = false;
};

// A new file for text, written from its beginning to its end, through the page cache.
class TextFile {
 public:
  TextFile(system::Files& files, std::string path) : files_(files), path_(std::move(path)) {}
  ~TextFile();  // closes the file
  TextFile(const TextFile&) = delete;
  TextFile& operator=(const TextFile&) = delete;

  Status Create();  // the path must not exist; the first call
  Status Append(const std::string& text);
  Status Finish();  // syncs and closes; the last call

 private:
  system::Files& files_;
  const std::string path_;
  int file_ = -1;
  uint64_t written_ = 0;
};

// Writes, syncs and closes a whole small file.
Status WriteSmallFile(system::Files& files, const std::string& path, const std::string& text);
// CHECKPOINT_CORRUPT if the file has more than bytes_max.
Result<std::string> ReadSmallFile(system::Files& files, const std::string& path,
                                  uint64_t bytes_max);

Status SyncDirectory(system::Files& files, const std::string& path);

// IO_FAILED with a text that names the call, the path and the error.
Status IoError(const char* what, const std::string& path, int64_t error);

// Repeats a call that a signal has interrupted, for a bounded number of times.
template <typename Call>
auto Uninterrupted(Call&& call) {
  auto result = call();
  for (int tries = 0; result == -EINTR && tries < 100; ++tries) result = call();
  return result;
}

}  // namespace hybridopt::checkpoint
