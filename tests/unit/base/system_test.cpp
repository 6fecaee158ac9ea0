#include "base/system.h"

#include <fenv.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../../fake_root.h"
#include "../../floating_point_mode.h"

namespace hybridopt::system {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// --- Time ---

TEST(ClockTest, OnlyGoesForward) {
  int64_t before = NowNs();
  EXPECT_GT(before, 0);
  for (int i = 0; i < 1000; ++i) {
    const int64_t now = NowNs();
    EXPECT_GE(now, before);
    before = now;
  }
}

// --- Pages ---

uint64_t PageBytes() { return static_cast<uint64_t>(sysconf(_SC_PAGESIZE)); }

// Address space this process has, read without allocating any.
uint64_t VirtualBytes() {
  char text[128] = {};
  std::FILE* file = std::fopen("/proc/self/statm", "re");
  std::setbuf(file, nullptr);
  const size_t bytes = std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  return bytes == 0 ? 0 : std::strtoull(text, nullptr, 10) * PageBytes();
}

uint64_t PagesResident(void* data, uint64_t bytes) {
  std::vector<unsigned char> pages((bytes + PageBytes() - 1) / PageBytes());
  EXPECT_EQ(mincore(data, bytes, pages.data()), 0) << std::strerror(errno);
  return static_cast<uint64_t>(
      std::count_if(pages.begin(), pages.end(), [](unsigned char page) { return page & 1; }));
}

TEST(MapPagesTest, GivesZeroedWritablePagesAndTakesThemBack) {
  for (uint64_t bytes : {uint64_t{1}, uint64_t{4096}, uint64_t{4097}, 2 * kMiB - 1, 2 * kMiB,
                         2 * kMiB + 1, 7 * kMiB + 4096 * 3 + 5}) {
    SCOPED_TRACE(bytes);
    Result<void*> mapped = MapPages(bytes);
    ASSERT_TRUE(mapped.ok()) << mapped.status().message();
    const uint64_t whole = (bytes + PageBytes() - 1) / PageBytes() * PageBytes();
    unsigned char* data = static_cast<unsigned char*>(mapped.value());
    const uint64_t alignment = bytes >= kHugePageBytes ? kHugePageBytes : PageBytes();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % alignment, 0u);
    EXPECT_EQ(std::count(data, data + whole, 0), static_cast<int64_t>(whole));
    std::memset(data, 0xff, whole);
    EXPECT_EQ(data[whole - 1], 0xff);
    UnmapPages(data, bytes);
  }
}

TEST(MapPagesTest, TakesWholePagesAndNotOneMore) {
  VirtualBytes();  // whatever the first call maps
  for (uint64_t bytes : {uint64_t{4096}, 2 * kMiB, 9 * kMiB + 4096}) {
    const uint64_t before = VirtualBytes();
    Result<void*> mapped = MapPages(bytes);
    const uint64_t with = VirtualBytes();
    ASSERT_TRUE(mapped.ok());
    UnmapPages(mapped.value(), bytes);
    EXPECT_EQ(with - before, bytes);
    EXPECT_EQ(VirtualBytes(), before);
  }
}

TEST(MapPagesTest, TouchesNoPage) {
  const uint64_t bytes = 8 * kMiB;
  Result<void*> mapped = MapPages(bytes);
  ASSERT_TRUE(mapped.ok());
  EXPECT_EQ(PagesResident(mapped.value(), bytes), 0u);
  *static_cast<volatile char*>(mapped.value()) = 1;
  EXPECT_GE(PagesResident(mapped.value(), bytes), 1u);
  UnmapPages(mapped.value(), bytes);
}

// True if the kernel notes that flag at `data`: "hg" for huge pages, "nh" for none.
bool HasFlag(const void* data, const std::string& flag) {
  const uint64_t address = reinterpret_cast<uintptr_t>(data);
  std::ifstream maps("/proc/self/smaps");
  bool inside = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long long begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2)
      inside = begin <= address && address < end;
    if (inside && line.rfind("VmFlags:", 0) == 0) return line.find(" " + flag) != std::string::npos;
  }
  return false;
}

