// Different handles in different threads at once, and the three calls that any thread may make on
// one handle. Mostly for the thread sanitizer; the bits must be those of a run alone.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "trainer.h"

namespace hybridopt::fault {
namespace {

constexpr int32_t kAlgorithms[] = {OFFLOAD_ADAMW, OFFLOAD_SGD, OFFLOAD_LION, OFFLOAD_ADAGRAD,
                                   OFFLOAD_SIGNUM};

RunOptions Options(int32_t device_kind, int32_t algorithm) {
  RunOptions run;
  run.device_kind = device_kind;
  run.algorithm = algorithm;
  run.sim_memory_bytes = uint64_t{4} << 20;
  run.sim_delay_ns_max = device_kind == OFFLOAD_DEVICE_SIM ? 20'000 : 0;
  return run;
}

// Makes all queries that any thread may make, until it is stopped.
void Ask(offload_optimizer_t optimizer, const std::atomic<bool>& stop) {
  uint64_t applied = 0, offloaded = 0, reloaded = 0;
  while (!stop) {
    auto stats = Make<offload_stats_t>();
    EXPECT_OFFLOAD_OK(offload_optimizer_get_stats(optimizer, &stats));
    EXPECT_GE(stats.steps_applied, applied);
    EXPECT_LE(stats.queued, 8u);
    EXPECT_GE(stats.offloaded_bytes, offloaded);
    EXPECT_GE(stats.reloaded_bytes, reloaded);
    applied = stats.steps_applied;
    offloaded = stats.offloaded_bytes;
    reloaded = stats.reloaded_bytes;
    const int32_t waited = offload_optimizer_wait(optimizer, 0, 100'000);
    EXPECT_TRUE(waited == OFFLOAD_OK || waited == OFFLOAD_TIMED_OUT ||
                waited == OFFLOAD_INVALID_STATE)
        << offload_last_error();
    auto result = Make<offload_step_result_t>();
    const int32_t asked = offload_optimizer_step_result(optimizer, 0, &result);
    EXPECT_TRUE(asked == OFFLOAD_OK || asked == OFFLOAD_INVALID_STATE) << offload_last_error();
    if (asked == OFFLOAD_OK) {
      EXPECT_GE(result.step, 1u);
    }
    std::this_thread::yield();
  }
}

// Registers, commits and steps while two threads ask for statistics and results, and wait.
template <typename Work>
std::vector<unsigned char> WorkWhileAsked(Trainer& trainer, Work&& work) {
  std::atomic<bool> stop = false;
  std::vector<std::thread> askers;
  for (int i = 0; i < 2; ++i) askers.emplace_back([&] { Ask(trainer.optimizer, stop); });
  trainer.AddParams();
  trainer.Commit();
  work();
  EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, -1));
  stop = true;
  for (std::thread& asker : askers) asker.join();
  return trainer.Bits();
}

std::vector<unsigned char> TrainWhileAsked(Trainer& trainer, uint64_t steps) {
  return WorkWhileAsked(trainer, [&] {
    for (uint64_t step = 0; step < steps; ++step) {
      if (step % 4 == 0) {
        EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, -1));
        trainer.UploadGrads(step);
      }
      EXPECT_OFFLOAD_OK(offload_optimizer_step(trainer.optimizer, nullptr, nullptr));
    }
  });
}

std::vector<unsigned char> TrainAlone(const RunOptions& run, uint64_t steps) {
  Trainer trainer(run);
  return TrainWhileAsked(trainer, steps);
}

// An optimizer of each algorithm works in one context, all at once; each must give the bits of one
// that works alone.
template <typename Work, typename Alone>
void ExpectTheBitsOfEachAlone(uint32_t movable, const Work& work, const Alone& alone) {
  for (const int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    Trainer owner(Options(device_kind, OFFLOAD_ADAMW));
    std::vector<std::thread> threads;
    std::vector<std::vector<unsigned char>> bits(std::size(kAlgorithms));
    for (size_t i = 0; i < std::size(kAlgorithms); ++i)
      threads.emplace_back([&, i] {
        RunOptions run = Options(device_kind, kAlgorithms[i]);
        run.movable = movable;
        Trainer trainer(run, owner.context);
        bits[i] = work(trainer);
      });
    for (std::thread& thread : threads) thread.join();
    for (size_t i = 0; i < std::size(kAlgorithms); ++i)
      EXPECT_EQ(bits[i], alone(Options(device_kind, kAlgorithms[i]))) << i;
  }
}

