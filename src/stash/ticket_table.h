// TicketTable: the tickets of a stash. A ticket is a number that names an entry and how often it
// has been used, so that a ticket that has ended is refused. So is one of another stash, unless
// that one was made exactly 255 stashes earlier or later:
//
//   63      56 55                    16 15        0
//   |  stash   |      generation      |   entry    |      ticket
//   |  stash   |  lane (12)  |  pushes of the lane |      mark
//
// An entry is free, live, or ending: then its ticket is no good any more, but the device may still
// copy from or to its slabs. All entries are made at the beginning.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "device/device.h"
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
  uint64_t generation_ = 0;
  uint64_t order_ = 0;  // among the pushes of its lane, from 1
};

class TicketTable {
 public:
  static constexpr uint32_t kEntriesMax = 1 << 16;
  static constexpr uint32_t kLanesMax = 1 << 12;

  TicketTable() = default;
  // `stash` tells the tickets of this stash from those of others.
  TicketTable(uint32_t entries, uint32_t lanes, uint64_t stash);

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
    uint64_t pushes = 0;
    uint32_t last = kNone;
  };

  uint32_t IndexOf(const StashEntry& entry) const {
    return static_cast<uint32_t>(&entry - entries_.data());
  }

  uint64_t stash_ = 0;
  std::vector<StashEntry> entries_;
  std::vector<Lane> lanes_;
  uint32_t live_ = 0;
  uint32_t free_ = kNone;
  uint32_t first_ending_ = kNone;
  uint32_t last_ending_ = kNone;
};

}  // namespace hybridopt
