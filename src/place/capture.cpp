#include "place/capture.h"

#include <chrono>
#include <utility>

#include "base/check.h"
#include "base/system.h"

namespace hybridopt {
namespace {

constexpr bool AllUnitsAreElements() {
  for (const FormatRow& row : kFormats)
    if (row.unit_elements != 1) return false;
  return true;
}
static_assert(AllUnitsAreElements(), "let pieces end where units of their format end");

// The array that has what a save reads as `slot`: masters, or what the params beside it lack.
StateSlot StoredSlot(const ParamShape& param, uint32_t slot) {
  return slot == kMaster ? param.master_slot() : StateSlot{slot};
}

uint64_t ElementBytes(const ParamShape& param, uint32_t slot) {
  return RowOf(param.format[StoredSlot(param, slot)]).unit_bytes;
}

// Of an element of the param, which a save reads too if the master is beside it.
uint64_t ParamBytes(const ParamShape& param, uint32_t slot) {
  return slot == kMaster && param.beside_param() ? sizeof(uint16_t) : 0;
}

// Of a cache line: pieces that share a slot begin at multiples of it.
constexpr uint64_t kLineBytes = 64;
// Small pieces share slots.
bool IsSmall(uint64_t piece_bytes, uint64_t slot_bytes) { return piece_bytes <= slot_bytes / 2; }

}  // namespace

// ----------------------------------------------------------------------------------------- room --

bool Capture::OpenSlot::Add(uint64_t piece_bytes) {
  if (!IsSmall(piece_bytes, slot_bytes)) return true;
  const bool is_full = filled_bytes + piece_bytes > slot_bytes;
  filled_bytes = (is_full ? 0 : filled_bytes) + piece_bytes;
  return is_full;
}

void Capture::Room::Add(uint64_t piece_bytes) {
  IsSmall(piece_bytes, slot_bytes) ? shared_bytes += piece_bytes : own_slots += 1;
}

void Capture::Room::Remove(uint64_t piece_bytes) {
  IsSmall(piece_bytes, slot_bytes) ? shared_bytes -= piece_bytes : own_slots -= 1;
}

// A slot that has no room for the next small piece is more than half full.
uint64_t Capture::Room::slots() const {
  const uint64_t half = slot_bytes / 2;
  return own_slots + (shared_bytes + half - 1) / half;
}

// A param begins a piece of each array. So does each of its segments, and if that cuts a piece in
// two, both take at most one slot more. Segments begin where chunks do, where a param has had as
// many elements as a chunk, and once at the end of the device's share.
uint64_t Capture::BufferBytesMost(const ParamTable& table, const StateShape& shape) {
  Room room{SlotBytes(shape)};
  room.own_slots = kArrays * (ChunksMost(shape) + 1);
  for (uint32_t id = 0; id < table.size(); ++id) {
    const ParamShape& param = shape.params[id];
    const uint64_t count = table.param(id).count;
    for (uint32_t slot = 0; slot < kArrays; ++slot) {
      if (!HasState(param.rule, Format::kFp32, StateSlot{slot})) continue;
      const Array array = ArrayOf(param, slot, room.slot_bytes);
      room.own_slots += count / array.piece_elements + count / shape.options.chunk_elements;
      room.Add(PieceBytes(array, {0, 0, count % array.piece_elements}));
    }
  }
  return room.slots() * room.slot_bytes;
}

uint64_t Capture::ParamsOffset(const Array& array, const Piece& piece) {
  return system::RoundUp((piece.end - piece.begin) * array.element_bytes, kLineBytes);
}

uint64_t Capture::PieceBytes(const Array& array, const Piece& piece) {
  return ParamsOffset(array, piece) +
         system::RoundUp((piece.end - piece.begin) * array.param_bytes, kLineBytes);
}

// --------------------------------------------------------------------------------------- layout --

Capture::Capture(const StateShape& shape, const Residence& residence, const ChunkTable& chunks)
    : shape_(shape), slot_bytes_(SlotBytes(shape)), arrays_(shape.params.size() * kArrays) {
  const auto params = static_cast<uint32_t>(shape.params.size());
  std::vector<uint32_t> next(params + 1);  // per param: its next fragment, in `ordered`
  for (const Fragment& fragment : chunks.fragments) next[fragment.param + 1] += 1;
  for (uint32_t id = 0; id < params; ++id) next[id + 1] += next[id];
  std::vector<const Fragment*> ordered(chunks.fragments.size());
  for (const Fragment& fragment : chunks.fragments) ordered[next[fragment.param]++] = &fragment;
  const uint64_t most = shape.options.chunk_elements;
  auto fragment = ordered.begin();
  for (uint32_t id = 0; id < params; ++id) {
    first_segment_.push_back(static_cast<uint32_t>(segments_.size()));
    uint64_t end = residence.range(id, Tier::kDevice).count;
    AddSegments(id, 0, end, most);
    for (; fragment != ordered.end() && (*fragment)->param == id; ++fragment) {
      end = (*fragment)->begin + (*fragment)->count;
      AddSegments(id, (*fragment)->begin, end, shape.options.unified ? most : UINT64_MAX);
    }
    segments_.push_back({end, {}});
  }
  first_segment_.push_back(static_cast<uint32_t>(segments_.size()));
}

void Capture::AddSegments(uint32_t param, uint64_t begin, uint64_t end, uint64_t most) {
  for (; begin < end; begin = shape_.params[param].unit.CutOf(begin, end, most))
    segments_.push_back({begin, {}});
}

Capture::Array Capture::ArrayOf(const ParamShape& param, uint32_t slot, uint64_t slot_bytes) {
  const auto element_bytes = static_cast<uint32_t>(ElementBytes(param, slot));
  const auto param_bytes = static_cast<uint32_t>(ParamBytes(param, slot));
  const auto elements = static_cast<uint32_t>(slot_bytes / (element_bytes + param_bytes));
  return {std::bit_floor(elements), element_bytes, param_bytes, false};
}

void Capture::AddArray(uint32_t param, StateSlot slot, bool borrowed) {
  Array& array = arrays_[ArrayIndex(param, slot)];
  array = ArrayOf(shape_.params[param], slot, slot_bytes_);
  array.borrowed = borrowed;
  const uint32_t before = piece_count_;
  for (uint32_t i = first_segment_[param]; i + 1 < first_segment_[param + 1]; ++i) {
    segments_[i].first_piece[slot] = piece_count_;
    const uint64_t end = segments_[i + 1].begin;
    for (uint64_t begin = segments_[i].begin; begin < end; begin += array.piece_elements)
      live_room_.Add(
          PieceBytes(array, {piece_count_++, begin, std::min(begin + array.piece_elements, end)}));
  }
  live_ += piece_count_ - before;
  if (borrowed) borrowed_live_ += piece_count_ - before;
  borrows_ = borrows_ || borrowed;
}

void Capture::UseBuffer(std::span<std::byte> buffer) {
  pieces_ = std::vector<std::atomic<uint64_t>>(piece_count_);
  buffer_ = buffer;
  const uint64_t slots = std::min<uint64_t>(buffer.size() / slot_bytes_, piece_count_);
  free_.resize(slots);
  pieces_in_.resize(slots);
  // The first slots are given first.
  for (uint64_t i = 0; i < slots; ++i) free_[i] = static_cast<uint32_t>(slots - 1 - i);
}

Capture::Piece Capture::PieceAt(uint32_t param, uint32_t slot, uint64_t element) const {
  const auto begin = segments_.begin() + first_segment_[param];
  const auto end = segments_.begin() + first_segment_[param + 1] - 1;
  const auto segment =
      std::upper_bound(begin, end, element,
                       [](uint64_t at, const Segment& s) { return at < s.begin; }) -
      1;
  const uint64_t most = ArrayAt(param, slot).piece_elements;
  const uint64_t number = (element - segment->begin) / most;
  const uint64_t first = segment->begin + number * most;
  return {segment->first_piece[slot] + static_cast<uint32_t>(number), first,
          std::min(first + most, (segment + 1)->begin)};
}

// ------------------------------------------------------------------------------------- the save --

Capture::Source Capture::Take(uint32_t param, StateSlot slot, uint64_t first, uint64_t count) {
  const Array& array = ArrayAt(param, slot);
  const Piece piece = PieceAt(param, slot, first);
  std::unique_lock lock(mutex_);
  AwaitLocked(lock, [&] { return goes_first_ == 0 && StateOf(pieces_[piece.index]) != kCopying; });
  const uint64_t word = pieces_[piece.index];
  if (StateOf(word) == kAside || StateOf(word) == kBehind) {
    const uint64_t element = first - piece.begin;
    std::byte* const copy = CopyAt(word);
    const ParamShape& shaped = shape_.params[param];
    return {std::min(count, piece.end - first), copy + element * array.element_bytes,
            copy + ParamsOffset(array, piece) + element * array.param_bytes,
            shaped.format[StoredSlot(shaped, slot)], StateOf(word) == kBehind ? copied_ : nullptr};
  }
  const uint64_t end = first + count;
  uint64_t taken = first;
  while (taken < end) {
    const Piece next = PieceAt(param, slot, taken);
    if (StateOf(pieces_[next.index]) != kLive) break;
    Set(next, kReading);
    taken = std::min(next.end, end);
  }
  HYBRIDOPT_CHECK(taken > first);
  return {taken - first};
}

void Capture::Finish(uint32_t param, StateSlot slot, uint64_t first, uint64_t count) {
  const Array& array = ArrayAt(param, slot);
  std::unique_lock lock(mutex_);
  for (const uint64_t end = first + count; first < end;) {
    const Piece piece = PieceAt(param, slot, first);
    const uint64_t word = pieces_[piece.index];
    const bool is_whole = piece.end <= end;
    first = std::min(piece.end, end);
    // What is left of a piece may be put aside, with all of the piece.
    if (!is_whole && StateOf(word) == kReading) Set(piece, kLive);
    if (!is_whole) continue;
    if (StateOf(word) != kReading) FreeRoom(OffsetOf(word));
    if (StateOf(word) != kAside) Leave(array, piece);
    Set(piece, kRead);
  }
  Notify(std::move(lock));
}

void Capture::End() {
  std::unique_lock lock(mutex_);
  ended_ = true;
  live_ = 0;
  borrowed_live_ = 0;
  Notify(std::move(lock));
}

// ---------------------------------------------------------------------------------------- steps --

bool Capture::PutAside(Ranges ranges, Arrays arrays) {
  if (!reads_state()) return false;
  std::unique_lock lock(mutex_);
  bool first = false;
  AwaitLocked(lock, [&] {
    uint64_t slots = 0, reading = 0;
    OpenSlot open = open_;
    ForEachPiece(ranges, arrays, [&](const Piece& piece, const Array& array) {
      const uint32_t state = StateOf(pieces_[piece.index]);
      if (state == kLive && open.Add(PieceBytes(array, piece))) slots += 1;
      reading += state == kReading;
    });
    const bool has_room = slots <= free_.size();
    GoFirst(has_room && reading > 0, &first);
    return has_room && reading == 0;
  });
  GoFirst(false, &first);
  if (ended_) return false;
  bool any = false;
  ForEachPiece(ranges, arrays, [&](const Piece& piece, const Array& array) {
    if (StateOf(pieces_[piece.index]) != kLive) return;
    Set(piece, kCopying, GiveRoom(PieceBytes(array, piece)));
    any = true;
  });
  return any;
}

void Capture::CopiedBehind(Ranges ranges, EventHandle event) {
  std::unique_lock lock(mutex_);
  copied_ = event;
  ForEachPiece(ranges, Arrays::kAll, [&](const Piece& piece, const Array&) {
    const uint64_t word = pieces_[piece.index];
    if (StateOf(word) == kCopying) Set(piece, kBehind, OffsetOf(word));
  });
  Notify(std::move(lock));
}

void Capture::Copied(Ranges ranges, Arrays arrays) {
  if (!reads_state()) return;
  std::unique_lock lock(mutex_);
  if (ended_) return;
  ForEachPiece(ranges, arrays, [&](const Piece& piece, const Array& array) {
    const uint64_t word = pieces_[piece.index];
    if (StateOf(word) != kCopying && StateOf(word) != kBehind) return;
    Set(piece, kAside, OffsetOf(word));
    Leave(array, piece);
  });
  Notify(std::move(lock));
}

void Capture::Withdraw(Ranges ranges) {
  std::unique_lock lock(mutex_);
  ForEachPiece(ranges, Arrays::kAll, [&](const Piece& piece, const Array&) {
    const uint64_t word = pieces_[piece.index];
    if (StateOf(word) != kCopying) return;
    FreeRoom(OffsetOf(word));
    Set(piece, kLive);
  });
  Notify(std::move(lock));
}

bool Capture::HasRead(uint32_t param, uint64_t begin, uint64_t count) const {
  if (!reads_state()) return true;
  bool read = true;
  ForEachPiece([&](Visit visit) { visit(param, begin, count); }, Arrays::kAll,
               [&](const Piece& piece, const Array&) {
                 read = read && StateOf(pieces_[piece.index]) >= kAside;
               });
  return read;
}

bool Capture::AwaitBorrowed(int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  return AwaitLocked(
      lock, [this] { return borrowed_live_ == 0; }, timeout_ns);
}

bool Capture::AwaitAll(int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  return AwaitLocked(
      lock, [this] { return live_ == 0; }, timeout_ns);
}

bool Capture::AwaitRoom(int64_t timeout_ns) {
  std::unique_lock lock(mutex_);
  return AwaitLocked(
      lock, [this] { return live_room_.slots() <= free_.size(); }, timeout_ns);
}

// ------------------------------------------------------------------------------------- private --

template <typename VisitPiece>
void Capture::ForEachPiece(Ranges ranges, Arrays arrays, VisitPiece&& visit) const {
  ranges([&](uint32_t param, uint64_t begin, uint64_t count) {
    for (uint32_t slot = 0; slot < kArrays; ++slot) {
      const Array& array = ArrayAt(param, slot);
      if (array.piece_elements == 0 || (arrays == Arrays::kBorrowed && !array.borrowed)) continue;
      for (uint64_t first = begin; first < begin + count;) {
        const Piece piece = PieceAt(param, slot, first);
        HYBRIDOPT_CHECK(piece.begin == first && piece.end <= begin + count);
        visit(piece, array);
        first = piece.end;
      }
    }
  });
}

void Capture::Set(const Piece& piece, uint32_t state, uint64_t offset) {
  pieces_[piece.index].store(uint64_t{state} << kOffsetBits | offset, std::memory_order_release);
}

// While a step lacks only what the save is reading, the save takes nothing else: it reads piece
// after piece, and the step would wait until the save waits for its disk. `*is_first` is whether
// this step goes first now, and becomes `first`.
void Capture::GoFirst(bool first, bool* is_first) {
  if (first == *is_first) return;
  *is_first = first;
  goes_first_ += first ? 1 : -1;
  if (!first) changed_.notify_all();
}

// Returns the offset in the buffer, which must have room.
uint64_t Capture::GiveRoom(uint64_t piece_bytes) {
  const bool is_small = IsSmall(piece_bytes, slot_bytes_);
  uint32_t slot = open_.slot;
  if (open_.Add(piece_bytes)) {
    slot = free_.back();
    free_.pop_back();
    if (is_small) open_.slot = slot;
  }
  pieces_in_[slot] += 1;
  return slot * slot_bytes_ + (is_small ? open_.filled_bytes - piece_bytes : 0);
}

void Capture::FreeRoom(uint64_t offset) {
  const auto slot = static_cast<uint32_t>(offset / slot_bytes_);
  pieces_in_[slot] -= 1;
  if (pieces_in_[slot] > 0) return;
  if (slot == open_.slot) open_ = {slot_bytes_};
  free_.push_back(slot);
}

// One more piece is not live any more.
void Capture::Leave(const Array& array, const Piece& piece) {
  live_ -= 1;
  live_room_.Remove(PieceBytes(array, piece));
  if (array.borrowed) borrowed_live_ -= 1;
}

// Returns what `done` returns, or true when the save has ended.
bool Capture::AwaitLocked(std::unique_lock<std::mutex>& lock, FunctionRef<bool()> done,
                          int64_t timeout_ns) {
  const auto over = [&] { return ended_ || done(); };
  if (over()) return true;
  waiting_ += 1;
  bool is_over = true;
  if (timeout_ns < 0)
    changed_.wait(lock, over);
  else
    is_over = changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), over);
  waiting_ -= 1;
  return is_over;
}

// Tells those who wait that something has changed.
void Capture::Notify(std::unique_lock<std::mutex> lock) {
  const bool tell = borrows_ && borrowed_live_ == 0 && !ended_ && !std::exchange(told_, true);
  const bool wake = waiting_ > 0;
  lock.unlock();
  if (wake) changed_.notify_all();
  if (tell && on_borrowed_read_) on_borrowed_read_();
}

}  // namespace hybridopt