TEST(MapPagesTest, AsksForHugePagesWhereOneFits) {
  if (!HugePagesAvailable()) GTEST_SKIP() << "this kernel has no huge pages";
  Result<void*> large = MapPages(4 * kMiB);
  ASSERT_TRUE(large.ok());
  EXPECT_TRUE(HasFlag(large.value(), "hg"));
  UnmapPages(large.value(), 4 * kMiB);
}

TEST(MapPagesTest, RefusesHugePagesWhereNoneAreWanted) {
  if (!HugePagesAvailable()) GTEST_SKIP() << "this kernel has no huge pages";
  Result<void*> small = MapPages(4 * kMiB, false);
  ASSERT_TRUE(small.ok());
  EXPECT_TRUE(HasFlag(small.value(), "nh"));
  EXPECT_FALSE(HasFlag(small.value(), "hg"));
  UnmapPages(small.value(), 4 * kMiB);
}

TEST(MapPagesTest, RefusesWhatTheSystemHasNot) {
  for (uint64_t bytes : {uint64_t{1} << 60, UINT64_MAX - 4096, UINT64_MAX}) {
    Result<void*> mapped = MapPages(bytes);
    ASSERT_FALSE(mapped.ok());
    EXPECT_EQ(mapped.status().code(), OFFLOAD_OUT_OF_HOST_MEMORY);
    const std::string& text = mapped.status().message();
    EXPECT_NE(text.find("asked for " + std::to_string(bytes) + " bytes"), std::string::npos)
        << text;
    EXPECT_NE(text.find("Cannot allocate memory"), std::string::npos) << text;
    EXPECT_NE(text.find("bytes are available"), std::string::npos) << text;
    EXPECT_NE(text.find("raise the limit"), std::string::npos) << text;
  }
}

TEST(MapPagesDeathTest, ZeroBytesAreABugOfOurs) {
  EXPECT_DEATH((void)MapPages(0), "broken invariant bytes > 0");
}

TEST(ReserveAddressesTest, TakesAddressesButNoMemory) {
  const uint64_t bytes = uint64_t{1} << 40;
  Result<void*> reserved = ReserveAddresses(bytes);
  ASSERT_TRUE(reserved.ok()) << reserved.status().message();
  UnmapPages(reserved.value(), bytes);
}

TEST(ReserveAddressesTest, RefusesMoreThanThereAre) {
  Result<void*> reserved = ReserveAddresses(uint64_t{1} << 62);
  ASSERT_FALSE(reserved.ok());
  EXPECT_EQ(reserved.status().code(), OFFLOAD_OUT_OF_HOST_MEMORY);
  EXPECT_NE(reserved.status().message().find("4611686018427387904 bytes"), std::string::npos);
}

TEST(ReserveAddressesDeathTest, FaultsOnReadAndWriteAtBothEnds) {
  const uint64_t bytes = 3 * PageBytes();
  Result<void*> reserved = ReserveAddresses(bytes);
  ASSERT_TRUE(reserved.ok());
  volatile char* data = static_cast<char*>(reserved.value());
  EXPECT_DEATH((void)data[0], "");
  EXPECT_DEATH((void)data[bytes - 1], "");
  EXPECT_DEATH(data[0] = 1, "");
  EXPECT_DEATH(data[bytes - 1] = 1, "");
  UnmapPages(reserved.value(), bytes);
}

// --- Bytes available ---

TEST(AvailableBytesTest, IsSomethingAndAtMostAllMemoryHere) {
  const uint64_t all = static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * PageBytes();
  EXPECT_GT(AvailableBytes(), 0u);
  EXPECT_LE(AvailableBytes(), all);
}

TEST(AvailableBytesTest, NothingReadableIsNoLimit) {
  const FakeRoot root;
  EXPECT_EQ(AvailableBytes(root.path()), UINT64_MAX);
}

TEST(AvailableBytesTest, WithoutCgroupIsWhatTheKernelSays) {
  const FakeRoot root;
  root.Write("/proc/meminfo",
             "MemTotal:        8000 kB\nMemFree: 1000 kB\nMemAvailable:    3000 kB\n");
  EXPECT_EQ(AvailableBytes(root.path()), 3000u * 1024);
}

