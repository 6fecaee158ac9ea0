// How far a save has read, and waits for it.
#include "state/capture.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace hybridopt {
namespace {

// Two params and one that is not saved; the last arrays of the others begin at 1000 and 3000, and
// have elements of 4 and 2 bytes.
class CaptureTest : public testing::Test {
 protected:
  CaptureTest() {
    capture_.SetLastArray(0, 1000, 4);
    capture_.SetLastArray(2, 3000, 2);
  }

  // Makes a call on another thread. The call must not return before the position is reached, and
  // must return then.
  template <typename Wait>
  void ReturnsAt(uint64_t position, Wait&& wait) {
    std::atomic<bool> returned = false;
    std::thread waiter([&] {
      wait();
      returned = true;
    });
    for (int i = 0; i < 100; ++i) std::this_thread::yield();
    capture_.Advance(position - 1);
    for (int i = 0; i < 100; ++i) std::this_thread::yield();
    EXPECT_FALSE(returned) << "before " << position;
    capture_.Advance(position);
    waiter.join();
  }

  Capture capture_{3};
};

TEST_F(CaptureTest, AParamIsReadWhenItsLastArrayIs) {
  ReturnsAt(1400, [this] { capture_.Await(0, 100); });
  ReturnsAt(1404, [this] { capture_.Await(0, 101); });
  ReturnsAt(3002, [this] { capture_.Await(2, 1); });
  capture_.Await(2, 1);
  capture_.Await(0, 500);
}

TEST_F(CaptureTest, AParamThatIsNotSavedIsNeverWaitedFor) { capture_.Await(1, 1'000'000); }

TEST_F(CaptureTest, AllIsReadAtTheEndAlone) {
  capture_.Advance(UINT64_MAX - 1);
  EXPECT_FALSE(capture_.AwaitAll(0));
  EXPECT_FALSE(capture_.AwaitAll(1000));
  std::thread end([this] { capture_.End(); });
  EXPECT_TRUE(capture_.AwaitAll(-1));
  end.join();
  EXPECT_TRUE(capture_.AwaitAll(0));
  capture_.Await(2, UINT64_MAX / 4);
}

TEST_F(CaptureTest, NothingIsBorrowedUnlessSaid) {
  EXPECT_FALSE(capture_.borrows());
  EXPECT_TRUE(capture_.has_read_borrowed());
  capture_.AwaitBorrowed();
}

TEST_F(CaptureTest, WhatIsBorrowedIsGivenBackWhenItHasBeenRead) {
  capture_.SetBorrowedEnd(2000);
  EXPECT_TRUE(capture_.borrows());
  EXPECT_FALSE(capture_.has_read_borrowed());
  ReturnsAt(2000, [this] { capture_.AwaitBorrowed(); });
  EXPECT_TRUE(capture_.has_read_borrowed());
}

// A save that has failed reads nothing any more.
TEST_F(CaptureTest, EveryoneIsLetGoAtTheEnd) {
  capture_.SetBorrowedEnd(2000);
  std::thread waiter([this] {
    capture_.AwaitBorrowed();
    capture_.Await(2, 7);
  });
  capture_.End();
  waiter.join();
  EXPECT_TRUE(capture_.has_read_borrowed());
}

// The waiter may miss the notification, but never the position.
TEST_F(CaptureTest, NoPositionIsMissed) {
  constexpr uint64_t kPositions = 20'000;
  std::atomic<uint64_t> asked = 0;
  std::thread reader([&] {
    for (uint64_t position = 1; position <= kPositions; ++position) {
      while (asked.load() < position) std::this_thread::yield();
      capture_.Advance(1000 + 4 * position);
    }
  });
  for (uint64_t position = 1; position <= kPositions; ++position) {
    asked = position;
    capture_.Await(0, position);
  }
  reader.join();
}

}  // namespace
}  // namespace hybridopt
