// StateShape: which arrays hold a param's state, how long each is, and at which offset its elements
// lie. Pure: no memory, no device, no clock. Commit computes the shape once; it does not depend on
// which tier holds which element.
//
// Each state slot (masters, first moments ...) has one region on each tier. Every region has the
// arrays of the params in the same order, so that the elements on one tier are contiguous: on the
// device they are the start of the region, on the host the end of the region.
//
//   region   | placed on the device | the device fraction decides | placed on the host |
//                                              ^ cut: [0, cut) device, [cut, end) host
//
// An element's offset in a tier's region does not depend on the cut, so its address on a tier never
// changes.
//
// The regions on the host lie in one arena, which is pinned in pieces: a piece ends where a region
// ends or at a pin cut, between two arrays. So each array is pinned as a whole, because no program
// may copy with one call what is pinned in two pieces.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "memory/tier.h"
#include "state/param_table.h"

namespace hybridopt {

// The arrays that a param's state can have. The algorithm names the moments. A param keeps whole
// masters; or, if the format of masters is "beside the param", only the bits of the master that the
// param does not have.
enum StateSlot : uint32_t { kMaster = 0, kMoment0 = 1, kMoment1 = 2, kMasterLow = 3 };
inline constexpr uint32_t kStateSlots = 4;

// The ABI's name for a slot (enum offload_state_kind), or kNoMoment.
int32_t StateKindOf(int32_t algorithm, StateSlot slot);

// Whether a param with this rule and format of masters has this state. A master may be the param
// itself.
bool HasState(Rule rule, Format master, StateSlot slot);

// Arrays of state start at multiples of this: the device's kernels need it, and on the host two
// arrays share no cache line.
inline constexpr uint64_t kArrayAlignmentBytes = 256;

struct ShapeOptions {
  bool unified;  // host and device share one memory: the host holds all state, no chunk is staged
  uint64_t chunk_elements;
  uint32_t staging_slots;
  uint32_t movable;                // a combination of enum offload_movable
  StateFormats formats = {};       // masters: of bf16 params
  bool stochastic = false;         // values are rounded at random where a format rounds
  bool cpu_updates = true;         // CPU workers take chunks
  bool streams_state = false;      // chunks may go through a ring on the device
  uint64_t stream_ring_bytes = 0;  // of that ring; 0: DefaultStreamChunks
  uint64_t early_bytes = 0;        // pinned memory for chunks that are updated before their step
  bool tracks_changes = false;     // steps note which elements of params they change
  uint64_t save_buffer_bytes = 0;  // for state that a step puts aside while a save has to read it
  uint64_t pin_piece_bytes = UINT64_MAX;  // see Device::pin_piece_bytes
  bool on_disk = false;                   // some state may be on disk
  uint64_t disk_ring_bytes = 0;           // of host memory for the state of the disk that is in use

  // Whether all chunks are in host memory and nothing of them is staged, so that they are one.
  bool one_chunk() const { return unified && !on_disk; }
  // Whether chunks with state on disk go through the device's ring: where CPU workers take no
  // chunks.
  bool streams_disk() const { return on_disk && streams_state && !cpu_updates; }
};

// The smallest ranges of a param that may be cut. Units are counted in the whole tensor: the first
// unit of a shard may lack `phase` elements, and its last unit may be shorter too.
struct Unit {
  uint64_t elements = 1;
  uint64_t phase = 0;

  // The last element, up to this one, at which a unit begins. A unit always begins at element 0.
  uint64_t RoundDown(uint64_t element) const {
    if (elements == 1) return element;
    const uint64_t over = (element + phase) % elements;
    return element - std::min(element, over);
  }
  // The first element, from this one on, at which a unit begins. It may be beyond the end of the
  // param.
  uint64_t RoundUp(uint64_t element) const {
    const uint64_t down = RoundDown(element);
    return down == element ? element : RoundDown(element + elements - 1);
  }
  // The units of a range that begins at `element`, where a unit begins.
  Unit From(uint64_t element) const { return {elements, element == 0 ? phase : 0}; }
  // Returns where to cut a range [begin, limit) that begins with a unit and has more elements than
  // fit: the part before the cut has at most `wanted` elements, but at least one unit, and ends
  // where a unit ends.
  uint64_t CutOf(uint64_t begin, uint64_t limit, uint64_t wanted) const {
    if (limit - begin <= wanted) return limit;
    const uint64_t end = RoundDown(begin + wanted);
    return end > begin ? end : std::min(limit, RoundUp(begin + 1));
  }
};

// The units, of `elements` elements each, of a shard. If the shard has gaps that are no multiple of
// a unit, the whole shard is one unit.
Unit UnitOf(const Shard& shard, uint64_t count, uint64_t elements);

// Returns the bytes of an array before `element`, where a unit begins or the array ends. If the
// first unit is shorter, it takes the memory of a whole unit. The units of the param are multiples
// of the format's units.
inline uint64_t BytesBefore(const FormatRow& row, const Unit& unit, uint64_t element) {
  if (row.unit_elements == 1) return element * row.unit_bytes;
  return element == 0 ? 0 : row.Bytes(element + unit.phase % row.unit_elements);
}

struct ParamShape {
  Unit unit;
  MatrixShape matrix;             // of each of its matrices; 0 x 0: it is updated by elements
  std::vector<MatrixPart> parts;  // of each matrix, at least one; none if there is no matrix
  Rule rule;                      // the rule of its group at commit, which decides the moments
  std::array<Format, kStateSlots> format;  // the format of each slot that the param has
  // Whether a tier has an array for the slot, and at which byte of the region its element 0 is. An
  // fp32 param is its own master on the tier where the param is: on the device, or on the host and
  // the disk if host and device share one memory. Such a tier has no master array for the param.
  ByTier<std::array<bool, kStateSlots>> kept;
  ByTier<std::array<uint64_t, kStateSlots>> offset;
  // Stripes: the indices of the param's elements in the whole tensor, from which stochastic
  // rounding takes its random bits. Without stochastic rounding a param has no stripes.
  uint32_t first_stripe;
  uint32_t stripe_count;
  uint64_t first_norm_block;
  uint64_t swap_params_offset;  // in the host memory for offloaded params, in bytes
  uint64_t swap_grads_offset;   // where its gradients are in that memory
  uint64_t first_change_word;   // where its bits of changes begin (kernels/changes/changes.h)

