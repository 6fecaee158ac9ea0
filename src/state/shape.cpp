#include "state/shape.h"

#include <numeric>

#include "base/system.h"
#include "kernels/algorithms.h"
#include "kernels/changes/changes.h"
#include "kernels/matrix/newton_schulz.h"

namespace hybridopt {
namespace {

constexpr uint64_t kSwapAlignmentBytes = 64;

// A loop reads several arrays at the same index, so the arrays must not start at similar addresses.
// If two addresses are equal modulo a page, the CPU takes a load from one array for a load that
// depends on a store to the other; an odd number of cache lines between the arrays avoids that. If
// the addresses are equal modulo a high power of two, all arrays use the same memory bank at the
// same time (docs/PERFORMANCE.md says what that costs). Arrays that fit into caches need only the
// cache lines.
constexpr uint64_t kStaggerLinesBytes = 5 * 64;
static_assert(kStaggerLinesBytes >= kArrayAlignmentBytes, "one copy would cross a pin cut");
constexpr uint64_t kStaggerBanksBytes = uint64_t{128} << 10;
constexpr uint64_t kBanksMatterElements = uint64_t{1} << 22;

std::vector<uint32_t> Ids(const ParamTable& table) {
  std::vector<uint32_t> ids(table.size());
  std::iota(ids.begin(), ids.end(), 0u);
  return ids;
}

uint32_t PlaceInRegion(const Param& param) {
  switch (param.placement) {
    case OFFLOAD_PLACE_DEVICE:
      return 0;
    case OFFLOAD_PLACE_AUTO:
      return 1;
    case OFFLOAD_PLACE_HOST:
      return 2;
    default:
      return 3;
  }
}

void ChooseOrders(const ParamTable& table, StateShape& shape) {
  shape.region_order = shape.update_order = Ids(table);
  std::stable_sort(shape.region_order.begin(), shape.region_order.end(),
                   [&](uint32_t a, uint32_t b) {
                     return PlaceInRegion(table.param(a)) < PlaceInRegion(table.param(b));
                   });
  std::stable_sort(shape.update_order.begin(), shape.update_order.end(),
                   [&](uint32_t a, uint32_t b) {
                     return table.param(a).chunk_order < table.param(b).chunk_order;
                   });
}

void ChooseFormats(const Param& param, const ShapeOptions& options, StateShape& shape,
                   ParamShape& shaped) {
  const Format master = param.dtype == OFFLOAD_BF16 ? options.formats.master : Format::kFp32;
  const auto is_with_params = [&](Tier tier) {
    return options.unified ? tier != Tier::kDevice : tier == Tier::kDevice;
  };
  shaped.format = {Format::kFp32, options.formats.moment0, options.formats.moment1, Format::kFp32};
  if (RowOf(master).beside_param) shaped.format[kMasterLow] = master;
  for (uint32_t index = 0; index < kStateSlots; ++index) {
    const StateSlot slot{index};
    const bool has = HasState(shaped.rule, master, slot);
    const bool own_master = slot == kMaster && param.dtype == OFFLOAD_FP32;
    for (Tier tier : kTiers)
      shaped.kept[tier][slot] = has && !(own_master && is_with_params(tier)) &&
                                !(options.unified && tier == Tier::kDevice);
  }
  const bool rounds = RowOf(master).is_rounded || (HasState(shaped.rule, master, kMoment0) &&
                                                   RowOf(options.formats.moment0).is_rounded);
  if (!options.stochastic || !rounds) return;
  shaped.first_stripe = static_cast<uint32_t>(shape.stripes.size());
  AddStripes(param.shard, shape.stripes);
  shaped.stripe_count = static_cast<uint32_t>(shape.stripes.size()) - shaped.first_stripe;
}

// The units at which the formats of all state slots of a param can be cut, and its matrices.
Unit UnitOfParam(const Param& param, const ParamShape& shaped) {
  uint64_t elements = std::max<uint64_t>(shaped.matrix.count(), 1);
  for (const Format format : shaped.format)
    elements = std::lcm(elements, RowOf(format).unit_elements);
  return UnitOf(param.shard, param.count, elements);
}

void AddMatrices(const Param& param, StateShape& shape, ParamShape& shaped) {
  if (param.count > 0 && param.matrix.count() > 0) {
    shaped.matrix = param.matrix;
    shaped.parts = param.parts;
    shape.matrices += param.count / param.matrix.count() * param.parts.size();
  }
  shape.coefficients += std::max<uint64_t>(shaped.parts.size(), 1);
  for (const MatrixPart& part : shaped.parts)
    shape.host_matrix_bytes = std::max(shape.host_matrix_bytes, NewtonSchulzBytes(part.shape));
}

uint64_t ArrayBytes(const ParamTable& table, const ParamShape& param, uint32_t id, Tier tier,
                    StateSlot slot) {
  if (!param.Keeps(tier, slot)) return 0;
  return system::RoundUp(param.BytesBefore(slot, table.param(id).count), kArrayAlignmentBytes);
}

void LayOutRegion(const ParamTable& table, Tier tier, StateSlot slot, StateShape& shape) {
  uint64_t& bytes = shape.region_bytes[tier][slot];
  for (uint32_t id : shape.region_order) {
    ParamShape& param = shape.params[id];
    param.offset[tier][slot] = bytes;
    bytes += ArrayBytes(table, param, id, tier, slot);
  }
}

// Lays out a region behind those that the host's arena has. A piece of pinned memory begins with a
// page, and its first array a few cache lines behind that: at another offset in a page than arrays
// of other slots, and than the caller's arrays, which often begin with a page. If the next array
// would make a piece too long, it begins a new piece.
void LayOutHostRegion(const ParamTable& table, StateSlot slot, StateShape& shape) {
  const uint64_t banks_bytes = shape.element_count < kBanksMatterElements ? 0 : kStaggerBanksBytes;
  const uint64_t first_page =
      system::RoundUp(shape.host_arena_bytes + banks_bytes, system::PageBytes());
  uint64_t bytes = 0, piece = 0;  // where the region and its last piece end and begin
  for (uint32_t id : shape.region_order) {
    ParamShape& param = shape.params[id];
    const uint64_t array_bytes = ArrayBytes(table, param, id, Tier::kHost, slot);
    const bool fits = bytes - piece + array_bytes <= shape.options.pin_piece_bytes;
    if (bytes > piece && array_bytes > 0 && !fits) {
      piece = system::RoundUp(bytes + kStateSlots * kStaggerLinesBytes, system::PageBytes());
      bytes = piece;
      shape.pin_cuts.push_back(first_page + piece);
    }
    param.offset[Tier::kHost][slot] = bytes;
    bytes += array_bytes;
  }
  if (bytes == 0) return;
  shape.region_bytes[Tier::kHost][slot] = bytes;
  shape.host_region_begin[slot] = first_page + (slot + 1) * kStaggerLinesBytes;
  shape.host_arena_bytes = shape.host_region_begin[slot] + bytes;
}

void LayOutRegions(const ParamTable& table, StateShape& shape) {
  for (uint32_t index = 0; index < kStateSlots; ++index) {
    for (Tier tier : kTiers)
      if (tier != Tier::kHost) LayOutRegion(table, tier, StateSlot{index}, shape);
    LayOutHostRegion(table, StateSlot{index}, shape);
  }
}

// Lays out the host memory for what may be offloaded: whole params, in their own dtypes.
void LayOutSwap(const ParamTable& table, StateShape& shape) {
  const uint32_t movable = shape.options.movable;
  const bool accumulate = (movable & OFFLOAD_MOVABLE_ACCUMULATE) != 0;
  for (uint32_t id = 0; id < table.size(); ++id) {
    const Param& param = table.param(id);
    ParamShape& shaped = shape.params[id];
    shaped.swap_params_offset = shape.swap_params_bytes;
    shaped.swap_grads_offset = shape.swap_grads_bytes;
    const uint64_t grad_bytes = accumulate ? sizeof(float) : DtypeBytes(param.grad_dtype);
    if ((movable & OFFLOAD_MOVABLE_PARAMS) != 0)
      shape.swap_params_bytes +=
          system::RoundUp(param.count * DtypeBytes(param.dtype), kSwapAlignmentBytes);
    if (accumulate || (movable & OFFLOAD_MOVABLE_GRADS) != 0)
      shape.swap_grads_bytes += system::RoundUp(param.count * grad_bytes, kSwapAlignmentBytes);
  }
}

}  // namespace

int32_t StateKindOf(int32_t algorithm, StateSlot slot) {
  if (slot == kMaster) return OFFLOAD_STATE_MASTER;
  if (slot == kMasterLow) return OFFLOAD_STATE_MASTER_LOW;
  return AlgorithmOf(algorithm)->moments[slot - kMoment0];
}

bool HasState(Rule rule, Format master, StateSlot slot) {
  if (slot == kMaster) return !RowOf(master).beside_param;
  if (slot == kMasterLow) return RowOf(master).beside_param;
  return MomentOf(rule, static_cast<int32_t>(slot - kMoment0)) != kNoMoment;
}

Unit UnitOf(const Shard& shard, uint64_t count, uint64_t elements) {
  if (elements == 1 || count == 0) return {};
  std::vector<Stripe> stripes;
  AddStripes(shard, stripes);
  const auto phase_of = [&](const Stripe& stripe) {
    const uint64_t first = stripe.first + stripe.column / stripe.row_length * stripe.row_stride +
                           stripe.column % stripe.row_length;
    return (first % elements + elements - stripe.begin % elements) % elements;
  };
  const uint64_t phase = phase_of(stripes[0]);
  for (const Stripe& stripe : stripes) {
    const bool is_one_row = stripe.column % stripe.row_length + stripe.count <= stripe.row_length;
    const bool in_step = is_one_row || stripe.row_stride % elements == stripe.row_length % elements;
    if (!in_step || phase_of(stripe) != phase) return {std::max<uint64_t>(count, 1), 0};
  }
  return {elements, phase};
}

uint64_t ParamShape::BytesOn(Tier tier, uint64_t begin, uint64_t count) const {
  uint64_t bytes = 0;
  for (uint32_t slot = 0; slot < kStateSlots; ++slot)
    if (Keeps(tier, StateSlot{slot})) bytes += Bytes(StateSlot{slot}, begin, count);
  return bytes;
}

StateShape MakeStateShape(const ParamTable& table, const ShapeOptions& options) {
  StateShape shape;
  shape.options = options;
  shape.params.resize(table.size());
  ChooseOrders(table, shape);
  for (uint32_t id = 0; id < table.size(); ++id) {
    const Param& param = table.param(id);
    ParamShape& shaped = shape.params[id];
    shaped.rule = RuleOf(table.algorithm(id), table.groups()[param.group].momentum);
    shaped.first_norm_block = shape.norm_blocks;
    shape.norm_blocks += NormBlocksOf(param.count);
    shape.element_count += param.count;
    shaped.first_change_word = shape.change_words;
    if (options.tracks_changes) shape.change_words += NotedWords(param.count);
    ChooseFormats(param, options, shape, shaped);
    AddMatrices(param, shape, shaped);
    shaped.unit = UnitOfParam(param, shaped);
    shape.largest_unit = std::max(shape.largest_unit, std::min(shaped.unit.elements, param.count));
  }
  LayOutRegions(table, shape);
  LayOutSwap(table, shape);
  return shape;
}

}  // namespace hybridopt
