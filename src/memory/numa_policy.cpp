#include "memory/numa_policy.h"

#include <algorithm>
#include <iterator>

#include "base/system.h"

namespace hybridopt {
namespace {

using Nodes = std::vector<uint32_t>;

Nodes Common(const Nodes& some, const Nodes& others) {
  Nodes common;
  std::set_intersection(some.begin(), some.end(), others.begin(), others.end(),
                        std::back_inserter(common));
  return common;
}

PageWish WishFor(const Numa& numa, PagePolicy policy, const Nodes& nodes) {
  PageWish wish;
  wish.numa = &numa;
  wish.policy = policy;
  if (policy == PagePolicy::kToucher) return wish;
  wish.nodes = nodes;
  for (const uint32_t node : nodes) wish.shares.push_back({node, 1});
  return wish;
}

// Tries the policy out on one page.
Status Try(const PageWish& wish) {
  HYBRIDOPT_ASSIGN(void* const page, system::MapPages(1));
  const Status status = wish.numa->SetPolicy(page, 1, *wish.policy, wish.nodes);
  system::UnmapPages(page, 1);
  return status;
}

Status Interleave(const NumaPolicyAsked& asked, const Numa& numa, NumaPolicy* chosen) {
  const Nodes nodes = Common(asked.interleaved, numa.MemoryNodes());
  if (nodes.size() < 2)
    return Status::Error(
        OFFLOAD_UNSUPPORTED,
        "that takes the memory of two nodes or more, and this process may use that "
        "of %zu (numa_nodes counted)",
        nodes.size());
  const PageWish wish = WishFor(numa, PagePolicy::kInterleaved, nodes);
  HYBRIDOPT_TRY(Try(wish));
  chosen->state = chosen->pinned = wish;
  chosen->policy = OFFLOAD_NUMA_INTERLEAVED;
  return {};
}

// The policy for threads on several nodes. A page of state prefers the node of the thread that
// touches it first, which is the worker that will update it. The thread that pins memory touches it
// first, but all workers use it, so pinned memory is interleaved.
Status PlaceNear(const NumaPolicyAsked& asked, const Numa& numa, NumaPolicy* chosen) {
  Nodes nodes;
  for (const PageWish::Share& share : asked.threads) nodes.push_back(share.node);
  nodes = Common(nodes, numa.MemoryNodes());
  if (nodes.empty())
    return Status::Error(
        OFFLOAD_UNSUPPORTED,
        "the nodes of the update threads have no memory that this process may use");
  const bool one = nodes.size() == 1;
  const PageWish wish = WishFor(numa, one ? PagePolicy::kNode : PagePolicy::kInterleaved, nodes);
  HYBRIDOPT_TRY(Try(wish));
  chosen->state = chosen->pinned = wish;
  if (one) return {};
  chosen->state = WishFor(numa, PagePolicy::kToucher, {});
  for (PageWish::Share share : asked.threads) {
    if (!std::binary_search(nodes.begin(), nodes.end(), share.node)) share.node = kNodeNotKnown;
    chosen->state.shares.push_back(share);
  }
  return {};
}

}  // namespace

NumaPolicy ChooseNumaPolicy(const NumaPolicyAsked& asked, const Result<Numa>& numa) {
  NumaPolicy chosen;
  chosen.policy = OFFLOAD_NUMA_NEAR;
  if (numa.ok()) chosen.state.numa = chosen.pinned.numa = &numa.value();
  if (asked.policy == OFFLOAD_NUMA_INTERLEAVED) {
    const Status status = numa.ok() ? Interleave(asked, numa.value(), &chosen) : numa.status();
    if (status.ok()) return chosen;
    chosen.note += "memory is not interleaved: " + status.message() + "; ";
  }
  const Status status = numa.ok() ? PlaceNear(asked, numa.value(), &chosen) : numa.status();
  if (!status.ok()) chosen.note += "memory is not placed: " + status.message() + "; ";
  // If threads of several nodes share each chunk, each updates pieces of about 100 KiB at a time: a
  // page of 2 MiB would serve threads of several nodes.
  chosen.state.huge_pages = asked.threads.size() == 1 || !asked.shares_chunks;
  return chosen;
}

}  // namespace hybridopt
