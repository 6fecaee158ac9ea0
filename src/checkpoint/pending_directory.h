// PendingDirectory: the directory of a checkpoint that is being saved. It is beside its target,
// with the name ".<name>.saving-<16 hex digits>". The process that makes it locks it. A lock ends
// with its process, so other processes can distinguish the directory of a crashed save from one
// that is being written.
//
// The lock is that of flock(), on the directory. On a local disk every process sees it. A network
// file system may show it only to the processes of one machine, or refuse it. If it is refused the
// save continues without it, and removes no directory of a crashed save, because it cannot
// recognize one. If the lock does not reach another machine, a save to the same path there may take
// this directory for that of a crashed save: it renames the directory before it removes files, and
// the save that was writing it fails. In all cases a checkpoint that gets its name is whole.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/files.h"
#include "base/status.h"

namespace hybridopt::checkpoint {

class PendingDirectory {
 public:
  // INVALID_ARGUMENT if no directory can be made at `target`, or if it exists.
  static Status CheckTarget(system::Files& files, const std::string& target);

  // Removes the directories of crashed saves to this target, then makes a new one.
  static Result<PendingDirectory> Make(system::Files& files, const std::string& target);
  // Returns the directory that another rank has made with this number in its name.
  static PendingDirectory Join(system::Files& files, const std::string& target, uint64_t number);

  ~PendingDirectory();  // releases the lock
  PendingDirectory(PendingDirectory&& other) noexcept { *this = std::move(other); }
  PendingDirectory& operator=(PendingDirectory&& other) noexcept;

  const std::string& path() const { return path_; }
  uint64_t number() const { return number_; }

  // Gives the directory its name, durably; its files must have been synced. After a failure it is
  // still pending.
  Status Publish();
  // Removes the directory and all files of a save in it, as far as the system allows. Only the rank
  // that made the directory calls this.
  void Remove();

 private:
  PendingDirectory(system::Files& files, const std::string& target, uint64_t number);
  Status Occupy();

  system::Files* files_ = nullptr;
  std::string target_;
  std::string path_;
  uint64_t number_ = 0;
  int lock_ = -1;
};

}  // namespace hybridopt::checkpoint
