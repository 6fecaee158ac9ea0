// Ranges in the pictures of NVIDIA's profilers: what a thread of ours is at, by lane and chunk, in
// the domain "hybridopt". Without a profiler, and in builds without HYBRIDOPT_NVTX, one is nothing.
#pragma once

#include <cstdint>

namespace hybridopt {

// From here to the end of the scope; ranges of one thread nest.
class Range {
 public:
  explicit Range(const char* name);
  Range(const char* name, uint64_t number);  // "update 3"
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace hybridopt
