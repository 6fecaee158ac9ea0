#include "state/placement.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/coefficients.h"

namespace hybridopt {
namespace {

constexpr uint64_t kHostAlignmentBytes = 64;  // a cache line: neighbours do not share one
constexpr uint64_t kDeviceAlignmentBytes = 256;
// Arrays that are walked side by side must not start at like addresses. Modulo a page, a load of
// one would look like a store to another, so an odd number of cache lines keeps them apart. Modulo
// a high power of two, all would use one bank of memory at a time (docs/PERFORMANCE.md has what
// that costs). What is small enough to stay in caches needs no more than the lines.
constexpr uint64_t kStaggerLinesBytes = 5 * 64;
constexpr uint64_t kStaggerBanksBytes = uint64_t{128} << 10;
constexpr uint64_t kBanksMatterElements = uint64_t{1} << 22;

uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The device takes the first floor(fraction * elements) of the params that let the fraction decide.
void SplitShares(const ParamTable& table, const PlacementOptions& options, Placement& placement) {
  uint64_t automatic_count = 0;
  for (const Param& param : table.params())
    if (param.placement == OFFLOAD_PLACE_AUTO) automatic_count += param.count;
  uint64_t left = static_cast<uint64_t>(
      std::floor(options.device_fraction * static_cast<double>(automatic_count)));
  for (uint32_t id = 0; id < table.size(); ++id) {
    const Param& param = table.param(id);
    uint64_t device_count = 0;
    if (param.placement == OFFLOAD_PLACE_DEVICE) device_count = param.count;
    if (param.placement == OFFLOAD_PLACE_AUTO) {
      device_count = std::min(left, param.count);
      left -= device_count;
    }
    if (options.unified) device_count = 0;
    placement.params[id].device_count = device_count;
    placement.device_elements += device_count;
    placement.host_elements += param.count - device_count;
  }
}

// Whether a share of this param keeps a state array of its own. An fp32 param is its own master,
// but for the host share of a param that lives on a device: fetching it would cost a copy a step.
bool KeepsState(const Param& param, Rule rule, StateLayout layout, StateSlot slot,
                bool staged_host_share) {
  if (!HasState(rule, layout, slot)) return false;
  return slot != kMaster || param.dtype != OFFLOAD_FP32 || staged_host_share;
}

// The host share of a param that lives on a device has no upper halves to read: its masters are not
// split, whatever was asked for.
void ChooseLayouts(const ParamTable& table, const PlacementOptions& options, Placement& placement) {
  const bool bf16 = options.moment_dtype == OFFLOAD_BF16;
  const StateLayout whole = bf16 ? StateLayout::kBf16Moments : StateLayout::kFp32;
  const StateLayout halves = bf16 ? StateLayout::kSplitBf16Moments : StateLayout::kSplit;
  for (uint32_t id = 0; id < table.size(); ++id) {
    const bool split =
        options.master_layout == OFFLOAD_MASTER_SPLIT && table.param(id).dtype == OFFLOAD_BF16;
    ParamPlace& place = placement.params[id];
    place.host_layout = split && options.unified ? halves : whole;
    place.device_layout = split ? halves : whole;
    place.ties_away = split;
    place.state_dtype[kMaster] = OFFLOAD_FP32;
    place.state_dtype[kMasterLow] = OFFLOAD_U16;
    place.state_dtype[kMoment0] = place.state_dtype[kMoment1] = options.moment_dtype;
    if (!options.stochastic || !bf16 || place.rule == Rule::kSgdPlain) continue;
    place.first_stripe = static_cast<uint32_t>(placement.stripes.size());
    AddStripes(table.param(id).shard, placement.stripes);
    place.stripe_count = static_cast<uint32_t>(placement.stripes.size()) - place.first_stripe;
  }
}

uint64_t HostStaggerBytes(const ParamTable& table, const Placement& placement) {
  uint64_t host_count = 0;
  for (uint32_t id = 0; id < table.size(); ++id)
    host_count += table.param(id).count - placement.params[id].device_count;
  return kStaggerLinesBytes + (host_count < kBanksMatterElements ? 0 : kStaggerBanksBytes);
}

void LayOutState(const ParamTable& table, const PlacementOptions& options, Placement& placement) {
  const uint64_t stagger_bytes = HostStaggerBytes(table, placement);
  for (uint32_t slot_index = 0; slot_index < kStateSlots; ++slot_index) {
    const StateSlot slot = static_cast<StateSlot>(slot_index);
    const uint64_t host_begin = placement.host_arena_bytes;
    const uint64_t device_begin = placement.device_block_bytes;
    for (uint32_t id = 0; id < table.size(); ++id) {
      const Param& param = table.param(id);
      ParamPlace& place = placement.params[id];
      const uint64_t host_count = param.count - place.device_count;
      place.host_offset[slot] = kNoState;
      place.device_offset[slot] = kNoState;
      const uint64_t element_bytes = DtypeBytes(place.state_dtype[slot]);
      if (host_count > 0 &&
          KeepsState(param, place.rule, place.host_layout, slot, !options.unified)) {
        // The first region too: the caller's arrays often start where pages do.
        if (placement.host_arena_bytes == host_begin) placement.host_arena_bytes += stagger_bytes;
        place.host_offset[slot] = placement.host_arena_bytes;
        placement.host_arena_bytes += RoundUp(host_count * element_bytes, kHostAlignmentBytes);
      }
      if (place.device_count > 0 &&
          KeepsState(param, place.rule, place.device_layout, slot, false)) {
        place.device_offset[slot] = placement.device_block_bytes;
        placement.device_block_bytes +=
            RoundUp(place.device_count * element_bytes, kDeviceAlignmentBytes);
      }
    }
    placement.host_state_bytes[slot] = placement.host_arena_bytes - host_begin;
    placement.device_state_bytes[slot] = placement.device_block_bytes - device_begin;
  }
}

// Room on the host for what may be offloaded, whole params at their own sizes.
void LayOutSwap(const ParamTable& table, const PlacementOptions& options, Placement& placement) {
  const bool params = (options.movable & OFFLOAD_MOVABLE_PARAMS) != 0;
  const bool accumulate = (options.movable & OFFLOAD_MOVABLE_ACCUMULATE) != 0;
  const bool grads = accumulate || (options.movable & OFFLOAD_MOVABLE_GRADS) != 0;
  for (uint32_t id = 0; id < table.size(); ++id) {
    const Param& param = table.param(id);
    ParamPlace& place = placement.params[id];
    place.swap_params_offset = placement.swap_params_bytes;
    place.swap_grads_offset = placement.swap_grads_bytes;
    const uint64_t grad_bytes = accumulate ? sizeof(float) : DtypeBytes(param.grad_dtype);
    if (params)
      placement.swap_params_bytes +=
          RoundUp(param.count * DtypeBytes(param.dtype), kHostAlignmentBytes);
    if (grads) placement.swap_grads_bytes += RoundUp(param.count * grad_bytes, kHostAlignmentBytes);
  }
  if ((options.movable & OFFLOAD_MOVABLE_STATES) != 0)
    placement.swap_states_bytes = placement.device_block_bytes;
  if (grads && placement.device_elements > 0)
    placement.lanes.device_grad_elements =
        std::min(options.chunk_elements, placement.device_elements);
}

// Cuts the host share into chunks, one param after the other.
class ChunkCutter {
 public:
  ChunkCutter(const PlacementOptions& options, Placement& placement)
      : chunk_elements_(options.unified ? UINT64_MAX : options.chunk_elements),
        placement_(placement) {}

