// BlockReader: reads a list of extents in order through a fixed number of blocks of memory. Threads
// read ahead while the caller uses one block.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/status.h"
#include "base/system.h"
#include "checkpoint/file_io.h"

namespace hybridopt::checkpoint {

struct Extent {
  uint32_t file;    // the index that the reader's `open` gets
  uint64_t offset;  // any value
  uint64_t bytes;   // at most the reader's extent_bytes
};

class BlockReader {
 public:
  // Bytes of memory of one block, for extents of at most `extent_bytes`. A read begins and ends at
  // multiples of kDirectAlignment, so a block is larger than its extent.
  static constexpr uint64_t BlockBytes(uint64_t extent_bytes) {
    return RoundUpToDirect(extent_bytes) + kDirectAlignment;
  }

  // `memory` holds `blocks` of BlockBytes(extent_bytes) and is aligned to kDirectAlignment. The
  // extents must outlive the reader. `open` returns the file of an extent; any thread may call it.
  using Open = std::function<Result<std::shared_ptr<File>>(uint32_t file)>;
  BlockReader(Open open, std::span<const Extent> extents, std::byte* memory, uint32_t blocks,
              uint64_t extent_bytes);
  ~BlockReader();
  BlockReader(const BlockReader&) = delete;
  BlockReader& operator=(const BlockReader&) = delete;

  Status Start();
  // Returns the bytes of the next extent. The bytes that the last call returned may then be
  // overwritten. IO_FAILED, or CHECKPOINT_CORRUPT if a file ends too early. Must not be called more
  // often than there are extents.
  Result<const std::byte*> Next();

 private:
  void Loop();
  Status ReadOne(uint64_t index);
  std::byte* BlockOf(uint64_t index) const { return memory_ + index % blocks_ * block_bytes_; }

  const Open open_;
  const std::span<const Extent> extents_;
  std::byte* const memory_;
  const uint32_t blocks_;
  const uint64_t block_bytes_;
  std::vector<system::Thread> threads_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<bool> done_;  // per block: its extent has been read; guarded by mutex_, as all below
  std::vector<Status> outcomes_;  // per block
  uint64_t next_to_read_ = 0;
  uint64_t given_ = 0;  // extents that Next has returned
  bool stopping_ = false;
};

}  // namespace hybridopt::checkpoint
