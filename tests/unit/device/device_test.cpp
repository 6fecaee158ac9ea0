// The device port: what the host device refuses, and that the simulated device keeps the promises
// of a real one: order inside a stream, none between streams, failures that come late and stay.
#include "device/device.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "../../malloc_hooks.h"
#include "../../random.h"
#include "device_calls.h"
#include "kernels/kernels.h"

namespace {

std::atomic<uint64_t> malloc_calls{0};

}  // namespace

bool malloc_hooks::Fails() { return false; }
void malloc_hooks::Allocated(void*) { malloc_calls.fetch_add(1, std::memory_order_relaxed); }
void malloc_hooks::Freeing(void*) {}

namespace hybridopt {
namespace {

std::unique_ptr<Device> MakeSim(uint64_t memory_bytes = 1 << 20, uint64_t seed = 0,
                                uint64_t delay_ns_max = 0) {
  auto device = CreateSimDevice({memory_bytes, seed, delay_ns_max}, ReferenceKernels());
  EXPECT_TRUE(Ok(device));
  return std::move(device.value());
}

// Blocks a stream until it is opened.
struct Gate {
  std::atomic<uint64_t> flag{0};

  void Close(Device& device, StreamHandle stream) {
    EXPECT_TRUE(Ok(device.StreamWaitFlag(stream, &flag, 1)));
  }
  void Open() { flag.store(1, std::memory_order_release); }
};

void Increment(void* counter) { ++*static_cast<std::atomic<int>*>(counter); }

// ------------------------------------------------------------------------------------- host --

TEST(HostDevice, AllocatesAlignedMemoryAndTracksIt) {
  auto device = CreateHostDevice();
  EXPECT_EQ(device->kind(), OFFLOAD_DEVICE_HOST);
  EXPECT_TRUE(device->unified());
  auto data = device->Allocate(1000);
  ASSERT_TRUE(Ok(data));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data.value()) % 256, 0u);
  std::memset(data.value(), 1, 1000);
  auto mapped = device->Map(data.value(), 1000);
  ASSERT_TRUE(Ok(mapped));
  EXPECT_EQ(mapped.value(), data.value());
  EXPECT_TRUE(Ok(device->CheckRange(data.value(), 1000)));

  int foreign = 0;
  EXPECT_TRUE(Fails(device->Free(&foreign), OFFLOAD_INVALID_ARGUMENT, {"data is", "expected"}));
  EXPECT_TRUE(Ok(device->Free(data.value())));
  EXPECT_TRUE(Fails(device->Free(data.value()), OFFLOAD_INVALID_ARGUMENT, {"data is"}));
  EXPECT_TRUE(Ok(device->Free(nullptr)));
  ASSERT_TRUE(Ok(device->Allocate(1)));  // left to the destructor
}

TEST(HostDevice, RefusesWhatItCannotAllocate) {
  auto device = CreateHostDevice();
  EXPECT_TRUE(Fails(device->Allocate(0), OFFLOAD_INVALID_ARGUMENT, {"bytes is 0"}));
  EXPECT_TRUE(Fails(device->Allocate(UINT64_MAX), OFFLOAD_OUT_OF_HOST_MEMORY,
                    {"18446744073709551615 bytes", "are available"}));
  EXPECT_TRUE(
      Fails(device->Allocate(uint64_t{1} << 60), OFFLOAD_OUT_OF_HOST_MEMORY, {"asked for"}));
}

TEST(HostDevice, HasOnlyTheNullStreamAndRunsAtOnce) {
  auto device = CreateHostDevice();
  EXPECT_EQ(MakeStream(*device, "any"), nullptr);
  EXPECT_TRUE(Ok(device->CheckStream(nullptr)));
  std::atomic<int> ran{0};
  EXPECT_TRUE(Ok(device->Run(nullptr, Increment, &ran)));
  EXPECT_EQ(ran, 1);
  EXPECT_TRUE(Fails(device->Run(nullptr, nullptr, &ran), OFFLOAD_INVALID_ARGUMENT, {"function"}));
  EXPECT_TRUE(Ok(device->Synchronize(nullptr, 0)));
  EXPECT_TRUE(Ok(device->DestroyStream(nullptr)));

  int local = 0;
  StreamHandle foreign = &local;
  const std::vector<std::string> words = {"the host device has only the NULL stream"};
  EXPECT_TRUE(Fails(device->CheckStream(foreign), OFFLOAD_INVALID_ARGUMENT, words));
  EXPECT_TRUE(Fails(device->Run(foreign, Increment, &ran), OFFLOAD_INVALID_ARGUMENT, words));
  EXPECT_TRUE(Fails(device->Synchronize(foreign, 0), OFFLOAD_INVALID_ARGUMENT, words));
  EXPECT_TRUE(Fails(device->DestroyStream(foreign), OFFLOAD_INVALID_ARGUMENT, words));
  EXPECT_TRUE(
      Fails(device->CopyToHost(foreign, &local, &local, 1), OFFLOAD_INVALID_ARGUMENT, words));
  EXPECT_EQ(ran, 1);
}

TEST(HostDevice, CopiesAtOnce) {
  auto device = CreateHostDevice();
  const std::vector<int> source = {1, 2, 3};
  std::vector<int> there(3), back(3);
  EXPECT_TRUE(Ok(device->CopyToDevice(nullptr, there.data(), source.data(), 12)));
  EXPECT_TRUE(Ok(device->CopyToHost(nullptr, back.data(), there.data(), 12)));
  EXPECT_EQ(back, source);
  std::vector<int> rows(5);
  EXPECT_TRUE(Ok(device->CopyRows(nullptr, {rows.data(), 8, source.data(), 4, 4, 3})));
  EXPECT_EQ(rows, (std::vector<int>{1, 0, 2, 0, 3}));
  EXPECT_TRUE(Ok(device->CopyToHost(nullptr, nullptr, nullptr, 0)));
  EXPECT_TRUE(Fails(device->CopyRows(nullptr, {nullptr, 8, source.data(), 4, 4, 3}),
                    OFFLOAD_INVALID_ARGUMENT, {"20 bytes at NULL"}));
  EXPECT_TRUE(Fails(device->CopyRows(nullptr, {rows.data(), 8, nullptr, 4, 4, 3}),
                    OFFLOAD_INVALID_ARGUMENT, {"12 bytes at NULL"}));
  EXPECT_TRUE(Fails(device->CopyToHost(nullptr, nullptr, there.data(), 12),
                    OFFLOAD_INVALID_ARGUMENT, {"12 bytes at NULL"}));
  EXPECT_TRUE(Fails(device->Map(nullptr, 12), OFFLOAD_INVALID_ARGUMENT, {"12 bytes at NULL"}));
}

