// Blocks get into the file in the order in which they were submitted, whatever the order in which
// writes finish.
#include "checkpoint/block_writer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <functional>
#include <iterator>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "../../fake_root.h"
#include "memory/arena.h"

namespace hybridopt::checkpoint {
namespace {

TEST(BlockWriterTest, ABlockThatIsFilledStaysTheCallersWhileOthersAreWritten) {
  const FakeRoot root;
  const std::string path = root.path() + "/file";
  constexpr uint64_t kBytes = 4096;
  constexpr int kBlocks = 200;
  Result<File> file = File::Create(system::SystemFiles(), path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  Result<Arena> memory = Arena::Map(3 * kBytes);
  uint64_t told = 0;
  const auto wrote = [&](uint64_t bytes) { told = bytes; };
  {
    BlockWriter writer(file.value(), memory.value().data(), 3, kBytes, wrote);
    ASSERT_TRUE(writer.Start().ok());
    for (int i = 0; i < kBlocks; ++i) {
      Result<std::byte*> block = writer.Next();
      ASSERT_TRUE(block.ok());
      // Gives the writes under way time to end and to give their blocks back.
      std::this_thread::sleep_for(std::chrono::microseconds(300));
      std::memset(block.value(), i, kBytes);
      writer.Submit(kBytes);
    }
    ASSERT_TRUE(writer.Finish().ok());
  }
  EXPECT_EQ(told, kBytes * kBlocks);
  std::ifstream in(path, std::ios::binary);
  const std::string content{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  ASSERT_EQ(content.size(), kBytes * kBlocks);
  for (int i = 0; i < kBlocks; ++i)
    ASSERT_EQ(content.substr(static_cast<size_t>(i) * kBytes, kBytes),
              std::string(kBytes, static_cast<char>(i)))
        << "block " << i;
}

// A disk that is full beyond some offset.
class FullFiles : public system::Files {
 public:
  explicit FullFiles(uint64_t bytes) : bytes_(bytes) {}
  int64_t Write(int file, const void* data, uint64_t bytes, uint64_t offset) override {
    return offset >= bytes_ ? -ENOSPC : Files::Write(file, data, bytes, offset);
  }

 private:
  const uint64_t bytes_;
};

TEST(BlockWriterTest, AWriteThatFailsIsToldByTheNextCallsAndNothingElseIsWritten) {
  const FakeRoot root;
  constexpr uint64_t kBytes = 4096;
  for (const uint32_t blocks : {1, 3}) {
    for (const uint64_t good : {0, 5}) {
      const std::string path =
          root.path() + "/" + std::to_string(blocks) + "-" + std::to_string(good);
      FullFiles files(good * kBytes);
      Result<File> file = File::Create(files, path);
      ASSERT_TRUE(file.ok()) << file.status().message();
      Result<Arena> memory = Arena::Map(blocks * kBytes);
      uint64_t told = 0;
      const auto wrote = [&](uint64_t bytes) { told = bytes; };
      {
        BlockWriter writer(file.value(), memory.value().data(), blocks, kBytes, wrote);
        ASSERT_TRUE(writer.Start().ok());
        Status status;
        for (uint64_t i = 0; status.ok() && i < good + blocks + 1; ++i) {
          Result<std::byte*> block = writer.Next();
          status = block.status();
          if (status.ok()) writer.Submit(kBytes);
        }
        // After the first failing piece there are more pieces than blocks, so Next must have
        // returned the failure.
        EXPECT_EQ(status.code(), OFFLOAD_IO_FAILED);
        EXPECT_EQ(status.message(),
                  "could not write '" + path +
                      "': No space left on device (errno 28); free space there, or "
                      "save somewhere else");
        EXPECT_EQ(writer.Finish().message(), status.message());
      }
      // Writes that began before the failed one may still report progress until the writer's
      // threads have ended.
      EXPECT_LE(told, good * kBytes);
    }
  }
}

// Submits one block, whose write must fail, and finishes once the write has `begun`.
Status WriteInVain(system::Files& files, const std::function<bool()>& begun) {
  const FakeRoot root;
  Result<File> file = File::Create(files, root.path() + "/file");
  EXPECT_TRUE(file.ok()) << file.status().message();
  Result<Arena> memory = Arena::Map(4096);
  const auto wrote = [](uint64_t) { FAIL() << "nothing was written"; };
  BlockWriter writer(file.value(), memory.value().data(), 1, 4096, wrote);
  EXPECT_TRUE(writer.Start().ok());
  EXPECT_TRUE(writer.Next().ok());
  writer.Submit(4096);
  while (!begun()) std::this_thread::yield();
  return writer.Finish();
}

// The writing threads belong to the library: no other code catches their exceptions.
TEST(BlockWriterTest, AnExceptionIsAFailureOfTheWriter) {
  class ThrowingFiles : public system::Files {
   public:
    int64_t Write(int, const void*, uint64_t, uint64_t) override { throw std::bad_alloc(); }
  } files;
  const Status status = WriteInVain(files, [] { return true; });
  EXPECT_EQ(status.code(), OFFLOAD_OUT_OF_HOST_MEMORY);
  EXPECT_EQ(status.message(), "out of host memory for writing a block");
}

TEST(BlockWriterTest, TheEndWaitsForAWriteThatRuns) {
  class SlowFiles : public system::Files {
   public:
    int64_t Write(int, const void*, uint64_t, uint64_t) override {
      begun = true;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      return -EIO;
    }
    std::atomic<bool> begun = false;
  } files;
  EXPECT_EQ(WriteInVain(files, [&] { return files.begun.load(); }).code(), OFFLOAD_IO_FAILED);
}

TEST(BlockWriterTest, TheLastBlockMayBeShortAndIsFilledUpWithZeros) {
  const FakeRoot root;
  const std::string path = root.path() + "/file";
  Result<File> file = File::Create(system::SystemFiles(), path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  Result<Arena> memory = Arena::Map(2 * 8192);
  std::memset(memory.value().data(), 0x55, 2 * 8192);
  uint64_t told = 0;
  const auto wrote = [&](uint64_t bytes) { told = bytes; };
  {
    BlockWriter writer(file.value(), memory.value().data(), 2, 8192, wrote);
    ASSERT_TRUE(writer.Start().ok());
    for (const uint64_t bytes : {8192, 8192, 4097}) {
      Result<std::byte*> block = writer.Next();
      ASSERT_TRUE(block.ok());
      std::memset(block.value(), 0x55, bytes);
      writer.Submit(bytes);
    }
    ASSERT_TRUE(writer.Finish().ok());
  }
  EXPECT_EQ(told, 2 * 8192u + 4097);
  std::ifstream in(path, std::ios::binary);
  const std::string content{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  EXPECT_EQ(content, std::string(2 * 8192 + 4097, 0x55) + std::string(4095, '\0'));
}

// Blocks that were submitted and not yet written are dropped, without a wait.
TEST(BlockWriterTest, MayBeGivenUpAtAnyTime) {
  const FakeRoot root;
  const std::string path = root.path() + "/file";
  Result<File> file = File::Create(system::SystemFiles(), path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  Result<Arena> memory = Arena::Map(4 * 4096);
  const auto wrote = [](uint64_t) {};
  for (int submitted = 0; submitted < 4; ++submitted) {
    BlockWriter writer(file.value(), memory.value().data(), 4, 4096, wrote);
    ASSERT_TRUE(writer.Start().ok());
    for (int i = 0; i < submitted; ++i) {
      ASSERT_TRUE(writer.Next().ok());
      writer.Submit(4096);
    }
    ASSERT_TRUE(writer.Next().ok());  // and one block is being filled
  }
}

// A file system that accepts O_DIRECT when a file is opened and refuses it at the first write:
// several calls at once, and more while the first of them ends direct access.
class RefusingFiles : public system::Files {
 public:
  int OpenFile(const std::string& path, Open how) override {
    return Files::OpenFile(path, how == Open::kCreateDirect ? Open::kCreate : how);
  }
  int64_t Write(int file, const void* data, uint64_t bytes, uint64_t offset) override {
    const bool refused = !cached_;
    calls_ += 1;
    for (int i = 0; refused && calls_ < 4 && i < 1000; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return refused ? -EINVAL : Files::Write(file, data, bytes, offset);
  }
  int UseCache(int) override {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    cached_ = true;
    return 0;
  }

 private:
  std::atomic<int> calls_ = 0;
  std::atomic<bool> cached_ = false;
};

TEST(FileTest, AllCallsThatWereRefusedAroundThePageCacheGoThroughIt) {
  const FakeRoot root;
  const std::string path = root.path() + "/file";
  constexpr uint64_t kBytes = 4096;
  constexpr int kThreads = 4;
  RefusingFiles files;
  Result<File> file = File::Create(files, path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  std::vector<Status> outcomes(kThreads);
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kThreads; ++i)
    threads.emplace_back([&, i] {
      const std::vector<std::byte> data(kBytes, std::byte{1});
      outcomes[i] = file.value().Write(data.data(), kBytes, i * kBytes);
    });
  for (std::thread& thread : threads) thread.join();
  for (const Status& outcome : outcomes) EXPECT_TRUE(outcome.ok()) << outcome.message();
  std::ifstream in(path, std::ios::binary);
  const std::string content{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  EXPECT_EQ(content, std::string(kBytes * kThreads, 1));
}

// A disk with direct access, which takes whole units at whole places only. The first call ends in
// the middle of a unit, as at a full quota or a signal.
class ShortFiles : public system::Files {
 public:
  int OpenFile(const std::string& path, Open how) override {
    return Files::OpenFile(path, how == Open::kCreateDirect ? Open::kCreate : how);
  }
  int64_t Write(int file, const void* data, uint64_t bytes, uint64_t offset) override {
    const uint64_t place = reinterpret_cast<uintptr_t>(data);
    unaligned_ += (place | bytes | offset) % kDirectAlignment != 0 ? 1 : 0;
    return Files::Write(file, data, calls_++ == 0 ? kDirectAlignment + 1000 : bytes, offset);
  }
  int unaligned() const { return unaligned_; }
  int calls() const { return calls_; }

 private:
  int unaligned_ = 0;
  int calls_ = 0;
};

TEST(FileTest, AWriteThatWasCutInsideAUnitGoesOnAtItsBegin) {
  const FakeRoot root;
  const std::string path = root.path() + "/file";
  constexpr uint64_t kBytes = 4 * kDirectAlignment;
  ShortFiles files;
  Result<File> file = File::Create(files, path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  Result<Arena> memory = Arena::Map(kBytes);
  ASSERT_TRUE(memory.ok()) << memory.status().message();
  for (uint64_t i = 0; i < kBytes; ++i) memory.value().data()[i] = static_cast<std::byte>(i * 7);
  const Status status = file.value().Write(memory.value().data(), kBytes, 0);
  EXPECT_TRUE(status.ok()) << status.message();
  EXPECT_EQ(files.calls(), 2);
  EXPECT_EQ(files.unaligned(), 0);
  std::ifstream in(path, std::ios::binary);
  const std::string content{std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
  ASSERT_EQ(content.size(), kBytes);
  EXPECT_EQ(std::memcmp(content.data(), memory.value().data(), kBytes), 0);
}

}  // namespace
}  // namespace hybridopt::checkpoint
