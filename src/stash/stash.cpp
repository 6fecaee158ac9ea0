#include "stash/stash.h"

#include <algorithm>
#include <utility>

#include "base/system.h"

namespace hybridopt {
namespace {

constexpr uint64_t kSlabUnitBytes = 4096;
constexpr uint64_t kDefaultSlabBytes = uint64_t{4} << 20;
constexpr uint64_t kDefaultMinBytes = uint64_t{1} << 20;
constexpr uint32_t kDefaultTicketsMax = 4096;
// How often a Wait checks whether the stash is being destroyed.
constexpr int64_t kLookNs = 20'000'000;

unsigned long long ForText(uint64_t value) { return value; }

uint64_t SlabsOf(uint64_t bytes, uint64_t slab_bytes) { return (bytes - 1) / slab_bytes + 1; }

}  // namespace

// ------------------------------------------------------------------------------ memory and plan --

Result<Stash::Settings> Stash::Check(const offload_stash_options_t& options) {
  Settings settings;
  settings.lanes = options.lanes != 0 ? options.lanes : 1;
  if (settings.lanes > TicketTable::kLanesMax)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.lanes is %u, expected at most %u: one for each micro-batch that "
                         "is under way at the same time",
                         options.lanes, TicketTable::kLanesMax);
  settings.slabs.slab_bytes = options.slab_bytes != 0 ? options.slab_bytes : kDefaultSlabBytes;
  if (settings.slabs.slab_bytes % kSlabUnitBytes != 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.slab_bytes is %llu, expected a multiple of %llu (0 = 4 MiB)",
                         ForText(options.slab_bytes), ForText(kSlabUnitBytes));
  if (options.budget_bytes == 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.budget_bytes is 0, expected the bytes of host memory that the "
                         "stash may take");
  const uint64_t slabs = SlabsOf(options.budget_bytes, settings.slabs.slab_bytes);
  constexpr uint64_t kBytesMax = uint64_t{1} << 56;
  if (slabs >= UINT32_MAX || options.budget_bytes > kBytesMax ||
      settings.slabs.slab_bytes > kBytesMax)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.budget_bytes is %llu and options.slab_bytes %llu, expected less "
                         "than 2^32 slabs and at most 2^56 bytes",
                         ForText(options.budget_bytes), ForText(settings.slabs.slab_bytes));
  settings.slabs.slab_count = static_cast<uint32_t>(slabs);
  settings.min_bytes = options.min_bytes != 0 ? options.min_bytes : kDefaultMinBytes;
  settings.tickets_max = options.tickets_max != 0
                             ? options.tickets_max
                             : std::min(settings.slabs.slab_count, kDefaultTicketsMax);
  if (settings.tickets_max > TicketTable::kEntriesMax)
    return Status::Error(
        OFFLOAD_INVALID_ARGUMENT,
        "options.tickets_max is %u, expected at most %u (0 = one for each slab, at "
        "most %u)",
        options.tickets_max, TicketTable::kEntriesMax, kDefaultTicketsMax);
  if (options.reserved != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "options.reserved is %u, expected 0",
                         options.reserved);
  return settings;
}

uint64_t Stash::ScratchBytes(const Settings& settings) {
  return sizeof(Stash) + SlabPool::ScratchBytes(settings.slabs) +
         TicketTable::ScratchBytes(settings.tickets_max, settings.lanes) + Timings::ScratchBytes();
}

Result<offload_stash_plan_t> Stash::Plan(const Context& context,
                                         const offload_stash_options_t& options) {
  HYBRIDOPT_ASSIGN(const Settings settings, Check(options));
  return PlanOf(context, settings);
}

offload_stash_plan_t Stash::PlanOf(const Context& context, const Settings& settings) {
  offload_stash_plan_t plan{};
  plan.tickets_max = settings.tickets_max;
  plan.slab_bytes = settings.slabs.slab_bytes;
  plan.slab_count = settings.slabs.slab_count;
  plan.slabs_bytes = settings.slabs.bytes();
  plan.scratch_bytes = ScratchBytes(settings);
  plan.host_bytes = plan.slabs_bytes + plan.scratch_bytes;
  plan.host_available_bytes = system::AvailableBytes();
  plan.pinned_bytes_left = context.PinnedBytesLeft();
  const bool pins = !context.device().unified();
  plan.fits = plan.host_bytes <= plan.host_available_bytes &&
                      (!pins || plan.slabs_bytes <= plan.pinned_bytes_left)
                  ? 1
                  : 0;
  return plan;
}

