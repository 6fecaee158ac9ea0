// The JSON reader against nlohmann's parser: both accept the same texts, and read the same values.
#include "checkpoint/format/json.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "../../random.h"
#include "../../scale.h"
#include "base/utf8.h"

namespace hybridopt::checkpoint {
namespace {

std::string Quoted(const std::string& text) {
  std::string json;
  AppendJsonString(&json, text);
  return json;
}

TEST(JsonTest, StringsAgreeWithTheOtherParser) {
  // Pieces that make strings legal, nearly legal and illegal.
  const std::string pieces[] = {"a",
                                "\\",
                                "\"",
                                "\\n",
                                "\\u00e9",
                                "\\ud83d",
                                "\\ude00",
                                "\\u12",
                                "\xc3\xa9",
                                "\xc3",
                                "\xe2\x82\xac",
                                "\xed\xa0\x80",
                                "\xf0\x9f\x98\x80",
                                "\xf5\x80\x80\x80",
                                "\xc0\x80",
                                "\x1f",
                                "\x7f",
                                "\\/",
                                "\\x",
                                "\\uD83D"};
  Random random(1);
  int good = 0, bad = 0;
  for (int round = 0; round < Scaled(200'000); ++round) {
    std::string text = "\"";
    for (uint64_t n = random.Below(4); n > 0; --n) text += pieces[random.Below(std::size(pieces))];
    text += "\"";
    JsonReader reader(text);
    const std::string read = reader.String();
    reader.End();
    const auto other = nlohmann::json::parse(text, nullptr, false);
    ASSERT_EQ(reader.ok(), other.is_string()) << text << ": " << reader.error();
    (reader.ok() ? good : bad) += 1;
    if (!reader.ok()) continue;
    ASSERT_EQ(read, other.get<std::string>()) << text;
    ASSERT_TRUE(IsUtf8(read));
    ASSERT_EQ(nlohmann::json::parse(Quoted(read)).get<std::string>(), read);
  }
  EXPECT_GT(good, Scaled(20'000));
  EXPECT_GT(bad, Scaled(20'000));
}

TEST(JsonTest, NumbersAgreeWithTheOtherParser) {
  const std::string pieces[] = {"0", "1", "9", "-", "+", ".", "e", "E", "00", "308", "12345678901"};
  Random random(2);
  int good = 0, bad = 0;
  for (int round = 0; round < Scaled(200'000); ++round) {
    std::string text;
    for (uint64_t n = 1 + random.Below(5); n > 0; --n)
      text += pieces[random.Below(std::size(pieces))];
    JsonReader reader(text);
    const double number = reader.Number();
    reader.End();
    const auto other = nlohmann::json::parse(text, nullptr, false);
    // The other parser accepts numbers that are too small for a double, ours does not.
    const bool tiny = other.is_number() && !reader.ok() && std::abs(other.get<double>()) < 1e-300;
    if (tiny) continue;
    ASSERT_EQ(reader.ok(), other.is_number()) << text << ": " << reader.error();
    (reader.ok() ? good : bad) += 1;
    if (reader.ok()) {
      ASSERT_EQ(number, other.get<double>()) << text;
    }
    JsonReader whole(text);
    const uint64_t count = whole.Unsigned();
    whole.End();
    const bool expected = other.is_number_unsigned() && text.find_first_of("-.eE") == text.npos;
    ASSERT_EQ(whole.ok(), expected) << text << ": " << whole.error();
    if (expected) {
      ASSERT_EQ(count, other.get<uint64_t>()) << text;
    }
  }
  EXPECT_GT(good, Scaled(20'000));
  EXPECT_GT(bad, Scaled(20'000));
}

TEST(JsonTest, NumbersReadBackBitForBit) {
  Random random(3);
  for (int round = 0; round < Scaled(100'000); ++round) {
    const double number = std::abs(std::bit_cast<double>(random.Next()));
    if (!std::isfinite(number)) continue;
    std::string text;
    AppendJsonNumber(&text, number);
    JsonReader reader(text);
    ASSERT_EQ(reader.Number(), number) << text;
    reader.End();
    ASSERT_TRUE(reader.ok()) << reader.error();
  }
}

TEST(JsonTest, OptionalKeysMayBeMissingAndOthersNot) {
  const auto read = [](const std::string& text) {
    std::string seen;
    JsonReader reader(text);
    reader.Object({{"a", [&] { seen += "a" + std::to_string(reader.Unsigned()); }},
                   {"b", [&] { seen += "b" + std::to_string(reader.Unsigned()); }, true}});
    reader.End();
    return reader.ok() ? seen : reader.error();
  };
  EXPECT_EQ(read(R"({"a":1})"), "a1");
  EXPECT_EQ(read(R"({"b":2,"a":1})"), "b2a1");
  EXPECT_NE(read(R"({"b":2})").find("the key \"a\" is missing"), std::string::npos);
  EXPECT_NE(read(R"({"a":1,"b":2,"b":2})").find("the key \"b\" stands twice"), std::string::npos);
}

TEST(JsonTest, TheFirstErrorIsToldWithItsPlaceAndStays) {
  JsonReader reader("[1, x, {]");
  int elements = 0;
  reader.Array([&] {
    reader.Unsigned();
    elements += 1;
  });
  reader.End();
  EXPECT_EQ(elements, 2);
  EXPECT_EQ(reader.error(), "a number is expected, at byte 4");
  EXPECT_EQ(reader.String(), "");
  EXPECT_FALSE(reader.Bool());
  EXPECT_EQ(reader.error(), "a number is expected, at byte 4");
}

TEST(JsonTest, ATextThatEndsEarlyIsRefusedWherever) {
  const std::string text = R"({"key": ["\u00e9\n", 12, -1.5e3, true], "other": {"a": false}})";
  for (size_t bytes = 0; bytes <= text.size(); ++bytes) {
    const std::string cut = text.substr(0, bytes);  // a copy: the end is the end of its memory
    JsonReader reader(cut);
    std::string seen;
    reader.Object({{"key",
                    [&] {
                      int element = 0;
                      reader.Array([&] {
                        if (element == 0) seen += reader.String();
                        if (element == 1) seen += std::to_string(reader.Unsigned());
                        if (element == 2) seen += std::to_string(reader.Number());
                        if (element == 3) seen += std::to_string(reader.Bool());
                        element += 1;
                      });
                    }},
                   {"other", [&] {
                      reader.Object({{"a", [&] { seen += std::to_string(reader.Bool()); }}});
                    }}});
    reader.End();
    ASSERT_EQ(reader.ok(), bytes == text.size()) << cut;
    if (reader.ok()) {
      EXPECT_EQ(seen, "\xc3\xa9\n12-1500.00000010");
    }
  }
}

}  // namespace
}  // namespace hybridopt::checkpoint
