// Paths of checkpoints, as callers give them.
#pragma once

#include <string>

#include "base/files.h"
#include "base/status.h"

namespace hybridopt::checkpoint {

// The directory a path lies in, and its last part.
std::string ParentOf(const std::string& path);
std::string NameOf(const std::string& path);
std::string WithoutSlashes(std::string path);  // at its end

// 0 if the path leads to a directory in which names can be looked up; or -errno: a file, or a
// symbolic link that leads nowhere, has a name too.
int LookIn(prim::Files& files, const std::string& directory);

// What a path means now, whatever the working directory is when it is used. Errors are
// INVALID_ARGUMENT and call it options.path, as below.
Result<std::string> AbsolutePath(prim::Files& files, const std::string& path);

// Whether a checkpoint could be there at all: what has too long a name for the file system is not
// worth queueing for.
Status CheckSource(prim::Files& files, const std::string& path);

}  // namespace hybridopt::checkpoint
