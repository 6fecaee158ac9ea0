// TicketTable: the tickets of a stash. A ticket names an entry and a push that has taken this
// entry. No other push of the process has the same number (ticket_numbers.h), so a ticket that has
// ended is refused, and so is a ticket of another stash. A mark names a lane and the last push
// before the mark:
//
//   63                      16 15        0
//   |          push          |   entry    |      ticket
//   |  lane (16)  |         push          |      mark
//
// An entry is free, live, or ending. Ending: its ticket is no longer valid, but the device may
// still copy from or to its slabs. All entries are allocated in the constructor.
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
  EventHandle down = nullptr;  // recorded after the copy to the host
  EventHandle up = nullptr;    // recorded after the copies to the device
  bool went_up = false;        // up has been recorded for this ticket
  bool prefetched = false;     // it was prefetched and has not been popped

 private:
  friend class TicketTable;
  bool live_ = false;
  uint32_t lane_ = 0;
  uint32_t previous_ = 0;  // the previous entry of its lane, while live
  uint32_t next_ = 0;  // while live: the next entry of its lane; else: the next free or ending one
  uint64_t push_ = 0;  // the latest push that has taken it; the stash's first push is 1
};

class TicketTable {
 public:
  static constexpr uint32_t kEntriesMax = 1 << 16;
  static constexpr uint32_t kLanesMax = 1 << 12;

  TicketTable() = default;
  TicketTable(uint32_t entries, uint32_t lanes);
  // Must succeed before the first Mark and before each Begin.
  Status ReserveNumber() { return numbers_.Reserve(pushes_ + 1); }

  static uint64_t ScratchBytes(uint32_t entries, uint32_t lanes) {
    return entries * sizeof(StashEntry) + lanes * sizeof(Lane);
  }

  std::vector<StashEntry>& entries() { return entries_; }
  uint32_t live() const { return live_; }
  // The number of entries without a live ticket: free entries and ending entries.
  uint32_t not_live() const { return static_cast<uint32_t>(entries_.size()) - live_; }
  bool has_free() const { return free_ != kNone; }

  Status CheckLane(uint32_t lane) const;
  Result<StashEntry*> Find(uint64_t ticket);
  uint64_t TicketOf(const StashEntry& entry) const;

  // Requires has_free().
  StashEntry& Begin(uint32_t lane);
  void End(StashEntry& entry);
  StashEntry* FirstEnding();  // the entry that has ended first; NULL: none
  void FreeFirstEnding();

  uint64_t Mark(uint32_t lane) const;
  Status CheckMark(uint64_t mark) const;
  // The latest live ticket that the mark's lane has got since the mark; NULL: none. CheckMark must
  // have accepted the mark.
  StashEntry* LastSince(uint64_t mark);

 private:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Lane {
    uint32_t last = kNone;  // the last of its live entries
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