  void Add(uint32_t id, const Param& param, uint64_t begin, uint64_t count) {
    while (count > 0) {
      if (placement_.chunks.empty() || chunk().element_count == chunk_elements_) Open();
      const uint64_t taken = std::min(count, chunk_elements_ - chunk().element_count);
      placement_.fragments.push_back(
          {id, begin, taken, chunk().element_count, grad_bytes_, param_bytes_});
      grad_bytes_ += RoundUp(taken * DtypeBytes(param.grad_dtype), kHostAlignmentBytes);
      param_bytes_ += RoundUp(taken * DtypeBytes(param.dtype), kHostAlignmentBytes);
      placement_.lanes.slot_grad_bytes = std::max(placement_.lanes.slot_grad_bytes, grad_bytes_);
      placement_.lanes.slot_param_bytes = std::max(placement_.lanes.slot_param_bytes, param_bytes_);
      chunk().fragment_count += 1;
      chunk().element_count += taken;
      begin += taken;
      count -= taken;
    }
    placement_.params[id].last_chunk_end = static_cast<uint32_t>(placement_.chunks.size());
  }

 private:
  Chunk& chunk() { return placement_.chunks.back(); }
  void Open() {
    placement_.chunks.push_back({static_cast<uint32_t>(placement_.fragments.size()), 0, 0});
    grad_bytes_ = 0;
    param_bytes_ = 0;
  }

