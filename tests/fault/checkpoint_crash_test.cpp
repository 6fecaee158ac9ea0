// After a crash at any moment of a save a checkpoint is whole or does not exist: processes are
// killed, and disks lose data that was not synced.
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
#include <thread>

#include "../differential/lifecycle_rig.h"
#include "../temporary_directory.h"
#include "../thread_comm.h"
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

LifecycleSetting SettingWith(system::Files* files) {
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

// The step of the newest checkpoint in a directory; 0 if there is none. Every checkpoint with its
// final name must be whole, to the last byte; a damaged one fails the test even if an older one is
// good. Every other directory must have a pending name, ".<name>.saving-<16 digits>".
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
    const auto reader = checkpoint::Reader::Open(system::SystemFiles(), directory + "/" + name);
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
constexpr int kNotSaved = 6;

// Whether the save has completed. If another job was first, the name is taken.
bool Saved(LifecycleRig& rig, const std::string& path) {
  auto options = Make<offload_save_options_t>();
  options.path = path.c_str();
  offload_ticket_t ticket = 0;
  int32_t status = offload_optimizer_save(rig.optimizer(), &options, &ticket);
  const bool queued = status == OFFLOAD_OK;
  // Where no save was queued the step before it may still read gradients.
  status = offload_optimizer_wait(rig.optimizer(), queued ? ticket : 0, -1);
  return queued && status == OFFLOAD_OK;
}

// A training job. It continues from the newest checkpoint, which must have the bits of its step and
// be no older than `promised`. It saves after every step and writes to `pipe` when a save has
// completed. A save may fail only if there are other jobs in the directory.
int Train(const std::string& directory, size_t promised, int pipe, system::Files& files,
          bool alone) {
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
    const std::string path = directory + "/step-" + std::to_string(step + 1);
    if (!Saved(rig, path) && (alone || !std::filesystem::exists(path + "/manifest.json")))
      return kNotSaved;
    const char done = static_cast<char>(step + 1);
    if (write(pipe, &done, 1) != 1) return 5;
  }
  return 0;
}

struct Job {
  pid_t child;
  int pipe;
};

// In a process of its own.
Job StartJob(const std::string& directory, size_t promised, bool alone,
             const std::function<std::unique_ptr<system::Files>()>& make_files) {
  int ends[2];
  if (pipe(ends) != 0) std::abort();
  const pid_t child = fork();
  if (child == 0) {
    close(ends[0]);
    const std::unique_ptr<system::Files> files = make_files();
    _exit(Train(directory, promised, ends[1], *files, alone));
  }
  close(ends[1]);
  return {child, ends[0]};
}

// The status of the job. The step that it reports is never lower than an earlier one.
int EndJob(const Job& job, size_t* promised) {
  int status = 0;
  waitpid(job.child, &status, 0);
  for (char done; read(job.pipe, &done, 1) == 1;)
    *promised = std::max(*promised, static_cast<size_t>(done));
  close(job.pipe);
  return status;
}

// Runs a job until it ends or `interrupt` kills it; returns its status.
int RunJob(const std::string& directory, size_t* promised,
           const std::function<void(pid_t)>& interrupt,
           const std::function<std::unique_ptr<system::Files>()>& make_files) {
  const Job job = StartJob(directory, *promised, true, make_files);
  interrupt(job.child);
  const int status = EndJob(job, promised);
  EXPECT_GE(NewestStep(directory), *promised);
  return status;
}

bool Killed(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }
bool Done(int status) { return WIFEXITED(status) && WEXITSTATUS(status) == 0; }

// The next save of that step removes the files of a killed one: nothing of them is left when a job
// has ended.
void ExpectNothingLeft(TemporaryDirectory& directory) {
  for (const std::string& name : directory.Names()) EXPECT_EQ(name.substr(0, 5), "step-");
}

std::unique_ptr<system::Files> SystemFilesOfAJob() { return std::make_unique<system::Files>(); }

