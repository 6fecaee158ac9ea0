// Finds the checkpoint that a command line names: a checkpoint, or a directory that holds several.
#pragma once

#include <string>

#include "base/status.h"
#include "checkpoint/reader.h"

namespace tool {

// Opens a checkpoint. If the directory is not a checkpoint but holds some, the error text names the
// newest of them.
hybridopt::Result<hybridopt::checkpoint::Reader> OpenCheckpoint(const std::string& directory);

}  // namespace tool
