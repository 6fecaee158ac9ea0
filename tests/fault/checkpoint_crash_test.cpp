// After a crash at any moment of a save a checkpoint is whole or not there: processes that are
// killed, and disks that have lost whatever was not synced.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>

#include "../differential/lifecycle_rig.h"
#include "../temporary_directory.h"
#include "checkpoint/reader.h"
#include "recording_files.h"

namespace hybridopt {
namespace {

constexpr size_t kSteps = 5;

const Solved& TheProblem() {
  static const Solved solved(RandomProblem(
      OFFLOAD_ADAMW,
      {{OFFLOAD_BF16, OFFLOAD_BF16, 0, 0, 700}, {OFFLOAD_FP32, OFFLOAD_BF16, 0, 0, 333}}, kSteps,
      17));
  return solved;
}

LifecycleSetting SettingWith(prim::Files* files) {
  LifecycleSetting setting;
  setting.device_kind = OFFLOAD_DEVICE_HOST;
  setting.threads = 1;
  setting.movable = 0;
  setting.files = files;
  return setting;
}

void Step(LifecycleRig& rig, size_t step) {
  rig.NewGrads(TheProblem().problem.steps[step]);
  rig.BindAll();
  rig.Step(TheProblem().problem.steps[step]);
}

// ----------------------------------------------------------------------------------- the judge --

// The step of the newest checkpoint in a directory; 0 if there is none. Whatever has a name must be
// whole, to the last byte: a damaged one is no excuse to take the one before. Whatever has none
// must be recognised by its own, ".<name>.saving-<16 digits>".
uint64_t NewestStep(const std::string& directory) {
  uint64_t newest = 0;
  for (const std::string& name : TemporaryDirectory::NamesIn(directory)) {
    if (name[0] == '.') {
      const size_t mark = name.find(".saving-");
      EXPECT_TRUE(mark != std::string::npos && mark > 1 && name.size() == mark + 8 + 16 &&
                  name.find_first_not_of("0123456789abcdef", mark + 8) == std::string::npos)
          << "'" << name << "' is no name of a save under way";
      continue;
    }
    const auto reader = checkpoint::Reader::Open(prim::SystemFiles(), directory + "/" + name);
    EXPECT_TRUE(reader.ok()) << "'" << name << "' is broken: " << reader.status().message();
    if (!reader.ok()) continue;
    const auto verified = reader.value().Verify(1, [](uint64_t, uint64_t) {});
    EXPECT_TRUE(verified.ok() && verified.value().status().ok()) << "'" << name << "' is damaged";
    newest = std::max(newest, reader.value().manifest().step);
  }
  return newest;
}

// ------------------------------------------------------------------------------------ processes --

constexpr int kWrongBits = 3;
constexpr int kLost = 4;

// A training job: goes on from the newest checkpoint, which must hold the bits of its step and be
// no older than `promised`, saves after every step and tells `pipe` when a save has completed.
int Train(const std::string& directory, size_t promised, int pipe, prim::Files& files) {
  const Solved& solved = TheProblem();
  LifecycleRig rig(solved.problem, SettingWith(&files));
  std::string newest(4096, '\0');
  size_t step = 0;
  if (offload_checkpoint_newest(directory.c_str(), nullptr, newest.data(), newest.size()) ==
      OFFLOAD_OK) {
    if (rig.TryLoad(newest.c_str()) != OFFLOAD_OK) return kWrongBits;
    auto info = Make<offload_checkpoint_info_t>();
    MUST(offload_checkpoint_inspect(newest.c_str(), &info, nullptr, nullptr));
    step = info.step;
    if (step > kSteps || !rig.Difference(solved.trace[step]).empty()) return kWrongBits;
  }
  if (step < promised) return kLost;
  for (; step < kSteps; ++step) {
    Step(rig, step);
    rig.Wait(rig.Save(directory + "/step-" + std::to_string(step + 1)));
    const char done = static_cast<char>(step + 1);
    if (write(pipe, &done, 1) != 1) return 5;
  }
  return 0;
}

// Runs it in a process of its own until it ends or `interrupt` has had its way; gives its status.
int RunJob(const std::string& directory, size_t* promised,
           const std::function<void(pid_t)>& interrupt,
           const std::function<std::unique_ptr<prim::Files>()>& make_files) {
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    const std::unique_ptr<prim::Files> files = make_files();
    _exit(Train(directory, *promised, ends[1], *files));
  }
  close(ends[1]);
  interrupt(child);
  int status = 0;
  waitpid(child, &status, 0);
  for (char done; read(ends[0], &done, 1) == 1;) *promised = static_cast<size_t>(done);
  close(ends[0]);
  EXPECT_GE(NewestStep(directory), *promised);
  return status;
}

bool Killed(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }
bool Done(int status) { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }

// What a kill leaves is removed by the next save of that step: nothing is left when a job has
// ended.
void ExpectNothingLeft(TemporaryDirectory& directory) {
  for (const std::string& name : directory.Names()) EXPECT_EQ(name.substr(0, 5), "step-");
}

TEST(CheckpointCrash, AJobThatIsKilledAtAnyMomentGoesOnFromItsLastCheckpoint) {
  const auto system_files = [] { return std::make_unique<prim::Files>(); };
  Random random(23);
  auto directory = std::make_unique<TemporaryDirectory>();
  size_t promised = 0;
  int killed = 0;
  (void)TheProblem();
  // How long a job takes here that nobody kills.
  const auto begin = std::chrono::steady_clock::now();
  ASSERT_TRUE(Done(RunJob(
      directory->path(), &promised, [](pid_t) {}, system_files)));
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  const auto whole_us = static_cast<uint64_t>(std::min(200'000.0, took.count()));
  directory = std::make_unique<TemporaryDirectory>();
  promised = 0;
  const int kills = Scaled(500);
  while (killed < kills) {
    const auto wait = static_cast<useconds_t>(random.Below(whole_us));
    const int status = RunJob(
        directory->path(), &promised,
        [&](pid_t child) {
          usleep(wait);
          kill(child, SIGKILL);
        },
        system_files);
    ASSERT_TRUE(Killed(status) || Done(status)) << "status " << status;
    ASSERT_FALSE(HasFailure());
    killed += Killed(status);
    if (!Done(status)) continue;
    ExpectNothingLeft(*directory);
    directory = std::make_unique<TemporaryDirectory>();
    promised = 0;
  }
  EXPECT_TRUE(Done(RunJob(
      directory->path(), &promised, [](pid_t) {}, system_files)));
  ExpectNothingLeft(*directory);
}

// Kills its process in place of one call.
class DeadlyFiles : public prim::Files {
 public:
  explicit DeadlyFiles(uint64_t call) : left_(call) {}
  int OpenFile(const std::string& path, Open how) override {
    return Count(), Files::OpenFile(path, how);
  }
  int64_t Write(int file, const void* data, uint64_t bytes, uint64_t offset) override {
    return Count(), Files::Write(file, data, bytes, offset);
  }
  int Allocate(int file, uint64_t bytes) override { return Count(), Files::Allocate(file, bytes); }
  int Truncate(int file, uint64_t bytes) override { return Count(), Files::Truncate(file, bytes); }
  int Sync(int file) override { return Count(), Files::Sync(file); }
  int Close(int file) override { return Count(), Files::Close(file); }
  int Lock(int file) override { return Count(), Files::Lock(file); }
  int MakeDirectory(const std::string& path) override {
    return Count(), Files::MakeDirectory(path);
  }
  int List(const std::string& path, std::vector<std::string>* names) override {
    return Count(), Files::List(path, names);
  }
  int RenameNoReplace(const std::string& from, const std::string& to) override {
    return Count(), Files::RenameNoReplace(from, to);
  }
  int ListOpen(int directory, std::vector<std::string>* names) override {
    return Count(), Files::ListOpen(directory, names);
  }
  int Remove(const std::string& path) override { return Count(), Files::Remove(path); }
  int RemoveIn(int directory, const std::string& name) override {
    return Count(), Files::RemoveIn(directory, name);
  }
  int RemoveDirectory(const std::string& path) override {
    return Count(), Files::RemoveDirectory(path);
  }

 private:
  void Count() {
    if (left_-- == 0) raise(SIGKILL);
  }
  std::atomic<uint64_t> left_;
};

TEST(CheckpointCrash, AJobThatIsKilledAtAnyCallGoesOnFromItsLastCheckpoint) {
  const TemporaryDirectory directory;
  size_t promised = 0;
  int kills = 0;
  (void)TheProblem();
  const auto leave_alone = [](pid_t) {};
  const uint64_t stride = 160 / static_cast<uint64_t>(std::max(1, Scaled(160)));
  for (uint64_t call = 0; call < 160; call += stride) {
    const int status = RunJob(directory.path(), &promised, leave_alone,
                              [&] { return std::make_unique<DeadlyFiles>(call); });
    ASSERT_TRUE(Killed(status) || Done(status)) << "call " << call << ", status " << status;
    ASSERT_FALSE(HasFailure()) << "call " << call;
    if (Killed(status)) {
      ++kills;
      continue;
    }
    promised = 0;
    for (const std::string& name : directory.Names()) std::filesystem::remove_all(directory / name);
  }
  EXPECT_GT(kills, Scaled(30) - 1);
  // What the last kill left is removed by the next save to the same name only.
  size_t hidden = 0;
  for (const std::string& name : directory.Names()) hidden += name[0] == '.';
  EXPECT_LE(hidden, 1u);
}

// ---------------------------------------------------------------------------------- lost writes --

void Put(const RecordingFiles::Disk& disk, RecordingFiles::Inode inode, const std::string& path) {
  const auto directory = disk.directories.find(inode);
  if (directory != disk.directories.end() && disk.files.count(inode) == 0) {
    std::filesystem::create_directory(path);
    for (const auto& [name, child] : directory->second) Put(disk, child, path + "/" + name);
    return;
  }
  const auto file = disk.files.find(inode);
  std::ofstream stream(path, std::ios::binary);
  if (file != disk.files.end())
    stream.write(file->second.data(), static_cast<std::streamsize>(file->second.size()));
}

TEST(CheckpointCrash, ADiskThatLostWhatWasNotSyncedHoldsTheOldCheckpointOrTheNew) {
  const TemporaryDirectory saved;
  RecordingFiles files(saved.path());
  LifecycleRig rig(TheProblem().problem, SettingWith(&files));
  Step(rig, 0);
  rig.Wait(rig.Save(saved / "old"));
  const size_t old_end = files.changes().size();
  Step(rig, 1);
  rig.Wait(rig.Save(saved / "new"));
  const size_t end = files.changes().size();
  ASSERT_GT(end - old_end, 12u);

  const TemporaryDirectory replayed(std::filesystem::exists("/dev/shm") ? "/dev/shm" : "/tmp");
  Random random(29);
  int states = 0, old_found = 0, new_found = 0;
  const int rounds = std::max(3, Scaled(5000) / static_cast<int>(end - old_end + 1) + 1);
  for (size_t count = old_end; count <= end; ++count) {
    for (int round = 0; round < rounds; ++round) {
      // None, all, or some of what was not synced is there.
      const uint64_t chance = round == 0 ? 0 : round == 1 ? 4 : 1 + random.Below(3);
      const auto disk = files.After(count, [&] { return random.Below(4) < chance; });
      const std::string directory = replayed / "disk";
      Put(disk, RecordingFiles::kRoot, directory);
      const uint64_t step = NewestStep(directory);
      if (count == end) {
        ASSERT_EQ(step, 2u) << "the save was told to be complete";
      } else {
        ASSERT_TRUE(step == 1 || step == 2) << "step " << step << " behind change " << count;
      }
      ASSERT_FALSE(HasFailure()) << "behind change " << count;
      ++states;
      old_found += step == 1;
      new_found += step == 2;
      std::filesystem::remove_all(directory);
    }
  }
  EXPECT_GE(states, Scaled(5000));
  EXPECT_GT(old_found, 0);
  EXPECT_GT(new_found, 0);
}

}  // namespace
}  // namespace hybridopt
