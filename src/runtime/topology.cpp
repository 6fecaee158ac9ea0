#include "runtime/topology.h"

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "base/check.h"

namespace hybridopt {
namespace {

constexpr uint32_t kMaskBits = 64;
constexpr uint32_t kLocalWorldMax = 1 << 16;

bool Contains(const std::vector<uint32_t>& sorted, uint32_t value) {
  return std::binary_search(sorted.begin(), sorted.end(), value);
}

std::string Ids(const Nodes& nodes) {
  std::string text;
  for (const system::NumaNode& node : nodes)
    text += (text.empty() ? "" : ", ") + std::to_string(node.id);
  return text;
}

// Cuts the CPUs [begin, end) out of the list of all nodes' CPUs.
Nodes Cut(const Nodes& nodes, uint64_t begin, uint64_t end) {
  Nodes part;
  uint64_t first = 0;
  for (const system::NumaNode& node : nodes) {
    const uint64_t last = first + node.cpus.size();
    const uint64_t from = std::clamp(begin, first, last), to = std::clamp(end, first, last);
    const auto at = [&](uint64_t cpu) {
      return node.cpus.begin() + static_cast<std::ptrdiff_t>(cpu - first);
    };
    if (from < to) part.push_back({node.id, {at(from), at(to)}});
    first = last;
  }
  return part;
}

// Returns the nodes of `nodes` that `wanted` has too.
Nodes Common(const Nodes& nodes, const Nodes& wanted) {
  Nodes common;
  for (const system::NumaNode& node : nodes)
    for (const system::NumaNode& other : wanted)
      if (node.id == other.id) common.push_back(node);
  return common;
}

Result<Nodes> NodesAsked(const Nodes& nodes, uint64_t mask) {
  if (mask == 0) return nodes;
  Nodes asked;
  for (const system::NumaNode& node : nodes)
    if (node.id < kMaskBits && (mask >> node.id & 1) != 0) {
      asked.push_back(node);
      mask &= ~(uint64_t{1} << node.id);
    }
  if (mask == 0) return asked;
  return Status::Error(
      OFFLOAD_INVALID_ARGUMENT,
      "options.numa_nodes names node %d, but the nodes with CPUs that this process "
      "may use are %s; name those alone, or 0 to have them chosen",
      __builtin_ctzll(mask), Ids(nodes).c_str());
}

struct LocalRank {
  uint32_t rank;
  uint32_t world;
};

// False if the variable is set to something that is not a number.
bool ReadEnvironment(const char* name, const char** text, uint32_t* value) {
  *text = std::getenv(name);
  if (*text == nullptr) return true;
  const char* end = *text + std::strlen(*text);
  const std::from_chars_result result = std::from_chars(*text, end, *value);
  return result.ec == std::errc() && result.ptr == end;
}

// Launchers such as torchrun set both variables or none; a single one is not enough.
Result<LocalRank> RankFromEnvironment() {
  const char *rank_text = nullptr, *world_text = nullptr;
  LocalRank local{0, 0};
  const bool numbers = ReadEnvironment("LOCAL_RANK", &rank_text, &local.rank) &
                       ReadEnvironment("LOCAL_WORLD_SIZE", &world_text, &local.world);
  if (rank_text == nullptr || world_text == nullptr) return LocalRank{0, 1};
  if (!numbers || local.rank >= local.world || local.world > kLocalWorldMax)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "the environment has LOCAL_RANK \"%.32s\" and LOCAL_WORLD_SIZE \"%.32s\", "
                         "expected numbers, 0 <= LOCAL_RANK < LOCAL_WORLD_SIZE <= %u; correct or "
                         "unset them, or set options.local_rank and options.local_world",
                         rank_text, world_text, kLocalWorldMax);
  return local;
}

Result<LocalRank> ChooseLocalRank(const SeatRequest& request) {
  const LocalRank asked{request.local_rank, request.local_world};
  if (asked.rank == 0 && asked.world == 0) return RankFromEnvironment();
  if (asked.rank < asked.world && asked.world <= kLocalWorldMax) return asked;
  return Status::Error(
      OFFLOAD_INVALID_ARGUMENT,
      "options.local_rank is %u and options.local_world is %u, expected local_rank "
      "< local_world <= %u (both 0 = as the environment says)",
      asked.rank, asked.world, kLocalWorldMax);
}

}  // namespace

