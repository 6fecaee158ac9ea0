// Handles that are refused by every call, and statuses that have no name.
#include <gtest/gtest.h>

#include "bad_input.h"
#include "handle_calls.h"

namespace hybridopt::fault {
namespace {

// -------------------------------------------------------------------------------------- handles --

void ExpectHandleRefused(const std::vector<HandleCall>& calls, void* handle, const char* field,
                         const char* word) {
  for (const HandleCall& one : calls) {
    EXPECT_EQ(one.call(handle), OFFLOAD_INVALID_ARGUMENT) << one.name << " with " << handle;
    const std::string message = offload_last_error();
    EXPECT_EQ(message.find(field), 0u) << one.name << ": " << message;
    EXPECT_NE(message.find(word), std::string::npos) << one.name << ": " << message;
  }
}

TEST(Handle, NullWrongKindGarbageAndDestroyedAreRefusedByEveryCall) {
  RunOptions run;
  Trainer trainer(run), alone(run);
  Begin(trainer, Phase::kCommitted);
  Begin(alone, Phase::kCommitted);

  ExpectHandleRefused(ContextCalls(), nullptr, "context is NULL", "expected a handle");
  ExpectHandleRefused(OptimizerCalls(), nullptr, "optimizer is NULL", "expected a handle");
  ExpectHandleRefused(StashCalls(), nullptr, "stash is NULL", "expected a handle");
  ExpectHandleRefused(PoolCalls(), nullptr, "pool is NULL", "expected a handle");
  ExpectHandleRefused(PoolCalls(), trainer.context, "pool is 0x", "not a handle");
  ExpectHandleRefused(ContextCalls(), trainer.optimizer, "context is 0x", "not a handle");
  ExpectHandleRefused(OptimizerCalls(), trainer.context, "optimizer is 0x", "not a handle");
  ExpectHandleRefused(StashCalls(), trainer.optimizer, "stash is 0x", "not a handle");
  ExpectHandleRefused(ContextCalls(), host_array, "context is 0x", "not a handle");
  ExpectHandleRefused(OptimizerCalls(), &trainer, "optimizer is 0x", "not a handle");
  ExpectHandleRefused(ContextCalls(), Address(UINT64_MAX), "context is 0x", "not a handle");

  offload_context_t context = nullptr;
  const auto options = Make<offload_context_options_t>();
  ASSERT_OFFLOAD_OK(offload_context_create(&options, &context));
  ASSERT_OFFLOAD_OK(offload_context_destroy(context));
  ExpectHandleRefused(ContextCalls(), context, "context is 0x", "has been destroyed");
  offload_optimizer_t optimizer = nullptr;
  auto optimizer_options = Make<offload_optimizer_options_t>();
  optimizer_options.algorithm = OFFLOAD_LION;
  ASSERT_OFFLOAD_OK(offload_optimizer_create(trainer.context, &optimizer_options, &optimizer));
  ASSERT_OFFLOAD_OK(offload_optimizer_destroy(optimizer));
  ExpectHandleRefused(OptimizerCalls(), optimizer, "optimizer is 0x", "has been destroyed");

  offload_stash_t stash = nullptr;
  auto stash_options = Make<offload_stash_options_t>();
  stash_options.budget_bytes = 4096;
  ASSERT_OFFLOAD_OK(offload_stash_create(trainer.context, &stash_options, &stash));
  ExpectHandleRefused(OptimizerCalls(), stash, "optimizer is 0x", "not a handle");
  ASSERT_OFFLOAD_OK(offload_stash_destroy(stash));
  ExpectHandleRefused(StashCalls(), stash, "stash is 0x", "has been destroyed");

  // An old handle stays invalid when a new object takes the place of the destroyed one.
  offload_optimizer_t newer = nullptr;
  ASSERT_OFFLOAD_OK(offload_optimizer_create(trainer.context, &optimizer_options, &newer));
  EXPECT_NE(newer, optimizer);
  ExpectHandleRefused(OptimizerCalls(), optimizer, "optimizer is 0x", "has been destroyed");
  ASSERT_OFFLOAD_OK(offload_optimizer_destroy(newer));

  EXPECT_EQ(Finish(trainer, Phase::kCommitted).bits, Finish(alone, Phase::kCommitted).bits);
}

TEST(Handle, ChangedBitsOfAGoodHandleAreRefused) {
  RunOptions run;
  Trainer trainer(run);
  for (int bit = 0; bit < 64; ++bit) {
    const uint64_t changed = reinterpret_cast<uint64_t>(trainer.optimizer) ^ (uint64_t{1} << bit);
    auto stats = Make<offload_stats_t>();
    const int32_t status =
        offload_optimizer_get_stats(static_cast<offload_optimizer_t>(Address(changed)), &stats);
    // Bits 48 to 55 of a handle hold the fork generation of the process that made it.
    EXPECT_EQ(status, bit >= 48 && bit < 56 ? OFFLOAD_INVALID_STATE : OFFLOAD_INVALID_ARGUMENT)
        << bit;
  }
}

TEST(StatusName, IsKnownForEveryStatusAndUnknownForTheRest) {
  EXPECT_STREQ(offload_status_name(OFFLOAD_OK), "OK");
  EXPECT_STREQ(offload_status_name(OFFLOAD_POISONED), "POISONED");
  for (int32_t status : {-1, 1, 13, 71, INT32_MAX, INT32_MIN})
    EXPECT_STREQ(offload_status_name(status), "UNKNOWN");
}

}  // namespace
}  // namespace hybridopt::fault
