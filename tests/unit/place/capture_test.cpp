// What a save has still to read, what steps put aside of it, and who waits for whom.
#include "place/capture.h"

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../../random.h"

namespace hybridopt {
namespace {

constexpr uint64_t kPieceElements = Capture::kSlotBytes / sizeof(float);

// Params in host memory, on the host device: segments have 160,000 elements, so that a segment of
// an fp32 array has a whole piece and one that is not full.
class CaptureTest : public testing::Test {
 protected:
  static constexpr uint64_t kSegment = 160'000;

  struct Spec {
    int32_t dtype;
    uint64_t count;
  };
  explicit CaptureTest(const std::vector<Spec>& specs = {{OFFLOAD_FP32, 2 * kSegment},
                                                         {OFFLOAD_BF16, 100}},
                       StateFormats formats = {})
      : table_(OFFLOAD_ADAMW, *device_) {
    offload_group_t group{};
    group.eps = 1e-8;
    EXPECT_TRUE(table_.AddGroup(group).ok());
    for (const Spec& spec : specs) {
      ParamInput input{};
      const std::string name = "p" + std::to_string(table_.size());
      input.param.name = name.c_str();
      input.param.dtype = input.param.grad_dtype = spec.dtype;
      input.param.count = spec.count;
      input.param.data = reinterpret_cast<void*>((uint64_t{table_.size()} + 1) << 32);
      EXPECT_TRUE(table_.AddParams({&input, 1}).ok());
    }
    ShapeOptions options{};
    options.unified = true;
    options.chunk_elements = kSegment;
    options.formats = formats;
    shape_ = MakeStateShape(table_, options);
    residence_ = Residence(table_, shape_, {{0}});
    chunks_ = CutChunks(table_, shape_, residence_);
  }

  // With all arrays of both params. fp32 params are their own masters: the save borrows them.
  Capture& Begin(uint64_t slots, uint64_t spare_bytes = 0) {
    capture_ = std::make_unique<Capture>(shape_, residence_, chunks_);
    for (uint32_t id = 0; id < table_.size(); ++id)
      for (const StateSlot slot : {kMaster, kMoment0, kMoment1})
        capture_->AddArray(id, slot, slot == kMaster && table_.param(id).dtype == OFFLOAD_FP32);
    buffer_.assign(slots * Capture::kSlotBytes + spare_bytes, std::byte{0xee});
    capture_->UseBuffer(buffer_);
    return *capture_;
  }

  static auto Of(uint32_t param, uint64_t begin, uint64_t count) {
    return [=](Capture::Visit visit) { visit(param, begin, count); };
  }
  // Reads elements of all arrays of a param, as a save does.
  void Read(uint32_t param, StateSlot slot, uint64_t first, uint64_t count) {
    for (const uint64_t end = first + count; first < end;) {
      const Capture::Source source = capture_->Take(param, slot, first, end - first);
      capture_->Finish(param, slot, first, source.count);
      first += source.count;
    }
  }
  void ReadAll(uint32_t param, uint64_t first, uint64_t count) {
    for (const StateSlot slot : {kMaster, kMoment0, kMoment1}) Read(param, slot, first, count);
  }

  // The copies, each with its number of fp32 elements, lie in the buffer, and none in another.
  void ExpectApart(const std::map<std::byte*, uint64_t>& copies) {
    std::byte* free = buffer_.data();
    for (const auto& [copy, count] : copies) {
      EXPECT_LE(free, copy);
      free = copy + count * sizeof(float);
    }
    EXPECT_LE(free, buffer_.data() + buffer_.size());
  }

  // Calls something on another thread, which must not return before `until` has been called.
  template <typename Wait, typename Until>
  void ReturnsAfter(Wait&& wait, Until&& until) {
    std::atomic<bool> returned = false;
    std::thread waiter([&] {
      wait();
      returned = true;
    });
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();
    EXPECT_FALSE(returned);
    until();
    waiter.join();
  }

