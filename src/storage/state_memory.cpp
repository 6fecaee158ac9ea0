#include "storage/state_memory.h"

namespace hybridopt {
namespace {

constexpr uint64_t kHostPageBytes = 4096;

}  // namespace

Result<std::unique_ptr<StateMemory>> StateMemory::Create(Context& context, const StateShape& shape,
                                                         const Residence& residence) {
  std::unique_ptr<StateMemory> memory(new StateMemory(context.device(), shape));
  HYBRIDOPT_ASSIGN(memory->arena_, Arena::Reserve(shape.host_arena_bytes, context.state_pages()));
  HYBRIDOPT_TRY(memory->GrowHost(residence));
  if (context.device().unified()) return memory;
  for (uint32_t slot = 0; slot < kStateSlots; ++slot) {
    const uint64_t bytes = shape.RegionBytes(Tier::kDevice, StateSlot{slot});
    HYBRIDOPT_ASSIGN(memory->windows_[slot], DeviceWindow::Reserve(context.device(), bytes));
  }
  HYBRIDOPT_ASSIGN(TakenPages pages, memory->TakeDevice(nullptr, residence));
  HYBRIDOPT_TRY(memory->GrowDevice(pages));
  return memory;
}

uint64_t StateMemory::HostBytes(const Residence& residence) {
  uint64_t bytes = 0;
  for (uint32_t slot = 0; slot < kStateSlots; ++slot) {
    const Residence::Bytes& range = residence.bytes(Tier::kHost, StateSlot{slot});
    if (range.size() > 0)
      bytes += (range.size() + kHostPageBytes - 1) / kHostPageBytes * kHostPageBytes;
  }
  return bytes;
}

uint64_t StateMemory::DeviceBytes(const Device& device, const StateShape& shape,
                                  const Residence& residence) {
  uint64_t bytes = 0;
  for (uint32_t slot = 0; slot < kStateSlots; ++slot)
    bytes += DeviceWindow::PageBytes(device, shape.RegionBytes(Tier::kDevice, StateSlot{slot}),
                                     residence.bytes(Tier::kDevice, StateSlot{slot}).end);
  return bytes;
}

Result<TakenPages> StateMemory::TakeDevice(const Residence* from, const Residence& to) const {
  TakenPages pages(device_);
  for (uint32_t index = 0; index < kStateSlots; ++index) {
    const StateSlot slot{index};
    const uint64_t from_bytes = from != nullptr ? from->bytes(Tier::kDevice, slot).end : 0;
    HYBRIDOPT_ASSIGN(pages.slots[slot],
                     windows_[slot].Take(from_bytes, to.bytes(Tier::kDevice, slot).end));
  }
  return pages;
}

Status StateMemory::GrowDevice(TakenPages& pages) {
  for (uint32_t slot = 0; slot < kStateSlots; ++slot)
    HYBRIDOPT_TRY(windows_[slot].Grow(pages.slots[slot]));
  has_device_ = true;
  return {};
}

void StateMemory::ShrinkDevice(const Residence& to) {
  for (uint32_t slot = 0; slot < kStateSlots; ++slot)
    windows_[slot].Shrink(to.bytes(Tier::kDevice, StateSlot{slot}).end);
}

void StateMemory::FreeDevice() {
  for (const DeviceWindow& window : windows_) window.Shrink(0);
  has_device_ = false;
}

Status StateMemory::GrowHost(const Residence& to) {
  for (uint32_t slot = 0; slot < kStateSlots; ++slot) {
    const Residence::Bytes& range = to.bytes(Tier::kHost, StateSlot{slot});
    const uint64_t begin = shape_.host_region_begin[slot];
    if (range.size() > 0) HYBRIDOPT_TRY(arena_.Back(begin + range.begin, begin + range.end));
  }
  return {};
}

void StateMemory::AddNodeBytes(const Residence& residence, NodeBytes* sum) const {
  for (uint32_t slot = 0; slot < kStateSlots; ++slot) {
    const Residence::Bytes& range = residence.bytes(Tier::kHost, StateSlot{slot});
    const uint64_t begin = shape_.host_region_begin[slot];
    arena_.AddNodeBytes(begin + range.begin, begin + range.end, sum);
  }
}

// Both residences hold the end of a region on the host, if anything of it.
void StateMemory::ShrinkHost(const Residence& from, const Residence& to) {
  for (uint32_t index = 0; index < kStateSlots; ++index) {
    const StateSlot slot{index};
    const Residence::Bytes& old_range = from.bytes(Tier::kHost, slot);
    const Residence::Bytes& new_range = to.bytes(Tier::kHost, slot);
    const uint64_t begin = shape_.host_region_begin[slot];
    const uint64_t kept_from = new_range.size() > 0 ? new_range.begin : old_range.end;
    arena_.Discard(begin + old_range.begin, begin + kept_from);
  }
}

}  // namespace hybridopt
