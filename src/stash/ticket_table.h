// TicketTable: the tickets of a stash. A ticket names an entry and the push that has taken it, by a
// number that no other push of the process has (ticket_numbers.h): a ticket that has ended is
// refused, and so is one of another stash. A mark names a lane and the last push before it:
//
//   63                      16 15        0
//   |          push          |   entry    |      ticket
//   |  lane (16)  |         push          |      mark
//
// An entry is free, live, or ending: then its ticket is no good any more, but the device may still
// copy from or to its slabs. All entries are made at the beginning.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "device/device.h"
#include "machine/ticket_numbers.h"
#include "stash/slab_pool.h"

namespace hybridopt {

struct StashEntry {
  SlabChain slabs;
  uint64_t bytes = 0;
  EventHandle down = nullptr;  // recorded behind the copy to the host
  EventHandle up = nullptr;    // recorded behind the copies to the device
  bool went_up = false;        // up has been recorded for this ticket
  bool prefetched = false;     // and not popped since

 private:
  friend class TicketTable;
  bool live_ = false;
  uint32_t lane_ = 0;
  uint32_t previous_ = 0;  // in its lane, while live
  uint32_t next_ = 0;      // in its lane while live, else among the free or the ending ones
  uint64_t push_ = 0;      // that has taken it last: the stash's first is 1
};

class TicketTable {
 public:
  static constexpr uint32_t kEntriesMax = 1 << 16;
  static constexpr uint32_t kLanesMax = 1 << 12;

  TicketTable() = default;
  TicketTable(uint32_t entries, uint32_t lanes);
  // To be called, and to succeed, before the first Mark and before each Begin.
  Status ReserveNumber() { return numbers_.Reserve(pushes_ + 1); }

  static uint64_t ScratchBytes(uint32_t entries, uint32_t lanes) {
    return entries * sizeof(StashEntry) + lanes * sizeof(Lane);
  }

  std::vector<StashEntry>& entries() { return entries_; }
  uint32_t live() const { return live_; }
  // Entries that no live ticket has: free ones, and ending ones, which can be freed.
  uint32_t not_live() const { return static_cast<uint32_t>(entries_.size()) - live_; }
  bool has_free() const { return free_ != kNone; }

  Status CheckLane(uint32_t lane) const;
  Result<StashEntry*> Find(uint64_t ticket);
  uint64_t TicketOf(const StashEntry& entry) const;

  // has_free() is true.
  StashEntry& Begin(uint32_t lane);
  void End(StashEntry& entry);
  StashEntry* FirstEnding();  // the one that has ended first; NULL: none
  void FreeFirstEnding();

  uint64_t Mark(uint32_t lane) const;
  Status CheckMark(uint64_t mark) const;
  // The latest live ticket that the mark's lane has got since; NULL: none. The mark is good.
  StashEntry* LastSince(uint64_t mark);

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Lane {
    uint32_t last = kNone;  // of its live entries
  };

  uint32_t IndexOf(const StashEntry& entry) const {
    return static_cast<uint32_t>(&entry - entries_.data());
  }

  TicketNumbers numbers_;
  uint64_t pushes_ = 0;
  std::vector<StashEntry> entries_;
  std::vector<Lane> lanes_;
  uint32_t live_ = 0;
  uint32_t free_ = kNone;
  uint32_t first_ending_ = kNone;
  uint32_t last_ending_ = kNone;
};

}  // namespace hybridopt
