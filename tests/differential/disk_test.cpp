// State on disk: the bits are those of state in memory, at any share, size of chunks and ring, and
// number of directories; also across saves, loads, and reads and writes of state.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "../temporary_directory.h"
#include "lifecycle_rig.h"

namespace hybridopt {
namespace {

std::vector<ParamSpec> Params(Random& random) {
  std::vector<ParamSpec> params;
  for (uint64_t count : {3000, 1, 1027, 0, 5000, 640, 2048, 77}) {
    const int32_t placement = random.OneIn(8)   ? OFFLOAD_PLACE_DEVICE
                              : random.OneIn(4) ? OFFLOAD_PLACE_DISK
                                                : OFFLOAD_PLACE_AUTO;
    params.push_back({kDtypes[random.Below(3)], kDtypes[random.Below(3)], placement, 0, count});
  }
  return params;
}

Problem ProblemOf(uint64_t seed, size_t steps = 4) {
  Random random(seed + 1);
  const int32_t algorithm = kAlgorithmsAndMixed[seed % kAlgorithmsAndMixed.size()];
  Problem problem = RandomProblem(algorithm, Params(random), steps, seed);
  problem.state = StateChoices()[seed / kAlgorithmsAndMixed.size() % StateChoices().size()];
  return problem;
}

// The most bytes that the record of a chunk has: 12 bytes an element, arrays that begin at
// multiples of 256, and areas at those of 4096.
uint64_t RecordBytesMost(uint64_t chunk_elements) { return chunk_elements * 12 + (32 << 10); }

LifecycleSetting SettingOf(uint64_t seed, int32_t device, const std::string& paths) {
  Random random(seed + 2);
  LifecycleSetting setting;
  setting.device_kind = device;
  setting.threads = 1 + static_cast<uint32_t>(random.Below(3));
  setting.seed = seed;
  setting.delay_ns_max = random.OneIn(2) ? 0 : 20'000;
  OptimizerSetting& optimizer = setting.optimizer;
  optimizer.disk_fraction = random.OneIn(6) ? 0 : random.OneIn(3) ? 1 : random.Unit();
  optimizer.device_fraction = random.OneIn(2) ? 0 : random.Unit() * (1 - optimizer.disk_fraction);
  optimizer.disk_paths = paths;
  optimizer.chunk_elements = 1024 + 512 * random.Below(4);
  optimizer.staging_slots = 2 + static_cast<uint32_t>(random.Below(3));
  optimizer.host_executors = random.OneIn(2) ? OFFLOAD_EXECUTORS_AUTO : OFFLOAD_EXECUTORS_CPU;
  if (device != OFFLOAD_DEVICE_HOST && random.OneIn(3))
    optimizer.host_executors = OFFLOAD_EXECUTORS_STREAMED;
  optimizer.save_buffer_bytes = random.OneIn(2) ? 0 : UINT64_MAX;
  if (random.OneIn(3))
    optimizer.disk_ring_bytes = (2 + random.Below(4)) * RecordBytesMost(optimizer.chunk_elements);
  setting.movable = random.OneIn(2) ? kMoveAll : 0;
  if (device != OFFLOAD_DEVICE_HOST) {
    if (optimizer.host_executors != OFFLOAD_EXECUTORS_CPU && random.OneIn(2))
      optimizer.stream_ring_bytes =
          (2 + random.Below(4)) * (optimizer.chunk_elements * 16 + (64 << 10));
    if (setting.movable != 0 && optimizer.host_executors != OFFLOAD_EXECUTORS_STREAMED &&
        random.OneIn(2))
      optimizer.early_update_bytes = uint64_t{1} << (12 + random.Below(10));
  }
  for (int i = 0; i < 8; ++i)
    setting.chunk_orders.push_back(random.OneIn(2) ? 0 : static_cast<int32_t>(random.Below(5)));
  return setting;
}

// One or more directories, in a temporary one.
std::string Paths(const TemporaryDirectory& directory, size_t count) {
  std::string paths;
  for (size_t i = 0; i < count; ++i) {
    const std::string path = directory / ("drive" + std::to_string(i));
    std::filesystem::create_directory(path);
    paths += (i > 0 ? ":" : "") + path;
  }
  return paths;
}

// Most rounds use a file system in memory, which is faster; some of these have no direct I/O.
std::string Parent(uint64_t round) {
  const bool in_memory = round % 8 != 0 && std::filesystem::is_directory("/dev/shm");
  return in_memory ? "/dev/shm" : std::filesystem::temp_directory_path().string();
}

size_t FilesIn(const TemporaryDirectory& directory) {
  size_t files = 0;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory.path()))
    files += entry.is_directory() ? 0 : 1;
  return files;
}

