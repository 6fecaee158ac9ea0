// The model of random_calls_test.cpp: contexts, optimizers, params and stashes as they must be. The
// test updates it with each call and compares it with what the library reports.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "../trainer.h"
#include "offload.h"

namespace hybridopt::fault::random_calls {

constexpr uint64_t kArrayBytes = 4096;
constexpr uint32_t kGradArrays = 6;     // per context
constexpr uint32_t kDataArrays = 8;     // per optimizer: two optimizers may not share params
constexpr uint64_t kQueuedCalls = 256;  // at most
constexpr uint64_t kQueuedSteps = 8;

struct ContextModel {
  int32_t kind;
  uint32_t optimizers = 0, stashes = 0;
  bool doomed = false;  // a gradient was freed while it was bound: steps may fail
  std::vector<void*> grads;
  std::vector<offload_stream_t> streams;
};

// The gradient that the host has of a param.
enum class Held { kNone, kStored, kAccumulated };

// Where the parts of one param are.
struct ParamModel {
  uint64_t count = 0;
  int32_t dtype = 0, grad_dtype = 0;
  void* data = nullptr;
  const void* grad = nullptr;
  bool params_out = false, states_out = false;
  Held held = Held::kNone;

  uint64_t param_bytes() const { return count * ElementBytes(dtype); }
  uint64_t grad_bytes() const { return count * ElementBytes(grad_dtype); }
  uint64_t held_bytes() const {
    if (held == Held::kNone) return 0;
    return held == Held::kStored ? grad_bytes() : count * 4;
  }
};

struct OptimizerModel {
  offload_context_t context;
  int32_t algorithm;
  uint32_t movable = 0;
  uint32_t groups = 0;
  std::vector<ParamModel> params;
  bool committed = false;
  uint64_t steps = 0;  // queued since create
  // An upper bound of the counts of applied steps. A load can increase it, because it sets the
  // counts of another optimizer.
  uint64_t steps_counted_max = 0;
  std::string checkpoint;  // its last save's
  bool saving = false;     // a save has been queued since all work was last known to be done
  // Queued since all work was last known to be done: an upper bound of what is queued now.
  uint64_t calls_queued_max = 0, steps_queued_max = 0;
  uint64_t device_state_bytes = 0;  // as in the stats after commit
  std::vector<void*> data;
  std::vector<offload_ticket_t> tickets;

  bool all_states_out() const {
    return std::all_of(params.begin(), params.end(), [](const auto& p) { return p.states_out; });
  }
  void AllSeenDone() {
    calls_queued_max = steps_queued_max = 0;
    saving = false;
  }
};

struct StashModel {
  struct Ticket {
    offload_stash_ticket_t ticket;
    uint32_t lane;
    uint64_t order;  // among the pushes of its lane
    std::vector<unsigned char> bytes;
    void* destination = nullptr;  // of a prefetch that has not been popped
  };
  struct Mark {
    offload_stash_mark_t mark;
    uint32_t lane;
    uint64_t pushes;  // of the lane before it
  };
  using Tickets = std::vector<Ticket>;

  offload_context_t context;
  uint64_t slab_bytes = 0, slab_count = 0, min_bytes = 0, tickets_max = 0;
  std::vector<uint64_t> lane_pushes;
  std::vector<void*> sources, destinations;
  std::map<void*, std::vector<unsigned char>> contents;  // of the sources; they stay as they are
  Tickets live;
  std::vector<offload_stash_ticket_t> ended;
  std::vector<Mark> marks;
  offload_stash_ticket_t prefetched_last = 0;
  offload_stash_stats_t counts{};

  Tickets::iterator Find(offload_stash_ticket_t ticket) {
    return std::find_if(live.begin(), live.end(),
                        [&](const Ticket& t) { return t.ticket == ticket; });
  }
  void End(Tickets::iterator ticket) {
    ended.push_back(ticket->ticket);
    live.erase(ticket);
  }
  uint64_t used_slabs() const {
    uint64_t slabs = 0;
    for (const Ticket& t : live) slabs += (t.bytes.size() + slab_bytes - 1) / slab_bytes;
    return slabs;
  }
  uint64_t held_bytes() const {
    uint64_t bytes = 0;
    for (const Ticket& t : live) bytes += t.bytes.size();
    return bytes;
  }
  // The content at this address, which is in one of the sources.
  std::vector<unsigned char> ContentAt(const void* data, uint64_t bytes) const {
    const auto& [source, content] = *std::prev(contents.upper_bound(const_cast<void*>(data)));
    const auto offset = static_cast<const char*>(data) - static_cast<const char*>(source);
    return {content.begin() + offset, content.begin() + offset + static_cast<ptrdiff_t>(bytes)};
  }
};

}  // namespace hybridopt::fault::random_calls
