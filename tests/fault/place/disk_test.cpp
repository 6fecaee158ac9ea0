// State on disk where the disk fails: a commit that finds no room is refused; a read or write that
// fails, and a file that somebody cuts off or changes, end the optimizer with a text that says so,
// and the last checkpoint loads.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <string>
#include <vector>

#include "../../differential/lifecycle_rig.h"
#include "../../temporary_directory.h"
#include "../faulty_files.h"

namespace hybridopt {
namespace {

Problem SmallProblem() {
  const std::vector<ParamSpec> params = {{OFFLOAD_BF16, OFFLOAD_BF16, 0, 0, 9000},
                                         {OFFLOAD_FP32, OFFLOAD_BF16, 0, 0, 11000}};
  Problem problem = RandomProblem(OFFLOAD_ADAMW, params, 3, 3);
  for (StepInput& step : problem.steps)
    for (size_t id = 0; id < params.size(); ++id)
      if (!step.grads[id].has_value()) step.grads[id] = Bytes(problem.params[id].grad_bytes());
  return problem;
}

LifecycleSetting SettingOf(int32_t device, system::Files* files, const std::string& paths) {
  LifecycleSetting setting;
  setting.device_kind = device;
  setting.files = files;
  setting.optimizer.chunk_elements = 2048;
  setting.optimizer.disk_fraction = 1;
  setting.optimizer.disk_paths = paths;
  setting.optimizer.disk_ring_bytes = 3 * (2048 * 12 + (32 << 10));
  return setting;
}

// A file system in memory is faster; where there is none, the one for temporary files.
std::string Parent() {
  return std::filesystem::is_directory("/dev/shm")
             ? "/dev/shm"
             : std::filesystem::temp_directory_path().string();
}

bool Contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// --------------------------------------------------------------------------------------- commit --

struct Unready {  // an optimizer that has not been committed
  explicit Unready(const offload_optimizer_options_t& options, system::Files* files = nullptr,
                   int32_t placement = OFFLOAD_PLACE_AUTO) {
    offload_context_options_t context_options{};
    context_options.threads = 1;
    context_options.log = [](void*, int32_t, const char*) {};
    auto made =
        std::make_shared<Context>(context_options, CreateHostDevice(), *SelectKernels().value());
    if (files != nullptr) made->UseFiles(*files);
    using Contexts = HandleTable<Context, HandleKind::kContext>;
    context = static_cast<offload_context_t>(Contexts::Instance().Insert(std::move(made)).value());
    status = offload_optimizer_create(context, &options, &optimizer);
    if (status != OFFLOAD_OK) return;
    auto group = Make<offload_group_t>();
    group.eps = 1e-8;
    uint32_t id = 0;
    MUST(offload_optimizer_add_group(optimizer, &group, &id));
    auto param = Make<offload_param_t>();
    param.name = "weights";
    param.data = values.data();
    param.count = values.size();
    param.dtype = param.grad_dtype = OFFLOAD_FP32;
    param.placement = placement;
    status = offload_optimizer_add_params(optimizer, &param, 1, nullptr);
    if (status == OFFLOAD_OK) status = offload_optimizer_commit(optimizer, nullptr);
  }
  ~Unready() {
    if (optimizer != nullptr) MUST(offload_optimizer_destroy(optimizer));
    MUST(offload_context_destroy(context));
  }

