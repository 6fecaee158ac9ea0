// The loads that are refused, the words of their errors, and that nothing changes then: damage
// anywhere, another model, flags that exclude each other. And the effects of flags that are
// accepted.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>

#include "../differential/lifecycle_rig.h"
#include "../temporary_directory.h"

namespace hybridopt {
namespace {

Problem SmallProblem() {
  return RandomProblem(
      OFFLOAD_ADAMW,
      {{OFFLOAD_BF16, OFFLOAD_BF16, 0, 0, 30}, {OFFLOAD_FP32, OFFLOAD_BF16, 0, 0, 21}}, 4, 31);
}

LifecycleSetting Setting(int32_t device_kind = OFFLOAD_DEVICE_HOST) {
  LifecycleSetting setting;
  setting.device_kind = device_kind;
  setting.threads = 1;
  setting.optimizer.device_fraction = 0.5;
  return setting;
}

void Step(LifecycleRig& rig, size_t step) { (void)rig.StepOnce(rig.problem().steps[step]); }

std::string ReadFile(const std::string& path) {
  std::ifstream stream(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(stream), {}};
}
void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary)
      .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

class CheckpointLoad : public testing::Test {
 protected:
  CheckpointLoad() {
    Step(rig_, 0);
    rig_.Wait(rig_.Save(path_));
    Step(rig_, 1);
  }
  std::string Text() const { return offload_last_error(); }
  // Loads the checkpoint into an optimizer of `problem`, which is the checkpoint's problem with a
  // change.
  int32_t LoadInto(const Problem& problem, uint32_t flags = 0) {
    LifecycleRig other(problem, Setting());
    const int32_t status = other.TryLoad(path_, flags);
    refusal_ = Text();  // the comparison looks for states that do not exist
    if (status != OFFLOAD_OK) {
      EXPECT_EQ(other.Difference(Model(problem)), "");
    }
    return status;
  }
  void ExpectMismatch(const Problem& problem, const std::vector<std::string>& words) {
    EXPECT_EQ(LoadInto(problem), OFFLOAD_CHECKPOINT_MISMATCH);
    for (const std::string& word : words)
      EXPECT_NE(refusal_.find(word), std::string::npos) << "'" << word << "' in: " << refusal_;
  }

