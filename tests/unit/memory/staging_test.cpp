// The staging ring: its bytes, its halves, and the poison that shows a missing wait.
#include "memory/staging.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace hybridopt {
namespace {

constexpr uint32_t kSlots = 3;
constexpr uint64_t kGradBytes = 5000, kParamBytes = 3000;

std::unique_ptr<Device> Sim() {
  return std::move(CreateSimDevice({1 << 20, 1, 0}, ReferenceKernels()).value());
}

bool AllAre(const std::byte* data, uint64_t bytes, int value) {
  return std::all_of(data, data + bytes, [&](std::byte b) { return b == std::byte(value); });
}

TEST(StagingRing, HalvesOfAllSlotsAreApartAndOnPages) {
  const std::unique_ptr<Device> device = Sim();
  const StagingRing ring =
      std::move(StagingRing::Create(*device, kSlots, kGradBytes, kParamBytes).value());
  EXPECT_EQ(StagingRing::Bytes(kSlots, kGradBytes, kParamBytes), kSlots * (8192 + 4096));
  EXPECT_EQ(ring.slots(), kSlots);
  const std::byte* next = ring.grads(0);
  for (uint32_t slot = 0; slot < kSlots; ++slot) {
    EXPECT_EQ(ring.grads(slot), next);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(ring.grads(slot)) % 4096, 0u);
    EXPECT_EQ(ring.params(slot), ring.grads(slot) + 8192);
    next = ring.params(slot) + 4096;
  }
}

TEST(StagingRing, IsPoisonedOnTheSimulatedDeviceHalfByHalf) {
  const std::unique_ptr<Device> device = Sim();
  StagingRing ring =
      std::move(StagingRing::Create(*device, kSlots, kGradBytes, kParamBytes).value());
  for (uint32_t slot = 0; slot < kSlots; ++slot) {
    EXPECT_TRUE(AllAre(ring.grads(slot), kGradBytes, 0xff)) << "fresh";
    EXPECT_TRUE(AllAre(ring.params(slot), kParamBytes, 0xff)) << "fresh";
    std::memset(ring.grads(slot), 1, kGradBytes);
    std::memset(ring.params(slot), 2, kParamBytes);
  }
  ring.ReleaseGrads(1);
  EXPECT_TRUE(AllAre(ring.grads(1), kGradBytes, 0xff));
  EXPECT_TRUE(AllAre(ring.params(1), kParamBytes, 2));
  ring.ReleaseParams(2);
  EXPECT_TRUE(AllAre(ring.grads(2), kGradBytes, 1));
  EXPECT_TRUE(AllAre(ring.params(2), kParamBytes, 0xff));
  EXPECT_TRUE(AllAre(ring.grads(0), kGradBytes, 1));
  EXPECT_TRUE(AllAre(ring.params(0), kParamBytes, 2));
}

TEST(StagingRing, IsLeftAloneOnARealDevice) {
  const std::unique_ptr<Device> device = CreateHostDevice();
  StagingRing ring = std::move(StagingRing::Create(*device, 2, kGradBytes, kParamBytes).value());
  std::memset(ring.grads(0), 1, kGradBytes);
  std::memset(ring.params(0), 2, kParamBytes);
  ring.ReleaseGrads(0);
  ring.ReleaseParams(0);
  EXPECT_TRUE(AllAre(ring.grads(0), kGradBytes, 1));
  EXPECT_TRUE(AllAre(ring.params(0), kParamBytes, 2));
}

TEST(StagingRing, IsPinnedForExactlyItsLife) {
  const std::unique_ptr<Device> device = Sim();
  StagingRing ring = std::move(StagingRing::Create(*device, 2, kGradBytes, kParamBytes).value());
  const uint64_t bytes = StagingRing::Bytes(2, kGradBytes, kParamBytes);
  EXPECT_FALSE(device->PinHost(ring.grads(0), bytes).ok()) << "pinned already, all of it";
  EXPECT_FALSE(device->PinHost(ring.params(1) + 4095, 1).ok()) << "to the last byte";
  StagingRing moved = std::move(ring);
  void* const data = moved.grads(0);
  moved = StagingRing();  // swaps: the old memory goes with the temporary
  EXPECT_TRUE(device->PinHost(data, bytes).ok()) << "no longer pinned";
  device->UnpinHost(data);
}

TEST(StagingRing, WithoutSlotsTakesNothing) {
  const std::unique_ptr<Device> device = Sim();
  const StagingRing ring = std::move(StagingRing::Create(*device, 0, 0, 0).value());
  EXPECT_EQ(StagingRing::Bytes(0, kGradBytes, kParamBytes), 0u);
  EXPECT_EQ(ring.slots(), 0u);
}

}  // namespace
}  // namespace hybridopt