// ---------------------------------------------------------------------------- making and ending --

Result<std::shared_ptr<Stash>> Stash::Create(std::shared_ptr<Context> context,
                                             const offload_stash_options_t& options) {
  HYBRIDOPT_ASSIGN(const Settings settings, Check(options));
  const offload_stash_plan_t plan = PlanOf(*context, settings);
  if (plan.host_bytes > plan.host_available_bytes)
    return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY,
                         "options.budget_bytes is %llu, for which the stash needs %llu bytes of "
                         "host memory, but %llu are available to this process (cgroup limit "
                         "counted); make it smaller, or free host memory",
                         ForText(options.budget_bytes), ForText(plan.host_bytes),
                         ForText(plan.host_available_bytes));
  std::shared_ptr<Stash> stash(new Stash(std::move(context), settings));
  HYBRIDOPT_TRY(stash->CreateAll());
  return stash;
}

Stash::Stash(std::shared_ptr<Context> context, const Settings& settings)
    : context_(std::move(context)), settings_(settings), queues_(!context_->device().unified()) {
  context_->StashCreated();
}

Status Stash::CreateAll() {
  tickets_ = TicketTable(settings_.tickets_max, settings_.lanes);
  HYBRIDOPT_TRY(tickets_.ReserveNumber());
  HYBRIDOPT_ASSIGN(slabs_, SlabPool::Create(*context_, settings_.slabs));
  if (!queues_) return {};
  HYBRIDOPT_TRY(timings_.Create(device(), context_->link()));
  HYBRIDOPT_ASSIGN(ready_, device().CreateEvent("stash: caller ready"));
  for (EventHandle& event : all_) {
    HYBRIDOPT_ASSIGN(event, device().CreateEvent("stash: all copies"));
  }
  for (StashEntry& entry : tickets_.entries()) {
    HYBRIDOPT_ASSIGN(entry.down, device().CreateEvent("stash: down"));
    HYBRIDOPT_ASSIGN(entry.up, device().CreateEvent("stash: up"));
  }
  HYBRIDOPT_ASSIGN(down_, device().CreateStream("stash down"));
  HYBRIDOPT_ASSIGN(up_, device().CreateStream("stash up"));
  return {};
}

Status Stash::Close() {
  closing_ = true;
  for (StreamHandle stream : {down_, up_})
    if (stream != nullptr) (void)device().Synchronize(stream, context_->device_timeout_ns());
  return {};
}

// Streams are destroyed first: they may still copy from and to the slabs.
Stash::~Stash() {
  for (StreamHandle stream : {down_, up_}) device().AbandonStream(stream);
  const auto destroy = [this](EventHandle event) {
    if (event != nullptr) device().DestroyEvent(event);
  };
  for (const StashEntry& entry : tickets_.entries()) {
    destroy(entry.down);
    destroy(entry.up);
  }
  for (EventHandle event : {ready_, all_[0], all_[1]}) destroy(event);
  context_->StashDestroyed();
}

Status Stash::CheckPoison() const {
  if (failure_.ok()) return {};
  return Status::Error(OFFLOAD_POISONED, "an earlier copy of this stash failed, destroy it: %s",
                       failure_.message().c_str());
}

Status Stash::CheckUsable(StreamHandle stream) {
  HYBRIDOPT_TRY(CheckPoison());
  return device().CheckStream(stream);
}

// For a call that has queued only a part of its work: if `cause` is a failure, the stash is
// poisoned.
Status Stash::Poison(Status cause) {
  if (!cause.ok()) failure_ = cause;
  return cause;
}

// -------------------------------------------------------------------------------------- forward --

