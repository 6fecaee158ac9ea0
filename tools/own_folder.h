// OwnFolder: a folder of files that nobody can use if the command does not end. A signal that ends
// the process, such as that of Ctrl-C, removes the folder first.
#pragma once

#include <string>

#include "base/system.h"

namespace tool {

// One at a time in a process. The folder itself is the caller's to make, and to remove or to
// rename.
class OwnFolder {
 public:
  explicit OwnFolder(const std::string& path);
  ~OwnFolder();
  OwnFolder(const OwnFolder&) = delete;
  OwnFolder& operator=(const OwnFolder&) = delete;

 private:
  void WaitForSignal();

  const std::string path_;
  int pipe_[2] = {-1, -1};
  hybridopt::system::Thread thread_;
};

}  // namespace tool
