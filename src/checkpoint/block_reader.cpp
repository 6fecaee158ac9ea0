#include "checkpoint/block_reader.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace hybridopt::checkpoint {

BlockReader::BlockReader(Open open, std::span<const Extent> extents, std::byte* memory,
                         uint32_t blocks, uint64_t extent_bytes)
    : open_(std::move(open)),
      extents_(extents),
      memory_(memory),
      blocks_(blocks),
      block_bytes_(BlockBytes(extent_bytes)),
      done_(blocks),
      outcomes_(blocks) {}

BlockReader::~BlockReader() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  threads_.clear();  // joins the threads
}

Status BlockReader::Start() {
  const uint64_t count = std::min<uint64_t>(blocks_, extents_.size());
  threads_.reserve(count);  // so that an exception cannot lose a thread that runs
  return system::StartThreads<&BlockReader::Loop>("hybridopt/read", this, count, &threads_);
}

Result<const std::byte*> BlockReader::Next() {
  std::unique_lock lock(mutex_);
  HYBRIDOPT_CHECK(given_ < extents_.size());
  if (given_ > 0) done_[(given_ - 1) % blocks_] = false;
  const uint64_t index = given_++;
  changed_.notify_all();
  changed_.wait(lock, [&] { return done_[index % blocks_]; });
  if (!outcomes_[index % blocks_].ok()) return outcomes_[index % blocks_];
  return BlockOf(index) + extents_[index].offset % kDirectAlignment;
}

void BlockReader::Loop() {
  std::unique_lock lock(mutex_);
  while (true) {
    // Extent n is read into the block of extent n - blocks_. That block is free once Next has
    // returned a later extent.
    changed_.wait(lock, [&] {
      return stopping_ || next_to_read_ == extents_.size() ||
             next_to_read_ < std::max<uint64_t>(given_, 1) - 1 + blocks_;
    });
    if (stopping_ || next_to_read_ == extents_.size()) return;
    const uint64_t index = next_to_read_++;
    lock.unlock();
    Status status = CatchExceptions("reading a block", [&] { return ReadOne(index); });
    lock.lock();
    outcomes_[index % blocks_] = std::move(status);
    done_[index % blocks_] = true;
    changed_.notify_all();
  }
}

Status BlockReader::ReadOne(uint64_t index) {
  const Extent& extent = extents_[index];
  const uint64_t begin = extent.offset / kDirectAlignment * kDirectAlignment;
  const uint64_t bytes = RoundUpToDirect(extent.offset + extent.bytes) - begin;
  HYBRIDOPT_CHECK(bytes <= block_bytes_);
  HYBRIDOPT_ASSIGN(const std::shared_ptr<File> file, open_(extent.file));
  HYBRIDOPT_ASSIGN(const uint64_t read, file->Read(BlockOf(index), bytes, begin));
  if (begin + read >= extent.offset + extent.bytes) return {};
  return Status::Error(OFFLOAD_CHECKPOINT_CORRUPT,
                       "'%.500s' ends at byte %llu, but state reaches to byte %llu",
                       file->path().c_str(), static_cast<unsigned long long>(begin + read),
                       static_cast<unsigned long long>(extent.offset + extent.bytes));
}

}  // namespace hybridopt::checkpoint
