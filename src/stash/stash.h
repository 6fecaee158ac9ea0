// Stash: activations that go to host memory in the forward pass and come back in the backward pass.
//
//   caller's stream   ..layer 1 | ready |  ..layer 3 | release 1 |      ...      | pop 1 | ..layer
//   1 down stream                   | copy 1 | down | up stream prefetch 1  | copy 1 | up |
//
// Every call records events and waits for events in the order of the calls. By these events a copy
// waits for the work that has written or used its memory, and work that uses memory waits for the
// copy of this memory. So no stream waits for work that is queued later, and no call waits on the
// host.
//
// A push for which there is no room is refused with ticket 0; no other ticket's data is ever
// evicted.
//
// When a ticket has ended, a copy to the device may still be reading its slabs. A later push gets
// these slabs when that copy has ended, or else the down stream first waits for that copy. The
// caller cannot observe the difference.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

#include "machine/context.h"
#include "stash/slab_pool.h"
#include "stash/ticket_table.h"
#include "stash/timings.h"

namespace hybridopt {

class Stash {
 public:
  static Result<offload_stash_plan_t> Plan(const Context& context,
                                           const offload_stash_options_t& options);
  static Result<std::shared_ptr<Stash>> Create(std::shared_ptr<Context> context,
                                               const offload_stash_options_t& options);
  ~Stash();

  // See offload.h. Ticket 0 means that the stash has refused the push.
  Result<offload_stash_ticket_t> Push(uint32_t lane, const void* data, uint64_t bytes,
                                      StreamHandle stream);
  Status Release(offload_stash_ticket_t ticket, StreamHandle stream);
  Status Prefetch(offload_stash_ticket_t ticket, void* destination, uint64_t destination_bytes,
                  StreamHandle stream);
  Status Pop(offload_stash_ticket_t ticket, StreamHandle stream, uint32_t flags);
  Status Drop(offload_stash_ticket_t ticket, StreamHandle stream);
  Result<offload_stash_mark_t> Mark(uint32_t lane);
  Status Rollback(offload_stash_mark_t mark, StreamHandle stream);
  Status Wait(offload_stash_ticket_t ticket, int64_t timeout_ns);
  Result<offload_stash_stats_t> Stats();

  // Makes all Waits return; waits device_timeout_ns at most for each stream's copies.
  Status Close();

 private:
  struct Settings {
    SlabSizes slabs;
    uint64_t min_bytes = 0;
    uint32_t tickets_max = 0;
    uint32_t lanes = 0;
  };
  static Result<Settings> Check(const offload_stash_options_t& options);
  static uint64_t ScratchBytes(const Settings& settings);
  static offload_stash_plan_t PlanOf(const Context& context, const Settings& settings);

  Stash(std::shared_ptr<Context> context, const Settings& settings);
  Status CreateAll();

  Device& device() { return context_->device(); }
  Status CheckPoison() const;
  Status CheckUsable(StreamHandle stream);
  Status Poison(Status cause);
  bool HasRoom(uint64_t bytes) const;
  Status Reclaim(uint32_t slabs);
  Status QueueDown(StashEntry& entry, const void* data);
  Status QueueUp(StashEntry& entry, void* destination, StreamHandle caller);
  void End(StashEntry& entry);
  Status DropEntry(StashEntry& entry, StreamHandle stream);
  Status EventsToAwait(offload_stash_ticket_t ticket, EventHandle (&events)[2]);

  const std::shared_ptr<Context> context_;
  const Settings settings_;
  const bool queues_;  // false on the host device: it copies at once
  std::atomic<bool> closing_ = false;
  std::mutex mutex_;  // guards all below
  SlabPool slabs_;
  TicketTable tickets_;
  Timings timings_;
  StreamHandle down_ = nullptr;
  StreamHandle up_ = nullptr;
  EventHandle ready_ = nullptr;  // recorded after the caller's work that a copy waits for
  EventHandle all_[2] = {};      // recorded after all copies of each direction
  Status failure_;               // of a copy: the stash is poisoned
  uint64_t used_slabs_ = 0;
  offload_stash_stats_t counts_{};
};

}  // namespace hybridopt