// If the optimizer may update before the step, sends the gradients first.
offload_step_result_t StepOnce(LifecycleRig& rig, const StepInput& input, bool early) {
  if (!early) return rig.StepOnce(input);
  rig.NewGrads(input);
  rig.BindAll();
  rig.Move(offload_optimizer_offload_grads);
  rig.Wait();  // then the workers have begun at least
  const offload_ticket_t ticket = rig.Step(input);
  rig.Wait();
  return rig.ResultOf(ticket);
}

// State in memory streams through the device meanwhile, and is updated before the step.
TEST(Disk, StepsGiveTheSameBitsAndLeaveNoFile) {
  const uint64_t rounds = static_cast<uint64_t>(Scaled(60));
  uint64_t on_disk = 0, streamed = 0, from_disk = 0, early = 0;
  for (uint64_t seed = 0; seed < rounds; ++seed) {
    for (int32_t device : DevicesUnderTest()) {
      const TemporaryDirectory directory(Parent(seed));
      const Solved solved(ProblemOf(seed));
      const LifecycleSetting setting = SettingOf(seed, device, Paths(directory, 1 + seed % 3));
      LifecycleRig rig(solved.problem, setting);
      ASSERT_EQ(rig.Difference(solved.trace[0]), "") << "seed " << seed << ", device " << device;
      for (size_t step = 0; step < solved.problem.steps.size(); ++step) {
        const offload_step_result_t result =
            StepOnce(rig, solved.problem.steps[step], setting.optimizer.early_update_bytes > 0);
        streamed += result.streamed_elements;
        early += result.early_elements + result.undone_elements;
        const uint64_t chunked =
            rig.Plan().elements[OFFLOAD_TIER_HOST] + rig.Plan().elements[OFFLOAD_TIER_DISK];
        EXPECT_LE(result.cpu_elements + result.streamed_elements + result.early_elements, chunked);
        if (setting.optimizer.host_executors == OFFLOAD_EXECUTORS_STREAMED) {
          EXPECT_EQ(result.cpu_elements, 0u);
          from_disk += setting.optimizer.disk_fraction == 1 ? result.streamed_elements : 0;
        } else {
          EXPECT_LE(result.streamed_elements + result.early_elements,
                    rig.Plan().elements[OFFLOAD_TIER_HOST]);
        }
        // A look at state ends what is read ahead for the next step.
        if (seed % 2 == 1 && step + 1 < solved.problem.steps.size()) continue;
        ASSERT_EQ(rig.Difference(solved.trace[step + 1]), "")
            << "seed " << seed << ", device " << device << ", step " << step;
      }
      on_disk += rig.Stats().disk_written_bytes > 0;
      EXPECT_EQ(FilesIn(directory), 0u);
    }
  }
  EXPECT_GT(on_disk, rounds * DevicesUnderTest().size() / 2);
  if (TestScale() < 1) return;  // few programs may have none of these
  EXPECT_GT(streamed, 0u);
  EXPECT_GT(from_disk, 0u);
  EXPECT_GT(early, 0u);
}

// Steps, moves of everything, and a save between them, all queued without a wait.
TEST(Disk, QueuedWorkGivesTheSameBits) {
  const uint64_t rounds = static_cast<uint64_t>(Scaled(30));
  for (uint64_t seed = 0; seed < rounds; ++seed) {
    for (int32_t device : DevicesUnderTest()) {
      const TemporaryDirectory directory(Parent(seed));
      const Solved solved(ProblemOf(seed));
      LifecycleSetting setting = SettingOf(seed, device, Paths(directory, 2));
      setting.movable = kMoveAll;
      LifecycleRig rig(solved.problem, setting);
      rig.NewGrads(solved.problem.steps[0]);
      rig.BindAll();
      rig.Step(solved.problem.steps[0]);
      rig.Move(offload_optimizer_offload_states);
      rig.Move(offload_optimizer_reload_states);
      // Masters beside params would lose their lower bits.
      if (!solved.problem.state.split()) rig.Move(offload_optimizer_refresh_masters);
      rig.Save(directory / "saved");
      rig.Wait();
      ASSERT_EQ(rig.Difference(solved.trace[1]), "") << "seed " << seed << ", device " << device;
      rig.NewGrads(solved.problem.steps[1]);
      rig.BindAll();
      const offload_ticket_t save = rig.Save(directory / "again");
      rig.Step(solved.problem.steps[1]);
      rig.Wait(save);
      rig.Wait();
      ASSERT_EQ(rig.Difference(solved.trace[2]), "") << "seed " << seed << ", device " << device;
      for (const char* name : {"saved", "again"}) {
        MUST(rig.TryLoad(directory / name));
        ASSERT_EQ(rig.Difference(solved.trace[1]), "") << name << ", seed " << seed;
      }
    }
  }
}

