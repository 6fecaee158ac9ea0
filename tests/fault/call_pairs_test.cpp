// Calls that any thread may make, in all pairs and each with itself, while steps are running: each
// returns what the header says, and the steps write the same bits as without these calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "trainer.h"

namespace hybridopt::fault {
namespace {

constexpr uint64_t kSteps = 3;

// The arguments of a call.
struct Target {
  offload_context_t context;
  offload_optimizer_t optimizer;
  std::array<offload_ticket_t, kSteps> tickets;
};

struct Call {
  const char* name;
  int32_t (*make)(const Target& target);
  // Other statuses that the call may return, beside OK and the one for a destroyed handle.
  std::vector<int32_t> others;
};

const Call kCalls[] = {
    {"Wait", [](const Target& t) { return offload_optimizer_wait(t.optimizer, 0, -1); }, {}},
    {"WaitBriefly",
     [](const Target& t) { return offload_optimizer_wait(t.optimizer, t.tickets[1], 20'000); },
     {OFFLOAD_TIMED_OUT}},
    {"GetStats",
     [](const Target& t) {
       auto stats = Make<offload_stats_t>();
       return offload_optimizer_get_stats(t.optimizer, &stats);
     },
     {}},
    {"StepResult",
     [](const Target& t) {
       auto result = Make<offload_step_result_t>();
       const int32_t status = offload_optimizer_step_result(t.optimizer, t.tickets[0], &result);
       if (status == OFFLOAD_OK) {
         EXPECT_EQ(result.step, 1u);
       }
       return status;
     },
     {OFFLOAD_INVALID_STATE}},  // it has not ended yet
    {"ContextInfo",
     [](const Target& t) {
       auto info = Make<offload_context_info_t>();
       return offload_context_get_info(t.context, &info);
     },
     {}},
    {"Destroy", [](const Target& t) { return offload_optimizer_destroy(t.optimizer); }, {}},
};

bool Destroys(const Call& call) { return std::string(call.name) == "Destroy"; }

Target QueueSteps(Trainer& trainer) {
  Target target{trainer.context, trainer.optimizer, {}};
  trainer.UploadGrads(0);
  for (offload_ticket_t& ticket : target.tickets)
    EXPECT_OFFLOAD_OK(offload_optimizer_step(trainer.optimizer, nullptr, &ticket));
  return target;
}

std::vector<std::vector<unsigned char>> Params(const Trainer& trainer) {
  std::vector<std::vector<unsigned char>> params;
  for (uint32_t i = 0; i < trainer.size(); ++i) params.push_back(trainer.ParamBits(i));
  return params;
}

RunOptions Options(int32_t device_kind, uint64_t seed) {
  RunOptions run;
  run.device_kind = device_kind;
  run.sim_seed = seed;
  run.sim_delay_ns_max = device_kind == OFFLOAD_DEVICE_SIM ? 50'000 : 0;
  return run;
}

// Makes both calls at the same time. Returns the params after the steps.
std::vector<std::vector<unsigned char>> RunPair(const Call& one, const Call& other,
                                                const RunOptions& run) {
  Trainer trainer(run);
  trainer.AddParams();
  trainer.Commit();
  const Target target = QueueSteps(trainer);
  const bool destroyed = Destroys(one) || Destroys(other);
  std::atomic<int> arrived = 0;
  std::array<int32_t, 2> statuses{};
  const auto make = [&](const Call& call, int32_t& status) {
    arrived += 1;
    while (arrived < 2) std::this_thread::yield();
    status = call.make(target);
    if (status == OFFLOAD_OK) return;
    const std::string error = offload_last_error();
    const bool is_known =
        std::find(call.others.begin(), call.others.end(), status) != call.others.end();
    if (destroyed && status == OFFLOAD_INVALID_ARGUMENT) {
      EXPECT_NE(error.find("has been destroyed"), std::string::npos) << call.name << ": " << error;
    } else {
      EXPECT_TRUE(is_known) << call.name << ": " << error;
    }
  };
  std::thread thread([&] { make(one, statuses[0]); });
  make(other, statuses[1]);
  thread.join();
  if (!destroyed) {
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, -1));
    return Params(trainer);
  }
  // One of two destroys is refused, and neither is left undone.
  EXPECT_TRUE(statuses[0] == OFFLOAD_OK || statuses[1] == OFFLOAD_OK);
  EXPECT_EQ(offload_optimizer_wait(trainer.optimizer, 0, 0), OFFLOAD_INVALID_ARGUMENT);
  trainer.optimizer = nullptr;
  return Params(trainer);
}

class CallPairs : public testing::TestWithParam<int32_t> {};

TEST_P(CallPairs, GiveWhatTheHeaderSaysAndTheBitsOfStepsAlone) {
  std::vector<std::vector<unsigned char>> alone;
  {
    Trainer trainer(Options(GetParam(), 0));
    trainer.AddParams();
    trainer.Commit();
    QueueSteps(trainer);
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, -1));
    alone = Params(trainer);
  }
  const int rounds = Scaled(10);
  for (size_t i = 0; i < std::size(kCalls); ++i)
    for (size_t j = i; j < std::size(kCalls); ++j)
      for (int round = 0; round < rounds; ++round) {
        const auto seed = static_cast<uint64_t>(round);
        EXPECT_TRUE(RunPair(kCalls[i], kCalls[j], Options(GetParam(), seed)) == alone)
            << kCalls[i].name << " beside " << kCalls[j].name << ", round " << round;
        ASSERT_FALSE(HasFailure());
      }
}

// A change of the fraction moves bytes between two counters, which other threads must not see
// apart.
TEST(StatsTest, BesideAChangeOfTheFractionAddUpToAllState) {
  RunOptions run = Options(OFFLOAD_DEVICE_SIM, 0);
  run.movable = OFFLOAD_MOVABLE_STATES;
  Trainer trainer(run);
  trainer.AddParams();
  trainer.Commit();
  const auto stats_of = [&] {
    auto stats = Make<offload_stats_t>();
    EXPECT_OFFLOAD_OK(offload_optimizer_get_stats(trainer.optimizer, &stats));
    return stats;
  };
  const offload_stats_t before = stats_of();
  const uint64_t all_bytes =
      before.state_bytes[OFFLOAD_TIER_DEVICE] + before.state_bytes[OFFLOAD_TIER_HOST];
  EXPECT_OFFLOAD_OK(offload_optimizer_offload_states(trainer.optimizer, nullptr, nullptr));
  std::atomic<bool> over = false;
  std::thread asking([&] {
    while (!over) {
      const offload_stats_t stats = stats_of();
      ASSERT_LE(stats.state_bytes[OFFLOAD_TIER_DEVICE], all_bytes);
      ASSERT_LE(stats.state_bytes[OFFLOAD_TIER_HOST], all_bytes);
    }
  });
  for (int change = 0; change < Scaled(200); ++change) {
    EXPECT_OFFLOAD_OK(offload_optimizer_set_device_fraction(trainer.optimizer,
                                                            change % 2 == 0 ? 0.8 : 0.2, nullptr));
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, -1));
  }
  over = true;
  asking.join();
}

INSTANTIATE_TEST_SUITE_P(Devices, CallPairs,
                         testing::Values(OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM),
                         [](const testing::TestParamInfo<int32_t>& info) {
                           return info.param == OFFLOAD_DEVICE_HOST ? "Host" : "Sim";
                         });

}  // namespace
}  // namespace hybridopt::fault
