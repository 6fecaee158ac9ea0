// Topology: on which NUMA nodes and CPUs the update threads of this process run. Functions of
// base/system.h read what the system says; the choices are pure.
//
// The CPUs this process may use, listed node by node, are cut into one part per rank of this host;
// a rank's part is cut into one piece per thread, which says on what node that thread runs. Ranks
// and threads with neighbouring numbers get neighbouring CPUs, so that a thread uses the memory of
// its own node and no two ranks run on one CPU:
//
//   CPUs     | node 0: 0 1 2 3 4 5 6 7 | node 1: 8 9 10 11 12 13 14 15 |
//   ranks    |    0     |      1       |       2       |       3       |
//   threads  | 0 1 2 3  |  0  1  2  3  |  0   1   2  3 |  0   1   2  3 |
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"
#include "base/system.h"

namespace hybridopt {

using Nodes = std::vector<system::NumaNode>;

// The nodes that have CPUs of `allowed_cpus`, with those CPUs alone. Nodes without CPUs (memory of
// an accelerator, as on Grace machines) are left out. Never empty: if the system does not say,
// there is one node.
Nodes NodesOf(const std::vector<uint32_t>& allowed_cpus, const std::string& root = "");

uint32_t CpuCount(const Nodes& nodes);

// Those of `nodes` that are nearest to a PCI device: the device's own node; if that has no CPUs
// here, the nearest ones by distance; if it is not known, the nodes of the CPUs that the device
// calls local. Empty if there is no such device, or if it does not say.
Nodes NodesNear(const Nodes& nodes, const std::string& pci_id, const std::string& root = "");

// One rank's part of the CPUs. With more ranks than CPUs each rank has one CPU, and the CPUs are
// shared as evenly as possible.
Nodes PartOfRank(const Nodes& nodes, uint32_t rank, uint32_t world);

// The node that thread `index` of `threads` belongs to; the thread runs on the node's CPUs.
const system::NumaNode& NodeOfThread(const Nodes& nodes, uint32_t index, uint32_t threads);

// The wishes of a context, as in offload_context_options.
struct SeatRequest {
  uint64_t numa_nodes = 0;
  uint32_t local_rank = 0;
  uint32_t local_world = 0;
  std::string pci_id = {};
};

struct Seats {
  Nodes nodes;  // with the CPUs of this rank's part
  // The nodes whose memory may be interleaved, ascending: those that numa_nodes names, else all
  // that have CPUs, also CPUs that this process may not use. (The memory of an accelerator is a
  // node without CPUs.)
  std::vector<uint32_t> interleaved;
  uint32_t local_rank = 0;
  uint32_t local_world = 1;
  uint32_t cpus_allowed = 0;   // by the affinity mask
  uint32_t nodes_allowed = 0;  // nodes with a CPU of that mask
  uint32_t cpu_limit = 0;      // this rank's part of the cgroup's grant; 0 = no limit
  std::string note;            // what could be better; "" if nothing
};

// Errors: INVALID_ARGUMENT (options.numa_nodes, options.local_*, or the environment's ranks).
Result<Seats> ChooseSeats(const SeatRequest& request,
                          const std::vector<uint32_t>& allowed_cpus = system::AllowedCpus(),
                          const std::string& root = "");

}  // namespace hybridopt
