// The manifest and the shard files' heads: written ones can be read back, and everything that
// breaks a rule is refused with a text that names the rule.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "../../sample_checkpoint.h"
#include "checkpoint/format/format.h"

namespace hybridopt::checkpoint {
namespace {

std::string Replaced(std::string text, const std::string& from, const std::string& to) {
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return at == std::string::npos ? text : text.replace(at, from.size(), to);
}

constexpr size_t kTailBytes = 28;  // ,"xxh3":"0123456789abcdef"}\n

// The text with a new, correct hash, as only an adversary would write it.
std::string Rehashed(std::string text) {
  text.resize(text.size() - kTailBytes);
  char tail[kTailBytes + 1];
  std::snprintf(tail, sizeof(tail), ",\"xxh3\":\"%016llx\"}\n",
                static_cast<unsigned long long>(Xxh3(text)));
  return text + tail;
}

void ExpectRefused(const std::string& text, const std::string& says,
                   int32_t code = OFFLOAD_CHECKPOINT_CORRUPT) {
  const Result<Manifest> manifest = ParseManifest(text);
  ASSERT_FALSE(manifest.ok()) << "expected: " << says;
  EXPECT_EQ(manifest.status().code(), code);
  EXPECT_NE(manifest.status().message().find(says), std::string::npos)
      << manifest.status().message() << "\nexpected: " << says;
}

// --- the manifest ---

TEST(ManifestTest, WhatIsWrittenReadsBack) {
  const Sample sample;
  const Result<Manifest> read = ParseManifest(sample.text);
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read.value().step, 42u);
  EXPECT_EQ(read.value().algorithm, OFFLOAD_ADAMW);
  EXPECT_EQ(read.value().layout, "fp32");
  EXPECT_EQ(read.value().world, 2u);
  ASSERT_EQ(read.value().params.size(), 4u);
  EXPECT_EQ(read.value().params[1].name, "blocks.0.\"qkv\"");
  EXPECT_EQ(read.value().params[3].name, "n\xc3\xa4me");
  EXPECT_EQ(read.value().params[1].shards[1].shard.range_begin, 13u);
  EXPECT_EQ(read.value().params[2].shards[0].tensors[1].hashes.size(), 2u);
  EXPECT_EQ(read.value().groups[1].lr, 0.002);
  // For all other fields: the manifest gives the same text when it is written again.
  EXPECT_EQ(EncodeManifest(read.value()).value(), sample.text);
}

TEST(ManifestTest, HyperparametersKeepEveryBit) {
  Sample sample;
  sample.manifest.groups[0].lr = 0x1.fffffffffffffp-40;
  sample.manifest.groups[0].eps = 5e-324;
  sample.manifest.groups[0].weight_decay = 1.7976931348623157e308;
  sample.manifest.groups[0].nesterov = 1;
  sample.manifest.groups[1].maximize = 1;
  sample.manifest.groups[1].cautious_weight_decay = 1;
  sample.Fill();
  const Result<Manifest> read = ParseManifest(sample.text);
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(std::memcmp(read.value().groups.data(), sample.manifest.groups.data(),
                        2 * sizeof(offload_group_t)),
            0);
}

TEST(ManifestTest, EveryBitFlipAndEveryTruncationIsFound) {
  const Sample sample;
  for (size_t i = 0; i < sample.text.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string text = sample.text;
      text[i] = static_cast<char>(text[i] ^ 1 << bit);
      ASSERT_FALSE(ParseManifest(text).ok()) << "byte " << i << ", bit " << bit;
    }
    ASSERT_FALSE(ParseManifest(sample.text.substr(0, i)).ok()) << "cut at " << i;
  }
  ASSERT_FALSE(ParseManifest(sample.text + "\n").ok());
}

