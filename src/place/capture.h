// Capture: what a running save has still to read, and where. The save reads all arrays in the order
// of its file; a step that comes behind it must not overwrite what it has not read. So each array
// is cut into pieces, and each piece has a state:
//
//   live --Take--> reading --Finish--> read      the save reads it where it is
//     \--PutAside--> copying --Copied--> aside --Finish--> read
//
// A step puts the pieces that it will overwrite aside: each gets room in the buffer, the step
// copies the piece there before it updates it, and the save reads the copy, and frees the room. The
// buffer is cut into slots. A large piece has a slot of its own, and small ones share slots, which
// are free again when all of their pieces have been read. If too few slots are free, the step waits
// until the save has read enough.
//
//   param    | segment       | segment | segment |
//   masters  | piece | piece | piece   | piece   |
//
// A segment is what is updated together: the elements of one chunk, or on the device, and where
// there are no chunks, as many elements as a chunk has. No piece is in two segments, so that one
// update copies a whole piece. Each array of a param is cut on its own.
//
// Most of what a save reads is memory of the library. Params that are masters, or upper halves of
// masters, are memory of the caller: the save borrows this memory. The caller may write its params
// as soon as a step that was queued after the save has completed. So such a step completes only
// when all borrowed memory has been read or put aside.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <vector>

#include "base/function_ref.h"
#include "device/device.h"
#include "state/chunk_table.h"
#include "state/param_table.h"
#include "state/residence.h"
#include "state/shape.h"

namespace hybridopt {

class Capture {
 public:
  // The bytes of one slot of the buffer, at most: where chunks are small, a slot has as many as a
  // chunk has of a master.
  static constexpr uint64_t kSlotBytes = uint64_t{512} << 10;
  static uint64_t SlotBytes(const StateShape& shape) {
    return std::min(kSlotBytes, std::bit_ceil(shape.options.chunk_elements * sizeof(float)));
  }
  // The bytes that a buffer for all state has, at most, under every device fraction.
  static uint64_t BufferBytesMost(const ParamTable& table, const StateShape& shape);

  // The arguments must not change before the save has read all that is live. Only the shape must
  // outlive the capture.
  Capture(const StateShape& shape, const Residence& residence, const ChunkTable& chunks);

  // The save will read this array of a param; it is kMaster for all masters. A param without an
  // array is not saved, and nobody waits for it.
  void AddArray(uint32_t param, StateSlot slot, bool borrowed);
  // To be called after all arrays have been added. No byte of the buffer is used before.
  void UseBuffer(std::span<std::byte> buffer);
  // Called once when all that is borrowed has been read or put aside, on any thread.
  void OnBorrowedRead(std::function<void()> call) { on_borrowed_read_ = std::move(call); }
  // What is borrowed may be read when this event has been reached; NULL: at once.
  void BorrowBehind(EventHandle ready) { ready_ = ready; }
  EventHandle ready() const { return ready_; }

  // ---- for the save ----

  // Where the save finds elements [first, first + count) of an array.
  struct Source {
    uint64_t count;                 // of elements, at least 1
    std::byte* aside = nullptr;     // a copy in the array's format; NULL: where the state is
    std::byte* params = nullptr;    // the params beside it, for a format beside the param
    Format format = Format::kFp32;  // of the copy
    EventHandle behind = nullptr;   // the copy has been made when this has been reached
  };
  // May wait for a step that is copying. What is not aside stays unchanged until Finish.
  Source Take(uint32_t param, StateSlot slot, uint64_t first, uint64_t count);
  // The save has read what Take has given.
  void Finish(uint32_t param, StateSlot slot, uint64_t first, uint64_t count);
  // The save calls this when it reads no memory any more, whether it succeeded or failed.
  void End();

  // ---- for steps ----

  // Calls its argument for ranges of elements, each of which consists of whole segments.
  using Visit = FunctionRef<void(uint32_t param, uint64_t begin, uint64_t count)>;
  using Ranges = FunctionRef<void(Visit visit)>;
  enum class Arrays { kAll, kBorrowed };

