// ChunkTable: how the elements whose state is not on the device are cut into chunks. Pure. The
// table is made again when the residence changes.
//
// The chunks cover the host's ranges of all params, in the shape's update order:
//
//   params      | p0: device ..... host ....... | p1: host ....... | p2: host .. |
//   fragments                    |  f0  |   f1  |   f2  |    f3    |     f4      |
//   chunks                       |  0   |       1       |         2              |
//
// One staging slot holds one chunk. A fragment is the range of one param in a chunk. A fragment
// ends where a unit ends; a chunk grows if a unit is larger than a chunk. If nothing is staged, all
// fragments form one chunk. If CPU workers and the device's streams share the chunks, the last
// chunks become smaller and smaller, so that the side that finishes first waits only a short time
// for the other.
//
// The device's ring holds the state of some chunks, with one area for each array of a chunk.
// Fragments whose state is contiguous on the host, except for padding, are contiguous in the area
// too, so that one copy moves them all:
//
//   chunk  | masters: f0 | f1 | first moments: f0 | f1 | second ones: f0 | f1 | held gradients |
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "runtime/work_pieces.h"
#include "state/residence.h"

namespace hybridopt {

struct Fragment {
  uint32_t param;
  Tier tier;       // holds the state of all its elements
  uint64_t begin;  // first element, counted in the param
  uint64_t count;
  uint64_t first_element;                          // counted in the chunk
  uint64_t grad_offset;                            // bytes into the slot's grads half
  uint64_t param_offset;                           // bytes into the slot's params half
  std::array<uint64_t, kStateSlots> state_offset;  // bytes into each area in the device's ring
  Unit unit;                                       // counted from the fragment's begin
};

struct Chunk {
  uint32_t first_fragment;
  uint32_t fragment_count;
  uint64_t element_count;
  bool on_disk;                                        // the state of some elements is on disk
  std::array<uint64_t, kStateSlots> state_area_bytes;  // in the device's ring
  uint64_t held_grads_bytes;                           // there: gradients that the host holds

  // The byte at which an area begins. `slot` kStateSlots is the area of the gradients.
  uint64_t StateArea(uint32_t slot) const {
    return std::accumulate(state_area_bytes.begin(), state_area_bytes.begin() + slot, uint64_t{0});
  }
  // The byte at which an array of one of the chunk's fragments begins.
  uint64_t StateOf(const Fragment& fragment, uint32_t slot) const {
    return StateArea(slot) + fragment.state_offset[slot];
  }
  uint64_t stream_bytes() const { return StateArea(kStateSlots) + held_grads_bytes; }
};

struct ChunkTable {
  std::vector<Fragment> fragments;
  std::vector<Chunk> chunks;
  std::vector<uint32_t> last_chunk_end;  // per param: the index after its last chunk
  uint64_t slot_grad_bytes = 0;
  uint64_t slot_param_bytes = 0;
  uint64_t grads_down_bytes = 0;
  uint64_t params_up_bytes = 0;

  // The bytes in the device's ring of the chunk that needs most.
  uint64_t stream_bytes_most() const {
    uint64_t most = 0;
    for (const Chunk& chunk : chunks) most = std::max(most, chunk.stream_bytes());
    return most;
  }

  std::span<const Fragment> FragmentsOf(const Chunk& chunk) const {
    return std::span(fragments).subspan(chunk.first_fragment, chunk.fragment_count);
  }
  // The largest size of the table itself: its bytes when all state is on the host.
  static uint64_t BytesMax(const StateShape& shape);
};

// Calls visit(fragment, first, count) for the part of each fragment that is in `range`. `range`
// counts the active elements of all fragments, `total` in number; before(f) of them come before
// fragment f. `first` counts from the fragment's begin. A unit belongs to the range in which the
// unit ends.
template <typename Before, typename Visit>
void ForEachRange(std::span<const Fragment> fragments, uint64_t total, Before&& before,
                  const WorkRange& range, Visit&& visit) {
  if (range.begin == range.end) return;
  auto fragment =
      std::upper_bound(fragments.begin(), fragments.end(), range.begin,
                       [&](uint64_t element, const Fragment& f) { return element < before(f); });
  --fragment;  // before(first fragment) is 0, so a fragment before this one exists
  for (; fragment != fragments.end() && before(*fragment) < range.end; ++fragment) {
    const auto next = fragment + 1;
    const uint64_t first = before(*fragment);
    const uint64_t fragment_end = next == fragments.end() ? total : before(*next);
    const uint64_t begin = fragment->unit.RoundDown(std::max(range.begin, first) - first);
    const uint64_t end = range.end >= fragment_end ? fragment_end - first
                                                   : fragment->unit.RoundDown(range.end - first);
    if (begin < end) visit(*fragment, begin, end - begin);
  }
}

// The address of the fragment's element `first` in the param: in the params half of a staging slot
// (`staged`), or in the param itself if `staged` is NULL.
inline std::byte* ParamAt(const Fragment& fragment, uint64_t first, uint64_t element_bytes,
                          std::byte* staged, void* param) {
  if (staged != nullptr) return staged + fragment.param_offset + first * element_bytes;
  return static_cast<std::byte*>(param) + (fragment.begin + first) * element_bytes;
}

// Whether gradients can be offloaded, so that a step may find them on the host.
bool HostMayHoldGrads(const StateShape& shape);

ChunkTable CutChunks(const ParamTable& table, const StateShape& shape, const Residence& residence);

// Whether two executors take chunks from one queue.
inline bool SharesChunks(const StateShape& shape) {
  return shape.options.cpu_updates && shape.options.streams_state;
}
// If two executors share the chunks, a chunk has at most 1 / kChunksAhead of the elements that are
// left. Near the end of a step both executors still have chunks that they have taken ahead, by
// default 8 and 3: about half of what is left.
inline constexpr uint64_t kChunksAhead = 24;
// The least elements of such a chunk: smaller chunks would not be worth the calls.
inline uint64_t SmallestChunkElements(const StateShape& shape) {
  return std::min(shape.options.chunk_elements,
                  std::max<uint64_t>(shape.options.chunk_elements / 16, 1024));
}
// At most this number of chunks are not full: 24 * ln 16 while chunks become smaller, then 24 of
// the smallest size.
inline constexpr uint64_t kSmallChunksMost = 96;

// An upper bound of the number of chunks: their number when all state is on the host.
inline uint64_t ChunksMost(const StateShape& shape) {
  if (shape.options.one_chunk()) return 1;
  const uint64_t full = shape.element_count / shape.options.chunk_elements + 1;
  const uint64_t most = !SharesChunks(shape)
                            ? full
                            : std::min(full + kSmallChunksMost,
                                       shape.element_count / SmallestChunkElements(shape) + 1);
  // Two neighbours together have at least the elements of a full chunk: the second one begins with
  // a unit that did not fit into the first.
  return shape.largest_unit == 1 ? most : 2 * most;
}

}  // namespace hybridopt