// Scratch files that this process holds open in a directory.
size_t OpenFilesIn(const TemporaryDirectory& directory) {
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;  // the descriptor of this very loop
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    files += target.rfind(directory.path(), 0) == 0 ? 1 : 0;
  }
  return files;
}

struct SharesOfTiers {
  double device;
  double disk;
};

SharesOfTiers AnyShares(Random& random) {
  const double disk = random.OneIn(5) ? 0 : random.OneIn(4) ? 1 : random.Unit();
  return {random.OneIn(3) ? 0 : random.Unit() * (1 - disk), disk};
}

// Shares change to any values between any two steps, beside saves and moves of all state, queued
// without a wait. In the end everything is as if the optimizer had been made with the last shares.
TEST(Disk, SharesMayChangeAtAnyTime) {
  const uint64_t rounds = static_cast<uint64_t>(Scaled(60));
  uint64_t moved = 0;
  for (uint64_t seed = 0; seed < rounds; ++seed) {
    for (int32_t device : DevicesUnderTest()) {
      const TemporaryDirectory directory(Parent(seed));
      const Solved solved(ProblemOf(seed, 6));
      Random random(seed + 3);
      LifecycleSetting setting = SettingOf(seed, device, Paths(directory, 1 + seed % 3));
      setting.optimizer.disk_ring_bytes = 0;
      LifecycleRig rig(solved.problem, setting);
      const uint64_t at_commit = rig.Plan().elements[OFFLOAD_TIER_DISK];
      std::vector<offload_ticket_t> saves;
      std::vector<size_t> saved_after;
      for (size_t step = 0; step < solved.problem.steps.size(); ++step) {
        if (random.OneIn(3)) rig.Wait();
        const bool away = setting.movable != 0 && random.OneIn(4);
        if (away) rig.Move(offload_optimizer_offload_states);
        if (random.OneIn(4)) {
          saves.push_back(rig.Save(directory / ("saved" + std::to_string(step))));
          saved_after.push_back(step);
        }
        for (uint64_t changes = random.Below(3); changes > 0; --changes) {
          const SharesOfTiers shares = AnyShares(random);
          rig.SetFractions(shares.device, shares.disk);
          setting.optimizer.device_fraction = shares.device;
          setting.optimizer.disk_fraction = shares.disk;
        }
        if (random.OneIn(4)) {
          const double fraction = random.Unit() * (1 - setting.optimizer.disk_fraction);
          rig.SetDeviceFraction(fraction);  // the disk keeps its share
          setting.optimizer.device_fraction = fraction;
        }
        if (away) rig.Move(offload_optimizer_reload_states);
        rig.Wait();
        (void)StepOnce(rig, solved.problem.steps[step],
                       setting.optimizer.early_update_bytes > 0 && random.OneIn(2));
        if (random.OneIn(3)) continue;
        rig.Wait();
        ASSERT_EQ(rig.Difference(solved.trace[step + 1]), "")
            << "seed " << seed << ", device " << device << ", step " << step;
      }
      for (const offload_ticket_t save : saves) rig.Wait(save);
      rig.Wait();
      ASSERT_EQ(rig.Difference(solved.trace.back()), "")
          << "seed " << seed << ", device " << device;
      const offload_plan_t plan = rig.Plan();
      moved += plan.elements[OFFLOAD_TIER_DISK] != at_commit;
      EXPECT_EQ(OpenFilesIn(directory), 1 + seed % 3);
      LifecycleRig other(solved.problem, setting);
      const offload_plan_t made = other.Plan();
      for (int32_t tier : {OFFLOAD_TIER_DEVICE, OFFLOAD_TIER_HOST, OFFLOAD_TIER_DISK}) {
        EXPECT_EQ(plan.elements[tier], made.elements[tier]) << "seed " << seed;
        EXPECT_EQ(rig.Stats().state_bytes[tier], other.Stats().state_bytes[tier]);
      }
      EXPECT_EQ(plan.disk_bytes, made.disk_bytes);
      EXPECT_EQ(rig.Stats().host_bytes, plan.host_bytes);
      for (size_t i = 0; i < saves.size(); ++i) {
        MUST(other.TryLoad(directory / ("saved" + std::to_string(saved_after[i]))));
        ASSERT_EQ(other.Difference(solved.trace[saved_after[i]]), "") << "seed " << seed;
      }
    }
  }
  EXPECT_GT(moved, rounds / 2);
}

