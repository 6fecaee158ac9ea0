#include "runtime/side_thread.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <thread>
#include <utility>

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

TEST(SideThreadTest, AForkedChildLeavesItAlone) {
  std::optional<SideThread> side(std::in_place);
  ASSERT_TRUE(side->Start("side").ok());
  const pid_t child = fork();
  if (child == 0) {
    side.reset();  // joining a thread that does not exist here would hang
    _exit(0);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace hybridopt
