// Handles are numbers, not pointers: a wrong handle is never dereferenced.
#include "optimizer/handle_table.h"

#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace hybridopt {
namespace {

struct Object {
  int value;
};
using Contexts = HandleTable<Object, HandleKind::kContext>;
using Optimizers = HandleTable<Object, HandleKind::kOptimizer>;

Status Destroy(Contexts& table, const void* handle) {
  return table.Destroy(
      handle, "context", [](const Object&) { return Status(); }, [](Object&) { return Status(); });
}

std::string RefusalOf(Contexts& table, const void* handle) {
  Result<Contexts::Use> found = table.Find(handle, "context");
  EXPECT_FALSE(found.ok());
  EXPECT_EQ(found.status().code(), OFFLOAD_INVALID_ARGUMENT);
  return found.status().message();
}

TEST(HandleTable, FindsWhatWasInserted) {
  Contexts table(nullptr);
  void* one = table.Insert(std::make_shared<Object>(Object{1})).value();
  void* two = table.Insert(std::make_shared<Object>(Object{2})).value();
  EXPECT_NE(one, two);
  EXPECT_EQ(table.Find(one, "context").value()->value, 1);
  EXPECT_EQ(table.Find(two, "context").value()->value, 2);
}

TEST(HandleTable, RefusesADestroyedHandleEvenWhenItsSlotIsUsedAgain) {
  Contexts table(nullptr);
  std::set<void*> dead;
  for (int round = 0; round < 1000; ++round) {
    void* handle = table.Insert(std::make_shared<Object>(Object{round})).value();
    EXPECT_EQ(dead.count(handle), 0u) << "a handle came back";
    EXPECT_TRUE(Destroy(table, handle).ok());
    dead.insert(handle);
  }
  void* alive = table.Insert(std::make_shared<Object>(Object{-1})).value();
  for (void* handle : dead) {
    EXPECT_NE(RefusalOf(table, handle).find("has been destroyed"), std::string::npos);
    EXPECT_FALSE(Destroy(table, handle).ok());
  }
  EXPECT_EQ(table.Find(alive, "context").value()->value, -1);
}

TEST(HandleTable, GivesNoHandleTwiceWhenTheGenerationsOfASlotAreUsedUp) {
  HandleTable<Object, HandleKind::kContext, 5> table(nullptr);
  const auto destroy = [&](void* handle) {
    return table.Destroy(
        handle, "context", [](const Object&) { return Status(); },
        [](Object&) { return Status(); });
  };
  std::set<void*> given;
  for (int round = 0; round < 100; ++round) {
    void* const handle = table.Insert(std::make_shared<Object>(Object{round})).value();
    EXPECT_TRUE(given.insert(handle).second) << "a handle came back in round " << round;
    EXPECT_LE(reinterpret_cast<uint64_t>(handle) >> 24 & 0xffffff, 5u) << "its generation";
    for (void* other : given) {
      EXPECT_EQ(table.Find(other, "context").ok(), other == handle);
    }
    EXPECT_TRUE(destroy(handle).ok());
  }
}

TEST(HandleTable, RefusesToMakeAHandleWhereNoneIsLeft) {
  HandleTable<Object, HandleKind::kContext, 1, 2> table(nullptr);
  void* const one = table.Insert(std::make_shared<Object>()).value();
  void* const two = table.Insert(std::make_shared<Object>()).value();
  EXPECT_TRUE(table
                  .Destroy(
                      one, "context", [](const Object&) { return Status(); },
                      [](Object&) { return Status(); })
                  .ok());
  const Result<void*> third = table.Insert(std::make_shared<Object>());
  ASSERT_FALSE(third.ok());
  EXPECT_EQ(third.status().code(), OFFLOAD_INVALID_STATE);
  EXPECT_EQ(
      third.status().message(),
      "all 2 handles of this kind are in use or used up; destroy some, or start a new process");
  EXPECT_TRUE(table.Find(two, "context").ok());
}

TEST(HandleTable, TheChildOfManyForksMakesNoHandleThatAnAncestorMayHaveMade) {
  Contexts first(nullptr, 0), last(nullptr, 255), beyond(nullptr, 256);
  void* const inherited = first.Insert(std::make_shared<Object>()).value();
  EXPECT_TRUE(last.Insert(std::make_shared<Object>()).ok());
  const Result<void*> refused = beyond.Insert(std::make_shared<Object>());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), OFFLOAD_INVALID_STATE);
  EXPECT_EQ(refused.status().message(),
            "this process is the child of 256 forks in a row, at most 255 can be told apart; start "
            "a new program (exec)");
  EXPECT_EQ(beyond.Find(inherited, "context").status().code(), OFFLOAD_INVALID_STATE);
}

