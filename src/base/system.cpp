// The operating system's calls on Linux.
#include "base/system.h"

#include <fenv.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <cinttypes>
#include <climits>
#include <cstdio>
#include <iterator>
#include <memory>
#include <new>
#include <sstream>
#include <utility>

#include "base/check.h"
#include "base/files.h"
#include "base/function_ref.h"

namespace hybridopt::system {
namespace {

// --- Pages ---

// Saturates at the last whole page, a size that no system grants.
uint64_t RoundUpToPages(uint64_t bytes) {
  const uint64_t mask = PageBytes() - 1;
  return bytes > UINT64_MAX - mask ? ~mask : (bytes + mask) & ~mask;
}

// Null if the system refuses; errno says why.
void* Map(uint64_t bytes, int protection, int flags) {
  void* data = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  return data == MAP_FAILED ? nullptr : data;
}

// Huge pages need an aligned start, which mmap does not guarantee: maps more bytes and unmaps both
// ends.
void* MapForHugePages(uint64_t bytes, int protection, int flags) {
  const uint64_t slack = kHugePageBytes - PageBytes();
  void* mapped = Map(bytes > UINT64_MAX - slack ? bytes : bytes + slack, protection, flags);
  if (mapped == nullptr) return nullptr;
  const uint64_t before = -reinterpret_cast<uintptr_t>(mapped) & (kHugePageBytes - 1);
  char* data = static_cast<char*>(mapped) + before;
  if (before > 0) UnmapPages(mapped, before);
  if (before < slack) UnmapPages(data + bytes, slack - before);
  madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}

Status Refused(uint64_t bytes) {
  const std::string reason = ErrorText(errno);  // before another call sets errno
  return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY,
                       "host memory: asked for %" PRIu64
                       " bytes, the system refused (%s); about %" PRIu64
                       " bytes are available. Ask for less, free memory, or raise the limit of the "
                       "container (cgroup) or of the process (ulimit -v)",
                       bytes, reason.c_str(), AvailableBytes());
}

// --- Small system files ---

// The whole text; empty if the file cannot be read.
std::string ReadText(const std::string& path) {
  std::string text;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"),
                                                             std::fclose);
  if (file == nullptr) return text;
  char buffer[4096];
  while (const size_t bytes = std::fread(buffer, 1, sizeof(buffer), file.get()))
    text.append(buffer, bytes);
  return text;
}

// The number that follows the word `key` in a text; false if there is none.
bool FindNumber(const std::string& text, const std::string& key, uint64_t* number) {
  std::istringstream words(text);
  for (std::string word; words >> word;)
    if (word == key) return static_cast<bool>(words >> *number);
  return false;
}

// The one number of a file; false if it is absent or a word such as "max".
bool ReadNumber(const std::string& path, int64_t* number) {
  return static_cast<bool>(std::istringstream(ReadText(path)) >> *number);
}

