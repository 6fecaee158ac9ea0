// The file of a trace: JSON in the format of Chrome's traces, which ui.perfetto.dev opens. The page
// docs/TRACE.md says what its rows and fields mean.
#pragma once

#include <string>

#include "base/files.h"
#include "base/status.h"
#include "machine/trace/trace.h"

namespace hybridopt {

// Replaces the file at `path`, or leaves what is there as it was: IO_FAILED. `device` is the name
// of the device.
Status WriteTrace(system::Files& files, const std::string& path, const TraceRecord& record,
                  const char* device);

}  // namespace hybridopt
