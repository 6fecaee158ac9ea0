// Extents arrive in their order with their bytes, whatever the order in which reads finish, and no
// block is overwritten while the caller has it.
#include "checkpoint/block_reader.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "../../temporary_directory.h"
#include "memory/arena.h"

namespace hybridopt::checkpoint {
namespace {

constexpr uint64_t kFileBytes = 300'000;

char ByteAt(uint32_t file, uint64_t at) { return static_cast<char>(at / 7 + 13 * file + at); }

// Files whose reads at some offsets fail, or wait until other reads have ended.
class TestFiles : public system::Files {
 public:
  int64_t Read(int file, void* data, uint64_t bytes, uint64_t offset) override {
    {
      std::unique_lock lock(mutex_);
      begun += 1;
      ended_.wait(lock, [&] { return offset != held_offset || ended >= held_until; });
    }
    const bool fails = offset == failing_offset;
    const int64_t read = fails ? -EIO : Files::Read(file, data, bytes, offset);
    std::lock_guard lock(mutex_);
    ended += 1;
    ended_.notify_all();
    return read;
  }
  uint64_t held_offset = UINT64_MAX, failing_offset = UINT64_MAX;
  uint64_t held_until = 0;  // until this number of other reads has ended
  uint64_t begun = 0, ended = 0;

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
};

class BlockReaderTest : public testing::Test {
 protected:
  void SetUp() override {
    for (uint32_t file = 0; file < 2; ++file) {
      std::string bytes(kFileBytes, '\0');
      for (uint64_t at = 0; at < kFileBytes; ++at) bytes[at] = ByteAt(file, at);
      std::ofstream(Path(file), std::ios::binary) << bytes;
    }
  }
  std::string Path(uint32_t file) const { return root_ / std::to_string(file); }

  BlockReader::Open Opening() {
    return [this](uint32_t file) -> Result<std::shared_ptr<File>> {
      if (file > 1) return Status::Error(OFFLOAD_IO_FAILED, "there is no file %u", file);
      HYBRIDOPT_ASSIGN(File opened, File::Open(files_, Path(file)));
      return std::make_shared<File>(std::move(opened));
    };
  }
  std::byte* Memory(uint32_t blocks, uint64_t extent_bytes) {
    memory_ = std::move(Arena::Map(blocks * BlockReader::BlockBytes(extent_bytes)).value());
    return memory_.data();
  }
  static void ExpectBytes(const Result<const std::byte*>& data, const Extent& extent) {
    ASSERT_TRUE(data.ok()) << data.status().message();
    std::string expected(extent.bytes, '\0');
    for (uint64_t i = 0; i < extent.bytes; ++i)
      expected[i] = ByteAt(extent.file, extent.offset + i);
    EXPECT_EQ(std::memcmp(data.value(), expected.data(), extent.bytes), 0)
        << "file " << extent.file << ", offset " << extent.offset;
  }