TEST(Concurrency, OptimizersOfOneContextGiveTheBitsOfARunAlone) {
  const uint64_t steps = 4 + Scaled(60);
  ExpectTheBitsOfEachAlone(
      0, [&](Trainer& trainer) { return TrainWhileAsked(trainer, steps); },
      [&](const RunOptions& run) { return TrainAlone(run, steps); });
}

// One optimizer nearly fills the workers' queue with chunks that are taken ahead; several
// optimizers together have more chunks than it takes.
TEST(Concurrency, StepsWhoseChunksFillTheWorkersQueueGiveTheSameBits) {
  struct {
    uint32_t slots;
    size_t optimizers;
  } const cases[] = {{64, 1}, {64, 3}, {8, 20}};
  for (const auto& one : cases) {
    RunOptions run;
    run.counts = {150'000, 1, 50'000};  // 196 chunks
    run.sim_memory_bytes = uint64_t{64} << 20;
    run.device_fraction = 0;
    const std::vector<unsigned char> expected = TrainAlone(run, 3);  // with two slots
    run.staging_slots = one.slots;
    Trainer owner(run);
    std::vector<std::thread> threads;
    std::vector<std::vector<unsigned char>> bits(one.optimizers);
    for (std::vector<unsigned char>& mine : bits)
      threads.emplace_back([&] {
        Trainer trainer(run, owner.context);
        mine = TrainWhileAsked(trainer, 3);
      });
    for (std::thread& thread : threads) thread.join();
    for (const std::vector<unsigned char>& mine : bits)
      EXPECT_TRUE(mine == expected) << one.slots << " slots, " << one.optimizers << " optimizers";
  }
}

// ------------------------------------------------------------------------------------ lifecycle --

void Bind(const Trainer& trainer, bool with_grads) {
  std::vector<offload_binding_t> bindings;
  for (uint32_t i = 0; i < trainer.size(); ++i)
    bindings.push_back(
        {sizeof(offload_binding_t), i, trainer.data[i], with_grads ? trainer.grads[i] : nullptr});
  EXPECT_OFFLOAD_OK(offload_optimizer_bind(trainer.optimizer, bindings.data(), trainer.size()));
}

// The rollout overwrites all params and gradients that were on the device.
void Rollout(const Trainer& trainer) {
  for (uint32_t i = 0; i < trainer.size(); ++i) {
    const offload_param_t param = trainer.Param(i);
    const std::vector<unsigned char> rubbish(param.count * 4, 0xa5);
    EXPECT_OFFLOAD_OK(offload_device_upload(trainer.context, trainer.data[i], rubbish.data(),
                                            param.count * ElementBytes(param.dtype), nullptr));
    EXPECT_OFFLOAD_OK(offload_device_upload(trainer.context, trainer.grads[i], rubbish.data(),
                                            param.count * ElementBytes(param.grad_dtype), nullptr));
  }
}

void ClippedStep(const Trainer& trainer) {
  auto options = Make<offload_step_options_t>();
  options.grad_norm_max = 1;
  EXPECT_OFFLOAD_OK(offload_optimizer_step(trainer.optimizer, &options, nullptr));
}

void Refresh(const Trainer& trainer, uint64_t number) {
  if (number % 4 != 3) return;
  EXPECT_OFFLOAD_OK(offload_optimizer_refresh_masters(trainer.optimizer, nullptr, nullptr));
}