// From disk to memory, from memory to disk, and to another share and size of chunks.
TEST(Disk, ACheckpointLoadsIntoAnyTier) {
  const uint64_t rounds = static_cast<uint64_t>(Scaled(40));
  for (uint64_t seed = 0; seed < rounds; ++seed) {
    for (int32_t device : DevicesUnderTest()) {
      const TemporaryDirectory directory(Parent(seed));
      const Solved solved(ProblemOf(seed));
      const LifecycleSetting from = SettingOf(seed, device, Paths(directory, 2));
      const LifecycleSetting to = SettingOf(seed + 1000, device, Paths(directory, 1));
      LifecycleSetting memory = from;
      memory.optimizer.disk_fraction = 0;
      memory.optimizer.disk_ring_bytes = 0;
      const std::string path = directory / "saved", again = directory / "again";
      LifecycleRig first(solved.problem, from);
      (void)first.StepOnce(solved.problem.steps[0]);
      first.Wait(first.Save(path));
      LifecycleRig second(solved.problem, memory);
      MUST(second.TryLoad(path));
      ASSERT_EQ(second.Difference(solved.trace[1]), "") << "seed " << seed;
      second.Wait(second.Save(again));
      LifecycleRig third(solved.problem, to);
      MUST(third.TryLoad(again));
      ASSERT_EQ(third.Difference(solved.trace[1]), "") << "seed " << seed;
      (void)third.StepOnce(solved.problem.steps[1]);
      ASSERT_EQ(third.Difference(solved.trace[2]), "") << "seed " << seed;
    }
  }
}

// ----------------------------------------------------------------------------- plans and counts --

