#include "checkpoint/open_files.h"

#include <algorithm>

namespace hybridopt::checkpoint {
namespace {

constexpr size_t kOpenMax = 64;  // io_depth allows at most this number of reads at once

}  // namespace

Result<std::shared_ptr<File>> OpenFiles::Get(uint32_t file) {
  std::lock_guard lock(mutex_);
  const auto found =
      std::find_if(open_.begin(), open_.end(), [&](const auto& one) { return one.first == file; });
  if (found != open_.end()) {
    std::rotate(found, found + 1, open_.end());
    return open_.back().second;
  }
  if (open_.size() == kOpenMax) open_.erase(open_.begin());
  Result<File> opened = reader_.OpenFile(file);
  if (!opened.ok()) {
    // If the process cannot open more files, close some of these.
    if (open_.empty()) return opened.status();
    open_.clear();
    HYBRIDOPT_ASSIGN(File again, reader_.OpenFile(file));
    open_.emplace_back(file, std::make_shared<File>(std::move(again)));
  } else {
    open_.emplace_back(file, std::make_shared<File>(std::move(opened.value())));
  }
  return open_.back().second;
}

}  // namespace hybridopt::checkpoint
