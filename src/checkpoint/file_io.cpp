#include "checkpoint/file_io.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <utility>

namespace hybridopt::checkpoint {
namespace {

using Files = system::Files;

// Checks the calls of a loop that reads or writes until it has all bytes.
class CallChecker {
 public:
  CallChecker(const char* what, const std::string& path) : what_(what), path_(path) {}

  // Takes the result of a call, of which `advanced` bytes count. IO_FAILED for an error other than
  // an interruption, and after many calls in a row without progress.
  Status Check(int64_t result, uint64_t advanced) {
    if (result < 0 && result != -EINTR) return IoError(what_, path_, result);
    idle_calls_ = advanced > 0 ? 0 : idle_calls_ + 1;
    if (idle_calls_ < kIdleCallsMax) return {};
    return IoError(what_, path_, result < 0 ? result : -EIO);
  }

 private:
  static constexpr int kIdleCallsMax = 100;
  const char* const what_;
  const std::string& path_;
  int idle_calls_ = 0;
};

Status SyncFile(Files& files, int file, const std::string& path) {
  const int error = files.Sync(file);
  return error == 0 ? Status() : IoError("sync", path, error);
}

Status CloseFile(Files& files, int file, const std::string& path) {
  const int error = files.Close(file);
  // After EINTR the file is closed too, and its data was synced before.
  return error == 0 || error == -EINTR ? Status() : IoError("close", path, error);
}

uint64_t BytesMoved(int64_t result) { return result > 0 ? static_cast<uint64_t>(result) : 0; }

// What a user can do about an error.
const char* AdviceFor(int64_t error) {
  switch (-error) {
    case ENOSPC:
    case EDQUOT:
      return "; free space there, or save somewhere else";
    case EEXIST:
    case ENOTEMPTY:
      return "; choose a path that does not exist yet";
    case ESPIPE:
      return "; expected a regular file";
    case ENOENT:
    case ENOTDIR:
      return "; check the path, and make the directory first where something new goes";
    case EACCES:
    case EPERM:
      return "; give this user the permission (see chmod and chown), or choose another path";
    case EROFS:
      return "; mount that file system with write access, or choose a path on another one";
    case ENAMETOOLONG:
      return "; choose a shorter path (most systems allow 255 bytes for each name)";
    case ELOOP:
      return "; a symbolic link there leads back to itself: remove it, or choose another path";
    case EFBIG:
      return "; that file system or `ulimit -f` allows no file of this size: choose another path "
             "or raise the limit";
    case EMFILE:
      return "; raise the number of open files of this process (`ulimit -n`)";
    case ENFILE:
      return "; close files of other programs, or raise fs.file-max of this machine";
    case EISDIR:
      return "; a directory is there, expected a file";
    case EIO:
    case ESTALE:
      return "; look at the drive and at the connection to it (`dmesg` says more)";
    default:
      return "";
  }
}

}  // namespace

Status IoError(const char* what, const std::string& path, int64_t error) {
  return Status::Error(OFFLOAD_IO_FAILED, "could not %s '%.500s': %s (errno %lld)%s", what,
                       path.c_str(), system::ErrorText(static_cast<int>(-error)).c_str(),
                       static_cast<long long>(-error), AdviceFor(error));
}

// ---------------------------------------------------------------------------------------- files --

Result<File> File::Open(Files& files, std::string path, Files::Open direct, Files::Open cached,
                        const char* what) {
  int file = Uninterrupted([&] { return files.OpenFile(path, direct); });
  const bool refused = file == -EINVAL || file == -EOPNOTSUPP;  // tmpfs, overlays, some networks
  if (refused) file = Uninterrupted([&] { return files.OpenFile(path, cached); });
  if (file < 0) return IoError(what, path, file);
  return File(files, std::move(path), file, !refused);
}

Result<File> File::Create(Files& files, std::string path) {
  return Open(files, std::move(path), Files::Open::kCreateDirect, Files::Open::kCreate, "create");
}

Result<File> File::Open(Files& files, std::string path) {
  return Open(files, std::move(path), Files::Open::kReadDirect, Files::Open::kRead, "open");
}

Result<File> File::Scratch(Files& files, std::string directory) {
  return Open(files, std::move(directory), Files::Open::kScratchDirect, Files::Open::kScratch,
              "make a file in");
}

File::~File() {
  if (file_ >= 0) (void)files_->Close(file_);
}

File& File::operator=(File&& other) noexcept {
  std::swap(files_, other.files_);
  std::swap(path_, other.path_);
  std::swap(file_, other.file_);
  direct_ = other.direct_.exchange(direct_);
  return *this;
}

Result<uint64_t> File::Size() {
  const int64_t bytes = files_->Size(file_);
  if (bytes < 0) return IoError("look at", path_, bytes);
  return static_cast<uint64_t>(bytes);
}

Status File::Allocate(uint64_t bytes) {
  if (bytes == 0) return {};
  const int error = Uninterrupted([&] { return files_->Allocate(file_, bytes); });
  // If the file system cannot reserve space, a later write fails if there is none.
  if (error == 0 || error == -EOPNOTSUPP || error == -ENOSYS) return {};
  return IoError("take room for", path_, error);
}

// A file system may accept O_DIRECT when the file is opened and refuse it at the first read or
// write. Several threads may be in such calls: one of them switches the file to the page cache, and
// all repeat their calls.
bool File::GoThroughCache(int64_t error, bool direct) {
  static std::mutex switching;
  if (error != -EINVAL || !direct) return false;
  std::lock_guard lock(switching);
  if (!direct_) return true;
  if (files_->UseCache(file_) != 0) return false;
  direct_ = false;
  return true;
}

Status File::Write(const std::byte* data, uint64_t bytes, uint64_t offset) {
  CallChecker checker("write", path_);
  for (uint64_t done = 0; done < bytes;) {
    const bool direct = direct_;
    const int64_t wrote = files_->Write(file_, data + done, bytes - done, offset + done);
    if (GoThroughCache(wrote, direct)) continue;
    uint64_t advanced = BytesMoved(wrote);
    // If a write ends inside an aligned unit, the next write writes this unit again.
    if (direct && done + advanced < bytes)
      advanced = advanced / kDirectAlignment * kDirectAlignment;
    HYBRIDOPT_TRY(checker.Check(wrote, advanced));
    done += advanced;
  }
  return {};
}

Result<uint64_t> File::Read(std::byte* data, uint64_t bytes, uint64_t offset) {
  CallChecker checker("read", path_);
  for (uint64_t done = 0; done < bytes;) {
    const bool direct = direct_;
    const int64_t read = files_->Read(file_, data + done, bytes - done, offset + done);
    if (GoThroughCache(read, direct)) continue;
    if (read == 0) return done;
    uint64_t advanced = BytesMoved(read);
    if (direct && advanced % kDirectAlignment != 0 && done + advanced < bytes) {
      HYBRIDOPT_ASSIGN(const uint64_t size, Size());
      if (offset + done + advanced >= size) return done + advanced;
      advanced = advanced / kDirectAlignment * kDirectAlignment;
    }
    HYBRIDOPT_TRY(checker.Check(read, advanced));
    done += advanced;
  }
  return bytes;
}

Status File::Truncate(uint64_t bytes) {
  const int error = Uninterrupted([&] { return files_->Truncate(file_, bytes); });
  return error == 0 ? Status() : IoError("cut the end off", path_, error);
}

Status File::Sync() { return SyncFile(*files_, file_, path_); }

Status File::Close() { return CloseFile(*files_, std::exchange(file_, -1), path_); }

// --------------------------------------------------------------------------------------- texts --

TextFile::~TextFile() {
  if (file_ >= 0) (void)files_.Close(file_);
}

Status TextFile::Create() {
  file_ = Uninterrupted([&] { return files_.OpenFile(path_, Files::Open::kCreate); });
  return file_ >= 0 ? Status() : IoError("create", path_, file_);
}

Status TextFile::Append(const std::string& text) {
  CallChecker checker("write", path_);
  for (uint64_t done = 0; done < text.size();) {
    const int64_t wrote =
        files_.Write(file_, text.data() + done, text.size() - done, written_ + done);
    HYBRIDOPT_TRY(checker.Check(wrote, BytesMoved(wrote)));
    done += BytesMoved(wrote);
  }
  written_ += text.size();
  return {};
}

Status TextFile::Finish() {
  HYBRIDOPT_TRY(SyncFile(files_, file_, path_));
  return CloseFile(files_, std::exchange(file_, -1), path_);
}

namespace {

// Closes a file at the end of a function, also if the function ends with an exception.
class Closing {
 public:
  Closing(Files& files, int file) : files_(files), file_(file) {}
  ~Closing() { (void)files_.Close(file_); }
  Closing(const Closing&) = delete;
  Closing& operator=(const Closing&) = delete;

