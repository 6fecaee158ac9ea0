// Many random calls, good and bad, on several contexts and optimizers at once. No call crashes;
// every failure has a known status and a text; a refused call has changed nothing. A model checks
// this: it counts, and remembers where everything is. For lifecycle calls it also knows which must
// succeed and which must be refused.
#include <gtest/gtest.h>

#include "../sanitizers.h"
#include "../scale.h"
#include "random_calls/calls.h"

namespace hybridopt::fault::random_calls {
namespace {

constexpr uint64_t kCallsPerWorld = 19'000;
constexpr uint64_t kWorlds = 8;

// The coverage of all worlds of a run.
struct Reached {
  World::Tally tally;
  std::array<uint64_t, kMoves.size()> moved{};
  uint64_t loaded = 0, popped = 0;

  void Add(const World& world) {
    for (const auto& [key, count] : world.tally) tally[key] += count;
    for (size_t move = 0; move < kMoves.size(); ++move) moved[move] += world.moved[move];
    loaded += world.loaded;
    popped += world.popped;
  }
};

// There really was both good and bad input.
void ExpectEveryCallSucceededAndWasRefused(const World::Tally& tally, uint64_t calls) {
  uint64_t total = 0;
  std::map<std::string, std::array<uint64_t, 2>> outcomes;  // refused, done
  for (const auto& [key, count] : tally) {
    std::printf("%8llu %-20s %s\n", static_cast<unsigned long long>(count), key.first.c_str(),
                offload_status_name(key.second));
    outcomes[key.first][key.second == OFFLOAD_OK] += count;
    total += count;
  }
  EXPECT_GE(total, calls);
  EXPECT_EQ(outcomes.size(), EveryCall().size());
  for (const auto& [name, count] : outcomes) {
    EXPECT_GT(count[0], 0u) << name << " was never refused";
    EXPECT_GT(count[1], 0u) << name << " never succeeded";
  }
}

void ExpectEveryMoveAndALoadDidSomething(const Reached& reached) {
  for (size_t move = 0; move < kMoves.size(); ++move)
    EXPECT_GT(reached.moved[move], 0u) << "move " << move << " never had anything to do";
  EXPECT_GT(reached.loaded, 0u);
  EXPECT_GT(reached.popped, 0u);
}

TEST(RandomCalls, NeverCrashAndChangeNothingWhenRefused) {
  // Under the address sanitizer a full run at any scale, because this test is made for it. A long
  // run has more worlds; the run under the thread sanitizer is shorter.
  const double scale = TestScale();
  const uint64_t worlds = scale > 1 ? Scaled(kWorlds) : kWorlds;
  const bool full = !HYBRIDOPT_TSAN || scale >= 1;
  const uint64_t calls = full ? kCallsPerWorld : Scaled(kCallsPerWorld);
  Reached reached;
  for (uint64_t number = 1; number <= worlds; ++number) {
    SCOPED_TRACE("world " + std::to_string(number));
    World world(number);
    for (uint64_t call = 0; call < calls && !HasFailure(); ++call) world.MakeCall();
    world.DestroyAll();
    reached.Add(world);
    if (HasFailure()) return;
  }
  // The thread sanitizer's run is too short for each call to succeed: some take many calls in a
  // row, and which of those succeed depends on how fast queued work is.
  if (!full) return;
  ExpectEveryCallSucceededAndWasRefused(reached.tally, worlds * calls);
  ExpectEveryMoveAndALoadDidSomething(reached);
}

}  // namespace
}  // namespace hybridopt::fault::random_calls