// Step `number` and a rollout. Of three cycles one steps before it, the others keep the gradients
// over it, as they are or as a sum of one.
void Cycle(Trainer& trainer, uint64_t number) {
  const offload_optimizer_t optimizer = trainer.optimizer;
  const bool step_first = number % 3 == 0;
  auto move = Make<offload_move_options_t>();
  move.flags = step_first ? OFFLOAD_MOVE_DROP : number % 3 == 1 ? 0 : OFFLOAD_MOVE_ACCUMULATE;
  Bind(trainer, true);
  trainer.UploadGrads(number);
  if (step_first) ClippedStep(trainer);
  EXPECT_OFFLOAD_OK(offload_optimizer_offload_grads(optimizer, &move, nullptr));
  EXPECT_OFFLOAD_OK(offload_optimizer_offload_states(optimizer, nullptr, nullptr));
  EXPECT_OFFLOAD_OK(offload_optimizer_offload_params(optimizer, nullptr, nullptr));
  EXPECT_OFFLOAD_OK(offload_optimizer_wait(optimizer, 0, -1));
  auto stats = Make<offload_stats_t>();
  EXPECT_OFFLOAD_OK(offload_optimizer_get_stats(optimizer, &stats));
  EXPECT_EQ(stats.device_bytes, 0u);

  Rollout(trainer);

  const bool reload_grads = number % 3 == 1;
  Bind(trainer, reload_grads);
  EXPECT_OFFLOAD_OK(offload_optimizer_reload_states(optimizer, nullptr, nullptr));
  EXPECT_OFFLOAD_OK(offload_optimizer_reload_params(optimizer, nullptr, nullptr));
  if (reload_grads) {
    EXPECT_OFFLOAD_OK(offload_optimizer_reload_grads(optimizer, nullptr, nullptr));
  }
  if (!step_first) ClippedStep(trainer);
  Refresh(trainer, number);
  // The next gradients are written where these may still be read.
  if (reload_grads) {
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(optimizer, 0, -1));
  }
}

std::vector<unsigned char> CycleWhileAsked(Trainer& trainer, uint64_t cycles) {
  return WorkWhileAsked(trainer, [&] {
    for (uint64_t number = 0; number < cycles; ++number) Cycle(trainer, number);
  });
}

// The same steps of an optimizer that never offloads anything.
std::vector<unsigned char> StayAlone(const RunOptions& run, uint64_t steps) {
  Trainer trainer(run);
  trainer.AddParams();
  trainer.Commit();
  for (uint64_t number = 0; number < steps; ++number) {
    trainer.UploadGrads(number);
    ClippedStep(trainer);
    Refresh(trainer, number);
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, -1));
  }
  return trainer.Bits();
}

// Each optimizer offloads everything and reloads it while others are in the middle of a step.
TEST(Concurrency, CyclesOfOptimizersOfOneContextGiveTheBitsOfOneThatStays) {
  const uint64_t cycles = 4 + Scaled(40);
  ExpectTheBitsOfEachAlone(
      OFFLOAD_MOVABLE_PARAMS | OFFLOAD_MOVABLE_STATES | OFFLOAD_MOVABLE_ACCUMULATE,
      [&](Trainer& trainer) { return CycleWhileAsked(trainer, cycles); },
      [&](const RunOptions& run) { return StayAlone(run, cycles); });
}

// ------------------------------------------------------------------------- creating, destroying --

TEST(Concurrency, ContextsComeAndGo) {
  const uint64_t rounds = 2 + Scaled(20);
  std::vector<std::thread> threads;
  for (const int32_t algorithm : kAlgorithms)
    threads.emplace_back([&, algorithm] {
      const int32_t device_kind = algorithm % 2 == 0 ? OFFLOAD_DEVICE_HOST : OFFLOAD_DEVICE_SIM;
      const RunOptions run = Options(device_kind, algorithm);
      const std::vector<unsigned char> expected = TrainAlone(run, 2);
      for (uint64_t round = 0; round < rounds; ++round) {
        Trainer trainer(run);
        EXPECT_EQ(TrainWhileAsked(trainer, 2), expected);
        // The optimizer has queued work at its end; destroy finishes it.
        EXPECT_OFFLOAD_OK(offload_optimizer_step(trainer.optimizer, nullptr, nullptr));
      }
    });
  for (std::thread& thread : threads) thread.join();
}

// Of many threads that destroy the same handle exactly one succeeds, and late calls are refused.
TEST(Concurrency, DestroyIsForOneThreadOnly) {
  for (int round = 0; round < 2 + Scaled(50); ++round) {
    auto options = Make<offload_context_options_t>();
    options.threads = 1;
    offload_context_t context = nullptr;
    ASSERT_OFFLOAD_OK(offload_context_create(&options, &context));
    std::atomic<int> destroyed = 0;
    std::vector<std::thread> threads;
    for (int i = 0; i < 4; ++i)
      threads.emplace_back([&] {
        auto info = Make<offload_context_info_t>();
        const int32_t looked = offload_context_get_info(context, &info);
        EXPECT_TRUE(looked == OFFLOAD_OK || looked == OFFLOAD_INVALID_ARGUMENT);
        destroyed += offload_context_destroy(context) == OFFLOAD_OK;
      });
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(destroyed, 1);
  }
}

}  // namespace
}  // namespace hybridopt::fault
