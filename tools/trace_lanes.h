// Lanes: what the rows of a trace (docs/TRACE.md) did with their time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "commands.h"

namespace tool {

// A row of the picture. Bars may lie in each other, so these are times that bars cover.
struct Lane {
  std::string name;
  uint64_t place = 0;  // in the picture, from the top
  uint64_t bars = 0;
  uint64_t bytes = 0;  // copied
  double busy_us = 0;  // covered by a bar, and by none that waits
  double wait_us = 0;  // covered by a bar that waits
};

struct Wait {
  std::string lane;
  std::string name;
  uint64_t step = 0;
  double begin_us = 0;  // since the first bar began
  double us = 0;
};

struct Lanes {
  std::string device;
  double us = 0;  // from the beginning of the first bar to the end of the last one
  uint64_t steps = 0;
  uint64_t dropped = 0;  // events that the trace had no room for
  double clock_error_us = 0;
  std::vector<Lane> lanes;  // from the top of the picture
  std::vector<Wait> waits;  // the longest ones first
};

// INVALID_ARGUMENT if the file is no trace that this library has written.
Result<Lanes> ReadLanes(const std::string& path);

}  // namespace tool
