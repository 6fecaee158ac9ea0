// Ranges in the timelines of NVIDIA's profilers: they show what a thread of the library does, in
// the domain "hybridopt". Without a profiler, and in builds without HYBRIDOPT_NVTX, a range does
// nothing.
#pragma once

#include <cstdint>

namespace hybridopt {

// A range lasts from its constructor to the end of the scope. Ranges of one thread nest.
class ProfilerRange {
 public:
  explicit ProfilerRange(const char* name);
  ProfilerRange(const char* name, uint64_t number);  // "update 3"
  ~ProfilerRange();
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;
};

}  // namespace hybridopt
