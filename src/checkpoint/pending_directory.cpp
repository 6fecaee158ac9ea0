#include "checkpoint/pending_directory.h"

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <string_view>
#include <utility>
#include <vector>

#include "base/utf8.h"
#include "checkpoint/file_io.h"
#include "checkpoint/format/format.h"
#include "checkpoint/paths.h"

namespace hybridopt::checkpoint {
namespace {

using Files = system::Files;

constexpr char kMark[] = ".saving-";
constexpr size_t kDigits = 16;
constexpr int kNamesTried = 8;
constexpr uint64_t kNumberMask = (uint64_t{1} << 62) - 1;  // two int32_t that are not negative

std::string PrefixOf(const std::string& target) { return "." + NameOf(target) + kMark; }

std::string PendingPath(const std::string& target, uint64_t number) {
  char digits[kDigits + 1];
  std::snprintf(digits, sizeof(digits), "%016" PRIx64, number);
  return ParentOf(target) + "/" + PrefixOf(target) + digits;
}

// Asks the file system whether the name or the path is too long. For that question the path need
// not exist.
Status CheckLength(Files& files, const std::string& target) {
  const std::string pending = PendingPath(target, 0);
  const std::string longest = pending + "/" + ShardFileName(kWorldMax, kWorldMax);
  if (Uninterrupted([&] { return files.Look(pending); }) != -ENAMETOOLONG &&
      Uninterrupted([&] { return files.Look(longest); }) != -ENAMETOOLONG)
    return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "options.path '%.200s' has %zu bytes, %zu of them its name: more than the "
                       "file system takes with the %zu that are added while it is written; choose "
                       "a shorter one",
                       target.c_str(), target.size(), NameOf(target).size(),
                       NameOf(pending).size() - NameOf(target).size());
}

bool IsPending(const std::string& name, const std::string& prefix) {
  return name.size() == prefix.size() + kDigits && name.compare(0, prefix.size(), prefix) == 0 &&
         name.find_first_not_of("0123456789abcdef", prefix.size()) == std::string::npos;
}

bool IsBetween(const std::string& name, std::string_view begin, std::string_view end) {
  return name.size() > begin.size() + end.size() && name.starts_with(begin) && name.ends_with(end);
}

// Whether a save makes files of this name.
bool IsFileOfSave(const std::string& name) {
  return name == kManifestFile || IsBetween(name, "shard-", ".safetensors") ||
         IsBetween(name, "part-", ".json");
}

// Removes the files of a save, and the directory if it is empty then. Keeps all other files; if
// there are any, returns false. Works with the open directory and not with its path, because the
// path may name another directory now.
bool RemoveTree(Files& files, int directory, const std::string& path) {
  const Status listed = CatchExceptions("the names in a directory", [&]() -> Status {
    std::vector<std::string> names;
    if (const int error = files.ListOpen(directory, &names); error != 0)
      return IoError("list", path, error);
    for (const std::string& name : names)
      if (IsFileOfSave(name)) (void)Uninterrupted([&] { return files.RemoveIn(directory, name); });
    return {};
  });
  return listed.ok() && Uninterrupted([&] { return files.RemoveDirectory(path); }) == 0;
}

// rename() of a directory never replaces a file, nor a directory that is not empty, so that nothing
// is lost if RenameNoReplace does not exist.
int RenameDirectory(Files& files, const std::string& from, const std::string& to) {
  const int error = Uninterrupted([&] { return files.RenameNoReplace(from, to); });
  if (error != -ENOSYS && error != -EINVAL) return error;
  return Uninterrupted([&] { return files.Rename(from, to); });
}

uint64_t RandomNumber() { return system::RandomBits() & kNumberMask; }

// Removes the directory if no process has locked it. First renames it: if another machine, to which
// the lock does not reach, is saving into it, that save can then no longer publish a checkpoint
// with a part missing.
void RemoveIfLeft(Files& files, const std::string& path, const std::string& target) {
  const std::string taken = PendingPath(target, RandomNumber());
  const int file = Uninterrupted([&] { return files.OpenFile(path, Files::Open::kOwnDirectory); });
  if (file < 0) return;
  if (Uninterrupted([&] { return files.Lock(file); }) == 0) {
    if (RenameDirectory(files, path, taken) == 0 && !RemoveTree(files, file, taken))
      (void)RenameDirectory(files, taken, path);
    (void)files.Unlock(file);
  }
  (void)files.Close(file);
}

}  // namespace

