// The device fraction changes while training runs, to any value, at any time, with any other work
// going on: the bits are those of a run that never changed it, and the memory is that of an
// optimizer that was made with this fraction.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <limits>
#include <string>
#include <vector>

#include "../temporary_directory.h"
#include "lifecycle_rig.h"

namespace hybridopt {
namespace {

std::vector<ParamSpec> Params(Random& random) {
  std::vector<ParamSpec> params;
  const int32_t placements[] = {OFFLOAD_PLACE_AUTO, OFFLOAD_PLACE_HOST, OFFLOAD_PLACE_DEVICE};
  for (uint64_t count : {3000, 1, 1027, 0, 5000, 640, 2048, 77})
    params.push_back({kDtypes[random.Below(3)], kDtypes[random.Below(3)],
                      placements[random.OneIn(3) ? random.Below(3) : 0], 0, count});
  return params;
}

Problem ProblemOf(uint64_t seed) {
  Random random(seed + 1);
  Problem problem = RandomProblem(AlgorithmOfSeed(seed), Params(random), 6, seed);
  problem.state = StateChoices()[seed / kAlgorithmValues.size() % StateChoices().size()];
  return problem;
}

double AnyFraction(Random& random) {
  return random.OneIn(5) ? 0 : random.OneIn(4) ? 1 : random.Unit();
}

LifecycleSetting SettingOf(uint64_t seed, int32_t device) {
  Random random(seed + 2);
  LifecycleSetting setting;
  setting.device_kind = device;
  setting.threads = 1 + static_cast<uint32_t>(random.Below(3));
  setting.seed = seed;
  setting.delay_ns_max = random.OneIn(2) ? 0 : 20'000;
  setting.optimizer.device_fraction = AnyFraction(random);
  setting.optimizer.chunk_elements = 1024 + 512 * random.Below(4);
  setting.optimizer.staging_slots = 2 + static_cast<uint32_t>(random.Below(3));
  if (device != OFFLOAD_DEVICE_HOST) {
    DrawExecutors(setting.optimizer.chunk_elements, random, setting.optimizer);
    setting.slow_event = DrawSlowEvent(random);
  }
  setting.movable = random.OneIn(2) ? kMoveAll : 0;
  for (int i = 0; i < 8; ++i)
    setting.chunk_orders.push_back(random.OneIn(2) ? 0 : static_cast<int32_t>(random.Below(5)));
  return setting;
}

std::vector<int32_t> Devices() {
  std::vector<int32_t> devices = AcceleratorsUnderTest();
  devices.push_back(OFFLOAD_DEVICE_HOST);
  return devices;
}

TEST(LiveFractionTest, AnyChangeBetweenAnyTwoStepsGivesTheSameBits) {
  const uint64_t rounds = static_cast<uint64_t>(Scaled(90));
  for (uint64_t seed = 0; seed < rounds; ++seed) {
    for (int32_t device : Devices()) {
      const Solved solved(ProblemOf(seed));
      LifecycleRig rig(solved.problem, SettingOf(seed, device));
      Random random(seed + 3);
      for (size_t step = 0; step < solved.problem.steps.size(); ++step) {
        rig.Wait();
        rig.NewGrads(solved.problem.steps[step]);
        rig.BindAll();
        for (uint64_t change = random.Below(3); change > 0; --change)
          rig.SetDeviceFraction(AnyFraction(random));
        rig.Step(solved.problem.steps[step]);
        if (random.OneIn(2)) rig.SetDeviceFraction(AnyFraction(random));
        rig.Wait();
        ASSERT_EQ(rig.Difference(solved.trace[step + 1]), "")
            << "seed " << seed << ", device " << device << ", step " << step;
      }
    }
  }
}

// States that are offloaded when the fraction changes stay so, and are all there after the reload.
TEST(LiveFractionTest, OffloadedStatesKeepTheirBits) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    const Solved solved(ProblemOf(seed));
    LifecycleSetting setting = SettingOf(seed, AcceleratorUnderTest());
    setting.movable = kMoveAll;
    setting.optimizer.device_fraction = 0.9;
    LifecycleRig rig(solved.problem, setting);
    for (size_t step = 0; step < 3; ++step) {
      rig.NewGrads(solved.problem.steps[step]);
      rig.BindAll();
      rig.Step(solved.problem.steps[step]);
      rig.Move(offload_optimizer_offload_states);
      for (double fraction : {0.5, 0.8, 0.3, 0.9}) rig.SetDeviceFraction(fraction);
      rig.Move(offload_optimizer_reload_states);
      rig.Wait();
      ASSERT_EQ(rig.Difference(solved.trace[step + 1]), "") << "seed " << seed << ", step " << step;
    }
  }
}