TEST(ManifestTest, EndsAreCheckedBeforeTheRest) {
  const Sample sample;
  ExpectRefused("", "has 0 bytes, too few");
  ExpectRefused(Replaced(sample.text, "42", "43"), "own hash does not match");
  ExpectRefused(Rehashed(Replaced(sample.text, "hybridopt-checkpoint", "other")),
                "does not begin as one of hybridopt");
  ExpectRefused(Rehashed(Replaced(sample.text, "\"version\":1", "\"version\":-1")),
                "tells no version");
  ExpectRefused(Rehashed(Replaced(sample.text, "\"version\":1", "\"version\":7")),
                "format version 7, this release reads versions 1 to 3; use the release",
                OFFLOAD_UNSUPPORTED);
}

// Releases that do not know the field read all manifests except those with groups that use it.
TEST(ManifestTest, AFlagThatVersionOneDidNotBeginWithIsWrittenOnlyWhereItIsSet) {
  const std::string key = "\"cautious_weight_decay\"";
  EXPECT_EQ(Sample().text.find(key), std::string::npos);
  Sample sample;
  sample.manifest.groups[1].cautious_weight_decay = 1;
  sample.Fill();
  const size_t at = sample.text.find(key + ":true");
  ASSERT_NE(at, std::string::npos);
  EXPECT_EQ(sample.text.find(key, at + 1), std::string::npos);
  const Result<Manifest> read = ParseManifest(sample.text);
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read.value().groups[0].cautious_weight_decay, 0);
  EXPECT_EQ(read.value().groups[1].cautious_weight_decay, 1);
  ExpectRefused(Rehashed(Replaced(sample.text, key + ":true", key + ":1")),
                "true or false is expected");
  ExpectRefused(Rehashed(Replaced(sample.text, key + ":true", key + ":true," + key + ":true")),
                "the key \"cautious_weight_decay\" stands twice");
}

TEST(ManifestTest, CoefficientsAreAListOfRows) {
  const std::string key = "\"ns_coefficients\"", rows = key + ":[[3,-2.5,0.1],[0,1,0]]";
  EXPECT_EQ(Sample().text.find(key), std::string::npos);
  Sample sample;
  auto& list = sample.manifest.groups[1].ns_coefficients;
  list[0][0] = 3;
  list[0][1] = -2.5;
  list[0][2] = 0.1;
  list[1][1] = 1;
  sample.Fill();
  ASSERT_NE(sample.text.find(rows), std::string::npos);
  const Result<Manifest> read = ParseManifest(sample.text);
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(std::memcmp(&read.value().groups[1].ns_coefficients, &list, sizeof(list)), 0);
  const auto refuse = [&](const std::string& other, const char* why) {
    ExpectRefused(Rehashed(Replaced(sample.text, rows, key + ":" + other)), why);
  };
  refuse("[[3,-2.5]]", "a row of ns_coefficients has 2 numbers, expected 3");
  refuse("[[3,-2.5,1,1]]", "a row of ns_coefficients has 4 numbers, expected 3");
  refuse("[[3,-2.5,1],[0,0,0]]", "a row of ns_coefficients is zeros");
  std::string many = "[[1,1,1]";
  for (int i = 1; i < 11; ++i) many += ",[1,1,1]";
  refuse(many + "]", "ns_coefficients has 11 rows, expected at most 10");
}

TEST(ManifestTest, AGroupNamesItsAlgorithmOnlyWhereItIsNotThatOfTheManifest) {
  const std::string key = "\"algorithm\"";
  const Sample own;
  EXPECT_EQ(own.text.find(key), own.text.rfind(key));
  const Result<Manifest> alike = ParseManifest(own.text);
  ASSERT_TRUE(alike.ok());
  EXPECT_EQ(alike.value().groups[1].algorithm, 0);
  EXPECT_EQ(alike.value().AlgorithmOf(alike.value().params[2].shards[0]), OFFLOAD_ADAMW);

  Sample sample;
  sample.manifest.version = kVersionOfGroupAlgorithms;
  sample.manifest.groups[1].algorithm = OFFLOAD_LION;
  sample.Fill();
  const Result<Manifest> read = ParseManifest(sample.text);
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read.value().AlgorithmOf(read.value().params[0].shards[0]), OFFLOAD_ADAMW);
  EXPECT_EQ(read.value().AlgorithmOf(read.value().params[2].shards[0]), OFFLOAD_LION);
  EXPECT_EQ(EncodeManifest(read.value()).value(), sample.text);
  ExpectRefused(Rehashed(Replaced(sample.text, key + ":\"Lion\"", key + ":\"Tiger\"")),
                "\"Tiger\" is not an algorithm this release knows");
  ExpectRefused(Rehashed(Replaced(sample.text, "\"version\":3", "\"version\":2")),
                "a group names its algorithm, which version 2 of the format does not have");
}

