#include "stream_file.h"

#include <algorithm>
#include <cstring>

namespace tool {

using namespace hybridopt::checkpoint;  // NOLINT: the tool is about checkpoints
using hybridopt::Arena;
using hybridopt::Result;
using hybridopt::Status;

namespace {

constexpr uint64_t kBlockBytes = uint64_t{2} << 20;
constexpr uint32_t kBlocks = 4;

}  // namespace

StreamFile::StreamFile(File file, Arena memory, uint64_t bytes)
    : file_(std::move(file)),
      memory_(std::move(memory)),
      bytes_(bytes),
      writer_(file_, memory_.data(), kBlocks, kBlockBytes, wrote_) {}

Result<std::unique_ptr<StreamFile>> StreamFile::Create(const std::string& path, uint64_t bytes) {
  HYBRIDOPT_ASSIGN(Arena memory, Arena::Map(kBlocks * kBlockBytes));
  HYBRIDOPT_ASSIGN(File file, File::Create(hybridopt::system::SystemFiles(), path));
  HYBRIDOPT_TRY(file.Allocate(bytes));
  std::unique_ptr<StreamFile> stream(new StreamFile(std::move(file), std::move(memory), bytes));
  HYBRIDOPT_TRY(stream->writer_.Start());
  return stream;
}

Status StreamFile::Append(const void* data, uint64_t bytes) {
  const auto* next = static_cast<const std::byte*>(data);
  while (bytes > 0) {
    if (block_ == nullptr) {
      HYBRIDOPT_ASSIGN(block_, writer_.Next());
    }
    const uint64_t now = std::min(bytes, kBlockBytes - filled_);
    std::memcpy(block_ + filled_, next, now);
    filled_ += now;
    next += now;
    bytes -= now;
    if (filled_ < kBlockBytes) continue;
    writer_.Submit(filled_);
    block_ = nullptr;
    filled_ = 0;
  }
  return {};
}

Status StreamFile::Finish() {
  if (filled_ > 0) writer_.Submit(filled_);
  HYBRIDOPT_TRY(writer_.Finish());
  HYBRIDOPT_TRY(file_.Truncate(bytes_));
  HYBRIDOPT_TRY(file_.Sync());
  return file_.Close();
}

}  // namespace tool
