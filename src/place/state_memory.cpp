#include "place/state_memory.h"

#include <algorithm>

#include "base/system.h"

namespace hybridopt {

Result<std::unique_ptr<StateMemory>> StateMemory::Create(Context& context, const StateShape& shape,
                                                         const Residence& residence) {
  std::unique_ptr<StateMemory> memory(new StateMemory(context, shape));
  HYBRIDOPT_ASSIGN(memory->arena_, Arena::Reserve(shape.host_arena_bytes, context.state_pages()));
  for (uint32_t slot = 0; slot < kStateSlots; ++slot)
    memory->regions_[Tier::kHost][slot] = memory->arena_.data() + shape.host_region_begin[slot];
  HYBRIDOPT_TRY(memory->GrowHost(residence));
  if (context.device().unified()) return memory;
  for (uint32_t slot = 0; slot < kStateSlots; ++slot) {
    const uint64_t bytes = shape.RegionBytes(Tier::kDevice, StateSlot{slot});
    HYBRIDOPT_ASSIGN(memory->windows_[slot], DeviceWindow::Reserve(context.device(), bytes));
    memory->regions_[Tier::kDevice][slot] = memory->windows_[slot].data();
  }
  HYBRIDOPT_ASSIGN(TakenPages pages, memory->TakeDevice(nullptr, residence));
  HYBRIDOPT_TRY(memory->GrowDevice(pages));
  return memory;
}

ByTier<uint64_t> StateMemory::Bytes(const Device& device, const StateShape& shape,
                                    const Residence& residence) {
  ByTier<uint64_t> bytes;
  for (uint32_t index = 0; index < kStateSlots; ++index) {
    const StateSlot slot{index};
    bytes[Tier::kHost] +=
        system::RoundUp(residence.bytes(Tier::kHost, slot).size(), system::PageBytes());
    if (!device.unified())
      bytes[Tier::kDevice] += DeviceWindow::PageBytes(
          device, shape.RegionBytes(Tier::kDevice, slot), residence.bytes(Tier::kDevice, slot).end);
  }
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

void StateMemory::FreeDevice() {
  for (const DeviceWindow& window : windows_) window.Shrink(0);
  has_device_ = false;
}

Status StateMemory::Grow(const Residence& to, TakenPages& pages) {
  HYBRIDOPT_TRY(GrowHost(to));
  return has_device_ ? GrowDevice(pages) : Status();
}

void StateMemory::Shrink(const Residence& from, const Residence& to) {
  for (uint32_t slot = 0; slot < kStateSlots && has_device_; ++slot)
    windows_[slot].Shrink(to.bytes(Tier::kDevice, StateSlot{slot}).end);
  UnpinHost(&to);  // memory that will be freed must not be pinned
  ShrinkHost(from, to);
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
  if (disk_ != nullptr) disk_->AddNodeBytes(sum);
}

// Frees pages of which `from` holds bytes and `to` holds none: before the bytes that stay, and
// behind them. Regions share no page.
void StateMemory::ShrinkHost(const Residence& from, const Residence& to) {
  const uint64_t page_bytes = system::PageBytes();
  for (uint32_t index = 0; index < kStateSlots; ++index) {
    const Residence::Bytes& old_range = from.bytes(Tier::kHost, StateSlot{index});
    const Residence::Bytes& new_range = to.bytes(Tier::kHost, StateSlot{index});
    if (old_range.size() == 0) continue;
    const uint64_t region = shape_.host_region_begin[index];
    const auto first_page = [&](const Residence::Bytes& range) {
      return (region + range.begin) / page_bytes * page_bytes;
    };
    const auto end_page = [&](const Residence::Bytes& range) {
      return system::RoundUp(region + range.end, page_bytes);
    };
    const uint64_t begin = first_page(old_range), end = end_page(old_range);
    const bool stays = new_range.size() > 0;
    arena_.Discard(begin, stays ? std::min(end, first_page(new_range)) : end);
    if (stays) arena_.Discard(std::max(begin, end_page(new_range)), end);
  }
}

// ------------------------------------------------------------------------------------- pinning --

// Lists the pages of all regions as pieces. Regions share no page. A region that grows or shrinks
// at its begin keeps all pieces but the first one.
std::vector<StateMemory::Piece> StateMemory::Pieces(const StateShape& shape,
                                                    const Residence& residence) {
  const uint64_t page_bytes = system::PageBytes();
  std::vector<Piece> pieces;
  for (uint32_t slot = 0; slot < kStateSlots; ++slot) {
    const Residence::Bytes& range = residence.bytes(Tier::kHost, StateSlot{slot});
    if (range.size() == 0) continue;
    const uint64_t region = shape.host_region_begin[slot];
    uint64_t begin = (region + range.begin) / page_bytes * page_bytes;
    const uint64_t end = system::RoundUp(region + range.end, page_bytes);
    auto cut = std::upper_bound(shape.pin_cuts.begin(), shape.pin_cuts.end(), begin);
    for (; cut != shape.pin_cuts.end() && *cut < end; begin = *cut++)
      pieces.push_back({begin, *cut});
    pieces.push_back({begin, end});
  }
  return pieces;
}

uint64_t StateMemory::PinnedBytes(const StateShape& shape, const Residence& residence) {
  uint64_t bytes = 0;
  for (const Piece& piece : Pieces(shape, residence)) bytes += piece.end - piece.begin;
  return bytes;
}

uint64_t StateMemory::pinned_bytes() const {
  uint64_t bytes = 0;
  for (const Piece& piece : pieces_) bytes += piece.end - piece.begin;
  return bytes;
}

Status StateMemory::PinHost(const Residence& residence) {
  UnpinHost(&residence);
  const std::vector<Piece> kept = pieces_;
  for (const Piece& piece : Pieces(shape_, residence)) {
    if (std::find(kept.begin(), kept.end(), piece) != kept.end()) continue;
    if (Status status = PinPiece(piece); !status.ok()) {
      UnpinHost(nullptr);
      return status;
    }
  }
  pinned_ = true;
  return {};
}

void StateMemory::UnpinHost(const Residence* but_what_this_holds) {
  std::vector<Piece> kept;
  if (but_what_this_holds != nullptr) kept = Pieces(shape_, *but_what_this_holds);
  const auto first = std::stable_partition(pieces_.begin(), pieces_.end(), [&](const Piece& piece) {
    return std::find(kept.begin(), kept.end(), piece) != kept.end();
  });
  std::for_each(first, pieces_.end(), [&](const Piece& piece) { UnpinPiece(piece); });
  pieces_.erase(first, pieces_.end());
  pinned_ = false;
}

Status StateMemory::PinPiece(const Piece& piece) {
  pieces_.reserve(pieces_.size() + 1);  // so that a piece that has been pinned can always be listed
  HYBRIDOPT_TRY(context_.ReservePinned(piece.end - piece.begin, "the state on the host"));
  const Status status = device_.PinHost(arena_.data() + piece.begin, piece.end - piece.begin);
  if (status.ok())
    pieces_.push_back(piece);
  else
    context_.ReleasePinned(piece.end - piece.begin);
  return status;
}

void StateMemory::UnpinPiece(const Piece& piece) {
  device_.UnpinHost(arena_.data() + piece.begin);
  context_.ReleasePinned(piece.end - piece.begin);
}

}  // namespace hybridopt