TEST(AvailableBytesTest, CgroupLimitLeavesLimitLessUsageAndFileCacheIsFree) {
  const FakeRoot root;
  root.Write("/proc/meminfo", "MemAvailable: 8000 kB\n");
  root.Write("/proc/self/cgroup", "0::/job\n");
  root.Write("/sys/fs/cgroup/job/memory.max", "1000000\n");
  root.Write("/sys/fs/cgroup/job/memory.current", "700000\n");
  EXPECT_EQ(AvailableBytes(root.path()), 300000u);
  root.Write("/sys/fs/cgroup/job/memory.stat",
             "anon 200000\nfile 500000\ninactive_file 300000\nactive_file 100000\n");
  EXPECT_EQ(AvailableBytes(root.path()), 700000u);
  root.Write("/sys/fs/cgroup/job/memory.max", "250000\n");  // lowered below what is in use
  EXPECT_EQ(AvailableBytes(root.path()), 0u);
  root.Write("/sys/fs/cgroup/job/memory.max", "max\n");
  EXPECT_EQ(AvailableBytes(root.path()), 8000u * 1024);
}

TEST(AvailableBytesTest, TheTightestAncestorCounts) {
  const FakeRoot root;
  root.Write("/proc/self/cgroup", "0::/user/job/rank0\n");
  for (const char* group : {"/user", "/user/job", "/user/job/rank0"})
    root.Write(std::string("/sys/fs/cgroup") + group + "/memory.current", "100\n");
  root.Write("/sys/fs/cgroup/user/memory.max", "5000\n");
  root.Write("/sys/fs/cgroup/user/job/memory.max", "1100\n");
  root.Write("/sys/fs/cgroup/user/job/rank0/memory.max", "9000\n");
  EXPECT_EQ(AvailableBytes(root.path()), 1000u);
  root.Write("/sys/fs/cgroup/user/memory.max", "900\n");
  EXPECT_EQ(AvailableBytes(root.path()), 800u);
}

TEST(AvailableBytesTest, ReadsTheOldCgroupToo) {
  const FakeRoot root;
  root.Write("/proc/self/cgroup", "5:cpuset:/x\n4:memory:/job\n0::/\n");
  const std::string group = "/sys/fs/cgroup/memory/job";
  root.Write(group + "/memory.limit_in_bytes", "9223372036854771712\n");  // its word for none
  root.Write(group + "/memory.usage_in_bytes", "4096\n");
  EXPECT_GT(AvailableBytes(root.path()), uint64_t{1} << 60);
  root.Write(group + "/memory.limit_in_bytes", "1000000\n");
  root.Write(group + "/memory.usage_in_bytes", "600000\n");
  root.Write(group + "/memory.stat",
             "inactive_file 7\ntotal_inactive_file 100000\ntotal_active_file 1000\n");
  EXPECT_EQ(AvailableBytes(root.path()), 501000u);
}

// --- CPU limit ---

TEST(CgroupCpuLimitTest, NoFilesNoLimit) {
  const FakeRoot root;
  EXPECT_EQ(CgroupCpuLimit(root.path()), 0u);
  root.Write("/proc/self/cgroup", "0::/job\n");
  EXPECT_EQ(CgroupCpuLimit(root.path()), 0u);
}

TEST(CgroupCpuLimitTest, RoundsUpAndKnowsTheWordMax) {
  const FakeRoot root;
  root.Write("/proc/self/cgroup", "0::/job\n");
  const std::pair<const char*, uint32_t> cases[] = {{"max 100000\n", 0},
                                                    {"100000 100000\n", 1},
                                                    {"100001 100000\n", 2},
                                                    {"1000 100000\n", 1},
                                                    {"6400000 100000\n", 64},
                                                    {"25000 10000\n", 3},
                                                    {"", 0},
                                                    {"nonsense\n", 0},
                                                    {"100000 0\n", 0},
                                                    {"-1 100000\n", 0},
                                                    {"9223372036854775807 1\n", UINT32_MAX}};
  for (const auto& [text, cpus] : cases) {
    root.Write("/sys/fs/cgroup/job/cpu.max", text);
    EXPECT_EQ(CgroupCpuLimit(root.path()), cpus) << text;
  }
}