TEST(ManifestTest, AShardWithoutElementsTellsAStepCountAndNothingElse) {
  HandMade made(OFFLOAD_ADAMW, 1);
  made.manifest.groups = {AdamGroup(0.001, 0.1)};
  made.AddParam("nothing", OFFLOAD_BF16, {3, 0});
  made.AddShard(0, 0, {{{0, 0}, {3, 0}}});
  made.AddParam("some", OFFLOAD_BF16, {4});
  made.AddShard(0, 0, {{{0}, {4}}});
  made.Fill();
  const Result<Manifest> manifest = ParseManifest(made.text);
  ASSERT_TRUE(manifest.ok()) << manifest.status().message();
  EXPECT_EQ(manifest.value().version, 2u);
  ASSERT_EQ(manifest.value().params[0].shards.size(), 1u);
  EXPECT_EQ(manifest.value().params[0].shards[0].step_count, 41u);
  ExpectRefused(Rehashed(Replaced(made.text, "\"version\":2", "\"version\":1")),
                "param \"nothing\": the shard of rank 0: a shard without elements");
  ExpectRefused(Rehashed(Replaced(made.text, "\"range\":[0,4]", "\"range\":[0,0]")),
                "param \"some\": the shard of rank 0: a shard without elements");
  ExpectRefused(Rehashed(Replaced(made.text, "\"tensors\":[]",
                                  "\"tensors\":[{\"kind\":\"master\",\"dtype\":\"F32\",\"file\":0,"
                                  "\"offset\":4096,\"bytes\":0,\"xxh3\":[]}]")),
                "param \"nothing\": the shard of rank 0: an array without elements");
}

