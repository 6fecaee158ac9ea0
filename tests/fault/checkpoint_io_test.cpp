// Every call of the file system in a save or load fails in every way. The ticket's error names what
// failed and the file, nothing is left behind, the earlier checkpoint is still good, and training
// continues with the bits of a run without failures.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <new>

#include "../differential/lifecycle_rig.h"
#include "../temporary_directory.h"
#include "checkpoint/file_io.h"
#include "checkpoint/format/format.h"
#include "checkpoint/format/hash.h"
#include "faulty_files.h"

namespace hybridopt {
namespace {

// Two dtypes, so that some params are their own masters.
Problem SmallProblem() {
  const std::vector<ParamSpec> params = {{OFFLOAD_BF16, OFFLOAD_BF16, 0, 0, 1500},
                                         {OFFLOAD_FP32, OFFLOAD_BF16, 0, 0, 2100}};
  return RandomProblem(OFFLOAD_ADAMW, params, 4, 3);
}

LifecycleSetting SettingOf(system::Files& files, int32_t device_kind) {
  LifecycleSetting setting;
  setting.device_kind = device_kind;
  setting.optimizer = {0.4, 1024, 2};
  setting.movable = 0;
  setting.files = &files;
  return setting;
}

// One block is read at a time, so that the reads of a load have an order.
constexpr uint32_t kReadsInOrder = 1;

class CheckpointIoTest : public testing::Test {
 protected:
  // A trained optimizer with one good checkpoint "old" of its first step.
  void Start(int32_t device_kind = OFFLOAD_DEVICE_HOST) {
    rig_.emplace(solved_.problem, SettingOf(files_, device_kind));
    Step(0);
    rig_->Wait(rig_->Save(directory_ / "old"));
  }
  void Step(size_t step) {
    rig_->NewGrads(solved_.problem.steps[step]);
    rig_->BindAll();
    rig_->Step(solved_.problem.steps[step]);
    rig_->Wait();
  }
  std::string Text() const { return offload_last_error(); }

