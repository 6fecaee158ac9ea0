// An error that the device's context does not survive. This is a program of its own, because the
// device does not work any more afterwards.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <string>

#include "../devices.h"
#include "../fault/trainer.h"
#include "machine/context.h"
#include "optimizer/handle_table.h"

namespace hybridopt::fault {
namespace {

constexpr int64_t kLongNs = 30'000'000'000;

TEST(BrokenDevice, PoisonsWithTheCauseAndNothingHangs) {
  RunOptions run;
  run.device_kind = OFFLOAD_DEVICE_CUDA;
  run.movable = OFFLOAD_MOVABLE_STATES;
  // Destroying it must work too, but nothing can be read from the device any more.
  Trainer trainer(run);
  trainer.AddParams();
  trainer.Commit();
  trainer.Steps(0, 2);
  cudaStream_t waiting = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&waiting, cudaStreamNonBlocking), cudaSuccess);

  // A kernel that writes where nothing is mapped, queued as any kernel of the caller's.
  using Contexts = HandleTable<Context, HandleKind::kContext>;
  const std::shared_ptr<Context> context =
      Contexts::Instance().Find(trainer.context, "context").value().shared();
  auto* const nowhere = reinterpret_cast<float*>(uint64_t{1} << 44);
  ASSERT_TRUE(context->device().Fill(waiting, nowhere, 1000, PatternOf(Format::kFp32, 1.0f)).ok());
  auto options = Make<offload_step_options_t>();
  options.stream = waiting;
  offload_ticket_t ticket = 0;
  const int32_t queued = offload_optimizer_step(trainer.optimizer, &options, &ticket);
  if (queued == OFFLOAD_OK) {
    EXPECT_EQ(offload_optimizer_wait(trainer.optimizer, ticket, kLongNs), OFFLOAD_DEVICE_FAILED);
    EXPECT_EQ(offload_optimizer_step(trainer.optimizer, nullptr, nullptr), OFFLOAD_POISONED);
  } else {
    EXPECT_EQ(queued, OFFLOAD_DEVICE_FAILED);  // it was known by then
  }
  EXPECT_NE(std::string(offload_last_error()).find("an illegal memory access"), std::string::npos)
      << offload_last_error();

  // What only looks still works: the host share's state can be saved.
  auto view = Make<offload_state_view_t>();
  ASSERT_OFFLOAD_OK(offload_optimizer_state(trainer.optimizer, 2, OFFLOAD_STATE_EXP_AVG, &view));
  EXPECT_EQ(view.step_count, 2u);
  ASSERT_GT(view.host_count, 0u);
  double sum = 0;
  for (uint64_t i = 0; i < view.host_count; ++i)
    sum += std::abs(static_cast<const float*>(view.host_data)[i]);
  EXPECT_GT(sum, 0);
  auto stats = Make<offload_stats_t>();
  ASSERT_OFFLOAD_OK(offload_optimizer_get_stats(trainer.optimizer, &stats));
  EXPECT_EQ(stats.steps_applied, 2u);

  // Creating a new context fails and says why.
  auto context_options = Make<offload_context_options_t>();
  context_options.device_kind = OFFLOAD_DEVICE_CUDA;
  offload_context_t another = nullptr;
  EXPECT_NE(offload_context_create(&context_options, &another), OFFLOAD_OK);
  EXPECT_NE(std::string(offload_last_error()), "");
  EXPECT_EQ(offload_stream_synchronize(trainer.context, waiting, kLongNs), OFFLOAD_DEVICE_FAILED);
}

}  // namespace
}  // namespace hybridopt::fault