// Calls visit(directory) for the cgroup of this process that has `controller` and for each of its
// ancestors. In a container the path may not exist below its own mount. The walk still ends at the
// mount, which has the container's own limits.
void ForEachCgroup(const std::string& root, const std::string& controller,
                   FunctionRef<void(const std::string&)> visit) {
  std::istringstream lines(ReadText(root + "/proc/self/cgroup"));
  for (std::string line; std::getline(lines, line);) {  // "4:memory:/path", or "0::/path" in v2
    const size_t first = line.find(':');
    const size_t second = line.find(':', first == std::string::npos ? first : first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool unified = controllers == ",,";
    if (!unified && controllers.find("," + controller + ",") == std::string::npos) continue;
    std::string path = line.substr(second + 1);
    while (true) {
      while (!path.empty() && path.back() == '/') path.pop_back();
      const std::string mount = root + "/sys/fs/cgroup";
      if (unified) visit(mount + path);
      visit(mount + (unified ? "/unified" : "/" + controller) + path);
      if (path.empty()) break;
      path.resize(path.rfind('/') == std::string::npos ? 0 : path.rfind('/'));
    }
  }
}

// The bytes that the memory limit of one cgroup leaves; UINT64_MAX without a limit.
uint64_t CgroupBytesLeft(const std::string& directory) {
  const struct {
    const char *limit, *usage, *cache_prefix;
  } versions[] = {{"/memory.max", "/memory.current", ""},
                  {"/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_"}};
  for (const auto& version : versions) {
    int64_t limit = 0, usage = 0;
    if (!ReadNumber(directory + version.limit, &limit)) continue;
    if (!ReadNumber(directory + version.usage, &usage)) continue;
    const std::string stat = ReadText(directory + "/memory.stat");
    for (const char* list : {"active_file", "inactive_file"}) {
      uint64_t cache = 0;
      if (FindNumber(stat, std::string(version.cache_prefix) + list, &cache))
        usage -= static_cast<int64_t>(cache);
    }
    return static_cast<uint64_t>(std::max<int64_t>(limit - std::max<int64_t>(usage, 0), 0));
  }
  return UINT64_MAX;
}

// CPUs granted to one cgroup, rounded up; 0 without a limit.
uint32_t CgroupCpus(const std::string& directory) {
  int64_t quota = 0, period = 0;
  std::istringstream unified(ReadText(directory + "/cpu.max"));  // "200000 100000", "max 100000"
  const bool limited =
      (unified >> quota >> period) || (ReadNumber(directory + "/cpu.cfs_quota_us", &quota) &&
                                       ReadNumber(directory + "/cpu.cfs_period_us", &period));
  if (!limited || quota <= 0 || period <= 0) return 0;
  return static_cast<uint32_t>(
      std::min<int64_t>(quota / period + (quota % period != 0), UINT32_MAX));
}

// Reads the kernel's list format, "0-3,8,10-11".
std::vector<uint32_t> ParseList(const std::string& text) {
  std::vector<uint32_t> numbers;
  std::istringstream ranges(text);
  for (std::string range; std::getline(ranges, range, ',');) {
    unsigned first = 0, last = 0;
    const int fields = std::sscanf(range.c_str(), "%u-%u", &first, &last);
    if (fields < 1) continue;
    if (fields == 1) last = first;
    for (uint64_t number = first; number <= last; ++number)
      numbers.push_back(static_cast<uint32_t>(number));
  }
  return numbers;
}

// --- Nodes ---

constexpr char kNodes[] = "/sys/devices/system/node/";

std::string NodePath(uint32_t node, const std::string& root) {
  return root + kNodes + "node" + std::to_string(node);
}

// The nodes that have memory, and those of them whose memory this process may use.
struct MemoryNodes {
  std::vector<uint32_t> all;
  std::vector<uint32_t> allowed;
};

MemoryNodes ReadMemoryNodes(const std::string& root) {
  MemoryNodes nodes{ParseList(ReadText(root + kNodes + "has_memory")), {}};
  if (nodes.all.empty()) nodes.all = ParseList(ReadText(root + kNodes + "online"));
  const std::string status = ReadText(root + "/proc/self/status");
  const std::string key = "Mems_allowed_list:";
  const size_t at = status.find(key);
  if (at == std::string::npos) return {nodes.all, nodes.all};
  const size_t begin = at + key.size();
  const auto listed = ParseList(status.substr(begin, status.find('\n', begin) - begin));
  std::set_intersection(nodes.all.begin(), nodes.all.end(), listed.begin(), listed.end(),
                        std::back_inserter(nodes.allowed));
  return nodes;
}

// Bytes that can still be allocated on one node; UINT64_MAX if the system does not say.
uint64_t NodeAvailableBytes(uint32_t node, const std::string& root) {
  const std::string text = ReadText(NodePath(node, root) + "/meminfo");  // "Node 0 MemFree: 1 kB"
  uint64_t sum = 0, kibibytes = 0;
  if (!FindNumber(text, "MemFree:", &sum)) return UINT64_MAX;
  for (const char* cache : {"Active(file):", "Inactive(file):"})
    if (FindNumber(text, cache, &kibibytes)) sum += kibibytes;
  return sum * 1024;
}

// The free bytes of the nodes that this process may use; UINT64_MAX if it may use all nodes.
uint64_t AllowedNodesBytes(const std::string& root) {
  const MemoryNodes nodes = ReadMemoryNodes(root);
  if (nodes.allowed.empty() || nodes.allowed == nodes.all) return UINT64_MAX;
  uint64_t sum = 0;
  for (uint32_t node : nodes.allowed) {
    const uint64_t bytes = NodeAvailableBytes(node, root);
    if (bytes == UINT64_MAX) return UINT64_MAX;
    sum += bytes;
  }
  return sum;
}

// Sorts CPUs so that the threads of one core are neighbours. Then a contiguous part of the list has
// mostly whole cores.
void SortByCore(std::vector<uint32_t>& cpus, const std::string& root) {
  std::vector<std::pair<uint32_t, uint32_t>> keys;  // the first thread of the core, the CPU
  for (uint32_t cpu : cpus) {
    const auto siblings =
        ParseList(ReadText(root + "/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                           "/topology/thread_siblings_list"));
    keys.emplace_back(siblings.empty() ? cpu : siblings.front(), cpu);
  }
  std::sort(keys.begin(), keys.end());
  std::transform(keys.begin(), keys.end(), cpus.begin(),
                 [](const auto& key) { return key.second; });
}

// --- CPU sets ---

// A cpu_set_t of any size: a machine may have more CPUs than the fixed type holds.
class CpuSet {
 public:
  explicit CpuSet(uint32_t count) : bytes_(CPU_ALLOC_SIZE(count)), words_(bytes_ / sizeof(long)) {}
  cpu_set_t* get() { return reinterpret_cast<cpu_set_t*>(words_.data()); }
  size_t bytes() const { return bytes_; }

 private:
  size_t bytes_;
  std::vector<long> words_;
};

constexpr uint32_t kCpusMax = 1 << 16;

std::atomic<uint64_t> fork_generation{0};

// Registered when the library is loaded, because later there may be no memory for it.
const int fork_error = pthread_atfork(
    nullptr, nullptr, [] { fork_generation.fetch_add(1, std::memory_order_relaxed); });

// --- Threads ---

struct StartArguments {
  char name[16];
  void (*body)(void*);
  void* argument;
};

void* RunThread(void* start) {
  const StartArguments arguments = *static_cast<StartArguments*>(start);
  delete static_cast<StartArguments*>(start);
  pthread_setname_np(pthread_self(), arguments.name);
  fesetenv(FE_DFL_ENV);
  arguments.body(arguments.argument);
  return nullptr;
}

// Throws nothing: some callers have threads to stop, and others are threads of the library.
Result<pthread_t> CreateThread(void* (*body)(void*), void* argument) try {
  sigset_t blocked, before;
  sigfillset(&blocked);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) sigdelset(&blocked, fault);
  pthread_sigmask(SIG_BLOCK, &blocked, &before);  // a thread inherits its creator's mask
  pthread_t thread;
  const int error = pthread_create(&thread, nullptr, body, argument);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (error == 0) return thread;
  return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY,
                       "the system refused another thread (%s): raise the limit of threads (ulimit "
                       "-u, cgroup pids.max) or of memory, or ask for fewer threads",
                       ErrorText(error).c_str());
} catch (const std::bad_alloc&) {
  return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY, "out of host memory for a thread");
}

}  // namespace

