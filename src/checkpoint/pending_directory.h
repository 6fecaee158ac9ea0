// PendingDirectory: where a checkpoint grows before it has its name. It lies beside its target as
// ".<name>.saving-<16 hex digits>" and is locked by the process that makes it, so that what a crash
// left can be told from what another process is writing: a lock ends with its process.
//
// The lock is flock()'s, on the directory. On a local disk every process sees it. File systems of a
// network may tell it to the processes of one machine only, or refuse it. Where it is refused the
// save goes on without, and nothing that others have left is removed, because nobody can tell.
// Where it does not reach another machine, a save to the same path there may take this directory
// for left: it takes its name away before it removes anything, and the save whose directory it was
// fails. What gets its name is whole, whatever locks do.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/files.h"
#include "base/status.h"

namespace hybridopt::checkpoint {

class PendingDirectory {
 public:
  // INVALID_ARGUMENT if `target` cannot be the name of a directory that is to be made, or is there.
  static Status CheckTarget(prim::Files& files, const std::string& target);

  // Removes what crashes have left of earlier saves to this target, then makes a fresh one.
  static Result<PendingDirectory> Make(prim::Files& files, const std::string& target);
  // The one that another rank has made under this number.
  static PendingDirectory Join(prim::Files& files, const std::string& target, uint64_t number);

  ~PendingDirectory();  // gives up the lock
  PendingDirectory(PendingDirectory&& other) noexcept { *this = std::move(other); }
  PendingDirectory& operator=(PendingDirectory&& other) noexcept;

  const std::string& path() const { return path_; }
  uint64_t number() const { return number_; }

  // Gives it its name, for good: what is in it has been synced. After a failure it is as before.
  Status Publish();
  // With all files of a save in it; as far as the system lets us. Only by who has made it.
  void Remove();

 private:
  PendingDirectory(prim::Files& files, const std::string& target, uint64_t number);
  Status Occupy();

  prim::Files* files_ = nullptr;
  std::string target_;
  std::string path_;
  uint64_t number_ = 0;
  int lock_ = -1;
};

}  // namespace hybridopt::checkpoint
