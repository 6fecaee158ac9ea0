#include "checkpoint/block_writer.h"

#include <cstring>
#include <utility>

#include "base/check.h"

namespace hybridopt::checkpoint {

BlockWriter::BlockWriter(File& file, std::byte* memory, uint32_t blocks, uint64_t block_bytes,
                         FunctionRef<void(uint64_t)> wrote)
    : file_(file), memory_(memory), blocks_(blocks), block_bytes_(block_bytes), wrote_(wrote) {
  for (uint32_t block = blocks; block-- > 0;) free_.push_back(block);
}

BlockWriter::~BlockWriter() { Stop(); }

Status BlockWriter::Start() {
  threads_.reserve(blocks_);  // so that an exception cannot lose a thread that runs
  return system::StartThreads<&BlockWriter::Loop>("hybridopt/write", this, blocks_, &threads_);
}

void BlockWriter::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    waiting_.clear();
  }
  changed_.notify_all();
  threads_.clear();  // joins the threads
}

Result<std::byte*> BlockWriter::Next() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return !free_.empty() || !failure_.ok(); });
  if (!failure_.ok()) return failure_;
  return At(free_.back());
}

void BlockWriter::Submit(uint64_t bytes) {
  HYBRIDOPT_CHECK(bytes > 0 && bytes <= block_bytes_ && offset_ % block_bytes_ == 0);
  {
    std::lock_guard lock(mutex_);
    waiting_.push_back({free_.back(), offset_, bytes});
    free_.pop_back();
  }
  offset_ += bytes;
  changed_.notify_all();
}

Status BlockWriter::Finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return (waiting_.empty() && writing_ == 0) || !failure_.ok(); });
  return failure_;
}

void BlockWriter::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return !waiting_.empty() || stopping_; });
    if (waiting_.empty()) return;
    const Piece piece = waiting_.front();
    waiting_.pop_front();
    writing_ += 1;
    lock.unlock();
    Status status = CatchExceptions("writing a block", [&] { return WriteOne(piece); });
    lock.lock();
    writing_ -= 1;
    free_.insert(free_.begin(), piece.block);  // at the front: Next may have returned the last one
    if (status.ok()) {
      bytes_written_ += piece.bytes;
      status = CatchExceptions("the progress function", [&]() -> Status {
        wrote_(bytes_written_);
        return {};
      });
    }
    if (!status.ok() && failure_.ok()) {
      failure_ = std::move(status);
      waiting_.clear();
    }
    changed_.notify_all();
  }
}

Status BlockWriter::WriteOne(const Piece& piece) {
  std::byte* const data = At(piece.block);
  const uint64_t whole_bytes = RoundUpToDirect(piece.bytes);
  std::memset(data + piece.bytes, 0, whole_bytes - piece.bytes);
  return file_.Write(data, whole_bytes, piece.offset);
}

}  // namespace hybridopt::checkpoint