  // Gives room to each piece of these elements that the save has not read, to all or none: it
  // waits while the buffer has no room for all, and while the save reads one of them. Until Copied
  // the save waits for these pieces, so the caller must not wait for the save. Returns whether
  // there is something to copy.
  bool PutAside(Ranges ranges, Arrays arrays = Arrays::kAll);
  // Calls visit(first, count, copy, params) for each part of elements [first, first + count) of an
  // array whose piece has been given room and is not copied yet: `copy` is where these elements
  // go, `params` where those of the param go, for formats beside it.
  template <typename Copy>
  void ForEachCopy(uint32_t param, StateSlot slot, uint64_t first, uint64_t count,
                   Copy&& copy) const;
  // A stream copies them, and will have done so when it reaches the event. The save waits for the
  // event itself; a later call of Copied must say when the caller may rely on the copies.
  void CopiedBehind(Ranges ranges, EventHandle event);
  // All of them have been copied.
  void Copied(Ranges ranges, Arrays arrays = Arrays::kAll);
  // The other outcome: nothing has been copied, and nothing will be overwritten.
  void Withdraw(Ranges ranges);
  // Whether the save needs nothing of these elements any more where it is.
  bool HasRead(uint32_t param, uint64_t begin, uint64_t count) const;
  // Whether the save has still to read something where it is.
  bool reads_state() const { return live_.load() > 0; }

  bool borrows() const { return borrows_; }
  // Whether the save borrows something of this param.
  bool borrows(uint32_t param) const { return arrays_[ArrayIndex(param, kMaster)].borrowed; }
  // These wait for at most timeout_ns; a negative timeout waits without limit. They return whether
  // all that the save borrows, or all that it saves, has been read or put aside.
  bool AwaitBorrowed(int64_t timeout_ns = -1);
  bool AwaitAll(int64_t timeout_ns);
  // The same: whether the buffer has room for all that the save has still to read. No step has to
  // wait for the save from then on.
  bool AwaitRoom(int64_t timeout_ns);

  // Calls visit(begin, count) for each segment of a param.
  template <typename VisitSegment>
  void ForEachSegment(uint32_t param, VisitSegment&& visit) const {
    for (uint32_t i = first_segment_[param]; i + 1 < first_segment_[param + 1]; ++i)
      visit(segments_[i].begin, segments_[i + 1].begin - segments_[i].begin);
  }

 private:
  // The arrays that a save can have: masters and two moments.
  static constexpr uint32_t kArrays = 3;
  struct Array {
    uint32_t piece_elements = 0;  // 0: the save does not read this array
    uint32_t element_bytes = 0;
    uint32_t param_bytes = 0;  // of an element of the param, if the piece has a copy of that too
    bool borrowed = false;
  };
  struct Segment {
    uint64_t begin;
    std::array<uint32_t, kArrays> first_piece;
  };
  struct Piece {
    uint32_t index;
    uint64_t begin;  // elements
    uint64_t end;
  };
  // The room that pieces take, at most.
  struct Room {
    uint64_t slot_bytes;
    uint64_t own_slots = 0;     // of large pieces
    uint64_t shared_bytes = 0;  // of small ones
    void Add(uint64_t piece_bytes);
    void Remove(uint64_t piece_bytes);
    uint64_t slots() const;
  };
  // The slot that takes small pieces.
  struct OpenSlot {
    uint64_t slot_bytes;
    uint64_t filled_bytes = slot_bytes;  // its first bytes; there is no open slot at first
    uint32_t slot = 0;
    bool Add(uint64_t piece_bytes);  // returns whether the piece needs a new slot
  };
  // What an atomic of pieces_ has: the state of a piece, and its offset in the buffer.
  enum : uint32_t { kLive = 0, kReading, kCopying, kBehind, kAside, kRead };
  static constexpr uint32_t kOffsetBits = 60;
  static uint32_t StateOf(uint64_t word) { return static_cast<uint32_t>(word >> kOffsetBits); }
  static uint64_t OffsetOf(uint64_t word) { return word & ((uint64_t{1} << kOffsetBits) - 1); }

