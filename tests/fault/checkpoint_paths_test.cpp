// The call of a save or load decides what its path means, and refuses paths that can never work.
#include <gtest/gtest.h>

#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>

#include "../differential/lifecycle_rig.h"
#include "../temporary_directory.h"

namespace hybridopt {
namespace {

Problem SmallProblem() {
  return RandomProblem(OFFLOAD_ADAMW, {{OFFLOAD_BF16, OFFLOAD_BF16, 0, 0, 500}}, 2, 5);
}

// The first file operation of queued work waits until the test lets it go on.
class HeldFiles : public system::Files {
 public:
  int List(const std::string& path, std::vector<std::string>* names) override {
    Wait();
    return Files::List(path, names);
  }
  int OpenFile(const std::string& path, Open how) override {
    Wait();
    return Files::OpenFile(path, how);
  }
  void Hold() { Set(true); }
  void Release() { Set(false); }

 private:
  void Set(bool held) {
    std::lock_guard lock(mutex_);
    held_ = held;
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !held_; });
  }
  std::mutex mutex_;
  std::condition_variable changed_;
  bool held_ = false;
};

class CheckpointPathsTest : public testing::Test {
 protected:
  CheckpointPathsTest() {
    setting_.device_kind = OFFLOAD_DEVICE_HOST;
    setting_.threads = 1;
    setting_.movable = 0;
    setting_.files = &files_;
    rig_.emplace(solved_.problem, setting_);
  }
  ~CheckpointPathsTest() override { std::filesystem::current_path(before_); }

  void Step(size_t step) {
    rig_->NewGrads(solved_.problem.steps[step]);
    rig_->BindAll();
    rig_->Step(solved_.problem.steps[step]);
    rig_->Wait();
  }
  void RefuseSave(const std::string& path, const std::string& text) {
    auto options = Make<offload_save_options_t>();
    options.path = path.c_str();
    EXPECT_EQ(offload_optimizer_save(rig_->optimizer(), &options, nullptr),
              OFFLOAD_INVALID_ARGUMENT)
        << text;
    EXPECT_NE(std::string(offload_last_error()).find(text), std::string::npos)
        << offload_last_error();
    EXPECT_TRUE(here_.Names().empty());
  }

  const std::filesystem::path before_ = std::filesystem::current_path();
  const TemporaryDirectory here_, there_;
  const Solved solved_{SmallProblem()};
  HeldFiles files_;
  LifecycleSetting setting_;
  std::optional<LifecycleRig> rig_;
};

TEST_F(CheckpointPathsTest, ARelativePathKeepsItsMeaningWhileWorkIsQueued) {
  std::filesystem::create_directory(here_ / "run");
  std::filesystem::create_directory(there_ / "run");
  Step(0);
  std::filesystem::current_path(here_.path());
  files_.Hold();
  const offload_ticket_t saved = rig_->Save("run/step-1");
  std::filesystem::current_path(there_.path());
  files_.Release();
  rig_->Wait(saved);
  EXPECT_EQ(here_.NamesIn(here_ / "run"), std::vector<std::string>{"step-1"});
  EXPECT_TRUE(there_.NamesIn(there_ / "run").empty());

  // Another state of the same name lies where the process will be.
  Step(1);
  rig_->Wait(rig_->Save("run/step-1"));
  std::filesystem::current_path(here_.path());
  auto options = Make<offload_load_options_t>();
  options.path = "run/step-1";
  offload_ticket_t loaded = 0;
  files_.Hold();
  MUST(offload_optimizer_load(rig_->optimizer(), &options, &loaded));
  std::filesystem::current_path(there_.path());
  files_.Release();
  rig_->Wait(loaded);
  EXPECT_EQ(rig_->Difference(solved_.trace[1]), "");
}

