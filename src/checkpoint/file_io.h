// One file of a checkpoint, written or read in large blocks around the page cache where the file
// system has that, and the small files beside it. Short reads and writes and interrupted calls are
// gone on with; everything else is IO_FAILED with the path and the system's error.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/files.h"
#include "base/status.h"

namespace hybridopt::checkpoint {

// What goes around the page cache starts and ends at multiples of this, in memory and in the file.
inline constexpr uint64_t kDirectAlignment = 4096;

constexpr uint64_t RoundUpToDirect(uint64_t bytes) {
  return (bytes + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
}

class File {
 public:
  static Result<File> Create(prim::Files& files, std::string path);  // must not exist
  static Result<File> Open(prim::Files& files, std::string path);    // to be read
  ~File();                                                           // closes
  File(File&& other) noexcept { *this = std::move(other); }
  File& operator=(File&& other) noexcept;

  const std::string& path() const { return path_; }
  Result<uint64_t> Size();

  // Room on disk, where the file system can tell beforehand.
  Status Allocate(uint64_t bytes);
  // All of it; aligned as kDirectAlignment says. Different threads may write different parts.
  Status Write(const std::byte* data, uint64_t bytes, uint64_t offset);
  Status Truncate(uint64_t bytes);
  // Never tried again after a failure: the system may have dropped what it could not write.
  Status Sync();
  Status Close();

  // All of it, or what there is before the end of the file; gives the bytes read. Aligned likewise.
  Result<uint64_t> Read(std::byte* data, uint64_t bytes, uint64_t offset);

 private:
  File(prim::Files& files, std::string path, int file, bool direct)
      : files_(&files), path_(std::move(path)), file_(file), direct_(direct) {}
  static Result<File> Open(prim::Files& files, std::string path, prim::Files::Open direct,
                           prim::Files::Open cached, const char* what);
  // Whether the call, issued `direct`, is to be made again, through the page cache.
  bool GoThroughCache(int64_t error, bool direct);

  prim::Files* files_ = nullptr;
  std::string path_;
  int file_ = -1;
  std::atomic<bool> direct_ = false;
};

// A whole small file: written, synced and closed.
Status WriteSmallFile(prim::Files& files, const std::string& path, const std::string& text);
// CHECKPOINT_CORRUPT if it has more than bytes_max.
Result<std::string> ReadSmallFile(prim::Files& files, const std::string& path, uint64_t bytes_max);

Status SyncDirectory(prim::Files& files, const std::string& path);

// IO_FAILED with a text that names all three.
Status IoError(const char* what, const std::string& path, int64_t error);

// Calls again what a signal interrupted, but not for ever.
template <typename Call>
auto Uninterrupted(Call&& call) {
  auto result = call();
  for (int tries = 0; result == -EINTR && tries < 100; ++tries) result = call();
  return result;
}

}  // namespace hybridopt::checkpoint
