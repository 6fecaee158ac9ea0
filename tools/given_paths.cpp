#include "given_paths.h"

#include <cerrno>

#include "base/files.h"
#include "checkpoint/paths.h"

namespace tool {

using hybridopt::Status;
using hybridopt::checkpoint::LookIn;
using hybridopt::system::ErrorText;
using hybridopt::system::SystemFiles;

Status CheckDirectory(const char* word, const std::string& path) {
  const int error = LookIn(SystemFiles(), path);
  if (error == 0) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "%s '%.500s' cannot be used: %s; name a directory that is there", word,
                       path.c_str(), ErrorText(-error).c_str());
}

Status CheckFile(const char* word, const std::string& path) {
  const bool is_directory = LookIn(SystemFiles(), path) == 0;
  const int error = is_directory ? -EISDIR : SystemFiles().Look(path);
  if (error == 0) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "%s '%.500s' cannot be used: %s; name a file that is there", word,
                       path.c_str(), ErrorText(-error).c_str());
}

Status CheckNewFile(const char* word, const std::string& path, const char* instead) {
  if (path.back() == '/')
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "%s is '%.500s', expected the name of a file to make", word, path.c_str());
  if (SystemFiles().Look(path) == 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "%s '%.500s' exists; %s", word, path.c_str(),
                         instead);
  const std::string folder = hybridopt::checkpoint::ParentOf(path);
  const int error = LookIn(SystemFiles(), folder);
  if (error == 0) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "%s '%.500s': its folder '%.500s' cannot be used: %s; %s", word,
                       path.c_str(), folder.c_str(), ErrorText(-error).c_str(),
                       error == -ENOENT ? "make it first" : "choose another one");
}

}  // namespace tool
