// Files that fail as disks, quotas and signals make them fail: one call fails, or all later calls
// of its kind.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>
#include <string>
#include <vector>

#include "base/files.h"

namespace hybridopt {

enum class Operation {
  kOpen,
  kClose,
  kSize,
  kRead,
  kWrite,
  kAllocate,
  kTruncate,
  kSync,
  kLock,
  kMakeDirectory,
  kList,
  kRename,
  kRemove,
  kRemoveDirectory,
  kLook
};
inline constexpr int kOperations = 15;
inline const char* OperationName(Operation operation) {
  constexpr const char* kNames[] = {
      "open", "close",          "size", "read",   "write",  "allocate",         "truncate", "sync",
      "lock", "make directory", "list", "rename", "remove", "remove directory", "look"};
  return kNames[static_cast<int>(operation)];
}

// Instead of an errno:
inline constexpr int kShort = 0;     // half of what was asked for
inline constexpr int kChanged = -2;  // a read gives other bytes, as if the file had been changed

class FaultyFiles : public system::Files {
 public:
  // The `call`-th operation of this kind from now on, and if sticky all later ones, fail.
  void Inject(Operation operation, uint64_t call, int error, bool sticky) {
    std::lock_guard lock(mutex_);
    operation_ = operation;
    call_ = call;
    error_ = error;
    sticky_ = sticky;
    armed_ = true;
    std::fill(std::begin(counts_), std::end(counts_), 0);
    failed_ = 0;
  }
  void Heal() {
    std::lock_guard lock(mutex_);
    armed_ = false;
  }
  uint64_t failed() const { return failed_; }  // calls that were made to fail
  uint64_t count(Operation operation) {
    std::lock_guard lock(mutex_);
    return counts_[static_cast<int>(operation)];
  }

  int OpenFile(const std::string& path, Open how) override {
    const int error = Fault(Operation::kOpen);
    return error > 0 ? -error : Files::OpenFile(path, how);
  }
  int Close(int file) override {
    const int error = Fault(Operation::kClose);
    const int closed = Files::Close(file);  // as the system does, even if it returns an error
    return error > 0 ? -error : closed;
  }
  int64_t Size(int file) override {
    const int error = Fault(Operation::kSize);
    return error > 0 ? -error : Files::Size(file);
  }
  int64_t Read(int file, void* data, uint64_t bytes, uint64_t offset) override {
    const int error = Fault(Operation::kRead);
    if (error > 0) return -error;
    const int64_t read = Files::Read(file, data, Cut(error, bytes), offset);
    if (error == kChanged)
      for (int64_t i = 0; i < read; ++i) static_cast<unsigned char*>(data)[i] ^= 1;
    return read;
  }
  int64_t Write(int file, const void* data, uint64_t bytes, uint64_t offset) override {
    const int error = Fault(Operation::kWrite);
    return error > 0 ? -error : Files::Write(file, data, Cut(error, bytes), offset);
  }
  int Allocate(int file, uint64_t bytes) override {
    const int error = Fault(Operation::kAllocate);
    return error > 0 ? -error : Files::Allocate(file, bytes);
  }
  int Truncate(int file, uint64_t bytes) override {
    const int error = Fault(Operation::kTruncate);
    return error > 0 ? -error : Files::Truncate(file, bytes);
  }
  int Sync(int file) override {
    const int error = Fault(Operation::kSync);
    return error > 0 ? -error : Files::Sync(file);
  }
  int Lock(int file) override {
    const int error = Fault(Operation::kLock);
    return error > 0 ? -error : Files::Lock(file);
  }
  int Look(const std::string& path) override {
    const int error = Fault(Operation::kLook);
    return error > 0 ? -error : Files::Look(path);
  }
  int MakeDirectory(const std::string& path) override {
    const int error = Fault(Operation::kMakeDirectory);
    return error > 0 ? -error : Files::MakeDirectory(path);
  }
  int List(const std::string& path, std::vector<std::string>* names) override {
    const int error = Fault(Operation::kList);
    return error > 0 ? -error : Files::List(path, names);
  }
  int RenameNoReplace(const std::string& from, const std::string& to) override {
    const int error = Fault(Operation::kRename);
    return error > 0 ? -error : Files::RenameNoReplace(from, to);
  }
  int Remove(const std::string& path) override {
    const int error = Fault(Operation::kRemove);
    return error > 0 ? -error : Files::Remove(path);
  }
  int ListOpen(int directory, std::vector<std::string>* names) override {
    const int error = Fault(Operation::kList);
    return error > 0 ? -error : Files::ListOpen(directory, names);
  }
  int RemoveIn(int directory, const std::string& name) override {
    const int error = Fault(Operation::kRemove);
    return error > 0 ? -error : Files::RemoveIn(directory, name);
  }
  int RemoveDirectory(const std::string& path) override {
    const int error = Fault(Operation::kRemoveDirectory);
    return error > 0 ? -error : Files::RemoveDirectory(path);
  }

 private:
  // The error with which this call must fail: an errno above 0, kShort, kChanged, or -1 if it must
  // not fail.
  int Fault(Operation operation) {
    std::lock_guard lock(mutex_);
    const uint64_t call = counts_[static_cast<int>(operation)]++;
    if (!armed_ || operation != operation_) return -1;
    if (sticky_ ? call < call_ : call != call_) return -1;
    failed_ += 1;
    return error_;
  }
  // Cuts to whole units of the disk if there are several, as a disk does.
  static uint64_t Cut(int error, uint64_t bytes) {
    if (error != kShort) return bytes;
    return bytes > 8192 ? bytes / 2 / 4096 * 4096 : bytes / 2;
  }

  std::mutex mutex_;
  bool armed_ = false;  // guarded by mutex_, as all below
  Operation operation_ = Operation::kOpen;
  uint64_t call_ = 0;
  int error_ = 0;
  bool sticky_ = false;
  uint64_t counts_[kOperations] = {};
  std::atomic<uint64_t> failed_ = 0;
};

}  // namespace hybridopt
