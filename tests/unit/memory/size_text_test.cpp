// Sizes for people: the unit fits the number.
#include "memory/size_text.h"

#include <gtest/gtest.h>

namespace hybridopt {
namespace {

TEST(SizeTextTest, ChoosesTheUnitThatFits) {
  EXPECT_EQ(SizeText(0), "0 B");
  EXPECT_EQ(SizeText(1023), "1023 B");
  EXPECT_EQ(SizeText(1024), "1.0 KiB");
  EXPECT_EQ(SizeText(12288), "12.0 KiB");
  EXPECT_EQ(SizeText((uint64_t{1} << 20) - 52), "1023.9 KiB");
  EXPECT_EQ(SizeText((uint64_t{1} << 20) - 1), "1.0 MiB");
  EXPECT_EQ(SizeText(uint64_t{80} << 30), "80.0 GiB");
  EXPECT_EQ(SizeText((uint64_t{1} << 40) - 1), "1.0 TiB");
  EXPECT_EQ(SizeText(UINT64_MAX), "16.0 EiB");
}

TEST(SizeTextTest, AnErrorHasTheExactNumberToo) {
  EXPECT_EQ(BytesText(0), "0 bytes");
  EXPECT_EQ(BytesText(1), "1 byte");
  EXPECT_EQ(BytesText(1023), "1023 bytes");
  EXPECT_EQ(BytesText(12289), "12289 bytes (12.0 KiB)");
}

}  // namespace
}  // namespace hybridopt