// Memory that is no longer needed is freed, on both sides.
TEST(LiveFractionTest, MemoryIsThatOfAnOptimizerMadeWithTheFraction) {
  for (uint64_t seed = 0; seed < 30; ++seed) {
    const Problem problem = ProblemOf(seed);
    LifecycleSetting setting = SettingOf(seed, OFFLOAD_DEVICE_SIM);
    LifecycleRig rig(problem, setting);
    Random random(seed);
    for (double fraction : {random.Unit(), 0.0, random.Unit(), 1.0, random.Unit()}) {
      rig.SetDeviceFraction(fraction);
      rig.Wait();
      setting.optimizer.device_fraction = fraction;
      LifecycleRig fresh(problem, setting);
      const offload_plan_t plan = rig.Plan(), fresh_plan = fresh.Plan();
      EXPECT_EQ(plan.elements[OFFLOAD_TIER_DEVICE], fresh_plan.elements[OFFLOAD_TIER_DEVICE]);
      EXPECT_EQ(plan.host_bytes, fresh_plan.host_bytes);
      EXPECT_EQ(plan.device_bytes, fresh_plan.device_bytes);
      EXPECT_EQ(rig.DeviceBytesUsed(), fresh.DeviceBytesUsed()) << "seed " << seed;
      EXPECT_EQ(rig.Stats().state_bytes[OFFLOAD_TIER_DEVICE],
                fresh.Stats().state_bytes[OFFLOAD_TIER_DEVICE]);
      EXPECT_EQ(rig.Stats().state_bytes[OFFLOAD_TIER_HOST],
                fresh.Stats().state_bytes[OFFLOAD_TIER_HOST]);
      EXPECT_EQ(rig.Stats().device_bytes, fresh.Stats().device_bytes);
      EXPECT_EQ(rig.Stats().host_bytes, fresh.Stats().host_bytes);
      EXPECT_EQ(rig.Stats().staging_bytes, fresh.Stats().staging_bytes);
    }
  }
}

// The pages of state that has moved to the device belong to the system again: a touch would fault.
TEST(LiveFractionTest, HostPagesOfWhatIsOnTheDeviceAreGivenBack) {
  Problem problem = RandomProblem(
      OFFLOAD_ADAMW, {{OFFLOAD_BF16, OFFLOAD_BF16, OFFLOAD_PLACE_AUTO, 0, 1 << 20}}, 1, 1);
  LifecycleSetting setting = SettingOf(1, OFFLOAD_DEVICE_SIM);
  setting.memory_bytes = 64 << 20;
  setting.optimizer.device_fraction = 0;
  LifecycleRig rig(problem, setting);
  const auto view_of = [&] {
    auto view = Make<offload_state_view_t>();
    MUST(offload_optimizer_state(rig.optimizer(), 0, OFFLOAD_STATE_EXP_AVG, &view));
    return view;
  };
  const auto host_pages = [&](const void* begin, uint64_t bytes) {
    const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + 4095) / 4096 * 4096;
    const uintptr_t last = (reinterpret_cast<uintptr_t>(begin) + bytes) / 4096 * 4096;
    std::vector<unsigned char> present((last - first) / 4096);
    // mincore refuses addresses that are not mapped; pages without memory are not present.
    EXPECT_EQ(mincore(reinterpret_cast<void*>(first), last - first, present.data()), 0);
    uint64_t count = 0;
    for (unsigned char one : present) count += one & 1;
    return count;
  };
  const offload_state_view_t all = view_of();
  EXPECT_EQ(all.host_count, uint64_t{1} << 20);
  EXPECT_GE(host_pages(all.host_data, all.host_count * 4), (all.host_count * 4 / 4096) - 2);
  rig.SetDeviceFraction(1);
  rig.Wait();
  EXPECT_EQ(view_of().device_count, uint64_t{1} << 20);
  EXPECT_EQ(host_pages(all.host_data, all.host_count * 4), 0u);
}