bool Stash::HasRoom(uint64_t bytes) const {
  const uint64_t slabs = slabs_.bytes() / slabs_.slab_bytes();
  return tickets_.not_live() > 0 && SlabsOf(bytes, slabs_.slab_bytes()) <= slabs - used_slabs_;
}

Result<offload_stash_ticket_t> Stash::Push(uint32_t lane, const void* data, uint64_t bytes,
                                           StreamHandle stream) {
  std::lock_guard lock(mutex_);
  HYBRIDOPT_TRY(CheckUsable(stream));
  HYBRIDOPT_TRY(tickets_.CheckLane(lane));
  if (bytes < settings_.min_bytes) {
    counts_.small_pushes += 1;
    return offload_stash_ticket_t{0};
  }
  HYBRIDOPT_TRY(device().CheckRange(data, bytes));
  if (!HasRoom(bytes)) {
    counts_.refused_pushes += 1;
    counts_.refused_bytes += bytes;
    return offload_stash_ticket_t{0};
  }
  HYBRIDOPT_TRY(tickets_.ReserveNumber());
  if (queues_) HYBRIDOPT_TRY(device().Record(ready_, stream));
  const auto slabs = static_cast<uint32_t>(SlabsOf(bytes, slabs_.slab_bytes()));
  HYBRIDOPT_TRY(Poison(Reclaim(slabs)));
  StashEntry& entry = tickets_.Begin(lane);
  entry.slabs = slabs_.Take(slabs);
  entry.bytes = bytes;
  HYBRIDOPT_TRY(Poison(QueueDown(entry, data)));
  used_slabs_ += slabs;
  counts_.used_bytes_max = std::max(counts_.used_bytes_max, used_slabs_ * slabs_.slab_bytes());
  counts_.held_bytes += bytes;
  counts_.pushes += 1;
  counts_.pushed_bytes += bytes;
  return tickets_.TicketOf(entry);
}

// Gives back the slabs of ended tickets whose copies have ended. If `slabs` slabs and an entry are
// not free then, also gives back slabs of other ended tickets; the down stream waits for their
// copies.
Status Stash::Reclaim(uint32_t slabs) {
  if (queues_) HYBRIDOPT_TRY(timings_.Collect());
  while (StashEntry* const ending = tickets_.FirstEnding()) {
    if (queues_) {
      HYBRIDOPT_ASSIGN(const bool done,
                       device().Reached(ending->went_up ? ending->up : ending->down));
      const bool needed = slabs_.free_slabs() < slabs || !tickets_.has_free();
      if (!done && !needed) return {};
      if (done)
        HYBRIDOPT_TRY(slabs_.ForEachRun(ending->slabs, ending->bytes,
                                        [this](std::byte* run, uint64_t, uint64_t bytes) -> Status {
                                          device().DiscardHost(run, bytes);
                                          return {};
                                        }));
      else if (ending->went_up)
        HYBRIDOPT_TRY(device().StreamWait(down_, ending->up));
    }
    slabs_.Give(ending->slabs);
    tickets_.FreeFirstEnding();
  }
  return {};
}

Status Stash::QueueDown(StashEntry& entry, const void* data) {
  if (queues_) HYBRIDOPT_TRY(device().StreamWait(down_, ready_));
  HYBRIDOPT_TRY(timings_.Begin(Interval::kDown, entry.bytes, down_));
  const auto* const from = static_cast<const std::byte*>(data);
  HYBRIDOPT_TRY(slabs_.ForEachRun(entry.slabs, entry.bytes,
                                  [&](std::byte* run, uint64_t offset, uint64_t bytes) {
                                    return device().CopyToHost(down_, run, from + offset, bytes);
                                  }));
  HYBRIDOPT_TRY(timings_.End(down_));
  return queues_ ? device().Record(entry.down, down_) : Status();
}

Status Stash::Release(offload_stash_ticket_t ticket, StreamHandle stream) {
  std::lock_guard lock(mutex_);
  HYBRIDOPT_TRY(CheckUsable(stream));
  HYBRIDOPT_ASSIGN(const StashEntry* entry, tickets_.Find(ticket));
  if (!queues_) return {};
  HYBRIDOPT_TRY(timings_.Begin(Interval::kReleaseWait, 0, stream));
  HYBRIDOPT_TRY(device().StreamWait(stream, entry->down));
  return timings_.End(stream);
}

