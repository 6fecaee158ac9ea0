// Storage that fails during a search for a checkpoint, and storage that hangs in any call of a save
// or load.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <filesystem>
#include <mutex>
#include <optional>

#include "../differential/lifecycle_rig.h"
#include "../temporary_directory.h"
#include "checkpoint/reader.h"
#include "faulty_files.h"

namespace hybridopt {
namespace {

Problem SmallProblem() {
  const std::vector<ParamSpec> params = {{OFFLOAD_BF16, OFFLOAD_BF16, 0, 0, 900},
                                         {OFFLOAD_FP32, OFFLOAD_BF16, 0, 0, 1100}};
  return RandomProblem(OFFLOAD_ADAMW, params, 4, 3);
}

LifecycleSetting SettingOf(system::Files& files) {
  LifecycleSetting setting;
  setting.device_kind = OFFLOAD_DEVICE_HOST;
  setting.movable = 0;
  setting.files = &files;
  return setting;
}

// ------------------------------------------------------------------------------------- newest --

Result<std::string> Newest(system::Files& files, const std::string& directory) {
  return checkpoint::NewestCheckpoint(files, directory, [&](const std::string& path) -> Status {
    HYBRIDOPT_ASSIGN(const checkpoint::Reader reader, checkpoint::Reader::Open(files, path));
    HYBRIDOPT_ASSIGN(const checkpoint::VerifyResult result,
                     reader.Verify(2, [](uint64_t, uint64_t) {}));
    return result.status();
  });
}

// A search that meets a failure returns the newest checkpoint; or the one before it, if the newest
// one could not be read; or an error that names the failure. It never reports that there is no
// checkpoint.
TEST(Storage, EveryFailureOfEveryCallOfASearchIsToldOrGoesRoundTheFile) {
  const Solved solved{SmallProblem()};
  const TemporaryDirectory directory;
  FaultyFiles files;
  {
    LifecycleRig rig(solved.problem, SettingOf(files));
    for (size_t step = 0; step < 2; ++step) {
      (void)rig.StepOnce(solved.problem.steps[step]);
      rig.Wait(rig.Save(directory / ("step-" + std::to_string(step + 1))));
    }
  }
  const std::string older = directory / "step-1", newest = directory / "step-2";
  std::filesystem::create_directory(directory / ".step-3.saving-0123456789abcdef");
  files.Inject(Operation::kOpen, 0, 0, false);
  files.Heal();
  ASSERT_EQ(Newest(files, directory.path()).value(), newest);
  uint64_t counts[kOperations];
  for (int i = 0; i < kOperations; ++i) counts[i] = files.count(Operation(i));
  uint64_t found = 0, gone_round = 0, told = 0;
  for (int i = 0; i < kOperations; ++i) {
    const Operation operation{i};
    for (uint64_t call = 0; call < counts[i]; ++call) {
      for (const int error : {EIO, ENOSPC, EMFILE, EINTR, kChanged}) {
        if (error == kChanged && operation != Operation::kRead) continue;
        for (const bool sticky : {false, true}) {
          const std::string what = std::string(OperationName(operation)) + " " +
                                   std::to_string(call) + ", error " + std::to_string(error) +
                                   (sticky ? ", from then on" : "");
          files.Inject(operation, call, error, sticky);
          const Result<std::string> result = Newest(files, directory.path());
          files.Heal();
          EXPECT_GT(files.failed(), 0u) << what;
          if (!result.ok()) {
            ++told;
            const std::string text = result.status().message();
            EXPECT_NE(text.find(directory.path()), std::string::npos) << what << ": " << text;
            EXPECT_TRUE(text.find("errno " + std::to_string(error)) != std::string::npos ||
                        error == kChanged)
                << what << ": " << text;
            EXPECT_TRUE(sticky || operation == Operation::kList) << what << ": " << text;
            continue;
          }
          // Only a checkpoint that could not be read is skipped; a signal is no reason for that.
          const bool harmless = operation == Operation::kClose || operation == Operation::kLook ||
                                (error == EINTR && operation != Operation::kSize);
          if (result.value() == newest) {
            ++found;
          } else {
            ++gone_round;
            EXPECT_EQ(result.value(), older) << what;
            EXPECT_FALSE(harmless && !sticky) << what;
          }
        }
      }
    }
  }
  std::printf("%llu found, %llu went round a file, %llu told\n",
              static_cast<unsigned long long>(found), static_cast<unsigned long long>(gone_round),
              static_cast<unsigned long long>(told));
  EXPECT_GT(found, 20u);
  EXPECT_GT(gone_round, 20u);
  EXPECT_GT(told, 10u);
}

// -------------------------------------------------------------------------------------- hangs --

// A disk that hangs in one call until the test lets it go on.
class HangingFiles : public system::Files {
 public:
  // The `call`-th call from now on hangs.
  void HangIn(uint64_t call) {
    std::lock_guard lock(mutex_);
    left_ = call;
    armed_ = true;
    hangs_ = false;
  }
  void LetGo() {
    std::lock_guard lock(mutex_);
    armed_ = false;
    changed_.notify_all();
  }
  bool hangs() {
    std::lock_guard lock(mutex_);
    return hangs_;
  }

