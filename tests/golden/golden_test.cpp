// The golden checkpoints load for ever, bit for bit.
// The directory they lie in comes from the environment, HYBRIDOPT_GOLDEN.
#include "golden.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/reader.h"
#include "checkpoint/reshard.h"

namespace hybridopt::checkpoint {
namespace {

namespace fs = std::filesystem;

std::string Directory() {
  const char* directory = std::getenv("HYBRIDOPT_GOLDEN");
  if (directory == nullptr) throw std::runtime_error("HYBRIDOPT_GOLDEN is not set");
  return directory;
}

class GoldenTest : public testing::TestWithParam<Golden> {
 protected:
  std::string path() const { return Directory() + "/" + GetParam().name; }
};

Shard Whole(const std::vector<int64_t>& shape) {
  Shard shard{};
  shard.dimensions = static_cast<uint32_t>(shape.size());
  shard.boxes.resize(1);
  shard.range_count = 1;
  for (size_t d = 0; d < shape.size(); ++d) {
    shard.global_shape[d] = shard.boxes[0].extent[d] = shape[d];
    shard.range_count *= static_cast<uint64_t>(shape[d]);
  }
  return shard;
}

std::string BytesOf(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

TEST_P(GoldenTest, OpensAndEveryElementIsWhatWasWritten) {
  const Result<Reader> reader = Reader::Open(prim::SystemFiles(), path());
  ASSERT_TRUE(reader.ok()) << reader.status().message();
  const Manifest& manifest = reader.value().manifest();
  EXPECT_EQ(manifest.algorithm, GetParam().made.manifest.algorithm);
  EXPECT_EQ(manifest.masters_only, GetParam().made.manifest.masters_only);
  EXPECT_EQ(manifest.step, 42u);
  ASSERT_EQ(manifest.groups.size(), 1u);
  EXPECT_EQ(std::memcmp(&manifest.groups[0], &GetParam().made.manifest.groups[0],
                        sizeof(offload_group_t)),
            0);
  const auto quiet = [](uint64_t, uint64_t) {};
  const Result<VerifyResult> verified = reader.value().Verify(1, quiet);
  ASSERT_TRUE(verified.ok() && verified.value().status().ok());
  ASSERT_EQ(manifest.params.size(), GetParam().made.manifest.params.size());
  for (size_t p = 0; p < manifest.params.size(); ++p) {
    const StoredParam& param = manifest.params[p];
    EXPECT_EQ(param.name, GetParam().made.manifest.params[p].name);
    EXPECT_EQ(param.shape, GetParam().made.manifest.params[p].shape);
    EXPECT_EQ(param.dtype, GetParam().made.manifest.params[p].dtype);
    std::vector<const Shard*> shards;
    for (const StoredShard& shard : param.shards) {
      shards.push_back(&shard.shard);
      EXPECT_EQ(shard.step_count, 41 + p);
      EXPECT_EQ(shard.tensors.size(), GetParam().made.kinds.size());
      for (const StoredTensor& tensor : shard.tensors) {
        const std::string file = BytesOf(reader.value().FilePath(tensor.file));
        for (uint64_t i = 0; i < shard.shard.range_count; ++i) {
          const float expected = Element(p, tensor.kind, shard.shard.GlobalIndex(i));
          ASSERT_EQ(std::memcmp(&file[tensor.offset + i * 4], &expected, 4), 0);
        }
      }
    }
    EXPECT_TRUE(CheckCoverage(shards, Whole(param.shape)).ok()) << param.name;
  }
}

INSTANTIATE_TEST_SUITE_P(Goldens, GoldenTest, testing::ValuesIn(Goldens()), [](const auto& info) {
  std::string name = info.param.name;
  name[name.find('-')] = '_';
  return name;
});

TEST(GoldensTest, NoneIsForgotten) {
  std::set<std::string> known, there;
  for (const Golden& golden : Goldens()) known.insert(golden.name);
  for (const fs::directory_entry& entry : fs::directory_iterator(Directory()))
    if (entry.is_directory()) there.insert(entry.path().filename());
  EXPECT_EQ(known, there);
}

}  // namespace
}  // namespace hybridopt::checkpoint