  // An array that is not borrowed.
  static Array ArrayOf(const ParamShape& param, uint32_t slot, uint64_t slot_bytes);
  static size_t ArrayIndex(uint32_t param, uint32_t slot) { return size_t{param} * kArrays + slot; }
  const Array& ArrayAt(uint32_t param, uint32_t slot) const {
    return arrays_[ArrayIndex(param, slot)];
  }
  Piece PieceAt(uint32_t param, uint32_t slot, uint64_t element) const;
  // The bytes of the elements of a piece, behind which the params are, and all of its bytes.
  static uint64_t ParamsOffset(const Array& array, const Piece& piece);
  static uint64_t PieceBytes(const Array& array, const Piece& piece);
  std::byte* CopyAt(uint64_t word) const { return buffer_.data() + OffsetOf(word); }
  void AddSegments(uint32_t param, uint64_t begin, uint64_t end, uint64_t most);
  // These with mutex_ held.
  template <typename VisitPiece>
  void ForEachPiece(Ranges ranges, Arrays arrays, VisitPiece&& visit) const;
  void Set(const Piece& piece, uint32_t state, uint64_t offset = 0);
  uint64_t GiveRoom(uint64_t piece_bytes);
  void GoFirst(bool first, bool* is_first);
  void FreeRoom(uint64_t offset);
  void Leave(const Array& array, const Piece& piece);
  bool AwaitLocked(std::unique_lock<std::mutex>& lock, FunctionRef<bool()> done,
                   int64_t timeout_ns = -1);
  void Notify(std::unique_lock<std::mutex> lock);

  const StateShape& shape_;
  const uint64_t slot_bytes_;
  std::vector<Array> arrays_;            // kArrays per param
  std::vector<uint32_t> first_segment_;  // per param, and the end
  std::vector<Segment> segments_;        // behind those of each param one that begins at its end
  uint32_t piece_count_ = 0;
  std::vector<std::atomic<uint64_t>> pieces_;  // written with mutex_ held
  std::span<std::byte> buffer_;
  std::function<void()> on_borrowed_read_;
  EventHandle ready_ = nullptr;
  bool borrows_ = false;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<uint32_t> free_;       // slots
  std::vector<uint32_t> pieces_in_;  // how many pieces each slot has
  OpenSlot open_{slot_bytes_};
  EventHandle copied_ = nullptr;             // of what is kBehind
  std::atomic<uint64_t> live_ = 0;           // pieces that are neither read nor aside
  Room live_room_{slot_bytes_};              // what they will take
  std::atomic<uint64_t> borrowed_live_ = 0;  // those of borrowed arrays
  bool told_ = false;                        // on_borrowed_read_ has been called
  uint32_t waiting_ = 0;                     // threads
  int32_t goes_first_ = 0;                   // steps that lack only what the save is reading
  std::atomic<bool> ended_ = false;
};

template <typename Copy>
void Capture::ForEachCopy(uint32_t param, StateSlot slot, uint64_t first, uint64_t count,
                          Copy&& copy) const {
  const Array& array = ArrayAt(param, slot);
  if (array.piece_elements == 0 || !reads_state()) return;
  for (const uint64_t end = first + count; first < end;) {
    const Piece piece = PieceAt(param, slot, first);
    const uint64_t word = pieces_[piece.index].load(std::memory_order_acquire);
    const uint64_t here = std::min(piece.end, end) - first;
    if (StateOf(word) == kCopying) {
      std::byte* const into = CopyAt(word);
      const uint64_t element = first - piece.begin;
      copy(first, here, into + element * array.element_bytes,
           into + ParamsOffset(array, piece) + element * array.param_bytes);
    }
    first += here;
  }
}

}  // namespace hybridopt
