// Tickets of a stash: each number names one push, and marks divide the pushes of a lane.
#include "stash/ticket_table.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace hybridopt {
namespace {

bool IsRefused(TicketTable& table, uint64_t ticket, const std::string& word) {
  const Result<StashEntry*> found = table.Find(ticket);
  return !found.ok() && found.status().code() == OFFLOAD_INVALID_ARGUMENT &&
         found.status().message().find(word) != std::string::npos;
}

StashEntry& Begin(TicketTable& table, uint32_t lane) {
  EXPECT_TRUE(table.ReserveNumber().ok());
  return table.Begin(lane);
}

TEST(TicketTable, EveryChangedBitOfATicketIsRefused) {
  TicketTable table(3, 2);
  for (int i = 0; i < 3; ++i) {  // generations 1 to 3 of the first entry
    StashEntry& entry = Begin(table, 0);
    EXPECT_EQ(table.Find(table.TicketOf(entry)).value(), &entry);
    if (i == 2) break;
    table.End(entry);
    table.FreeFirstEnding();
  }
  const uint64_t ticket = table.TicketOf(table.entries()[0]);
  for (int bit = 0; bit < 64; ++bit)
    EXPECT_FALSE(table.Find(ticket ^ uint64_t{1} << bit).ok()) << bit;
}

TEST(TicketTable, AnEndedTicketStaysEndedWhateverBecomesOfItsEntry) {
  TicketTable table(1, 1);
  uint64_t last = 0;
  for (int round = 0; round < 5; ++round) {
    StashEntry& entry = Begin(table, 0);
    const uint64_t ticket = table.TicketOf(entry);
    EXPECT_NE(ticket, 0u);
    EXPECT_NE(ticket, last);
    if (last != 0) {
      EXPECT_TRUE(IsRefused(table, last, "which has ended"));
    }
    table.End(entry);
    EXPECT_TRUE(IsRefused(table, ticket, "which has ended"));
    EXPECT_FALSE(table.has_free()) << "its slabs may still be in use";
    EXPECT_EQ(table.not_live(), 1u);
    EXPECT_EQ(table.FirstEnding(), &entry);
    table.FreeFirstEnding();
    EXPECT_EQ(table.FirstEnding(), nullptr);
    EXPECT_TRUE(IsRefused(table, ticket, "which has ended"));
    last = ticket;
  }
}

TEST(TicketTable, OfAnotherStashIsRefused) {
  TicketTable one(4, 4), other(4, 4);
  ASSERT_TRUE(other.ReserveNumber().ok());
  const uint64_t ticket = one.TicketOf(Begin(one, 0));
  (void)Begin(other, 0);
  EXPECT_TRUE(IsRefused(other, ticket, "which this stash has not given"));
  EXPECT_FALSE(other.CheckMark(one.Mark(0)).ok());
  EXPECT_TRUE(one.CheckMark(one.Mark(3)).ok());
}

TEST(TicketTable, EndingTicketsAreFreedInTheOrderInWhichTheyEnded) {
  TicketTable table(4, 1);
  std::vector<StashEntry*> entries;
  for (int i = 0; i < 4; ++i) entries.push_back(&Begin(table, 0));
  EXPECT_FALSE(table.has_free());
  for (const size_t index : {2, 0, 3}) table.End(*entries[index]);
  EXPECT_EQ(table.live(), 1u);
  for (const size_t index : {2, 0, 3}) {
    EXPECT_EQ(table.FirstEnding(), entries[index]);
    table.FreeFirstEnding();
  }
  EXPECT_TRUE(table.has_free());
}

TEST(TicketTable, AMarkDividesThePushesOfItsLaneAlone) {
  TicketTable table(8, 2);
  StashEntry& before = Begin(table, 1);
  const uint64_t mark = table.Mark(1);
  EXPECT_EQ(table.LastSince(mark), nullptr);
  StashEntry& first = Begin(table, 1);
  (void)Begin(table, 0);  // of another lane
  StashEntry& second = Begin(table, 1);
  StashEntry& third = Begin(table, 1);
  table.End(second);  // from the middle
  EXPECT_EQ(table.LastSince(mark), &third);
  table.End(third);
  EXPECT_EQ(table.LastSince(mark), &first);
  table.End(first);
  EXPECT_EQ(table.LastSince(mark), nullptr);
  // This ticket was pushed after the mark, although it has the entry of a ticket from before the
  // mark.
  table.End(before);
  while (table.FirstEnding() != nullptr) table.FreeFirstEnding();
  StashEntry& later = Begin(table, 1);
  EXPECT_EQ(table.LastSince(mark), &later);
  EXPECT_EQ(table.live(), 2u);
}

}  // namespace
}  // namespace hybridopt