TEST(CgroupCpuLimitTest, TheTightestAncestorCounts) {
  const FakeRoot root;
  root.Write("/proc/self/cgroup", "0::/user/job/rank0\n");
  root.Write("/sys/fs/cgroup/user/cpu.max", "800000 100000\n");
  root.Write("/sys/fs/cgroup/user/job/cpu.max", "300000 100000\n");
  root.Write("/sys/fs/cgroup/user/job/rank0/cpu.max", "max 100000\n");
  EXPECT_EQ(CgroupCpuLimit(root.path()), 3u);
  root.Write("/sys/fs/cgroup/user/cpu.max", "200000 100000\n");
  EXPECT_EQ(CgroupCpuLimit(root.path()), 2u);
  root.Write("/sys/fs/cgroup/user/job/rank0/cpu.max", "50000 100000\n");
  EXPECT_EQ(CgroupCpuLimit(root.path()), 1u);
}

TEST(CgroupCpuLimitTest, FindsTheContainersLimitUnderAPathOfTheHost) {
  const FakeRoot root;
  root.Write("/sys/fs/cgroup/cpu.max", "200000 100000\n");
  for (const char* path : {"/", "/docker/0123/init", "/../../slice", "/..", ""}) {
    root.Write("/proc/self/cgroup", "0::" + std::string(path) + "\n");
    EXPECT_EQ(CgroupCpuLimit(root.path()), 2u) << path;
  }
}

