// Paths of checkpoints, as callers give them.
#pragma once

#include <string>

#include "base/files.h"
#include "base/status.h"

namespace hybridopt::checkpoint {

// The directory that contains a path, and the path's last part.
std::string ParentOf(const std::string& path);
std::string NameOf(const std::string& path);
std::string WithoutSlashes(std::string path);  // removes slashes at its end

// 0 if the path is a directory in which names can be looked up; else -errno, also for a file, or
// for a symbolic link to nothing.
int LookIn(system::Files& files, const std::string& directory);

// Makes the path absolute, so that a later change of the working directory has no effect. Errors
// are INVALID_ARGUMENT and call the path options.path; the same goes for CheckSource.
Result<std::string> AbsolutePath(system::Files& files, const std::string& path);

// Whether a checkpoint can exist at this path: a name that is too long for the file system is
// refused before the load is queued.
Status CheckSource(system::Files& files, const std::string& path);

}  // namespace hybridopt::checkpoint
