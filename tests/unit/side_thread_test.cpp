#include "runtime/side_thread.h"

#include <gtest/gtest.h>

#include <thread>

namespace hybridopt {
namespace {

TEST(SideThreadTest, DoesOnePieceOfWorkAfterTheOtherOnAThreadOfItsOwn) {
  SideThread side;
  ASSERT_TRUE(side.Start("side").ok());
  std::thread::id first, second;
  const auto tell_first = [&] { first = std::this_thread::get_id(); };
  side.Begin(tell_first);
  side.Await();
  const auto tell_second = [&] { second = std::this_thread::get_id(); };
  side.Begin(tell_second);
  side.Await();
  EXPECT_EQ(first, second);
  EXPECT_NE(first, std::this_thread::get_id());
  EXPECT_NE(first, std::thread::id());
}

TEST(SideThreadTest, OneThatNeverStartedEnds) { SideThread side; }

}  // namespace
}  // namespace hybridopt
