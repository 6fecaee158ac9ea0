// SlabPool: the host memory of a stash, in slabs of equal size. Each push gets a chain of slabs,
// which need not be neighbours, so the memory does not become fragmented.
//
//   piece 0 | slab 0 | slab 1 | slab 2 |   piece 1 | slab 3 | slab 4 | ...
//
// All memory is taken when the pool is made. It is pinned piece by piece, so that the pool gets as
// much memory as the system pins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/function_ref.h"
#include "machine/context.h"
#include "machine/pinned_room.h"

namespace hybridopt {

struct SlabSizes {
  uint64_t slab_bytes = 0;
  uint32_t slab_count = 0;

  uint64_t bytes() const { return slab_bytes * slab_count; }
};

// Slabs that belong together, in order.
struct SlabChain {
  uint32_t first = 0;
  uint32_t last = 0;
  uint32_t count = 0;  // 0: no slab
};

class SlabPool {
 public:
  SlabPool() = default;
  // Tries in turn: all slabs pinned; fewer slabs; all slabs, not pinned, if the context allows
  // that.
  static Result<SlabPool> Create(Context& context, const SlabSizes& sizes);

  static uint64_t ScratchBytes(const SlabSizes& sizes) {
    return sizes.slab_count * sizeof(uint32_t);
  }

  uint64_t slab_bytes() const { return sizes_.slab_bytes; }
  uint64_t bytes() const { return sizes_.bytes(); }
  uint64_t pinned_bytes() const { return room_.pinned_bytes(); }

  uint32_t free_slabs() const { return free_.count; }
  // count is at least 1 and at most free_slabs().
  SlabChain Take(uint32_t count);
  void Give(const SlabChain& chain);

  // Calls visit(data, offset, bytes) for the first `bytes` of the chain, in order. Neighbouring
  // slabs are visited together. `offset` counts from the start of the chain. Stops at the first
  // failure.
  using Visit = FunctionRef<Status(std::byte* data, uint64_t offset, uint64_t bytes)>;
  Status ForEachRun(const SlabChain& chain, uint64_t bytes, Visit visit) const;

 private:
  Status Map(Context& context, bool allow_pageable);
  std::byte* data(uint32_t slab) const {
    return room_.pieces()[slab / piece_slabs_].data() + slab % piece_slabs_ * sizes_.slab_bytes;
  }
  // Whether the next slab of the chain follows this slab directly in memory.
  bool IsNeighbour(uint32_t slab) const {
    return next_[slab] == slab + 1 && next_[slab] % piece_slabs_ != 0;
  }

  SlabSizes sizes_;
  uint32_t piece_slabs_ = 1;
  PinnedRoom room_;             // pieces of piece_slabs_ slabs; the last may have fewer
  std::vector<uint32_t> next_;  // per slab: the next slab of its chain
  // A stack: Take returns the slabs that Give received last. If chains are given back in the
  // reverse order of their pushes, new chains consist of neighbours again.
  SlabChain free_;
};

}  // namespace hybridopt
