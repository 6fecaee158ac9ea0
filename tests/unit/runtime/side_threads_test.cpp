#include "runtime/side_threads.h"

#include <gtest/gtest.h>

#include <array>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace hybridopt {
namespace {

class Call final : public SideThreads::Work {
 public:
  explicit Call(std::function<void()> body = [] {}) : body_(std::move(body)) {}
  std::thread::id thread() const { return thread_; }

 private:
  void Do() override {
    thread_ = std::this_thread::get_id();
    body_();
  }

  const std::function<void()> body_;
  std::thread::id thread_;  // the one that has done it
};

TEST(SideThreadsTest, WorkIsDoneWhileItsOwnerGoesOn) {
  SideThreads side;
  ASSERT_TRUE(side.AddOwner().ok());
  for (int i = 0; i < 100; ++i) {
    std::mutex mutex;
    std::condition_variable changed;
    bool owner_went_on = false;
    Call call([&] {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return owner_went_on; });
    });
    side.Begin(call);
    {
      std::lock_guard lock(mutex);
      owner_went_on = true;
    }
    changed.notify_all();
    side.Await(call);
    EXPECT_NE(call.thread(), std::thread::id());
    EXPECT_NE(call.thread(), std::this_thread::get_id());
  }
}

TEST(SideThreadsTest, WorkThatFindsNoIdleThreadIsDoneByTheThreadThatAwaitsIt) {
  SideThreads side;
  ASSERT_TRUE(side.AddOwner().ok());
  std::mutex mutex;
  std::condition_variable changed;
  bool may_end = false;
  Call first([&] {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return may_end; });
  });
  Call second;
  side.Begin(first);
  side.Begin(second);
  side.Await(second);
  EXPECT_EQ(second.thread(), std::this_thread::get_id());
  {
    std::lock_guard lock(mutex);
    may_end = true;
  }
  changed.notify_all();
  side.Await(first);
  EXPECT_NE(first.thread(), std::this_thread::get_id());
  side.Begin(second);  // the thread is idle again
  side.Await(second);
  EXPECT_EQ(second.thread(), first.thread());
}

// All of them at once: each waits until all have begun.
TEST(SideThreadsTest, EveryOwnerHasAThreadUpToTheMost) {
  SideThreads side;
  for (uint32_t owners = 1; owners <= SideThreads::kMost + 3; ++owners) {
    ASSERT_TRUE(side.AddOwner().ok());
    EXPECT_EQ(side.threads(), std::min(owners, SideThreads::kMost));
  }
  std::mutex mutex;
  std::condition_variable changed;
  uint32_t begun = 0;
  const auto meet = [&] {
    std::unique_lock lock(mutex);
    begun += 1;
    changed.notify_all();
    changed.wait(lock, [&] { return begun == SideThreads::kMost; });
  };
  std::array<Call, SideThreads::kMost> calls{Call(meet), Call(meet), Call(meet), Call(meet),
                                             Call(meet), Call(meet), Call(meet), Call(meet)};
  for (Call& call : calls) side.Begin(call);
  for (Call& call : calls) side.Await(call);
  EXPECT_EQ(begun, SideThreads::kMost);
}

TEST(SideThreadsTest, OwnersThatComeAndGoShareAThread) {
  SideThreads side;
  for (int i = 0; i < 5; ++i) {
    ASSERT_TRUE(side.AddOwner().ok());
    side.RemoveOwner();
  }
  EXPECT_EQ(side.threads(), 1u);
}

TEST(SideThreadsTest, WithoutOwnersThereIsNoThread) {
  const SideThreads side;
  EXPECT_EQ(side.threads(), 0u);
}

}  // namespace
}  // namespace hybridopt
