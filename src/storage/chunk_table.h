// ChunkTable: how the elements whose state is on the host are cut into chunks. Pure; made anew when
// the residence changes.
//
// The host's extents of all params, in the shape's update order, follow each other:
//
//   params      | p0: device ..... host ....... | p1: host ....... | p2: host .. |
//   fragments                    |  f0  |   f1  |   f2  |    f3    |     f4      |
//   chunks                       |  0   |       1       |         2              |
//
// A chunk is what one staging slot holds; a fragment is the part of a chunk that belongs to one
// param. Where there is no staging all fragments form one chunk.
//
// A slot of the device's ring holds the state of a chunk, one area behind the other. Fragments
// whose state lies side by side on the host, but for padding, lie so in their area, and are one
// copy:
//
//   slot   | masters: f0 | f1 | first moments: f0 | f1 | second ones: f0 | f1 | held gradients |
#pragma once

#include <array>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "machine/lanes.h"
#include "state/residence.h"

namespace hybridopt {

struct Fragment {
  uint32_t param;
  uint64_t begin;  // first element, counted in the param
  uint64_t count;
  uint64_t first_element;                          // counted in the chunk
  uint64_t grad_offset;                            // bytes into the slot's grads half
  uint64_t param_offset;                           // bytes into the slot's params half
  std::array<uint64_t, kStateSlots> state_offset;  // bytes into each area of the device ring's slot
};

struct Chunk {
  uint32_t first_fragment;
  uint32_t fragment_count;
  uint64_t element_count;
};

struct ChunkTable {
  std::vector<Fragment> fragments;
  std::vector<Chunk> chunks;
  std::vector<uint32_t> last_chunk_end;  // per param: chunks that hold elements of it end here
  uint64_t slot_grad_bytes = 0;
  uint64_t slot_param_bytes = 0;
  uint64_t grads_down_bytes = 0;
  uint64_t params_up_bytes = 0;
  std::array<uint64_t, kStateSlots> state_area_bytes{};  // of a slot of the device's ring
  uint64_t held_grads_bytes = 0;  // likewise: room for gradients that the host holds

  // Where an area begins in a slot of the device's ring; kStateSlots: the gradients.
  uint64_t StateArea(uint32_t slot) const {
    return std::accumulate(state_area_bytes.begin(), state_area_bytes.begin() + slot, uint64_t{0});
  }
  uint64_t stream_slot_bytes() const { return StateArea(kStateSlots) + held_grads_bytes; }

  std::span<const Fragment> FragmentsOf(const Chunk& chunk) const {
    return std::span(fragments).subspan(chunk.first_fragment, chunk.fragment_count);
  }
  // Bytes of the table itself where all state is on the host, which takes most.
  static uint64_t BytesMax(const StateShape& shape);
};

ChunkTable CutChunks(const ParamTable& table, const StateShape& shape, const Residence& residence);

// Slots of the device's ring by default: one comes, one is updated, one goes, and one is spare.
inline constexpr uint32_t kDefaultStreamSlots = 4;
// Below this the ring's copies would wait for each other.
inline constexpr uint32_t kMinStreamSlots = 2;
inline constexpr uint32_t kMaxStreamSlots = 64;

// Chunks there are where all state is on the host, or more.
inline uint64_t ChunksMost(const StateShape& shape) {
  return shape.options.unified ? 1 : shape.element_count / shape.options.chunk_elements + 1;
}

// What the pipeline's lanes are made from.
LaneSizes LaneSizesOf(const StateShape& shape, const Residence& residence,
                      const ChunkTable& chunks);

}  // namespace hybridopt
