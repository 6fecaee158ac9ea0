#include "step/executors/chunk_queue.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

namespace hybridopt {
namespace {

// Some events, whose content is not used.
EventHandle Event(size_t number) {
  static char events[3];
  return reinterpret_cast<EventHandle>(events + number);
}

TEST(ChunkQueueTest, ChunksAreTakenInOrderAndCountedWithoutGaps) {
  ChunkQueue queue;
  queue.UseChunks(4);
  queue.Reset();
  EXPECT_EQ(queue.Take(Executor::kStreamed), 0u);
  EXPECT_EQ(queue.Take(Executor::kCpu), 1u);
  EXPECT_EQ(queue.Take(Executor::kCpu), 2u);
  EXPECT_EQ(queue.Finish(1), 0u);
  EXPECT_EQ(queue.Finish(2), 0u);
  EXPECT_EQ(queue.Issue(1, Event(1)), 0u);
  EXPECT_EQ(queue.finished(), 0u);
  EXPECT_EQ(queue.Finish(0), 3u);
  EXPECT_EQ(queue.finished(), 3u);
  EXPECT_EQ(queue.Issue(0, Event(0)), 2u);
  EXPECT_EQ(queue.Issue(2, Event(2)), 3u);
  EXPECT_EQ(queue.WrittenUpTo(0), (PerExecutor<EventHandle>{nullptr, nullptr}));
  EXPECT_EQ(queue.WrittenUpTo(1), (PerExecutor<EventHandle>{nullptr, Event(0)}));
  EXPECT_EQ(queue.WrittenUpTo(2), (PerExecutor<EventHandle>{Event(1), Event(0)}));
  EXPECT_EQ(queue.WrittenUpTo(4), (PerExecutor<EventHandle>{Event(2), Event(0)}));
  EXPECT_EQ(queue.Take(Executor::kCpu), 3u);
  EXPECT_EQ(queue.Take(Executor::kCpu), std::nullopt);
  queue.Finish(3);
  EXPECT_EQ(queue.finished(), 4u);
}

// No executor can take chunks that were updated early until they are given back.
TEST(ChunkQueueTest, ChunksAreTakenByTheirNumberAndGivenBack) {
  ChunkQueue queue;
  queue.UseChunks(5);
  queue.Reset();
  for (uint32_t chunk : {1u, 3u}) queue.TakeThis(chunk, Executor::kEarly);
  queue.Prefer(2, Executor::kCpu);
  EXPECT_EQ(queue.Take(Executor::kCpu), 0u);
  EXPECT_EQ(queue.Take(Executor::kStreamed), 4u);
  EXPECT_EQ(queue.Take(Executor::kCpu), 2u);
  EXPECT_EQ(queue.Take(Executor::kCpu), std::nullopt);
  EXPECT_EQ(queue.TakenBy(3), Executor::kEarly);
  queue.GiveBack(3);
  EXPECT_EQ(queue.Take(Executor::kCpu), 3u);
  EXPECT_EQ(queue.TakenBy(3), Executor::kCpu);
  for (uint32_t chunk : {0u, 1u, 2u})
    queue.Issue(chunk, Event(static_cast<size_t>(queue.TakenBy(chunk))));
  EXPECT_EQ(queue.WrittenUpTo(2), (PerExecutor<EventHandle>{Event(0), nullptr, Event(2)}));
  EXPECT_EQ(queue.WrittenUpTo(5), (PerExecutor<EventHandle>{Event(0), nullptr, Event(2)}));
}

TEST(ChunkQueueTest, AnExecutorTakesItsOwnChunksBeforeThoseOfTheOther) {
  ChunkQueue queue;
  queue.UseChunks(6);
  queue.Reset();
  for (uint32_t chunk : {1u, 2u, 5u}) queue.Prefer(chunk, Executor::kCpu);
  for (uint32_t chunk : {0u, 3u}) queue.Prefer(chunk, Executor::kStreamed);
  EXPECT_EQ(queue.Take(Executor::kCpu), 1u);
  EXPECT_EQ(queue.Take(Executor::kStreamed), 0u);
  EXPECT_EQ(queue.Finish(0), 1u);
  EXPECT_EQ(queue.Take(Executor::kCpu), 2u);
  EXPECT_EQ(queue.Finish(2), 1u);
  EXPECT_EQ(queue.Take(Executor::kCpu), 4u);  // of both
  EXPECT_EQ(queue.Take(Executor::kStreamed), 3u);
  EXPECT_EQ(queue.Take(Executor::kStreamed), 5u);  // has none of its own any more
  EXPECT_EQ(queue.Take(Executor::kCpu), std::nullopt);
  EXPECT_EQ(queue.Finish(1), 3u);
  queue.Reset();  // forgets preferences
  EXPECT_EQ(queue.Take(Executor::kCpu), 0u);
}

// An executor's event covers everything that it issued before, in any order of the chunks.
TEST(ChunkQueueTest, AStreamWaitsForWhatWasIssuedLast) {
  ChunkQueue queue;
  queue.UseChunks(3);
  queue.Reset();
  queue.Prefer(0, Executor::kStreamed);
  EXPECT_EQ(queue.Take(Executor::kCpu), 1u);
  EXPECT_EQ(queue.Take(Executor::kCpu), 2u);
  EXPECT_EQ(queue.Take(Executor::kCpu), 0u);
  EXPECT_EQ(queue.Issue(1, Event(1)), 0u);
  EXPECT_EQ(queue.Issue(2, Event(2)), 0u);
  EXPECT_EQ(queue.Issue(0, Event(0)), 3u);
  for (uint64_t count : {1, 2, 3})
    EXPECT_EQ(queue.WrittenUpTo(count), (PerExecutor<EventHandle>{Event(0), nullptr}));
  queue.Reset();
  EXPECT_EQ(queue.WrittenUpTo(3), (PerExecutor<EventHandle>{nullptr, nullptr}));
}

TEST(ChunkQueueTest, AStoppedQueueGivesNothingUntilTheNextStep) {
  ChunkQueue queue;
  queue.UseChunks(2);
  queue.Reset();
  EXPECT_EQ(queue.Take(Executor::kCpu), 0u);
  queue.Stop();
  EXPECT_EQ(queue.Take(Executor::kCpu), std::nullopt);
  queue.Finish(0);
  EXPECT_EQ(queue.finished(), 1u);
  queue.Reset();
  EXPECT_EQ(queue.finished(), 0u);
  EXPECT_EQ(queue.Take(Executor::kCpu), 0u);
}

TEST(ChunkQueueTest, TwoThreadsTakeEachChunkOnce) {
  constexpr uint32_t kChunks = 10'000;
  ChunkQueue queue;
  queue.UseChunks(kChunks);
  queue.Reset();
  std::vector<std::atomic<int>> taken(kChunks);
  const auto work = [&] {
    while (const std::optional<uint32_t> chunk = queue.Take(Executor::kCpu)) {
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
