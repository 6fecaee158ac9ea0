// Destroy while other threads are in calls: it ends the work itself, although others use the
// handle, and waiting threads get an error.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "call_thread.h"
#include "comm_gate.h"
#include "trainer.h"

namespace hybridopt::fault {
namespace {

bool IsDestroyed(offload_optimizer_t optimizer) {
  auto stats = Make<offload_stats_t>();
  return offload_optimizer_get_stats(optimizer, &stats) == OFFLOAD_INVALID_ARGUMENT;
}

// A step that is blocked in a comm function while `call` waits for it on another thread. Destroy
// must wait for the step too.
void DestroyWhileCalled(int32_t device_kind, const std::function<int32_t(const Trainer&)>& call) {
  CommGate comm;
  const offload_comm_t table = comm.Table();
  RunOptions run;
  run.device_kind = device_kind;
  run.comm = &table;
  Trainer trainer(run);
  trainer.AddParams();
  trainer.Commit();
  trainer.UploadGrads(0);
  ASSERT_OFFLOAD_OK(offload_optimizer_step(trainer.optimizer, nullptr, nullptr));
  comm.AwaitEntered();
  CallThread caller([&] { return call(trainer); });
  caller.AwaitAsleep();
  EXPECT_FALSE(caller.returned());

  CallThread destroyer([&] {
    const int32_t status = offload_optimizer_destroy(trainer.optimizer);
    EXPECT_TRUE(comm.gate.open) << "the step had not ended when destroy returned";
    return status;
  });
  while (!IsDestroyed(trainer.optimizer)) std::this_thread::yield();
  destroyer.AwaitAsleep();
  EXPECT_FALSE(caller.returned());
  comm.gate.open = true;
  EXPECT_EQ(destroyer.Join(), OFFLOAD_OK) << destroyer.error();
  // The call does not use the object any more, but its thread may not have returned yet.
  EXPECT_EQ(caller.Join(), OFFLOAD_OK) << caller.error();
  trainer.optimizer = nullptr;
  // The caller may use all arrays again, and the context has no optimizer any more.
  for (uint32_t i = 0; i < trainer.size(); ++i) {
    EXPECT_OFFLOAD_OK(offload_device_free(trainer.context, trainer.data[i]));
    EXPECT_OFFLOAD_OK(offload_device_free(trainer.context, trainer.grads[i]));
  }
}

TEST(Destroy, EndsTheWorkThatAnotherThreadWaitsFor) {
  for (const int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM})
    for (const int64_t timeout_ns : {int64_t{-1}, int64_t{INT64_MAX}})
      DestroyWhileCalled(device_kind, [&](const Trainer& trainer) {
        return offload_optimizer_wait(trainer.optimizer, 0, timeout_ns);
      });
}

// On the simulated device this call returns at once.
TEST(Destroy, EndsTheWorkThatAThreadWaitsForInStreamWait) {
  DestroyWhileCalled(OFFLOAD_DEVICE_HOST, [](const Trainer& trainer) {
    return offload_optimizer_stream_wait(trainer.optimizer, 0, nullptr, nullptr, 0);
  });
}

// ---------------------------------------------------------------------------------------- pairs --

struct Query {
  const char* name;
  int32_t (*call)(const Trainer& trainer);
  std::vector<int32_t> answers;  // statuses that it may return before destroy
};

const Query kQueries[] = {
    {"wait",
     [](const Trainer& t) { return offload_optimizer_wait(t.optimizer, 0, 1'000'000'000); },
     {OFFLOAD_OK}},
    {"look",
     [](const Trainer& t) { return offload_optimizer_wait(t.optimizer, 0, 0); },
     {OFFLOAD_OK, OFFLOAD_TIMED_OUT}},
    {"get_stats",
     [](const Trainer& t) {
       auto stats = Make<offload_stats_t>();
       return offload_optimizer_get_stats(t.optimizer, &stats);
     },
     {OFFLOAD_OK}},
    {"step_result",
     [](const Trainer& t) {
       auto result = Make<offload_step_result_t>();
       return offload_optimizer_step_result(t.optimizer, 0, &result);
     },
     {OFFLOAD_OK, OFFLOAD_INVALID_STATE}},
    {"stream_wait",
     [](const Trainer& t) {
       return offload_optimizer_stream_wait(t.optimizer, 0, nullptr, nullptr, 0);
     },
     {OFFLOAD_OK}},
    {"get_info",
     [](const Trainer& t) {
       auto info = Make<offload_context_info_t>();
       return offload_context_get_info(t.context, &info);
     },
     {OFFLOAD_OK}},
};

// Arrays outside the library that are gone when destroy has returned: the address
// sanitizer sees code that still uses them.
class OwnArrays {
 public:
  OwnArrays(const RunOptions& run, const Trainer& trainer) : trainer_(trainer) {
    for (const uint64_t count : run.counts)
      for (std::vector<std::vector<float>>* arrays : {&data_, &grads_})
        arrays->emplace_back(count, 0.25f);
  }
  void Bind() {
    std::vector<offload_binding_t> bindings;
    for (uint32_t i = 0; i < trainer_.size(); ++i)
      bindings.push_back({sizeof(offload_binding_t), i, data_[i].data(), grads_[i].data()});
    EXPECT_OFFLOAD_OK(offload_optimizer_bind(trainer_.optimizer, bindings.data(), trainer_.size()));
  }

 private:
  const Trainer& trainer_;
  std::vector<std::vector<float>> data_, grads_;
};

// Steps are queued, threads make queries, the optimizer and the context are destroyed.
void DestroyWhileAsked(const RunOptions& run, const Query& query) {
  SCOPED_TRACE(query.name);
  auto trainer = std::make_unique<Trainer>(run);
  trainer->AddParams();
  trainer->Commit();
  trainer->UploadGrads(0);
  auto arrays = std::make_unique<OwnArrays>(run, *trainer);
  if (run.device_kind == OFFLOAD_DEVICE_HOST) arrays->Bind();
  std::atomic<bool> stop = false;
  std::vector<std::thread> askers;
  for (int i = 0; i < 2; ++i)
    askers.emplace_back([&] {
      while (!stop) {
        std::this_thread::yield();
        const int32_t answer = query.call(*trainer);
        if (answer == OFFLOAD_INVALID_ARGUMENT) {
          EXPECT_NE(std::string(offload_last_error()).find("has been destroyed"), std::string::npos)
              << offload_last_error();
          continue;
        }
        EXPECT_EQ(std::count(query.answers.begin(), query.answers.end(), answer), 1)
            << answer << ": " << offload_last_error();
      }
    });
  for (int step = 0; step < 4; ++step)
    EXPECT_OFFLOAD_OK(offload_optimizer_step(trainer->optimizer, nullptr, nullptr));
  EXPECT_OFFLOAD_OK(offload_optimizer_destroy(trainer->optimizer));
  arrays.reset();
  EXPECT_OFFLOAD_OK(offload_context_destroy(trainer->context));
  stop = true;
  for (std::thread& asker : askers) asker.join();
  trainer->optimizer = nullptr;
  trainer->context = nullptr;
}

TEST(Destroy, IsOverWhenItReturnsAlsoWithOtherThreadsInside) {
  for (int round = 0; round < Scaled(3); ++round)
    for (const int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM})
      for (const Query& query : kQueries) {
        RunOptions run;
        run.device_kind = device_kind;
        run.sim_delay_ns_max = device_kind == OFFLOAD_DEVICE_SIM ? 20'000 : 0;
        DestroyWhileAsked(run, query);
      }
}

}  // namespace
}  // namespace hybridopt::fault