  const std::unique_ptr<Device> device_ = CreateHostDevice();
  ParamTable table_;
  StateShape shape_;
  Residence residence_;
  ChunkTable chunks_;
  std::vector<std::byte> buffer_;
  std::unique_ptr<Capture> capture_;
};

TEST_F(CaptureTest, WithoutABufferAStepWaitsUntilAllArraysHaveBeenRead) {
  Capture& capture = Begin(0);
  ReturnsAfter([&] { capture.PutAside(Of(0, 0, kSegment)); }, [&] { ReadAll(0, 0, kSegment); });
  EXPECT_TRUE(capture.HasRead(0, 0, kSegment));
  EXPECT_FALSE(capture.HasRead(0, kSegment, kSegment));
  ReturnsAfter([&] { EXPECT_FALSE(capture.PutAside(Of(0, kSegment, kSegment))); },
               [&] { ReadAll(0, kSegment, kSegment); });
  EXPECT_TRUE(capture.reads_state());
  ReadAll(1, 0, 100);
  EXPECT_FALSE(capture.reads_state());
}

TEST_F(CaptureTest, AParamThatIsNotSavedIsNeverWaitedFor) {
  Capture capture(shape_, residence_, chunks_);
  capture.AddArray(1, kMaster, false);
  capture.UseBuffer({});
  EXPECT_FALSE(capture.PutAside(Of(0, 0, 2 * kSegment)));
  EXPECT_TRUE(capture.HasRead(0, 0, kSegment));
  EXPECT_FALSE(capture.HasRead(1, 0, 100));
}

TEST_F(CaptureTest, WhatHasASlotIsReadWhenItHasBeenCopied) {
  Capture& capture = Begin(6);
  capture.PutAside(Of(0, kSegment, kSegment));
  std::map<std::byte*, uint64_t> copies;
  for (const StateSlot slot : {kMaster, kMoment0, kMoment1})
    capture.ForEachCopy(0, slot, kSegment + 5, kSegment - 5,
                        [&](uint64_t first, uint64_t count, std::byte* copy, std::byte*) {
                          const uint64_t element = (first - kSegment) % kPieceElements;
                          copies[copy - element * sizeof(float)] += count;
                          std::memset(copy, 7 + slot, count * sizeof(float));
                        });
  EXPECT_EQ(copies.size(), 6u);  // no room is given twice
  uint64_t copied = 0;
  for (const auto& [copy, count] : copies) copied += count;
  EXPECT_EQ(copied, 3 * (kSegment - 5));
  ExpectApart(copies);
  capture.ForEachCopy(0, kMaster, 0, kSegment,
                      [](uint64_t, uint64_t, std::byte*, std::byte*) { ADD_FAILURE(); });
  EXPECT_FALSE(capture.HasRead(0, kSegment, kSegment));
  Capture::Source source{};
  ReturnsAfter([&] { source = capture.Take(0, kMoment1, kSegment + 5, kSegment); },
               [&] { capture.Copied(Of(0, kSegment, kSegment)); });
  EXPECT_TRUE(capture.HasRead(0, kSegment, kSegment));
  EXPECT_EQ(source.count, kPieceElements - 5);
  ASSERT_NE(source.aside, nullptr);
  EXPECT_EQ(source.aside[0], std::byte{7 + kMoment1});
  EXPECT_EQ(source.aside[source.count * sizeof(float) - 1], std::byte{7 + kMoment1});
  EXPECT_EQ(source.format, Format::kFp32);
  capture.ForEachCopy(0, kMaster, kSegment, kSegment,
                      [](uint64_t, uint64_t, std::byte*, std::byte*) { ADD_FAILURE(); });
}

// A segment has 3 pieces that take a slot each, and 3 that share one.
TEST_F(CaptureTest, AllPiecesGetRoomOrNone) {
  Capture& capture = Begin(3, Capture::kSlotBytes - 1);
  ReturnsAfter([&] { capture.PutAside(Of(0, 0, kSegment)); },
               [&] { Read(0, kMaster, 0, kPieceElements); });
  capture.Copied(Of(0, 0, kSegment));
  for (const StateSlot slot : {kMaster, kMoment0}) Read(0, slot, kSegment, kSegment);
  // No slot is free until the save has read one of the large copies as a whole.
  std::atomic<bool> has_room = false;
  ReturnsAfter(
      [&] {
        capture.PutAside(Of(0, kSegment, kSegment));
        has_room = true;
      },
      [&] {
        Read(0, kMaster, kPieceElements, kSegment - kPieceElements);
        Read(0, kMoment0, 0, kPieceElements - 1);
        for (int i = 0; i < 1000; ++i) std::this_thread::yield();
        EXPECT_FALSE(has_room);
        Read(0, kMoment0, kPieceElements - 1, 1);
      });
}

TEST_F(CaptureTest, WhatIsBeingReadIsWaitedFor) {
  Capture& capture = Begin(100);
  const Capture::Source source = capture.Take(0, kMaster, 0, 2 * kSegment);
  EXPECT_EQ(source.aside, nullptr);
  EXPECT_EQ(source.count, 2 * kSegment);
  ReturnsAfter([&] { capture.PutAside(Of(0, 0, kSegment)); },
               [&] { capture.Finish(0, kMaster, 0, source.count); });
  EXPECT_EQ(capture.Take(0, kMoment0, 2 * kSegment - 1, 1).count, 1u);
}

// Else a save whose disk is fast would begin the next piece before the step can look.
TEST_F(CaptureTest, AStepThatLacksOnlyWhatIsBeingReadGoesFirst) {
  Capture& capture = Begin(100);
  const Capture::Source source = capture.Take(0, kMaster, 0, 10);
  std::atomic<bool> looked = false;
  std::thread step([&] {
    EXPECT_TRUE(capture.PutAside([&](Capture::Visit visit) {
      visit(0, 0, kSegment);
      looked = true;
    }));
  });
  while (!looked) std::this_thread::yield();  // it waits when the lock is free again
  ReturnsAfter([&] { capture.Take(1, kMaster, 0, 100); },
               [&] { capture.Finish(0, kMaster, 0, source.count); });
  step.join();
  capture.Finish(1, kMaster, 0, 100);
}

TEST_F(CaptureTest, AStepThatLacksRoomDoesNotGoFirst) {
  Capture& capture = Begin(1);
  const Capture::Source source = capture.Take(0, kMaster, 0, kSegment);
  std::atomic<bool> looked = false;
  std::thread step([&] {
    EXPECT_FALSE(capture.PutAside([&](Capture::Visit visit) {
      visit(0, 0, kSegment);
      looked = true;
    }));
  });
  while (!looked) std::this_thread::yield();
  ReadAll(1, 0, 100);  // does not wait for the step
  capture.Finish(0, kMaster, 0, source.count);
  capture.End();
  step.join();
}

// The file's block was full: a step does not wait until it has been written.
TEST_F(CaptureTest, TheRestOfAPieceIsReadFromTheCopy) {
  Capture& capture = Begin(100);
  Read(0, kMaster, 0, 10);
  capture.PutAside(Of(0, 0, kSegment));
  capture.Copied(Of(0, 0, kSegment));
  const Capture::Source source = capture.Take(0, kMaster, 10, 2 * kSegment);
  ASSERT_NE(source.aside, nullptr);
  EXPECT_EQ(source.aside, buffer_.data() + 10 * sizeof(float));
  EXPECT_EQ(source.count, kPieceElements - 10);
}

TEST_F(CaptureTest, WhatIsWithdrawnIsReadWhereItIs) {
  Capture& capture = Begin(6);
  capture.PutAside(Of(0, 0, kSegment));
  Capture::Source source{};
  ReturnsAfter([&] { source = capture.Take(0, kMaster, 0, kSegment); },
               [&] { capture.Withdraw(Of(0, 0, kSegment)); });
  EXPECT_EQ(source.aside, nullptr);
  capture.PutAside(Of(0, kSegment, kSegment));  // all slots are free again
}

TEST_F(CaptureTest, WhatIsBorrowedIsGivenBackWhenItIsReadOrCopied) {
  Capture& capture = Begin(100);
  int calls = 0;
  capture.OnBorrowedRead([&] { calls += 1; });
  EXPECT_TRUE(capture.borrows());
  EXPECT_TRUE(capture.borrows(0));
  EXPECT_FALSE(capture.borrows(1));
  ReadAll(1, 0, 100);
  Read(0, kMaster, 0, kSegment);
  EXPECT_FALSE(capture.AwaitBorrowed(0));
  capture.PutAside(Of(0, kSegment, kSegment), Capture::Arrays::kBorrowed);
  EXPECT_FALSE(capture.AwaitBorrowed(0));
  EXPECT_EQ(calls, 0);
  capture.Copied(Of(0, kSegment, kSegment), Capture::Arrays::kBorrowed);
  EXPECT_TRUE(capture.AwaitBorrowed(0));
  EXPECT_EQ(calls, 1);
  EXPECT_FALSE(capture.AwaitAll(1000));  // the moments
  Read(0, kMaster, kSegment, kSegment);
  EXPECT_EQ(calls, 1);
}

TEST_F(CaptureTest, NothingIsBorrowedUnlessSaid) {
  Capture capture(shape_, residence_, chunks_);
  capture.AddArray(0, kMaster, false);
  capture.UseBuffer({});
  EXPECT_FALSE(capture.borrows());
  EXPECT_TRUE(capture.AwaitBorrowed());
  EXPECT_FALSE(capture.AwaitAll(0));
}

// A save that fails reads nothing any more either.
TEST_F(CaptureTest, EveryoneIsLetGoAtTheEnd) {
  Capture& capture = Begin(1);
  std::thread waiter([&] {
    capture.AwaitBorrowed();
    capture.PutAside(Of(0, 0, kSegment));
    capture.Copied(Of(0, 0, kSegment));
  });
  capture.End();
  waiter.join();
  EXPECT_TRUE(capture.AwaitAll(-1));
  EXPECT_FALSE(capture.reads_state());
}

// A buffer that has the bytes of the plan has room for all state.
TEST_F(CaptureTest, ThePlanHasRoomForAll) {
  Capture& capture = Begin(Capture::BufferBytesMost(table_, shape_) / Capture::kSlotBytes);
  capture.PutAside([&](Capture::Visit visit) {
    visit(0, 0, 2 * kSegment);
    visit(1, 0, 100);
  });
  capture.Copied([&](Capture::Visit visit) {
    visit(0, 0, 2 * kSegment);
    visit(1, 0, 100);
  });
  EXPECT_FALSE(capture.reads_state());
}

// 3 arrays of 128 elements each: 1.5 KiB a param.
class CaptureOfSmallParams : public CaptureTest {
 protected:
  static constexpr uint32_t kParams = 1000;
  static constexpr uint64_t kElements = 128;
  static constexpr uint32_t kInSlot =
      Capture::kSlotBytes / (3 * kElements * sizeof(float));  // params
  CaptureOfSmallParams() : CaptureTest(std::vector<Spec>(kParams, Spec{OFFLOAD_BF16, kElements})) {}

