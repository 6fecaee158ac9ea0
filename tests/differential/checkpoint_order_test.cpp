// A save is at one point of the timeline: the files have the state of that point, in spite of work
// that is queued after it, and that work gives the same bits as without the save.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "../held_files.h"
#include "../temporary_directory.h"
#include "lifecycle_rig.h"

namespace hybridopt {
namespace {

// Files whose calls take random times.
class SlowFiles : public system::Files {
 public:
  explicit SlowFiles(uint64_t delay_us_max) : delay_us_max_(delay_us_max) {}
  int64_t Write(int file, const void* data, uint64_t bytes, uint64_t offset) override {
    Sleep();
    return Files::Write(file, data, bytes, offset);
  }
  int Allocate(int file, uint64_t bytes) override {
    Sleep();
    return Files::Allocate(file, bytes);
  }
  int Sync(int file) override {
    Sleep();
    return Files::Sync(file);
  }

 private:
  void Sleep() {
    const uint64_t turn = turn_.fetch_add(0x9e3779b97f4a7c15);
    std::this_thread::sleep_for(std::chrono::microseconds((turn >> 32) % delay_us_max_));
  }
  const uint64_t delay_us_max_;
  std::atomic<uint64_t> turn_ = 1;
};

constexpr size_t kSteps = 4;

LifecycleSetting SettingOf(system::Files& files, int32_t device_kind, double fraction) {
  LifecycleSetting setting;
  setting.device_kind = device_kind;
  setting.optimizer = {fraction, 1024, 2};
  setting.files = &files;
  return setting;
}

// The step's gradients in buffers of their own, so that several steps can be queued.
void QueueStep(LifecycleRig& rig, const StepInput& input) {
  for (uint32_t id = 0; id < rig.size(); ++id) {
    rig.grad[id] = nullptr;
    if (input.grads[id].has_value()) rig.NewGrad(id, *input.grads[id]);
  }
  rig.BindAll();
  rig.Step(input);
}

// Loads into an optimizer of another setting and compares with the model.
std::string LoadedDifference(const Problem& problem, const std::string& path, const Model& model) {
  LifecycleSetting setting;
  setting.device_kind = OFFLOAD_DEVICE_SIM;
  setting.optimizer = {0.5, 1024, 2};
  LifecycleRig rig(problem, setting);
  if (rig.TryLoad(path) != OFFLOAD_OK) return offload_last_error();
  return rig.Difference(model);
}

TEST(CheckpointOrder, StepsQueuedBehindASaveDoNotShowInIt) {
  uint64_t seed = 0;
  for (int round = 0; round < Scaled(2); ++round) {
    for (int32_t device : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
      for (double fraction : {0.0, 0.3, 1.0}) {
        for (uint64_t delay_ns : {0, 20'000}) {
          ++seed;
          const TemporaryDirectory directory;
          const Solved solved(RandomProblem(AlgorithmOfSeed(seed), AllDtypePairs(), kSteps, seed));
          SlowFiles files(3000);
          LifecycleSetting setting = SettingOf(files, device, fraction);
          setting.seed = seed;
          setting.delay_ns_max = device == OFFLOAD_DEVICE_SIM ? delay_ns : 0;
          setting.memory_bytes = 32 << 20;
          LifecycleRig rig(solved.problem, setting);
          for (size_t step = 0; step < kSteps; ++step) {
            rig.Save(directory / std::to_string(step), 1);
            QueueStep(rig, solved.problem.steps[step]);
          }
          rig.Wait();
          ASSERT_EQ(rig.Difference(solved.trace[kSteps]), "") << "seed " << seed;
          for (size_t step = 0; step < kSteps; ++step)
            ASSERT_EQ(LoadedDifference(solved.problem, directory / std::to_string(step),
                                       solved.trace[step]),
                      "")
                << "seed " << seed << ", step " << step << ", device " << device << ", fraction "
                << fraction;
        }
      }
    }
  }
}

// Larger than the blocks of one save: the step runs behind the save while the file is being
// written.
TEST(CheckpointOrder, AStepFollowsASaveOfManyBlocks) {
  const TemporaryDirectory directory;
  const std::vector<ParamSpec> params = {{OFFLOAD_BF16, OFFLOAD_BF16, 0, 0, 1 << 20},
                                         {OFFLOAD_FP32, OFFLOAD_BF16, 0, 0, 900'001},
                                         {OFFLOAD_FP16, OFFLOAD_FP32, 0, 0, 70'001}};
  const Solved solved(RandomProblem(OFFLOAD_ADAMW, params, 2, 5));
  for (int32_t device : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    SlowFiles files(2000);
    LifecycleSetting setting = SettingOf(files, device, 0.3);
    setting.optimizer.chunk_elements = 1 << 16;
    setting.memory_bytes = 128 << 20;
    LifecycleRig rig(solved.problem, setting);
    QueueStep(rig, solved.problem.steps[0]);
    rig.Save(directory / std::to_string(device), 1);
    QueueStep(rig, solved.problem.steps[1]);
    rig.Wait();
    ASSERT_EQ(rig.Difference(solved.trace[2]), "");
    ASSERT_EQ(rig.TryLoad(directory / std::to_string(device)), OFFLOAD_OK) << offload_last_error();
    EXPECT_EQ(rig.Difference(solved.trace[1]), "") << "device " << device;
  }
}

// Other calls that are queued behind a save that has not read anything yet.
class HeldSave : public testing::Test {
 protected:
  // After a failed assertion too the save must end, or destroy would wait for it.
  void TearDown() override { files_.before_reading = false; }

  // A save of the state after one step, which stands still.
  void Start(int32_t device, double fraction) {
    files_.before_reading = true;
    rig_.emplace(solved_.problem, SettingOf(files_, device, fraction));
    QueueStep(*rig_, solved_.problem.steps[0]);
    rig_->Wait();
    path_ = directory_ / (std::to_string(device) + "-" + std::to_string(fraction));
    save_ = rig_->Save(path_);
  }
  // Gives work after the save the time to go wrong, then lets the save go on.
  void Finish() {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), save_, 0), OFFLOAD_TIMED_OUT);
    files_.before_reading = false;
    rig_->Wait();
    EXPECT_EQ(LoadedDifference(solved_.problem, path_, solved_.trace[1]), "");
    files_.before_reading = true;
  }

  const Solved solved_{RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 3, 9)};
  const TemporaryDirectory directory_;
  HeldFiles files_;
  std::optional<LifecycleRig> rig_;
  std::string path_;
  offload_ticket_t save_ = 0;
};

constexpr double kFractions[] = {0.0, 0.3, 1.0};

TEST_F(HeldSave, AStep) {
  for (int32_t device : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    for (double fraction : kFractions) {
      Start(device, fraction);
      QueueStep(*rig_, solved_.problem.steps[1]);
      Finish();
      EXPECT_EQ(rig_->Difference(solved_.trace[2]), "");
    }
  }
}

TEST_F(HeldSave, ParamsAndStatesThatGoAndComeBackElsewhere) {
  for (int32_t device : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    for (double fraction : kFractions) {
      Start(device, fraction);
      rig_->Move(offload_optimizer_offload_states);
      const offload_ticket_t moved = rig_->Move(offload_optimizer_offload_params);
      std::thread opener([this] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        files_.before_reading = false;
      });
      rig_->Wait(moved);
      opener.join();
      Random random(1);
      rig_->FreeAll();
      rig_->AllocateAll(false, random);
      rig_->BindAll();
      rig_->Move(offload_optimizer_reload_params);
      rig_->Move(offload_optimizer_reload_states);
      rig_->Wait();
      EXPECT_EQ(LoadedDifference(solved_.problem, path_, solved_.trace[1]), "");
      QueueStep(*rig_, solved_.problem.steps[1]);
      rig_->Wait();
      EXPECT_EQ(rig_->Difference(solved_.trace[2]), "");
    }
  }
}

TEST_F(HeldSave, MastersRefreshedFromOtherWeights) {
  for (int32_t device : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    Start(device, 0.3);
    std::vector<void*> other;
    for (uint32_t id = 0; id < rig_->size(); ++id) {
      rig_->data[id] = rig_->Allocate(solved_.problem.params[id].data_bytes());
      rig_->Write(rig_->data[id], solved_.problem.initial[id]);
    }
    rig_->BindAll();
    rig_->Move(offload_optimizer_refresh_masters);
    Finish();
  }
}

TEST_F(HeldSave, AnotherSaveAndALoad) {
  Start(OFFLOAD_DEVICE_SIM, 0.3);
  QueueStep(*rig_, solved_.problem.steps[1]);
  const std::string second = directory_ / "second";
  rig_->Save(second);
  QueueStep(*rig_, solved_.problem.steps[2]);
  auto options = Make<offload_load_options_t>();
  options.path = second.c_str();
  MUST(offload_optimizer_load(rig_->optimizer(), &options, nullptr));
  Finish();
  EXPECT_EQ(rig_->Difference(solved_.trace[2]), "");
}

// Every place where states can be when a save is called.
TEST(CheckpointOrder, SavesFromWhereverStatesAndParamsAre) {
  const TemporaryDirectory directory;
  const Solved solved(RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 2, 11));
  int number = 0;
  for (int32_t device : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    for (double fraction : kFractions) {
      LifecycleSetting setting = SettingOf(system::SystemFiles(), device, fraction);
      LifecycleRig rig(solved.problem, setting);
      QueueStep(rig, solved.problem.steps[0]);
      const auto save = [&] {
        const std::string path = directory / std::to_string(++number);
        rig.Wait(rig.Save(path));
        EXPECT_EQ(LoadedDifference(solved.problem, path, solved.trace[1]), "") << path;
      };
      rig.Move(offload_optimizer_offload_states, {{1, 3, 5}});
      save();
      EXPECT_EQ(rig.TryLoad(directory / "1"), OFFLOAD_INVALID_STATE);
      EXPECT_NE(std::string(offload_last_error()).find("reload_states first"), std::string::npos);
      rig.Move(offload_optimizer_offload_states);
      save();
      rig.Move(offload_optimizer_offload_params, {{0, 3, 6}});
      save();
      rig.Move(offload_optimizer_offload_params);
      save();
      rig.Move(offload_optimizer_reload_states);
      save();
      EXPECT_EQ(rig.TryLoad(directory / "1"), OFFLOAD_INVALID_STATE);
      EXPECT_NE(std::string(offload_last_error()).find("bind and reload_params first"),
                std::string::npos);
      rig.BindAll();
      rig.Move(offload_optimizer_reload_params);
      save();
      EXPECT_EQ(rig.TryLoad(directory / std::to_string(number)), OFFLOAD_OK);
      QueueStep(rig, solved.problem.steps[1]);
      rig.Wait();
      EXPECT_EQ(rig.Difference(solved.trace[2]), "");
    }
  }
}

}  // namespace
}  // namespace hybridopt
