// The path of a file that a command will make.
#pragma once

#include <string>

#include "base/status.h"

namespace tool {

// Refuses a path where no file can be made, so that a command says so before it works. `word` is
// the path's name on the command line. `instead` is what to do if something is there.
hybridopt::Status CheckNewFile(const char* word, const std::string& path, const char* instead);

}  // namespace tool