  bool is_of_matrices() const { return matrix.count() > 0; }
  bool Keeps(Tier tier, StateSlot slot) const { return kept[tier][slot]; }
  // The slot of the array that an update gets as master: kMasterLow if the format is beside the
  // param.
  StateSlot master_slot() const {
    return RowOf(format[kMasterLow]).beside_param ? kMasterLow : kMaster;
  }
  bool beside_param() const { return master_slot() == kMasterLow; }
  StateFormats formats() const {
    return {format[master_slot()], format[kMoment0], format[kMoment1]};
  }
  // Bytes of `count` elements of an array from `begin` on, where a unit must begin.
  uint64_t Bytes(StateSlot slot, uint64_t begin, uint64_t count) const {
    return BytesBefore(slot, begin + count) - BytesBefore(slot, begin);
  }
  uint64_t ByteAt(Tier tier, StateSlot slot, uint64_t element) const {
    return offset[tier][slot] + BytesBefore(slot, element);
  }
  // Bytes of the state of these elements on a tier.
  uint64_t BytesOn(Tier tier, uint64_t begin, uint64_t count) const;
  uint64_t BytesBefore(StateSlot slot, uint64_t element) const {
    return hybridopt::BytesBefore(RowOf(format[slot]), unit, element);
  }
};

struct StateShape {
  ShapeOptions options;
  std::vector<ParamShape> params;
  std::vector<Stripe> stripes;
  std::vector<uint32_t> region_order;  // ids in the order of each region
  std::vector<uint32_t> update_order;  // ids in the order of chunks and saves: by chunk_order
  ByTier<std::array<uint64_t, kStateSlots>> region_bytes;
  std::array<uint64_t, kStateSlots> host_region_begin{};  // in the host's arena
  uint64_t host_arena_bytes = 0;                          // of addresses
  std::vector<uint64_t> pin_cuts;  // in the host's arena: whole pages, ascending
  uint64_t element_count = 0;
  uint64_t largest_unit = 1;  // in elements
  uint64_t norm_blocks = 0;
  uint64_t swap_params_bytes = 0;
  uint64_t swap_grads_bytes = 0;
  uint64_t change_words = 0;  // 0: changes are not tracked
  uint64_t matrices = 0;      // that are updated by themselves: all parts in all params
  // The most sets of coefficients of a step: one for each param, or for each of its parts.
  uint64_t coefficients = 0;
  // Memory for the update of the largest of them: on the host, and on the device.
  uint64_t host_matrix_bytes = 0;
  uint64_t device_matrix_bytes = 0;

  uint64_t RegionBytes(Tier tier, StateSlot slot) const { return region_bytes[tier][slot]; }
};

StateShape MakeStateShape(const ParamTable& table, const ShapeOptions& options);

// Calls visit(offset, count, order) for each part of a param's range [begin, begin + count) that is
// in one stripe. `offset` counts from `begin`. A param without stripes gets one call for the whole
// range.
template <typename Visit>
void ForEachStripe(const StateShape& shape, const ParamShape& param, uint64_t begin, uint64_t count,
                   Visit&& visit) {
  if (param.stripe_count == 0) return visit(0, count, ElementOrder{});
  const std::span<const Stripe> stripes(&shape.stripes[param.first_stripe], param.stripe_count);
  auto stripe =
      std::upper_bound(stripes.begin(), stripes.end(), begin,
                       [](uint64_t element, const Stripe& s) { return element < s.begin; });
  --stripe;  // the first stripe starts at element 0, so a stripe before this one exists
  for (const uint64_t end = begin + count; stripe != stripes.end() && stripe->begin < end;
       ++stripe) {
    const uint64_t first = std::max(begin, stripe->begin);
    const uint64_t last = std::min(end, stripe->begin + stripe->count);
    ElementOrder order{stripe->first, stripe->row_length, stripe->row_stride, stripe->column};
    order.column += first - stripe->begin;
    visit(first - begin, last - first, order);
  }
}

}  // namespace hybridopt
