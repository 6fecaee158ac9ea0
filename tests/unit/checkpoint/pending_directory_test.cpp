// The directory in which a checkpoint grows: what gets the final name, what is removed, and what
// changes if locks do not work.
#include "checkpoint/pending_directory.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../../temporary_directory.h"
#include "checkpoint/paths.h"

namespace hybridopt::checkpoint {
namespace {

using Names = std::vector<std::string>;

constexpr char kShard[] = "shard-00000-of-00001.safetensors";
constexpr char kManifest[] = "manifest.json";

// The system's files, except for calls that a test replaces.
class TestFiles : public system::Files {
 public:
  int Lock(int file) override { return lock_error == 0 ? Files::Lock(file) : lock_error; }
  int RenameNoReplace(const std::string& from, const std::string& to) override {
    return rename_error == 0 ? Files::RenameNoReplace(from, to) : rename_error;
  }
  int Sync(int file) override { return sync_error == 0 ? Files::Sync(file) : sync_error; }
  int WorkingDirectory(std::string* path) override {
    return working_error == 0 ? Files::WorkingDirectory(path) : working_error;
  }

  int lock_error = 0, rename_error = 0, sync_error = 0, working_error = 0;
};

// Locks that reach no other machine: every process gets one.
class LoneFiles : public TestFiles {
 public:
  int Lock(int) override {
    if (at_lock) std::exchange(at_lock, nullptr)();
    return 0;
  }
  int Unlock(int) override { return 0; }
  std::function<void()> at_lock;
};

class PendingDirectoryTest : public testing::Test {
 protected:
  PendingDirectory Make(system::Files& files) {
    Result<PendingDirectory> made = PendingDirectory::Make(files, target_);
    EXPECT_TRUE(made.ok()) << made.status().message();
    return std::move(made.value());
  }
  static void Put(const std::string& directory, const Names& names) {
    std::filesystem::create_directories(directory);
    for (const std::string& name : names) std::ofstream(directory + "/" + name) << directory;
  }
  static Names In(const std::string& directory) { return TemporaryDirectory::NamesIn(directory); }