  const TemporaryDirectory root_;
  TestFiles files_;
  Arena memory_;
};

TEST_F(BlockReaderTest, ExtentsOfAnyPlaceAndSizeComeInOrder) {
  std::vector<Extent> extents;
  for (uint64_t i = 0; i < 100; ++i)
    extents.push_back({static_cast<uint32_t>(i % 2), (i * 7919) % 250'000, 1 + (i * 977) % 20'000});
  extents.push_back({0, kFileBytes - 1, 1});
  extents.push_back({1, 0, 20'000});
  for (const uint32_t blocks : {1, 2, 5, 200}) {
    BlockReader reader(Opening(), extents, Memory(blocks, 20'000), blocks, 20'000);
    ASSERT_TRUE(reader.Start().ok());
    for (const Extent& extent : extents) ExpectBytes(reader.Next(), extent);
  }
}

// The first read ends last; the other reads have filled all other blocks by then.
TEST_F(BlockReaderTest, AReadThatTakesLongIsWaitedForAndOthersGoOnMeanwhile) {
  std::vector<Extent> extents;
  for (uint64_t i = 0; i < 8; ++i) extents.push_back({0, i * 4096, 4096});
  files_.held_offset = 0;
  files_.held_until = 3;
  BlockReader reader(Opening(), extents, Memory(4, 4096), 4, 4096);
  ASSERT_TRUE(reader.Start().ok());
  for (const Extent& extent : extents) ExpectBytes(reader.Next(), extent);
  EXPECT_EQ(files_.ended, 8u);
}

// The caller's block cannot be overwritten, because there are only as many reads as other blocks.
TEST_F(BlockReaderTest, ABlockStaysTheCallersUntilTheNextIsAskedFor) {
  std::vector<Extent> extents;
  for (uint64_t i = 0; i < 12; ++i) extents.push_back({0, i * 4096, 4096});
  class CountingFiles : public system::Files {
   public:
    int64_t Read(int file, void* data, uint64_t bytes, uint64_t offset) override {
      const uint64_t index = offset / 4096;
      if (index >= std::max<uint64_t>(asked, 1) - 1 + 3) early += 1;
      return Files::Read(file, data, bytes, offset);
    }
    std::atomic<uint64_t> asked = 0, early = 0;
  } counting;
  const auto opening = [&](uint32_t file) -> Result<std::shared_ptr<File>> {
    HYBRIDOPT_ASSIGN(File opened, File::Open(counting, Path(file)));
    return std::make_shared<File>(std::move(opened));
  };
  BlockReader reader(opening, extents, Memory(3, 4096), 3, 4096);
  ASSERT_TRUE(reader.Start().ok());
  for (const Extent& extent : extents) {
    counting.asked += 1;
    ExpectBytes(reader.Next(), extent);
  }
  EXPECT_EQ(counting.early, 0u);
}

TEST_F(BlockReaderTest, AFailureComesWithItsExtentAndTheOthersAllTheSame) {
  const std::vector<Extent> extents = {
      {0, 0, 4096}, {0, 8192, 100}, {1, kFileBytes - 50, 51}, {2, 4096, 1}, {0, 4096, 4096}};
  files_.failing_offset = 8192;
  BlockReader reader(Opening(), extents, Memory(2, 4096), 2, 4096);
  ASSERT_TRUE(reader.Start().ok());
  ExpectBytes(reader.Next(), extents[0]);
  Status status = reader.Next().status();
  EXPECT_EQ(status.code(), OFFLOAD_IO_FAILED);
  EXPECT_EQ(status.message(), "could not read '" + Path(0) +
                                  "': Input/output error (errno 5); look at the drive and at the "
                                  "connection to it (`dmesg` says more)");
  status = reader.Next().status();
  EXPECT_EQ(status.code(), OFFLOAD_CHECKPOINT_CORRUPT);
  EXPECT_EQ(status.message(),
            "'" + Path(1) + "' ends at byte 300000, but state reaches to byte 300001");
  status = reader.Next().status();
  EXPECT_EQ(status.message(), "there is no file 2");
  ExpectBytes(reader.Next(), extents[4]);
}

// It ends where a unit of the disk ends, so that the next read returns 0 bytes.
TEST_F(BlockReaderTest, AFileThatWasCutAtAUnitIsToldWithItsEnd) {
  std::filesystem::resize_file(Path(1), 8192);
  const std::vector<Extent> extents = {{1, 4096, 8192}};
  BlockReader reader(Opening(), extents, Memory(1, 8192), 1, 8192);
  ASSERT_TRUE(reader.Start().ok());
  const Status status = reader.Next().status();
  EXPECT_EQ(status.code(), OFFLOAD_CHECKPOINT_CORRUPT);
  EXPECT_EQ(status.message(),
            "'" + Path(1) + "' ends at byte 8192, but state reaches to byte 12288");
}

// The reading threads belong to the library: no other code catches their exceptions.
TEST_F(BlockReaderTest, AnExceptionIsAFailureOfItsExtent) {
  const std::vector<Extent> extents = {{0, 0, 4096}, {1, 0, 10}, {0, 4096, 10}};
  const BlockReader::Open good = Opening();
  const auto opening = [&](uint32_t file) -> Result<std::shared_ptr<File>> {
    if (file == 1) throw std::bad_alloc();
    return good(file);
  };
  BlockReader reader(opening, extents, Memory(2, 4096), 2, 4096);
  ASSERT_TRUE(reader.Start().ok());
  ExpectBytes(reader.Next(), extents[0]);
  const Status status = reader.Next().status();
  EXPECT_EQ(status.code(), OFFLOAD_OUT_OF_HOST_MEMORY);
  EXPECT_EQ(status.message(), "out of host memory for reading a block");
  ExpectBytes(reader.Next(), extents[2]);
}

TEST_F(BlockReaderTest, MayBeGivenUpAtAnyTimeAndHaveNothingToRead) {
  const std::vector<Extent> extents(50, {0, 0, 4096});
  for (int taken = 0; taken < 4; ++taken) {
    BlockReader reader(Opening(), extents, Memory(3, 4096), 3, 4096);
    ASSERT_TRUE(reader.Start().ok());
    for (int i = 0; i < taken; ++i) ExpectBytes(reader.Next(), extents[0]);
  }
  BlockReader idle(Opening(), {}, Memory(1, 4096), 1, 4096);
  EXPECT_TRUE(idle.Start().ok());
  EXPECT_EQ(files_.begun, files_.ended);
}

}  // namespace
}  // namespace hybridopt::checkpoint