  std::vector<float> values = std::vector<float>(100'000, 1.0f);
  offload_context_t context = nullptr;
  offload_optimizer_t optimizer = nullptr;
  int32_t status = OFFLOAD_OK;
};

offload_optimizer_options_t OnDisk(const char* paths) {
  auto options = Make<offload_optimizer_options_t>();
  options.algorithm = OFFLOAD_ADAMW;
  options.chunk_elements = 4096;
  options.disk_fraction = 0.5;
  options.disk_paths = paths;
  return options;
}

TEST(Disk, ADirectoryWithoutRoomIsRefusedWithTheBytes) {
  const TemporaryDirectory directory;
  for (const Operation operation : {Operation::kAllocate, Operation::kOpen}) {
    FaultyFiles files;
    files.Inject(operation, 0, operation == Operation::kOpen ? EACCES : ENOSPC, true);
    {
      const Unready refused(OnDisk(directory.path().c_str()), &files);
      EXPECT_EQ(refused.status, OFFLOAD_IO_FAILED);
      const std::string text = offload_last_error();
      EXPECT_TRUE(Contains(text, "options.disk_paths names '" + directory.path() + "'")) << text;
      EXPECT_TRUE(Contains(text, " KiB) of state")) << text;
      EXPECT_TRUE(Contains(text, "name directories with more room, or lower")) << text;
      files.Heal();
      EXPECT_EQ(offload_optimizer_commit(refused.optimizer, nullptr), OFFLOAD_OK)
          << offload_last_error();
    }
    EXPECT_TRUE(directory.Names().empty());
  }
}

TEST(Disk, ADirectoryThatIsNotThereIsRefused) {
  const Unready refused(OnDisk("/nowhere/at/all"));
  EXPECT_EQ(refused.status, OFFLOAD_IO_FAILED);
  EXPECT_TRUE(Contains(offload_last_error(), "'/nowhere/at/all'")) << offload_last_error();
}

TEST(Disk, WhatDoesNotGoTogetherIsRefusedWithTheWayOut) {
  using Options = offload_optimizer_options_t;
  const TemporaryDirectory directory;
  struct Case {
    void (*change)(Options&);
    int32_t status;
    const char* text;
    int32_t placement = OFFLOAD_PLACE_AUTO;
  };
  const Case cases[] = {
      {[](Options& o) { o.disk_fraction = -0.5; }, OFFLOAD_INVALID_ARGUMENT,
       "disk_fraction is -0.5, expected 0"},
      {[](Options& o) { o.disk_fraction = NAN; }, OFFLOAD_INVALID_ARGUMENT, "disk_fraction is nan"},
      {[](Options& o) { o.device_fraction = 0.75; }, OFFLOAD_INVALID_ARGUMENT,
       "device_fraction is 0.75 and disk_fraction is 0.5, expected at most 1 together"},
      {[](Options& o) { o.disk_paths = nullptr; }, OFFLOAD_INVALID_ARGUMENT,
       "disk_fraction is 0.5, but options.disk_paths is NULL; name a directory there"},
      {[](Options& o) { o.disk_paths = "::"; }, OFFLOAD_INVALID_ARGUMENT,
       "disk_paths is '::', which names no directory"},
      {[](Options& o) {
         o.disk_fraction = 0;
         o.disk_paths = nullptr;
         o.disk_ring_bytes = 1 << 20;
       },
       OFFLOAD_INVALID_ARGUMENT, "name a directory there, or leave disk_ring_bytes 0"},
      {[](Options& o) { o.disk_ring_bytes = 50'000; }, OFFLOAD_INVALID_ARGUMENT,
       "disk_ring_bytes is 50000, expected at least"},
      {[](Options& o) { o.save_buffer_bytes = 1 << 20; }, OFFLOAD_UNSUPPORTED,
       "but save_buffer_bytes is 1048576"},
      {[](Options&) {}, OFFLOAD_UNSUPPORTED, "register it as OFFLOAD_PLACE_AUTO",
       OFFLOAD_PLACE_HOST},
      {[](Options& o) {
         o.disk_fraction = 0;
         o.disk_paths = nullptr;
       },
       OFFLOAD_INVALID_ARGUMENT,
       "param 'weights' has placement OFFLOAD_PLACE_DISK, but options.disk_paths is NULL; name "
       "directories there",
       OFFLOAD_PLACE_DISK},
  };
  for (const Case& one : cases) {
    Options options = OnDisk(directory.path().c_str());
    one.change(options);
    const Unready refused(options, nullptr, one.placement);
    EXPECT_EQ(refused.status, one.status) << one.text;
    EXPECT_TRUE(Contains(offload_last_error(), one.text))
        << offload_last_error() << ", expected " << one.text;
  }
}

TEST(Disk, FractionsThatDoNotGoAreRefusedAndNothingHasChanged) {
  const TemporaryDirectory directory;
  FaultyFiles files;
  const Unready ready(OnDisk(directory.path().c_str()), &files);
  ASSERT_EQ(ready.status, OFFLOAD_OK);
  auto plan = Make<offload_plan_t>();
  MUST(offload_optimizer_plan(ready.optimizer, &plan));
  const auto expect_refused = [&](double device, double disk, int32_t status,
                                  const std::string& text) {
    EXPECT_EQ(offload_optimizer_set_fractions(ready.optimizer, device, disk, nullptr), status);
    EXPECT_TRUE(Contains(offload_last_error(), text)) << offload_last_error();
    auto now = Make<offload_plan_t>();
    MUST(offload_optimizer_plan(ready.optimizer, &now));
    EXPECT_EQ(now.elements[OFFLOAD_TIER_DISK], plan.elements[OFFLOAD_TIER_DISK]);
  };
  expect_refused(0, NAN, OFFLOAD_INVALID_ARGUMENT, "disk_fraction is nan, expected 0");
  expect_refused(0, 1.5, OFFLOAD_INVALID_ARGUMENT, "disk_fraction is 1.5, expected 0");
  expect_refused(0.5, 0.75, OFFLOAD_INVALID_ARGUMENT,
                 "device_fraction is 0.5 and disk_fraction is 0.75, expected at most 1 together");
  files.Inject(Operation::kAllocate, 0, ENOSPC, true);
  expect_refused(0, 0.75, OFFLOAD_IO_FAILED, "options.disk_paths names '" + directory.path() + "'");
  files.Heal();
  EXPECT_EQ(offload_optimizer_set_device_fraction(ready.optimizer, 0.75, nullptr),
            OFFLOAD_INVALID_ARGUMENT);
  EXPECT_TRUE(Contains(offload_last_error(), "lower one of them")) << offload_last_error();
  EXPECT_EQ(offload_optimizer_set_fractions(ready.optimizer, 0, 0.75, nullptr), OFFLOAD_OK);
}

TEST(Disk, AFractionOnDiskNeedsADirectoryAndNoParamThatIsPlacedOnTheHost) {
  const TemporaryDirectory directory;
  offload_optimizer_options_t options = OnDisk(nullptr);
  options.disk_fraction = 0;
  const Unready nowhere(options);
  ASSERT_EQ(nowhere.status, OFFLOAD_OK);
  EXPECT_EQ(offload_optimizer_set_fractions(nowhere.optimizer, 0, 0.5, nullptr),
            OFFLOAD_INVALID_ARGUMENT);
  EXPECT_TRUE(Contains(offload_last_error(),
                       "disk_fraction is 0.5, but options.disk_paths is NULL; name a directory"))
      << offload_last_error();
  options.disk_paths = directory.path().c_str();
  const Unready placed(options, nullptr, OFFLOAD_PLACE_HOST);
  ASSERT_EQ(placed.status, OFFLOAD_OK);
  EXPECT_EQ(offload_optimizer_set_fractions(placed.optimizer, 0, 0.5, nullptr),
            OFFLOAD_UNSUPPORTED);
  EXPECT_TRUE(
      Contains(offload_last_error(),
               "param 'weights' has placement OFFLOAD_PLACE_HOST, but disk_fraction is 0.5"))
      << offload_last_error();
}

// Every read and write of a change fails once.
TEST(Disk, AChangeThatFailsEndsTheOptimizerAndTheLastCheckpointLoads) {
  const Solved solved(SmallProblem());
  for (int32_t device : DevicesUnderTest()) {
    uint64_t lost = 0;
    for (const Operation operation : {Operation::kRead, Operation::kWrite}) {
      for (uint64_t failing = 0, ended = 0; ended == 0; ++failing) {
        const TemporaryDirectory directory(Parent());
        const std::string path = directory / "saved";
        FaultyFiles files;
        LifecycleSetting setting = SettingOf(device, &files, directory.path());
        setting.optimizer.disk_fraction = 0.5;
        LifecycleRig rig(solved.problem, setting);
        (void)rig.StepOnce(solved.problem.steps[0]);
        rig.Wait(rig.Save(path));
        files.Inject(operation, failing, EIO, false);
        const offload_ticket_t ticket = rig.SetFractions(0, 0.75);
        ended = offload_optimizer_wait(rig.optimizer(), ticket, -1) == OFFLOAD_OK;
        if (ended != 0) break;
        EXPECT_TRUE(Contains(offload_last_error(), "is lost")) << offload_last_error();
        EXPECT_EQ(rig.TryStep(solved.problem.steps[1]), OFFLOAD_POISONED);
        files.Heal();
        LifecycleRig next(solved.problem, setting);
        MUST(next.TryLoad(path));
        EXPECT_EQ(next.Difference(solved.trace[1]), "") << failing;
        ASSERT_LT(++lost, 1000u);
      }
    }
    // 5 chunks are read and 8 are written, of 2 or 3 arrays each.
    EXPECT_GE(lost, (5u + 8u) * 2) << "device " << device;
  }
}

// ---------------------------------------------------------------------------------------- steps --

// Makes a step fail, and checks what the optimizer says then.
void ExpectLost(LifecycleRig& rig, const StepInput& input, const std::string& directory,
                const std::string& cause) {
  rig.NewGrads(input);
  rig.BindAll();
  const offload_ticket_t ticket = rig.Step(input);
  EXPECT_NE(offload_optimizer_wait(rig.optimizer(), ticket, -1), OFFLOAD_OK) << cause;
  const std::string text = offload_last_error();
  EXPECT_TRUE(Contains(text, "state on disk (options.disk_paths) in '" + directory + "' is lost"))
      << text;
  EXPECT_TRUE(Contains(text, cause)) << text;
  EXPECT_TRUE(Contains(text, "make a new optimizer and load the last checkpoint")) << text;
  EXPECT_EQ(rig.TryStep(input), OFFLOAD_POISONED);
  EXPECT_TRUE(Contains(offload_last_error(), cause)) << offload_last_error();
}

// Every call of a step that reads or writes state fails once, in all ways in which disks fail.
void ExpectFailuresOfStepsEndIt(const Solved& solved, int32_t device, int32_t executors) {
  uint64_t lost = 0, healed = 0;
  for (const Operation operation : {Operation::kRead, Operation::kWrite}) {
    for (const int error : {EIO, ENOSPC, EINTR, kShort, kChanged}) {
      if (error == kChanged && operation == Operation::kWrite) continue;
      for (uint64_t call = 0; call < 24; call += 5) {
        SCOPED_TRACE(std::string(OperationName(operation)) + " " + std::to_string(call) +
                     ", error " + std::to_string(error));
        const TemporaryDirectory directory(Parent());
        FaultyFiles files;
        LifecycleSetting setting = SettingOf(device, &files, directory.path());
        setting.optimizer.host_executors = executors;
        LifecycleRig rig(solved.problem, setting);
        (void)rig.StepOnce(solved.problem.steps[0]);
        rig.Wait(rig.Save(directory / "saved"));
        files.Inject(operation, call, error, false);
        if (error == EINTR || error == kShort) {
          (void)rig.StepOnce(solved.problem.steps[1]);
          EXPECT_EQ(files.failed(), 1u);
          EXPECT_EQ(rig.Difference(solved.trace[2]), "");
          ++healed;
          continue;
        }
        ExpectLost(
            rig, solved.problem.steps[1], directory.path(),
            error == kChanged ? "their hashes differ" : "(errno " + std::to_string(error) + ")");
        EXPECT_EQ(files.failed(), 1u);
        LifecycleRig next(solved.problem, SettingOf(device, nullptr, directory.path()));
        MUST(next.TryLoad(directory / "saved"));
        EXPECT_EQ(next.Difference(solved.trace[1]), "");
        ++lost;
      }
    }
  }
  EXPECT_EQ(lost, 25u);
  EXPECT_EQ(healed, 20u);
}

TEST(Disk, AFailedReadOrWriteEndsTheOptimizerAndTheLastCheckpointLoads) {
  const Solved solved(SmallProblem());
  for (int32_t device : DevicesUnderTest())
    for (int32_t executors : {OFFLOAD_EXECUTORS_AUTO, OFFLOAD_EXECUTORS_STREAMED})
      if (device != OFFLOAD_DEVICE_HOST || executors == OFFLOAD_EXECUTORS_AUTO)
        ExpectFailuresOfStepsEndIt(solved, device, executors);
}

// This process's open file without a name in the directory.
int OpenScratchFile(const std::string& directory) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code none;
    const std::string target = std::filesystem::read_symlink(entry.path(), none).string();
    if (target.starts_with(directory) && target.ends_with(" (deleted)"))
      return open(entry.path().c_str(), O_RDWR | O_CLOEXEC);
  }
  return -1;
}

TEST(Disk, AFileThatSomebodyCutsOffOrChangesIsFoundAtTheNextRead) {
  const Solved solved(SmallProblem());
  for (int32_t device : DevicesUnderTest()) {
    for (const bool cut : {false, true}) {
      const TemporaryDirectory directory;
      LifecycleRig rig(solved.problem, SettingOf(device, nullptr, directory.path()));
      (void)rig.StepOnce(solved.problem.steps[0]);
      const int file = OpenScratchFile(directory.path());
      ASSERT_GE(file, 0);
      // The first records may be in the ring already; this is behind them.
      const off_t place = std::filesystem::file_size("/proc/self/fd/" + std::to_string(file)) / 2;
      if (cut) {
        ASSERT_EQ(ftruncate(file, place), 0);
      } else {
        char byte = 0;
        ASSERT_EQ(pread(file, &byte, 1, place), 1);
        byte = static_cast<char>(byte ^ 4);
        ASSERT_EQ(pwrite(file, &byte, 1, place), 1);
      }
      close(file);
      ExpectLost(rig, solved.problem.steps[1], directory.path(),
                 cut ? "somebody has cut the file off: it has " : "their hashes differ");
    }
  }
}

// What the next step needs first is read when a step has ended; that step meets what went wrong.
TEST(Disk, AFailureOfWhatIsReadAheadEndsTheNextStep) {
  const Solved solved(SmallProblem());
  for (int32_t device : DevicesUnderTest()) {
    const TemporaryDirectory directory;
    FaultyFiles files;
    LifecycleRig rig(solved.problem, SettingOf(device, &files, directory.path()));
    const uint64_t step_reads = 3 * rig.Plan().chunk_count;  // masters and both moments
    float value = 0;  // reading it ends what commit has read ahead
    MUST(offload_optimizer_read_state(rig.optimizer(), 0, OFFLOAD_STATE_EXP_AVG, 0, 1, &value));
    files.Inject(Operation::kRead, step_reads, EIO, false);
    (void)rig.StepOnce(solved.problem.steps[0]);
    ExpectLost(rig, solved.problem.steps[1], directory.path(), "(errno 5)");
    EXPECT_EQ(files.failed(), 1u);
  }
}

// Every read of a save fails once, also of what threads read ahead for it. Only the save fails: the
// state is read again by what needs it next.
TEST(Disk, ASaveWhoseReadFailsFailsAlone) {
  const Solved solved(SmallProblem());
  for (const int error : {EIO, kChanged}) {
    uint64_t failing = 0;
    for (bool saved = false; !saved; ++failing) {
      const TemporaryDirectory directory(Parent());
      FaultyFiles files;
      LifecycleRig rig(solved.problem, SettingOf(OFFLOAD_DEVICE_HOST, &files, directory.path()));
      (void)rig.StepOnce(solved.problem.steps[0]);
      float value =
          0;  // reading it ends what is read ahead, so that the next read is one of the save
      MUST(offload_optimizer_read_state(rig.optimizer(), 0, OFFLOAD_STATE_EXP_AVG, 0, 1, &value));
      files.Inject(Operation::kRead, failing, error, false);
      const int32_t status =
          offload_optimizer_wait(rig.optimizer(), rig.Save(directory / "saved"), -1);
      saved = files.failed() == 0;
      EXPECT_EQ(status, saved ? OFFLOAD_OK : OFFLOAD_IO_FAILED) << failing;
      if (!saved) {
        EXPECT_TRUE(Contains(offload_last_error(), "is lost")) << offload_last_error();
        EXPECT_TRUE(directory.Names().empty());
      }
      files.Heal();
      EXPECT_EQ(rig.Difference(solved.trace[1]), "");
      (void)rig.StepOnce(solved.problem.steps[1]);
      EXPECT_EQ(rig.Difference(solved.trace[2]), "");
      ASSERT_LT(failing, 1000u);
    }
    // The arrays of 10 chunks, of which 5 have masters; one was read before. The last save had none
    // to fail.
    EXPECT_EQ(failing - 1, 24u) << "error " << error;
  }
}

// Every write of a load fails once.
TEST(Disk, ALoadWhoseWriteFailsEndsTheOptimizerAndTheCheckpointLoadsAnew) {
  const Solved solved(SmallProblem());
  for (int32_t device : DevicesUnderTest()) {
    const TemporaryDirectory directory(Parent());
    const std::string path = directory / "saved";
    {
      LifecycleRig rig(solved.problem, SettingOf(device, nullptr, directory.path()));
      (void)rig.StepOnce(solved.problem.steps[0]);
      rig.Wait(rig.Save(path));
    }
    uint64_t failing = 0;
    for (bool loaded = false; !loaded; ++failing) {
      FaultyFiles files;
      LifecycleRig rig(solved.problem, SettingOf(device, &files, directory.path()));
      (void)rig.StepOnce(solved.problem.steps[0]);
      files.Inject(Operation::kWrite, failing, EIO, false);
      const int32_t status = rig.TryLoad(path);
      loaded = files.failed() == 0;
      EXPECT_EQ(status, loaded ? OFFLOAD_OK : OFFLOAD_IO_FAILED) << failing;
      if (loaded) {
        EXPECT_EQ(rig.Difference(solved.trace[1]), "");
        break;
      }
      EXPECT_TRUE(Contains(offload_last_error(), "is lost")) << offload_last_error();
      EXPECT_EQ(rig.TryStep(solved.problem.steps[1]), OFFLOAD_POISONED);
      ASSERT_LT(failing, 1000u);
    }
    // The arrays of 10 chunks, of which 5 have masters; where params are in device memory, of 20.
    EXPECT_EQ(failing, device == OFFLOAD_DEVICE_HOST ? 25u : 60u) << "device " << device;
  }
}

}  // namespace
}  // namespace hybridopt
