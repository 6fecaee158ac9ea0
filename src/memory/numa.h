// Numa: sets and reads, through libnuma, which memory nodes hold the pages of a range. Not every
// system has libnuma, so it is opened at run time. Without it a context works too; its pages are on
// the nodes of the threads that touch them first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/status.h"

namespace hybridopt {

// Which nodes the pages of a range prefer. No policy binds so tightly that a full node would refuse
// a page.
enum class PagePolicy {
  kNode,         // the one node of a list
  kToucher,      // the node of the thread that touches a page first
  kInterleaved,  // the nodes of a list in turn, page by page
};

class Numa {
 public:
  // Opens libnuma, which is never closed again. UNSUPPORTED: the text says what is missing.
  static Result<Numa> Open(const char* file = "libnuma.so.1");

  // The nodes whose memory this process may use, ascending.
  std::vector<uint32_t> MemoryNodes() const;

  // Sets the policy of pages that system::MapPages gave and that no thread has touched. It
  // replaces, in this range, a policy that the process inherited (numactl). `nodes` is empty for
  // kToucher. UNSUPPORTED if the system refuses, as it often does in containers without
  // CAP_SYS_NICE.
  Status SetPolicy(void* data, uint64_t bytes, PagePolicy policy,
                   const std::vector<uint32_t>& nodes) const;

  // Writes the node of each page, given by any address in it; negative if a page has no memory yet
  // or the kernel does not say. UNSUPPORTED if the system refuses.
  Status NodesOfPages(std::span<void*> pages, std::span<int> nodes) const;

 private:
  Numa() = default;

  // libnuma's functions, under its names. Those that make its own masks are not among them: they
  // end the process if there is no memory.
  int (*numa_available_)();
  long long (*numa_node_size64_)(int, long long*);
  int (*numa_move_pages_)(int, unsigned long, void**, const int*, int*, int);
  long (*get_mempolicy_)(int*, unsigned long*, unsigned long, void*, unsigned);
  long (*mbind_)(void*, unsigned long, int, const unsigned long*, unsigned long, unsigned);
};

}  // namespace hybridopt