TEST(LiveFractionTest, AFullDeviceRefusesTheCallAndNothingHasChanged) {
  const Solved solved(ProblemOf(0));
  LifecycleSetting setting = SettingOf(0, OFFLOAD_DEVICE_SIM);
  setting.optimizer.device_fraction = 0;
  setting.memory_bytes = 1 << 20;
  LifecycleRig rig(solved.problem, setting);
  auto info = Make<offload_context_info_t>();
  MUST(offload_context_get_info(rig.context(), &info));
  void* ballast = rig.Allocate(info.device_memory_free_bytes - 4096);
  const uint64_t used = rig.DeviceBytesUsed();
  EXPECT_EQ(offload_optimizer_set_device_fraction(rig.optimizer(), 1, nullptr),
            OFFLOAD_OUT_OF_DEVICE_MEMORY);
  const std::string text = offload_last_error();
  for (const char* words : {"device_fraction", "needs", "are free"})
    EXPECT_NE(text.find(words), std::string::npos) << text;
  EXPECT_EQ(rig.DeviceBytesUsed(), used);
  EXPECT_EQ(rig.Stats().queued, 0u);
  rig.Free(ballast);
  rig.SetDeviceFraction(1);
  for (const StepInput& step : solved.problem.steps) {
    rig.Wait();
    rig.NewGrads(step);
    rig.BindAll();
    rig.Step(step);
  }
  rig.Wait();
  EXPECT_EQ(rig.Difference(solved.trace.back()), "");
}

TEST(LiveFractionTest, BadFractionsAreRefusedByName) {
  const Problem problem = ProblemOf(0);
  LifecycleRig rig(problem, SettingOf(0, OFFLOAD_DEVICE_SIM));
  for (double fraction : {-0.1, 1.5, std::numeric_limits<double>::quiet_NaN()}) {
    EXPECT_EQ(offload_optimizer_set_device_fraction(rig.optimizer(), fraction, nullptr),
              OFFLOAD_INVALID_ARGUMENT);
    EXPECT_NE(std::string(offload_last_error()).find("device_fraction is"), std::string::npos);
  }
}

// A save holds the state of its step, read once, wherever it is when the change comes.
TEST(LiveFractionTest, AChangeBesideASaveLeavesTheCheckpointWhole) {
  const TemporaryDirectory directory;
  for (uint64_t seed = 0; seed < static_cast<uint64_t>(Scaled(30)); ++seed) {
    const Solved solved(ProblemOf(seed));
    const std::string path = directory / ("checkpoint-" + std::to_string(seed));
    Random random(seed + 5);
    {
      LifecycleRig rig(solved.problem, SettingOf(seed, OFFLOAD_DEVICE_SIM));
      for (size_t step = 0; step < solved.problem.steps.size(); ++step) {
        rig.Wait();
        rig.NewGrads(solved.problem.steps[step]);
        rig.BindAll();
        if (step == 3) (void)rig.Save(path);
        if (step >= 3) rig.SetDeviceFraction(AnyFraction(random));
        rig.Step(solved.problem.steps[step]);
      }
      rig.Wait();
      ASSERT_EQ(rig.Difference(solved.trace.back()), "") << "seed " << seed;
    }
    LifecycleRig loaded(solved.problem, SettingOf(seed + 1000, OFFLOAD_DEVICE_SIM));
    ASSERT_EQ(loaded.TryLoad(path), OFFLOAD_OK) << offload_last_error();
    ASSERT_EQ(loaded.Difference(solved.trace[3]), "") << "seed " << seed;
  }
}

// A stream that waits for params of a step before the change waits for the whole step after it.
TEST(LiveFractionTest, AStreamMayWaitForATicketFromBefore) {
  const Solved solved(ProblemOf(2));
  LifecycleSetting setting = SettingOf(2, OFFLOAD_DEVICE_SIM);
  setting.optimizer.device_fraction = 0;
  setting.delay_ns_max = 2'000'000;
  LifecycleRig rig(solved.problem, setting);
  rig.NewGrads(solved.problem.steps[0]);
  rig.BindAll();
  const offload_ticket_t ticket = rig.Step(solved.problem.steps[0]);
  rig.SetDeviceFraction(1);
  for (uint32_t id = rig.size(); id-- > 0;) {
    MUST(offload_optimizer_stream_wait(rig.optimizer(), ticket, nullptr, &id, 1));
    Bytes read(solved.problem.params[id].data_bytes());
    if (read.empty()) continue;
    MUST(offload_device_download(rig.context(), read.data(), rig.data[id], read.size(), nullptr));
    EXPECT_EQ(read, solved.trace[1].params[id].data) << "param " << id;
  }
}

}  // namespace
}  // namespace hybridopt
