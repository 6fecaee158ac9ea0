// StreamFile: a new file that is written from its beginning to its end, with direct I/O where the
// file system supports it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "checkpoint/block_writer.h"
#include "checkpoint/file_io.h"
#include "memory/arena.h"

namespace tool {

class StreamFile {
 public:
  // Reserves `bytes` on the disk; the caller must append exactly as many.
  static hybridopt::Result<std::unique_ptr<StreamFile>> Create(const std::string& path,
                                                               uint64_t bytes);
  hybridopt::Status Append(const void* data, uint64_t bytes);
  // Returns when all bytes are on disk.
  hybridopt::Status Finish();

 private:
  StreamFile(hybridopt::checkpoint::File file, hybridopt::Arena memory, uint64_t bytes);

  struct Wrote {
    void operator()(uint64_t) const {}
  };

  hybridopt::checkpoint::File file_;
  hybridopt::Arena memory_;
  const uint64_t bytes_;
  const Wrote wrote_{};
  hybridopt::checkpoint::BlockWriter writer_;
  std::byte* block_ = nullptr;  // being filled
  uint64_t filled_ = 0;
};

}  // namespace tool