TEST(CgroupCpuLimitTest, ReadsTheOldCgroupToo) {
  const FakeRoot root;
  root.Write("/proc/self/cgroup", "7:cpuset:/s\n3:cpu,cpuacct:/a/b\n0::/z\n");
  const std::string group = "/sys/fs/cgroup/cpu/a";
  root.Write(group + "/cpu.cfs_period_us", "100000\n");
  root.Write(group + "/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(CgroupCpuLimit(root.path()), 0u);
  root.Write(group + "/cpu.cfs_quota_us", "250000\n");
  EXPECT_EQ(CgroupCpuLimit(root.path()), 3u);
  root.Write("/sys/fs/cgroup/cpu/s/cpu.cfs_period_us", "100000\n");  // the path of cpuset
  root.Write("/sys/fs/cgroup/cpu/s/cpu.cfs_quota_us", "100000\n");
  EXPECT_EQ(CgroupCpuLimit(root.path()), 3u);
  root.Write("/sys/fs/cgroup/unified/z/cpu.max", "100000 100000\n");
  EXPECT_EQ(CgroupCpuLimit(root.path()), 1u);
}

TEST(CgroupCpuLimitTest, OddLinesAreLeftOut) {
  const FakeRoot root;
  root.Write("/sys/fs/cgroup/cpu.max", "200000 100000\n");
  for (const char* text : {"", "\n", "0", "0:", "::", ":", "no colon here\n\n"}) {
    root.Write("/proc/self/cgroup", text);
    const uint32_t cpus = CgroupCpuLimit(root.path());
    EXPECT_EQ(cpus, std::strcmp(text, "::") == 0 ? 2u : 0u) << text;
  }
}

// --- Nodes ---

TEST(NumaNodesTest, ListsOnlineNodesWithTheirCpus) {
  const FakeRoot root;
  root.WriteNodeList("online", "0-1,4");
  root.WriteNode(0, "0-2,8");
  root.WriteNode(1, "4");
  root.WriteNode(4, "");  // memory without CPUs
  const std::vector<NumaNode> nodes = NumaNodes(root.path());
  ASSERT_EQ(nodes.size(), 3u);
  EXPECT_EQ(nodes[0].id, 0u);
  EXPECT_EQ(nodes[0].cpus, (std::vector<uint32_t>{0, 1, 2, 8}));
  EXPECT_EQ(nodes[1].id, 1u);
  EXPECT_EQ(nodes[1].cpus, std::vector<uint32_t>{4});
  EXPECT_EQ(nodes[2].id, 4u);
  EXPECT_TRUE(nodes[2].cpus.empty());
}

TEST(NumaNodesTest, ThreadsOfACoreLieSideBySide) {
  const FakeRoot root;
  root.WriteNodeList("online", "0");
  root.WriteNode(0, "0-2,64-66");
  for (int cpu = 0; cpu < 3; ++cpu)
    for (int thread : {cpu, cpu + 64})
      root.Write(
          "/sys/devices/system/cpu/cpu" + std::to_string(thread) + "/topology/thread_siblings_list",
          std::to_string(cpu) + "," + std::to_string(cpu + 64) + "\n");
  EXPECT_EQ(NumaNodes(root.path())[0].cpus, (std::vector<uint32_t>{0, 64, 1, 65, 2, 66}));
}

TEST(NumaNodesTest, IsEmptyWhereTheSystemDoesNotSay) {
  const FakeRoot root;
  EXPECT_TRUE(NumaNodes(root.path()).empty());
}

TEST(NodeDistanceTest, ReadsTheRowOfOnlineNodes) {
  const FakeRoot root;
  root.WriteNodeList("online", "0,2-3");
  root.WriteNode(2, "0", "20 10 32");
  EXPECT_EQ(NodeDistance(2, 0, root.path()), 20u);
  EXPECT_EQ(NodeDistance(2, 2, root.path()), 10u);
  EXPECT_EQ(NodeDistance(2, 3, root.path()), 32u);
  EXPECT_EQ(NodeDistance(2, 1, root.path()), UINT32_MAX);
  EXPECT_EQ(NodeDistance(0, 2, root.path()), UINT32_MAX);  // a row that is not there
}

TEST(PlaceOfPciDeviceTest, TakesAddressesAsCudaWritesThem) {
  const FakeRoot root;
  root.WritePciDevice("0000:c1:00.0", 3, "24-31");
  const PciPlace place = PlaceOfPciDevice("0000:C1:00.0", root.path());
  EXPECT_EQ(place.node, 3);
  EXPECT_EQ(place.cpus.size(), 8u);
  EXPECT_EQ(PlaceOfPciDevice("0000:c2:00.0", root.path()).node, -1);
  EXPECT_TRUE(PlaceOfPciDevice("0000:c2:00.0", root.path()).cpus.empty());
}

// A machine with two nodes; 1000 MiB are free on node 0, 3000 MiB on node 1, including cache.
void WriteTwoNodesWithMemory(const FakeRoot& root) {
  root.Write("/proc/meminfo", "MemAvailable: 3900000 kB\n");
  root.WriteNodeList("online", "0-1");
  root.WriteNodeList("has_memory", "0-1");
  for (int node = 0; node < 2; ++node) {
    const std::string prefix = "Node " + std::to_string(node) + " ";
    root.Write("/sys/devices/system/node/node" + std::to_string(node) + "/meminfo",
               prefix + "MemTotal:  9999999 kB\n" + prefix +
                   "MemFree:  " + (node == 0 ? "512000" : "2560000") + " kB\n" + prefix +
                   "Active(file):  256000 kB\n" + prefix + "Inactive(file):  256000 kB\n");
  }
}

TEST(AvailableBytesTest, CountsOnlyTheNodesWhoseMemoryIsAllowed) {
  const FakeRoot root;
  WriteTwoNodesWithMemory(root);
  EXPECT_EQ(AvailableBytes(root.path()), 3900000u * uint64_t{1024});
  root.WriteAllowedMemory("0-1");
  EXPECT_EQ(AvailableBytes(root.path()), 3900000u * uint64_t{1024});
  root.WriteAllowedMemory("0");
  EXPECT_EQ(AvailableBytes(root.path()), 1000 * kMiB);
  root.WriteAllowedMemory("1");
  EXPECT_EQ(AvailableBytes(root.path()), 3000 * kMiB);
  root.WriteAllowedMemory("0-127");  // as some kernels list nodes that are not there
  EXPECT_EQ(AvailableBytes(root.path()), 3900000u * uint64_t{1024});
}

// --- Threads ---

TEST(AllowedCpusTest, AgreesWithTheKernelAndFollowsThePin) {
  const std::vector<uint32_t> cpus = AllowedCpus();
  ASSERT_FALSE(cpus.empty());
  EXPECT_TRUE(std::is_sorted(cpus.begin(), cpus.end()));
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    EXPECT_EQ(cpus.size(), static_cast<size_t>(CPU_COUNT(&set)));
    for (uint32_t cpu : cpus) EXPECT_TRUE(CPU_ISSET(cpu, &set));
  }
  std::thread([&] {
    for (uint32_t cpu : cpus) {
      if (!PinThisThread({cpu})) continue;
      EXPECT_EQ(AllowedCpus(), std::vector{cpu});
      EXPECT_EQ(sched_getcpu(), static_cast<int>(cpu));
    }
    EXPECT_TRUE(PinThisThread(cpus));
    EXPECT_EQ(AllowedCpus(), cpus);
  }).join();
}

