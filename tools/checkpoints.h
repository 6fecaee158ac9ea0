// Checkpoints as people name them: one, or a directory that holds several.
#pragma once

#include <string>

#include "base/status.h"
#include "checkpoint/reader.h"

namespace tool {

// Opens a checkpoint. For a directory that holds checkpoints instead of being one, the text of the
// failure names the newest of them.
hybridopt::Result<hybridopt::checkpoint::Reader> OpenCheckpoint(const std::string& directory);

}  // namespace tool
