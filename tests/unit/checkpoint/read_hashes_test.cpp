// A second pass over files finds every bit that differs from the first pass.
#include "checkpoint/read_hashes.h"

#include <gtest/gtest.h>

#include <vector>

namespace hybridopt::checkpoint {
namespace {

TEST(ReadHashes, KnowBytesThatChangedFromThoseThatDidNot) {
  std::vector<std::byte> bytes(1000);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = std::byte(i * 7);
  ReadHashes hashes(100);
  const uint64_t last = hashes.Add(0, 4096, bytes.data(), 250);
  EXPECT_EQ(hashes.Add(0, 8192, bytes.data() + 200, 50), last);  // of the last unit
  hashes.Add(2, 0, bytes.data(), 1000);
  EXPECT_TRUE(hashes.Match(0, 4096, bytes.data(), 250));
  EXPECT_TRUE(hashes.Match(0, 4196, bytes.data() + 100, 150));  // from a unit in the middle on
  EXPECT_TRUE(hashes.Match(2, 300, bytes.data() + 300, 400));
  for (size_t i = 0; i < 250; ++i) {
    bytes[i] ^= std::byte{1};
    EXPECT_FALSE(hashes.Match(0, 4096, bytes.data(), 250)) << i;
    EXPECT_EQ(hashes.Match(0, 4296, bytes.data() + 200, 50), i < 200) << i;
    bytes[i] ^= std::byte{1};
  }
}

}  // namespace
}  // namespace hybridopt::checkpoint
