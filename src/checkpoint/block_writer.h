// BlockWriter: fills a file from front to end through a fixed number of blocks of memory. The
// caller fills one block while threads write the others.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "base/function_ref.h"
#include "base/status.h"
#include "base/system.h"
#include "checkpoint/file_io.h"

namespace hybridopt::checkpoint {

class BlockWriter {
 public:
  // `memory` holds `blocks` of `block_bytes`, a multiple of kDirectAlignment, and is aligned to it.
  // One thread at a time calls `wrote` with the bytes that have been written so far.
  BlockWriter(File& file, std::byte* memory, uint32_t blocks, uint64_t block_bytes,
              FunctionRef<void(uint64_t bytes)> wrote);
  ~BlockWriter();  // drops blocks that have not been written
  BlockWriter(const BlockWriter&) = delete;
  BlockWriter& operator=(const BlockWriter&) = delete;

  Status Start();
  // Waits for a free block and returns it: the next one to fill. Next or Finish returns the failure
  // of a write.
  Result<std::byte*> Next();
  // Hands over the block that Next returned, to be written; only the last block may be shorter than
  // the others.
  void Submit(uint64_t bytes);
  // Returns when all blocks have been written. The file then ends at a multiple of
  // kDirectAlignment.
  Status Finish();

 private:
  struct Piece {
    uint32_t block;
    uint64_t offset;
    uint64_t bytes;
  };
  void Loop();
  Status WriteOne(const Piece& piece);
  void Stop();
  std::byte* At(uint32_t block) const { return memory_ + block * block_bytes_; }

  File& file_;
  std::byte* const memory_;
  const uint32_t blocks_;
  const uint64_t block_bytes_;
  const FunctionRef<void(uint64_t)> wrote_;
  std::vector<system::Thread> threads_;
  uint64_t offset_ = 0;  // of the next block

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<uint32_t> free_;  // guarded by mutex_, as all below
  std::deque<Piece> waiting_;
  uint32_t writing_ = 0;
  uint64_t bytes_written_ = 0;
  bool stopping_ = false;
  Status failure_;
};

}  // namespace hybridopt::checkpoint
