// Many random calls, good and bad, on several contexts and optimizers at once. No call crashes;
// every failure has a known status and a text; what was refused has changed nothing, which a model
// that counts, and remembers what is where, is asked about. Of the lifecycle's calls it also knows
// which must be done and which refused.
#include <gtest/gtest.h>

#include "../sanitizers.h"
#include "../scale.h"
#include "random_calls/calls.h"

namespace hybridopt::fault::random_calls {
namespace {

constexpr uint64_t kCallsPerWorld = 19'000;
constexpr uint64_t kWorlds = 8;

// What all worlds of a run reached.
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

// Both good and bad input was really there.
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
  // A full run whatever the scale under the address sanitizer: it is what that is for. A long run
  // has more worlds; the thread sanitizer's is shorter.
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