  static auto Of(uint32_t first, uint32_t count) {
    return [=](Capture::Visit visit) {
      for (uint32_t id = first; id < first + count; ++id) visit(id, 0, kElements);
    };
  }
};

TEST_F(CaptureOfSmallParams, TheyShareSlots) {
  constexpr uint64_t kStateBytes = kParams * 3 * kElements * sizeof(float);
  Capture& capture = Begin(kStateBytes / Capture::kSlotBytes + 2);
  ASSERT_TRUE(capture.PutAside(Of(0, kParams)));
  std::map<std::byte*, uint64_t> copies;
  for (uint32_t id = 0; id < kParams; ++id)
    for (const StateSlot slot : {kMaster, kMoment0, kMoment1})
      capture.ForEachCopy(
          id, slot, 0, kElements,
          [&](uint64_t, uint64_t count, std::byte* copy, std::byte*) { copies[copy] += count; });
  EXPECT_EQ(copies.size(), 3 * kParams);
  ExpectApart(copies);
  capture.Copied(Of(0, kParams));
  EXPECT_FALSE(capture.reads_state());
}

TEST_F(CaptureOfSmallParams, ASlotIsFreeAgainWhenAllOfThemHaveBeenRead) {
  Capture& capture = Begin(1);
  capture.PutAside(Of(0, kInSlot));
  capture.Copied(Of(0, kInSlot));
  std::atomic<bool> has_room = false;
  ReturnsAfter(
      [&] {
        capture.PutAside(Of(kInSlot, kInSlot));
        has_room = true;
      },
      [&] {
        for (uint32_t id = kInSlot - 1; id > 0; --id) ReadAll(id, 0, kElements);
        Read(0, kMaster, 0, kElements);
        Read(0, kMoment0, 0, kElements);
        for (int i = 0; i < 1000; ++i) std::this_thread::yield();
        EXPECT_FALSE(has_room);
        Read(0, kMoment1, 0, kElements);
      });
}

// Twice their bytes, beside a slot for each array that the end of a chunk may cut.
TEST_F(CaptureOfSmallParams, TheBufferIsBoundedByTheBytesOfTheState) {
  constexpr uint64_t kStateBytes = kParams * 3 * kElements * sizeof(float);
  const uint64_t cuts = 3 * (ChunksMost(shape_) + 1);
  EXPECT_LE(Capture::BufferBytesMost(table_, shape_),
            2 * kStateBytes + (cuts + 1) * Capture::kSlotBytes);
}

// Each order of reading leaves as much room as AwaitRoom has said.
TEST_F(CaptureOfSmallParams, WithRoomForAllNobodyWaits) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Random random(seed);
    constexpr uint64_t kStateBytes = kParams * 3 * kElements * sizeof(float);
    Capture& capture = Begin(2 * kStateBytes / Capture::kSlotBytes + 1);
    ASSERT_TRUE(capture.AwaitRoom(0));
    for (uint32_t id = 0, count = 0; id < kParams; id += count) {
      count = 1 + static_cast<uint32_t>(random.Below(std::min(100u, kParams - id)));
      capture.PutAside(Of(id, count));
      capture.Copied(Of(id, count));
      if (random.OneIn(2)) ReadAll(id + static_cast<uint32_t>(random.Below(count)), 0, kElements);
    }
    EXPECT_FALSE(capture.reads_state());
  }
}