Nodes NodesOf(const std::vector<uint32_t>& allowed_cpus, const std::string& root) {
  Nodes nodes;
  for (system::NumaNode& node : system::NumaNodes(root)) {
    std::erase_if(node.cpus, [&](uint32_t cpu) { return !Contains(allowed_cpus, cpu); });
    if (!node.cpus.empty()) nodes.push_back(std::move(node));
  }
  if (nodes.empty()) nodes.push_back({0, allowed_cpus});
  return nodes;
}

uint32_t CpuCount(const Nodes& nodes) {
  size_t count = 0;
  for (const system::NumaNode& node : nodes) count += node.cpus.size();
  return static_cast<uint32_t>(count);
}

Nodes NodesNear(const Nodes& nodes, const std::string& pci_id, const std::string& root) {
  if (pci_id.empty()) return {};
  const system::PciPlace place = system::PlaceOfPciDevice(pci_id, root);
  Nodes near;
  uint32_t nearest = UINT32_MAX - 1;  // a distance that is not known is never the nearest
  for (const system::NumaNode& node : nodes) {
    if (place.node < 0) {
      if (std::any_of(node.cpus.begin(), node.cpus.end(),
                      [&](uint32_t cpu) { return Contains(place.cpus, cpu); }))
        near.push_back(node);
      continue;
    }
    const uint32_t to = static_cast<uint32_t>(place.node);
    const uint32_t distance = node.id == to ? 0 : system::NodeDistance(node.id, to, root);
    if (distance > nearest) continue;
    if (distance < nearest) near.clear();
    nearest = distance;
    near.push_back(node);
  }
  return near;
}

Nodes PartOfRank(const Nodes& nodes, uint32_t rank, uint32_t world) {
  HYBRIDOPT_CHECK(rank < world);
  const uint64_t count = CpuCount(nodes);
  const uint64_t begin = count * rank / world, end = count * (uint64_t{rank} + 1) / world;
  return Cut(nodes, begin, std::max(end, begin + 1));
}

const system::NumaNode& NodeOfThread(const Nodes& nodes, uint32_t index, uint32_t threads) {
  HYBRIDOPT_CHECK(index < threads && !nodes.empty());
  uint64_t at = uint64_t{CpuCount(nodes)} * index / threads;
  auto node = nodes.begin();
  for (; at >= node->cpus.size() && node + 1 != nodes.end(); ++node) at -= node->cpus.size();
  return *node;
}

Result<Seats> ChooseSeats(const SeatRequest& request, const std::vector<uint32_t>& allowed_cpus,
                          const std::string& root) {
  HYBRIDOPT_ASSIGN(const LocalRank local, ChooseLocalRank(request));
  const Nodes allowed = NodesOf(allowed_cpus, root);
  HYBRIDOPT_ASSIGN(const Nodes asked, NodesAsked(allowed, request.numa_nodes));
  Seats seats;
  seats.local_rank = local.rank;
  seats.local_world = local.world;
  seats.cpus_allowed = static_cast<uint32_t>(allowed_cpus.size());
  seats.nodes_allowed = static_cast<uint32_t>(allowed.size());
  const uint32_t limit = system::CgroupCpuLimit(root);
  if (limit != 0) seats.cpu_limit = std::max(limit / local.world, 1u);
  seats.nodes = PartOfRank(asked, local.rank, local.world);
  for (const system::NumaNode& node : request.numa_nodes != 0 ? asked : system::NumaNodes(root))
    if (!node.cpus.empty()) seats.interleaved.push_back(node.id);
  if (local.world > CpuCount(asked))
    seats.note =
        std::to_string(local.world) + " ranks share " + std::to_string(CpuCount(asked)) + " CPUs; ";
  if (request.numa_nodes != 0) return seats;
  // CPUs are divided among the ranks before the nodes near the device are chosen: a rank does not
  // know the devices of the others, and no CPU must be given to two ranks. If devices are numbered
  // like nodes, a rank's CPUs are near its device.
  const Nodes near = NodesNear(allowed, request.pci_id, root);
  const Nodes both = Common(seats.nodes, near);
  if (!both.empty())
    seats.nodes = both;
  else if (!near.empty())
    seats.note += "this rank's CPUs are on node " + Ids(seats.nodes) + ", its device on node " +
                  Ids(near) + ": set numa_nodes; ";
  return seats;
}

}  // namespace hybridopt
