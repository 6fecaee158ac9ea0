// Texts from untrusted sources, made safe to print.
#include "base/utf8.h"

#include <gtest/gtest.h>

#include <string>

#include "../../random.h"
#include "base/status.h"

namespace hybridopt {
namespace {

TEST(Printable, EscapesWhatActsOnATerminal) {
  const struct {
    std::string text, printable;
  } cases[] = {
      {"", ""},
      {"layers.0.weight", "layers.0.weight"},
      {"n\u00e4me \u6a21\u578b \U0001f600", "n\u00e4me \u6a21\u578b \U0001f600"},
      {"C:\\x1b", "C:\\x1b"},                           // no control character
      {"\x1b]0;title\x07", "\\x1b]0;title\\x07"},       // sets the title of a window
      {"\x1b[2J\r\n\t\x7f", "\\x1b[2J\\r\\n\\t\\x7f"},  // clears the screen
      {std::string("a\0b", 3), "a\\x00b"},
      {"\u0085\u009b2J", "\\u0085\\u009b2J"},  // control characters of ISO 8859
      {"\x9b"
       "2J",
       "\\x9b2J"},                          // the same as bytes: not UTF-8
      {"\u202egnp.exe", "\\u202egnp.exe"},  // reads "exe.png"
      {"\u2066a\u2069\u200f\u061c", "\\u2066a\\u2069\\u200f\\u061c"},
      {"a\u2028b\u2029\ufeff\u200b", "a\\u2028b\\u2029\\ufeff\\u200b"},
      {"\U000e0041", "\\U000e0041"},                 // a tag: an invisible A
      {"\xc3", "\\xc3"},                             // cut off
      {"\xc0\xaf", "\\xc0\\xaf"},                    // not the shortest form
      {"\xed\xa0\x80", "\\xed\\xa0\\x80"},           // half of a surrogate pair
      {"\xf4\x90\x80\x80", "\\xf4\\x90\\x80\\x80"},  // beyond Unicode
  };
  for (const auto& one : cases) EXPECT_EQ(Printable(one.text), one.printable);
}

TEST(Printable, IsUtf8WithoutControlCharactersWhateverTheBytesAre) {
  Random random(1);
  const std::string pieces[] = {"a",    "\\",   "\x1b",   "\n",     "\x80",     "\xc2",
                                "\x9b", "\xe2", "\u00e4", "\u202e", "\xf0\x9f", "\x98\x80"};
  for (int round = 0; round < 20'000; ++round) {
    std::string text;
    for (uint64_t left = random.Below(8); left > 0; --left)
      text += pieces[random.Below(std::size(pieces))];
    const std::string printable = Printable(text);
    ASSERT_TRUE(IsUtf8(printable)) << printable;
    ASSERT_EQ(Printable(printable), printable) << "it is printable already";
    for (const char byte : printable) ASSERT_GE(static_cast<unsigned char>(byte), 0x20);
    ASSERT_EQ(printable.find("\u202e"), std::string::npos);
    ASSERT_EQ(printable.find("\u009b"), std::string::npos);
    const size_t most = random.Below(printable.size() + 2);
    const std::string cut = Printable(text, most);
    ASSERT_LE(cut.size(), most);
    ASSERT_TRUE(IsUtf8(cut));
    ASSERT_TRUE(printable.starts_with(cut));
    ASSERT_GT(cut.size() + 10, std::min(most, printable.size())) << "no more than one is left out";
  }
}

TEST(Printable, IsTheTextOfEveryError) {
  const Status status = Status::Error(OFFLOAD_IO_FAILED, "could not open '%s'", "a\x1b[2J\u202eb");
  EXPECT_EQ(status.message(), "could not open 'a\\x1b[2J\\u202eb'");
  const std::string far_too_long(5000, '\x1b');
  const Status cut = Status::Error(OFFLOAD_IO_FAILED, "%s", far_too_long.c_str());
  EXPECT_LE(cut.message().size(), Status::kTextBytesMax);
  EXPECT_TRUE(cut.message().ends_with("\\x1b")) << "no half of an escape";
}

}  // namespace
}  // namespace hybridopt