TEST(ManifestTest, ForgedTextsAreRefused) {
  const Sample sample;
  const struct {
    const char *from, *to, *says;
  } cases[] = {
      {"\"step\":42", "\"step\":-42", "-42 is not a whole number of at least 0"},
      {"\"step\":42", "\"step\":42.0", "42.0 is not a whole number"},
      {"\"step\":42", "\"step\":4e1", "4e1 is not a whole number"},
      {"\"step\":42", "\"step\":042", "042 is not a whole number"},
      {"\"step\":42", "\"step\":18446744073709551616", "is too large"},
      {"\"step\":42", "\"step\":9007199254740993", "is too large, at most 9007199254740992"},
      {"\"step_count\":41", "\"step_count\":18446744073709551615", "at most 9007199254740992"},
      {"\"step\":42", "\"step\":42,\"step\":42", "the key \"step\" stands twice"},
      {"\"step\":42", "\"stop\":42", "the key \"stop\" is not known here"},
      {"\"step\":42,", "", "the key \"step\" is missing"},
      {"\"step\":42,", "\"step\":42,,", "'\"' is expected"},
      {"AdamW", "Adamant", "\"Adamant\" is not an algorithm this release knows"},
      {"\"world\":2", "\"world\":0", "world is 0"},
      {"\"world\":2", "\"world\":1", "rank 1 of a world of 1"},
      {"\"world\":2", "\"world\":2000000", "is too large, at most 1048576"},
      {"\"block_bytes\":4096", "\"block_bytes\":0", "block_bytes is 0"},
      {"\"block_bytes\":4096", "\"block_bytes\":5000", "expected a multiple of 4096"},
      {"\"block_bytes\":4096", "\"block_bytes\":8192", "has 2 hashes, expected one for each block"},
      {"\"lr\":0.001", "\"lr\":-0.001", "a hyperparameter is -0.001"},
      {"\"lr\":0.001", "\"lr\":1e999", "1e999 is not a finite number"},
      {"\"lr\":0.001", "\"lr\":nan", "a number is expected"},
      {"\"nesterov\":false", "\"nesterov\":0", "true or false is expected"},
      {"\"shard-00000", "\"../rd-00000", "letters, digits, '.', '_' and '-'"},
      {"\"shard-00000", "\"d/hard-00000", "letters, digits, '.', '_' and '-'"},
      {"\"shard-00000", "\".hard-00000", "letters, digits, '.', '_' and '-'"},
      {"\"shard-00000", "\"shard-00001", "the name stands twice"},
      {"shard-00000-of-00002.safetensors", "manifest.json", "the name stands twice"},
      {"\"rank\":0,\"bytes\"", "\"rank\":5,\"bytes\"", "rank 5 of a world of 2"},
      {"\"rank\":0,\"bytes\"", "\"rank\":1,\"bytes\"", "a file of another rank"},
      {"\"data_begin\":4096", "\"data_begin\":7", "data_begin is not between"},
      {"\"data_begin\":4096", "\"data_begin\":4092", "leave a hole or overlap at byte 4092"},
      {"\"head_xxh3\":\"", "\"head_xxh3\":\"A", "not 16 small hexadecimal digits"},
      {"\"name\":\"embed.weight\"", "\"name\":\"\"", "a param without a name"},
      {"\"name\":\"embed.weight\"", "\"name\":\"head.weight\"", "the name stands twice"},
      {"\"name\":\"embed.weight\"", "\"name\":\"\\u0000\"", "a text with a NUL character"},
      {"\"name\":\"embed.weight\"", "\"name\":\"\x80\"", "bytes that are not UTF-8"},
      {"\"name\":\"embed.weight\"", "\"name\":\"\\ud800\"", "half of a surrogate pair"},
      {"\"dtype\":\"BF16\"", "\"dtype\":\"U8\"", "\"U8\" is not a dtype this release knows"},
      {"\"shape\":[6,5]", "\"shape\":[6]", "a box has another number of dimensions"},
      {"\"shape\":[6,5]", "\"shape\":[6,4]", "box 0 reaches from 2 over 3 elements in dimension 1"},
      {"\"shape\":[6,5]", "\"shape\":[6,9223372036854775807]", "does not fit 63 bits"},
      {"\"shape\":[0,7]", "\"shape\":[]", "shape has no dimension or too many elements"},
      {"\"shape\":[6,5]", "\"shape\":[6,5,1,1,1,1,1,1,1]", "more than 8 dimensions"},
      {"[[0,0],[6,2]]", "[[0,0],[6,2],[]]", "a box has more than offsets and extents"},
      {"[[0,0],[6,2]]", "[[0,0]]", "a box is not a list of offsets and a list of extents"},
      {"[[0,0],[6,2]]", "[[0],[6]]", "a box has another number of dimensions"},
      {"[[[0,0],[6,2]]]", "[]", "shard.box_count is 0"},
      {"[[[0,0],[6,2]]]", "[[[0,0],[6,1]],[[0,0],[6,1]]]", "boxes 0 and 1 overlap"},
      {"\"range\":[0,12]", "\"range\":[0,13]", "passes the 12 elements"},
      {"\"range\":[0,12]", "\"range\":[0,0]", "a shard without elements"},
      {"\"range\":[0,12]", "\"range\":[0,11]", "bytes is not the number of its elements"},
      {"\"range\":[0,12]", "\"range\":[0]", "a range is not a begin and a count"},
      {"\"range\":[0,12]", "\"range\":[0,12,1]", "a range has more than"},
      {"\"rank\":1,\"group\":0", "\"rank\":0,\"group\":0", "a file of another rank"},
      {"\"rank\":1,\"group\":0", "\"rank\":2,\"group\":0", "a rank outside the world"},
      {"\"rank\":1,\"group\":0", "\"rank\":1,\"group\":2", "a group that is not listed"},
      {"\"kind\":\"exp_avg\"", "\"kind\":\"grad\"", "\"grad\" is not a kind of state"},
      {"\"kind\":\"exp_avg\"", "\"kind\":\"master\"", "master stands twice"},
      {"\"file\":0", "\"file\":2", "a file that is not listed"},
      {"\"offset\":4096", "\"offset\":4097", "leave a hole or overlap at byte 4096"},
      {"\"xxh3\":[\"", "\"xxh3\":[\"0123456789abcdef\",\"", "has 2 hashes"},
      {"\"params\":[", "\"params\":[]}", "the key \"xxh3\" is missing"},
  };
  for (const auto& c : cases) ExpectRefused(Rehashed(Replaced(sample.text, c.from, c.to)), c.says);
}

