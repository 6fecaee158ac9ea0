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
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "machine/lanes.h"
#include "state/residence.h"

namespace hybridopt {

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

struct ChunkTable {
  std::vector<Fragment> fragments;
  std::vector<Chunk> chunks;
  std::vector<uint32_t> last_chunk_end;  // per param: chunks that hold elements of it end here
  uint64_t slot_grad_bytes = 0;
  uint64_t slot_param_bytes = 0;
  uint64_t grads_down_bytes = 0;
  uint64_t params_up_bytes = 0;

  std::span<const Fragment> FragmentsOf(const Chunk& chunk) const {
    return std::span(fragments).subspan(chunk.first_fragment, chunk.fragment_count);
  }
  // Bytes of the table itself where all state is on the host, which takes most.
  static uint64_t BytesMax(const StateShape& shape);
};

ChunkTable CutChunks(const ParamTable& table, const StateShape& shape, const Residence& residence);

// What the pipeline's lanes are made from.
LaneSizes LaneSizesOf(const StateShape& shape, const Residence& residence,
                      const ChunkTable& chunks);

}  // namespace hybridopt
