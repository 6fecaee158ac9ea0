// Blocks end up in the file in the order they were submitted, whenever writes finish.
#include "checkpoint/block_writer.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

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

}  // namespace
}  // namespace hybridopt::checkpoint
