#include "save/optimizer_manifest.h"

#include <cstdio>

#include "base/check.h"

namespace hybridopt {

checkpoint::Manifest NewManifest(int32_t algorithm, uint64_t step, uint32_t world,
                                 bool masters_only, std::span<const offload_group_t> groups) {
  checkpoint::Manifest manifest{};
  manifest.writer = "hybridopt " HYBRIDOPT_VERSION;
  manifest.step = step;
  manifest.algorithm = algorithm;
  manifest.masters_only = masters_only;
  manifest.layout = "fp32";
  manifest.world = world;
  manifest.block_bytes = checkpoint::kBlockBytes;
  manifest.groups.assign(groups.begin(), groups.end());
  for (offload_group_t& group : manifest.groups) {
    if (group.algorithm == algorithm)
      group.algorithm = 0;
    else
      manifest.version = checkpoint::kVersionOfGroupAlgorithms;
  }
  return manifest;
}

std::string PartFileName(uint32_t rank, uint32_t world) {
  char name[64];
  std::snprintf(name, sizeof(name), "part-%05u-of-%05u.json", rank, world);
  return name;
}

StateSlot SlotOf(int32_t algorithm, int32_t kind) {
  uint32_t slot = 0;
  while (slot < kStateSlots && StateKindOf(algorithm, StateSlot{slot}) != kind) ++slot;
  HYBRIDOPT_CHECK(slot < kStateSlots);
  return StateSlot{slot};
}

std::vector<int64_t> ShapeOf(const Shard& shard) {
  return {shard.global_shape.begin(), shard.global_shape.begin() + shard.dimensions};
}

}  // namespace hybridopt
