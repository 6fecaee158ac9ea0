// RecordingFiles: passes every call on and records it, so that a test can compute what a disk may
// have after a crash at any moment: everything that was synced, and any part of the rest.
#pragma once

#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/files.h"

namespace hybridopt {

class RecordingFiles : public system::Files {
 public:
  using Inode = int;
  static constexpr Inode kRoot = 0;

  struct Change {
    Inode target;  // the file or directory that changes; a sync of it makes the change durable
    enum Kind { kWrite, kSize, kAdd, kRemove, kRename, kSync } kind;
    std::string name;   // kAdd, kRemove, kRename: in the directory
    std::string name2;  // kRename: the new one
    Inode added;        // kAdd
    uint64_t offset;    // kWrite; kSize: the new size
    std::string bytes;  // kWrite
  };
  // The content of a disk: bytes of files and names in directories.
  struct Disk {
    std::map<Inode, std::string> files;
    std::map<Inode, std::map<std::string, Inode>> directories{{kRoot, {}}};
  };

  explicit RecordingFiles(std::string root) : root_(std::move(root)) {}

  const std::vector<Change>& changes() const { return changes_; }

  // The disk after a crash that follows the first `count` changes. For changes that were not
  // synced, keep(i) decides whether change i, or one sector of it, is on the disk.
  template <typename Keep>
  Disk After(size_t count, Keep&& keep) const {
    std::map<Inode, size_t> last_sync;
    for (size_t i = 0; i < count; ++i)
      if (changes_[i].kind == Change::kSync) last_sync[changes_[i].target] = i;
    Disk disk;
    for (const Inode inode : directory_inodes_) disk.directories[inode];
    for (size_t i = 0; i < count; ++i) {
      const auto synced = last_sync.find(changes_[i].target);
      const bool lasts = synced != last_sync.end() && synced->second > i;
      Apply(changes_[i], disk, [&] { return lasts || keep(); });
    }
    return disk;
  }

  int OpenFile(const std::string& path, Open how) override {
    const int file = Files::OpenFile(path, how);
    std::lock_guard lock(mutex_);
    if (file < 0) return file;
    if (how == Open::kCreate || how == Open::kCreateDirect) Add(path, false);
    open_[file] = InodeOf(path);
    return file;
  }
  int64_t Write(int file, const void* data, uint64_t bytes, uint64_t offset) override {
    const int64_t wrote = Files::Write(file, data, bytes, offset);
    std::lock_guard lock(mutex_);
    if (wrote > 0)
      changes_.push_back({open_[file], Change::kWrite, "", "", -1, offset,
                          std::string(static_cast<const char*>(data), static_cast<size_t>(wrote))});
    return wrote;
  }
  int Allocate(int file, uint64_t bytes) override {
    const int error = Files::Allocate(file, bytes);
    std::lock_guard lock(mutex_);
    if (error == 0) changes_.push_back({open_[file], Change::kSize, "", "", -1, bytes, ""});
    return error;
  }
  int Truncate(int file, uint64_t bytes) override {
    const int error = Files::Truncate(file, bytes);
    std::lock_guard lock(mutex_);
    if (error == 0) changes_.push_back({open_[file], Change::kSize, "", "", -1, bytes, ""});
    return error;
  }
  int Sync(int file) override {
    const int error = Files::Sync(file);
    std::lock_guard lock(mutex_);
    if (error == 0) changes_.push_back({open_[file], Change::kSync, "", "", -1, 0, ""});
    return error;
  }
  int MakeDirectory(const std::string& path) override {
    const int error = Files::MakeDirectory(path);
    std::lock_guard lock(mutex_);
    if (error == 0) Add(path, true);
    return error;
  }
  int RenameNoReplace(const std::string& from, const std::string& to) override {
    const int error = Files::RenameNoReplace(from, to);
    std::lock_guard lock(mutex_);
    if (error == 0) {
      changes_.push_back({InodeOf(Parent(from)), Change::kRename, Name(from), Name(to), -1, 0, ""});
      inodes_[to] = inodes_[from];
      inodes_.erase(from);
    }
    return error;
  }
  int Remove(const std::string& path) override { return Forget(path, Files::Remove(path)); }
  int RemoveIn(int directory, const std::string& name) override {
    const int error = Files::RemoveIn(directory, name);
    std::lock_guard lock(mutex_);
    if (error == 0) changes_.push_back({open_[directory], Change::kRemove, name, "", -1, 0, ""});
    return error;
  }
  int RemoveDirectory(const std::string& path) override {
    return Forget(path, Files::RemoveDirectory(path));
  }

 private:
  static std::string Parent(const std::string& path) { return path.substr(0, path.rfind('/')); }
  static std::string Name(const std::string& path) { return path.substr(path.rfind('/') + 1); }

  Inode InodeOf(const std::string& path) {
    if (path == root_) return kRoot;
    const auto found = inodes_.find(path);
    return found == inodes_.end() ? -1 : found->second;
  }
  void Add(const std::string& path, bool is_directory) {
    inodes_[path] = next_inode_++;
    if (is_directory) directory_inodes_.insert(inodes_[path]);
    changes_.push_back({InodeOf(Parent(path)), Change::kAdd, Name(path), "", inodes_[path], 0, ""});
  }
  int Forget(const std::string& path, int error) {
    std::lock_guard lock(mutex_);
    if (error == 0)
      changes_.push_back({InodeOf(Parent(path)), Change::kRemove, Name(path), "", -1, 0, ""});
    return error;
  }

  template <typename Keep>
  static void Apply(const Change& change, Disk& disk, Keep&& keep) {
    constexpr size_t kSector = 512;  // the smallest unit that a disk writes completely
    std::map<std::string, Inode> none;
    const auto directory = disk.directories.find(change.target);
    auto& names = directory == disk.directories.end() ? none : directory->second;
    switch (change.kind) {
      case Change::kWrite: {
        std::string& file = disk.files[change.target];
        for (size_t at = 0; at < change.bytes.size(); at += kSector) {
          if (!keep()) continue;
          const size_t bytes = std::min(kSector, change.bytes.size() - at);
          if (file.size() < change.offset + at + bytes) file.resize(change.offset + at + bytes);
          std::memcpy(file.data() + change.offset + at, change.bytes.data() + at, bytes);
        }
        break;
      }
      case Change::kSize:
        if (keep()) disk.files[change.target].resize(change.offset);
        break;
      case Change::kAdd:
        if (keep()) names[change.name] = change.added;
        break;
      case Change::kRemove:
        if (keep()) names.erase(change.name);
        break;
      case Change::kRename:
        if (const auto found = names.find(change.name); found != names.end() && keep()) {
          names[change.name2] = found->second;
          names.erase(change.name);
        }
        break;
      case Change::kSync:
        break;
    }
  }

  const std::string root_;
  std::mutex mutex_;
  std::map<std::string, Inode> inodes_;  // guarded by mutex_, as all below
  std::set<Inode> directory_inodes_{kRoot};
  std::map<int, Inode> open_;
  std::vector<Change> changes_;
  Inode next_inode_ = 1;
};

}  // namespace hybridopt