// ------------------------------------------------------------------------------------- backward --

Status Stash::Prefetch(offload_stash_ticket_t ticket, void* destination, uint64_t destination_bytes,
                       StreamHandle stream) {
  std::lock_guard lock(mutex_);
  HYBRIDOPT_TRY(CheckUsable(stream));
  HYBRIDOPT_ASSIGN(StashEntry * entry, tickets_.Find(ticket));
  if (destination_bytes < entry->bytes)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "destination_bytes is %llu, expected at least the %llu bytes that were "
                         "pushed",
                         ForText(destination_bytes), ForText(entry->bytes));
  HYBRIDOPT_TRY(device().CheckRange(destination, entry->bytes));
  if (entry->prefetched)
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "ticket 0x%llx has been prefetched already; pop it first, with "
                         "OFFLOAD_STASH_KEEP if it is to be prefetched again",
                         ForText(ticket));
  if (queues_) HYBRIDOPT_TRY(device().Record(ready_, stream));
  HYBRIDOPT_TRY(Poison(QueueUp(*entry, destination, stream)));
  entry->prefetched = entry->went_up = true;
  counts_.prefetches += 1;
  counts_.prefetched_bytes += entry->bytes;
  return {};
}

Status Stash::QueueUp(StashEntry& entry, void* destination, StreamHandle caller) {
  if (queues_) {
    HYBRIDOPT_TRY(device().StreamWait(up_, ready_));
    HYBRIDOPT_TRY(device().StreamWait(up_, entry.down));
  }
  HYBRIDOPT_TRY(timings_.BeginUp(entry.bytes, up_, caller, entry.down));
  auto* const to = static_cast<std::byte*>(destination);
  HYBRIDOPT_TRY(slabs_.ForEachRun(entry.slabs, entry.bytes,
                                  [&](const std::byte* run, uint64_t offset, uint64_t bytes) {
                                    return device().CopyToDevice(up_, to + offset, run, bytes);
                                  }));
  HYBRIDOPT_TRY(timings_.End(up_));
  return queues_ ? device().Record(entry.up, up_) : Status();
}

Status Stash::Pop(offload_stash_ticket_t ticket, StreamHandle stream, uint32_t flags) {
  if ((flags & ~uint32_t{OFFLOAD_STASH_KEEP}) != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "flags is 0x%x, known to this call is 0x%x", flags,
                         static_cast<unsigned>(OFFLOAD_STASH_KEEP));
  std::lock_guard lock(mutex_);
  HYBRIDOPT_TRY(CheckUsable(stream));
  HYBRIDOPT_ASSIGN(StashEntry * entry, tickets_.Find(ticket));
  if (!entry->prefetched)
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "ticket 0x%llx has not been prefetched, so its bytes are nowhere on the "
                         "device; call offload_stash_prefetch with a destination first",
                         ForText(ticket));
  if (queues_) {
    HYBRIDOPT_TRY(timings_.Begin(Interval::kPopWait, 0, stream));
    HYBRIDOPT_TRY(device().StreamWait(stream, entry->up));
    HYBRIDOPT_TRY(timings_.End(stream));
  }
  entry->prefetched = false;
  counts_.pops += 1;
  if ((flags & OFFLOAD_STASH_KEEP) == 0) End(*entry);
  return {};
}

void Stash::End(StashEntry& entry) {
  used_slabs_ -= entry.slabs.count;
  counts_.held_bytes -= entry.bytes;
  tickets_.End(entry);
}

// ------------------------------------------------------------------------ dropped without a pop --

Status Stash::Drop(offload_stash_ticket_t ticket, StreamHandle stream) {
  std::lock_guard lock(mutex_);
  HYBRIDOPT_TRY(CheckUsable(stream));
  HYBRIDOPT_ASSIGN(StashEntry * entry, tickets_.Find(ticket));
  return DropEntry(*entry, stream);
}

