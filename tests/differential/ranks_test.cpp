// Several ranks that share one model: all of them agree on clipping, loss scale and skip, and every
// byte of every rank is that of the whole model, trained by one.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ranks_rig.h"

namespace hybridopt {
namespace {

using Setting = RanksSetting;

std::vector<Setting> Settings() {
  std::vector<Setting> settings(5);
  for (Setting& setting : settings) {
    setting.context.threads = 2;
    setting.optimizer.chunk_elements = 1024;
    setting.optimizer.staging_slots = 2;
  }
  for (size_t i = 1; i < settings.size(); ++i)
    settings[i].context.device_kind = AcceleratorUnderTest();
  settings[2].optimizer.device_fraction = 0.3;
  settings[3].optimizer.device_fraction = 1;
  settings[2].optimizer.host_executors = OFFLOAD_EXECUTORS_STREAMED;
  settings[4].optimizer.device_fraction = 0.5;
  settings[4].context.delay_ns_max = 50'000;
  return settings;
}

uint64_t BitsOfDouble(double value) { return std::bit_cast<uint64_t>(value); }

std::string RunAll(const Sharded& sharded, const Setting& setting) {
  Ranks ranks(sharded, setting);
  std::string difference = ranks.Difference(0);
  for (size_t step = 0; step < sharded.whole.steps.size() && difference.empty(); ++step) {
    ranks.Queue(step);
    ranks.Wait();
    difference = ranks.Difference(step + 1);
    if (!difference.empty()) difference = "step " + std::to_string(step + 1) + ": " + difference;
  }
  return difference;
}

// Random layouts of nine tensors: tensor and pipeline parallel, ZeRO ranges, interleaved boxes,
// replicas. The squares' sums are exact, so that the norm's bits are the whole model's.
TEST(RanksTest, EveryRankStepsAsTheWholeModel) {
  uint64_t seed = 0;
  for (int round = 0; round < Scaled(4); ++round) {
    for (uint32_t world = 1; world <= 4; ++world) {
      for (const Setting& setting : Settings()) {
        ++seed;
        const auto sharded = RandomSharded(AlgorithmOfSeed(seed), world, 6, seed);
        EXPECT_EQ(RunAll(*sharded, setting), "") << "seed " << seed << ", world " << world << ", "
                                                 << Text(setting.context, setting.optimizer);
      }
    }
  }
}

// The problems above would prove little without clipped steps and replicas.
TEST(RanksTest, TheProblemsClipAndReplicate) {
  int clipped = 0, replicas = 0, empty = 0, missing = 0;
  for (uint64_t seed = 1; seed <= 80; ++seed) {
    const auto sharded = RandomSharded(AlgorithmOfSeed(seed), 1 + seed % 4, 6, seed);
    for (const Model& model : sharded->trace) clipped += model.verdict.grad_clip < 1;
    for (size_t id = 0; id < sharded->whole.params.size(); ++id) {
      missing += !sharded->whole.steps[0].grads[id].has_value();
      for (uint32_t rank = 0; rank < sharded->world(); ++rank) {
        replicas += sharded->piece(id, rank).replica;
        empty += sharded->piece(id, rank).count == 0;
      }
    }
  }
  for (int kind : {clipped, replicas, empty, missing}) EXPECT_GT(kind, 50);
}

// ------------------------------------------------------------------------------------ the norm --

// A tensor that identifies a rank: tensor i of the problem belongs only to rank i % world.
std::unique_ptr<Sharded> Pipeline(uint32_t world, size_t steps, uint64_t seed) {
  std::vector<ParamSpec> specs;
  for (uint64_t count : {4099, 33, 1000, 5000, 1, 700})
    specs.push_back({kDtypes[count % 3], kDtypes[specs.size() % 3], 0, 0, count});
  Problem problem = RandomProblem(OFFLOAD_ADAMW, specs, steps, seed);
  Random random(seed);
  std::vector<std::vector<Piece>> pieces(specs.size());
  for (size_t id = 0; id < specs.size(); ++id) {
    for (uint32_t rank = 0; rank < world; ++rank) {
      const auto count = static_cast<int64_t>(problem.params[id].count);
      Piece piece;
      piece.shape = {count};
      piece.offsets = {0};
      piece.extents = {rank == id % world ? count : 0};
      piece.box_count = 1;
      piece.count = static_cast<uint64_t>(piece.extents[0]);
      pieces[id].push_back(piece);
    }
    for (StepInput& input : problem.steps) {
      input.flags = 0;
      input.grads[id] = ExactGrads(problem.params[id].grad_dtype, problem.params[id].count, random);
    }
  }
  return std::make_unique<Sharded>(std::move(problem), std::move(pieces));
}

// The same with every tensor whole on every rank; rank 0 counts.
std::unique_ptr<Sharded> Replicated(uint32_t world, size_t steps, uint64_t seed) {
  Problem problem = Pipeline(1, steps, seed)->whole;
  std::vector<std::vector<Piece>> pieces(problem.params.size());
  for (size_t id = 0; id < problem.params.size(); ++id) {
    for (uint32_t rank = 0; rank < world; ++rank) {
      Piece piece;
      piece.shape = piece.extents = {static_cast<int64_t>(problem.params[id].count)};
      piece.offsets = {0};
      piece.box_count = 1;
      piece.count = problem.params[id].count;
      piece.replica = rank != 0;
      pieces[id].push_back(piece);
    }
  }
  return std::make_unique<Sharded>(std::move(problem), std::move(pieces));
}

// Ordinary gradients: the sum depends on its order, which is that of the ranks. No clipping, so
// that the params are the whole model's all the same.
TEST(RanksTest, AllRanksReportTheSameNormOfOrdinaryGradients) {
  int depends_on_order = 0;
  uint64_t seed = 0;
  for (const Setting& setting : Settings()) {
    Random random(++seed);
    Problem problem = Pipeline(1, 3, seed)->whole;
    for (StepInput& input : problem.steps) {
      input.grad_norm_max = 0;
      for (size_t id = 0; id < problem.params.size(); ++id)
        input.grads[id] =
            RandomArray(problem.params[id].grad_dtype, problem.params[id].count, false, random);
    }
    std::vector<std::vector<Piece>> pieces;
    for (const ParamSpec& param : problem.params)
      pieces.push_back(RandomLayout({static_cast<int64_t>(param.count)}, 4, random));
    const Sharded sharded(std::move(problem), std::move(pieces));
    Ranks ranks(sharded, setting);
    for (size_t step = 0; step < 3; ++step) {
      ranks.Queue(step);
      ranks.Wait();
      const std::vector<double> summands = ranks.comm().summands();
      double sum = 0;
      for (double summand : summands) sum += summand;
      const double scale = sharded.whole.steps[step].grad_scale;
      const Verdict expected = Decide(sum, scale == 0 ? 1 : scale, 0);
      for (uint32_t rank = 0; rank < ranks.world(); ++rank)
        EXPECT_EQ(BitsOfDouble(ranks.Result(rank).grad_norm), BitsOfDouble(expected.grad_norm));
      const double whole = sharded.trace[step + 1].verdict.grad_norm;
      EXPECT_NEAR(expected.grad_norm / whole, 1, 1e-13);
      depends_on_order += expected.grad_norm != whole;
      for (uint32_t rank = 0; rank < ranks.world(); ++rank) {
        Model model = sharded.Expected(rank, step + 1);
        model.verdict = expected;
        EXPECT_EQ(ranks[rank].Difference(model), "");
      }
    }
  }
  EXPECT_GT(depends_on_order, 0);
}

// Counted by each rank the norm would be larger by the square root of the world.
TEST(RanksTest, ReplicasCountOnce) {
  for (uint32_t world = 2; world <= 4; ++world) {
    for (const Setting& setting : Settings()) {
      const auto sharded = Replicated(world, 3, world);
      EXPECT_EQ(RunAll(*sharded, setting), "") << "world " << world;
    }
  }
}

TEST(RanksTest, ARankWithoutAnyGradientTakesPart) {
  for (const Setting& setting : Settings()) {
    for (uint32_t with = 0; with < 4; ++with) {  // 3: no rank has one
      const auto complete = Pipeline(3, 3, 20 + with);
      Problem problem = complete->whole;
      std::vector<std::vector<Piece>> pieces(problem.params.size());
      for (size_t id = 0; id < problem.params.size(); ++id) {
        for (uint32_t rank = 0; rank < 3; ++rank) pieces[id].push_back(complete->piece(id, rank));
        if (id % 3 != with) problem.steps[1].grads[id].reset();
      }
      const Sharded sharded(std::move(problem), std::move(pieces));
      Ranks ranks(sharded, setting);
      for (size_t step = 0; step < 3; ++step) {
        ranks.Queue(step);
        ranks.Wait();
        EXPECT_EQ(ranks.Difference(step + 1), "") << "step " << step << ", rank " << with;
        for (uint32_t rank = 0; rank < 3; ++rank)
          EXPECT_EQ(ranks.comm().calls(static_cast<int32_t>(rank)), 2 * (step + 1));
      }
      EXPECT_GT(ranks.Result(0).grad_norm, 0);
    }
  }
}

// There is nothing to agree on, so the step must make no comm call.
TEST(RanksTest, VouchedFiniteWithoutClippingAsksNobody) {
  for (const Setting& setting : Settings()) {
    const auto base = Pipeline(2, 3, 30);
    Problem problem = base->whole;
    std::vector<std::vector<Piece>> pieces(problem.params.size());
    for (size_t id = 0; id < problem.params.size(); ++id)
      for (uint32_t rank = 0; rank < 2; ++rank) pieces[id].push_back(base->piece(id, rank));
    for (StepInput& input : problem.steps) input.flags = OFFLOAD_STEP_ASSUME_FINITE;
    problem.steps[0].grad_norm_max = problem.steps[1].grad_norm_max = 0;
    problem.steps[2].grad_norm_max = 0.125;
    const Sharded sharded(std::move(problem), std::move(pieces));
    Ranks ranks(sharded, setting);
    for (size_t step = 0; step < 3; ++step) {
      ranks.Queue(step);
      ranks.Wait();
      EXPECT_EQ(ranks.Difference(step + 1), "");
      for (int32_t rank = 0; rank < 2; ++rank)
        EXPECT_EQ(ranks.comm().calls(rank), step < 2 ? 0u : 2u);
    }
    EXPECT_LT(ranks.Result(0).grad_clip, 1);
  }
}

// ------------------------------------------------------------------------------------ the skip --

// The rank's own input with one element that is not finite.
StepInput Poisoned(const ShardedRank& rank, size_t step, size_t id, float value) {
  StepInput input = rank.local().steps[step];
  const ParamSpec& spec = rank.local().params[id];
  PutElement(*input.grads[id], spec.grad_dtype, spec.count - 1, BitsOf(spec.grad_dtype, value));
  return input;
}

// For each rank and each of its params: a good step, then a bad one, after which nothing has
// changed on any rank, then a good step with the bits of a run without the bad one.
std::string SkipEverywhere(const Sharded& sharded, const Setting& setting) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  Ranks ranks(sharded, setting);
  ranks.Queue(0);
  ranks.Wait();
  uint64_t skipped = 0;
  for (uint32_t bad = 0; bad < ranks.world(); ++bad) {
    for (size_t id = 0; id < sharded.whole.params.size(); ++id) {
      if (ranks[bad].local().params[id].count == 0) continue;
      const float value = skipped % 3 == 0   ? kInf
                          : skipped % 3 == 1 ? -kInf
                                             : std::numeric_limits<float>::quiet_NaN();
      for (uint32_t rank = 0; rank < ranks.world(); ++rank)
        ranks[rank].Queue(rank == bad ? Poisoned(ranks[rank], 1, id, value)
                                      : ranks[rank].local().steps[1]);
      ranks.Wait();
      skipped += 1;
      for (uint32_t rank = 0; rank < ranks.world(); ++rank) {
        Model model = sharded.Expected(rank, 1);
        model.verdict = Decide(std::numeric_limits<double>::quiet_NaN(), 1, 0);
        model.steps_skipped = skipped;
        const std::string difference = ranks[rank].Difference(model);
        if (!difference.empty())
          return "bad rank " + std::to_string(bad) + ", param " + std::to_string(id) + ": " +
                 difference;
      }
    }
  }
  ranks.Queue(1);
  ranks.Wait();
  return ranks.Difference(2);
}

TEST(RanksSkipTest, ANonFiniteGradientOfOneRankSkipsOnAll) {
  for (const Setting& setting : Settings())
    EXPECT_EQ(SkipEverywhere(*Pipeline(3, 2, 40), setting), "");
}

// A replica does not count in the norm, but its Inf and NaN make the step skip.
TEST(RanksSkipTest, ANonFiniteGradientOfAReplicaSkipsOnAll) {
  for (const Setting& setting : Settings())
    EXPECT_EQ(SkipEverywhere(*Replicated(3, 2, 41), setting), "");
}

// -------------------------------------------------------------------------------------- queues --

// Rank 0 queues all its steps at once; the others one by one. Every rank's comm calls come in the
// order of the steps, whatever else it does.
TEST(RanksTest, QueuedStepsMeetTheirCounterparts) {
  for (const Setting& setting : Settings()) {
    constexpr size_t kSteps = 6;
    const auto sharded = RandomSharded(OFFLOAD_ADAMW, 3, kSteps, 50);
    Ranks ranks(*sharded, setting);
    for (size_t step = 0; step < kSteps; ++step) {
      const size_t block = step == 0 ? 0 : ranks[0].rig().AddBlock(step);
      ranks[0].Queue(ranks[0].local().steps[step], block);
    }
    for (size_t step = 0; step < kSteps; ++step) {
      for (uint32_t rank = 1; rank < 3; ++rank) ranks[rank].Queue(step);
      for (uint32_t rank = 1; rank < 3; ++rank) {
        MUST(offload_optimizer_wait(ranks[rank].rig().handle(), 0, -1));
        EXPECT_EQ(ranks[rank].Difference(step + 1), "");
      }
    }
    MUST(offload_optimizer_wait(ranks[0].rig().handle(), 0, -1));
    EXPECT_EQ(ranks[0].Difference(kSteps), "");
  }
}

// The gradients of one rank have been offloaded and those of another are on the device: the norm is
// the same.
TEST(RanksTest, GradientsMayBeOnTheHostOnSomeRanks) {
  for (const Setting& setting : Settings()) {
    const auto sharded = RandomSharded(OFFLOAD_ADAM, 3, 4, 60);
    Ranks ranks(*sharded, setting, OFFLOAD_MOVABLE_GRADS);
    for (size_t step = 0; step < 4; ++step) {
      for (uint32_t rank = 0; rank < 3; ++rank) {
        const StepInput& input = ranks[rank].local().steps[step];
        ranks[rank].Put(input);
        if ((rank + step) % 3 == 0)
          MUST(offload_optimizer_offload_grads(ranks[rank].rig().handle(), nullptr, nullptr));
        ranks[rank].rig().Queue(input);
      }
      ranks.Wait();
      EXPECT_EQ(ranks.Difference(step + 1), "") << "step " << step;
    }
  }
}

}  // namespace
}  // namespace hybridopt
