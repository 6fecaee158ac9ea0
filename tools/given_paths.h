// Paths that the command line gives. A command checks them before it works. `word` is the path's
// name there. Errors are INVALID_ARGUMENT, as of every other wrong word.
#pragma once

#include <string>

#include "base/status.h"

namespace tool {

// Refuses what is not a directory, or is not there.
hybridopt::Status CheckDirectory(const char* word, const std::string& path);

// Refuses what is not there, and a directory.
hybridopt::Status CheckFile(const char* word, const std::string& path);

// Refuses a path where no file can be made. `instead` is what to do if something is there.
hybridopt::Status CheckNewFile(const char* word, const std::string& path, const char* instead);

}  // namespace tool
