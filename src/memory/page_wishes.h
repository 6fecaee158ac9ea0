// PageWishes: on which nodes a context's host memory should lie. What was asked for meets what the
// system allows here, once; a fall-back is told in words.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/numa.h"
#include "memory/arena.h"

namespace hybridopt {

struct PagesAsked {
  int32_t policy;                        // enum offload_numa_policy
  std::vector<PageWish::Share> threads;  // the nodes of the update threads, ascending, and
                                         // how many threads belong to each
  std::vector<uint32_t> interleaved;     // nodes for OFFLOAD_NUMA_INTERLEAVED, ascending
  bool shares_chunks = false;            // threads of all nodes work on each chunk
};

struct PageWishes {
  PageWish state;    // for what its workers touch first
  PageWish pinned;   // for what whoever pins it touches first
  int32_t policy;    // in force: enum offload_numa_policy
  std::string note;  // what is not as asked for, and why, each ended by "; "; "" if nothing
  bool placed() const { return pinned.policy.has_value(); }
};

// `numa` outlives the wishes.
PageWishes ChoosePages(const PagesAsked& asked, const Result<Numa>& numa);

}  // namespace hybridopt
