// The ladder of pinned memory: all slots, fewer slots, none if that is allowed. On every rung a
// note says so and the bits are the same.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "trainer.h"

namespace hybridopt::fault {
namespace {

offload_context_info_t InfoOf(const Trainer& trainer) {
  auto info = Make<offload_context_info_t>();
  EXPECT_OFFLOAD_OK(offload_context_get_info(trainer.context, &info));
  return info;
}

uint64_t PlannedPinnedBytes(const Trainer& trainer) {
  auto plan = Make<offload_plan_t>();
  EXPECT_OFFLOAD_OK(offload_optimizer_plan(trainer.optimizer, &plan));
  return plan.staging_bytes + plan.host_params_bytes + plan.host_grads_bytes +
         plan.host_swap_bytes + plan.pinned_state_bytes;
}

// Twelve chunks, a ring of eight slots, delays: the ring is used in turn on every rung.
RunOptions Long(uint64_t sim_pinned_bytes_max, int32_t allow_pageable) {
  RunOptions options;
  options.counts = {9000, 1, 5000};
  options.staging_slots = 8;
  options.host_executors = OFFLOAD_EXECUTORS_CPU;
  options.sim_delay_ns_max = 50'000;
  options.sim_pinned_bytes_max = sim_pinned_bytes_max;
  options.allow_pageable = allow_pageable;
  return options;
}

std::vector<unsigned char> BitsWithoutLimit() {
  Trainer trainer(Long(0, 0));
  trainer.AddParams();
  trainer.Commit();
  EXPECT_EQ(InfoOf(trainer).pinned_bytes, PlannedPinnedBytes(trainer));
  trainer.Steps(0, 4);
  return trainer.Bits();
}

TEST(Pinning, FewerSlotsWhereNotAllCanBePinned) {
  const std::vector<unsigned char> bits = BitsWithoutLimit();
  for (const double share : {0.9, 0.55, 0.3}) {
    uint64_t planned = 0;
    {
      Trainer trainer(Long(0, 0));
      trainer.AddParams();
      planned = PlannedPinnedBytes(trainer);
    }
    const auto limit = static_cast<uint64_t>(share * static_cast<double>(planned));
    Trainer trainer(Long(limit, 0));
    trainer.AddParams();
    trainer.Commit();
    const offload_context_info_t info = InfoOf(trainer);
    EXPECT_GT(info.pinned_bytes, 0u);
    EXPECT_LE(info.pinned_bytes, limit);
    EXPECT_NE(std::string(info.notes).find("fewer slots than asked for"), std::string::npos)
        << info.notes;
    trainer.Steps(0, 4);
    EXPECT_EQ(trainer.Bits(), bits) << share;
  }
}

TEST(Pinning, RefusedWhereNotEvenTwoSlotsCanBePinned) {
  Trainer trainer(Long(8192, 0));
  trainer.AddParams();
  const offload_context_info_t before = InfoOf(trainer);
  EXPECT_EQ(offload_optimizer_commit(trainer.optimizer, nullptr), OFFLOAD_OUT_OF_HOST_MEMORY);
  const std::string text = offload_last_error();
  for (const char* word : {"cannot pin", "of at most 8192", "raise that limit", "allow_pageable"})
    EXPECT_NE(text.find(word), std::string::npos) << text;
  const offload_context_info_t after = InfoOf(trainer);
  EXPECT_EQ(after.pinned_bytes, 0u);
  EXPECT_EQ(after.device_memory_free_bytes, before.device_memory_free_bytes);
}

TEST(Pinning, PageableWhereThatIsAllowed) {
  const std::vector<unsigned char> bits = BitsWithoutLimit();
  Trainer trainer(Long(256, 1));
  trainer.AddParams();
  trainer.Commit();
  const offload_context_info_t info = InfoOf(trainer);
  EXPECT_EQ(info.pinned_bytes, 0u);
  EXPECT_NE(std::string(info.notes).find("staging is pageable"), std::string::npos) << info.notes;
  trainer.Steps(0, 4);
  EXPECT_EQ(trainer.Bits(), bits);
}

// Memory for movable content: pinned, or pageable with a note.
TEST(Pinning, OffloadedStatesMayBePageable) {
  std::vector<unsigned char> bits[2];
  for (const bool limited : {false, true}) {
    RunOptions options = Long(limited ? 256 : 0, 1);
    options.movable = OFFLOAD_MOVABLE_STATES;
    Trainer trainer(options);
    trainer.AddParams();
    trainer.Commit();
    const offload_context_info_t info = InfoOf(trainer);
    EXPECT_EQ(info.pinned_bytes, limited ? 0 : PlannedPinnedBytes(trainer));
    EXPECT_EQ(
        std::string(info.notes).find("room for what is offloaded is pageable") == std::string::npos,
        !limited)
        << info.notes;
    trainer.Steps(0, 2);
    EXPECT_OFFLOAD_OK(offload_optimizer_offload_states(trainer.optimizer, nullptr, nullptr));
    EXPECT_OFFLOAD_OK(offload_optimizer_reload_states(trainer.optimizer, nullptr, nullptr));
    trainer.Steps(2, 4);
    bits[limited] = trainer.Bits();
  }
  EXPECT_EQ(bits[0], bits[1]);
}

// ------------------------------------------------------- state that streams through the device --

offload_plan_t PlanOf(const Trainer& trainer) {
  auto plan = Make<offload_plan_t>();
  EXPECT_OFFLOAD_OK(offload_optimizer_plan(trainer.optimizer, &plan));
  return plan;
}

RunOptions Streaming(int32_t host_executors, uint64_t sim_pinned_bytes_max) {
  RunOptions options = Long(sim_pinned_bytes_max, 0);
  options.host_executors = host_executors;
  return options;
}

// Enough for everything except the state.
uint64_t LimitBelowState() {
  Trainer trainer(Streaming(OFFLOAD_EXECUTORS_AUTO, 0));
  trainer.AddParams();
  const offload_plan_t plan = PlanOf(trainer);
  EXPECT_GT(plan.pinned_state_bytes, 0u);
  return plan.staging_bytes + plan.pinned_state_bytes - 1;
}

TEST(Pinning, StateIsPinnedAsPlanned) {
  Trainer trainer(Streaming(OFFLOAD_EXECUTORS_AUTO, 0));
  trainer.AddParams();
  trainer.Commit();
  EXPECT_EQ(InfoOf(trainer).pinned_bytes, PlannedPinnedBytes(trainer));
  trainer.Steps(0, 4);
  EXPECT_EQ(trainer.Bits(), BitsWithoutLimit());
}

TEST(Pinning, WhereTheSystemPinsNoStateCpuThreadsDoAll) {
  Trainer trainer(Streaming(OFFLOAD_EXECUTORS_AUTO, LimitBelowState()));
  trainer.AddParams();
  trainer.Commit();
  EXPECT_NE(std::string(InfoOf(trainer).notes)
                .find("state does not stream through the device: the system did not pin it"),
            std::string::npos)
      << InfoOf(trainer).notes;
  const offload_plan_t plan = PlanOf(trainer);
  EXPECT_EQ(plan.device_ring_bytes, 0u);
  EXPECT_EQ(plan.pinned_state_bytes, 0u);
  EXPECT_EQ(InfoOf(trainer).pinned_bytes, PlannedPinnedBytes(trainer));
  trainer.Steps(0, 4);
  EXPECT_EQ(trainer.Bits(), BitsWithoutLimit());
  auto stats = Make<offload_stats_t>();
  EXPECT_OFFLOAD_OK(offload_optimizer_get_stats(trainer.optimizer, &stats));
  EXPECT_EQ(stats.streamed_elements, 0u);
}

TEST(Pinning, StreamedAloneIsRefusedWhereTheSystemPinsNoState) {
  Trainer trainer(Streaming(OFFLOAD_EXECUTORS_STREAMED, LimitBelowState()));
  trainer.AddParams();
  EXPECT_EQ(offload_optimizer_commit(trainer.optimizer, nullptr), OFFLOAD_OUT_OF_HOST_MEMORY);
  const std::string text = offload_last_error();
  for (const char* word :
       {"host_executors is OFFLOAD_EXECUTORS_STREAMED", "cannot pin", "use OFFLOAD_EXECUTORS_AUTO"})
    EXPECT_NE(text.find(word), std::string::npos) << text;
  EXPECT_EQ(InfoOf(trainer).pinned_bytes, 0u);
}

}  // namespace
}  // namespace hybridopt::fault