  const Solved solved_{SmallProblem()};
  const TemporaryDirectory directory_;
  FaultyFiles files_;
  std::optional<LifecycleRig> rig_;
};

const int kErrors[] = {ENOSPC, EIO, EDQUOT, EINTR, kShort};

std::string CaseName(Operation operation, uint64_t call, int error, bool sticky) {
  return std::string(OperationName(operation)) + " " + std::to_string(call) + ", " +
         (error == kShort ? "short" : system::ErrorText(error)) + (sticky ? ", from then on" : "");
}

// The failures that a save survives: a signal and a short write, once; and failures of calls that
// it does not need.
bool MaySurvive(Operation operation, int error, bool sticky) {
  if (operation == Operation::kLock || operation == Operation::kRemove ||
      operation == Operation::kRemoveDirectory || operation == Operation::kClose)
    return true;                                    // for example of a directory
  if (operation == Operation::kSync) return false;  // never tried again
  if (error == EINTR || error == kShort) return !sticky || error == kShort;
  return false;
}

// A signal and a short write are no failures.
bool MustSurvive(Operation operation, int error, bool sticky) {
  return !sticky && (error == EINTR || error == kShort) && operation != Operation::kSync;
}

TEST_F(CheckpointIoTest, EveryFailureOfEveryCallOfASaveIsToldAndLeavesNothing) {
  Start();
  files_.Inject(Operation::kOpen, 0, 0, false);
  files_.Heal();
  rig_->Wait(rig_->Save(directory_ / "counted"));
  uint64_t counts[kOperations];
  for (int i = 0; i < kOperations; ++i) counts[i] = files_.count(Operation(i));
  std::filesystem::remove_all(directory_ / "counted");
  uint64_t cases = 0, told = 0, survived = 0, closes_told = 0;
  static_assert(static_cast<int>(Operation::kLook) == kOperations - 1);
  for (int i = 0; i < kOperations - 1; ++i) {  // the call has looked before it queues a save
    const Operation operation{i};
    for (uint64_t call = 0; call < counts[i]; ++call) {
      for (int error : kErrors) {
        if (error == kShort && operation != Operation::kWrite) continue;
        for (bool sticky : {false, true}) {
          const std::string what = CaseName(operation, call, error, sticky);
          ++cases;
          files_.Inject(operation, call, error, sticky);
          const offload_ticket_t ticket = rig_->Save(directory_ / "new");
          const int32_t status = offload_optimizer_wait(rig_->optimizer(), ticket, -1);
          files_.Heal();
          EXPECT_GT(files_.failed(), 0u) << what;
          if (status == OFFLOAD_OK) {
            ++survived;
            EXPECT_TRUE(MaySurvive(operation, error, sticky)) << what;
            ASSERT_EQ(rig_->TryLoad(directory_ / "new"), OFFLOAD_OK) << what << ": " << Text();
            std::filesystem::remove_all(directory_ / "new");
          } else {
            ++told;
            if (operation == Operation::kClose && error == EIO && !sticky) ++closes_told;
            EXPECT_FALSE(MustSurvive(operation, error, sticky)) << what << ": " << Text();
            EXPECT_EQ(status, OFFLOAD_IO_FAILED) << what;
            const std::string text = Text();
            if (error != kShort) {
              EXPECT_NE(text.find("errno " + std::to_string(error)), std::string::npos)
                  << what << ": " << text;
            }
            EXPECT_NE(text.find(directory_.path()), std::string::npos) << what << ": " << text;
            if (error == ENOSPC || error == EDQUOT) {
              EXPECT_NE(text.find("free space there"), std::string::npos) << text;
            }
          }
          // The next save removes the files that could not be removed before.
          if (directory_.Names().size() > 1) {
            rig_->Wait(rig_->Save(directory_ / "next"));
            std::filesystem::remove_all(directory_ / "next");
            std::filesystem::remove_all(directory_ / "new");
            for (const std::string& name : directory_.Names())
              if (name[0] == '.') std::filesystem::remove_all(directory_ / name);
            EXPECT_TRUE(operation == Operation::kRemove ||
                        operation == Operation::kRemoveDirectory || sticky)
                << what;
          }
          ASSERT_EQ(directory_.Names(), std::vector<std::string>{"old"}) << what;
        }
      }
    }
  }
  EXPECT_TRUE(cases > 100 && told > 50 && survived > 10);
  EXPECT_EQ(closes_told, 2u);  // of the shard file and of the manifest
  std::printf("%llu cases: %llu told, %llu survived\n", static_cast<unsigned long long>(cases),
              static_cast<unsigned long long>(told), static_cast<unsigned long long>(survived));
  // Nothing of all this has touched the run, or the checkpoint of before.
  EXPECT_EQ(rig_->Difference(solved_.trace[1]), "");
  Step(1);
  EXPECT_EQ(rig_->Difference(solved_.trace[2]), "");
  ASSERT_EQ(rig_->TryLoad(directory_ / "old"), OFFLOAD_OK) << Text();
  EXPECT_EQ(rig_->Difference(solved_.trace[1]), "");
}

// The failures that a load survives: a signal or a short read, once; and failures of calls that it
// does not need.
bool LoadMaySurvive(Operation operation, int error, bool sticky) {
  if (operation == Operation::kClose || operation == Operation::kLook) return true;
  return !sticky && (error == EINTR || error == kShort) && operation != Operation::kSize;
}

TEST_F(CheckpointIoTest, EveryFailureOfEveryCallOfALoadIsToldAndReplacesNothingByHalf) {
  Start();
  files_.Inject(Operation::kOpen, 0, 0, false);
  files_.Heal();
  ASSERT_EQ(rig_->TryLoad(directory_ / "old", 0, kReadsInOrder), OFFLOAD_OK);
  uint64_t counts[kOperations];
  for (int i = 0; i < kOperations; ++i) counts[i] = files_.count(Operation(i));
  Step(1);
  uint64_t survived = 0, refused = 0, mixtures = 0;
  for (int i = 0; i < kOperations; ++i) {
    const Operation operation{i};
    for (uint64_t call = 0; call < counts[i]; ++call) {
      for (const int error : {EIO, ENOSPC, EINTR, kShort}) {
        if (error == kShort && operation != Operation::kRead) continue;
        for (const bool sticky : {false, true}) {
          const std::string what = CaseName(operation, call, error, sticky);
          files_.Inject(operation, call, error, sticky);
          const int32_t status = rig_->TryLoad(directory_ / "old", 0, kReadsInOrder);
          files_.Heal();
          const std::string text = Text();
          EXPECT_GT(files_.failed(), 0u) << what;
          if (status == OFFLOAD_OK) {
            ++survived;
            EXPECT_TRUE(LoadMaySurvive(operation, error, sticky)) << what;
            ASSERT_EQ(rig_->Difference(solved_.trace[1]), "") << what;
            Step(1);
            continue;
          }
          EXPECT_FALSE(operation != Operation::kSize && MustSurvive(operation, error, sticky))
              << what << ": " << text;
          // Reads that stay short look like the end of a file, or like a disk that gives nothing.
          EXPECT_TRUE(status == OFFLOAD_IO_FAILED ||
                      (status == OFFLOAD_CHECKPOINT_CORRUPT && error == kShort))
              << what << ": " << text;
          EXPECT_NE(text.find(directory_ / "old/"), std::string::npos) << what << ": " << text;
          if (error != kShort) {
            EXPECT_NE(text.find("errno " + std::to_string(error)), std::string::npos) << text;
          }
          if (text.find("a mixture now") == std::string::npos) {
            ++refused;
            ASSERT_EQ(rig_->Difference(solved_.trace[2]), "") << what;
            continue;
          }
          ++mixtures;
          EXPECT_EQ(offload_optimizer_step(rig_->optimizer(), nullptr, nullptr), OFFLOAD_POISONED)
              << what;
          rig_.emplace(solved_.problem, SettingOf(files_, OFFLOAD_DEVICE_HOST));
          Step(0);
          Step(1);
        }
      }
    }
  }
  std::printf("%llu survived, %llu refused, %llu mixtures\n",
              static_cast<unsigned long long>(survived), static_cast<unsigned long long>(refused),
              static_cast<unsigned long long>(mixtures));
  EXPECT_GT(survived, 20u);
  EXPECT_GT(refused, 50u);
  EXPECT_GT(mixtures, 20u);
  Step(2);
  EXPECT_EQ(rig_->Difference(solved_.trace[3]), "");
}

TEST_F(CheckpointIoTest, AFileThatCanNoLongerBeReadWhileStateIsReplacedPoisons) {
  Start();
  files_.Inject(Operation::kRead, 0, 0, false);
  files_.Heal();
  ASSERT_EQ(rig_->TryLoad(directory_ / "old", 0, kReadsInOrder), OFFLOAD_OK);
  files_.Inject(Operation::kRead, files_.count(Operation::kRead) - 1, EIO, true);
  EXPECT_EQ(rig_->TryLoad(directory_ / "old", 0, kReadsInOrder), OFFLOAD_IO_FAILED);
  EXPECT_NE(Text().find("a mixture now"), std::string::npos) << Text();
  EXPECT_EQ(offload_optimizer_step(rig_->optimizer(), nullptr, nullptr), OFFLOAD_POISONED);
}

// Gives a checkpoint of one rank hashes of blocks of another size.
void RehashInBlocksOf(const std::string& path, uint64_t block_bytes) {
  using namespace checkpoint;  // NOLINT: this function is about its names only
  const std::string manifest_path = path + "/" + kManifestFile;
  Result<std::string> text = ReadSmallFile(system::SystemFiles(), manifest_path, kManifestBytesMax);
  ASSERT_TRUE(text.ok()) << text.status().message();
  Result<Manifest> manifest = ParseManifest(text.value());
  ASSERT_TRUE(manifest.ok()) << manifest.status().message();
  std::ifstream stream(path + "/" + manifest.value().files[0].name, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(stream), {}};
  manifest.value().block_bytes = block_bytes;
  for (StoredParam& param : manifest.value().params)
    for (StoredTensor& tensor : param.shards[0].tensors) {
      BlockHasher hasher(block_bytes);
      hasher.Reset(tensor.bytes);
      hasher.Add(bytes.data() + tensor.offset, tensor.bytes);
      tensor.hashes = hasher.Take();
    }
  text = EncodeManifest(manifest.value());
  ASSERT_TRUE(text.ok()) << text.status().message();
  std::ofstream(manifest_path, std::ios::binary | std::ios::trunc) << text.value();
}

// The file changes while it is loaded: the bytes of every read are either refused or known to
// differ from the verified ones, and never become state that counts as good. How many are refused
// is known only where one block is read at a time: else a later block may be read before the first.
TEST_F(CheckpointIoTest, BytesThatChangeBeforeAnyReadAreNeverLoadedAsGood) {
  Start();
  const uint32_t default_depth = 0;
  for (const auto& [device_kind, io_depth] : {std::pair(OFFLOAD_DEVICE_HOST, kReadsInOrder),
                                              std::pair(OFFLOAD_DEVICE_SIM, default_depth)}) {
    for (const uint64_t block_bytes : {checkpoint::kBlockBytesMin, checkpoint::kBlockBytes}) {
      RehashInBlocksOf(directory_ / "old", block_bytes);
      uint64_t refused = 0, mixtures = 0;
      for (uint64_t call = 0;; ++call) {
        rig_.emplace(solved_.problem, SettingOf(files_, device_kind));
        Step(0);
        Step(1);
        files_.Inject(Operation::kRead, call, kChanged, false);
        const int32_t status = rig_->TryLoad(directory_ / "old", 0, io_depth);
        files_.Heal();
        if (files_.failed() == 0) {  // there is no such call any more
          EXPECT_EQ(status, OFFLOAD_OK) << Text();
          EXPECT_EQ(rig_->Difference(solved_.trace[1]), "");
          break;
        }
        const std::string text = Text();
        EXPECT_EQ(status, OFFLOAD_CHECKPOINT_CORRUPT) << call << ": " << text;
        EXPECT_NE(text.find(directory_ / "old"), std::string::npos) << text;
        if (text.find("a mixture now") == std::string::npos) {
          ++refused;
          EXPECT_EQ(rig_->Difference(solved_.trace[2]), "") << call;
          continue;
        }
        ++mixtures;
        for (const char* word : {"block ", " of param", ".safetensors", "has changed since"})
          EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' is not in: " << text;
        EXPECT_EQ(offload_optimizer_step(rig_->optimizer(), nullptr, nullptr), OFFLOAD_POISONED);
      }
      if (io_depth == kReadsInOrder) {
        EXPECT_GT(refused, 6u);   // the manifest, the head, and the first reads of the arrays
        EXPECT_GT(mixtures, 4u);  // all second reads but the first
      }
    }
  }
}

// The same where a block is read in more than one part.
TEST(CheckpointBlocks, LargerThanWhatIsReadAtOnceAreComparedAgainToo) {
  const Solved solved{
      RandomProblem(OFFLOAD_LION, {{OFFLOAD_BF16, OFFLOAD_BF16, 0, 0, 2'500'000}}, 1, 5)};
  const TemporaryDirectory directory;
  FaultyFiles files;
  LifecycleRig rig(solved.problem, SettingOf(files, OFFLOAD_DEVICE_HOST));
  rig.Wait(rig.Save(directory / "old"));
  RehashInBlocksOf(directory / "old", 2 * checkpoint::kBlockBytes);
  files.Inject(Operation::kRead, 0, 0, false);
  files.Heal();
  ASSERT_EQ(rig.TryLoad(directory / "old", 0, kReadsInOrder), OFFLOAD_OK) << offload_last_error();
  EXPECT_EQ(rig.Difference(solved.trace[0]), "");
  files.Inject(Operation::kRead, files.count(Operation::kRead) - 1, kChanged, false);
  EXPECT_EQ(rig.TryLoad(directory / "old", 0, kReadsInOrder), OFFLOAD_CHECKPOINT_CORRUPT);
  const std::string text = offload_last_error();
  EXPECT_NE(text.find("block 0 of param0.exp_avg "), std::string::npos) << text;
  EXPECT_NE(text.find("a mixture now"), std::string::npos) << text;
}

TEST_F(CheckpointIoTest, EachErrorOfASystemSaysTheWayOut) {
  struct Advised {
    int error;
    const char* advice;
  };
  const Advised advised[] = {
      {ENOSPC, "free space there, or save somewhere else"},
      {EDQUOT, "free space there, or save somewhere else"},
      {EEXIST, "choose a path that does not exist yet"},
      {ESPIPE, "expected a regular file"},
      {ENOTDIR, "check the path, and make the directory first where something new goes"},
      {EACCES, "give this user the permission"},
      {EPERM, "give this user the permission"},
      {EROFS, "mount that file system with write access"},
      {ENAMETOOLONG, "choose a shorter path"},
      {ELOOP, "a symbolic link there leads back to itself"},
      {EFBIG, "that file system or `ulimit -f` allows no file of this size"},
      {EMFILE, "raise the number of open files of this process"},
      {ENFILE, "close files of other programs, or raise fs.file-max"},
      {EISDIR, "a directory is there, expected a file"},
      {EIO, "look at the drive"},
      {ESTALE, "look at the drive"},
  };
  Start();
  for (const auto& [error, advice] : advised) {
    files_.Inject(Operation::kOpen, 0, error, true);
    const offload_ticket_t ticket = rig_->Save(directory_ / "new");
    EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), ticket, -1), OFFLOAD_IO_FAILED);
    files_.Heal();
    const std::string told = "(errno " + std::to_string(error) + "); " + advice;
    EXPECT_NE(Text().find(told), std::string::npos) << Text();
  }
  rig_->Wait(rig_->Save(directory_ / "new"));
}

