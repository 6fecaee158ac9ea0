// Reader: a checkpoint's directory, opened and checked: the manifest is whole, and every shard file
// has the size and the head that the manifest says.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/files.h"
#include "base/function_ref.h"
#include "base/status.h"
#include "checkpoint/file_io.h"
#include "checkpoint/format/format.h"
#include "checkpoint/read_hashes.h"

namespace hybridopt::checkpoint {

// A block of an array whose bytes differ from those that were written.
struct Damage {
  std::string param;
  int32_t kind;
  uint32_t rank;
  std::string file;
  uint64_t block;  // counts from 0
  uint64_t block_count;
  uint64_t begin;  // bytes in the file
  uint64_t end;
};

struct VerifyResult {
  uint64_t bytes = 0;
  uint64_t damaged_blocks = 0;
  std::vector<Damage> damages;  // the first kDamagesMax of them

  // OK, or CHECKPOINT_CORRUPT with a text that names the first damaged blocks.
  Status status() const;
};
inline constexpr size_t kDamagesMax = 1000;
inline constexpr uint64_t kReadBytesMax = uint64_t{8} << 20;  // of one read, for every block size
inline constexpr uint32_t kIoDepth = 4;
inline constexpr uint32_t kIoDepthMax = 64;

class Reader {
 public:
  // Reads the manifest and all heads. Errors name the file: IO_FAILED, CHECKPOINT_CORRUPT,
  // UNSUPPORTED (of a newer release).
  static Result<Reader> Open(system::Files& files, std::string path);

  const std::string& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  std::string FilePath(uint32_t file) const { return path_ + "/" + manifest_.files[file].name; }
  uint64_t bytes() const;  // of all arrays

  Result<File> OpenFile(uint32_t file) const { return File::Open(*files_, FilePath(file)); }

  // Reads every block through `io_depth` buffers (1 to 64; 0 means 4) and compares every hash;
  // continues after damage. INVALID_ARGUMENT for a bad io_depth, IO_FAILED if a file cannot be
  // read. `read`, unless it is NULL, gets hashes of the bytes that were read of each array; its
  // units must divide kReadBytesMax.
  Result<VerifyResult> Verify(uint32_t io_depth,
                              FunctionRef<void(uint64_t done, uint64_t total)> progress,
                              ReadHashes* read = nullptr) const;

  // "block 2 of layer.exp_avg (bytes 8192 to 12288)"; bytes count from the start of the file.
  std::string BlockText(const StoredParam& param, const StoredTensor& tensor, uint64_t block) const;
  // CHECKPOINT_CORRUPT: the array was good when it was verified, but its bytes at offset `at` have
  // changed since then.
  Status ChangedSinceVerified(const StoredParam& param, const StoredTensor& tensor,
                              uint64_t at) const;

 private:
  Reader(system::Files& files, std::string path, Manifest manifest)
      : files_(&files), path_(std::move(path)), manifest_(std::move(manifest)) {}
  Status CheckHead(uint32_t file, const Head& expected) const;

  system::Files* files_;
  std::string path_;
  Manifest manifest_;
};

// The paths of the directories in `directory` that have a manifest, sorted by name. Directories of
// unfinished saves are left out.
Result<std::vector<std::string>> CheckpointsIn(system::Files& files, const std::string& directory);

// The path of the checkpoint with the highest step for which Open and `check` return OK; among
// equal steps, the last by name. Checkpoints are tried in that order. INVALID_STATE if there is
// none.
Result<std::string> NewestCheckpoint(system::Files& files, const std::string& directory,
                                     FunctionRef<Status(const std::string& path)> check);

}  // namespace hybridopt::checkpoint