  const uint64_t chunk_elements_;
  Placement& placement_;
  uint64_t grad_bytes_ = 0;  // of the open chunk so far
  uint64_t param_bytes_ = 0;
};

void CutChunks(const ParamTable& table, const PlacementOptions& options, Placement& placement) {
  ChunkCutter cutter(options, placement);
  std::vector<uint32_t> order(table.size());
  std::iota(order.begin(), order.end(), 0u);
  std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
    return table.param(a).chunk_order < table.param(b).chunk_order;
  });
  for (uint32_t id : order) {
    const Param& param = table.param(id);
    const uint64_t device_count = placement.params[id].device_count;
    const uint64_t host_count = param.count - device_count;
    if (host_count == 0) continue;
    cutter.Add(id, param, device_count, host_count);
    placement.grads_down_bytes += host_count * DtypeBytes(param.grad_dtype);
    placement.params_up_bytes += host_count * DtypeBytes(param.dtype);
  }
  if (!options.unified) {
    const uint64_t chunk_count = placement.chunks.size();
    placement.lanes.staging_slots =
        static_cast<uint32_t>(std::min<uint64_t>(options.staging_slots, chunk_count));
    if ((options.movable & OFFLOAD_MOVABLE_ACCUMULATE) != 0) {
      // Gradients to be added come down through the ring, even where all state is on the device.
      placement.lanes.staging_slots = options.staging_slots;
      placement.lanes.slot_grad_bytes =
          std::max(placement.lanes.slot_grad_bytes, options.chunk_elements * sizeof(float));
    }
    return;
  }
  placement.lanes.slot_grad_bytes = placement.lanes.slot_param_bytes = 0;
  placement.grads_down_bytes = placement.params_up_bytes = 0;
}

}  // namespace

int32_t StateKindOf(int32_t algorithm, StateSlot slot) {
  if (slot == kMaster) return OFFLOAD_STATE_MASTER;
  if (slot == kMasterLow) return OFFLOAD_STATE_MASTER_LOW;
  const bool adam_family = algorithm == OFFLOAD_ADAMW || algorithm == OFFLOAD_ADAM;
  if (slot == kMoment1) return adam_family ? OFFLOAD_STATE_EXP_AVG_SQ : -1;
  if (algorithm == OFFLOAD_SGD) return OFFLOAD_STATE_MOMENTUM_BUFFER;
  if (algorithm == OFFLOAD_ADAGRAD) return OFFLOAD_STATE_SUM;
  return OFFLOAD_STATE_EXP_AVG;
}

bool HasState(Rule rule, StateLayout layout, StateSlot slot) {
  switch (slot) {
    case kMaster:
      return !IsSplit(layout);
    case kMasterLow:
      return IsSplit(layout);
    case kMoment1:
      return rule == Rule::kAdam;
    default:
      return rule != Rule::kSgdPlain;
  }
}

Placement Place(const ParamTable& table, const PlacementOptions& options) {
  Placement placement;
  placement.piece_elements = options.chunk_elements;
  placement.params.resize(table.size());
  for (uint32_t id = 0; id < table.size(); ++id) {
    ParamPlace& place = placement.params[id];
    place.rule = RuleOf(table.algorithm(), table.groups()[table.param(id).group].momentum);
    place.first_norm_block = placement.lanes.norm_blocks;
    placement.lanes.norm_blocks +=
        (table.param(id).count + kNormBlockElements - 1) / kNormBlockElements;
  }
  SplitShares(table, options, placement);
  ChooseLayouts(table, options, placement);
  LayOutState(table, options, placement);
  LayOutSwap(table, options, placement);
  CutChunks(table, options, placement);
  return placement;
}

}  // namespace hybridopt
