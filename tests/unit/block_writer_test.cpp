// Blocks end up in the file in the order they were submitted, whenever writes finish.
#include "checkpoint/block_writer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "fake_root.h"
#include "memory/arena.h"

namespace hybridopt::checkpoint {
namespace {

TEST(BlockWriterTest, ABlockThatIsFilledStaysTheCallersWhileOthersAreWritten) {
  const FakeRoot root;
  const std::string path = root.path() + "/file";
  constexpr uint64_t kBytes = 4096;
  constexpr int kBlocks = 200;
  Result<File> file = File::Create(prim::SystemFiles(), path);
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
      // Time for the writes under way to end and give their blocks back.
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

// A file system that takes O_DIRECT when a file is opened and refuses it when data comes: several
// calls at once, and more while the first of them ends direct access.
class RefusingFiles : public prim::Files {
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

}  // namespace
}  // namespace hybridopt::checkpoint
