// NumaPolicy: on which nodes a context's host memory should be. ChooseNumaPolicy compares, once,
// the policy that was asked for with what the system allows; if it must fall back to another
// policy, the note says so.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "memory/arena.h"
#include "memory/numa.h"

namespace hybridopt {

struct NumaPolicyAsked {
  int32_t policy;                        // enum offload_numa_policy
  std::vector<PageWish::Share> threads;  // the nodes of the update threads, ascending, with
                                         // the number of threads on each
  std::vector<uint32_t> interleaved;     // nodes for OFFLOAD_NUMA_INTERLEAVED, ascending
  bool shares_chunks = false;            // threads of all nodes work on each chunk
};

struct NumaPolicy {
  PageWish state;   // for memory that the workers touch first
  PageWish pinned;  // for memory that the thread that pins it touches first
  int32_t policy;   // the policy in force: enum offload_numa_policy
  // What differs from what was asked for, and why, each ended by "; "; "" if nothing.
  std::string note;
  bool placed() const { return pinned.policy.has_value(); }
};

// `numa` outlives the result.
NumaPolicy ChooseNumaPolicy(const NumaPolicyAsked& asked, const Result<Numa>& numa);

}  // namespace hybridopt
