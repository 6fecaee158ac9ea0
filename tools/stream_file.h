// StreamFile: a new file written from front to end, around the page cache where that goes.
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
  // Takes room for `bytes` at once; the caller must append exactly these.
  static hybridopt::Result<std::unique_ptr<StreamFile>> Create(const std::string& path,
                                                               uint64_t bytes);
  hybridopt::Status Append(const void* data, uint64_t bytes);
  // All is on disk afterwards.
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