uint64_t PageBytes() {
  static const uint64_t bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

int64_t NowNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

uint64_t ForkGeneration() {
  HYBRIDOPT_CHECK(fork_error == 0);
  return fork_generation.load(std::memory_order_relaxed);
}

Result<void*> MapPages(uint64_t bytes, bool huge_pages) {
  HYBRIDOPT_CHECK(bytes > 0);
  const uint64_t whole = RoundUpToPages(bytes);
  void* data = nullptr;
  if (huge_pages && whole >= kHugePageBytes) {
    data = MapForHugePages(whole, PROT_READ | PROT_WRITE, 0);
  } else {
    data = Map(whole, PROT_READ | PROT_WRITE, 0);
    // The system may be configured to give huge pages without a request.
    if (data != nullptr && !huge_pages) madvise(data, whole, MADV_NOHUGEPAGE);
  }
  if (data == nullptr) return Refused(bytes);
  return data;
}

void UnmapPages(void* data, uint64_t bytes) {
  HYBRIDOPT_CHECK(munmap(data, RoundUpToPages(bytes)) == 0);
}

Result<void*> ReserveAddresses(uint64_t bytes, bool huge_pages) {
  HYBRIDOPT_CHECK(bytes > 0);
  const uint64_t whole = RoundUpToPages(bytes);
  const bool aligned = huge_pages && whole >= kHugePageBytes;
  void* data = aligned ? MapForHugePages(whole, PROT_NONE, MAP_NORESERVE)
                       : Map(whole, PROT_NONE, MAP_NORESERVE);
  if (data == nullptr) return Refused(bytes);
  if (!huge_pages) madvise(data, whole, MADV_NOHUGEPAGE);
  return data;
}

Status BackPages(void* data, uint64_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / PageBytes() * PageBytes();
  const uintptr_t end = reinterpret_cast<uintptr_t>(data) + bytes;
  if (bytes == 0) return {};
  void* const first = reinterpret_cast<void*>(begin);
  if (mprotect(first, RoundUpToPages(end - begin), PROT_READ | PROT_WRITE) != 0)
    return Refused(bytes);
  return {};
}

void DiscardPages(void* data, uint64_t bytes) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = RoundUpToPages(address);
  const uintptr_t end = (address + bytes) / PageBytes() * PageBytes();
  if (begin >= end) return;
  void* const first = reinterpret_cast<void*>(begin);
  // Both calls only free memory; if the system refuses, the memory stays until the range is
  // unmapped.
  (void)madvise(first, end - begin, MADV_DONTNEED);
  (void)mprotect(first, end - begin, PROT_NONE);
}

bool HugePagesAvailable() {
  const std::string mode = ReadText("/sys/kernel/mm/transparent_hugepage/enabled");
  return mode.find("[always]") != std::string::npos || mode.find("[madvise]") != std::string::npos;
}

