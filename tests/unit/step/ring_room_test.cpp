#include "step/executors/ring_room.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <vector>

#include "../../random.h"

namespace hybridopt {
namespace {

struct Taken {
  uint64_t position, bytes;
};

// Random chunks come and go in order. No byte has two chunks, no chunk passes the ring's end, a
// refused chunk really has no room behind the newest one, and an empty ring takes every chunk.
TEST(RingRoom, ChunksNeverShareBytes) {
  Random random(1);
  for (int round = 0; round < 200; ++round) {
    const uint64_t size = 1 + random.Below(40);
    RingRoom room(size);
    std::deque<Taken> ring;
    std::vector<int> owners(size, 0);
    const auto mark = [&](const Taken& taken, int change) {
      for (uint64_t i = 0; i < taken.bytes; ++i) {
        const uint64_t byte = room.OffsetOf(taken.position) + i;
        ASSERT_LT(byte, size);
        owners[byte] += change;
        ASSERT_LE(owners[byte], 1);
      }
    };
    for (int call = 0; call < 300; ++call) {
      if (!ring.empty() && random.OneIn(2)) {
        mark(ring.front(), -1);
        ring.pop_front();
        room.GiveBack(ring.empty() ? std::nullopt : std::optional(ring.front().position));
        continue;
      }
      const uint64_t bytes = 1 + random.Below(size);
      const std::optional<uint64_t> position = room.Take(bytes);
      if (position.has_value()) {
        ring.push_back({*position, bytes});
        mark(ring.back(), 1);
        continue;
      }
      ASSERT_FALSE(ring.empty());
      const uint64_t end = room.OffsetOf(ring.back().position) + ring.back().bytes;
      const auto behind = owners.begin() + static_cast<ptrdiff_t>(end);
      const bool is_free =
          end + bytes <= size && std::all_of(behind, behind + static_cast<ptrdiff_t>(bytes),
                                             [](int owner) { return owner == 0; });
      ASSERT_FALSE(is_free);
    }
  }
}

TEST(RingRoom, AFullRingTakesTheNextChunkWhenTheOldestIsGivenBack) {
  RingRoom room(10);
  EXPECT_EQ(room.Take(4), 0u);
  EXPECT_EQ(room.Take(4), 4u);
  EXPECT_EQ(room.Take(4), std::nullopt);  // 2 bytes at the end are not enough
  room.GiveBack(4);
  const std::optional<uint64_t> third = room.Take(4);
  ASSERT_TRUE(third.has_value());
  EXPECT_EQ(room.OffsetOf(*third), 0u);
  EXPECT_EQ(room.Take(1), std::nullopt);
}

TEST(RingRoom, ChunksWithoutBytesTakeNone) {
  RingRoom room(0);
  EXPECT_TRUE(room.Take(0).has_value());
  EXPECT_TRUE(room.Take(0).has_value());
}

}  // namespace
}  // namespace hybridopt
