#include "memory/numa.h"

#include <dlfcn.h>
#include <linux/mempolicy.h>

#include <array>
#include <cerrno>

#include "base/check.h"
#include "base/files.h"

namespace hybridopt {

namespace {

constexpr unsigned long kMaxNodes = 1024;  // no kernel has more
constexpr unsigned long kWordBits = 8 * sizeof(unsigned long);
using Mask = std::array<unsigned long, kMaxNodes / kWordBits>;  // a bit for each node
// The kernel reads and writes one bit less than the given size.
constexpr unsigned long kMaskSize = kMaxNodes + 1;

template <typename Function>
Status Take(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function != nullptr) return {};
  return Status::Error(OFFLOAD_UNSUPPORTED,
                       "libnuma has no %s; install libnuma 2.0 or newer (Debian: libnuma1)", name);
}

Status Refused(const char* call, int error) {
  return Status::Error(OFFLOAD_UNSUPPORTED, "%s was refused (%s)", call,
                       system::ErrorText(error).c_str());
}

}  // namespace

Result<Numa> Numa::Open(const char* file) {
  void* const library = dlopen(file, RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const text = dlerror();
    return Status::Error(OFFLOAD_UNSUPPORTED,
                         "libnuma cannot be opened (%s); install it (Debian: libnuma1)",
                         text != nullptr ? text : file);
  }
  Numa numa;
  HYBRIDOPT_TRY(Take(library, "numa_available", &numa.numa_available_));
  HYBRIDOPT_TRY(Take(library, "numa_node_size64", &numa.numa_node_size64_));
  HYBRIDOPT_TRY(Take(library, "numa_move_pages", &numa.numa_move_pages_));
  HYBRIDOPT_TRY(Take(library, "get_mempolicy", &numa.get_mempolicy_));
  HYBRIDOPT_TRY(Take(library, "mbind", &numa.mbind_));
  errno = 0;
  if (numa.numa_available_() < 0)
    return Status::Error(
        OFFLOAD_UNSUPPORTED,
        "libnuma finds no NUMA policy in this system (%s): the kernel has none, or "
        "a container without CAP_SYS_NICE hides it",
        system::ErrorText(errno).c_str());
  return numa;
}

std::vector<uint32_t> Numa::MemoryNodes() const {
  Mask allowed = {};
  std::vector<uint32_t> nodes;
  if (get_mempolicy_(nullptr, allowed.data(), kMaskSize, nullptr, MPOL_F_MEMS_ALLOWED) != 0)
    return nodes;
  for (uint32_t node = 0; node < kMaxNodes; ++node)
    if ((allowed[node / kWordBits] >> node % kWordBits & 1) != 0 &&
        numa_node_size64_(static_cast<int>(node), nullptr) > 0)
      nodes.push_back(node);
  return nodes;
}

// Uses libnuma's mbind. Its functions for single policies obey process-wide switches that make a
// policy strict, and write to stderr.
Status Numa::SetPolicy(void* data, uint64_t bytes, PagePolicy policy,
                       const std::vector<uint32_t>& nodes) const {
  Mask mask = {};
  if (policy == PagePolicy::kToucher) {
    // The policy "preferred" without nodes means the node of the toucher.
    HYBRIDOPT_CHECK(nodes.empty());
  } else {
    HYBRIDOPT_CHECK(!nodes.empty() && (policy == PagePolicy::kInterleaved || nodes.size() == 1));
    for (const uint32_t node : nodes) {
      HYBRIDOPT_CHECK(node < kMaxNodes);
      mask[node / kWordBits] |= 1ul << node % kWordBits;
    }
  }
  const int mode = policy == PagePolicy::kInterleaved ? MPOL_INTERLEAVE : MPOL_PREFERRED;
  if (mbind_(data, bytes, mode, mask.data(), kMaskSize, 0) == 0) return {};
  return Refused("mbind", errno);
}

Status Numa::NodesOfPages(std::span<void*> pages, std::span<int> nodes) const {
  HYBRIDOPT_CHECK(pages.size() == nodes.size());
  const int own_process = 0;
  if (numa_move_pages_(own_process, pages.size(), pages.data(), nullptr, nodes.data(), 0) == 0)
    return {};
  return Refused("move_pages", errno);
}

}  // namespace hybridopt
