#include "new_file.h"

#include <cerrno>

#include "base/files.h"
#include "checkpoint/paths.h"

namespace tool {

using hybridopt::Status;
using hybridopt::system::SystemFiles;

Status CheckNewFile(const char* word, const std::string& path, const char* instead) {
  if (path.back() == '/')
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "%s is '%.500s', expected the name of a file to make", word, path.c_str());
  if (SystemFiles().Look(path) == 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "%s '%.500s' exists; %s", word, path.c_str(),
                         instead);
  const std::string folder = hybridopt::checkpoint::ParentOf(path);
  const int error = hybridopt::checkpoint::LookIn(SystemFiles(), folder);
  if (error == 0) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "%s '%.500s': its folder '%.500s' cannot be used: %s; %s", word,
                       path.c_str(), folder.c_str(), hybridopt::system::ErrorText(-error).c_str(),
                       error == -ENOENT ? "make it first" : "choose another one");
}

}  // namespace tool