  const Solved solved_{SmallProblem()};
  const TemporaryDirectory directory_;
  const std::string path_ = directory_ / "checkpoint";
  std::string refusal_;
  LifecycleRig rig_{solved_.problem, Setting(OFFLOAD_DEVICE_SIM)};
};

// One random bit of every byte; in turn each bit is met.
TEST_F(CheckpointLoad, EveryFlippedBitIsRefused) {
  Random random(1);
  uint64_t flips = 0;
  const uint64_t stride = 10 / static_cast<uint64_t>(std::max(1, Scaled(10)));
  for (const std::string& name : TemporaryDirectory::NamesIn(path_)) {
    const std::string file = path_ + "/" + name;
    const std::string good = ReadFile(file);
    for (size_t byte = random.Below(stride); byte < good.size(); byte += stride) {
      std::string bad = good;
      bad[byte] = static_cast<char>(bad[byte] ^ (1 << random.Below(8)));
      WriteFile(file, bad);
      const int32_t status = rig_.TryLoad(path_);
      ASSERT_TRUE(status == OFFLOAD_CHECKPOINT_CORRUPT || status == OFFLOAD_UNSUPPORTED)
          << name << ", byte " << byte << ": " << offload_status_name(status) << " " << Text();
      ASSERT_NE(Text().find(name), std::string::npos) << Text();
      ++flips;
    }
    WriteFile(file, good);
  }
  EXPECT_GT(flips, static_cast<uint64_t>(Scaled(4000)));
  EXPECT_EQ(rig_.Difference(solved_.trace[2]), "");
  EXPECT_EQ(rig_.TryLoad(path_), OFFLOAD_OK) << Text();
  EXPECT_EQ(rig_.Difference(solved_.trace[1]), "");
}

TEST_F(CheckpointLoad, EveryTruncationAndEveryLongerFileIsRefused) {
  const uint64_t stride = 50 / static_cast<uint64_t>(std::max(1, Scaled(10)));
  for (const std::string& name : TemporaryDirectory::NamesIn(path_)) {
    const std::string file = path_ + "/" + name;
    const std::string good = ReadFile(file);
    for (size_t bytes = 0; bytes < good.size(); bytes += stride) {
      WriteFile(file, good.substr(0, bytes));
      ASSERT_EQ(rig_.TryLoad(path_), OFFLOAD_CHECKPOINT_CORRUPT) << name << " of " << bytes;
    }
    for (const char* more : {" ", "\n{}", "\0"}) {
      WriteFile(file, good + std::string(more, more[0] == 0 ? 1 : std::strlen(more)));
      ASSERT_EQ(rig_.TryLoad(path_), OFFLOAD_CHECKPOINT_CORRUPT) << name << " and more";
    }
    std::filesystem::remove(file);
    ASSERT_EQ(rig_.TryLoad(path_), OFFLOAD_IO_FAILED) << name << " missing";
    WriteFile(file, good);
  }
  EXPECT_EQ(rig_.Difference(solved_.trace[2]), "");
}

// Without the hashes damage is not noticed; with them the error names the place.
TEST_F(CheckpointLoad, DamageIsNamedByTensorAndBlock) {
  const std::string file = path_ + "/" + "shard-00000-of-00001.safetensors";
  std::string bytes = ReadFile(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  WriteFile(file, bytes);
  EXPECT_EQ(rig_.TryLoad(path_), OFFLOAD_CHECKPOINT_CORRUPT);
  for (const char* word : {"block 0 of param1.exp_avg_sq", "nothing was changed", "shard-00000"})
    EXPECT_NE(Text().find(word), std::string::npos) << Text();
  EXPECT_EQ(rig_.Difference(solved_.trace[2]), "");
  EXPECT_EQ(rig_.TryLoad(path_, OFFLOAD_LOAD_NO_VERIFY), OFFLOAD_OK);
}

TEST_F(CheckpointLoad, AnotherModelIsRefusedWithItsDifferences) {
  Problem problem = solved_.problem;
  problem.params[0].count += 1;
  Random random(2);
  problem.initial[0] = RandomArray(problem.params[0].dtype, problem.params[0].count, false, random);
  ExpectMismatch(problem, {"param 'param0' has shape (", "here ("});

  problem = solved_.problem;
  std::swap(problem.params[0].dtype, problem.params[1].dtype);
  for (size_t id : {0, 1})
    problem.initial[id] =
        RandomArray(problem.params[id].dtype, problem.params[id].count, false, random);
  ExpectMismatch(problem, {"'param0' is in", "'param1' is in", "here in"});

  problem = solved_.problem;
  problem.params.push_back(problem.params[0]);
  problem.initial.push_back(problem.initial[0]);
  ExpectMismatch(problem, {"param 'param2' is missing"});

  problem = solved_.problem;
  problem.params.pop_back();
  problem.initial.pop_back();
  ExpectMismatch(problem, {"param 'param1' is stored, but not registered here"});

  problem = solved_.problem;
  problem.algorithm = OFFLOAD_ADAM;
  ExpectMismatch(problem,
                 {"was saved by AdamW, here its group is Adam", "OFFLOAD_LOAD_FRESH_MOMENTS"});

  // The algorithm of the param's group counts, and not that of the options.
  problem = solved_.problem;
  problem.groups[problem.params[1].group].algorithm = OFFLOAD_ADAM;
  ExpectMismatch(problem, {"'param1' of rank 0 was saved by AdamW, here its group is Adam"});

  // The error lists only the first few.
  problem = solved_.problem;
  for (int i = 0; i < 9; ++i) {
    problem.params.push_back(problem.params[0]);
    problem.initial.push_back(problem.initial[0]);
  }
  ExpectMismatch(problem, {"'param6' is missing", "and 4 more"});
}

TEST_F(CheckpointLoad, FreshMomentsTakeTheWeightsAlone) {
  // Adagrad's sum begins with a number of its own.
  Problem problem = solved_.problem;
  problem.algorithm = OFFLOAD_ADAGRAD;
  for (offload_group_t& group : problem.groups) {
    group = {};
    group.struct_size = sizeof(group);
    group.lr = 0.5;
    group.eps = 1e-8;
    group.initial_accumulator_value = 0.25;
  }
  for (uint32_t flags : {uint32_t{OFFLOAD_LOAD_FRESH_MOMENTS},
                         OFFLOAD_LOAD_FRESH_MOMENTS | uint32_t{OFFLOAD_LOAD_KEEP_STEPS}}) {
    for (int32_t device : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
      LifecycleRig other(problem, Setting(device));
      ASSERT_EQ(other.TryLoad(path_, flags), OFFLOAD_OK) << Text();
      Model expected(problem);
      for (size_t id = 0; id < problem.params.size(); ++id) {
        expected.params[id].data = solved_.trace[1].params[id].data;
        expected.params[id].master = solved_.trace[1].params[id].master;
        if ((flags & OFFLOAD_LOAD_KEEP_STEPS) != 0)
          expected.params[id].step_count = solved_.trace[1].params[id].step_count;
      }
      EXPECT_EQ(other.Difference(expected), "");
    }
  }
}

TEST_F(CheckpointLoad, MastersAloneLoadWithFreshMomentsOnly) {
  auto options = Make<offload_save_options_t>();
  const std::string path = directory_ / "masters";
  options.path = path.c_str();
  options.flags = OFFLOAD_SAVE_MASTERS_ONLY;
  MUST(offload_optimizer_save(rig_.optimizer(), &options, nullptr));
  rig_.Wait();
  EXPECT_LT(std::filesystem::file_size(path + "/shard-00000-of-00001.safetensors"),
            std::filesystem::file_size(path_ + "/shard-00000-of-00001.safetensors"));
  EXPECT_EQ(rig_.TryLoad(path), OFFLOAD_CHECKPOINT_MISMATCH);
  EXPECT_NE(Text().find("has no exp_avg (OFFLOAD_LOAD_FRESH_MOMENTS"), std::string::npos) << Text();
  EXPECT_EQ(rig_.TryLoad(path, OFFLOAD_LOAD_FRESH_MOMENTS), OFFLOAD_OK) << Text();
}

TEST_F(CheckpointLoad, BadOptionsAreRefusedAtOnce) {
  const auto expect = [&](int32_t status, int32_t expected, const char* word) {
    EXPECT_EQ(status, expected);
    EXPECT_NE(Text().find(word), std::string::npos) << Text();
  };
  auto load = Make<offload_load_options_t>();
  const auto load_now = [&] { return offload_optimizer_load(rig_.optimizer(), &load, nullptr); };
  expect(load_now(), OFFLOAD_INVALID_ARGUMENT, "options.path is NULL");
  load.path = "";
  expect(load_now(), OFFLOAD_INVALID_ARGUMENT, "options.path is empty");
  load.path = path_.c_str();
  load.flags = 8;
  expect(load_now(), OFFLOAD_UNSUPPORTED, "options.flags is 0x8, known to this call is 0x7");
  load.flags = OFFLOAD_LOAD_KEEP_STEPS;
  expect(load_now(), OFFLOAD_INVALID_ARGUMENT, "OFFLOAD_LOAD_KEEP_STEPS");
  load.flags = 0;
  load.io_depth = 65;
  expect(load_now(), OFFLOAD_INVALID_ARGUMENT, "options.io_depth is 65, expected at most 64");
  load.io_depth = 0;
  load.reserved = 1;
  expect(load_now(), OFFLOAD_UNSUPPORTED, "options.reserved is 1");
  load.reserved = 0;
  load.stream = &load;
  expect(load_now(), OFFLOAD_INVALID_ARGUMENT, "stream");

  auto save = Make<offload_save_options_t>();
  const auto save_now = [&] { return offload_optimizer_save(rig_.optimizer(), &save, nullptr); };
  expect(save_now(), OFFLOAD_INVALID_ARGUMENT, "options.path is NULL");
  save.path = "/";
  expect(save_now(), OFFLOAD_INVALID_ARGUMENT, "expected the name of a directory to make");
  save.path = "/nowhere/at/all";
  expect(save_now(), OFFLOAD_INVALID_ARGUMENT, "its parent '/nowhere/at' cannot be used");
  save.path = path_.c_str();
  expect(save_now(), OFFLOAD_INVALID_ARGUMENT, "never replaces anything");
  save.flags = 2;
  expect(save_now(), OFFLOAD_UNSUPPORTED, "known to this call is 0x1");
}

// Progress never decreases and ends with everything.
TEST_F(CheckpointLoad, ProgressIsTold) {
  struct Told {
    uint64_t last = 0, total = 0, calls = 0;
    bool wrong = false;
    static void Tell(void* user, uint64_t done, uint64_t total) {
      auto& told = *static_cast<Told*>(user);
      told.wrong = told.wrong || done < told.last || done > total ||
                   (told.total != 0 && told.total != total);
      told.last = done;
      told.total = total;
      told.calls += 1;
    }
  };
  const std::string path = directory_ / "told";
  Told saved, loaded;
  auto save = Make<offload_save_options_t>();
  save.path = path.c_str();
  save.progress = Told::Tell;
  save.progress_user = &saved;
  MUST(offload_optimizer_save(rig_.optimizer(), &save, nullptr));
  rig_.Wait();
  auto load = Make<offload_load_options_t>();
  load.path = path.c_str();
  load.progress = Told::Tell;
  load.progress_user = &loaded;
  MUST(offload_optimizer_load(rig_.optimizer(), &load, nullptr));
  rig_.Wait();
  const uint64_t state_bytes = 51 * 12;
  EXPECT_EQ(saved.total, std::filesystem::file_size(path + "/shard-00000-of-00001.safetensors"));
  EXPECT_EQ(loaded.total, 2 * state_bytes);  // compared, then read again
  for (const Told* told : {&saved, &loaded}) {
    EXPECT_FALSE(told->wrong);
    EXPECT_EQ(told->last, told->total);
    EXPECT_GT(told->calls, 0u);
  }
}

}  // namespace
}  // namespace hybridopt
