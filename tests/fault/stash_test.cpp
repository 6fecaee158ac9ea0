// Failures around a stash: bad input, no room, memory that cannot be pinned, streams that are
// blocked, a device that fails, several threads. Each call returns an error with a text, and
// nothing is lost.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "bad_input.h"
#include "call_thread.h"
#include "trainer.h"

namespace hybridopt::fault {
namespace {

constexpr uint64_t kSlabBytes = 4096;
constexpr uint64_t kBytes = 10'000;  // three slabs

offload_stash_options_t Options(uint64_t slabs) {
  auto options = Make<offload_stash_options_t>();
  options.budget_bytes = slabs * kSlabBytes;
  options.slab_bytes = kSlabBytes;
  options.min_bytes = 100;
  options.lanes = 2;
  return options;
}

// A context with a stash, and memory of a caller.
class User {
 public:
  explicit User(int32_t device_kind, uint64_t slabs = 12, uint64_t device_timeout_ns = 0) {
    auto context_options = Make<offload_context_options_t>();
    context_options.device_kind = device_kind;
    context_options.threads = 1;
    context_options.log = DropLog;
    context_options.device_timeout_ns = device_timeout_ns;
    EXPECT_OFFLOAD_OK(offload_context_create(&context_options, &context));
    const offload_stash_options_t options = Options(slabs);
    EXPECT_OFFLOAD_OK(offload_stash_create(context, &options, &stash));
    EXPECT_OFFLOAD_OK(offload_stream_create(context, &stream));
    data = Allocate();
    destination = Allocate();
  }
  ~User() {
    if (stash != nullptr) {
      EXPECT_OFFLOAD_OK(offload_stash_destroy(stash));
    }
    EXPECT_OFFLOAD_OK(offload_context_destroy(context));
  }
  User(const User&) = delete;
  User& operator=(const User&) = delete;

  unsigned char* Allocate() {
    void* allocated = nullptr;
    EXPECT_OFFLOAD_OK(offload_device_alloc(context, kBytes, &allocated));
    return static_cast<unsigned char*>(allocated);
  }
  static std::vector<unsigned char> Content(uint64_t seed) {
    std::vector<unsigned char> content(kBytes);
    FillPattern(content, OFFLOAD_BF16, seed);
    return content;
  }
  // On the caller's stream, like kernels, so no timeout ends it on a busy machine.
  void Copy(void* to, const void* from) {
    struct Pair {
      void* to;
      const void* from;
    } pair{to, from};
    const auto copy = [](void* self) {
      std::memcpy(static_cast<Pair*>(self)->to, static_cast<Pair*>(self)->from, kBytes);
    };
    EXPECT_OFFLOAD_OK(offload_stream_run(context, stream, copy, &pair));
    EXPECT_OFFLOAD_OK(offload_stream_synchronize(context, stream, -1));
  }
  void* Mapped(void* device_data) {
    void* mapped = nullptr;
    EXPECT_OFFLOAD_OK(offload_device_map(context, device_data, kBytes, &mapped));
    return mapped;
  }

  // 0: the stash has refused it.
  offload_stash_ticket_t Push(uint64_t seed, uint32_t lane = 0) {
    const std::vector<unsigned char> content = Content(seed);
    Copy(Mapped(data), content.data());
    offload_stash_ticket_t ticket = 0;
    EXPECT_OFFLOAD_OK(offload_stash_push(stash, lane, data, kBytes, stream, &ticket));
    if (ticket != 0) {
      EXPECT_OFFLOAD_OK(offload_stash_release(stash, ticket, stream));
    }
    return ticket;
  }
  int32_t Prefetch(offload_stash_ticket_t ticket) {
    return offload_stash_prefetch(stash, ticket, destination, kBytes, stream);
  }
  void ExpectBack(offload_stash_ticket_t ticket, uint64_t seed) {
    EXPECT_OFFLOAD_OK(Prefetch(ticket));
    EXPECT_OFFLOAD_OK(offload_stash_pop(stash, ticket, stream, 0));
    ExpectInDestination(seed);
  }
  void ExpectInDestination(uint64_t seed) {
    std::vector<unsigned char> got(kBytes);
    Copy(got.data(), Mapped(destination));
    EXPECT_EQ(got, Content(seed));
  }
  offload_stash_stats_t Stats() const {
    auto stats = Make<offload_stash_stats_t>();
    EXPECT_OFFLOAD_OK(offload_stash_get_stats(stash, &stats));
    return stats;
  }
  offload_context_info_t Info() const {
    auto info = Make<offload_context_info_t>();
    EXPECT_OFFLOAD_OK(offload_context_get_info(context, &info));
    return info;
  }

