// The staging ring: its bytes, its halves, and the poison that shows a missing wait.
#include "memory/staging.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "memory/pinned_arena.h"

namespace hybridopt {
namespace {

constexpr uint32_t kSlots = 3;
constexpr uint64_t kGradBytes = 5000, kParamBytes = 3000;

std::unique_ptr<Device> Sim() {
  return std::move(CreateSimDevice({1 << 20, 1, 0}, ReferenceKernels()).value());
}

// A ring in pinned memory of its own.
struct PinnedRing {
  PinnedRing(Device& device, uint32_t slots)
      : memory(std::move(
            PinnedArena::Map(device, slots * StagingRing::SlotBytes(kGradBytes, kParamBytes))
                .value())),
        ring(device, memory.data(), slots, kGradBytes, kParamBytes) {}

  PinnedArena memory;
  StagingRing ring;
};

bool AllAre(const std::byte* data, uint64_t bytes, int value) {
  return std::all_of(data, data + bytes, [&](std::byte b) { return b == std::byte(value); });
}

TEST(StagingRing, HalvesOfAllSlotsAreApartAndOnPages) {
  const std::unique_ptr<Device> device = Sim();
  const PinnedRing pinned(*device, kSlots);
  const StagingRing& ring = pinned.ring;
  EXPECT_EQ(StagingRing::SlotBytes(kGradBytes, kParamBytes), 8192u + 4096u);
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
  PinnedRing pinned(*device, kSlots);
  StagingRing& ring = pinned.ring;
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
  PinnedRing pinned(*device, 2);
  StagingRing& ring = pinned.ring;
  std::memset(ring.grads(0), 1, kGradBytes);
  std::memset(ring.params(0), 2, kParamBytes);
  ring.ReleaseGrads(0);
  ring.ReleaseParams(0);
  EXPECT_TRUE(AllAre(ring.grads(0), kGradBytes, 1));
  EXPECT_TRUE(AllAre(ring.params(0), kParamBytes, 2));
}

TEST(StagingRing, MemoryIsPinnedForExactlyItsLife) {
  const std::unique_ptr<Device> device = Sim();
  PinnedRing pinned(*device, 2);
  const StagingRing& ring = pinned.ring;
  const uint64_t bytes = 2 * StagingRing::SlotBytes(kGradBytes, kParamBytes);
  EXPECT_FALSE(device->PinHost(ring.grads(0), bytes).ok()) << "pinned already, all of it";
  EXPECT_FALSE(device->PinHost(ring.params(1) + 4095, 1).ok()) << "to the last byte";
  PinnedArena moved = std::move(pinned.memory);
  void* const data = moved.data();
  moved = PinnedArena();  // swaps: the old memory goes with the temporary
  EXPECT_TRUE(device->PinHost(data, bytes).ok()) << "no longer pinned";
  device->UnpinHost(data);
}

TEST(StagingRing, WithoutSlotsTakesNothing) {
  const std::unique_ptr<Device> device = Sim();
  EXPECT_EQ(PinnedRing(*device, 0).memory.bytes(), 0u);
  EXPECT_EQ(StagingRing().slots(), 0u);
}

}  // namespace
}  // namespace hybridopt
