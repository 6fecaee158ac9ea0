// Pinned rooms: what counts towards the cap of pinned memory, and for how long.
#include "machine/pinned_room.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>

namespace hybridopt {
namespace {

constexpr uint64_t kPage = 4096;
constexpr char kShrinks[] = "size_bytes";

struct Limits {
  uint64_t system_bytes = UINT64_MAX;  // the system pins no more
  uint64_t cap_bytes = 0;              // of the context; 0: none
  int32_t allow_pageable = 0;
};

std::shared_ptr<Context> OnSim(const Limits& limits) {
  offload_context_options_t options{};
  options.threads = 1;
  options.pinned_bytes_max = limits.cap_bytes;
  options.allow_pageable = limits.allow_pageable;
  options.log = [](void*, int32_t, const char*) {};
  const SimOptions sim{1 << 20, 1, 0, limits.system_bytes};
  return std::make_shared<Context>(
      options, std::move(CreateSimDevice(sim, ReferenceKernels()).value()), ReferenceKernels());
}

uint64_t Counted(const Context& context) { return context.Info().value().pinned_bytes; }

TEST(PinnedRoom, CountsTowardsTheCapWhileItLives) {
  const auto context = OnSim({});
  {
    PinnedRoom room = std::move(PinnedRoom::Take(*context, 2 * kPage, kShrinks).value());
    EXPECT_EQ(Counted(*context), 2 * kPage);
    EXPECT_FALSE(context->device().PinHost(room.data(), 1).ok()) << "pinned already";
    EXPECT_FALSE(room.pageable());
    PinnedRoom moved = std::move(room);
    EXPECT_EQ(moved.pinned_bytes(), 2 * kPage);
    EXPECT_EQ(Counted(*context), 2 * kPage);
  }
  EXPECT_EQ(Counted(*context), 0u);
}

TEST(PinnedRoom, WhatTheSystemDoesNotPinIsRefusedOrCountsNothing) {
  const auto strict = OnSim({kPage});
  const Result<PinnedRoom> refused = PinnedRoom::Take(*strict, 2 * kPage, kShrinks);
  EXPECT_EQ(refused.status().code(), OFFLOAD_OUT_OF_HOST_MEMORY);
  EXPECT_NE(refused.status().message().find("make size_bytes smaller, or set allow_pageable"),
            std::string::npos)
      << refused.status().message();
  EXPECT_EQ(Counted(*strict), 0u);

  const auto lenient = OnSim({kPage, 0, 1});
  const PinnedRoom pageable = std::move(PinnedRoom::Take(*lenient, 2 * kPage, kShrinks).value());
  EXPECT_NE(pageable.data(), nullptr);
  EXPECT_TRUE(pageable.pageable());
  EXPECT_EQ(Counted(*lenient), 0u);
}

TEST(PinnedRoom, TheCapRefusesAndTellsWhatToMakeSmaller) {
  const auto capped = OnSim({UINT64_MAX, kPage});
  const Result<PinnedRoom> refused = PinnedRoom::Take(*capped, 2 * kPage, kShrinks);
  EXPECT_EQ(refused.status().code(), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_NE(refused.status().message().find("or make size_bytes smaller"), std::string::npos)
      << refused.status().message();
}

TEST(PinnedRoom, ThatIsTakenAnywayIsPinnedIfSystemAndCapAllowIt) {
  const auto free = OnSim({});
  EXPECT_EQ(PinnedRoom::TakeAnyway(*free, kPage).value().pinned_bytes(), kPage);
  for (const Limits& limits : {Limits{kPage}, Limits{UINT64_MAX, kPage}}) {
    const auto context = OnSim(limits);
    const PinnedRoom room = std::move(PinnedRoom::TakeAnyway(*context, 2 * kPage).value());
    EXPECT_NE(room.data(), nullptr);
    EXPECT_EQ(Counted(*context), 0u);
    EXPECT_TRUE(context->device().PinHost(room.data(), kPage).ok()) << "not pinned before";
    context->device().UnpinHost(room.data());
  }
}

TEST(PinnedRoom, APieceGetsHalfAsManyUnitsUntilTheSystemPinsIt) {
  const auto context = OnSim({3 * kPage});
  PinnedRoom room = std::move(PinnedRoom::Reserve(*context, 8 * kPage, kShrinks).value());
  EXPECT_EQ(Counted(*context), 8 * kPage);
  uint32_t units = 8;
  ASSERT_TRUE(room.Add(kPage, &units, 1, false).ok());
  EXPECT_EQ(units, 2u);
  units = 4;
  EXPECT_EQ(room.Add(kPage, &units, 2, false).code(), OFFLOAD_OUT_OF_HOST_MEMORY);
  EXPECT_EQ(units, 2u) << "the least";
  ASSERT_TRUE(room.Add(kPage, &units, 2, true).ok());
  EXPECT_EQ(room.pieces().size(), 2u);
  room.Settle();
  EXPECT_EQ(Counted(*context), 2 * kPage);
  EXPECT_TRUE(room.pageable());
}

TEST(PinnedRoom, NothingIsPinnedWhereNoDeviceCopies) {
  offload_context_options_t options{};
  options.threads = 1;
  options.pinned_bytes_max = 1;
  Context context(options, CreateHostDevice(), ReferenceKernels());
  const PinnedRoom room = std::move(PinnedRoom::Take(context, kPage, kShrinks).value());
  EXPECT_NE(room.data(), nullptr);
  EXPECT_FALSE(room.pageable());
  EXPECT_EQ(room.pinned_bytes(), 0u);
}

}  // namespace
}  // namespace hybridopt