TEST_F(CheckpointIoTest, WhoWaitsForEverythingIsToldOnceOfAFailedSave) {
  Start();
  files_.Inject(Operation::kWrite, 0, ENOSPC, true);
  const offload_ticket_t ticket = rig_->Save(directory_ / "new");
  rig_->NewGrads(solved_.problem.steps[1]);
  rig_->BindAll();
  const offload_ticket_t step = rig_->Step(solved_.problem.steps[1]);
  EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), step, -1), OFFLOAD_OK);
  EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), 0, -1), OFFLOAD_IO_FAILED);
  EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), 0, -1), OFFLOAD_OK);
  EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), ticket, -1), OFFLOAD_IO_FAILED);
  EXPECT_NE(Text().find("No space left on device"), std::string::npos) << Text();
  EXPECT_EQ(rig_->Difference(solved_.trace[2]), "");
}

// Memory runs out where the manifest is made or read.
class ForgetfulFiles : public system::Files {
 public:
  int OpenFile(const std::string& path, Open how) override {
    if (forgetful && path.ends_with("/manifest.json")) throw std::bad_alloc();
    return Files::OpenFile(path, how);
  }
  std::atomic<bool> forgetful = false;
};

TEST(CheckpointMemory, RunningOutOfItIsToldAndPoisonsNothing) {
  const Solved solved{SmallProblem()};
  const TemporaryDirectory directory;
  ForgetfulFiles files;
  LifecycleRig rig(solved.problem, SettingOf(files, OFFLOAD_DEVICE_HOST));
  rig.Wait(rig.Save(directory / "old"));
  files.forgetful = true;
  const offload_ticket_t ticket = rig.Save(directory / "new");
  EXPECT_EQ(offload_optimizer_wait(rig.optimizer(), ticket, -1), OFFLOAD_OUT_OF_HOST_MEMORY);
  EXPECT_STREQ(offload_last_error(),
               "out of host memory for the tables of a save; nothing was changed");
  EXPECT_EQ(rig.TryLoad(directory / "old"), OFFLOAD_OUT_OF_HOST_MEMORY);
  EXPECT_STREQ(offload_last_error(),
               "out of host memory for the tables of a load; nothing was changed");
  EXPECT_EQ(directory.Names(), std::vector<std::string>{"old"});
  files.forgetful = false;
  EXPECT_EQ(rig.TryLoad(directory / "old"), OFFLOAD_OK) << offload_last_error();
  rig.Wait(rig.Save(directory / "new"));
  EXPECT_EQ(directory.Names(), (std::vector<std::string>{"new", "old"}));
}