// Arrays of every width, and masters beside their params: a save reads them while steps overwrite
// them, with buffers of all sizes.
class CaptureRace : public CaptureTest {
 protected:
  CaptureRace()
      : CaptureTest({{OFFLOAD_BF16, 3 * kSegment + 17}, {OFFLOAD_FP32, 560'000}, {OFFLOAD_BF16, 9}},
                    {Format::kSplit24, Format::kBf16, Format::kBf16}) {}

  static constexpr uint32_t kParams = 3;
  const FormatRow& RowAt(uint32_t id, StateSlot slot) const {
    const ParamShape& shaped = shape_.params[id];
    return RowOf(shaped.format[slot == kMaster ? shaped.master_slot() : slot]);
  }
  // The arrays as they were when the save began, and their params.
  void Fill(Random& random) {
    for (uint32_t id = 0; id < kParams; ++id)
      for (const StateSlot slot : {kMaster, kMoment0, kMoment1}) {
        std::vector<std::byte>& array = state_[{id, slot}];
        array.resize(RowAt(id, slot).Bytes(table_.param(id).count));
        for (std::byte& byte : array) byte = std::byte(random.Below(256));
        params_[id].resize(table_.param(id).count * sizeof(uint16_t));
        for (std::byte& byte : params_[id]) byte = std::byte(random.Below(256));
      }
  }
  void Overwrite(uint32_t id, uint64_t begin, uint64_t count) {
    const auto ranges = Of(id, begin, count);
    capture_->PutAside(ranges);
    for (const StateSlot slot : {kMaster, kMoment0, kMoment1}) {
      std::vector<std::byte>& array = state_[{id, slot}];
      const FormatRow& row = RowAt(id, slot);
      capture_->ForEachCopy(
          id, slot, begin, count,
          [&](uint64_t first, uint64_t here, std::byte* copy, std::byte* params_copy) {
            std::memcpy(copy, array.data() + row.Bytes(first), row.Bytes(here));
            if (row.beside_param)
              std::memcpy(params_copy, params_[id].data() + 2 * first, 2 * here);
          });
      std::memset(array.data() + row.Bytes(begin), 0xff, row.Bytes(count));
    }
    std::memset(params_[id].data() + 2 * begin, 0xff, 2 * count);
    capture_->Copied(ranges);
  }
  // Returns whether all is as it was at the begin.
  bool Save(Random& random,
            const std::map<std::pair<uint32_t, StateSlot>, std::vector<std::byte>>& state,
            const std::map<uint32_t, std::vector<std::byte>>& params) {
    for (uint32_t id = 0; id < kParams; ++id)
      for (const StateSlot slot : {kMaster, kMoment0, kMoment1})
        for (uint64_t first = 0; first < table_.param(id).count;) {
          const FormatRow& row = RowAt(id, slot);
          const uint64_t left = table_.param(id).count - first;
          const Capture::Source source =
              capture_->Take(id, slot, first, std::min<uint64_t>(left, 1 + random.Below(320'000)));
          if (source.aside != nullptr && source.format != row.format) return false;
          const std::byte* const found =
              source.aside != nullptr ? source.aside : state_[{id, slot}].data() + row.Bytes(first);
          const std::byte* const beside =
              source.aside != nullptr ? source.params : params_[id].data() + 2 * first;
          const bool same =
              std::memcmp(found, state.at({id, slot}).data() + row.Bytes(first),
                          row.Bytes(source.count)) == 0 &&
              (!row.beside_param ||
               std::memcmp(beside, params.at(id).data() + 2 * first, 2 * source.count) == 0);
          if (!same) return false;
          capture_->Finish(id, slot, first, source.count);
          first += source.count;
        }
    return true;
  }

  std::map<std::pair<uint32_t, StateSlot>, std::vector<std::byte>> state_;
  std::map<uint32_t, std::vector<std::byte>> params_;
};

TEST_F(CaptureRace, ASaveReadsWhatWasThereWhenItBegan) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    Fill(random);
    const auto state = state_;
    const auto params = params_;
    Begin(random.Below(30), random.Below(Capture::kSlotBytes));
    bool same = false;
    std::thread saver([&] {
      Random own(seed + 1);
      same = Save(own, state, params);
      capture_->End();
    });
    for (int step = 0; step < 2; ++step)
      for (uint32_t id = 0; id < kParams; ++id)
        for (uint64_t begin = 0, count = table_.param(id).count; begin < count; begin += kSegment)
          Overwrite(id, begin, std::min(kSegment, count - begin));
    saver.join();
    ASSERT_TRUE(same) << "seed " << seed;
  }
}

}  // namespace
}  // namespace hybridopt
