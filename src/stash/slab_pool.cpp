#include "stash/slab_pool.h"

#include <algorithm>

#include "base/check.h"
#include "base/system.h"

namespace hybridopt {

Result<SlabPool> SlabPool::Create(Context& context, const SlabSizes& sizes) {
  SlabPool pool;
  pool.sizes_ = sizes;
  HYBRIDOPT_ASSIGN(pool.room_, PinnedRoom::Reserve(context, sizes.bytes(), "budget_bytes"));
  Status mapped = pool.Map(context, false);
  if (pool.room_.pieces().empty() && mapped.code() == OFFLOAD_OUT_OF_HOST_MEMORY &&
      context.allow_pageable())
    mapped = pool.Map(context, true);
  if (pool.room_.pieces().empty() || mapped.code() != OFFLOAD_OUT_OF_HOST_MEMORY)
    HYBRIDOPT_TRY(mapped);
  for (const PinnedArena& piece : pool.room_.pieces())
    context.device().DiscardHost(piece.data(), piece.bytes());
  pool.room_.Settle();
  if (pool.room_.pageable())
    context.Note("a stash is pageable: the system did not pin it");
  else if (pool.bytes() < sizes.bytes() && !context.device().unified())
    context.Note("a stash has fewer slabs than asked for: the system did not pin more");
  pool.next_.resize(pool.sizes_.slab_count);
  for (uint32_t slab = 0; slab < pool.sizes_.slab_count; ++slab) pool.next_[slab] = slab + 1;
  pool.free_ = {0, pool.sizes_.slab_count - 1, pool.sizes_.slab_count};
  return pool;
}

// Maps pieces until the pool has all its slabs, or until the system refuses more. In that case the
// pool keeps the slabs that it has by then.
Status SlabPool::Map(Context& context, bool allow_pageable) {
  const uint64_t piece_bytes = context.device().pin_piece_bytes();
  piece_slabs_ = static_cast<uint32_t>(std::max<uint64_t>(1, piece_bytes / sizes_.slab_bytes));
  uint32_t mapped = 0;
  while (mapped < sizes_.slab_count) {
    const uint32_t wanted = std::min(piece_slabs_, sizes_.slab_count - mapped);
    uint32_t slabs = wanted;
    const Status added = room_.Add(sizes_.slab_bytes, &slabs, 1, allow_pageable);
    if (added.ok()) mapped += slabs;
    if (added.ok() && slabs == wanted) continue;
    if (mapped > 0) sizes_.slab_count = mapped;
    return added;
  }
  return {};
}

SlabChain SlabPool::Take(uint32_t count) {
  HYBRIDOPT_CHECK(count > 0 && count <= free_.count);
  SlabChain taken{free_.first, free_.first, count};
  for (uint32_t i = 1; i < count; ++i) taken.last = next_[taken.last];
  free_.count -= count;
  if (free_.count > 0) free_.first = next_[taken.last];
  return taken;
}

void SlabPool::Give(const SlabChain& chain) {
  if (chain.count == 0) return;
  if (free_.count == 0) {
    free_ = chain;
    return;
  }
  next_[chain.last] = free_.first;
  free_.first = chain.first;
  free_.count += chain.count;
}

Status SlabPool::ForEachRun(const SlabChain& chain, uint64_t bytes, Visit visit) const {
  uint64_t offset = 0;
  for (uint32_t slab = chain.first; offset < bytes; slab = next_[slab]) {
    std::byte* const begin = data(slab);
    uint64_t run = sizes_.slab_bytes;
    while (offset + run < bytes && IsNeighbour(slab)) {
      run += sizes_.slab_bytes;
      slab = next_[slab];
    }
    run = std::min(run, bytes - offset);
    HYBRIDOPT_TRY(visit(begin, offset, run));
    offset += run;
  }
  return {};
}

}  // namespace hybridopt
