#include "step/executors/chunk_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace hybridopt {
namespace {

// Some events; nobody looks into them.
EventHandle Event(size_t number) {
  static char events[3];
  return reinterpret_cast<EventHandle>(events + number);
}

TEST(ChunkQueueTest, ChunksAreTakenInOrderAndCountedWithoutGaps) {
  ChunkQueue queue;
  queue.UseChunks(4);
  queue.Reset();
  for (uint32_t chunk = 0; chunk < 3; ++chunk) EXPECT_EQ(queue.Take(), chunk);
  EXPECT_EQ(queue.Finish(1), 0u);
  EXPECT_EQ(queue.Finish(2), 0u);
  EXPECT_EQ(queue.Issue(1, Executor::kCpu, Event(1)), 0u);
  EXPECT_EQ(queue.finished(), 0u);
  EXPECT_EQ(queue.Finish(0), 3u);
  EXPECT_EQ(queue.finished(), 3u);
  EXPECT_EQ(queue.Issue(0, Executor::kStreamed, Event(0)), 2u);
  EXPECT_EQ(queue.Issue(2, Executor::kCpu, Event(2)), 3u);
  EXPECT_EQ(queue.Written(0), (PerExecutor<EventHandle>{nullptr, nullptr}));
  EXPECT_EQ(queue.Written(1), (PerExecutor<EventHandle>{nullptr, Event(0)}));
  EXPECT_EQ(queue.Written(2), (PerExecutor<EventHandle>{Event(1), Event(0)}));
  EXPECT_EQ(queue.Written(4), (PerExecutor<EventHandle>{Event(2), Event(0)}));
  EXPECT_EQ(queue.Take(), 3u);
  EXPECT_EQ(queue.Take(), std::nullopt);
  queue.Finish(3);
  EXPECT_EQ(queue.finished(), 4u);
}

TEST(ChunkQueueTest, AStoppedQueueGivesNothingUntilTheNextStep) {
  ChunkQueue queue;
  queue.UseChunks(2);
  queue.Reset();
  EXPECT_EQ(queue.Take(), 0u);
  queue.Stop();
  EXPECT_EQ(queue.Take(), std::nullopt);
  queue.Finish(0);
  EXPECT_EQ(queue.finished(), 1u);
  queue.Reset();
  EXPECT_EQ(queue.finished(), 0u);
  EXPECT_EQ(queue.Take(), 0u);
}

TEST(ChunkQueueTest, TwoThreadsTakeEachChunkOnce) {
  constexpr uint32_t kChunks = 10'000;
  ChunkQueue queue;
  queue.UseChunks(kChunks);
  queue.Reset();
  std::vector<std::atomic<int>> taken(kChunks);
  const auto work = [&] {
    while (const std::optional<uint32_t> chunk = queue.Take()) {
      taken[*chunk] += 1;
      queue.Finish(*chunk);
    }
  };
  std::thread other(work);
  work();
  other.join();
  for (const std::atomic<int>& times : taken) ASSERT_EQ(times, 1);
  EXPECT_EQ(queue.finished(), kChunks);
}

}  // namespace
}  // namespace hybridopt
