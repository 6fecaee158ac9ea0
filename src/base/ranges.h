// Ranges in the timelines of NVIDIA's profilers: they show what a thread of the library does, in
// the domain "hybridopt". Without a profiler, and in builds without HYBRIDOPT_NVTX, a range does
// nothing.
#pragma once

#include <cstdint>

namespace hybridopt {

// A range lasts from its constructor to the end of the scope. Ranges of one thread nest.
class Range {
 public:
  explicit Range(const char* name);
  Range(const char* name, uint64_t number);  // "update 3"
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace hybridopt