// The time of a job that is not killed.
uint64_t WholeJobUs() {
  const TemporaryDirectory directory;
  size_t promised = 0;
  (void)TheProblem();
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(Done(RunJob(
      directory.path(), &promised, [](pid_t) {}, SystemFilesOfAJob)));
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  return static_cast<uint64_t>(std::min(200'000.0, took.count()));
}

TEST(CheckpointCrash, AJobThatIsKilledAtAnyMomentGoesOnFromItsLastCheckpoint) {
  Random random(23);
  const uint64_t whole_us = WholeJobUs();
  auto directory = std::make_unique<TemporaryDirectory>();
  size_t promised = 0;
  int killed = 0;
  const int kills = Scaled(300);
  while (killed < kills) {
    const auto wait = static_cast<useconds_t>(random.Below(whole_us));
    const int status = RunJob(
        directory->path(), &promised,
        [&](pid_t child) {
          usleep(wait);
          kill(child, SIGKILL);
        },
        SystemFilesOfAJob);
    ASSERT_TRUE(Killed(status) || Done(status)) << "status " << status;
    ASSERT_FALSE(HasFailure());
    killed += Killed(status);
    if (!Done(status)) continue;
    ExpectNothingLeft(*directory);
    directory = std::make_unique<TemporaryDirectory>();
    promised = 0;
  }
  EXPECT_TRUE(Done(RunJob(
      directory->path(), &promised, [](pid_t) {}, SystemFilesOfAJob)));
  ExpectNothingLeft(*directory);
}

// The same training was started several times. The jobs race for each checkpoint's name: the first
// one gets it, and an existing checkpoint is always whole.
TEST(CheckpointCrash, SeveralJobsThatAreKilledInOneDirectoryLoseNothing) {
  constexpr size_t kJobs = 3;
  Random random(37);
  const uint64_t whole_us = WholeJobUs();
  auto directory = std::make_unique<TemporaryDirectory>();
  size_t promised = 0;
  int killed = 0;
  const int kills = Scaled(60);
  while (killed < kills) {
    std::vector<Job> jobs;
    for (size_t i = 0; i < kJobs; ++i)
      jobs.push_back(StartJob(directory->path(), promised, false, SystemFilesOfAJob));
    for (const Job& job : jobs) {
      usleep(static_cast<useconds_t>(random.Below(whole_us) / kJobs));
      kill(job.child, SIGKILL);
    }
    bool done = false;
    for (const Job& job : jobs) {
      const int status = EndJob(job, &promised);
      ASSERT_TRUE(Killed(status) || Done(status)) << "status " << status;
      killed += Killed(status);
      done = done || Done(status);
    }
    EXPECT_GE(NewestStep(directory->path()), promised);
    ASSERT_FALSE(HasFailure());
    if (!done) continue;
    directory = std::make_unique<TemporaryDirectory>();
    promised = 0;
  }
}

// Kills its process instead of making one call.
class DeadlyFiles : public system::Files {
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
  const uint64_t stride = std::max<uint64_t>(1, 160 / Scaled(uint64_t{160}));
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
  if (directory != disk.directories.end()) {
    std::filesystem::create_directory(path);
    for (const auto& [name, child] : directory->second) Put(disk, child, path + "/" + name);
    return;
  }
  const auto file = disk.files.find(inode);
  std::ofstream stream(path, std::ios::binary);
  if (file != disk.files.end())
    stream.write(file->second.data(), static_cast<std::streamsize>(file->second.size()));
}

// Where a crash leaves the disk.
std::string DiskDirectory() { return std::filesystem::exists("/dev/shm") ? "/dev/shm" : "/tmp"; }

// Continues after a crash: the newest checkpoint is loaded, and a save to the name of the
// interrupted save is whole and removes the rest of that save.
void GoOn(const std::string& directory, uint64_t newest) {
  LifecycleRig rig(TheProblem().problem, SettingWith(&system::SystemFiles()));
  ASSERT_EQ(rig.TryLoad(directory + (newest == 1 ? "/old" : "/new")), OFFLOAD_OK)
      << offload_last_error();
  ASSERT_EQ(rig.Difference(TheProblem().trace[newest]), "");
  if (newest == 2) return;
  Step(rig, 1);
  rig.Wait(rig.Save(directory + "/new"));
  ASSERT_EQ(rig.Difference(TheProblem().trace[2]), "");
  ASSERT_EQ(NewestStep(directory), 2u);
  ASSERT_EQ(TemporaryDirectory::NamesIn(directory), (std::vector<std::string>{"new", "old"}));
}

// The possible content of the disk after a crash, for each change between two saves, the first of
// which had completed: the old checkpoint or the new one, always whole, and the new one once its
// save has completed. Sometimes go_on(directory, step) continues from that content.
void CrashEverywhere(const RecordingFiles& files, size_t old_end, int wanted_states,
                     const std::function<void(const std::string&, uint64_t)>& go_on = GoOn) {
  const size_t end = files.changes().size();
  ASSERT_GT(end - old_end, 12u);
  const TemporaryDirectory replayed(DiskDirectory());
  Random random(29);
  int states = 0, old_found = 0, new_found = 0;
  const int rounds = std::max(3, wanted_states / static_cast<int>(end - old_end + 1) + 1);
  for (size_t count = old_end; count <= end; ++count) {
    for (int round = 0; round < rounds; ++round) {
      // Of the changes that were not synced none, all or some are there.
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
      if (states % 20 == 0) go_on(directory, step);
      ASSERT_FALSE(testing::Test::HasFailure()) << "behind change " << count;
      ++states;
      old_found += step == 1;
      new_found += step == 2;
      std::filesystem::remove_all(directory);
    }
  }
  std::printf("%d crash states: the old checkpoint in %d, the new one in %d\n", states, old_found,
              new_found);
  EXPECT_GE(states, wanted_states);
  EXPECT_GT(old_found, 0);
  EXPECT_GT(new_found, 0);
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
  CrashEverywhere(files, old_end, Scaled(1000));
}

// The save removes the rest of an earlier save, so a crash may also come during this removal.
TEST(CheckpointCrash, ACrashWhileTheRestOfAnotherIsRemovedLosesNothingEither) {
  const TemporaryDirectory saved;
  RecordingFiles files(saved.path());
  LifecycleRig rig(TheProblem().problem, SettingWith(&files));
  Step(rig, 0);
  rig.Wait(rig.Save(saved / "old"));
  const std::string rest = saved / ".new.saving-0123456789abcdef";
  ASSERT_EQ(files.MakeDirectory(rest), 0);
  for (const char* name : {"/shard-00000-of-00001.safetensors", "/manifest.json"}) {
    const int file = files.OpenFile(rest + name, system::Files::Open::kCreate);
    ASSERT_GE(file, 0);
    ASSERT_EQ(files.Write(file, "half", 4, 0), 4);
    ASSERT_EQ(files.Close(file), 0);
  }
  const size_t old_end = files.changes().size();
  Step(rig, 1);
  rig.Wait(rig.Save(saved / "new"));
  ASSERT_EQ(saved.Names(), (std::vector<std::string>{"new", "old"}));
  CrashEverywhere(files, old_end, Scaled(500));
}

// Two ranks write into one directory, and rank 0 gives it its name.
TEST(CheckpointCrash, ACrashOfTwoRanksLeavesTheOldCheckpointOrTheNew) {
  const TemporaryDirectory saved;
  RecordingFiles files(saved.path());
  ThreadComm comm(2);
  const offload_comm_t tables[] = {comm.Table(0), comm.Table(1)};
  size_t old_end = 0;
  const auto train = [&](uint32_t rank) {
    LifecycleSetting setting = SettingWith(&files);
    setting.comm = &tables[rank];
    setting.name_prefix = rank == 0 ? "first." : "second.";
    LifecycleRig rig(TheProblem().problem, setting);
    for (size_t step = 0; step < 2; ++step) {
      Step(rig, step);
      rig.Wait(rig.Save(saved / (step == 0 ? "old" : "new")));
      if (step == 0 && rank == 0) old_end = files.changes().size();
    }
  };
  std::thread second([&] { train(1); });
  train(0);
  second.join();
  CrashEverywhere(files, old_end, Scaled(1000), [](const std::string&, uint64_t) {});
}

}  // namespace
}  // namespace hybridopt