  offload_context_t context = nullptr;
  offload_stash_t stash = nullptr;
  offload_stream_t stream = nullptr;  // NULL on the host device
  unsigned char* data = nullptr;
  unsigned char* destination = nullptr;
};

class StashTest : public testing::TestWithParam<int32_t> {};

// ------------------------------------------------------------------------------------ bad input --

int32_t Create(User& user, const std::function<void(offload_stash_options_t&)>& change) {
  offload_stash_options_t options = Options(4);
  change(options);
  auto plan = Make<offload_stash_plan_t>();
  offload_stash_t made = nullptr;
  const int32_t status = offload_stash_create(user.context, &options, &made);
  EXPECT_EQ(made, nullptr);
  const std::string text = offload_last_error();
  const int32_t planned = offload_stash_plan(user.context, &options, &plan);
  if (status == OFFLOAD_OUT_OF_HOST_MEMORY) {
    EXPECT_EQ(planned, OFFLOAD_OK);
    EXPECT_EQ(plan.fits, 0);
    EXPECT_EQ(offload_stash_create(user.context, &options, &made), status);
  } else {
    EXPECT_EQ(planned, status);
    EXPECT_EQ(offload_last_error(), text);
  }
  return status;
}

TEST_P(StashTest, OptionsThatAreWrongAreRefusedInWords) {
  User user(GetParam());
  using Options = offload_stash_options_t;
  ExpectError(offload_stash_create(user.context, nullptr, &user.stash), OFFLOAD_INVALID_ARGUMENT,
              {"options is NULL"});
  const Options good = fault::Options(4);
  ExpectError(offload_stash_create(user.context, &good, nullptr), OFFLOAD_INVALID_ARGUMENT,
              {"stash is NULL"});
  ExpectError(offload_stash_plan(user.context, &good, nullptr), OFFLOAD_INVALID_ARGUMENT,
              {"plan is NULL"});
  ExpectError(Create(user, [](Options& options) { options.budget_bytes = 0; }),
              OFFLOAD_INVALID_ARGUMENT, {"options.budget_bytes is 0", "expected the bytes"});
  ExpectError(Create(user, [](Options& options) { options.slab_bytes = 5000; }),
              OFFLOAD_INVALID_ARGUMENT, {"options.slab_bytes is 5000", "a multiple of 4096"});
  ExpectError(Create(user, [](Options& options) { options.lanes = 4097; }),
              OFFLOAD_INVALID_ARGUMENT, {"options.lanes is 4097", "at most 4096"});
  ExpectError(Create(user, [](Options& options) { options.tickets_max = 65537; }),
              OFFLOAD_INVALID_ARGUMENT, {"options.tickets_max is 65537", "at most 65536"});
  ExpectError(Create(user, [](Options& options) { options.reserved = 1; }), OFFLOAD_UNSUPPORTED,
              {"options.reserved is 1"});
  ExpectError(Create(user, [](Options& options) { options.budget_bytes = UINT64_MAX; }),
              OFFLOAD_INVALID_ARGUMENT, {"options.budget_bytes is 18446744073709551615", "2^32"});
  ExpectError(Create(user, [](Options& options) { options.slab_bytes = uint64_t{1} << 63; }),
              OFFLOAD_INVALID_ARGUMENT, {"options.slab_bytes 9223372036854775808", "2^56"});
  // A budget beyond the machine.
  const auto beyond = [](Options& options) {
    options.budget_bytes = uint64_t{1} << 50;
    options.slab_bytes = uint64_t{1} << 30;
  };
  ExpectError(Create(user, beyond), OFFLOAD_OUT_OF_HOST_MEMORY,
              {"options.budget_bytes is 1125899906842624", "are available to this process",
               "make it smaller"});
  user.ExpectBack(user.Push(1), 1);
}

TEST_P(StashTest, CallsThatAreWrongAreRefusedInWordsAndChangeNothing) {
  User user(GetParam()), other(GetParam());
  const offload_stash_ticket_t ticket = user.Push(1);
  offload_stash_ticket_t unwritten = 77;
  offload_stash_mark_t foreign_mark = 0;
  EXPECT_OFFLOAD_OK(offload_stash_mark(other.stash, 0, &foreign_mark));
  ASSERT_NE(foreign_mark, 0u);
  const auto before = user.Stats();
  const auto push = [&](uint32_t lane, const void* data, offload_stream_t stream) {
    return offload_stash_push(user.stash, lane, data, kBytes, stream, &unwritten);
  };
  ExpectError(push(2, user.data, nullptr), OFFLOAD_INVALID_ARGUMENT, {"lane is 2", "0 to 1"});
  ExpectError(push(0, nullptr, nullptr), OFFLOAD_INVALID_ARGUMENT, {"10000 bytes at"});
  ExpectError(push(0, user.data, kUnknownStream), OFFLOAD_INVALID_ARGUMENT, {"stream is "});
  EXPECT_EQ(unwritten, 77u);
  ExpectError(offload_stash_push(user.stash, 0, user.data, kBytes, nullptr, nullptr),
              OFFLOAD_INVALID_ARGUMENT, {"ticket is NULL"});

  ExpectError(offload_stash_prefetch(user.stash, ticket, user.destination, kBytes - 1, nullptr),
              OFFLOAD_INVALID_ARGUMENT, {"destination_bytes is 9999", "at least the 10000 bytes"});
  ExpectError(offload_stash_prefetch(user.stash, ticket, nullptr, kBytes, nullptr),
              OFFLOAD_INVALID_ARGUMENT, {"10000 bytes at"});
  ExpectError(offload_stash_prefetch(user.stash, ticket, user.destination, kBytes, kUnknownStream),
              OFFLOAD_INVALID_ARGUMENT, {"stream is "});
  ExpectError(offload_stash_pop(user.stash, ticket, nullptr, 0), OFFLOAD_INVALID_STATE,
              {"has not been prefetched", "call offload_stash_prefetch"});
  ExpectError(offload_stash_pop(user.stash, ticket, nullptr, 6), OFFLOAD_UNSUPPORTED,
              {"flags is 0x6", "known to this call is 0x1"});
  for (const auto call : {offload_stash_release, offload_stash_drop})
    ExpectError(call(user.stash, ticket, kUnknownStream), OFFLOAD_INVALID_ARGUMENT, {"stream is "});

  ExpectError(offload_stash_mark(user.stash, 2, &unwritten), OFFLOAD_INVALID_ARGUMENT,
              {"lane is 2"});
  ExpectError(offload_stash_mark(user.stash, 0, nullptr), OFFLOAD_INVALID_ARGUMENT,
              {"mark is NULL"});
  offload_stash_mark_t mark = 0;
  EXPECT_OFFLOAD_OK(offload_stash_mark(user.stash, 0, &mark));
  for (const offload_stash_mark_t bad :
       {uint64_t{0}, foreign_mark, mark + 1, mark | uint64_t{2} << 44, UINT64_MAX})
    ExpectError(offload_stash_rollback(user.stash, bad, nullptr), OFFLOAD_INVALID_ARGUMENT,
                {"mark is 0x", "expected one that offload_stash_mark of this stash gave"});
  ExpectError(offload_stash_rollback(user.stash, mark, kUnknownStream), OFFLOAD_INVALID_ARGUMENT,
              {"stream is "});
  ExpectError(offload_stash_get_stats(user.stash, nullptr), OFFLOAD_INVALID_ARGUMENT,
              {"stats is NULL"});
  EXPECT_EQ(unwritten, 77u);
  const auto after = user.Stats();
  EXPECT_EQ(std::memcmp(&before, &after, offsetof(offload_stash_stats_t, down_timed_bytes)), 0);
  user.ExpectBack(ticket, 1);
}

TEST_P(StashTest, NumbersThatAreNoTicketsOfThisStashAreRefusedByEveryCall) {
  User user(GetParam()), other(GetParam());
  const offload_stash_ticket_t ticket = user.Push(1), foreign = other.Push(2);
  const auto expect_ticket_refused = [&](offload_stash_ticket_t bad, const char* word) {
    ExpectError(offload_stash_release(user.stash, bad, nullptr), OFFLOAD_INVALID_ARGUMENT,
                {"ticket is ", word});
    ExpectError(user.Prefetch(bad), OFFLOAD_INVALID_ARGUMENT, {"ticket is ", word});
    ExpectError(offload_stash_pop(user.stash, bad, nullptr, 0), OFFLOAD_INVALID_ARGUMENT,
                {"ticket is ", word});
    ExpectError(offload_stash_drop(user.stash, bad, nullptr), OFFLOAD_INVALID_ARGUMENT,
                {"ticket is ", word});
    if (bad == 0) return;  // for wait this means all tickets
    ExpectError(offload_stash_wait(user.stash, bad, -1), OFFLOAD_INVALID_ARGUMENT,
                {"ticket is ", word});
  };
  expect_ticket_refused(0, "has not taken what was pushed");
  expect_ticket_refused(foreign, "is it another's?");
  expect_ticket_refused(ticket + 1, "is it another's?");                      // an entry never used
  expect_ticket_refused(ticket + (1 << 16), "is it another's?");              // a later generation
  expect_ticket_refused(ticket & ~uint64_t{0xffff0000}, "is it another's?");  // generation 0
  expect_ticket_refused(ticket | 0xffff, "is it another's?");                 // beyond the table
  expect_ticket_refused(UINT64_MAX, "is it another's?");
  user.ExpectBack(ticket, 1);
}

// For any number of stashes that are made in between.
TEST_P(StashTest, NoStashTakesTicketsAndMarksOfAnother) {
  constexpr int kStashes = 600;
  User first(GetParam());
  const offload_stash_ticket_t ticket = first.Push(1);
  offload_stash_mark_t mark = 0;
  EXPECT_OFFLOAD_OK(offload_stash_mark(first.stash, 0, &mark));
  for (int made = 0; made < kStashes; ++made) {
    const offload_stash_options_t options = Options(12);
    offload_stash_t stash = nullptr;
    ASSERT_OFFLOAD_OK(offload_stash_create(first.context, &options, &stash));
    offload_stash_ticket_t own = 0;
    offload_stash_mark_t own_mark = 0;
    ASSERT_OFFLOAD_OK(offload_stash_push(stash, 0, first.data, kBytes, nullptr, &own));
    ASSERT_OFFLOAD_OK(offload_stash_mark(stash, 0, &own_mark));
    ExpectError(offload_stash_drop(stash, ticket, nullptr), OFFLOAD_INVALID_ARGUMENT,
                {"is it another's?"});
    ExpectError(offload_stash_drop(first.stash, own, nullptr), OFFLOAD_INVALID_ARGUMENT,
                {"is it another's?"});
    ExpectError(offload_stash_rollback(stash, mark, nullptr), OFFLOAD_INVALID_ARGUMENT,
                {"mark is 0x"});
    ExpectError(offload_stash_rollback(first.stash, own_mark, nullptr), OFFLOAD_INVALID_ARGUMENT,
                {"mark is 0x"});
    ASSERT_OFFLOAD_OK(offload_stash_destroy(stash));
    if (HasFailure()) return;
  }
  first.ExpectBack(ticket, 1);
}

TEST_P(StashTest, TicketsEndOnce) {
  User user(GetParam());
  const auto expect_ended = [&](offload_stash_ticket_t ticket) {
    const std::vector<std::string> words = {"which has ended", "popped, dropped or rolled back"};
    ExpectError(offload_stash_release(user.stash, ticket, nullptr), OFFLOAD_INVALID_ARGUMENT,
                words);
    ExpectError(user.Prefetch(ticket), OFFLOAD_INVALID_ARGUMENT, words);
    ExpectError(offload_stash_pop(user.stash, ticket, nullptr, 0), OFFLOAD_INVALID_ARGUMENT, words);
    ExpectError(offload_stash_drop(user.stash, ticket, nullptr), OFFLOAD_INVALID_ARGUMENT, words);
    ExpectError(offload_stash_wait(user.stash, ticket, 0), OFFLOAD_INVALID_ARGUMENT, words);
  };
  offload_stash_mark_t mark = 0;
  EXPECT_OFFLOAD_OK(offload_stash_mark(user.stash, 0, &mark));
  const offload_stash_ticket_t popped = user.Push(1), dropped = user.Push(2),
                               rolled_back = user.Push(3), kept = user.Push(4, 1);
  user.ExpectBack(popped, 1);
  expect_ended(popped);
  EXPECT_OFFLOAD_OK(offload_stash_drop(user.stash, dropped, user.stream));
  expect_ended(dropped);
  EXPECT_OFFLOAD_OK(offload_stash_rollback(user.stash, mark, user.stream));
  expect_ended(rolled_back);
  // Old tickets stay invalid when new tickets use their entries.
  std::vector<offload_stash_ticket_t> newer;
  for (uint64_t i = 5; i < 8; ++i) newer.push_back(user.Push(i));
  for (const offload_stash_ticket_t old : {popped, dropped, rolled_back}) expect_ended(old);
  EXPECT_EQ(user.Stats().drops, 2u);
  for (uint64_t i = 5; i < 8; ++i) user.ExpectBack(newer[i - 5], i);
  user.ExpectBack(kept, 4);
}

// Each copy is timed once. A device without queues times nothing.
TEST_P(StashTest, TimedBytesAreThoseOfTheCopies) {
  User user(GetParam(), 12);
  for (int copies = 0; copies < 3; ++copies) {
    user.ExpectBack(user.Push(1), 1);
    EXPECT_OFFLOAD_OK(offload_stash_wait(user.stash, 0, -1));
    const bool timed = GetParam() == OFFLOAD_DEVICE_SIM;
    const auto stats = user.Stats();
    EXPECT_EQ(stats.down_timed_bytes, timed ? stats.pushed_bytes : 0);
    EXPECT_EQ(stats.up_timed_bytes, timed ? stats.prefetched_bytes : 0);
  }
}

TEST_P(StashTest, AKeptTicketIsPrefetchedAgainAndOnlyThen) {
  User user(GetParam());
  const offload_stash_ticket_t ticket = user.Push(1);
  for (int time = 0; time < 3; ++time) {
    EXPECT_OFFLOAD_OK(user.Prefetch(ticket));
    ExpectError(user.Prefetch(ticket), OFFLOAD_INVALID_STATE,
                {"has been prefetched already", "pop it first", "OFFLOAD_STASH_KEEP"});
    EXPECT_OFFLOAD_OK(offload_stash_pop(user.stash, ticket, user.stream, OFFLOAD_STASH_KEEP));
    ExpectError(offload_stash_pop(user.stash, ticket, user.stream, 0), OFFLOAD_INVALID_STATE,
                {"has not been prefetched"});
    user.ExpectInDestination(1);
    EXPECT_EQ(user.Stats().tickets, 1u);
  }
  user.ExpectBack(ticket, 1);
  EXPECT_EQ(user.Stats().tickets, 0u);
}

// -------------------------------------------------------------------------------------- no room --

TEST_P(StashTest, WhatFindsNoRoomIsNotTakenAndCounted) {
  User user(GetParam(), 7);  // two pushes of three slabs
  const offload_stash_ticket_t first = user.Push(1), second = user.Push(2, 1);
  ASSERT_NE(first, 0u);
  ASSERT_NE(second, 0u);
  EXPECT_EQ(user.Push(3), 0u);
  offload_stash_ticket_t small = 9, last = 0;
  EXPECT_OFFLOAD_OK(offload_stash_push(user.stash, 0, user.data, 99, nullptr, &small));
  EXPECT_EQ(small, 0u);
  small = 9;
  EXPECT_OFFLOAD_OK(offload_stash_push(user.stash, 0, nullptr, 0, nullptr, &small));
  EXPECT_EQ(small, 0u);
  EXPECT_OFFLOAD_OK(offload_stash_push(user.stash, 0, user.data, 100, user.stream, &last));
  EXPECT_NE(last, 0u);
  offload_stash_stats_t stats = user.Stats();
  EXPECT_EQ(stats.tickets, 3u);
  EXPECT_EQ(stats.slabs_bytes, 7 * kSlabBytes);
  EXPECT_EQ(stats.used_bytes, 7 * kSlabBytes);
  EXPECT_EQ(stats.held_bytes, 2 * kBytes + 100);
  EXPECT_EQ(stats.pushes, 3u);
  EXPECT_EQ(stats.pushed_bytes, 2 * kBytes + 100);
  EXPECT_EQ(stats.refused_pushes, 1u);
  EXPECT_EQ(stats.refused_bytes, kBytes);
  EXPECT_EQ(stats.small_pushes, 2u);
  user.ExpectBack(first, 1);
  user.ExpectBack(user.Push(4), 4);  // there is room again
  user.ExpectBack(second, 2);
  EXPECT_OFFLOAD_OK(offload_stash_drop(user.stash, last, user.stream));
  stats = user.Stats();
  EXPECT_EQ(stats.used_bytes, 0u);
  EXPECT_EQ(stats.held_bytes, 0u);
  EXPECT_EQ(stats.used_bytes_max, 7 * kSlabBytes);
  EXPECT_EQ(stats.pops, 3u);
  EXPECT_EQ(stats.prefetches, 3u);
  EXPECT_EQ(stats.prefetched_bytes, 3 * kBytes);
}

TEST_P(StashTest, MoreTicketsThanThereMayBeAreNotTaken) {
  User user(GetParam());
  offload_stash_options_t options = Options(12);
  options.tickets_max = 2;
  EXPECT_OFFLOAD_OK(offload_stash_destroy(user.stash));
  EXPECT_OFFLOAD_OK(offload_stash_create(user.context, &options, &user.stash));
  const offload_stash_ticket_t first = user.Push(1), second = user.Push(2);
  EXPECT_EQ(user.Push(3), 0u);
  user.ExpectBack(second, 2);
  const offload_stash_ticket_t third = user.Push(3);
  EXPECT_NE(third, 0u);
  user.ExpectBack(third, 3);
  user.ExpectBack(first, 1);
}

TEST_P(StashTest, ThePlanIsWhatCreateTakes) {
  User user(GetParam());
  offload_stash_options_t options = Options(12);
  options.budget_bytes -= kSlabBytes - 1;
  auto plan = Make<offload_stash_plan_t>();
  EXPECT_OFFLOAD_OK(offload_stash_plan(user.context, &options, &plan));
  EXPECT_EQ(plan.slab_bytes, kSlabBytes);
  EXPECT_EQ(plan.slab_count, 12u);
  EXPECT_EQ(plan.slabs_bytes, 12 * kSlabBytes);
  EXPECT_EQ(plan.tickets_max, 12u);
  EXPECT_EQ(plan.fits, 1);
  EXPECT_EQ(plan.host_bytes, plan.slabs_bytes + plan.scratch_bytes);
  EXPECT_EQ(plan.pinned_bytes_left, UINT64_MAX);
  const uint64_t pinned = GetParam() == OFFLOAD_DEVICE_HOST ? 0 : plan.slabs_bytes;
  EXPECT_EQ(user.Info().pinned_bytes, pinned);
  EXPECT_EQ(user.Info().stashes, 1u);
  EXPECT_EQ(user.Stats().pinned_bytes, pinned);
  EXPECT_EQ(user.Stats().slabs_bytes, plan.slabs_bytes);
  EXPECT_OFFLOAD_OK(offload_stash_destroy(user.stash));
  EXPECT_EQ(user.Info().pinned_bytes, 0u);
  EXPECT_EQ(user.Info().stashes, 0u);
  // The defaults.
  options = Make<offload_stash_options_t>();
  options.budget_bytes = 5;
  EXPECT_OFFLOAD_OK(offload_stash_plan(user.context, &options, &plan));
  EXPECT_EQ(plan.slab_bytes, uint64_t{4} << 20);
  EXPECT_EQ(plan.slab_count, 1u);
  options.budget_bytes = uint64_t{1} << 40;
  EXPECT_OFFLOAD_OK(offload_stash_plan(user.context, &options, &plan));
  EXPECT_EQ(plan.tickets_max, 4096u);
  EXPECT_EQ(user.Info().stashes, 0u);
  user.stash = nullptr;
}

// ------------------------------------------------------------------------ several micro-batches --

// Two micro-batches, each with a lane. Iterations of one fail in the middle of the forward pass:
// its room is freed each time, and the tickets of the other stay.
TEST_P(StashTest, AForwardPassThatFailsGivesBackWhatItsLaneHasPushed) {
  User user(GetParam(), 12);  // four pushes
  const offload_stash_ticket_t others = user.Push(1, 1);
  const offload_stash_ticket_t earlier = user.Push(2, 0);
  for (uint64_t iteration = 0; iteration < 50; ++iteration) {
    offload_stash_mark_t mark = 0;
    EXPECT_OFFLOAD_OK(offload_stash_mark(user.stash, 0, &mark));
    ASSERT_NE(user.Push(3, 0), 0u) << "room was lost in iteration " << iteration;
    ASSERT_NE(user.Push(4, 0), 0u) << "room was lost in iteration " << iteration;
    for (int time = 0; time < 2; ++time) {  // the second time there is nothing
      EXPECT_OFFLOAD_OK(offload_stash_rollback(user.stash, mark, user.stream));
      EXPECT_EQ(user.Stats().tickets, 2u);
    }
  }
  user.ExpectBack(earlier, 2);
  user.ExpectBack(others, 1);
  EXPECT_EQ(user.Stats().drops, 100u);
}

// Interleaved pipeline stages do not take the last micro-batch back first.
TEST_P(StashTest, MicroBatchesOfAnInterleavedPipelineComeBackInAnyOrder) {
  User user(GetParam(), 12);  // four pushes
  std::vector<offload_stash_ticket_t> tickets(1);
  const auto forward = [&](uint64_t batch) {
    tickets.push_back(user.Push(batch, static_cast<uint32_t>(batch % 2)));
    ASSERT_NE(tickets[batch], 0u);
  };
  const auto backward = [&](uint64_t batch) { user.ExpectBack(tickets[batch], batch); };
  for (const uint64_t batch : {1, 2, 3}) forward(batch);
  for (const uint64_t batch : {4, 5, 6, 7}) {  // one forward, one backward: the first one first
    forward(batch);
    backward(batch - 3);
  }
  for (const uint64_t batch : {6, 5, 7}) backward(batch);
  EXPECT_EQ(user.Stats().tickets, 0u);
}

// --------------------------------------------------------------------------- ends of the others --

TEST_P(StashTest, AContextWithAStashIsNotDestroyedAndAStashWithTicketsIs) {
  User user(GetParam());
  const offload_stash_ticket_t ticket = user.Push(1);
  ExpectError(offload_context_destroy(user.context), OFFLOAD_INVALID_STATE,
              {"context still has 0 optimizers, 1 stashes", "destroy them first"});
  EXPECT_OFFLOAD_OK(user.Prefetch(ticket));
  user.Push(2);
  EXPECT_OFFLOAD_OK(offload_stash_destroy(user.stash));
  user.ExpectInDestination(1);  // destroy has finished the copy
  ExpectError(offload_stash_push(user.stash, 0, user.data, kBytes, nullptr, nullptr),
              OFFLOAD_INVALID_ARGUMENT, {"stash is 0x", "has been destroyed"});
  user.stash = nullptr;
}

// Each thread has a lane, a stream and memory of its own; the stash is one.
TEST_P(StashTest, ThreadsMayUseItAtTheSameTime) {
  constexpr uint32_t kThreads = 4;
  User user(GetParam());
  EXPECT_OFFLOAD_OK(offload_stash_destroy(user.stash));
  offload_stash_options_t options = Options(3 * 3);  // room for three of four
  options.lanes = kThreads;
  EXPECT_OFFLOAD_OK(offload_stash_create(user.context, &options, &user.stash));
  const auto use = [&](uint32_t lane) {
    offload_stream_t stream = nullptr;
    EXPECT_OFFLOAD_OK(offload_stream_create(user.context, &stream));
    unsigned char* const data = user.Allocate();
    for (uint64_t round = 0; round < 40; ++round) {
      const std::vector<unsigned char> content = User::Content(100 * lane + round);
      std::vector<unsigned char> got(kBytes);
      EXPECT_OFFLOAD_OK(offload_device_upload(user.context, data, content.data(), kBytes, stream));
      offload_stash_ticket_t ticket = 0;
      EXPECT_OFFLOAD_OK(offload_stash_push(user.stash, lane, data, kBytes, stream, &ticket));
      if (ticket == 0) continue;
      if (round % 4 == 0) {
        EXPECT_OFFLOAD_OK(offload_stash_wait(user.stash, 0, -1));
      }
      if (round % 5 == 0) {
        EXPECT_OFFLOAD_OK(offload_stash_drop(user.stash, ticket, stream));
        continue;
      }
      EXPECT_OFFLOAD_OK(offload_stash_release(user.stash, ticket, stream));
      EXPECT_OFFLOAD_OK(offload_device_upload(user.context, data, got.data(), kBytes, stream));
      EXPECT_OFFLOAD_OK(offload_stash_prefetch(user.stash, ticket, data, kBytes, stream));
      EXPECT_OFFLOAD_OK(offload_stash_pop(user.stash, ticket, stream, 0));
      EXPECT_OFFLOAD_OK(offload_device_download(user.context, got.data(), data, kBytes, stream));
      EXPECT_EQ(got, content);
    }
    EXPECT_OFFLOAD_OK(offload_stream_destroy(user.context, stream));
  };
  std::vector<std::thread> threads;
  for (uint32_t lane = 0; lane < kThreads; ++lane) threads.emplace_back(use, lane);
  for (std::thread& thread : threads) thread.join();
  const offload_stash_stats_t stats = user.Stats();
  EXPECT_EQ(stats.tickets, 0u);
  EXPECT_EQ(stats.pushes + stats.refused_pushes, kThreads * 40u);
  EXPECT_EQ(stats.pops + stats.drops, stats.pushes);
}

INSTANTIATE_TEST_SUITE_P(Devices, StashTest,
                         testing::Values(OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM),
                         [](const auto& info) {
                           return info.param == OFFLOAD_DEVICE_HOST ? "Host" : "Sim";
                         });

// -------------------------------------------------------------------------------------- pinning --

// A context in which the system, or the caller, allows at most these bytes to be pinned.
offload_context_t Limited(uint64_t sim_pinned_bytes_max, uint64_t pinned_bytes_max,
                          int32_t allow_pageable) {
  auto options = Make<offload_context_options_t>();
  options.device_kind = OFFLOAD_DEVICE_SIM;
  options.threads = 1;
  options.log = DropLog;
  options.sim_pinned_bytes_max = sim_pinned_bytes_max;
  options.pinned_bytes_max = pinned_bytes_max;
  options.allow_pageable = allow_pageable;
  offload_context_t context = nullptr;
  EXPECT_OFFLOAD_OK(offload_context_create(&options, &context));
  return context;
}

struct Rung {
  uint64_t slabs;
  uint64_t pinned_slabs;
  std::string note;
};

// 40 slabs: the simulated device pins pieces of 16.
Rung Climb(uint64_t sim_pinned_bytes_max, int32_t allow_pageable) {
  const offload_context_t context = Limited(sim_pinned_bytes_max, 0, allow_pageable);
  const offload_stash_options_t options = Options(40);
  offload_stash_t stash = nullptr;
  EXPECT_OFFLOAD_OK(offload_stash_create(context, &options, &stash));
  auto stats = Make<offload_stash_stats_t>();
  EXPECT_OFFLOAD_OK(offload_stash_get_stats(stash, &stats));
  auto info = Make<offload_context_info_t>();
  EXPECT_OFFLOAD_OK(offload_context_get_info(context, &info));
  EXPECT_EQ(info.pinned_bytes, stats.pinned_bytes);
  EXPECT_OFFLOAD_OK(offload_stash_destroy(stash));
  EXPECT_OFFLOAD_OK(offload_context_destroy(context));
  return {stats.slabs_bytes / kSlabBytes, stats.pinned_bytes / kSlabBytes, info.notes};
}

TEST(StashPinning, TakesWhatTheSystemPinsAndSaysSo) {
  const Rung all = Climb(0, 0);
  EXPECT_EQ(all.slabs, 40u);
  EXPECT_EQ(all.pinned_slabs, 40u);
  EXPECT_EQ(all.note.find("stash"), std::string::npos) << all.note;
  for (const int32_t allow_pageable : {0, 1}) {
    const Rung some = Climb(37 * kSlabBytes, allow_pageable);
    EXPECT_EQ(some.slabs, 36u);  // 16 + 16 + half of 8
    EXPECT_EQ(some.pinned_slabs, 36u);
    EXPECT_NE(some.note.find("a stash has fewer slabs than asked for"), std::string::npos)
        << some.note;
    EXPECT_EQ(Climb(kSlabBytes, allow_pageable).slabs, 1u);
  }
  const Rung none = Climb(kSlabBytes - 1, 1);
  EXPECT_EQ(none.slabs, 40u);
  EXPECT_EQ(none.pinned_slabs, 0u);
  EXPECT_NE(none.note.find("a stash is pageable"), std::string::npos) << none.note;
}

TEST(StashPinning, RefusedWhereNothingCanBePinned) {
  const offload_context_t context = Limited(kSlabBytes - 1, 0, 0);
  const offload_stash_options_t options = Options(40);
  offload_stash_t stash = nullptr;
  ExpectError(offload_stash_create(context, &options, &stash), OFFLOAD_OUT_OF_HOST_MEMORY,
              {"cannot pin 4096 bytes", "of at most 4095",
               "raise that limit, make budget_bytes smaller", "allow_pageable"});
  EXPECT_EQ(stash, nullptr);
  auto info = Make<offload_context_info_t>();
  EXPECT_OFFLOAD_OK(offload_context_get_info(context, &info));
  EXPECT_EQ(info.pinned_bytes, 0u);
  EXPECT_EQ(info.stashes, 0u);
  EXPECT_OFFLOAD_OK(offload_context_destroy(context));
}

TEST(StashPinning, StaysWithinTheCapOfTheContext) {
  const offload_context_t context = Limited(0, 40 * kSlabBytes, 0);
  offload_stash_options_t options = Options(41);
  offload_stash_t stash = nullptr, more = nullptr;
  ExpectError(offload_stash_create(context, &options, &stash), OFFLOAD_INVALID_ARGUMENT,
              {"options.pinned_bytes_max of the context is 163840", "with 0 in use",
               "raise it to at least 167936", "make budget_bytes smaller"});
  auto plan = Make<offload_stash_plan_t>();
  EXPECT_OFFLOAD_OK(offload_stash_plan(context, &options, &plan));
  EXPECT_EQ(plan.fits, 0);
  EXPECT_EQ(plan.pinned_bytes_left, 40 * kSlabBytes);
  options = Options(40);
  EXPECT_OFFLOAD_OK(offload_stash_create(context, &options, &stash));
  ExpectError(offload_stash_create(context, &options, &more), OFFLOAD_INVALID_ARGUMENT,
              {"with 163840 in use"});
  EXPECT_OFFLOAD_OK(offload_stash_destroy(stash));
  EXPECT_OFFLOAD_OK(offload_stash_create(context, &options, &more));
  EXPECT_OFFLOAD_OK(offload_stash_destroy(more));
  EXPECT_OFFLOAD_OK(offload_context_destroy(context));
}

// ----------------------------------------------------------------- streams and devices at fault --

constexpr uint64_t kTimeoutNs = 1'000'000'000;

TEST(StashFailure, PoisonsWithTheCause) {
  User user(OFFLOAD_DEVICE_SIM);
  const offload_stash_ticket_t ticket = user.Push(1);
  Gate gate;
  EXPECT_OFFLOAD_OK(offload_stream_run(user.context, user.stream, Gate::Hold, &gate));
  offload_stash_ticket_t lost = 0;
  EXPECT_OFFLOAD_OK(offload_stash_push(user.stash, 0, user.data, kBytes, user.stream, &lost));
  EXPECT_OFFLOAD_OK(offload_device_free(user.context, user.data));  // the caller's mistake
  gate.open = true;
  ExpectError(offload_stash_wait(user.stash, lost, -1), OFFLOAD_DEVICE_FAILED,
              {"CopyToHost", "stash down", "freed or never allocated"});
  const std::string cause = offload_last_error();
  // Calls that only read still work; all others return the cause.
  EXPECT_EQ(user.Stats().tickets, 2u);
  for (const int32_t status :
       {user.Prefetch(ticket), offload_stash_pop(user.stash, ticket, user.stream, 0),
        offload_stash_drop(user.stash, ticket, user.stream)}) {
    EXPECT_NE(status, OFFLOAD_OK);
    EXPECT_NE(std::string(offload_last_error()).find("freed or never allocated"), std::string::npos)
        << offload_last_error();
  }
}

// If only a part of a push could be queued, the copies of the stash are not in order any more.
TEST(StashFailure, HalfAPushPoisonsTheStash) {
  constexpr int kMoreThanAQueueHolds = 400;  // of pushes, four commands each
  User user(OFFLOAD_DEVICE_SIM, 3 * kMoreThanAQueueHolds, kTimeoutNs);
  offload_stream_t held = nullptr;
  EXPECT_OFFLOAD_OK(offload_stream_create(user.context, &held));
  Gate gate;
  EXPECT_OFFLOAD_OK(offload_stream_run(user.context, held, Gate::Hold, &gate));
  int32_t status = OFFLOAD_OK;
  offload_stash_ticket_t ticket = 0;
  for (int i = 0; i < kMoreThanAQueueHolds && status == OFFLOAD_OK; ++i)
    status =
        offload_stash_push(user.stash, 0, user.data, kBytes, i == 0 ? held : user.stream, &ticket);
  ExpectError(status, OFFLOAD_DEVICE_FAILED,
              {"stream \"stash down\" has 1024 commands queued", "made no progress for 1.0 s"});
  ExpectError(offload_stash_push(user.stash, 0, user.data, kBytes, user.stream, &ticket),
              OFFLOAD_POISONED,
              {"an earlier copy of this stash failed, destroy it", "made no progress for 1.0 s"});
  ExpectError(offload_stash_release(user.stash, ticket, user.stream), OFFLOAD_POISONED,
              {"destroy it"});
  ExpectError(offload_stash_wait(user.stash, 0, -1), OFFLOAD_POISONED, {"destroy it"});
  EXPECT_GT(user.Stats().pushes, 100u);
  gate.open = true;
  EXPECT_OFFLOAD_OK(offload_stream_synchronize(user.context, held, -1));
  EXPECT_OFFLOAD_OK(offload_stash_destroy(user.stash));
  // The device has not failed: another stash works.
  const offload_stash_options_t options = Options(12);
  EXPECT_OFFLOAD_OK(offload_stash_create(user.context, &options, &user.stash));
  user.ExpectBack(user.Push(1), 1);
}

TEST(StashFailure, ACallBehindAFullQueueOfTheCallersEndsAndChangesNothing) {
  User user(OFFLOAD_DEVICE_SIM, 12, kTimeoutNs);
  const offload_stash_ticket_t ticket = user.Push(1);
  Gate gate;
  EXPECT_OFFLOAD_OK(offload_stream_run(user.context, user.stream, Gate::Hold, &gate));
  int32_t status = OFFLOAD_OK;
  const auto nothing = [](void*) {};
  for (int i = 0; i < 3000 && status == OFFLOAD_OK; ++i)
    status = offload_stream_run(user.context, user.stream, nothing, nullptr);
  ExpectError(status, OFFLOAD_DEVICE_FAILED, {"stream \"caller\" has 1024 commands queued"});
  offload_stash_ticket_t unwritten = 77;
  ExpectError(offload_stash_push(user.stash, 0, user.data, kBytes, user.stream, &unwritten),
              OFFLOAD_DEVICE_FAILED, {"stream \"caller\" has 1024 commands queued"});
  EXPECT_EQ(unwritten, 77u);
  ExpectError(user.Prefetch(ticket), OFFLOAD_DEVICE_FAILED, {"stream \"caller\""});
  gate.open = true;
  EXPECT_OFFLOAD_OK(offload_stream_synchronize(user.context, user.stream, -1));
  EXPECT_EQ(user.Stats().tickets, 1u);
  user.ExpectBack(ticket, 1);
}

TEST(StashFailure, WaitingAndDestroyingBehindAStreamThatStandsStillEnd) {
  User user(OFFLOAD_DEVICE_SIM, 12, kTimeoutNs);
  Gate gate;
  EXPECT_OFFLOAD_OK(offload_stream_run(user.context, user.stream, Gate::Hold, &gate));
  offload_stash_ticket_t ticket = 0;
  EXPECT_OFFLOAD_OK(offload_stash_push(user.stash, 0, user.data, kBytes, user.stream, &ticket));
  for (const int64_t timeout_ns : {int64_t{0}, int64_t{30'000'000}})
    for (const offload_stash_ticket_t awaited : {ticket, offload_stash_ticket_t{0}})
      ExpectError(offload_stash_wait(user.stash, awaited, timeout_ns), OFFLOAD_TIMED_OUT,
                  {"have not ended within " + std::to_string(timeout_ns) + " ns", "wait again"});
  // A thread that waits without limit learns that the stash is destroyed.
  CallThread waiter([&] { return offload_stash_wait(user.stash, ticket, -1); });
  waiter.AwaitAsleep();
  EXPECT_OFFLOAD_OK(offload_stash_destroy(user.stash));
  const bool came_later = waiter.Join() == OFFLOAD_INVALID_ARGUMENT;
  EXPECT_NE(
      waiter.error().find(came_later ? "has been destroyed" : "another thread destroys the stash"),
      std::string::npos)
      << waiter.error();
  user.stash = nullptr;
  gate.open = true;
  EXPECT_OFFLOAD_OK(offload_stream_synchronize(user.context, user.stream, -1));
}

}  // namespace
}  // namespace hybridopt::fault