// It is enough to wait for the copy to the device: that copy itself waits for the copy to the host.
Status Stash::DropEntry(StashEntry& entry, StreamHandle stream) {
  if (queues_) HYBRIDOPT_TRY(device().StreamWait(stream, entry.went_up ? entry.up : entry.down));
  counts_.drops += 1;
  End(entry);
  return {};
}

Result<offload_stash_mark_t> Stash::Mark(uint32_t lane) {
  std::lock_guard lock(mutex_);
  HYBRIDOPT_TRY(tickets_.CheckLane(lane));
  return tickets_.Mark(lane);
}

Status Stash::Rollback(offload_stash_mark_t mark, StreamHandle stream) {
  std::lock_guard lock(mutex_);
  HYBRIDOPT_TRY(CheckUsable(stream));
  HYBRIDOPT_TRY(tickets_.CheckMark(mark));
  while (StashEntry* const entry = tickets_.LastSince(mark))
    HYBRIDOPT_TRY(DropEntry(*entry, stream));
  return {};
}

// ------------------------------------------------------------------------------------- the host --

// The events that are recorded after the ticket's copies. If there is only one event, both entries
// are that event.
Status Stash::EventsToAwait(offload_stash_ticket_t ticket, EventHandle (&events)[2]) {
  std::lock_guard lock(mutex_);
  HYBRIDOPT_TRY(CheckPoison());
  if (ticket != 0) {
    HYBRIDOPT_ASSIGN(const StashEntry* entry, tickets_.Find(ticket));
    events[0] = events[1] = entry->went_up ? entry->up : entry->down;
    return {};
  }
  if (!queues_) return {};
  HYBRIDOPT_TRY(device().Record(all_[0], down_));
  HYBRIDOPT_TRY(device().Record(all_[1], up_));
  events[0] = all_[0];
  events[1] = all_[1];
  return {};
}

Status Stash::Wait(offload_stash_ticket_t ticket, int64_t timeout_ns) {
  EventHandle events[2] = {};
  HYBRIDOPT_TRY(EventsToAwait(ticket, events));
  if (!queues_) return {};
  const int64_t begin_ns = system::NowNs();
  for (EventHandle event : events) {
    while (true) {
      const int64_t left_ns = timeout_ns < 0
                                  ? kLookNs
                                  : std::max<int64_t>(0, timeout_ns - (system::NowNs() - begin_ns));
      const Status status = device().Wait(event, std::min(left_ns, kLookNs));
      if (status.ok()) break;
      if (status.code() != OFFLOAD_TIMED_OUT) return status;
      if (closing_)
        return Status::Error(OFFLOAD_INVALID_STATE, "another thread destroys the stash");
      if (left_ns <= kLookNs && timeout_ns >= 0)
        return Status::Error(OFFLOAD_TIMED_OUT,
                             "copies of the stash have not ended within %lld ns; they go on, wait "
                             "again",
                             static_cast<long long>(timeout_ns));
    }
  }
  return {};
}

Result<offload_stash_stats_t> Stash::Stats() {
  std::lock_guard lock(mutex_);
  if (queues_ && failure_.ok()) (void)timings_.Collect();  // other calls report a failure
  offload_stash_stats_t stats = counts_;
  stats.tickets = tickets_.live();
  stats.slabs_bytes = slabs_.bytes();
  stats.pinned_bytes = slabs_.pinned_bytes();
  stats.used_bytes = used_slabs_ * slabs_.slab_bytes();
  stats.down_seconds = timings_.total(Interval::kDown).seconds;
  stats.down_timed_bytes = timings_.total(Interval::kDown).bytes;
  stats.up_seconds = timings_.total(Interval::kUp).seconds;
  stats.up_timed_bytes = timings_.total(Interval::kUp).bytes;
  stats.release_wait_seconds = timings_.total(Interval::kReleaseWait).seconds;
  stats.pop_wait_seconds = timings_.total(Interval::kPopWait).seconds;
  stats.ahead_bytes = timings_.ahead_bytes();
  return stats;
}

}  // namespace hybridopt
