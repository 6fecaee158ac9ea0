#include "optimizer/plan.h"

#include <algorithm>

#include "base/system.h"
#include "memory/size_text.h"
#include "move/master_fill.h"
#include "move/mover.h"
#include "place/disk_memory.h"
#include "save/checkpoints.h"
#include "state_io/change_reader.h"
#include "step/step.h"

namespace hybridopt {

namespace {

// Sets the sizes of the device's ring. If CPU workers update chunks too, the ring never has more
// chunks than it has room for of the largest size: they would be taken away from the workers.
void SizeStreamRing(const StateShape& shape, const ChunkTable& chunks, LaneSizes& sizes) {
  if (!shape.options.streams_state || chunks.chunks.empty()) return;
  const uint64_t most = std::min<uint64_t>(kMaxStreamSlots, chunks.chunks.size());
  // SGD without momentum may keep no state; then a chunk has 0 bytes.
  const uint64_t chunk_bytes = std::max<uint64_t>(chunks.stream_bytes_most(), 1);
  const uint64_t asked_bytes = shape.options.stream_ring_bytes;
  const uint64_t asked = asked_bytes > 0 ? asked_bytes / chunk_bytes : DefaultStreamChunks(shape);
  const uint64_t large = std::min(asked, most);
  sizes.stream_ring_bytes = large * chunks.stream_bytes_most();
  const bool takes_more = !SharesChunks(shape) && large >= kMinStreamChunks;
  sizes.stream_slots = static_cast<uint32_t>(takes_more ? most : large);
}

}  // namespace

uint32_t DefaultStreamChunks(const StateShape& shape) {
  return SharesChunks(shape) ? kDefaultStreamChunks : kDefaultStreamChunksAlone;
}

LaneSizes LaneSizesOf(const StateShape& shape, const Residence& residence,
                      const ChunkTable& chunks) {
  LaneSizes sizes;
  sizes.norm_blocks = shape.norm_blocks;
  if (shape.options.unified) return sizes;
  sizes.change_words = ChangeLog::DeviceWords(shape);
  const uint32_t movable = shape.options.movable;
  sizes.staging_slots =
      static_cast<uint32_t>(std::min<uint64_t>(shape.options.staging_slots, chunks.chunks.size()));
  sizes.slot_grad_bytes = chunks.slot_grad_bytes;
  sizes.slot_param_bytes = chunks.slot_param_bytes;
  if ((movable & OFFLOAD_MOVABLE_ACCUMULATE) != 0) {
    // Gradients that are accumulated on the host are copied down through the ring, even if all
    // state is on the device.
    sizes.staging_slots = shape.options.staging_slots;
    sizes.slot_grad_bytes =
        std::max(sizes.slot_grad_bytes, shape.options.chunk_elements * sizeof(float));
  }
  sizes.matrix_bytes = shape.device_matrix_bytes;
  sizes.streams_state = shape.options.streams_state;
  SizeStreamRing(shape, chunks, sizes);
  if (HostMayHoldGrads(shape))
    sizes.device_grad_elements =
        std::min(std::max(shape.options.chunk_elements, shape.largest_unit),
                 residence.elements(Tier::kDevice));
  return sizes;
}

namespace {

// The bytes of a slot's region by kind: the groups' algorithms keep different moments in it. The
// arrays of a region follow one another, so that only the pages at pin cuts are left out.
void AddStateBytes(const ParamTable& table, const StateShape& shape, const Residence& residence,
                   Tier tier, StateSlot slot, offload_plan_t& plan) {
  const Residence::Bytes& held = residence.bytes(tier, slot);
  for (uint32_t id : shape.region_order) {
    const ParamShape& param = shape.params[id];
    if (!param.Keeps(tier, slot)) continue;
    const uint64_t bytes = param.BytesBefore(slot, table.param(id).count);
    const uint64_t begin = param.offset[tier][slot];
    const uint64_t end = begin + system::RoundUp(bytes, kArrayAlignmentBytes);
    const uint64_t first = std::max(begin, held.begin), last = std::min(end, held.end);
    if (first < last)
      plan.state_bytes[IndexOf(tier)][StateKindOf(table.algorithm(id), slot)] += last - first;
  }
}

}  // namespace

Arrangement Arrange(const ParamTable& table, const StateShape& shape,
                    const ByTier<double>& fractions) {
  Arrangement arrangement;
  arrangement.fractions = fractions;
  arrangement.residence = Residence(table, shape, fractions);
  arrangement.chunks = CutChunks(table, shape, arrangement.residence);
  arrangement.lanes = LaneSizesOf(shape, arrangement.residence, arrangement.chunks);
  return arrangement;
}

namespace {

// The bytes on each NUMA node under the context's policy.
NodeBytes PlannedNodeBytes(const Context& context, const StateShape& shape, uint64_t state_bytes,
                           const offload_plan_t& plan) {
  NodeBytes bytes;
  context.state_pages().AddPlanned(state_bytes, &bytes);
  const uint64_t pageable_bytes = shape.options.streams_disk() ? 0 : plan.host_disk_bytes;
  context.pinned_pages().AddPlanned(PinnedBytesOf(shape, plan) + pageable_bytes, &bytes);
  return bytes;
}

}  // namespace

void SetNodeBytes(const NodeBytes& bytes, offload_plan_t& plan) {
  plan.numa_unknown_bytes = plan.host_bytes;
  for (size_t node = 0; node < bytes.on_node.size(); ++node) {
    plan.numa_bytes[node] = bytes.on_node[node];
    plan.numa_unknown_bytes -= bytes.on_node[node];
  }
}

Result<offload_plan_t> PlanOf(const Context& context, const ParamTable& table,
                              const StateShape& shape, const Arrangement& arrangement) {
  const Residence& residence = arrangement.residence;
  const Device& device = context.device();
  offload_plan_t plan{};
  plan.param_count = table.size();
  plan.element_count = shape.element_count;
  for (Tier tier : kTiers) plan.elements[IndexOf(tier)] = residence.elements(tier);
  for (uint32_t index = 0; index < kStateSlots; ++index) {
    for (Tier tier : kTiers) AddStateBytes(table, shape, residence, tier, StateSlot{index}, plan);
  }
  plan.host_scratch_bytes = StepPipeline::ScratchBytes(table, shape) + Mover::ScratchBytes(table) +
                            MasterFill::ScratchBytes(table);
  plan.host_params_bytes = shape.swap_params_bytes;
  plan.host_grads_bytes = shape.swap_grads_bytes;
  plan.host_swap_bytes = SwapStates::Bytes(shape, residence);
  const ByTier<uint64_t> state_bytes = StateMemory::Bytes(device, shape, residence);
  plan.host_bytes =
      state_bytes[Tier::kHost] + plan.host_scratch_bytes + SwapMemory::Bytes(shape, residence);
  plan.host_early_bytes = StepPipeline::EarlyBytes(table, shape);
  plan.host_change_bytes = ChangeLog::HostBytes(shape) + ChangeTable::HostBytes(shape);
  plan.host_save_bytes = Checkpoints::BufferBytes(table, shape);
  const DiskMemory::Sizes disk = DiskMemory::SizesOf(shape, arrangement.chunks);
  plan.disk_bytes = disk.file_bytes;
  plan.disk_step_bytes = disk.step_bytes;
  plan.host_disk_bytes = disk.ring_bytes();
  plan.host_scratch_bytes += disk.table_bytes;
  plan.host_bytes += plan.host_early_bytes + plan.host_change_bytes + plan.host_save_bytes +
                     plan.host_disk_bytes + disk.table_bytes;
  plan.host_available_bytes = system::AvailableBytes();
  plan.pinned_bytes_left = context.PinnedBytesLeft();
  plan.chunk_count = arrangement.chunks.chunks.size();
  plan.grads_down_bytes = arrangement.chunks.grads_down_bytes;
  plan.params_up_bytes = arrangement.chunks.params_up_bytes;
  if (!device.unified()) plan.staging_bytes = Lanes::PinnedBytes(arrangement.lanes);
  plan.host_bytes += plan.staging_bytes;
  SetNodeBytes(PlannedNodeBytes(context, shape, state_bytes[Tier::kHost], plan), plan);
  if (device.unified()) return plan;
  plan.device_scratch_bytes = Lanes::DeviceScratchBytes(arrangement.lanes);
  plan.device_change_bytes = ChangeLog::DeviceWords(shape) * sizeof(uint64_t);
  plan.device_ring_bytes = arrangement.lanes.stream_ring_bytes;
  if (arrangement.lanes.stream_slots > 0)
    plan.pinned_state_bytes = StateMemory::PinnedBytes(shape, residence);
  plan.device_bytes = state_bytes[Tier::kDevice] + plan.device_scratch_bytes;
  HYBRIDOPT_ASSIGN(const DeviceMemory memory, device.Memory());
  plan.device_free_bytes = memory.free_bytes;
  return plan;
}

Status CheckDeviceRoom(const Context& context, const char* what, double device_fraction,
                       uint64_t bytes) {
  if (context.device().unified()) return {};
  HYBRIDOPT_ASSIGN(const DeviceMemory memory, context.device().Memory());
  if (bytes <= memory.free_bytes) return {};
  return Status::Error(OFFLOAD_OUT_OF_DEVICE_MEMORY,
                       "%s %g needs %s of optimizer state on %s, but %s are free; lower "
                       "device_fraction, or free device memory",
                       what, device_fraction, BytesText(bytes).c_str(), context.device().name(),
                       BytesText(memory.free_bytes).c_str());
}

Status CheckHostRoom(const char* what, uint64_t bytes, uint64_t available) {
  if (bytes <= available) return {};
  return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY,
                       "%s needs %s of host memory, but %s are available to this process (cgroup "
                       "limit counted); raise device_fraction, or free host memory",
                       what, BytesText(bytes).c_str(), BytesText(available).c_str());
}

std::vector<uint64_t> StateBytes(const StateShape& shape, const Residence& residence, Tier tier) {
  std::vector<uint64_t> bytes;
  for (uint32_t id = 0; id < shape.params.size(); ++id) {
    const ElementRange range = residence.range(id, tier);
    bytes.push_back(shape.params[id].BytesOn(tier, range.begin, range.count));
  }
  return bytes;
}

}  // namespace hybridopt
