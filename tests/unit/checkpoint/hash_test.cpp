#include "checkpoint/format/hash.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../../random.h"
#include "../../scale.h"

namespace hybridopt::checkpoint {
namespace {

// Values that the algorithm's own specification program gives.
TEST(HashTest, IsXxh3) {
  EXPECT_EQ(Xxh3(""), 0x2d06800538d394c2u);
  EXPECT_EQ(Xxh3("a"), 0xe6c632b61e964e1fu);
  EXPECT_EQ(Xxh3(std::string(1000, 'x')), 0xc0a4877b962cba82u);
}

TEST(BlockHasherTest, GivesTheHashOfEachBlockHoweverTheBytesCome) {
  Random random(5);
  BlockHasher hasher(4096);
  for (int round = 0; round < Scaled(500); ++round) {
    std::string bytes(random.Below(5 * 4096), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random.Next());
    if (random.OneIn(4)) bytes.resize(bytes.size() / 4096 * 4096);
    std::vector<uint64_t> expected;
    for (size_t at = 0; at < bytes.size(); at += 4096)
      expected.push_back(Xxh3(std::string_view(bytes).substr(at, 4096)));
    hasher.Reset(bytes.size());
    for (size_t at = 0; at < bytes.size();) {
      const size_t now = std::min<size_t>(bytes.size() - at, 1 + random.Below(6000));
      hasher.Add(bytes.data() + at, now);
      at += now;
    }
    ASSERT_EQ(hasher.Take(), expected);
    ASSERT_EQ(expected.size(), BlockCount(bytes.size(), 4096));
  }
}

TEST(BlockHasherDeathTest, BytesThatWereNotAnnouncedAreABug) {
  BlockHasher hasher(4096);
  hasher.Reset(3);
  EXPECT_DEATH(hasher.Add("abcd", 4), "broken invariant");
  EXPECT_DEATH((void)hasher.Take(), "broken invariant");
}

}  // namespace
}  // namespace hybridopt::checkpoint
