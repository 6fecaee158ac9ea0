// offload_checkpoint_inspect, _verify and _newest: what a caller without an optimizer sees of good
// and of damaged checkpoints.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "../fake_root.h"
#include "../sample_checkpoint.h"
#include "offload.h"

namespace hybridopt::checkpoint {
namespace {

class InspectTest : public testing::Test {
 protected:
  InspectTest() : path_(root_.path() + "/step-42") { sample_.Write(path_); }

  void Damage(size_t file, size_t byte) {
    sample_.files[file][byte] ^= 1;
    Sample::WriteFile(path_ + "/" + sample_.manifest.files[file].name, sample_.files[file]);
  }
  static void ExpectError(int32_t status, int32_t expected, const std::string& says) {
    EXPECT_EQ(status, expected) << offload_last_error();
    EXPECT_NE(std::string(offload_last_error()).find(says), std::string::npos)
        << offload_last_error() << "\nexpected: " << says;
  }

  FakeRoot root_;
  Sample sample_;
  std::string path_;
};

struct Seen {
  std::string name, file;
  int32_t kind, dtype;
  uint32_t rank, box_count;
  uint64_t range_begin, range_count, file_offset, bytes, step_count;
  std::vector<int64_t> shape, offsets, extents;
};

TEST_F(InspectTest, TellsTheWholeAndEveryTensor) {
  offload_checkpoint_info_t info{};
  info.struct_size = sizeof(info);
  std::vector<Seen> seen;
  const auto visit = [](void* user, const offload_checkpoint_tensor_t* tensor) {
    const uint32_t dimensions = tensor->dimensions;
    EXPECT_EQ(tensor->struct_size, sizeof(*tensor));
    static_cast<std::vector<Seen>*>(user)->push_back(
        {tensor->name,
         tensor->file,
         tensor->kind,
         tensor->dtype,
         tensor->rank,
         tensor->box_count,
         tensor->range_begin,
         tensor->range_count,
         tensor->file_offset,
         tensor->bytes,
         tensor->step_count,
         {tensor->global_shape, tensor->global_shape + dimensions},
         {tensor->box_offsets, tensor->box_offsets + dimensions},
         {tensor->box_extents, tensor->box_extents + dimensions}});
  };
  ASSERT_EQ(offload_checkpoint_inspect(path_.c_str(), &info, visit, &seen), OFFLOAD_OK)
      << offload_last_error();
  EXPECT_EQ(info.format_version, 1u);
  EXPECT_EQ(info.algorithm, OFFLOAD_ADAMW);
  EXPECT_EQ(info.save_flags, 0u);
  EXPECT_EQ(info.world, 2u);
  EXPECT_EQ(info.group_count, 2u);
  EXPECT_EQ(info.step, 42u);
  EXPECT_EQ(info.param_count, 4u);
  EXPECT_EQ(info.tensor_count, 15u);
  EXPECT_EQ(info.file_count, 2u);
  EXPECT_EQ(info.bytes, 3u * 4 * (30 + 32 + 1100));
  ASSERT_EQ(seen.size(), 15u);
  const Seen& column = seen[4];
  EXPECT_EQ(column.name, "embed.weight");
  EXPECT_EQ(column.file, "shard-00001-of-00002.safetensors");
  EXPECT_EQ(column.kind, OFFLOAD_STATE_EXP_AVG);
  EXPECT_EQ(column.dtype, OFFLOAD_FP32);
  EXPECT_EQ(column.rank, 1u);
  EXPECT_EQ(column.box_count, 1u);
  EXPECT_EQ(column.shape, (std::vector<int64_t>{6, 5}));
  EXPECT_EQ(column.offsets, (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(column.extents, (std::vector<int64_t>{6, 3}));
  EXPECT_EQ(column.range_count, 18u);
  EXPECT_EQ(column.bytes, 72u);
  EXPECT_EQ(column.file_offset, 4096u + 72);
  EXPECT_EQ(column.step_count, 41u);
  EXPECT_EQ(seen[9].range_begin, 13u);

  sample_.manifest.masters_only = true;
  sample_.Fill();
  sample_.Write(path_);
  ASSERT_EQ(offload_checkpoint_inspect(path_.c_str(), &info, nullptr, nullptr), OFFLOAD_OK);
  EXPECT_EQ(info.save_flags, static_cast<uint32_t>(OFFLOAD_SAVE_MASTERS_ONLY));
}

TEST_F(InspectTest, ABadCheckpointIsNotVisited) {
  Damage(0, 9);
  int visits = 0;
  const auto visit = [](void* user, const offload_checkpoint_tensor_t*) {
    *static_cast<int*>(user) += 1;
  };
  ExpectError(offload_checkpoint_inspect(path_.c_str(), nullptr, visit, &visits),
              OFFLOAD_CHECKPOINT_CORRUPT, "shard-00000-of-00002.safetensors': the header's hash");
  EXPECT_EQ(visits, 0);
  ExpectError(offload_checkpoint_verify(path_.c_str(), nullptr), OFFLOAD_CHECKPOINT_CORRUPT,
              "the header's hash");
  ExpectError(
      offload_checkpoint_inspect("/nowhere", nullptr, nullptr, nullptr), OFFLOAD_IO_FAILED,
      "could not open '/nowhere/manifest.json', as it is not there; give the directory of a "
      "checkpoint (offload_checkpoint_newest finds the newest in a directory)");
}

TEST_F(InspectTest, VerifyNamesDamageAndTellsProgress) {
  offload_verify_options_t options{};
  options.struct_size = sizeof(options);
  options.io_depth = 2;
  std::vector<uint64_t> told;
  options.progress_user = &told;
  options.progress = [](void* user, uint64_t done, uint64_t total) {
    EXPECT_EQ(total, 3u * 4 * (30 + 32 + 1100));
    static_cast<std::vector<uint64_t>*>(user)->push_back(done);
  };
  ASSERT_EQ(offload_checkpoint_verify(path_.c_str(), &options), OFFLOAD_OK);
  EXPECT_TRUE(std::is_sorted(told.begin(), told.end()));
  EXPECT_EQ(told.back(), 3u * 4 * (30 + 32 + 1100));
  ASSERT_EQ(offload_checkpoint_verify(path_.c_str(), nullptr), OFFLOAD_OK);
  Damage(1, sample_.files[1].size() - 1);
  ExpectError(offload_checkpoint_verify(path_.c_str(), &options), OFFLOAD_CHECKPOINT_CORRUPT,
              "a block is damaged: head.weight.exp_avg_sq of rank 1, block 1 of 2 "
              "(shard-00001-of-00002.safetensors, bytes ");
  options.io_depth = 65;
  ExpectError(offload_checkpoint_verify(path_.c_str(), &options), OFFLOAD_INVALID_ARGUMENT,
              "io_depth is 65, expected 1 to 64, or 0 for 4");
}

TEST_F(InspectTest, TheNewestIsWrittenWhereThereIsRoom) {
  std::string path(path_.size() + 1, 'x');
  ASSERT_EQ(offload_checkpoint_newest(root_.path().c_str(), nullptr, path.data(), path.size()),
            OFFLOAD_OK);
  EXPECT_STREQ(path.c_str(), path_.c_str());
  ExpectError(offload_checkpoint_newest(root_.path().c_str(), nullptr, path.data(), path_.size()),
              OFFLOAD_INVALID_ARGUMENT,
              "path_bytes is " + std::to_string(path_.size()) + ", '" + path_ + "' needs " +
                  std::to_string(path_.size() + 1));
  Damage(0, 9);
  ExpectError(offload_checkpoint_newest(root_.path().c_str(), nullptr, path.data(), path.size()),
              OFFLOAD_INVALID_STATE, "holds no good checkpoint");
}

// A job that resumes by itself asks for one whose data is good too.
TEST_F(InspectTest, TheNewestIsVerifiedIfAskedFor) {
  Sample later;
  later.manifest.step += 1;
  later.Fill();
  later.Write(root_.path() + "/later");
  std::string path(path_.size() + 100, 'x');
  auto verify = offload_verify_options_t{};
  verify.struct_size = sizeof(verify);
  const auto newest = [&](const offload_verify_options_t* options) {
    return offload_checkpoint_newest(root_.path().c_str(), options, path.data(), path.size());
  };
  ASSERT_EQ(newest(&verify), OFFLOAD_OK) << offload_last_error();
  EXPECT_EQ(path.c_str(), root_.path() + "/later");

  // Changes one byte of its data: only a call that reads the data notices this.
  const std::string shard = root_.path() + "/later/" + later.manifest.files[0].name;
  std::string bytes = later.files[0];
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  Sample::WriteFile(shard, bytes);
  ASSERT_EQ(newest(nullptr), OFFLOAD_OK);
  EXPECT_EQ(path.c_str(), root_.path() + "/later");
  uint64_t told = 0;
  verify.progress_user = &told;
  verify.progress = [](void* user, uint64_t, uint64_t) { *static_cast<uint64_t*>(user) += 1; };
  ASSERT_EQ(newest(&verify), OFFLOAD_OK) << offload_last_error();
  EXPECT_EQ(path.c_str(), path_);
  EXPECT_GT(told, 0u);

  Damage(0, sample_.files[0].size() - 1);
  ExpectError(newest(&verify), OFFLOAD_INVALID_STATE, "a block is damaged");
  verify.io_depth = 65;
  ExpectError(newest(&verify), OFFLOAD_INVALID_ARGUMENT, "io_depth is 65");
}

TEST_F(InspectTest, NullsAreRefused) {
  char path[8];
  ExpectError(offload_checkpoint_inspect(nullptr, nullptr, nullptr, nullptr),
              OFFLOAD_INVALID_ARGUMENT, "path is NULL");
  ExpectError(offload_checkpoint_verify(nullptr, nullptr), OFFLOAD_INVALID_ARGUMENT,
              "path is NULL");
  ExpectError(offload_checkpoint_newest(nullptr, nullptr, path, sizeof(path)),
              OFFLOAD_INVALID_ARGUMENT, "directory is NULL");
  ExpectError(offload_checkpoint_newest("/", nullptr, nullptr, 0), OFFLOAD_INVALID_ARGUMENT,
              "path is NULL");
  offload_checkpoint_info_t info{};
  ExpectError(offload_checkpoint_inspect(path_.c_str(), &info, nullptr, nullptr),
              OFFLOAD_INVALID_ARGUMENT, "info.struct_size is 0");
}

}  // namespace
}  // namespace hybridopt::checkpoint
