// Functions of the caller that do not return, and streams that are blocked: every call ends within
// its timeout and says what is left behind, and that does no harm.
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../sanitizers.h"
#include "trainer.h"

#if HYBRIDOPT_TSAN
// Objects that are stuck for ever are left behind on purpose, with their threads.
extern "C" const char* __tsan_default_options();
extern "C" const char* __tsan_default_options() { return "report_thread_leaks=0"; }
#endif

namespace hybridopt::fault {
namespace {

constexpr uint64_t kTimeoutNs = 1'000'000'000;  // a busy machine may lose half a second
constexpr int kMoreThanAQueueHolds = 3000;

RunOptions Options() {
  RunOptions run;
  run.device_timeout_ns = kTimeoutNs;
  return run;
}

void DoNothing(void*) {}

int32_t FillQueue(offload_context_t context) {
  for (int i = 0; i < kMoreThanAQueueHolds; ++i)
    if (const int32_t status = offload_stream_run(context, nullptr, DoNothing, nullptr);
        status != OFFLOAD_OK)
      return status;
  return OFFLOAD_OK;
}

TEST(StuckTest, ACallBehindAFullQueueEndsAndChangesNothing) {
  Trainer alone(Options()), trainer(Options());
  for (Trainer* each : {&alone, &trainer}) {
    each->AddParams();
    each->Commit();
    each->Steps(0, 1);
    each->UploadGrads(1);
  }
  Gate gate;
  EXPECT_OFFLOAD_OK(offload_stream_run(trainer.context, nullptr, Gate::Hold, &gate));
  ExpectError(FillQueue(trainer.context), OFFLOAD_DEVICE_FAILED,
              {"stream \"NULL\" has 1024 commands queued", "made no progress for 1.0 s",
               "device_timeout_ns"});
  ExpectError(offload_optimizer_step(trainer.optimizer, nullptr, nullptr), OFFLOAD_DEVICE_FAILED,
              {"stream \"NULL\" has 1024 commands queued"});
  gate.open = true;
  EXPECT_OFFLOAD_OK(offload_stream_synchronize(trainer.context, nullptr, -1));
  for (Trainer* each : {&alone, &trainer}) {
    EXPECT_OFFLOAD_OK(offload_optimizer_step(each->optimizer, nullptr, nullptr));
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(each->optimizer, 0, -1));
  }
  EXPECT_TRUE(trainer.Bits() == alone.Bits());
}

TEST(StuckTest, ACopyOnAStreamThatStandsStillEndsInItsTime) {
  Trainer trainer(Options());
  void* data = nullptr;
  ASSERT_OFFLOAD_OK(offload_device_alloc(trainer.context, 256, &data));
  Gate gate;
  EXPECT_OFFLOAD_OK(offload_stream_run(trainer.context, nullptr, Gate::Hold, &gate));
  unsigned char host[256];
  ExpectError(offload_device_download(trainer.context, host, data, sizeof(host), nullptr),
              OFFLOAD_DEVICE_FAILED,
              {"the stream made no progress for 1.0 s", "device_timeout_ns",
               "keep host_data until the stream is done"});
  gate.open = true;
  EXPECT_OFFLOAD_OK(offload_stream_synchronize(trainer.context, nullptr, -1));
}

TEST(StuckTest, AStreamThatStandsStillIsNotDestroyed) {
  Trainer trainer(Options());
  offload_stream_t stream = nullptr;
  ASSERT_OFFLOAD_OK(offload_stream_create(trainer.context, &stream));
  Gate gate;
  EXPECT_OFFLOAD_OK(offload_stream_run(trainer.context, stream, Gate::Hold, &gate));
  ExpectError(offload_stream_destroy(trainer.context, stream), OFFLOAD_TIMED_OUT,
              {"stream \"caller\" was not done"});
  gate.open = true;
  EXPECT_OFFLOAD_OK(offload_stream_synchronize(trainer.context, stream, -1));
  EXPECT_OFFLOAD_OK(offload_stream_destroy(trainer.context, stream));
}

struct Told {
  std::atomic<int> times = 0;
  static void Log(void*, int32_t level, const char* text) {
    if (level == OFFLOAD_LOG_WARNING &&
        std::string(text).find("a function that offload_stream_run was given has not returned") !=
            std::string::npos)
      instance.times += 1;
  }
  static Told instance;
};
Told Told::instance;

// Holds a function of the caller until the test opens it, after its context has been destroyed;
// `returning` tells that the function is about to return.
struct LateGate {
  std::atomic<bool> entered = false;
  std::atomic<bool> open = false;
  std::atomic<bool> returning = false;
  static void Hold(void* self) {
    auto& gate = *static_cast<LateGate*>(self);
    gate.entered = true;
    while (!gate.open) std::this_thread::yield();
    gate.returning = true;
  }
};

TEST(StuckTest, AContextWithAStuckStreamIsDestroyed) {
  static LateGate gate;  // the thread may use it until the process ends
  {
    RunOptions run = Options();
    run.log = Told::Log;
    Trainer trainer(run);
    trainer.AddParams();
    trainer.Commit();
    EXPECT_OFFLOAD_OK(offload_stream_run(trainer.context, nullptr, LateGate::Hold, &gate));
    EXPECT_OFFLOAD_OK(offload_stream_run(trainer.context, nullptr, DoNothing, nullptr));
    // Destroy drops what has not begun.
    while (!gate.entered) std::this_thread::yield();
  }
  EXPECT_EQ(Told::instance.times, 1);
  gate.open = true;
  while (!gate.returning) std::this_thread::yield();
}

// A comm table of one rank whose functions do not return.
struct StuckComm {
  offload_comm_t Table() {
    auto table = Make<offload_comm_t>();
    table.world = 1;
    table.user = this;
    table.sum = [](void* self, double*, uint32_t, int64_t) { return Wait(self); };
    table.max = [](void* self, int32_t*, uint32_t, int64_t) { return Wait(self); };
    table.barrier = [](void* self, int64_t) { return Wait(self); };
    return table;
  }
  static int32_t Wait(void* self) {
    auto& comm = *static_cast<StuckComm*>(self);
    comm.calls += 1;
    while (!comm.open) std::this_thread::yield();
    comm.returned = true;
    return OFFLOAD_OK;
  }
  std::atomic<int> calls = 0;
  std::atomic<bool> open = false;
  std::atomic<bool> returned = false;
};

TEST(StuckTest, DestroyEndsThoughACommFunctionDoesNotReturn) {
  for (const int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    static std::vector<std::unique_ptr<StuckComm>> comms;  // as the text says
    comms.push_back(std::make_unique<StuckComm>());
    StuckComm& comm = *comms.back();
    const offload_comm_t table = comm.Table();
    RunOptions run = Options();
    run.device_kind = device_kind;
    run.comm = &table;
    run.comm_timeout_ns = kTimeoutNs;
    // It stays in memory, and so does its context.
    auto* const trainer = new Trainer(run);
    trainer->AddParams();
    trainer->Commit();
    trainer->UploadGrads(0);
    std::vector<std::vector<unsigned char>> before;
    for (uint32_t i = 0; i < trainer->size(); ++i) before.push_back(trainer->ParamBits(i));
    EXPECT_OFFLOAD_OK(offload_optimizer_step(trainer->optimizer, nullptr, nullptr));
    while (comm.calls == 0) std::this_thread::yield();
    int32_t waited = OFFLOAD_OK;
    std::thread waiter([&] { waited = offload_optimizer_wait(trainer->optimizer, 0, -1); });
    ExpectError(offload_optimizer_destroy(trainer->optimizer), OFFLOAD_COMM_FAILED,
                {"rank 0 of 1", "comm.sum has not returned 1.0 s after its timeout",
                 "touches no param or gradient any more"});
    waiter.join();
    // Or it came after destroy and was refused.
    EXPECT_TRUE(waited == OFFLOAD_COMM_FAILED || waited == OFFLOAD_INVALID_ARGUMENT) << waited;
    ExpectError(offload_optimizer_wait(trainer->optimizer, 0, -1), OFFLOAD_INVALID_ARGUMENT,
                {"has been destroyed"});
    ExpectError(offload_context_destroy(trainer->context), OFFLOAD_INVALID_STATE, {"1 optimizers"});
    comm.open = true;
    while (!comm.returned) std::this_thread::yield();
    for (uint32_t i = 0; i < trainer->size(); ++i)
      EXPECT_TRUE(trainer->ParamBits(i) == before[i]) << "a param was written behind destroy";
    EXPECT_EQ(comm.calls, 1);
    static auto& left = *new std::vector<Trainer*>;  // for ever, so that it is no leak
    left.push_back(trainer);
  }
}

// On the host device the call itself waits; it ends, and so does all later work.
TEST(StuckTest, AStreamWaitEndsThoughACommFunctionDoesNotReturn) {
  StuckComm comm;
  const offload_comm_t table = comm.Table();
  RunOptions run = Options();
  run.device_kind = OFFLOAD_DEVICE_HOST;
  run.comm = &table;
  run.comm_timeout_ns = kTimeoutNs;
  Trainer trainer(run);
  trainer.AddParams();
  trainer.Commit();
  trainer.UploadGrads(0);
  std::vector<std::vector<unsigned char>> before;
  for (uint32_t i = 0; i < trainer.size(); ++i) before.push_back(trainer.ParamBits(i));
  EXPECT_OFFLOAD_OK(offload_optimizer_step(trainer.optimizer, nullptr, nullptr));
  ExpectError(offload_optimizer_stream_wait(trainer.optimizer, 0, nullptr, nullptr, 0),
              OFFLOAD_COMM_FAILED,
              {"rank 0 of 1", "comm.sum has not returned 1.0 s after its timeout",
               "touches no param or gradient any more"});
  ExpectError(offload_optimizer_wait(trainer.optimizer, 0, -1), OFFLOAD_COMM_FAILED,
              {"comm.sum has not returned"});
  for (const auto& call : std::vector<std::function<int32_t()>>{
           [&] { return offload_optimizer_step(trainer.optimizer, nullptr, nullptr); },
           [&] {
             return offload_optimizer_stream_wait(trainer.optimizer, 0, nullptr, nullptr, 0);
           }})
    ExpectError(call(), OFFLOAD_POISONED, {"comm.sum has not returned"});
  comm.open = true;
  while (!comm.returned) std::this_thread::yield();
  for (uint32_t i = 0; i < trainer.size(); ++i)
    EXPECT_TRUE(trainer.ParamBits(i) == before[i]) << "a param was written behind the failure";
  EXPECT_EQ(comm.calls, 1);
}

}  // namespace
}  // namespace hybridopt::fault
