// The file system's calls, as the system has them, behind an interface so that tests can fail,
// record and replay each. Part of prim: the one door to the operating system.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hybridopt::prim {

// Every call returns what the system returned, or -errno. Nothing is tried again here, not even
// after EINTR. Thread-safe.
class Files {
 public:
  virtual ~Files() = default;

  enum class Open {
    kRead,
    kReadDirect,    // around the page cache: addresses, offsets and sizes are multiples of 4096
    kCreate,        // a new file, for writing; one that exists is not opened
    kCreateDirect,  // likewise, around the page cache
    kDirectory,     // to be synced
    kOwnDirectory   // to be locked or emptied; not through a symbolic link
  };
  virtual int OpenFile(const std::string& path, Open how);
  virtual int Close(int file);
  virtual int64_t Size(int file);  // -ESPIPE if it is a pipe or a device
  virtual int64_t Read(int file, void* data, uint64_t bytes, uint64_t offset);
  virtual int64_t Write(int file, const void* data, uint64_t bytes, uint64_t offset);
  virtual int Allocate(int file, uint64_t bytes);  // room on disk, so that it cannot run out later
  virtual int Truncate(int file, uint64_t bytes);
  virtual int Sync(int file);
  virtual int UseCache(int file);  // ends direct access
  // An exclusive lock on what was opened with kOwnDirectory; -EWOULDBLOCK if another has it. It
  // ends with this process: a forked child has such files closed.
  virtual int Lock(int file);
  virtual int Unlock(int file);

  virtual int WorkingDirectory(std::string* path);
  virtual int Look(const std::string& path);  // 0 if something has that name
  virtual int64_t Identity(int file);         // tells this file from any other of its file system
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

// The system's own.
Files& SystemFiles();

// The text of an errno.
std::string ErrorText(int error);

// Random bits, for names that nobody else chooses.
uint64_t RandomBits();

}  // namespace hybridopt::prim
