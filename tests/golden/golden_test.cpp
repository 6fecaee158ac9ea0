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

#include "../fake_root.h"
#include "checkpoint/format/reshard.h"
#include "checkpoint/reader.h"
#include "kernels/convert.h"
#include "offload.h"

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
    shard.global_shape[d] = shard.boxes[0].size[d] = shape[d];
    shard.range_count *= static_cast<uint64_t>(shape[d]);
  }
  return shard;
}

std::string BytesOf(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

TEST_P(GoldenTest, OpensAndEveryElementIsWhatWasWritten) {
  const Result<Reader> reader = Reader::Open(system::SystemFiles(), path());
  ASSERT_TRUE(reader.ok()) << reader.status().message();
  const Manifest& manifest = reader.value().manifest();
  EXPECT_EQ(manifest.algorithm, GetParam().made.manifest.algorithm);
  EXPECT_EQ(manifest.masters_only, GetParam().made.manifest.masters_only);
  EXPECT_EQ(manifest.step, 42u);
  EXPECT_EQ(manifest.version, GetParam().made.manifest.version);
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
      EXPECT_EQ(shard.tensors.size(), HasElements(param) ? GetParam().made.kinds.size() : 0);
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

// An optimizer of the golden checkpoint's params, whole, on the host.
class Trainer {
 public:
  explicit Trainer(const Golden& golden) : golden_(golden) {
    offload_context_options_t context_options{};
    context_options.struct_size = sizeof(context_options);
    context_options.threads = 1;
    Expect(offload_context_create(&context_options, &context_));
    offload_optimizer_options_t options{};
    options.struct_size = sizeof(options);
    options.algorithm = golden.made.manifest.algorithm;
    Expect(offload_optimizer_create(context_, &options, &optimizer_));
    uint32_t group = 0;
    Expect(offload_optimizer_add_group(optimizer_, &golden.made.manifest.groups[0], &group));
    const std::vector<StoredParam>& params = golden.made.manifest.params;
    data_.resize(params.size());
    for (size_t p = 0; p < params.size(); ++p) AddParam(p, params[p]);
    Expect(offload_optimizer_commit(optimizer_, nullptr));
  }
  ~Trainer() {
    Expect(offload_optimizer_destroy(optimizer_));
    Expect(offload_context_destroy(context_));
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  int32_t Load(const std::string& path, uint32_t flags = 0) {
    return Finish(offload_optimizer_load, path, flags);
  }
  int32_t Save(const std::string& path, uint32_t flags = 0) {
    return Finish(offload_optimizer_save, path, flags);
  }

  // One kind of state of one param, and how many steps it has seen.
  void ExpectState(uint32_t param, int32_t kind, bool zero, uint64_t step_count) {
    offload_state_view_t view{};
    view.struct_size = sizeof(view);
    ASSERT_EQ(offload_optimizer_state(optimizer_, param, kind, &view), OFFLOAD_OK)
        << offload_last_error();
    EXPECT_EQ(view.step_count, step_count);
    ASSERT_EQ(view.host_count, counts_[param]);
    for (uint64_t i = 0; i < view.host_count; ++i) {
      const float expected = zero ? 0 : Element(param, kind, i);
      ASSERT_EQ(std::memcmp(static_cast<const float*>(view.host_data) + i, &expected, 4), 0)
          << "param " << param << ", kind " << kind << ", element " << i;
    }
  }
  // The param itself: its masters, rounded.
  void ExpectData(uint32_t param) {
    const int32_t dtype = golden_.made.manifest.params[param].dtype;
    for (uint64_t i = 0; i < counts_[param]; ++i) {
      const float master = Element(param, OFFLOAD_STATE_MASTER, i);
      const uint16_t half = dtype == OFFLOAD_FP16 ? Fp32ToFp16(master) : Fp32ToBf16(master);
      const bool wide = dtype == OFFLOAD_FP32;
      const size_t bytes = wide ? sizeof(master) : sizeof(half);
      const void* expected = wide ? static_cast<const void*>(&master) : &half;
      ASSERT_EQ(std::memcmp(data_[param].data() + i * bytes, expected, bytes), 0);
    }
  }

 private:
  template <typename Options>
  int32_t Finish(int32_t (*transfer)(offload_optimizer_t, const Options*, offload_ticket_t*),
                 const std::string& path, uint32_t flags) {
    Options options{};
    options.struct_size = sizeof(options);
    options.path = path.c_str();
    options.flags = flags;
    offload_ticket_t ticket = 0;
    const int32_t status = transfer(optimizer_, &options, &ticket);
    return status != OFFLOAD_OK ? status : offload_optimizer_wait(optimizer_, ticket, -1);
  }

  static void Expect(int32_t status) { EXPECT_EQ(status, OFFLOAD_OK) << offload_last_error(); }

  void AddParam(size_t p, const StoredParam& stored) {
    counts_.push_back(Whole(stored.shape).range_count);
    data_[p].resize(counts_[p] * sizeof(float));
    const std::vector<int64_t> zeros(stored.shape.size(), 0);
    offload_shard_t shard{};
    shard.struct_size = sizeof(shard);
    shard.dimensions = static_cast<uint32_t>(stored.shape.size());
    shard.box_count = 1;
    shard.global_shape = stored.shape.data();
    shard.box_offsets = zeros.data();
    shard.box_extents = stored.shape.data();
    offload_param_t param{};
    param.struct_size = sizeof(param);
    param.dtype = stored.dtype;
    param.grad_dtype = OFFLOAD_FP32;
    param.name = stored.name.c_str();
    param.data = counts_[p] > 0 ? data_[p].data() : nullptr;
    param.count = counts_[p];
    param.shard = &shard;
    Expect(offload_optimizer_add_params(optimizer_, &param, 1, nullptr));
  }

  const Golden& golden_;
  offload_context_t context_ = nullptr;
  offload_optimizer_t optimizer_ = nullptr;
  std::vector<std::vector<std::byte>> data_;
  std::vector<uint64_t> counts_;
};

TEST_P(GoldenTest, LoadsIntoAnOptimizerAndIsSavedAgain) {
  const Golden& golden = GetParam();
  const bool masters_only = golden.made.manifest.masters_only;
  Trainer trainer(golden);
  if (masters_only) {
    EXPECT_EQ(trainer.Load(path()), OFFLOAD_CHECKPOINT_MISMATCH);
  }
  const uint32_t flags = masters_only ? OFFLOAD_LOAD_FRESH_MOMENTS | OFFLOAD_LOAD_KEEP_STEPS : 0;
  ASSERT_EQ(trainer.Load(path(), flags), OFFLOAD_OK) << offload_last_error();
  std::vector<int32_t> kinds = golden.made.kinds;
  if (masters_only) kinds = {OFFLOAD_STATE_MASTER, OFFLOAD_STATE_EXP_AVG, OFFLOAD_STATE_EXP_AVG_SQ};
  for (uint32_t p = 0; p < golden.made.manifest.params.size(); ++p) {
    const bool stored = !golden.made.manifest.params[p].shards.empty();
    if (!stored) continue;
    for (int32_t kind : kinds)
      trainer.ExpectState(p, kind, masters_only && kind != OFFLOAD_STATE_MASTER, 41 + p);
    trainer.ExpectData(p);
  }
  // A save by this release contains exactly what it has loaded.
  const FakeRoot root;
  const std::string saved = root.path() + "/saved";
  ASSERT_EQ(trainer.Save(saved, masters_only ? OFFLOAD_SAVE_MASTERS_ONLY : 0), OFFLOAD_OK)
      << offload_last_error();
  ASSERT_EQ(offload_checkpoint_verify(saved.c_str(), nullptr), OFFLOAD_OK) << offload_last_error();
  Trainer again(golden);
  ASSERT_EQ(again.Load(saved, flags), OFFLOAD_OK) << offload_last_error();
  for (uint32_t p = 0; p < golden.made.manifest.params.size(); ++p)
    if (!golden.made.manifest.params[p].shards.empty())
      for (int32_t kind : kinds)
        again.ExpectState(p, kind, masters_only && kind != OFFLOAD_STATE_MASTER, 41 + p);
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
