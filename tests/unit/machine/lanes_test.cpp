// Lanes on a device without queues, and lanes without scratch memory: no address is computed from
// NULL.
#include "machine/lanes.h"

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "kernels/kernels.h"

namespace hybridopt {
namespace {

std::shared_ptr<Context> MakeContext(std::unique_ptr<Device> device) {
  offload_context_options_t options{};
  options.threads = 1;
  options.log = [](void*, int32_t, const char*) {};
  return std::make_shared<Context>(options, std::move(device), *SelectKernels().value());
}

TEST(Lanes, WithoutQueuesThereIsNoEventToWaitFor) {
  const auto context = MakeContext(CreateHostDevice());
  const auto lanes = std::move(Lanes::Create(*context, {}).value());
  for (uint32_t slot : {0u, 1u, 255u}) {
    EXPECT_EQ(lanes->ReadyEvents(slot).data(), nullptr);
    EXPECT_TRUE(lanes->ReadyEvents(slot).empty());
    EXPECT_EQ(lanes->KeepReadyEvent(slot), nullptr);
  }
}

TEST(Lanes, WithoutScratchNothingLiesInIt) {
  const KernelTable& kernels = *SelectKernels().value();
  const auto context = MakeContext(std::move(CreateSimDevice({1 << 20, 1, 0}, kernels).value()));
  const auto lanes = std::move(Lanes::Create(*context, {}).value());
  EXPECT_NE(lanes->block_sums, nullptr);
  LaneScratch scratch;
  lanes->UseScratch(scratch);
  EXPECT_EQ(lanes->device_verdict, nullptr);
  EXPECT_EQ(lanes->block_sums, nullptr);
  EXPECT_EQ(lanes->device_grads, nullptr);
  lanes->UseScratch(scratch);
  EXPECT_NE(lanes->device_verdict, nullptr);
}

}  // namespace
}  // namespace hybridopt