uint64_t AvailableBytes(const std::string& root) {
  uint64_t bytes = UINT64_MAX, kibibytes = 0;
  if (FindNumber(ReadText(root + "/proc/meminfo"), "MemAvailable:", &kibibytes))
    bytes = kibibytes * 1024;
  ForEachCgroup(root, "memory", [&](const std::string& directory) {
    bytes = std::min(bytes, CgroupBytesLeft(directory));
  });
  return std::min(bytes, AllowedNodesBytes(root));
}

std::vector<uint32_t> AllowedCpus() {
  for (uint32_t count = CPU_SETSIZE; count <= kCpusMax; count *= 2) {
    CpuSet set(count);
    if (sched_getaffinity(0, set.bytes(), set.get()) != 0) continue;  // EINVAL: set too small
    std::vector<uint32_t> cpus;
    for (uint32_t cpu = 0; cpu < count; ++cpu)
      if (CPU_ISSET_S(cpu, set.bytes(), set.get())) cpus.push_back(cpu);
    return cpus;
  }
  return {0};  // the system does not say; every machine has a CPU 0
}

uint32_t CgroupCpuLimit(const std::string& root) {
  uint32_t limit = 0;
  ForEachCgroup(root, "cpu", [&](const std::string& directory) {
    const uint32_t cpus = CgroupCpus(directory);
    if (cpus != 0) limit = limit == 0 ? cpus : std::min(limit, cpus);
  });
  return limit;
}

std::vector<NumaNode> NumaNodes(const std::string& root) {
  std::vector<NumaNode> nodes;
  for (uint32_t id : ParseList(ReadText(root + kNodes + "online"))) {
    nodes.push_back({id, ParseList(ReadText(NodePath(id, root) + "/cpulist"))});
    SortByCore(nodes.back().cpus, root);
  }
  return nodes;
}

uint32_t NodeDistance(uint32_t from, uint32_t to, const std::string& root) {
  // One number for each online node, in their order.
  const auto online = ParseList(ReadText(root + kNodes + "online"));
  std::istringstream row(ReadText(NodePath(from, root) + "/distance"));
  for (uint32_t node : online) {
    uint32_t distance = 0;
    if (!(row >> distance)) break;
    if (node == to) return distance;
  }
  return UINT32_MAX;
}

PciPlace PlaceOfPciDevice(const std::string& id, const std::string& root) {
  // CUDA writes hexadecimal digits in capitals, the kernel in small letters.
  std::string directory = id;
  for (char& letter : directory)
    letter = static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
  directory = root + "/sys/bus/pci/devices/" + directory;
  PciPlace place{-1, ParseList(ReadText(directory + "/local_cpulist"))};
  if (!ReadNumber(directory + "/numa_node", &place.node)) place.node = -1;
  return place;
}

Thread::Thread(Thread&& other) noexcept
    : thread_(std::exchange(other.thread_, std::nullopt)),
      fork_generation_(other.fork_generation_) {}

Thread& Thread::operator=(Thread&& other) noexcept {
  Join();
  thread_ = std::exchange(other.thread_, std::nullopt);
  fork_generation_ = other.fork_generation_;
  return *this;
}

Result<Thread> Thread::StartBody(const char* name, void (*body)(void*), void* argument) {
  std::unique_ptr<StartArguments> start(new (std::nothrow) StartArguments);
  if (start == nullptr)
    return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY, "out of host memory for a thread \"%s\"",
                         name);
  std::snprintf(start->name, sizeof(start->name), "%s", name);
  start->body = body;
  start->argument = argument;
  Thread thread;
  thread.fork_generation_ = ForkGeneration();
  HYBRIDOPT_ASSIGN(thread.thread_, CreateThread(RunThread, start.get()));
  (void)start.release();  // the thread deletes it
  return thread;
}

void Thread::Join() {
  if (thread_.has_value() && fork_generation_ == ForkGeneration())
    HYBRIDOPT_CHECK(pthread_join(*thread_, nullptr) == 0);
  thread_.reset();
}

bool PinThisThread(const std::vector<uint32_t>& cpus) {
  CpuSet set(*std::max_element(cpus.begin(), cpus.end()) + 1);
  for (uint32_t cpu : cpus) CPU_SET_S(cpu, set.bytes(), set.get());
  return sched_setaffinity(0, set.bytes(), set.get()) == 0;
}

bool SetTimerSlack(uint64_t slack_ns) { return prctl(PR_SET_TIMERSLACK, slack_ns) == 0; }

uint64_t SveVectorBytes() {
  const int answer = prctl(PR_SVE_GET_VL);
  return answer < 0 ? 0 : static_cast<uint64_t>(answer & PR_SVE_VL_LEN_MASK);
}

}  // namespace hybridopt::system
