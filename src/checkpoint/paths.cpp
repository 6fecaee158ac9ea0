#include "checkpoint/paths.h"

#include <cerrno>

#include "checkpoint/file_io.h"
#include "checkpoint/format/format.h"

namespace hybridopt::checkpoint {

std::string WithoutSlashes(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

std::string ParentOf(const std::string& path) {
  const std::string plain = WithoutSlashes(path);
  const size_t slash = plain.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : WithoutSlashes(plain.substr(0, slash));
}

std::string NameOf(const std::string& path) {
  const std::string plain = WithoutSlashes(path);
  return plain.substr(plain.rfind('/') + 1);  // if there is no slash, npos + 1 is 0
}

int LookIn(system::Files& files, const std::string& directory) {
  const std::string itself = directory + "/.";
  return Uninterrupted([&] { return files.Look(itself); });
}

Result<std::string> AbsolutePath(system::Files& files, const std::string& path) {
  if (path.starts_with('/')) return path;
  std::string directory;
  const int error = Uninterrupted([&] { return files.WorkingDirectory(&directory); });
  if (error == 0) return (directory == "/" ? "" : directory) + "/" + path;
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "options.path '%.500s' is relative, but the working directory cannot be "
                       "told: %s; give a path that begins with '/'",
                       path.c_str(), system::ErrorText(-error).c_str());
}

Status CheckSource(system::Files& files, const std::string& path) {
  const std::string manifest = path + "/" + kManifestFile;
  if (Uninterrupted([&] { return files.Look(manifest); }) != -ENAMETOOLONG) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "options.path '%.200s' has %zu bytes, %zu of them its name: more than the "
                       "file system takes, so no checkpoint can be there",
                       path.c_str(), path.size(), NameOf(path).size());
}

}  // namespace hybridopt::checkpoint