  int OpenFile(const std::string& path, Open how) override {
    return Take(), Files::OpenFile(path, how);
  }
  int64_t Size(int file) override { return Take(), Files::Size(file); }
  int64_t Read(int file, void* data, uint64_t bytes, uint64_t offset) override {
    return Take(), Files::Read(file, data, bytes, offset);
  }
  int64_t Write(int file, const void* data, uint64_t bytes, uint64_t offset) override {
    return Take(), Files::Write(file, data, bytes, offset);
  }
  int Allocate(int file, uint64_t bytes) override { return Take(), Files::Allocate(file, bytes); }
  int Truncate(int file, uint64_t bytes) override { return Take(), Files::Truncate(file, bytes); }
  int Sync(int file) override { return Take(), Files::Sync(file); }
  int Close(int file) override { return Take(), Files::Close(file); }
  int Lock(int file) override { return Take(), Files::Lock(file); }
  int MakeDirectory(const std::string& path) override { return Take(), Files::MakeDirectory(path); }
  int List(const std::string& path, std::vector<std::string>* names) override {
    return Take(), Files::List(path, names);
  }
  int RenameNoReplace(const std::string& from, const std::string& to) override {
    return Take(), Files::RenameNoReplace(from, to);
  }

 private:
  void Take() {
    std::unique_lock lock(mutex_);
    if (!armed_ || left_-- != 0) return;
    hangs_ = true;
    changed_.wait(lock, [&] { return !armed_; });
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  uint64_t left_ = 0;  // guarded by mutex_, as all below
  bool armed_ = false;
  bool hangs_ = false;
};

// Long enough for the busiest machine; a test that is right never waits for it.
constexpr int64_t kMinuteNs = 60'000'000'000;

class HangTest : public testing::Test {
 protected:
  HangTest() : rig_(solved_.problem, SettingOf(files_)) {}

