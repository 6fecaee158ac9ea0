// Placement: which element ranges live where, and how many bytes that takes. Pure: no memory, no
// device, no clock.
//
// Each param's elements are cut once: [0, device_count) is the device share, the rest the host
// share. The host share of all params, in chunk_order, is cut into chunks:
//
//   params      | p0: device ..... host ....... | p1: host ....... | p2: host .. |
//   fragments                    |  f0  |   f1  |   f2  |    f3    |     f4      |
//   chunks                       |  0   |       1       |         2              |
//
// A chunk is what one staging slot holds. Where there is no staging all fragments form one chunk.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"
#include "machine/lanes.h"
#include "state/param_table.h"

namespace hybridopt {

// The arrays a param's state can have. What the moments are called depends on the algorithm. A
// share keeps masters or, where they are split, their lower halves.
enum StateSlot : uint32_t { kMaster = 0, kMoment0 = 1, kMoment1 = 2, kMasterLow = 3 };
inline constexpr uint32_t kStateSlots = 4;

// The ABI's name for a slot (enum offload_state_kind), or -1 if the algorithm has no such moment.
int32_t StateKindOf(int32_t algorithm, StateSlot slot);

// Whether a share has that state: moments as the rule says, masters or their lower halves as the
// layout does. A master may be the param itself.
bool HasState(Rule rule, StateLayout layout, StateSlot slot);

struct PlacementOptions {
  bool unified;  // one memory: no device share, no staging
  double device_fraction;
  uint64_t chunk_elements;
  uint32_t staging_slots;
  uint32_t movable;  // enum offload_movable, or-ed
  int32_t master_layout = OFFLOAD_MASTER_FP32;
  int32_t moment_dtype = OFFLOAD_FP32;  // or OFFLOAD_BF16
  bool stochastic = false;              // bf16 moments are rounded at random
};

inline constexpr uint64_t kNoState = UINT64_MAX;

// Where one param's state lies: byte offsets into the host arena and the device's block, kNoState
// where it has none. Offsets are to the first element of that share.
struct ParamPlace {
  Rule rule;
  uint64_t device_count;
  std::array<uint64_t, kStateSlots> host_offset;
  std::array<uint64_t, kStateSlots> device_offset;
  std::array<int32_t, kStateSlots> state_dtype;  // enum offload_dtype, of both shares
  StateLayout host_layout;
  StateLayout device_layout;
  bool ties_away;  // how the param is rounded, wherever it is updated
  // Where its elements lie in the whole tensor, for the rounding at random; none without that.
  uint32_t first_stripe;
  uint32_t stripe_count;
  uint64_t swap_params_offset;  // bytes into the host's room for offloaded params
  uint64_t swap_grads_offset;   // the same for gradients
  uint64_t first_norm_block;
  uint32_t last_chunk_end;  // chunks that must be done before all of this param's host share is
};

struct Fragment {
  uint32_t param;
  uint64_t begin;  // first element, counted in the param
  uint64_t count;
  uint64_t first_element;  // counted in the chunk
  uint64_t grad_offset;    // bytes into the slot's grads half
  uint64_t param_offset;   // bytes into the slot's params half
};

struct Chunk {
  uint32_t first_fragment;
  uint32_t fragment_count;
  uint64_t element_count;
};

struct Placement {
  std::vector<ParamPlace> params;
  std::vector<Fragment> fragments;
  std::vector<Chunk> chunks;
  std::vector<Stripe> stripes;
  uint64_t host_elements = 0;
  uint64_t device_elements = 0;
  std::array<uint64_t, kStateSlots> host_state_bytes{};
  std::array<uint64_t, kStateSlots> device_state_bytes{};
  uint64_t host_arena_bytes = 0;
  uint64_t device_block_bytes = 0;
  uint64_t swap_params_bytes = 0;
  uint64_t swap_grads_bytes = 0;
  uint64_t swap_states_bytes = 0;  // a copy of the device's block
  uint64_t piece_elements = 0;     // what a pass over all elements is cut into where it must be
  LaneSizes lanes;
  uint64_t grads_down_bytes = 0;
  uint64_t params_up_bytes = 0;
};

// Calls visit(offset, count, order) for each stretch of elements [begin, begin + count) of a param
// that lies in one stripe; offset counts from `begin`. Without stripes that is all of them.
template <typename Visit>
void ForEachStripe(const Placement& placement, const ParamPlace& place, uint64_t begin,
                   uint64_t count, Visit&& visit) {
  if (place.stripe_count == 0) return visit(0, count, ElementOrder{});
  const std::span<const Stripe> stripes(&placement.stripes[place.first_stripe], place.stripe_count);
  auto stripe =
      std::upper_bound(stripes.begin(), stripes.end(), begin,
                       [](uint64_t element, const Stripe& s) { return element < s.begin; });
  --stripe;  // the first stripe starts at element 0, so there is one before
  for (const uint64_t end = begin + count; stripe != stripes.end() && stripe->begin < end;
       ++stripe) {
    const uint64_t first = std::max(begin, stripe->begin);
    const uint64_t last = std::min(end, stripe->begin + stripe->count);
    ElementOrder order{stripe->first, stripe->row_length, stripe->row_stride, stripe->column};
    order.column += first - stripe->begin;
    visit(first - begin, last - first, order);
  }
}

Placement Place(const ParamTable& table, const PlacementOptions& options);

}  // namespace hybridopt