Problem LargeProblem() {
  std::vector<ParamSpec> params(
      6, {OFFLOAD_BF16, OFFLOAD_BF16, OFFLOAD_PLACE_AUTO, 0, uint64_t{40'000}});
  Problem problem = RandomProblem(OFFLOAD_ADAMW, params, 1, 5);
  for (size_t id = 0; id < params.size(); ++id)
    if (!problem.steps[0].grads[id].has_value())
      problem.steps[0].grads[id] = Bytes(problem.params[id].grad_bytes());
  return problem;
}

// Waits until the ring has been read full, after `before` bytes, and returns what that read.
uint64_t AwaitReadAhead(const LifecycleRig& rig, uint64_t before) {
  const uint64_t ring = rig.Plan().host_disk_bytes;
  while (rig.Stats().disk_read_bytes < before + ring) std::this_thread::yield();
  return rig.Stats().disk_read_bytes - before;
}

TEST(Disk, PlansAndStatsTellWhatIsWhereAndWhatAStepMoves) {
  for (int32_t device : DevicesUnderTest()) {
    const TemporaryDirectory directory;
    const Solved solved(LargeProblem());
    LifecycleSetting setting;
    setting.device_kind = device;
    setting.optimizer.chunk_elements = 4096;
    setting.optimizer.disk_fraction = 0.75;
    setting.optimizer.disk_ring_bytes = 4 * RecordBytesMost(4096);
    setting.optimizer.disk_paths = Paths(directory, 2);
    setting.optimizer.host_executors = OFFLOAD_EXECUTORS_CPU;  // chunks and records of one size
    LifecycleRig rig(solved.problem, setting);
    const offload_plan_t plan = rig.Plan();
    EXPECT_EQ(plan.elements[OFFLOAD_TIER_DISK], 180'000u);
    EXPECT_EQ(plan.elements[OFFLOAD_TIER_HOST], 60'000u);
    for (int32_t kind : {OFFLOAD_STATE_MASTER, OFFLOAD_STATE_EXP_AVG, OFFLOAD_STATE_EXP_AVG_SQ}) {
      EXPECT_GE(plan.state_bytes[OFFLOAD_TIER_DISK][kind], 180'000u * 4);
      EXPECT_LT(plan.state_bytes[OFFLOAD_TIER_DISK][kind], 180'000u * 4 + 6 * 256);
    }
    EXPECT_GE(plan.disk_step_bytes, 180'000u * 12);
    EXPECT_LT(plan.disk_step_bytes, 180'000u * 12 + plan.chunk_count * (16 << 10));
    EXPECT_GE(plan.disk_bytes, plan.disk_step_bytes);
    EXPECT_GT(plan.host_disk_bytes, 3 * 4096u * 12);
    EXPECT_LE(plan.host_disk_bytes, setting.optimizer.disk_ring_bytes);
    EXPECT_EQ(rig.Stats().state_bytes[OFFLOAD_TIER_DISK], 180'000u * 12);
    EXPECT_EQ(rig.Stats().state_bytes[OFFLOAD_TIER_HOST], 60'000u * 12);
    EXPECT_EQ(rig.Stats().host_bytes, plan.host_bytes);

    EXPECT_EQ(rig.Stats().disk_written_bytes, plan.disk_step_bytes);
    EXPECT_EQ(AwaitReadAhead(rig, 0), plan.host_disk_bytes);
    (void)rig.StepOnce(solved.problem.steps[0]);
    EXPECT_EQ(rig.Stats().disk_written_bytes, 2 * plan.disk_step_bytes);
    // What was read ahead was not read again.
    EXPECT_EQ(AwaitReadAhead(rig, plan.disk_step_bytes), plan.host_disk_bytes);
    const offload_stats_t stepped = rig.Stats();
    rig.Wait(rig.Save(directory / "saved"));
    const offload_stats_t saved = rig.Stats();
    EXPECT_EQ(saved.disk_read_bytes, stepped.disk_read_bytes + plan.disk_step_bytes);  // each once
    EXPECT_EQ(saved.disk_written_bytes, stepped.disk_written_bytes);
    MUST(rig.TryLoad(directory / "saved"));
    const offload_stats_t loaded = rig.Stats();
    EXPECT_EQ(loaded.disk_written_bytes, saved.disk_written_bytes + plan.disk_step_bytes);
    EXPECT_EQ(rig.Difference(solved.trace[1]), "");
  }
}

// Without a share of the others a placed param is on disk beside params that are placed elsewhere.
TEST(Disk, AParamThatIsPlacedThereIsOnDiskAloneAndWhole) {
  for (int32_t device : DevicesUnderTest()) {
    const TemporaryDirectory directory;
    const auto placed = [](int32_t placement) {
      return ParamSpec{OFFLOAD_BF16, OFFLOAD_BF16, placement, 0, 10'000};
    };
    const Solved solved(RandomProblem(
        OFFLOAD_ADAMW,
        {placed(OFFLOAD_PLACE_DISK), placed(OFFLOAD_PLACE_HOST), placed(OFFLOAD_PLACE_AUTO),
         placed(OFFLOAD_PLACE_DISK), placed(OFFLOAD_PLACE_DEVICE)},
        3, 7));
    LifecycleSetting setting;
    setting.device_kind = device;
    setting.optimizer.chunk_elements = 4096;
    setting.optimizer.disk_paths = directory.path();
    LifecycleRig rig(solved.problem, setting);
    const offload_plan_t plan = rig.Plan();
    EXPECT_EQ(plan.elements[OFFLOAD_TIER_DISK], 20'000u);
    EXPECT_EQ(rig.Stats().state_bytes[OFFLOAD_TIER_DISK], 20'000u * 12);
    EXPECT_EQ(rig.Stats().host_bytes, plan.host_bytes);
    for (size_t step = 0; step < solved.problem.steps.size(); ++step) {
      (void)rig.StepOnce(solved.problem.steps[step]);
      EXPECT_EQ(rig.Difference(solved.trace[step + 1]), "");
    }
  }
}

// What a step without the first param leaves in the ring gives way to that param.
TEST(Disk, AParamThatComesBackFindsRoomInTheRing) {
  Problem problem = RandomProblem(
      OFFLOAD_ADAMW, std::vector<ParamSpec>(2, {OFFLOAD_BF16, OFFLOAD_BF16, 0, 0, 5000}), 3, 4);
  for (StepInput& step : problem.steps)
    for (size_t id = 0; id < 2; ++id) step.grads[id] = Bytes(problem.params[id].grad_bytes());
  problem.steps[0].grads[0].reset();
  const Solved solved(std::move(problem));
  for (int32_t device : DevicesUnderTest()) {
    const TemporaryDirectory directory;
    LifecycleSetting setting;
    setting.device_kind = device;
    setting.optimizer.chunk_elements = 1024;
    setting.optimizer.disk_fraction = 1;
    setting.optimizer.disk_ring_bytes = 2 * RecordBytesMost(1024);
    setting.optimizer.disk_paths = directory.path();
    LifecycleRig rig(solved.problem, setting);
    for (const StepInput& step : solved.problem.steps) (void)rig.StepOnce(step);
    EXPECT_EQ(rig.Difference(solved.trace.back()), "");
  }
}

// A skipped step changes nothing, on disk neither.
TEST(Disk, ASkippedStepWritesNothing) {
  for (int32_t device : DevicesUnderTest()) {
    const TemporaryDirectory directory;
    Problem problem = LargeProblem();
    PutElement(*problem.steps[0].grads[3], OFFLOAD_BF16, 7, BitsOf(OFFLOAD_BF16, INFINITY));
    const Solved solved(std::move(problem));
    LifecycleSetting setting;
    setting.device_kind = device;
    setting.optimizer.disk_fraction = 1;
    setting.optimizer.disk_paths = directory.path();
    LifecycleRig rig(solved.problem, setting);
    const uint64_t written = rig.Stats().disk_written_bytes;
    EXPECT_EQ(rig.StepOnce(solved.problem.steps[0]).skipped, 1);
    EXPECT_EQ(rig.Difference(solved.trace[1]), "");
    EXPECT_EQ(rig.Stats().disk_written_bytes, written);
  }
}

// Host memory of state that has gone to disk is free, at the end of what the host has, too.
TEST(Disk, StateThatGoesToDiskLeavesNoPageOnTheHost) {
  const TemporaryDirectory directory;
  const Solved solved(
      RandomProblem(OFFLOAD_ADAMW, {{OFFLOAD_BF16, OFFLOAD_BF16, 0, 0, uint64_t{1} << 20}}, 1, 5));
  LifecycleSetting setting;
  setting.device_kind = OFFLOAD_DEVICE_HOST;
  setting.optimizer.disk_paths = directory.path();
  LifecycleRig rig(solved.problem, setting);
  auto view = Make<offload_state_view_t>();
  MUST(offload_optimizer_state(rig.optimizer(), 0, OFFLOAD_STATE_EXP_AVG, &view));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(view.host_data) + 4095) / 4096 * 4096;
  const uint64_t pages = (view.host_count * 4 - 4096) / 4096;
  const auto present = [&] {
    std::vector<unsigned char> of_pages(pages);
    EXPECT_EQ(mincore(reinterpret_cast<void*>(begin), pages * 4096, of_pages.data()), 0);
    return std::count_if(of_pages.begin(), of_pages.end(), [](auto page) { return page & 1; });
  };
  EXPECT_EQ(present(), static_cast<ptrdiff_t>(pages));
  rig.SetFractions(0, 0.75);
  rig.Wait();
  EXPECT_LE(present(), static_cast<ptrdiff_t>(pages / 4 + 2));
  EXPECT_GE(present(), static_cast<ptrdiff_t>(pages / 4 - 2));
  rig.SetFractions(0, 1);
  rig.Wait();
  EXPECT_EQ(present(), 0);
  EXPECT_EQ(rig.Difference(solved.trace[0]), "");
}

TEST(Disk, AViewTellsHowManyElementsHaveNoAddress) {
  for (int32_t device : DevicesUnderTest()) {
    const TemporaryDirectory directory;
    const Solved solved(LargeProblem());
    LifecycleSetting setting;
    setting.device_kind = device;
    setting.optimizer.disk_fraction = 0.25;
    setting.optimizer.disk_paths = directory.path();
    LifecycleRig rig(solved.problem, setting);
    uint64_t on_host = 0, on_disk = 0;
    for (uint32_t id = 0; id < rig.size(); ++id) {
      auto view = Make<offload_state_view_t>();
      MUST(offload_optimizer_state(rig.optimizer(), id, OFFLOAD_STATE_EXP_AVG, &view));
      on_host += view.host_count;
      on_disk += view.disk_count;
      EXPECT_EQ(view.host_data == nullptr, view.host_count == 0);
    }
    EXPECT_EQ(on_host, 180'000u);
    EXPECT_EQ(on_disk, 60'000u);
  }
}

}  // namespace
}  // namespace hybridopt