TEST(HandleTable, KeepsAnObjectThatCannotBeClosed) {
  Contexts table(nullptr);
  const auto object = std::make_shared<Object>(Object{1});
  void* const handle = table.Insert(object).value();
  const Status destroyed = table.Destroy(
      handle, "context", [](const Object&) { return Status(); },
      [](Object&) { return Status::Error(OFFLOAD_COMM_FAILED, "a thread is in it"); });
  EXPECT_EQ(destroyed.message(), "a thread is in it");
  EXPECT_FALSE(table.Find(handle, "context").ok());
  EXPECT_EQ(object.use_count(), 2);
}

TEST(HandleTable, TellsKindsApart) {
  Contexts contexts(nullptr);
  Optimizers optimizers(nullptr);
  ASSERT_TRUE(contexts.Insert(std::make_shared<Object>()).ok());
  void* optimizer = optimizers.Insert(std::make_shared<Object>()).value();
  EXPECT_NE(RefusalOf(contexts, optimizer).find("not a handle of that kind"), std::string::npos);
  EXPECT_NE(RefusalOf(contexts, nullptr).find("context is NULL"), std::string::npos);
  EXPECT_NE(RefusalOf(contexts, &contexts).find("not a handle of that kind"), std::string::npos);
}

TEST(HandleTable, ObjectsMayRefuseToGo) {
  Contexts table(nullptr);
  void* handle = table.Insert(std::make_shared<Object>(Object{5})).value();
  const auto busy = [](const Object& object) {
    return Status::Error(OFFLOAD_INVALID_STATE, "%d reasons", object.value);
  };
  const Status refused = table.Destroy(handle, "context", busy, [](Object&) {
    ADD_FAILURE();
    return Status();
  });
  EXPECT_EQ(refused.message(), "5 reasons");
  EXPECT_EQ(table.Find(handle, "context").value()->value, 5);
}

// `close` tells the calls that use the object, and it is gone when Destroy has returned.
TEST(HandleTable, DestroyWaitsForTheCallsThatUseTheObject) {
  Contexts table(nullptr);
  auto object = std::make_shared<Object>();
  const std::weak_ptr<Object> watch = object;
  void* handle = table.Insert(std::move(object)).value();
  std::atomic<bool> using_it = false, closed = false, left = false;
  std::thread user([&] {
    const Result<Contexts::Use> use = table.Find(handle, "context");
    using_it = true;
    while (!closed) std::this_thread::yield();
    for (int i = 0; i < 100; ++i) std::this_thread::yield();
    EXPECT_FALSE(watch.expired());
    EXPECT_FALSE(table.Find(handle, "context").ok()) << "refused as soon as destroy has begun";
    left = true;
  });
  while (!using_it) std::this_thread::yield();
  const Status destroyed = table.Destroy(
      handle, "context", [](const Object&) { return Status(); },
      [&](Object&) {
        closed = true;
        return Status();
      });
  EXPECT_TRUE(destroyed.ok());
  EXPECT_TRUE(left);
  EXPECT_TRUE(watch.expired());
  user.join();
}

TEST(HandleTable, ServesManyThreads) {
  Contexts table(nullptr);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread)
    threads.emplace_back([&, thread] {
      for (int round = 0; round < 500; ++round) {
        void* handle = table.Insert(std::make_shared<Object>(Object{thread})).value();
        EXPECT_EQ(table.Find(handle, "context").value()->value, thread);
        EXPECT_TRUE(Destroy(table, handle).ok());
        EXPECT_FALSE(table.Find(handle, "context").ok());
      }
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace hybridopt