  const TemporaryDirectory root_;
  const std::string target_ = root_ / "step-1";
  const std::string left_ = root_ / ".step-1.saving-0123456789abcdef";
  TestFiles files_;
};

// A process begins a save, forks, and is killed. The child lives on, as a data loader's worker may.
TEST_F(PendingDirectoryTest, AForkedChildKeepsNoLock) {
  int told[2];
  ASSERT_EQ(pipe(told), 0);
  const pid_t saving = fork();
  ASSERT_GE(saving, 0);
  if (saving == 0) {
    const PendingDirectory pending = Make(files_);
    Put(pending.path(), {kShard});
    if (fork() == 0) {
      const pid_t child = getpid();  // reports only now, when the child has released the lock
      alarm(write(told[1], &child, sizeof(child)) == sizeof(child) ? 60 : 1);
      for (;;) pause();
    }
    (void)raise(SIGKILL);
  }
  close(told[1]);
  int status = 0;
  ASSERT_EQ(waitpid(saving, &status, 0), saving);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  pid_t child = 0;
  ASSERT_EQ(read(told[0], &child, sizeof(child)), static_cast<ssize_t>(sizeof(child)));
  EXPECT_EQ(root_.Names().size(), 1u);
  {
    const PendingDirectory pending = Make(files_);
    EXPECT_EQ(root_.Names(), Names{NameOf(pending.path())}) << "what was left is still there";
  }
  EXPECT_EQ(kill(child, SIGKILL), 0) << "the child has not lived until here";
  close(told[0]);
}

// The parent keeps its lock, even if its children close theirs.
TEST_F(PendingDirectoryTest, AParentKeepsItsLockWhenItForks) {
  const PendingDirectory pending = Make(files_);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) std::_Exit(0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  const PendingDirectory other = Make(files_);
  EXPECT_TRUE(std::filesystem::exists(pending.path())) << "it was taken for left";
}

TEST_F(PendingDirectoryTest, LiesBesideItsTargetAndGetsItsNameOnce) {
  PendingDirectory pending = Make(files_);
  char digits[17];
  std::snprintf(digits, sizeof(digits), "%016llx",
                static_cast<unsigned long long>(pending.number()));
  EXPECT_EQ(pending.path(), root_ / (std::string(".step-1.saving-") + digits));
  EXPECT_EQ(PendingDirectory::Join(files_, target_ + "//", pending.number()).path(),
            pending.path());
  Put(pending.path(), {kManifest, kShard});
  EXPECT_TRUE(pending.Publish().ok());
  pending.Remove();  // it is no longer pending
  EXPECT_EQ(root_.Names(), Names{"step-1"});
  EXPECT_EQ(In(target_), (Names{kManifest, kShard}));
}

TEST_F(PendingDirectoryTest, RemovesWhatASaveHasMadeAndNothingElse) {
  PendingDirectory pending = Make(files_);
  Put(pending.path(), {kManifest, kShard, "part-00001-of-00002.json", "mine"});
  pending.Remove();
  EXPECT_EQ(In(pending.path()), Names{"mine"});
}

TEST_F(PendingDirectoryTest, WhatACrashLeftIsRemovedAndWhatIsBeingWrittenStays) {
  Put(left_, {kManifest, kShard});
  Put(root_ / ".step-10.saving-0123456789abcdef", {kManifest});  // of another target
  Put(root_ / ".step-1.saving-0123456789abcdeg", {kManifest});   // of no save
  const PendingDirectory first = Make(files_);
  Put(first.path(), {kShard});
  const PendingDirectory second = Make(files_);
  Names expected = {".step-1.saving-0123456789abcdeg", ".step-10.saving-0123456789abcdef",
                    NameOf(first.path()), NameOf(second.path())};
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(root_.Names(), expected);
  EXPECT_EQ(In(first.path()), Names{kShard});
}

TEST_F(PendingDirectoryTest, WhatHoldsSomethingOfOthersKeepsItsName) {
  Put(left_, {kShard, "mine"});
  const PendingDirectory pending = Make(files_);
  EXPECT_EQ(In(left_), Names{"mine"});
}

TEST_F(PendingDirectoryTest, ALockEndsWithItsOwner) {
  std::string path;
  {
    const PendingDirectory gone = Make(files_);
    path = gone.path();
  }
  EXPECT_TRUE(std::filesystem::exists(path));
  const PendingDirectory next = Make(files_);
  EXPECT_FALSE(std::filesystem::exists(path));
}

// --------------------------------------------------------------------------- without good locks --

TEST_F(PendingDirectoryTest, WhereLocksAreRefusedSavesGoOnAndNothingOfOthersIsRemoved) {
  for (const int error : {ENOLCK, EOPNOTSUPP, ENOSYS, EBADF}) {
    files_.lock_error = -error;
    Put(left_, {kShard});
    PendingDirectory pending = Make(files_);
    Put(pending.path(), {kManifest});
    EXPECT_EQ(In(left_), Names{kShard}) << error;
    EXPECT_TRUE(pending.Publish().ok()) << error;
    EXPECT_EQ(In(target_), Names{kManifest}) << error;
    std::filesystem::remove_all(target_);
    // A save that fails still removes its own.
    PendingDirectory failed = Make(files_);
    Put(failed.path(), {kShard});
    failed.Remove();
    EXPECT_EQ(root_.Names(), Names{NameOf(left_)}) << error;
  }
}

TEST_F(PendingDirectoryTest, WhoseDirectoryIsTakenAwayIsToldAndPublishesNothing) {
  LoneFiles here, there;
  PendingDirectory ours = Make(here);
  Put(ours.path(), {kManifest, kShard});
  PendingDirectory theirs = Make(there);
  Put(theirs.path(), {kManifest});
  EXPECT_EQ(root_.Names(), Names{NameOf(theirs.path())});
  const Status status = ours.Publish();
  EXPECT_EQ(status.code(), OFFLOAD_IO_FAILED);
  EXPECT_EQ(status.message(), "could not give its name to '" + target_ + "': '" + ours.path() +
                                  "' is gone; if another process saves to the same path, give "
                                  "each a path of its own");
  ours.Remove();
  EXPECT_TRUE(theirs.Publish().ok());
  EXPECT_EQ(In(target_), Names{kManifest});
}

// The opposite case: between another save's check and its removal our directory gets its name.
TEST_F(PendingDirectoryTest, WhatHasGotItsNameIsNotTakenAway) {
  LoneFiles here, there;
  PendingDirectory ours = Make(here);
  Put(ours.path(), {kManifest, kShard});
  int published = 0;
  there.at_lock = [&] { published += ours.Publish().ok(); };
  const PendingDirectory theirs = Make(there);
  EXPECT_EQ(published, 1);
  EXPECT_EQ(In(target_), (Names{kManifest, kShard}));
}

// Between its making and its lock, another process takes it for the rest of a crashed save.
TEST_F(PendingDirectoryTest, WhatIsRemovedBeforeItIsLockedIsMadeAgain) {
  LoneFiles here, there;
  std::optional<PendingDirectory> theirs;
  here.at_lock = [&] { theirs = Make(there); };
  PendingDirectory ours = Make(here);
  Names expected = {NameOf(ours.path()), NameOf(theirs.value().path())};
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(root_.Names(), expected);
  Put(ours.path(), {kManifest});
  const Status status = ours.Publish();
  EXPECT_TRUE(status.ok()) << status.message();
}

// ----------------------------------------------------------------------------------- publishing --

TEST_F(PendingDirectoryTest, NothingThatHasTheNameIsReplaced) {
  for (const int error : {0, EINVAL, ENOSYS}) {  // also if only the older call exists
    files_.rename_error = -error;
    PendingDirectory pending = Make(files_);
    Put(pending.path(), {kManifest});
    Put(target_, {"mine"});
    const Status status = pending.Publish();
    EXPECT_EQ(status.code(), OFFLOAD_IO_FAILED);
    EXPECT_EQ(status.message().find("could not give its name to '" + target_ + "': "), 0u)
        << status.message();
    EXPECT_NE(status.message().find("choose a path that does not exist yet"), std::string::npos);
    EXPECT_EQ(In(target_), Names{"mine"});
    std::filesystem::remove_all(target_);
    EXPECT_TRUE(pending.Publish().ok());
    EXPECT_EQ(In(target_), Names{kManifest});
    std::filesystem::remove_all(target_);
  }
}

TEST_F(PendingDirectoryTest, ANameThatMightNotLastIsTakenBack) {
  PendingDirectory pending = Make(files_);
  Put(pending.path(), {kManifest});
  files_.sync_error = -EIO;
  const Status status = pending.Publish();
  EXPECT_EQ(status.code(), OFFLOAD_IO_FAILED);
  EXPECT_EQ(status.message().find("could not sync '" + root_.path() + "'"), 0u) << status.message();
  EXPECT_EQ(root_.Names(), Names{NameOf(pending.path())});
  pending.Remove();
  EXPECT_TRUE(root_.Names().empty());
}

// ---------------------------------------------------------------------------------------- names --

TEST_F(PendingDirectoryTest, NamesThatCanNeverWorkAreRefused) {
  Put(root_ / "there", {});
  Put(root_.path(), {"file"});
  std::filesystem::create_symlink("nowhere", root_ / "dangling");
  std::filesystem::create_directory_symlink("there", root_ / "link");
  std::string deep = root_.path();  // a path may be too long with short names in it, too
  while (deep.size() < 4000) deep += "/.";
  deep += "/" + std::string(60, 'n');
  const struct {
    std::string target, text;
  } rows[] = {
      {"/", "options.path is '/', expected the name of a directory to make"},
      {root_ / "..", "expected the name of a directory to make"},
      {root_ / ".hidden", "/.hidden': a name that begins with '.' is for saves under way"},
      {root_ / "a\xff", "options.path: the 2 bytes of its last part are not UTF-8"},
      {root_ / std::string(231, 'n'),
       "231 of them its name: more than the file system takes with the 25 that are added"},
      {root_ / std::string(1000, 'n'), "1000 of them its name: more than the file system takes"},
      {deep, "60 of them its name: more than the file system takes"},
      {root_ / "there", "there' exists; a checkpoint never replaces anything"},
      {root_ / "there//", "there//' exists; a checkpoint never replaces anything"},
      {root_ / "file/", "file/' exists; a checkpoint never replaces anything"},
      {root_ / "dangling/", "dangling/' exists; a checkpoint never replaces anything"},
      {root_ / "none/new", "new': its parent '" + (root_ / "none") + "' cannot be used"},
      {root_ / "none/new/", "cannot be used: No such file or directory; make it first"},
      {root_ / "file/new", "file' cannot be used: Not a directory; choose another one"},
      {root_ / "dangling/new",
       "dangling' cannot be used: No such file or directory; make it first"},
  };
  for (const auto& row : rows) {
    const Status status = PendingDirectory::CheckTarget(files_, row.target);
    EXPECT_EQ(status.code(), OFFLOAD_INVALID_ARGUMENT) << row.text;
    EXPECT_NE(status.message().find(row.text), std::string::npos) << status.message();
  }
  // A path that is accepted can be made.
  for (const std::string& name :
       {std::string(230, 'n'), std::string("n\xc3\xa4me"), std::string("a b"), std::string("a."),
        std::string("slashes//"), std::string("link/behind"), std::string("there//inside/")}) {
    ASSERT_TRUE(PendingDirectory::CheckTarget(files_, root_ / name).ok()) << name;
    Result<PendingDirectory> made = PendingDirectory::Make(files_, root_ / name);
    ASSERT_TRUE(made.ok()) << made.status().message();
    EXPECT_TRUE(made.value().Publish().ok()) << name;
  }
}

TEST(PathsTest, RelativeOnesAreTakenFromTheWorkingDirectory) {
  TestFiles files;
  EXPECT_EQ(AbsolutePath(files, "/a/../b").value(), "/a/../b");
  EXPECT_EQ(AbsolutePath(files, "a/b").value(), std::filesystem::current_path() / "a/b");
  files.working_error = -ENOENT;
  EXPECT_EQ(AbsolutePath(files, "/a").value(), "/a");
  const Status status = AbsolutePath(files, "a").status();
  EXPECT_EQ(status.code(), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_EQ(status.message(),
            "options.path 'a' is relative, but the working directory cannot be told: No such file "
            "or directory; give a path that begins with '/'");
}

TEST(PathsTest, WhatCanBeNoCheckpointIsRefused) {
  TestFiles files;
  EXPECT_TRUE(CheckSource(files, "/none").ok());
  const Status status = CheckSource(files, "/" + std::string(256, 'n'));
  EXPECT_EQ(status.code(), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_NE(status.message().find("has 257 bytes, 256 of them its name: more than the file system "
                                  "takes, so no checkpoint can be there"),
            std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace hybridopt::checkpoint