TEST(ManifestTest, TwoShardsOfOneRankAreRefused) {
  Sample sample;
  sample.manifest.params[0].shards[1].rank = 0;
  for (StoredTensor& tensor : sample.manifest.params[0].shards[1].tensors) tensor.file = 0;
  sample.Fill();
  ExpectRefused(sample.text, "param \"embed.weight\": two shards of one rank");
}

TEST(ManifestTest, AFileThatNothingFillsIsRefused) {
  Sample sample;
  sample.manifest.files[0].bytes += 4;
  ExpectRefused(EncodeManifest(sample.manifest).value(), "the arrays of file");
}

TEST(ManifestTest, KeysMayComeInAnyOrder) {
  const Sample sample;
  const std::string text = Replaced(Replaced(sample.text, "\"step\":42,\"algorithm\":\"AdamW\"",
                                             "\"algorithm\" : \"AdamW\" ,\n\t\"step\":42"),
                                    "\"name\":\"embed.weight\",\"dtype\":\"BF16\"",
                                    "\"dtype\":\"BF16\",\"name\":\"\\u0065mbed\\u002eweight\"");
  const Result<Manifest> read = ParseManifest(Rehashed(text));
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(EncodeManifest(read.value()).value(), sample.text);
}

TEST(ManifestTest, NamesThatAreNotUtf8AreRefusedOnWriting) {
  Sample sample;
  sample.manifest.params[0].name = "caf\xe9";
  EXPECT_EQ(EncodeManifest(sample.manifest).status().code(), OFFLOAD_UNSUPPORTED);
  const auto heads = LayOutFiles(&sample.manifest);
  EXPECT_EQ(heads.status().code(), OFFLOAD_UNSUPPORTED);
  EXPECT_NE(heads.status().message().find("not UTF-8"), std::string::npos);
}

// --- heads ---

Result<Head> ParseFileHead(const std::string& file) {
  HYBRIDOPT_ASSIGN(const uint64_t before, BytesBeforeData(file.substr(0, 8), file.size()));
  return ParseHead(file.substr(0, before), file.size());
}

TEST(HeadTest, WhatIsWrittenReadsBackAndDataIsAligned) {
  const Sample sample;
  const std::vector<Head> heads = HeadsOf(sample.manifest);
  for (size_t f = 0; f < sample.files.size(); ++f) {
    const Result<Head> head = ParseFileHead(sample.files[f]);
    ASSERT_TRUE(head.ok()) << head.status().message();
    EXPECT_TRUE(head.value() == heads[f]);
    EXPECT_EQ(BytesBeforeData(sample.files[f], sample.files[f].size()).value() % 4096, 0u);
  }
  EXPECT_EQ(heads[0].metadata.at("step"), "42");
  ASSERT_EQ(heads[0].tensors.size(), 6u);
  EXPECT_EQ(heads[0].tensors[1].name, "embed.weight.exp_avg");
  EXPECT_EQ(heads[0].tensors[1].shape, (std::vector<int64_t>{6, 2}));  // one whole box
  EXPECT_EQ(heads[0].tensors[3].shape, (std::vector<int64_t>{13}));    // a range
}