TEST(HostDevice, RefusesWhatOnlyAPipelineNeeds) {
  auto device = CreateHostDevice();
  float value = 0;
  Verdict verdict{};
  std::atomic<uint64_t> flag{0};
  const auto refuses = [](const Status& status, const char* function) {
    return Fails(status, OFFLOAD_UNSUPPORTED, {function, "on the host device", "unified()"});
  };
  EXPECT_TRUE(refuses(device->CreateEvent("e").status(), "CreateEvent"));
  EXPECT_TRUE(refuses(device->Record(nullptr, nullptr), "Record"));
  EXPECT_TRUE(refuses(device->StreamWait(nullptr, nullptr), "StreamWait"));
  EXPECT_TRUE(refuses(device->StreamWaitFlag(nullptr, &flag, 1), "StreamWaitFlag"));
  EXPECT_TRUE(refuses(device->Wait(nullptr, 0), "Wait"));
  EXPECT_TRUE(refuses(device->Elapsed(nullptr, nullptr).status(), "Elapsed"));
  EXPECT_TRUE(refuses(device->Fill(nullptr, &value, 1, PatternOf(Format::kFp32, 2)), "Fill"));
  EXPECT_TRUE(
      refuses(device->FollowParams(nullptr, &value, OFFLOAD_FP32, 1, &value), "FollowParams"));
  EXPECT_TRUE(refuses(device->Norm(nullptr, {}), "Norm"));
  EXPECT_TRUE(refuses(device->SetVerdict(nullptr, verdict, &verdict), "SetVerdict"));
  EXPECT_TRUE(refuses(device->Update(nullptr, {}), "Update"));
}

// ------------------------------------------------------------------------------ sim: memory --

TEST(SimMemory, CountsWhatIsTakenAndGivesItBack) {
  auto device = MakeSim(4096);
  EXPECT_EQ(device->Memory().value().total_bytes, 4096u);
  EXPECT_EQ(device->Memory().value().free_bytes, 4096u);
  auto a = device->Allocate(1), b = device->Allocate(257);
  ASSERT_TRUE(Ok(a));
  ASSERT_TRUE(Ok(b));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(a.value()) % 256, 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(b.value()) % 256, 0u);
  EXPECT_EQ(device->Memory().value().free_bytes, 4096u - 256 - 512);
  EXPECT_TRUE(Fails(device->Allocate(3329), OFFLOAD_OUT_OF_DEVICE_MEMORY,
                    {"asked for 3329 bytes", "3328 bytes of 4096 are free", "sim_memory_bytes"}));
  EXPECT_TRUE(Fails(device->Allocate(UINT64_MAX), OFFLOAD_OUT_OF_DEVICE_MEMORY,
                    {"asked for 18446744073709551615 bytes"}));
  EXPECT_TRUE(Fails(device->Allocate(0), OFFLOAD_INVALID_ARGUMENT, {"bytes is 0"}));
  EXPECT_TRUE(Ok(device->Allocate(3328)));
  EXPECT_EQ(device->Memory().value().free_bytes, 0u);
  EXPECT_TRUE(Ok(device->Free(b.value())));
  EXPECT_EQ(device->Memory().value().free_bytes, 512u);
}

TEST(SimMemory, RefusesACapacityWithoutRoomForAnything) {
  EXPECT_TRUE(Fails(CreateSimDevice({255, 0, 0}, ReferenceKernels()), OFFLOAD_INVALID_ARGUMENT,
                    {"sim_memory_bytes is 255", "at least 256"}));
  EXPECT_FALSE(CreateSimDevice({UINT64_MAX, 0, 0}, ReferenceKernels()).ok());
}

TEST(SimMemory, HasMemoryForALargeBlockBesideSmallOnes) {
  auto device = MakeSim(1024);
  void* quarter[4];
  for (void*& data : quarter) data = device->Allocate(256).value();
  ASSERT_TRUE(Ok(device->Free(quarter[0])));
  ASSERT_TRUE(Ok(device->Free(quarter[2])));
  auto half = device->Allocate(512);
  ASSERT_TRUE(Ok(half));
  EXPECT_TRUE(Ok(device->CheckRange(half.value(), 512)));
  EXPECT_TRUE(Fails(device->Allocate(1), OFFLOAD_OUT_OF_DEVICE_MEMORY, {"0 bytes of 1024 are"}));
  ASSERT_TRUE(Ok(device->Free(half.value())));
  ASSERT_TRUE(Ok(device->Free(quarter[1])));
  auto three = device->Allocate(768);
  ASSERT_TRUE(Ok(three));
  EXPECT_EQ(three.value(), quarter[0]);
}