// Programs that may write beside the checkpoints may also leave files with a pending name there.
TEST_F(CheckpointIoTest, OnlyWhatASaveHasMadeIsRemoved) {
  Start();
  const auto put = [&](const std::string& name, const std::vector<std::string>& files) {
    std::filesystem::create_directory(directory_ / name);
    for (const std::string& file : files) std::ofstream(directory_ / name + "/" + file) << "bytes";
  };
  const std::vector<std::string> made = {"manifest.json", "part-00001-of-00002.json",
                                         "shard-00000-of-00002.safetensors"};
  put(".new.saving-0000000000000001", made);
  put(".new.saving-0000000000000002", {"manifest.json", "mine"});
  put("elsewhere", made);
  std::filesystem::create_directory_symlink(directory_ / "elsewhere",
                                            directory_ / ".new.saving-0000000000000003");
  rig_->Wait(rig_->Save(directory_ / "new"));
  EXPECT_EQ(directory_.Names(),
            (std::vector<std::string>{".new.saving-0000000000000002",
                                      ".new.saving-0000000000000003", "elsewhere", "new", "old"}));
  EXPECT_EQ(TemporaryDirectory::NamesIn(directory_ / ".new.saving-0000000000000002"),
            std::vector<std::string>{"mine"});
  EXPECT_EQ(TemporaryDirectory::NamesIn(directory_ / "elsewhere"), made);
}