TEST(HeadTest, WiderElementsComeFirst) {
  Sample sample;
  for (StoredParam& param : sample.manifest.params) {
    for (StoredShard& shard : param.shards) {
      shard.tensors[0].dtype = OFFLOAD_U16;
      shard.tensors[0].bytes /= 2;
    }
  }
  ASSERT_TRUE(LayOutFiles(&sample.manifest).ok());
  for (const StoredParam& param : sample.manifest.params)
    for (const StoredShard& shard : param.shards)
      for (const StoredTensor& tensor : shard.tensors)
        EXPECT_EQ(tensor.offset % DtypeBytes(tensor.dtype), 0u);
  EXPECT_EQ(HeadsOf(sample.manifest)[0].tensors.back().name, "blocks.0.\"qkv\".master");
}

std::string FileOf(const std::string& json, uint64_t data_bytes) {
  std::string file;
  for (int i = 0; i < 8; ++i) file.push_back(static_cast<char>(json.size() >> (8 * i) & 0xff));
  return file + json + std::string(data_bytes, 'x');
}

TEST(HeadTest, PlainFilesOfOthersAreRead) {
  const Result<Head> head = ParseFileHead(
      FileOf(R"({"b":{"data_offsets":[8,12],"dtype":"F16","shape":[2,1]},"__metadata__":{"a":"b"},)"
             R"("a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
             R"("none":{"dtype":"F32","shape":[0,9223372036854775807],"data_offsets":[8,8]},)"
             R"("scalar":{"dtype":"BF16","shape":[],"data_offsets":[12,14]}}  )",
             14));
  ASSERT_TRUE(head.ok()) << head.status().message();
  ASSERT_EQ(head.value().tensors.size(), 4u);
  EXPECT_EQ(head.value().tensors[0].name, "a");
  EXPECT_EQ(head.value().tensors[1].name, "none");
  EXPECT_EQ(head.value().metadata.at("a"), "b");
  ASSERT_TRUE(ParseFileHead(FileOf("{}", 0)).ok());
}

