// Limits: a model that cannot be saved is refused at commit, and values that only commit uses stay
// as they were then.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../temporary_directory.h"
#include "trainer.h"

namespace hybridopt::fault {
namespace {

void Save(const Trainer& trainer, const std::string& path) {
  auto options = Make<offload_save_options_t>();
  options.path = path.c_str();
  EXPECT_OFFLOAD_OK(offload_optimizer_save(trainer.optimizer, &options, nullptr));
  EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, -1));
}

void Load(const Trainer& trainer, const std::string& path, uint32_t flags) {
  auto options = Make<offload_load_options_t>();
  options.path = path.c_str();
  options.flags = flags;
  EXPECT_OFFLOAD_OK(offload_optimizer_load(trainer.optimizer, &options, nullptr));
  EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, -1));
}

offload_state_view_t ViewOf(const Trainer& trainer, uint32_t param, int32_t kind) {
  auto view = Make<offload_state_view_t>();
  EXPECT_OFFLOAD_OK(offload_optimizer_state(trainer.optimizer, param, kind, &view));
  return view;
}

RunOptions OnTheHost(int32_t algorithm) {
  RunOptions run;
  run.device_kind = OFFLOAD_DEVICE_HOST;
  run.algorithm = algorithm;
  return run;
}

TEST(LimitsTest, FreshMomentsAreThoseOfCommitWhateverSetGroupSaysLater) {
  const TemporaryDirectory directory;
  Trainer trainer(OnTheHost(OFFLOAD_ADAGRAD));
  trainer.group.initial_accumulator_value = 0.5;
  EXPECT_OFFLOAD_OK(offload_optimizer_set_group(trainer.optimizer, 0, &trainer.group));
  trainer.AddParams();
  trainer.Commit();
  trainer.Steps(0, 1);
  Save(trainer, directory / "saved");
  trainer.group.initial_accumulator_value = 2;
  trainer.group.lr = 0.25;
  EXPECT_OFFLOAD_OK(offload_optimizer_set_group(trainer.optimizer, 0, &trainer.group));
  Load(trainer, directory / "saved", OFFLOAD_LOAD_FRESH_MOMENTS);
  for (uint32_t param = 0; param < trainer.size(); ++param) {
    const offload_state_view_t view = ViewOf(trainer, param, OFFLOAD_STATE_SUM);
    const auto* const sum = static_cast<const float*>(view.host_data);
    ASSERT_GT(view.host_count, 0u);
    for (uint64_t i = 0; i < view.host_count; ++i) ASSERT_EQ(sum[i], 0.5f);
  }
}

TEST(LimitsTest, AStepAtTheLastCountSavesWhatCanBeRead) {
  constexpr uint64_t kLast = uint64_t{1} << 53;
  const TemporaryDirectory directory;
  Trainer trainer(OnTheHost(OFFLOAD_ADAMW));
  trainer.AddParams();
  trainer.Commit();
  EXPECT_OFFLOAD_OK(offload_optimizer_set_step_count(trainer.optimizer, 0, kLast));
  trainer.Steps(0, 1);
  EXPECT_EQ(ViewOf(trainer, 0, OFFLOAD_STATE_EXP_AVG).step_count, kLast);
  Save(trainer, directory / "saved");
  trainer.Steps(1, 2);
  const std::vector<unsigned char> bits = trainer.Bits();
  Load(trainer, directory / "saved", 0);
  EXPECT_EQ(ViewOf(trainer, 0, OFFLOAD_STATE_EXP_AVG).step_count, kLast);
  trainer.Steps(1, 2);
  EXPECT_TRUE(trainer.Bits() == bits);
}

TEST(LimitsTest, MoreNamesThanAFileHoldsAreRefusedAtCommit) {
  constexpr uint32_t kParams = 33'000;  // of names as long as they may be, three arrays each
  RunOptions run = OnTheHost(OFFLOAD_ADAMW);
  run.counts = {};
  Trainer trainer(run);
  std::vector<float> data(kParams);
  std::vector<std::string> names;
  std::vector<offload_param_t> params(kParams, Make<offload_param_t>());
  for (uint32_t i = 0; i < kParams; ++i) {
    const std::string number = std::to_string(i);
    names.push_back(number + std::string(1023 - number.size(), 'n'));
  }
  for (uint32_t i = 0; i < kParams; ++i) {
    params[i].name = names[i].c_str();
    params[i].dtype = params[i].grad_dtype = OFFLOAD_FP32;
    params[i].count = 1;
    params[i].data = &data[i];
  }
  EXPECT_OFFLOAD_OK(
      offload_optimizer_add_params(trainer.optimizer, params.data(), kParams, nullptr));
  ExpectError(offload_optimizer_commit(trainer.optimizer, nullptr), OFFLOAD_UNSUPPORTED,
              {"the names and shapes of one file take ", "at most 100000000 are allowed",
               "shorten their names"});
  ExpectError(offload_optimizer_step(trainer.optimizer, nullptr, nullptr), OFFLOAD_INVALID_STATE,
              {"commit"});
}

}  // namespace
}  // namespace hybridopt::fault
