// OpenFiles: the files of a checkpoint, opened when they are read. Not all of them stay open: a
// checkpoint has one per rank that saved it, and a process may open some thousand.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "checkpoint/reader.h"

namespace hybridopt::checkpoint {

class OpenFiles {
 public:
  explicit OpenFiles(const Reader& reader) : reader_(reader) {}  // which outlives it

  // Any thread. A file stays open at least for as long as somebody has it.
  Result<std::shared_ptr<File>> Get(uint32_t file);

 private:
  const Reader& reader_;
  std::mutex mutex_;
  std::vector<std::pair<uint32_t, std::shared_ptr<File>>> open_;  // what was used last stands last
};

}  // namespace hybridopt::checkpoint
