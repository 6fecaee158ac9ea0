// OpenFiles: opens the files of a checkpoint when they are read. Only some of them stay open: a
// checkpoint has one file for each rank that saved it, and a process can often open only about a
// thousand.
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
  explicit OpenFiles(const Reader& reader) : reader_(reader) {}  // `reader` must outlive it

  // Any thread may call this. A file stays open at least as long as a caller holds the pointer.
  Result<std::shared_ptr<File>> Get(uint32_t file);

 private:
  const Reader& reader_;
  std::mutex mutex_;
  std::vector<std::pair<uint32_t, std::shared_ptr<File>>> open_;  // the last used file is last
};

}  // namespace hybridopt::checkpoint