TEST_F(CheckpointPathsTest, NamesThatCanNeverWorkAreRefusedByTheCall) {
  RefuseSave(here_ / ".step-1", "options.path '" + (here_ / ".step-1") + "': a name that begins");
  RefuseSave(here_ / "step\xff", "options.path: the 5 bytes of its last part are not UTF-8");
  RefuseSave(here_ / std::string(231, 'n'),
             "231 of them its name: more than the file system takes");
  RefuseSave(here_ / (std::string(300, 'n') + "/step-1"), "more than the file system takes");
  RefuseSave(here_ / "none/step-1", "its parent '" + (here_ / "none") + "' cannot be used");

  auto options = Make<offload_load_options_t>();
  const std::string path = here_ / std::string(256, 'n');
  options.path = path.c_str();
  EXPECT_EQ(offload_optimizer_load(rig_->optimizer(), &options, nullptr), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_NE(std::string(offload_last_error()).find("options.path '" + here_.path()),
            std::string::npos)
      << offload_last_error();
  EXPECT_NE(std::string(offload_last_error()).find("so no checkpoint can be there"),
            std::string::npos)
      << offload_last_error();
  // The longest possible path.
  const std::string longest = here_ / std::string(230, 'n');
  rig_->Wait(rig_->Save(longest));
  EXPECT_EQ(rig_->TryLoad(longest), OFFLOAD_OK);
}

TEST_F(CheckpointPathsTest, WhatIsInTheWayIsToldByTheCall) {
  std::ofstream(there_ / "file") << "bytes";
  std::filesystem::create_symlink("nowhere", there_ / "dangling");
  for (const std::string& name : {there_ / "file", there_ / "dangling"}) {
    for (const char* const slashes : {"", "/", "//"})
      RefuseSave(name + slashes,
                 "options.path '" + name + slashes + "' exists; a checkpoint never");
    RefuseSave(name + "/step-1", "its parent '" + name + "' cannot be used: ");
  }
  EXPECT_EQ(there_.Names(), (std::vector<std::string>{"dangling", "file"}));
  // Slashes after a free name are not a part of the name.
  rig_->Wait(rig_->Save(here_ / "step-1//"));
  EXPECT_EQ(here_.Names(), std::vector<std::string>{"step-1"});
}

TEST_F(CheckpointPathsTest, AWorkingDirectoryThatIsGoneIsTold) {
  std::filesystem::create_directory(here_ / "gone");
  std::filesystem::current_path(here_ / "gone");
  std::filesystem::remove(here_ / "gone");
  RefuseSave("step-1",
             "options.path 'step-1' is relative, but the working directory cannot be told");
  auto options = Make<offload_load_options_t>();
  options.path = "step-1";
  EXPECT_EQ(offload_optimizer_load(rig_->optimizer(), &options, nullptr), OFFLOAD_INVALID_ARGUMENT);
}

// A param whose name is not UTF-8 can be stepped, but not saved.
TEST(CheckpointNames, AParamThatIsNotUtf8IsRefusedByTheSave) {
  auto context_options = Make<offload_context_options_t>();
  context_options.device_kind = OFFLOAD_DEVICE_HOST;
  context_options.threads = 1;
  offload_context_t context = nullptr;
  MUST(offload_context_create(&context_options, &context));
  auto optimizer_options = Make<offload_optimizer_options_t>();
  optimizer_options.algorithm = OFFLOAD_SGD;
  offload_optimizer_t optimizer = nullptr;
  MUST(offload_optimizer_create(context, &optimizer_options, &optimizer));
  auto group = Make<offload_group_t>();
  group.lr = 0.1;
  uint32_t id = 0;
  MUST(offload_optimizer_add_group(optimizer, &group, &id));
  std::vector<float> data(8), more(8);
  auto param = Make<offload_param_t>();
  param.dtype = param.grad_dtype = OFFLOAD_FP32;
  param.count = 8;
  param.name = "w";
  param.data = data.data();
  MUST(offload_optimizer_add_params(optimizer, &param, 1, nullptr));
  param.name = "\xc3(";
  param.data = more.data();
  MUST(offload_optimizer_add_params(optimizer, &param, 1, nullptr));
  MUST(offload_optimizer_commit(optimizer, nullptr));
  const TemporaryDirectory directory;
  const std::string path = directory / "new";
  auto options = Make<offload_save_options_t>();
  options.path = path.c_str();
  EXPECT_EQ(offload_optimizer_save(optimizer, &options, nullptr), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_STREQ(offload_last_error(),
               "params.name of param 1 is not UTF-8, which a checkpoint's files need; register it "
               "by another name");
  EXPECT_TRUE(directory.Names().empty());
  MUST(offload_optimizer_destroy(optimizer));
  MUST(offload_context_destroy(context));
}

}  // namespace
}  // namespace hybridopt