// Two saves to one name: the first save gets it.
TEST_F(CheckpointIoTest, ASaveNeverReplacesAnything) {
  Start(OFFLOAD_DEVICE_SIM);
  auto options = Make<offload_save_options_t>();
  const std::string old = directory_ / "old";
  options.path = old.c_str();
  EXPECT_EQ(offload_optimizer_save(rig_->optimizer(), &options, nullptr), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_NE(Text().find("exists"), std::string::npos) << Text();
  // Made after the call, before the end of the save.
  const offload_ticket_t first = rig_->Save(directory_ / "new");
  auto again = Make<offload_save_options_t>();
  const std::string path = directory_ / "new";
  again.path = path.c_str();
  offload_ticket_t second = 0;
  const int32_t queued = offload_optimizer_save(rig_->optimizer(), &again, &second);
  EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), first, -1), OFFLOAD_OK);
  if (queued == OFFLOAD_OK) {
    EXPECT_EQ(offload_optimizer_wait(rig_->optimizer(), second, -1), OFFLOAD_IO_FAILED);
    EXPECT_NE(Text().find("choose a path that does not exist yet"), std::string::npos) << Text();
  } else {
    EXPECT_EQ(queued, OFFLOAD_INVALID_ARGUMENT);
  }
  EXPECT_EQ(directory_.Names(), (std::vector<std::string>{"new", "old"}));
}

}  // namespace
}  // namespace hybridopt