TEST(SimMemory, MergesWhatIsFreedInAnyOrder) {
  std::vector<int> order = {0, 1, 2, 3};
  do {
    auto device = MakeSim(1024);
    void* quarter[4];
    for (void*& data : quarter) data = device->Allocate(256).value();
    for (int i : order) ASSERT_TRUE(Ok(device->Free(quarter[i])));
    ASSERT_TRUE(Ok(device->Allocate(1024)));
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(SimMemory, FreeRefusesWhatItDidNotGive) {
  auto device = MakeSim();
  auto* data = AllocateArray<char>(*device, 1000);
  int foreign = 0;
  for (void* bad : {static_cast<void*>(&foreign), static_cast<void*>(data + 1)}) {
    EXPECT_TRUE(Fails(device->Free(bad), OFFLOAD_INVALID_ARGUMENT, {"data is", "expected"}));
  }
  EXPECT_TRUE(Ok(device->Free(data)));
  EXPECT_TRUE(Fails(device->Free(data), OFFLOAD_INVALID_ARGUMENT, {"data is"}));
  EXPECT_TRUE(Ok(device->Free(nullptr)));
}

TEST(SimMemory, MapAndCheckRangeKnowTheLiveRanges) {
  auto device = MakeSim(1 << 20);
  auto* data = AllocateArray<char>(*device, 1000);
  AllocateArray<char>(*device, 1000);  // a neighbour: ranges may not run into it
  auto mapped = device->Map(data + 10, 990);
  ASSERT_TRUE(Ok(mapped));
  EXPECT_EQ(static_cast<char*>(mapped.value()) - 10, device->Map(data, 1).value());
  EXPECT_TRUE(Ok(device->CheckRange(data, 1000)));
  EXPECT_TRUE(Ok(device->CheckRange(nullptr, 0)));
  const std::vector<std::string> past = {"runs past the end of its allocation"};
  EXPECT_TRUE(Fails(device->Map(data + 10, 991), OFFLOAD_INVALID_ARGUMENT, past));
  EXPECT_TRUE(Fails(device->CheckRange(data, 1001), OFFLOAD_INVALID_ARGUMENT, past));
  EXPECT_TRUE(Fails(device->CheckRange(data, UINT64_MAX), OFFLOAD_INVALID_ARGUMENT, past));
  EXPECT_TRUE(Fails(device->Map(data + 1000, 1), OFFLOAD_INVALID_ARGUMENT, {"never allocated"}));
  EXPECT_TRUE(Fails(device->Map(data + 4096, 1), OFFLOAD_INVALID_ARGUMENT, {"never allocated"}));
  char host = 0;
  for (void* foreign : {static_cast<void*>(&host), static_cast<void*>(nullptr)}) {
    EXPECT_TRUE(
        Fails(device->Map(foreign, 1), OFFLOAD_INVALID_ARGUMENT, {"not in this device's memory"}));
  }
  ASSERT_TRUE(Ok(device->Free(data)));
  EXPECT_TRUE(Fails(device->CheckRange(data, 1), OFFLOAD_INVALID_ARGUMENT, {"freed"}));
}

TEST(SimMemory, NothingLiesBehindThePagesOfARange) {
  auto device = MakeSim(1 << 20);
  constexpr uint64_t kRange = uint64_t{1} << 20;
  const uint64_t page = device->page_bytes(kRange);
  auto* const range = static_cast<char*>(device->Reserve(kRange).value());
  DevicePages pages = std::move(device->TakePages(kRange, page).value());
  ASSERT_TRUE(Ok(device->AppendPages(range, pages)));
  EXPECT_TRUE(Ok(device->CheckRange(range, page)));
  EXPECT_TRUE(Fails(device->CheckRange(range, page + 1), OFFLOAD_INVALID_ARGUMENT,
                    {"runs past the end of its memory"}));
  for (const uint64_t at : {page, page + 1, kRange - 1})
    EXPECT_TRUE(Fails(device->CheckRange(range + at, 1), OFFLOAD_INVALID_ARGUMENT,
                      {"no memory lies behind it"}))
        << at;
  device->Unreserve(range);
}

TEST(SimMemory, FreshAndFreedBytesArePoison) {
  auto device = MakeSim(4096);
  auto* data = AllocateArray<char>(*device, 1000);
  auto* mapped = static_cast<char*>(device->Map(data, 1000).value());
  const std::vector<char> poison(1000, '\xff');
  EXPECT_EQ(std::memcmp(mapped, poison.data(), 1000), 0);
  std::memset(mapped, 1, 1000);
  ASSERT_TRUE(Ok(device->Free(data)));
  EXPECT_EQ(std::memcmp(mapped, poison.data(), 1000), 0);
  EXPECT_EQ(AllocateArray<char>(*device, 1000), data);
  float value;
  std::memcpy(&value, mapped, sizeof(value));
  EXPECT_TRUE(std::isnan(value));
}

TEST(SimMemory, LargeBlocksHavePoisonInEveryPage) {
  constexpr size_t kBytes = (size_t{16} << 20) + 4096 + 256, kPageFloats = 4096 / sizeof(float);
  auto device = MakeSim(2 * kBytes);
  auto* data = AllocateArray<char>(*device, kBytes);
  auto* mapped = static_cast<float*>(device->Map(data, kBytes).value());
  const auto poisoned_everywhere = [&] {
    for (size_t i = 0; i < kBytes / sizeof(float); i += kPageFloats)
      if (!std::isnan(mapped[i])) return false;
    return true;
  };
  EXPECT_TRUE(poisoned_everywhere());
  std::memset(mapped, 1, kBytes);
  ASSERT_TRUE(Ok(device->Free(data)));
  EXPECT_TRUE(poisoned_everywhere());
}

TEST(SimMemoryDeathTest, TheHostCannotTouchDeviceAddresses) {
  auto device = MakeSim();
  volatile char* data = AllocateArray<char>(*device, 1000);
  EXPECT_DEATH(static_cast<void>(data[0]), "");
  EXPECT_DEATH(data[999] = 1, "");
}

TEST(SimMemory, ThreadsAllocateWithoutMeetingEachOther) {
  auto device = MakeSim(1 << 16);
  std::atomic<int> mixed{0};
  std::vector<std::thread> threads;
  for (int id = 1; id <= 4; ++id) {
    threads.emplace_back([&, id] {
      Random random(id);
      for (int round = 0; round < 200; ++round) {
        const uint64_t bytes = random.Below(4000) + 1;
        auto data = device->Allocate(bytes);
        if (!data.ok()) continue;
        auto* mapped = static_cast<char*>(device->Map(data.value(), bytes).value());
        std::memset(mapped, id, bytes);
        std::this_thread::yield();
        mixed += static_cast<int>(bytes) - static_cast<int>(std::count(mapped, mapped + bytes, id));
        EXPECT_TRUE(Ok(device->Free(data.value())));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(mixed, 0);
  EXPECT_EQ(device->Memory().value().free_bytes, uint64_t{1} << 16);
}

TEST(SimMemory, PinningRefusesWhatARealDeviceRefuses) {
  auto device = MakeSim();
  std::vector<char> host(1000);
  auto* data = AllocateArray<char>(*device, 1000);
  EXPECT_TRUE(Ok(device->PinHost(host.data() + 100, 800)));
  for (auto [begin, bytes] : {std::pair(0, 101), std::pair(100, 800), std::pair(899, 1)}) {
    EXPECT_TRUE(Fails(device->PinHost(host.data() + begin, bytes), OFFLOAD_INVALID_ARGUMENT,
                      {"cannot pin", "nothing is pinned yet"}));
  }
  EXPECT_TRUE(Ok(device->PinHost(host.data(), 100)));
  EXPECT_TRUE(Ok(device->PinHost(host.data() + 900, 100)));
  device->UnpinHost(host.data() + 100);
  EXPECT_TRUE(Ok(device->PinHost(host.data() + 100, 800)));
  EXPECT_TRUE(Fails(device->PinHost(data, 10), OFFLOAD_INVALID_ARGUMENT, {"a device address"}));
  EXPECT_TRUE(Fails(device->PinHost(nullptr, 10), OFFLOAD_INVALID_ARGUMENT, {"this is NULL"}));
}

// ----------------------------------------------------------------------------- sim: streams --

size_t ThreadCount() {
  namespace fs = std::filesystem;
  return std::distance(fs::directory_iterator("/proc/self/task"), fs::directory_iterator());
}

TEST(SimStream, TheNullStreamStartsItsThreadWithItsFirstCommand) {
  const size_t before = ThreadCount();
  auto device = MakeSim();
  EXPECT_TRUE(Ok(device->Synchronize(nullptr, -1)));
  EXPECT_EQ(ThreadCount(), before);
  std::atomic<int> ran{0};
  EXPECT_TRUE(Ok(device->Run(nullptr, Increment, &ran)));
  EXPECT_EQ(ThreadCount(), before + 1);
  EXPECT_TRUE(Ok(device->Synchronize(nullptr, -1)));
  EXPECT_EQ(ran, 1);
  device.reset();
  while (ThreadCount() != before) std::this_thread::yield();  // the kernel lags behind the join
}

// Appends to one list without a lock: commands of one stream need none.
struct Append {
  std::vector<int>* list;
  int value;
  static void Run(void* user) {
    auto* append = static_cast<Append*>(user);
    append->list->push_back(append->value);
  }
};

TEST(SimStream, CommandsOfOneStreamRunInOrder) {
  for (uint64_t delay_ns_max : {0, 2000}) {
    auto device = MakeSim(4096, 7, delay_ns_max);
    StreamHandle stream = MakeStream(*device, "one");
    std::vector<int> list;
    std::vector<Append> appends;
    for (int i = 0; i < 3000; ++i) appends.push_back({&list, i});
    for (Append& append : appends) ASSERT_TRUE(Ok(device->Run(stream, Append::Run, &append)));
    ASSERT_TRUE(Ok(device->Synchronize(stream, -1)));
    std::vector<int> expected(3000);
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(list, expected);
  }
}

TEST(SimStream, QueueingReturnsBeforeTheCommandHasRun) {
  auto device = MakeSim();
  Gate gate;
  gate.Close(*device, nullptr);
  const std::vector<char> source(100, 'x');
  std::vector<char> back(100, 'o');
  auto* data = AllocateArray<char>(*device, 100);
  EXPECT_TRUE(Ok(device->CopyToDevice(nullptr, data, source.data(), 100)));
  EXPECT_TRUE(Ok(device->CopyToHost(nullptr, back.data(), data, 100)));
  EXPECT_EQ(back[0], 'o');
  gate.Open();
  EXPECT_TRUE(Ok(device->Synchronize(nullptr, -1)));
  EXPECT_EQ(back, source);
}

TEST(SimStream, TwoStreamsOverlap) {
  struct Meeting {
    std::atomic<int> arrived{0};
    static void Run(void* user) {
      auto* meeting = static_cast<Meeting*>(user);
      ++meeting->arrived;
      while (meeting->arrived < 2) std::this_thread::yield();  // for ever, were they one thread
    }
  } meeting;
  auto device = MakeSim();
  StreamHandle streams[] = {MakeStream(*device, "a"), MakeStream(*device, "b")};
  for (StreamHandle stream : streams) ASSERT_TRUE(Ok(device->Run(stream, Meeting::Run, &meeting)));
  for (StreamHandle stream : streams) EXPECT_TRUE(Ok(device->Synchronize(stream, -1)));
}

TEST(SimStream, AFullQueueBlocksTheCallerAndRecovers) {
  auto device = MakeSim();
  StreamHandle stream = MakeStream(*device, "full");
  Gate gate;
  gate.Close(*device, stream);
  std::atomic<int> queued{0}, ran{0};
  std::thread caller([&] {
    for (int i = 0; i < 2000; ++i) {
      EXPECT_TRUE(Ok(device->Run(stream, Increment, &ran)));
      ++queued;
    }
  });
  while (queued < 1023) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // time for a wrong order to show
  EXPECT_EQ(queued, 1023);
  EXPECT_EQ(ran, 0);
  gate.Open();
  caller.join();
  EXPECT_TRUE(Ok(device->Synchronize(stream, -1)));
  EXPECT_EQ(ran, 2000);
}

TEST(SimStream, DestroyFinishesTheWorkFirst) {
  auto device = MakeSim(4096, 1, 5000);
  StreamHandle stream = MakeStream(*device, "short");
  EventHandle event = MakeEvent(*device);
  std::atomic<int> ran{0};
  for (int i = 0; i < 100; ++i) ASSERT_TRUE(Ok(device->Run(stream, Increment, &ran)));
  ASSERT_TRUE(Ok(device->Record(event, stream)));
  EXPECT_TRUE(Ok(device->DestroyStream(stream)));
  EXPECT_EQ(ran, 100);
  EXPECT_TRUE(Ok(device->DestroyStream(nullptr)));
  // The event outlives the stream it was recorded on.
  EXPECT_TRUE(Ok(device->Wait(event, 0)));
  EXPECT_TRUE(Ok(device->StreamWait(nullptr, event)));
  EXPECT_TRUE(Ok(device->Synchronize(nullptr, -1)));
}

TEST(SimStream, UnknownStreamsAndEventsAreRefusedByEveryFunction) {
  auto device = MakeSim();
  auto other = MakeSim();
  StreamHandle destroyed = MakeStream(*device, "gone");
  ASSERT_TRUE(Ok(device->DestroyStream(destroyed)));
  EventHandle event = MakeEvent(*device);
  std::atomic<uint64_t> flag{0};
  std::atomic<int> ran{0};
  float value = 0;
  auto* data = AllocateArray<float>(*device, 1);
  StreamHandle unknown[] = {destroyed, &value, reinterpret_cast<StreamHandle>(uintptr_t{0xdead}),
                            MakeStream(*other, "of another device")};
  for (StreamHandle stream : unknown) {
    const Status statuses[] = {device->CheckStream(stream),
                               device->DestroyStream(stream),
                               device->Record(event, stream),
                               device->StreamWait(stream, event),
                               device->StreamWaitFlag(stream, &flag, 1),
                               device->Synchronize(stream, 0),
                               device->CopyToHost(stream, &value, data, 4),
                               device->CopyToDevice(stream, data, &value, 4),
                               device->Fill(stream, data, 1, PatternOf(Format::kFp32, 1.0f)),
                               device->FollowParams(stream, data, OFFLOAD_FP32, 1, data),
                               device->Norm(stream, {}),
                               device->SetVerdict(stream, {}, nullptr),
                               device->Update(stream, {}),
                               device->Run(stream, Increment, &ran)};
    for (const Status& status : statuses) {
      EXPECT_TRUE(Fails(status, OFFLOAD_INVALID_ARGUMENT, {"stream is", "expected NULL or"}));
    }
  }
  EXPECT_EQ(ran, 0);
  EXPECT_TRUE(Ok(device->CheckStream(nullptr)));
  EXPECT_TRUE(Ok(device->Wait(event, 0)));

  auto foreign = reinterpret_cast<EventHandle>(&value);
  EventHandle gone = MakeEvent(*device);
  device->DestroyEvent(gone);
  for (EventHandle bad : {foreign, gone, EventHandle{nullptr}}) {
    const Status statuses[] = {device->Record(bad, nullptr), device->StreamWait(nullptr, bad),
                               device->Wait(bad, 0), device->Elapsed(bad, event).status()};
    for (const Status& status : statuses) {
      EXPECT_TRUE(Fails(status, OFFLOAD_INVALID_ARGUMENT, {"event is", "expected one"}));
    }
  }
  device->DestroyEvent(nullptr);
}

TEST(SimStream, ArgumentsThatARealDeviceChecksAtOnceAreChecked) {
  auto device = MakeSim();
  auto* data = AllocateArray<char>(*device, 100);
  char host = 0;
  EXPECT_TRUE(Fails(device->CopyToHost(nullptr, data, data, 100), OFFLOAD_INVALID_ARGUMENT,
                    {"expected host memory", "a device address"}));
  EXPECT_TRUE(Fails(device->CopyToDevice(nullptr, data, nullptr, 100), OFFLOAD_INVALID_ARGUMENT,
                    {"expected host memory", "NULL"}));
  EXPECT_TRUE(
      Fails(device->Run(nullptr, nullptr, &host), OFFLOAD_INVALID_ARGUMENT, {"function is NULL"}));
  EXPECT_TRUE(Ok(device->CopyToHost(nullptr, nullptr, nullptr, 0)));
  EXPECT_TRUE(Ok(device->Synchronize(nullptr, -1)));
}

TEST(SimStream, ThreadsHaveTheStandardFloatingPointMode) {
  ASSERT_EQ(std::fesetround(FE_UPWARD), 0);
  auto device = MakeSim();
  StreamHandle stream = MakeStream(*device, "mode");
  ASSERT_EQ(std::fesetround(FE_TONEAREST), 0);
  int mode = -1;
  const auto get = [](void* user) { *static_cast<int*>(user) = std::fegetround(); };
  ASSERT_TRUE(Ok(device->Run(stream, get, &mode)));
  ASSERT_TRUE(Ok(device->Synchronize(stream, -1)));
  EXPECT_EQ(mode, FE_TONEAREST);
}

// ------------------------------------------------------------------------------ sim: events --

TEST(SimEvent, MayBeDestroyedWhileItsRecordIsQueued) {
  auto device = MakeSim();
  StreamHandle stream = MakeStream(*device, "stream"), waiter = MakeStream(*device, "waiter");
  EventHandle event = MakeEvent(*device);
  Gate gate;
  gate.Close(*device, stream);
  ASSERT_TRUE(Ok(device->Record(event, stream)));
  ASSERT_TRUE(Ok(device->StreamWait(waiter, event)));
  device->DestroyEvent(event);
  EventHandle next = MakeEvent(*device);
  EXPECT_TRUE(Ok(device->Wait(next, 0)));  // a new event, although the place may be the same
  EXPECT_TRUE(Fails(device->Synchronize(waiter, 0), OFFLOAD_TIMED_OUT, {}));
  gate.Open();
  EXPECT_TRUE(Ok(device->Synchronize(stream, -1)));
  EXPECT_TRUE(Ok(device->Synchronize(waiter, -1)));
  EXPECT_TRUE(Fails(device->Elapsed(next, next), OFFLOAD_INVALID_STATE, {"not recorded"}));
}

TEST(SimEvent, MeasuresTime) {
  auto device = MakeSim();
  EventHandle begin = MakeEvent(*device, "begin"), end = MakeEvent(*device, "end");
  EXPECT_TRUE(
      Fails(device->Elapsed(begin, end), OFFLOAD_INVALID_STATE, {"\"begin\"", "not recor"}));
  Gate gate;
  const auto sleep = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(2)); };
  ASSERT_TRUE(Ok(device->Record(begin, nullptr)));
  ASSERT_TRUE(Ok(device->Run(nullptr, sleep, nullptr)));
  gate.Close(*device, nullptr);
  ASSERT_TRUE(Ok(device->Record(end, nullptr)));
  ASSERT_TRUE(Ok(device->Wait(begin, -1)));
  EXPECT_TRUE(
      Fails(device->Elapsed(begin, end), OFFLOAD_INVALID_STATE, {"\"end\"", "wait for it"}));
  gate.Open();
  ASSERT_TRUE(Ok(device->Wait(end, -1)));
  EXPECT_GE(device->Elapsed(begin, end).value(), 0.002);
  EXPECT_LE(device->Elapsed(end, begin).value(), -0.002);
}

TEST(SimEvent, KeepsTheTimeOfItsLatestRecord) {
  auto device = MakeSim();
  StreamHandle late = MakeStream(*device, "late");
  EventHandle begin = MakeEvent(*device, "begin"), event = MakeEvent(*device, "event");
  Gate gate;
  gate.Close(*device, late);
  ASSERT_TRUE(Ok(device->Record(event, late)));
  ASSERT_TRUE(Ok(device->Record(begin, nullptr)));
  ASSERT_TRUE(Ok(device->Record(event, nullptr)));
  ASSERT_TRUE(Ok(device->Wait(event, -1)));
  const double elapsed = device->Elapsed(begin, event).value();
  gate.Open();
  ASSERT_TRUE(Ok(device->Synchronize(late, -1)));
  EXPECT_EQ(device->Elapsed(begin, event).value(), elapsed);
}

// Copies a pattern through device memory on two streams: `up` copies it to the device when `gate`
// opens, `down` copies it back, ordered by one wait, or by none. Returns true if the whole pattern
// arrives.
enum class Order { kEvent, kFlag, kNone };

bool Arrives(uint64_t seed, Order order) {
  constexpr uint64_t kBytes = 200'000;  // several pieces of a copy
  auto device = MakeSim(1 << 20, seed, 20'000);
  StreamHandle up = MakeStream(*device, "up"), down = MakeStream(*device, "down");
  EventHandle event = MakeEvent(*device);
  std::atomic<uint64_t> flag{0};
  Gate gate;
  std::vector<char> source(kBytes), back(kBytes);
  std::iota(source.begin(), source.end(), static_cast<char>(seed));
  auto* data = AllocateArray<char>(*device, kBytes);
  gate.Close(*device, up);
  EXPECT_TRUE(Ok(device->CopyToDevice(up, data, source.data(), kBytes)));
  EXPECT_TRUE(Ok(device->Record(event, up)));
  const auto raise = [](void* user) { static_cast<std::atomic<uint64_t>*>(user)->store(7); };
  EXPECT_TRUE(Ok(device->Run(up, raise, &flag)));
  Status waited;
  if (order == Order::kEvent) waited = device->StreamWait(down, event);
  if (order == Order::kFlag) waited = device->StreamWaitFlag(down, &flag, 7);
  EXPECT_TRUE(Ok(waited));
  EXPECT_TRUE(Ok(device->CopyToHost(down, back.data(), data, kBytes)));
  // Without a wait nothing delays `down`, so it may finish first.
  if (order == Order::kNone) {
    EXPECT_TRUE(Ok(device->Synchronize(down, -1)));
  }
  gate.Open();
  EXPECT_TRUE(Ok(device->Synchronize(down, -1)));
  EXPECT_TRUE(Ok(device->Synchronize(up, -1)));
  return SameBits(source, back);
}

TEST(SimEvent, WaitsOrderDataBetweenStreams) {
  for (uint64_t seed = 0; seed < 100; ++seed) {
    ASSERT_TRUE(Arrives(seed, Order::kEvent)) << seed;
    ASSERT_TRUE(Arrives(seed, Order::kFlag)) << seed;
  }
}

// Shows that the test above can fail.
TEST(SimEvent, AMissingWaitShows) { EXPECT_FALSE(Arrives(1, Order::kNone)); }

// ---------------------------------------------------------------------------- sim: failures --

TEST(SimFailure, UseAfterFreeFailsTheDeviceLaterAndForGood) {
  auto device = MakeSim();
  StreamHandle down = MakeStream(*device, "down"), other = MakeStream(*device, "other");
  EventHandle event = MakeEvent(*device), early = MakeEvent(*device);
  Gate gate, never;
  auto* data = AllocateArray<char>(*device, 64);
  std::vector<char> back(64, 'o');
  std::atomic<int> ran{0};
  ASSERT_TRUE(Ok(device->Record(early, other)));
  never.Close(*device, other);
  gate.Close(*device, down);
  EXPECT_TRUE(Ok(device->CopyToHost(down, back.data(), data, 64)));
  EXPECT_TRUE(Ok(device->Run(down, Increment, &ran)));
  EXPECT_TRUE(Ok(device->Record(event, down)));
  EXPECT_TRUE(Ok(device->Free(data)));
  EXPECT_TRUE(Fails(device->Synchronize(down, 0), OFFLOAD_TIMED_OUT, {}));
  gate.Open();

  char address[32];
  std::snprintf(address, sizeof(address), "%p", static_cast<void*>(data));
  const std::vector<std::string> cause = {"CopyToHost on stream \"down\"", "64 bytes at", address,
                                          "freed"};
  // Otherwise the wait for `other` would never end.
  ASSERT_TRUE(Fails(device->Wait(event, -1), OFFLOAD_DEVICE_FAILED, cause));
  EXPECT_EQ(ran, 0);
  EXPECT_EQ(back, std::vector<char>(64, 'o'));

  std::atomic<uint64_t> flag{0};
  const Status statuses[] = {device->Synchronize(down, -1),
                             device->Synchronize(other, -1),  // its gate is gone
                             device->Wait(event, -1),
                             device->Wait(early, -1),
                             device->Elapsed(early, early).status(),
                             device->Record(event, other),
                             device->StreamWait(other, event),
                             device->StreamWait(other, early),
                             device->StreamWaitFlag(other, &flag, 1),
                             device->CopyToDevice(other, data, back.data(), 64),
                             device->Run(nullptr, Increment, &ran),
                             device->PinHost(back.data(), 64),
                             device->Allocate(1).status(),
                             device->CreateStream("new").status(),
                             device->CreateEvent("new").status()};
  for (const Status& status : statuses) {
    EXPECT_TRUE(Fails(status, OFFLOAD_DEVICE_FAILED, cause));
  }
  EXPECT_TRUE(Ok(device->CheckStream(other)));
  EXPECT_TRUE(Ok(device->DestroyStream(other)));
  device->DestroyEvent(event);
  EXPECT_EQ(ran, 0);
}

TEST(SimFailure, TheFirstCauseStays) {
  auto device = MakeSim();
  StreamHandle streams[] = {MakeStream(*device, "first"), MakeStream(*device, "second")};
  auto* data = AllocateArray<float>(*device, 64);
  Gate gate;
  gate.Close(*device, streams[1]);
  EXPECT_TRUE(Ok(device->Fill(streams[1], data, 65, PatternOf(Format::kFp32, 0.0f))));
  EXPECT_TRUE(Ok(device->Fill(streams[0], data + 64, 1, PatternOf(Format::kFp32, 0.0f))));
  EXPECT_TRUE(Fails(device->Synchronize(streams[0], -1), OFFLOAD_DEVICE_FAILED, {"\"first\""}));
  gate.Open();
  EXPECT_TRUE(Fails(device->Synchronize(streams[1], -1), OFFLOAD_DEVICE_FAILED, {"\"first\""}));
}

TEST(SimFailure, FreeWorksOnAFailedDevice) {
  auto device = MakeSim(4096);
  auto* data = AllocateArray<float>(*device, 64);
  EXPECT_TRUE(Ok(device->Fill(nullptr, data, 65, PatternOf(Format::kFp32, 0.0f))));
  EXPECT_TRUE(Fails(device->Synchronize(nullptr, -1), OFFLOAD_DEVICE_FAILED, {"Fill"}));
  EXPECT_TRUE(Ok(device->Free(data)));
  EXPECT_EQ(device->Memory().value().free_bytes, 4096u);
}

// All objects that a command can name, on a device of its own, so that one failure does not hide
// another.
struct Arrays {
  Arrays() : device(MakeSim()) {
    for (float** array : {&grad, &param, &master, &moment0, &moment1}) {
      *array = Upload(*device, std::vector<float>(kCount, 0.5f));
    }
    sums = AllocateArray<double>(*device, 1);
    verdict = Upload(*device, std::vector<Verdict>{AssumeFinite(1)});
    input = {grad, kCount, OFFLOAD_FP32, 0};
    update = {{grad, param, master, moment0, moment1, kCount}, OFFLOAD_FP32, OFFLOAD_FP32, 0};
  }

  NormLaunch Norm() { return {{&input, 1}, sums, 1, 0, verdict}; }
  UpdateLaunch Update() { return {Rule::kAdam, {&update, 1}, {&coefficients, 1}, verdict}; }

  static constexpr uint64_t kCount = 64;
  std::unique_ptr<Device> device;
  float *grad, *param, *master, *moment0, *moment1;
  double* sums;
  Verdict* verdict;
  NormInput input;
  DeviceUpdate update;
  Coefficients coefficients{};
  float host[kCount] = {};
};

TEST(SimFailure, EveryCommandChecksEveryAddressWhenItRuns) {
  struct Case {
    const char* command;
    const char* what;
    std::function<Status(Arrays&)> queue;
  };
  const uint64_t past = Arrays::kCount + 1;
  const auto advance = [](void*& array) { array = static_cast<float*>(array) + 1; };
  const auto queue_update = [](Arrays& a) { return a.device->Update(nullptr, a.Update()); };
  const auto queue_norm = [](Arrays& a) { return a.device->Norm(nullptr, a.Norm()); };
  const std::vector<Case> cases = {
      {"CopyToHost", "source",
       [](Arrays& a) { return a.device->CopyToHost(nullptr, a.host, a.grad + 1, 256); }},
      {"CopyToHost", "not in this device's memory",
       [](Arrays& a) { return a.device->CopyToHost(nullptr, a.host, a.host, 4); }},
      {"CopyToDevice", "destination",
       [](Arrays& a) { return a.device->CopyToDevice(nullptr, a.grad + 1, a.host, 256); }},
      {"Fill", "destination",
       [=](Arrays& a) {
         return a.device->Fill(nullptr, a.grad, past, PatternOf(Format::kFp32, 1.0f));
       }},
      {"Fill", "runs past the end",
       [](Arrays& a) {
         return a.device->Fill(nullptr, a.grad, UINT64_MAX / 2, PatternOf(Format::kFp32, 1.0f));
       }},
      {"Fill", "not aligned",
       [](Arrays& a) {
         auto* odd = reinterpret_cast<float*>(reinterpret_cast<uintptr_t>(a.grad) + 2);
         return a.device->Fill(nullptr, odd, 1, PatternOf(Format::kFp32, 1.0f));
       }},
      {"FollowParams", "params",
       [=](Arrays& a) {
         return a.device->FollowParams(nullptr, a.grad, OFFLOAD_BF16, 2 * past, a.param);
       }},
      {"FollowParams", "masters",
       [=](Arrays& a) {
         return a.device->FollowParams(nullptr, a.grad, OFFLOAD_BF16, past, a.param);
       }},
      {"SetVerdict", "verdict",
       [](Arrays& a) { return a.device->SetVerdict(nullptr, {}, a.verdict + 1); }},
      {"Norm", "grad", [=](Arrays& a) { return a.input.count = past, queue_norm(a); }},
      {"Norm", "block_sums", [=](Arrays& a) { return a.input.first_block = 1, queue_norm(a); }},
      {"Norm", "verdict", [=](Arrays& a) { return ++a.verdict, queue_norm(a); }},
      {"Update", "grad", [=](Arrays& a) { return a.update.span.grad = a.host, queue_update(a); }},
      {"Update", "param", [=](Arrays& a) { return a.update.span.param = a.host, queue_update(a); }},
      {"Update", "master",
       [=](Arrays& a) { return advance(a.update.span.master), queue_update(a); }},
      {"Update", "moment0",
       [=](Arrays& a) { return advance(a.update.span.moment0), queue_update(a); }},
      {"Update", "moment1",
       [=](Arrays& a) { return advance(a.update.span.moment1), queue_update(a); }},
      {"Update", "verdict", [=](Arrays& a) { return ++a.verdict, queue_update(a); }},
  };
  for (const Case& one : cases) {
    SCOPED_TRACE(std::string(one.command) + " " + one.what);
    Arrays arrays;
    Gate gate;
    gate.Close(*arrays.device, nullptr);
    EXPECT_TRUE(Ok(one.queue(arrays)));  // nothing is known yet
    gate.Open();
    EXPECT_TRUE(Fails(arrays.device->Synchronize(nullptr, -1), OFFLOAD_DEVICE_FAILED,
                      {std::string(one.command) + " on stream \"NULL\"", one.what}));
    for (float* array : {arrays.grad, arrays.param, arrays.master, arrays.moment0}) {
      const auto* bytes = arrays.device->Map(array, sizeof(arrays.host)).value();
      EXPECT_EQ(
          std::memcmp(bytes, std::vector<float>(Arrays::kCount, 0.5f).data(), sizeof(arrays.host)),
          0);
    }
  }
}

TEST(SimFailure, CopyRowsChecksBothEndsWhenItRuns) {
  for (const bool to_end : {true, false}) {
    Arrays a;
    const uint64_t far = sizeof(a.host) + 4;
    ASSERT_TRUE(Ok(
        a.device->CopyRows(nullptr, {a.grad, to_end ? far : 4, a.param, to_end ? 4 : far, 4, 2})));
    EXPECT_TRUE(Fails(a.device->Synchronize(nullptr, -1), OFFLOAD_DEVICE_FAILED,
                      {"CopyRows on stream", to_end ? "destination" : "source"}));
  }
}

TEST(SimFailure, ALaunchWithOneBadAddressWritesNothing) {
  Arrays a;
  const Coefficients coefficients = {1, 0, 0, 1, 0.5f, 0.5f, 0.5f, 0.5f, 1, 1, 0, 0};
  DeviceUpdate updates[] = {a.update, a.update};
  updates[1].span.param = a.host;
  ASSERT_TRUE(Ok(a.device->Update(nullptr, {Rule::kAdam, updates, {&coefficients, 1}, a.verdict})));
  EXPECT_TRUE(Fails(a.device->Synchronize(nullptr, -1), OFFLOAD_DEVICE_FAILED, {"param"}));
  for (float* array : {a.param, a.master, a.moment0, a.moment1}) {
    const auto* values = static_cast<float*>(a.device->Map(array, sizeof(a.host)).value());
    EXPECT_EQ(std::count(values, values + Arrays::kCount, 0.5f), Arrays::kCount);
  }
}

TEST(SimFailure, CommandsOnNothingNeedNoAddress) {
  auto device = MakeSim();
  auto* verdict = Upload(*device, std::vector<Verdict>{AssumeFinite(1)});
  const NormInput input = {nullptr, 0, OFFLOAD_FP32, 0};
  const DeviceUpdate update = {{}, OFFLOAD_FP32, OFFLOAD_FP32, 0};
  const Coefficients coefficients = {};
  EXPECT_TRUE(Ok(device->Fill(nullptr, nullptr, 0, PatternOf(Format::kFp32, 1.0f))));
  EXPECT_TRUE(Ok(device->FollowParams(nullptr, nullptr, OFFLOAD_BF16, 0, nullptr)));
  EXPECT_TRUE(Ok(device->Norm(nullptr, {{&input, 1}, nullptr, 1, 0, verdict})));
  EXPECT_TRUE(
      Ok(device->Update(nullptr, {Rule::kAdam, {&update, 1}, {&coefficients, 1}, verdict})));
  EXPECT_TRUE(Ok(device->Synchronize(nullptr, -1)));
}

TEST(SimFailure, DestructionDropsWhatIsQueuedAndNeverHangs) {
  std::atomic<int> ran{0};
  std::atomic<uint64_t> never{0};
  {
    auto device = MakeSim(4096, 1, 1'000);
    StreamHandle stuck = MakeStream(*device, "stuck"), behind = MakeStream(*device, "behind");
    EventHandle event = MakeEvent(*device);
    ASSERT_TRUE(Ok(device->StreamWaitFlag(stuck, &never, 1)));
    ASSERT_TRUE(Ok(device->Record(event, stuck)));
    ASSERT_TRUE(Ok(device->StreamWait(behind, event)));
    ASSERT_TRUE(Ok(device->StreamWait(nullptr, event)));
    for (StreamHandle stream : {stuck, behind, StreamHandle{nullptr}}) {
      for (int i = 0; i < 100; ++i) ASSERT_TRUE(Ok(device->Run(stream, Increment, &ran)));
    }
  }
  EXPECT_EQ(ran, 0);
  {
    constexpr uint64_t kYearNs = uint64_t{365} * 24 * 3600 * 1'000'000'000;
    auto device = MakeSim(4096, 1, kYearNs);
    StreamHandle stream = MakeStream(*device, "asleep");
    ASSERT_TRUE(Ok(device->Run(stream, Increment, &ran)));
    ASSERT_TRUE(Ok(device->Run(nullptr, Increment, &ran)));
  }
  EXPECT_EQ(ran, 0);
}

TEST(SimFailure, AForkedChildLeavesTheThreadsAlone) {
  auto device = MakeSim(4096, 1, 1'000);
  StreamHandle stream = MakeStream(*device, "busy");
  Gate gate;
  std::atomic<int> ran{0};
  gate.Close(*device, stream);
  ASSERT_TRUE(Ok(device->Run(stream, Increment, &ran)));
  // In the child an idle thread would still count as a waiter, and destroying the object for which
  // it waits would hang.
  MakeStream(*device, "idle");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);  // a child that hangs is a failed test
    device.reset();
    _exit(0);
  }
  ASSERT_GT(child, 0);
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  EXPECT_EQ(WEXITSTATUS(status), 0);
  gate.Open();
  EXPECT_TRUE(Ok(device->Synchronize(stream, -1)));
  EXPECT_EQ(ran, 1);
}

// ------------------------------------------------------------------------------ sim: malloc --

TEST(SimQueue, QueueingAndRunningAllocateNothing) {
  if (!HYBRIDOPT_SEES_MALLOC) GTEST_SKIP() << "sanitizers have a malloc of their own";
  const uint64_t control = malloc_calls;
  ::operator delete(::operator new(1));  // spelt out, or the compiler removes both
  ASSERT_GT(malloc_calls, control) << "allocations are not counted";

  Arrays a;
  StreamHandle stream = MakeStream(*a.device, "a"), other = MakeStream(*a.device, "b");
  EventHandle event = MakeEvent(*a.device);
  std::atomic<uint64_t> flag{1};
  std::atomic<int> ran{0};
  const auto everything = [&] {
    Device& device = *a.device;
    return device.CopyToDevice(stream, a.grad, a.host, 256).ok() &&
           device.Fill(stream, a.param, 64, PatternOf(Format::kFp32, 1.0f)).ok() &&
           device.FollowParams(stream, a.grad, OFFLOAD_BF16, 64, a.param).ok() &&
           device.Norm(stream, a.Norm()).ok() &&
           device.SetVerdict(stream, AssumeFinite(1), a.verdict).ok() &&
           device.Update(stream, a.Update()).ok() && device.Record(event, stream).ok() &&
           device.StreamWait(other, event).ok() && device.StreamWaitFlag(other, &flag, 1).ok() &&
           device.Run(other, Increment, &ran).ok() &&
           device.CopyToHost(other, a.host, a.grad, 256).ok() && device.Record(event, other).ok() &&
           device.Wait(event, -1).ok() && device.Elapsed(event, event).ok() &&
           device.CheckStream(other).ok() && device.CheckRange(a.grad, 256).ok() &&
           device.Synchronize(stream, -1).ok();
  };
  const uint64_t before = malloc_calls;
  bool ok = true;
  for (int round = 0; round < 300; ++round) ok = ok && everything();
  const uint64_t after = malloc_calls;
  EXPECT_TRUE(ok);
  EXPECT_EQ(ran, 300);
  EXPECT_EQ(after, before);
}

}  // namespace
}  // namespace hybridopt
