// The file system's calls, unchanged, behind an interface, so that tests can let each call fail,
// record it and replay it. Part of system, the library's only access to the operating system.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hybridopt::system {

// Every call returns what the system returned, or -errno. No call is repeated here, not even after
// EINTR. Thread-safe.
class Files {
 public:
  virtual ~Files() = default;

  enum class Open {
    kRead,
    kReadDirect,     // bypasses the page cache: addresses, offsets and sizes are multiples of 4096
    kCreate,         // a new file, for writing; an existing one is not opened
    kCreateDirect,   // the same, bypassing the page cache
    kScratch,        // a new file without a name in this directory, for reading and writing
    kScratchDirect,  // the same, bypassing the page cache
    kDirectory,      // a directory, for fsync
    kOwnDirectory    // a directory, to be locked or emptied; not through a symbolic link
  };
  virtual int OpenFile(const std::string& path, Open how);
  virtual int Close(int file);
  virtual int64_t Size(int file);  // -EISDIR of a directory, -ESPIPE of a pipe or a device
  virtual int64_t Read(int file, void* data, uint64_t bytes, uint64_t offset);
  virtual int64_t Write(int file, const void* data, uint64_t bytes, uint64_t offset);
  virtual int Allocate(
      int file,
      uint64_t bytes);  // reserves space on disk, so that a later write cannot run out of it
  virtual int Truncate(int file, uint64_t bytes);
  virtual int Sync(int file);
  virtual int UseCache(int file);  // ends direct access
  // Takes an exclusive lock on a directory that was opened with kOwnDirectory; -EWOULDBLOCK if
  // another process has it. The lock ends with this process: such files are closed in a forked
  // child.
  virtual int Lock(int file);
  virtual int Unlock(int file);

  virtual int WorkingDirectory(std::string* path);
  virtual int Look(const std::string& path);  // 0 if the name exists
  virtual int64_t Identity(int file);         // a number that no other file of its file system has
  virtual int64_t IdentityOf(const std::string& path);
  virtual int MakeDirectory(const std::string& path);
  virtual int List(const std::string& path, std::vector<std::string>* names);
  virtual int ListOpen(int directory, std::vector<std::string>* names);
  virtual int RenameNoReplace(const std::string& from, const std::string& to);
  virtual int Rename(const std::string& from, const std::string& to);
  virtual int Remove(const std::string& path);
  virtual int RemoveIn(int directory, const std::string& name);
  virtual int RemoveDirectory(const std::string& path);
};

// The calls of the operating system.
Files& SystemFiles();

// The text of an errno.
std::string ErrorText(int error);

// Random bits, for names that no other process chooses.
uint64_t RandomBits();

}  // namespace hybridopt::system