Status PendingDirectory::CheckTarget(Files& files, const std::string& target) {
  const std::string name = NameOf(target);
  if (name.empty() || name == "." || name == "..")
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.path is '%.500s', expected the name of a directory to make",
                         target.c_str());
  if (name[0] == '.')
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.path '%.500s': a name that begins with '.' is for saves under "
                         "way and never found again; choose another one",
                         target.c_str());
  if (!IsUtf8(name))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.path: the %zu bytes of its last part are not UTF-8, expected a "
                         "name that every tool can show; choose another one",
                         name.size());
  HYBRIDOPT_TRY(CheckLength(files, target));
  // With a slash at the end of the path, an existing file would not be found.
  const std::string plain = WithoutSlashes(target);
  if (Uninterrupted([&] { return files.Look(plain); }) == 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.path '%.500s' exists; a checkpoint never replaces anything: "
                         "choose a new name, or remove what is there",
                         target.c_str());
  const std::string parent = ParentOf(target);
  if (const int error = LookIn(files, parent); error != 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.path '%.500s': its parent '%.500s' cannot be used: %s; %s",
                         target.c_str(), parent.c_str(), system::ErrorText(-error).c_str(),
                         error == -ENOENT ? "make it first" : "choose another one");
  return {};
}

PendingDirectory::PendingDirectory(Files& files, const std::string& target, uint64_t number)
    : files_(&files),
      target_(WithoutSlashes(target)),
      path_(PendingPath(target_, number)),
      number_(number) {}

Result<PendingDirectory> PendingDirectory::Make(Files& files, const std::string& target) {
  std::vector<std::string> names;
  const std::string parent = ParentOf(target);
  if (const int error = Uninterrupted([&] { return files.List(parent, &names); }); error != 0)
    return IoError("list", parent, error);
  for (const std::string& name : names)
    if (IsPending(name, PrefixOf(target))) RemoveIfLeft(files, parent + "/" + name, target);

  Status status;
  for (int tries = 0; tries < kNamesTried; ++tries) {
    PendingDirectory directory(files, target, RandomNumber());
    status = directory.Occupy();
    if (status.ok()) return directory;
    if (status.code() != OFFLOAD_INVALID_STATE) return status;
  }
  return IoError("make", PendingDirectory(files, target, 0).path_, -EEXIST);
}

PendingDirectory PendingDirectory::Join(Files& files, const std::string& target, uint64_t number) {
  return PendingDirectory(files, target, number);
}

PendingDirectory::~PendingDirectory() {
  if (lock_ < 0) return;
  (void)files_->Unlock(lock_);
  (void)files_->Close(lock_);
}

PendingDirectory& PendingDirectory::operator=(PendingDirectory&& other) noexcept {
  std::swap(files_, other.files_);
  std::swap(target_, other.target_);
  std::swap(path_, other.path_);
  std::swap(number_, other.number_);
  std::swap(lock_, other.lock_);
  return *this;
}

// Locks the new directory. INVALID_STATE if another process, before the lock, has taken the
// directory for that of a crashed save; then the caller tries another name.
Status PendingDirectory::Occupy() {
  const int made = Uninterrupted([&] { return files_->MakeDirectory(path_); });
  if (made == -EEXIST) return Status::Error(OFFLOAD_INVALID_STATE, "the name is taken");
  if (made != 0) return IoError("make", path_, made);
  lock_ = Uninterrupted([&] { return files_->OpenFile(path_, Files::Open::kOwnDirectory); });
  if (lock_ == -ENOENT) return Status::Error(OFFLOAD_INVALID_STATE, "it is gone");
  if (lock_ < 0) {
    (void)Uninterrupted([&] { return files_->RemoveDirectory(path_); });
    return IoError("open", path_, lock_);
  }
  const int locked = Uninterrupted([&] { return files_->Lock(lock_); });
  if (locked == -EWOULDBLOCK) return Status::Error(OFFLOAD_INVALID_STATE, "it is being removed");
  // Without locks no process can tell which directories crashed saves have left, so none is
  // removed.
  if (locked != 0) return {};
  if (files_->IdentityOf(path_) != files_->Identity(lock_))
    return Status::Error(OFFLOAD_INVALID_STATE, "it was removed");
  return {};
}

Status PendingDirectory::Publish() {
  const int error = RenameDirectory(*files_, path_, target_);
  if (error == -ENOENT)
    return Status::Error(OFFLOAD_IO_FAILED,
                         "could not give its name to '%.500s': '%.500s' is gone; if another "
                         "process saves to the same path, give each a path of its own",
                         target_.c_str(), path_.c_str());
  if (error != 0) return IoError("give its name to", target_, error);
  Status status = CatchExceptions("the sync of a checkpoint's parent directory",
                                  [&] { return SyncDirectory(*files_, ParentOf(target_)); });
  if (status.ok()) return status;
  // The rename may not survive a crash, so it is undone: a failed save leaves no checkpoint.
  (void)Uninterrupted([&] { return files_->Rename(target_, path_); });
  return status;
}

void PendingDirectory::Remove() {
  // A directory that already has its final name is not pending.
  if (lock_ >= 0 && files_->IdentityOf(path_) == files_->Identity(lock_))
    (void)RemoveTree(*files_, lock_, path_);
}

}  // namespace hybridopt::checkpoint
