#include "stash/ticket_table.h"

#include "base/check.h"

namespace hybridopt {
namespace {

constexpr uint64_t kEntryBits = 16;
constexpr uint64_t kNumberMask = (uint64_t{1} << TicketNumbers::kNumberBits) - 1;

uint64_t LaneOf(uint64_t mark) { return mark >> TicketNumbers::kNumberBits; }

}  // namespace

TicketTable::TicketTable(uint32_t entries, uint32_t lanes) : entries_(entries), lanes_(lanes) {
  for (uint32_t i = 0; i < entries; ++i) entries_[i].next_ = i + 1 < entries ? i + 1 : kNone;
  free_ = entries > 0 ? 0 : kNone;
}

Status TicketTable::CheckLane(uint32_t lane) const {
  if (lane < lanes_.size()) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "lane is %u, expected 0 to %zu: the stash was made with %zu lanes", lane,
                       lanes_.size() - 1, lanes_.size());
}

uint64_t TicketTable::TicketOf(const StashEntry& entry) const {
  return numbers_.NumberOf(entry.push_) << kEntryBits | IndexOf(entry);
}

Result<StashEntry*> TicketTable::Find(uint64_t ticket) {
  if (ticket == 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "ticket is 0, expected one that offload_stash_push gave; 0 means that the "
                         "stash has not taken what was pushed: the caller still has it");
  const auto wrong = [&](const char* why) {
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "ticket is 0x%llx, %s",
                         static_cast<unsigned long long>(ticket), why);
  };
  const std::optional<uint64_t> push = numbers_.CountOf(ticket >> kEntryBits);
  const uint64_t index = ticket % kEntriesMax;
  if (!push.has_value() || *push == 0 || index >= entries_.size() || *push > entries_[index].push_)
    return wrong("which this stash has not given: is it another's?");
  StashEntry& entry = entries_[index];
  if (*push < entry.push_ || !entry.live_)
    return wrong(
        "which has ended: it was popped, dropped or rolled back. A ticket ends once; pop with "
        "OFFLOAD_STASH_KEEP to use it again");
  return &entry;
}

StashEntry& TicketTable::Begin(uint32_t lane) {
  HYBRIDOPT_CHECK(has_free());
  const uint32_t index = free_;
  StashEntry& entry = entries_[index];
  free_ = entry.next_;
  entry.live_ = true;
  entry.went_up = entry.prefetched = false;
  entry.lane_ = lane;
  entry.push_ = ++pushes_;
  entry.previous_ = lanes_[lane].last;
  entry.next_ = kNone;
  if (entry.previous_ != kNone) entries_[entry.previous_].next_ = index;
  lanes_[lane].last = index;
  live_ += 1;
  return entry;
}

void TicketTable::End(StashEntry& entry) {
  if (entry.next_ != kNone)
    entries_[entry.next_].previous_ = entry.previous_;
  else
    lanes_[entry.lane_].last = entry.previous_;
  if (entry.previous_ != kNone) entries_[entry.previous_].next_ = entry.next_;
  entry.live_ = false;
  live_ -= 1;
  entry.next_ = kNone;
  const uint32_t index = IndexOf(entry);
  if (last_ending_ != kNone) entries_[last_ending_].next_ = index;
  last_ending_ = index;
  if (first_ending_ == kNone) first_ending_ = index;
}

StashEntry* TicketTable::FirstEnding() {
  return first_ending_ == kNone ? nullptr : &entries_[first_ending_];
}

void TicketTable::FreeFirstEnding() {
  const uint32_t index = first_ending_;
  first_ending_ = entries_[index].next_;
  if (first_ending_ == kNone) last_ending_ = kNone;
  entries_[index].next_ = free_;
  free_ = index;
}

uint64_t TicketTable::Mark(uint32_t lane) const {
  return uint64_t{lane} << TicketNumbers::kNumberBits | numbers_.NumberOf(pushes_);
}

Status TicketTable::CheckMark(uint64_t mark) const {
  const std::optional<uint64_t> push = numbers_.CountOf(mark & kNumberMask);
  if (push.has_value() && *push <= pushes_ && LaneOf(mark) < lanes_.size()) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "mark is 0x%llx, expected one that offload_stash_mark of this stash gave",
                       static_cast<unsigned long long>(mark));
}

StashEntry* TicketTable::LastSince(uint64_t mark) {
  const uint32_t last = lanes_[LaneOf(mark)].last;
  if (last == kNone || entries_[last].push_ <= numbers_.CountOf(mark & kNumberMask)) return nullptr;
  return &entries_[last];
}

}  // namespace hybridopt