  // Waits until the disk hangs or the ticket is complete. Returns whether the disk hangs.
  bool Hangs(offload_ticket_t ticket) {
    while (!files_.hangs())
      if (offload_optimizer_wait(rig_.optimizer(), ticket, 1'000'000) != OFFLOAD_TIMED_OUT)
        return files_.hangs();
    return true;
  }
  // Another optimizer of the same context steps meanwhile, on the same threads.
  void ExpectOthersGoOn(const std::string& what) {
    auto options = Make<offload_optimizer_options_t>();
    options.algorithm = OFFLOAD_SGD;
    offload_optimizer_t other = nullptr;
    MUST(offload_optimizer_create(rig_.context(), &options, &other));
    auto group = Make<offload_group_t>();
    group.lr = 1;
    uint32_t id = 0;
    MUST(offload_optimizer_add_group(other, &group, &id));
    float data[2] = {1, 2};
    const float grad[2] = {0.5, 0.25};
    auto param = Make<offload_param_t>();
    param.name = "w";
    param.dtype = param.grad_dtype = OFFLOAD_FP32;
    param.count = 2;
    param.data = data;
    param.grad = grad;
    MUST(offload_optimizer_add_params(other, &param, 1, nullptr));
    MUST(offload_optimizer_commit(other, nullptr));
    offload_ticket_t ticket = 0;
    MUST(offload_optimizer_step(other, nullptr, &ticket));
    const int32_t status = offload_optimizer_wait(other, ticket, kMinuteNs);
    if (status != OFFLOAD_OK) files_.LetGo();  // or destroy would wait for it
    ASSERT_EQ(status, OFFLOAD_OK) << what;
    EXPECT_EQ(data[0], 0.5f) << what;
    MUST(offload_optimizer_destroy(other));
  }

  const Solved solved_{SmallProblem()};
  const TemporaryDirectory directory_;
  HangingFiles files_;
  LifecycleRig rig_;
};

TEST_F(HangTest, ASaveThatHangsInAnyCallHoldsNobodyElseUpAndIsWholeInTheEnd) {
  (void)rig_.StepOnce(solved_.problem.steps[0]);
  uint64_t hung = 0;
  for (uint64_t call = 0;; ++call) {
    const std::string path = directory_ / "new", what = "call " + std::to_string(call);
    files_.HangIn(call);
    const offload_ticket_t ticket = rig_.Save(path);
    const bool hangs = Hangs(ticket);
    if (hangs) {
      ++hung;
      EXPECT_EQ(offload_optimizer_wait(rig_.optimizer(), ticket, 0), OFFLOAD_TIMED_OUT) << what;
      ExpectOthersGoOn(what);
    }
    files_.LetGo();
    rig_.Wait(ticket);
    ASSERT_EQ(rig_.TryLoad(path), OFFLOAD_OK) << what << ": " << offload_last_error();
    ASSERT_EQ(rig_.Difference(solved_.trace[1]), "") << what;
    ASSERT_EQ(directory_.Names(), std::vector<std::string>{"new"}) << what;
    std::filesystem::remove_all(path);
    if (!hangs) break;  // there are no more calls
  }
  std::printf("hung in %llu calls\n", static_cast<unsigned long long>(hung));
  EXPECT_GT(hung, 15u);
}

TEST_F(HangTest, ALoadThatHangsInAnyCallHoldsNobodyElseUpAndIsWholeInTheEnd) {
  (void)rig_.StepOnce(solved_.problem.steps[0]);
  const std::string path = directory_ / "old";
  rig_.Wait(rig_.Save(path));
  uint64_t hung = 0;
  for (uint64_t call = 0;; ++call) {
    const std::string what = "call " + std::to_string(call);
    (void)rig_.StepOnce(solved_.problem.steps[1]);
    files_.HangIn(call);
    auto options = Make<offload_load_options_t>();
    options.path = path.c_str();
    offload_ticket_t ticket = 0;
    MUST(offload_optimizer_load(rig_.optimizer(), &options, &ticket));
    const bool hangs = Hangs(ticket);
    if (hangs) {
      ++hung;
      EXPECT_EQ(offload_optimizer_wait(rig_.optimizer(), ticket, 0), OFFLOAD_TIMED_OUT) << what;
      ExpectOthersGoOn(what);
    }
    files_.LetGo();
    rig_.Wait(ticket);
    ASSERT_EQ(rig_.Difference(solved_.trace[1]), "") << what;
    if (!hangs) break;
  }
  std::printf("hung in %llu calls\n", static_cast<unsigned long long>(hung));
  EXPECT_GT(hung, 12u);
}

}  // namespace
}  // namespace hybridopt