TEST(HeadTest, WhatBreaksARuleIsRefused) {
  const auto one = [](const std::string& fields) { return R"({"a":{)" + fields + "}}"; };
  const std::string good = R"("dtype":"F32","shape":[2],"data_offsets":[0,8])";
  const struct {
    std::string json;
    uint64_t data_bytes;
    const char* says;
  } cases[] = {
      {"", 0, "does not begin with '{'"},
      {" {}", 0, "does not begin with '{'"},
      {"[]", 0, "does not begin with '{'"},
      {"{} x", 0, "more text after the end"},
      {"{", 0, "'\"' is expected"},
      {one(good), 9, "the tensors end at byte 8 of the data, but the file holds 9"},
      {one(good), 7, "the tensors end at byte 8 of the data, but the file holds 7"},
      {"{}", 1, "the tensors end at byte 0"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[4,12])"), 12, "begins at byte 4"},
      {"{\"a\":{" + good + "},\"b\":{" + good + "}}", 8, "begins at byte 0 of the data, but the"},
      {"{\"a\":{" + good + "},\"a\":{" + good + "}}", 16, "tensor \"a\" stands twice"},
      {R"({"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},)"
       R"("a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}})",
       8, "tensor \"a\" stands twice"},
      {one("\"dtype\":\"F32\"," + good), 8, "the key \"dtype\" stands twice"},
      {R"({"__metadata__":{},"__metadata__":{}})", 0, "__metadata__ stands twice"},
      {R"({"__metadata__":{"k":"v","k":"v"}})", 0, "the key \"k\" stands twice"},
      {R"({"__metadata__":{"k":1}})", 0, "'\"' is expected"},
      {one(R"("dtype":"I4","shape":[2],"data_offsets":[0,8])"), 8, "dtype is \"I4\""},
      {one(R"("dtype":"F32","shape":[-2],"data_offsets":[0,8])"), 8, "-2 is not a whole number"},
      {one(R"("dtype":"F32","shape":[2.0],"data_offsets":[0,8])"), 8, "2.0 is not a whole number"},
      {one(R"("dtype":"F32","shape":[3],"data_offsets":[0,8])"), 8, "its shape takes 12 bytes"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[8,0])"), 8, "its shape takes 8 bytes"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[0])"), 8, "less than two numbers"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8,8])"), 8, "more than two numbers"},
      {one(R"("dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,8])"), 8,
       "too large"},
      {one(R"("dtype":"F32","shape":[9223372036854775807],"data_offsets":[0,8])"), 8, "too large"},
      {one(R"("dtype":"F32","shape":[2],"data_offsets":[0,8],"x":1)"), 8, "\"x\" is not known"},
      {one(R"("dtype":"F32","shape":[2])"), 8, "the key \"data_offsets\" is missing"},
      {one(R"("dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4])"), 4, "dimensions"},
  };
  for (const auto& c : cases) {
    const Result<Head> head = ParseFileHead(FileOf(c.json, c.data_bytes));
    ASSERT_FALSE(head.ok()) << c.json;
    EXPECT_EQ(head.status().code(), OFFLOAD_CHECKPOINT_CORRUPT);
    EXPECT_NE(head.status().message().find(c.says), std::string::npos)
        << head.status().message() << "\nof " << c.json;
  }
}

TEST(HeadTest, LengthsAreCheckedBeforeAnythingIsRead) {
  EXPECT_NE(BytesBeforeData("1234567", 7).status().message().find("has 7 bytes, too few"),
            std::string::npos);
  const std::string huge = std::string("\xff\xff\xff\xff\xff\xff\xff\xff", 8);
  EXPECT_NE(BytesBeforeData(huge, 100).status().message().find("at most 100000000 are allowed"),
            std::string::npos);
  const std::string hundred = std::string("\x64\0\0\0\0\0\0\0", 8);
  EXPECT_NE(BytesBeforeData(hundred, 107).status().message().find("but the file has 107"),
            std::string::npos);
  EXPECT_EQ(BytesBeforeData(hundred, 108).value(), 108u);
  EXPECT_FALSE(ParseHead(hundred, 108).ok());  // less than it claims
}

TEST(HeadTest, TooMuchTextIsRefusedOnWriting) {
  Head head;
  head.metadata["long"] = std::string(kHeadBytesMax, 'x');
  const auto bytes = EncodeHead(head);
  EXPECT_EQ(bytes.status().code(), OFFLOAD_UNSUPPORTED);
  EXPECT_NE(bytes.status().message().find("at most 100000000"), std::string::npos);
}

// --- merging ---

// The part of one rank.
Manifest PartOf(const Manifest& whole, uint32_t rank) {
  Manifest part = whole;
  part.files = {whole.files[rank]};
  part.params.clear();
  for (const StoredParam& param : whole.params) {
    StoredParam own = param;
    own.shards.clear();
    for (const StoredShard& shard : param.shards)
      if (shard.rank == rank) own.shards.push_back(shard);
    for (StoredShard& shard : own.shards)
      for (StoredTensor& tensor : shard.tensors) tensor.file = 0;
    if (!own.shards.empty() || param.shards.empty()) part.params.push_back(own);
  }
  return part;
}