TEST(PinThisThreadTest, SaysWhenTheSystemRefuses) {
  const std::vector<uint32_t> before = AllowedCpus();
  EXPECT_FALSE(PinThisThread({60000}));
  EXPECT_EQ(AllowedCpus(), before);
}

// The settings that a thread of the library has when it begins.
struct Inside {
  sigset_t blocked;
  char name[64];
  int rounding;
  bool flushes_to_zero;

  void Look() {
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    pthread_getname_np(pthread_self(), name, sizeof(name));
    rounding = fegetround();
    flushes_to_zero = FlushesToZero();
  }
};

TEST(ThreadTest, RunsTheBodyWithSignalsBlockedAndLeavesTheCallersMask) {
  sigset_t before, after;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  Inside inside{};
  Result<Thread> thread = Thread::Start<&Inside::Look>("short", &inside);
  ASSERT_TRUE(thread.ok()) << thread.status().message();
  EXPECT_TRUE(thread.value().joinable());
  thread.value().Join();
  EXPECT_FALSE(thread.value().joinable());
  EXPECT_STREQ(inside.name, "short");
  pthread_sigmask(SIG_SETMASK, nullptr, &after);
  for (int number = 1; number < 32; ++number)
    EXPECT_EQ(sigismember(&before, number), sigismember(&after, number)) << number;
  for (int number : {SIGINT, SIGTERM, SIGHUP, SIGUSR1, SIGUSR2, SIGALRM, SIGPROF, SIGCHLD, SIGPIPE,
                     SIGABRT, SIGRTMIN, SIGRTMAX})
    EXPECT_EQ(sigismember(&inside.blocked, number), 1) << number;
  for (int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS})
    EXPECT_EQ(sigismember(&inside.blocked, number), 0) << number;
}

TEST(ThreadTest, HasTheStandardFloatingPointModeWhateverItsCreatorHas) {
  Inside inside{};
  std::thread([&inside] {
    SetFlushToZero();
    ASSERT_TRUE(FlushesToZero());
    fesetround(FE_UPWARD);
    Result<Thread> thread = Thread::Start<&Inside::Look>("hybridopt/123456789", &inside);
    ASSERT_TRUE(thread.ok()) << thread.status().message();
  }).join();
  EXPECT_FALSE(inside.flushes_to_zero);
  EXPECT_EQ(inside.rounding, FE_TONEAREST);
  EXPECT_STREQ(inside.name, "hybridopt/12345");
}

struct Slow {
  std::atomic<bool> ended = false;
  void Run() {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ended = true;
  }
};

TEST(ThreadTest, IsJoinedWhenItsOwnerIsDestroyedOrGetsAnother) {
  Slow first, second;
  {
    std::vector<Thread> threads;
    threads.push_back(std::move(Thread::Start<&Slow::Run>("first", &first).value()));
    threads.reserve(threads.capacity() + 1);  // moves it
    EXPECT_TRUE(threads[0].joinable());
    threads[0] = std::move(Thread::Start<&Slow::Run>("second", &second).value());
    EXPECT_TRUE(first.ended);
  }
  EXPECT_TRUE(second.ended);
}

}  // namespace
}  // namespace hybridopt::system
