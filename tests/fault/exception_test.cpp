// Functions of the caller that throw, and threads that are cancelled inside of a call: no process
// ends, the call or ticket reports what happened, and the library goes on.
#include <gtest/gtest.h>
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "../sanitizers.h"
#include "../temporary_directory.h"
#include "trainer.h"

namespace hybridopt::fault {
namespace {

// This type is no std::exception, and the library does not know it.
struct Thrown {};

int32_t Save(offload_optimizer_t optimizer, const std::string& path,
             offload_progress_function_t progress) {
  auto options = Make<offload_save_options_t>();
  options.path = path.c_str();
  options.progress = progress;
  offload_ticket_t ticket = 0;
  const int32_t status = offload_optimizer_save(optimizer, &options, &ticket);
  return status == OFFLOAD_OK ? offload_optimizer_wait(optimizer, ticket, -1) : status;
}

class ExceptionTest : public testing::Test {
 protected:
  void Begin(Trainer& trainer) {
    trainer.AddParams();
    trainer.Commit();
    trainer.Steps(0, 1);
  }
  std::string Path(const char* name) const { return directory_ / name; }

  const TemporaryDirectory directory_;
};

TEST_F(ExceptionTest, OfALogFunctionIsIgnored) {
  RunOptions run;
  run.log = [](void*, int32_t, const char*) { throw Thrown(); };
  Trainer trainer(run);
  Begin(trainer);
  // The timeline's thread logs why it refuses this.
  auto options = Make<offload_load_options_t>();
  const std::string nothing = Path("nothing");
  options.path = nothing.c_str();
  EXPECT_OFFLOAD_OK(offload_optimizer_load(trainer.optimizer, &options, nullptr));
  ExpectError(offload_optimizer_wait(trainer.optimizer, 0, -1), OFFLOAD_IO_FAILED, {"nothing"});
  trainer.Steps(1, 2);
}

TEST_F(ExceptionTest, OfTheProgressFunctionFailsTheSaveAlone) {
  Trainer trainer({});
  Begin(trainer);
  ExpectError(Save(trainer.optimizer, Path("saved"), [](void*, uint64_t, uint64_t) { throw 7; }),
              OFFLOAD_INTERNAL, {"the progress function ended in an exception of unknown type"});
  ExpectError(Save(trainer.optimizer, Path("saved"),
                   [](void*, uint64_t, uint64_t) { throw std::runtime_error("no terminal"); }),
              OFFLOAD_INTERNAL, {"the progress function ended in an exception: no terminal"});
  EXPECT_TRUE(directory_.Names().empty()) << "a failed save left something";
  trainer.Steps(1, 2);
  EXPECT_OFFLOAD_OK(Save(trainer.optimizer, Path("saved"), nullptr));
}

TEST_F(ExceptionTest, OfAFunctionThatAnInquiryCallsFailsTheInquiry) {
  Trainer trainer({});
  Begin(trainer);
  const std::string path = Path("saved");
  EXPECT_OFFLOAD_OK(Save(trainer.optimizer, path, nullptr));
  auto options = Make<offload_verify_options_t>();
  options.progress = [](void*, uint64_t, uint64_t) { throw Thrown(); };
  ExpectError(offload_checkpoint_verify(path.c_str(), &options), OFFLOAD_INTERNAL,
              {"exception of unknown type"});
  const offload_tensor_function_t visit = [](void*, const offload_checkpoint_tensor_t*) {
    throw Thrown();
  };
  auto info = Make<offload_checkpoint_info_t>();
  ExpectError(offload_checkpoint_inspect(path.c_str(), &info, visit, nullptr), OFFLOAD_INTERNAL,
              {"exception of unknown type"});
  EXPECT_OFFLOAD_OK(offload_checkpoint_verify(path.c_str(), nullptr));
}

TEST_F(ExceptionTest, OfALoadsProgressFunctionIsTold) {
  Trainer trainer({});
  Begin(trainer);
  const std::string path = Path("saved");
  EXPECT_OFFLOAD_OK(Save(trainer.optimizer, path, nullptr));
  auto options = Make<offload_load_options_t>();
  options.path = path.c_str();
  options.progress = [](void*, uint64_t, uint64_t) { throw Thrown(); };
  EXPECT_OFFLOAD_OK(offload_optimizer_load(trainer.optimizer, &options, nullptr));
  ExpectError(offload_optimizer_wait(trainer.optimizer, 0, -1), OFFLOAD_INTERNAL,
              {"exception of unknown type"});
}

TEST_F(ExceptionTest, OfACommFunctionIsAFailureOfTheRanks) {
  auto comm = Make<offload_comm_t>();
  comm.world = 1;
  comm.sum = [](void*, double*, uint32_t, int64_t) -> int32_t { throw Thrown(); };
  comm.max = [](void*, int32_t*, uint32_t, int64_t) -> int32_t { throw Thrown(); };
  comm.barrier = [](void*, int64_t) -> int32_t { throw Thrown(); };
  RunOptions run;
  run.comm = &comm;
  Trainer trainer(run);
  trainer.AddParams();
  trainer.Commit();
  EXPECT_OFFLOAD_OK(offload_optimizer_step(trainer.optimizer, nullptr, nullptr));
  ExpectError(offload_optimizer_wait(trainer.optimizer, 0, -1), OFFLOAD_COMM_FAILED,
              {"comm.sum", "the function ended in an exception of unknown type"});
  ExpectError(offload_optimizer_step(trainer.optimizer, nullptr, nullptr), OFFLOAD_POISONED,
              {"comm.sum"});
}

TEST_F(ExceptionTest, OfAFunctionOnAStreamFailsTheDevice) {
  Trainer trainer({});
  Begin(trainer);
  EXPECT_OFFLOAD_OK(offload_stream_run(
      trainer.context, nullptr, [](void*) { throw Thrown(); }, nullptr));
  ExpectError(offload_stream_synchronize(trainer.context, nullptr, -1), OFFLOAD_DEVICE_FAILED,
              {"exception of unknown type"});
}

// A cancelled thread leaves no call half done. The address sanitizer's own code at the end of a
// thread fails on the stack that cancelling has left.
#if !HYBRIDOPT_ASAN
TEST_F(ExceptionTest, AThreadThatIsCancelledInACallEndsBehindIt) {
  Trainer trainer({});
  Begin(trainer);
  Gate gate;
  EXPECT_OFFLOAD_OK(offload_stream_run(trainer.context, nullptr, Gate::Hold, &gate));
  EXPECT_OFFLOAD_OK(offload_optimizer_step(trainer.optimizer, nullptr, nullptr));
  std::atomic<bool> waiting = false, returned = false;
  std::thread waiter([&] {
    waiting = true;
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, -1));
    returned = true;
    while (true) pthread_testcancel();
  });
  while (!waiting) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  ASSERT_EQ(pthread_cancel(waiter.native_handle()), 0);
  gate.open = true;
  waiter.join();
  EXPECT_TRUE(returned);
  trainer.Steps(1, 2);
}
#endif

}  // namespace
}  // namespace hybridopt::fault