 private:
  Files& files_;
  const int file_;
};

Result<std::string> ReadAll(Files& files, int file, const std::string& path, uint64_t bytes_max) {
  const int64_t bytes = files.Size(file);
  if (bytes < 0) return IoError("look at", path, bytes);
  if (static_cast<uint64_t>(bytes) > bytes_max)
    return Status::Error(OFFLOAD_CHECKPOINT_CORRUPT, "'%.500s' has %lld bytes, at most %llu may be",
                         path.c_str(), static_cast<long long>(bytes),
                         static_cast<unsigned long long>(bytes_max));
  std::string text(static_cast<size_t>(bytes), '\0');
  CallChecker checker("read", path);
  for (uint64_t done = 0; done < text.size();) {
    const int64_t read = files.Read(file, text.data() + done, text.size() - done, done);
    HYBRIDOPT_TRY(checker.Check(read, BytesMoved(read)));
    done += BytesMoved(read);
  }
  return text;
}

}  // namespace

Status WriteSmallFile(Files& files, const std::string& path, const std::string& text) {
  TextFile file(files, path);
  HYBRIDOPT_TRY(file.Create());
  HYBRIDOPT_TRY(file.Append(text));
  return file.Finish();
}

Result<std::string> ReadSmallFile(Files& files, const std::string& path, uint64_t bytes_max) {
  const int file = Uninterrupted([&] { return files.OpenFile(path, Files::Open::kRead); });
  if (file < 0) return IoError("open", path, file);
  const Closing closing(files, file);
  return ReadAll(files, file, path, bytes_max);
}

Status SyncDirectory(Files& files, const std::string& path) {
  const int file = Uninterrupted([&] { return files.OpenFile(path, Files::Open::kDirectory); });
  if (file < 0) return IoError("open", path, file);
  const int error = files.Sync(file);
  (void)files.Close(file);
  // Some file systems have nothing to sync in a directory and return EINVAL.
  if (error == 0 || error == -EINVAL) return {};
  return IoError("sync", path, error);
}

}  // namespace hybridopt::checkpoint