TEST(MergeTest, PartsBecomeTheWhole) {
  const Sample sample;
  Manifest first = PartOf(sample.manifest, 0);
  Manifest second = PartOf(sample.manifest, 1);
  // Ranks may know other groups, in another order.
  std::swap(second.groups[0], second.groups[1]);
  for (StoredParam& param : second.params)
    for (StoredShard& shard : param.shards) shard.group = 1 - shard.group;
  const Result<Manifest> merged = MergeManifests({first, second});
  ASSERT_TRUE(merged.ok()) << merged.status().message();
  const std::string text = EncodeManifest(merged.value()).value();
  ASSERT_TRUE(ParseManifest(text).ok()) << ParseManifest(text).status().message();
  EXPECT_EQ(merged.value().params.size(), 4u);
  EXPECT_EQ(merged.value().groups.size(), 2u);
  EXPECT_EQ(merged.value().params[0].shards.size(), 2u);
  for (size_t p = 0; p < 3; ++p) {
    for (const StoredShard& shard : merged.value().params[p].shards) {
      EXPECT_EQ(merged.value().groups[shard.group].lr, p == 2 ? 0.002 : 0.001);
      for (const StoredTensor& tensor : shard.tensors) EXPECT_EQ(tensor.file, shard.rank);
    }
  }
  // One rank's part is a manifest itself, and merging one is no change.
  EXPECT_EQ(EncodeManifest(MergeManifests({sample.manifest}).value()).value(), sample.text);
}

// Only one of the ranks needs a later version.
TEST(MergeTest, TheVersionIsTheHighestOfAllParts) {
  HandMade made(OFFLOAD_ADAMW, 2);
  made.manifest.groups = {AdamGroup(0.001, 0.1)};
  made.AddParam("some", OFFLOAD_BF16, {4});
  made.AddShard(0, 0, {{{0}, {4}}});
  made.AddParam("nothing", OFFLOAD_BF16, {0});
  made.AddShard(1, 0, {{{0}, {0}}});
  made.Fill();
  Manifest first = PartOf(made.manifest, 0), second = PartOf(made.manifest, 1);
  first.version = 1;
  const Result<Manifest> merged = MergeManifests({first, second});
  ASSERT_TRUE(merged.ok()) << merged.status().message();
  EXPECT_EQ(merged.value().version, 2u);
  EXPECT_TRUE(ParseManifest(EncodeManifest(merged.value()).value()).ok());
}

TEST(MergeTest, RanksThatDisagreeAreRefused) {
  const Sample sample;
  const Manifest first = PartOf(sample.manifest, 0);
  const struct {
    std::function<void(Manifest*)> change;
    const char* says;
  } cases[] = {
      {[](Manifest* part) { part->step = 43; }, "part 1 of the checkpoint has another step"},
      {[](Manifest* part) { part->algorithm = OFFLOAD_ADAM; }, "another algorithm"},
      {[](Manifest* part) { part->masters_only = true; }, "another choice of moments"},
      {[](Manifest* part) { part->layout = "split"; }, "another state layout"},
      {[](Manifest* part) { part->world = 3; }, "another world"},
      {[](Manifest* part) { part->block_bytes = 8192; }, "another block size"},
      {[](Manifest* part) { part->params[0].dtype = OFFLOAD_FP32; },
       "\"embed.weight\" has another global shape or dtype"},
      {[](Manifest* part) {
         part->params[0].shape = {6, 6};
       },
       "another global shape or dtype"},
      {[](Manifest* part) { part->params[1].shards[0].shard.range_begin = 12; },
       "param \"blocks.0.\"qkv\"\": stored shards 0 and 1 both hold element (1, 4) of the tensor; "
       "one rank saves a replica, the others set OFFLOAD_PARAM_REPLICA"},
  };
  for (const auto& c : cases) {
    Manifest second = PartOf(sample.manifest, 1);
    c.change(&second);
    const Result<Manifest> merged = MergeManifests({first, second});
    ASSERT_FALSE(merged.ok()) << c.says;
    EXPECT_EQ(merged.status().code(), OFFLOAD_CHECKPOINT_MISMATCH);
    EXPECT_NE(merged.status().message().find(c.says), std::string::npos)
        << merged.status().message();
  }
}

}  // namespace
}  // namespace hybridopt::checkpoint
