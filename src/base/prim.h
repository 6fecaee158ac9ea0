// The one door to the operating system. Preconditions are stated here once; everything above is
// portable C++.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"

namespace hybridopt::prim {

// Bytes of a page, where it is not huge.
uint64_t PageBytes();

// Nanoseconds of a clock that only goes forward.
int64_t NowNs();

// Counts forks: a handle made under another value belongs to an ancestor of this process.
uint64_t ForkGeneration();

// Anonymous zero pages, `bytes` > 0, rounded up to whole pages; huge pages are asked for (not
// insisted on) if wanted and when the region has room for one. No page is touched: the first
// toucher places it. OUT_OF_HOST_MEMORY names the bytes.
Result<void*> MapPages(uint64_t bytes, bool huge_pages = true);
void UnmapPages(void* data, uint64_t bytes);

// Address space that faults on any access. UnmapPages gives it back. With huge_pages it starts
// where a huge page may.
Result<void*> ReserveAddresses(uint64_t bytes, bool huge_pages = false);
// Gives reserved addresses memory: zero pages, for every page that the range touches. Pages that
// have memory already keep it.
Status BackPages(void* data, uint64_t bytes);
// Takes the memory of the pages that lie wholly inside the range away again: they fault.
void DiscardPages(void* data, uint64_t bytes);

inline constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
bool HugePagesAvailable();

// Where a function below takes a `root`, it reads <root>/proc and <root>/sys: tests give a tree of
// their own. What cannot be read counts as no limit.

// Bytes this process could still allocate: free memory, and what the cgroup's limit leaves. File
// cache that the kernel would drop counts as free in both. Where this process may not use every
// node's memory, only what its own nodes have.
uint64_t AvailableBytes(const std::string& root = "");

// CPUs in the affinity mask of the calling thread, ascending.
std::vector<uint32_t> AllowedCpus();

// Whole CPUs' worth of time the cgroup grants, rounded up; 0 = no limit.
uint32_t CgroupCpuLimit(const std::string& root = "");

struct NumaNode {
  uint32_t id;
  std::vector<uint32_t> cpus;  // the threads of one core side by side; empty: only memory
};

// The online nodes, ascending; empty if the system does not say.
std::vector<NumaNode> NumaNodes(const std::string& root = "");

// The distance from one node to another, as the firmware tells it; UINT32_MAX if it does not.
uint32_t NodeDistance(uint32_t from, uint32_t to, const std::string& root = "");

// Where a PCI device is plugged in: its node, or -1 if that is not known, and the CPUs near it.
struct PciPlace {
  int64_t node;
  std::vector<uint32_t> cpus;
};
PciPlace PlaceOfPciDevice(const std::string& id, const std::string& root = "");

// One of the library's own threads. Its owner joins it, by Join or by destroying it. The
// application's signal handlers never run on it: all signals are blocked but those that a fault of
// the thread itself raises, which must still reach a crash reporter. Its floating-point mode is the
// standard one: a thread inherits its creator's flush-to-zero setting and rounding mode, which
// would change bits.
class Thread {
 public:
  Thread() = default;  // no thread
  Thread(Thread&& other) noexcept;
  Thread& operator=(Thread&& other) noexcept;
  ~Thread() { Join(); }

  // Calls (object->*kBody)() on a new thread. `name` is shown by debuggers, which keep 15 bytes of
  // it. The object must live until Join has returned. kBody must not throw: it catches
  // std::bad_alloc wherever it allocates, because nobody else can.
  // OUT_OF_HOST_MEMORY where the system refuses another thread.
  template <auto kBody, typename Object>
  static Result<Thread> Start(const char* name, Object* object) {
    return StartBody(
        name, [](void* self) { (static_cast<Object*>(self)->*kBody)(); }, object);
  }

  bool joinable() const { return thread_.has_value(); }
  // Waits until the thread has ended; returns at once where there is none. In a child of fork,
  // which does not have its parent's threads, it returns at once too.
  void Join();

 private:
  static Result<Thread> StartBody(const char* name, void (*body)(void*), void* argument);

  std::optional<pthread_t> thread_;
  uint64_t fork_generation_ = 0;  // of the process that started it
};

// Ties the calling thread to `cpus` (not empty). False where the system refuses.
bool PinThisThread(const std::vector<uint32_t>& cpus);

// Length of the calling thread's SVE vectors; 0 where the CPU or the system has none.
uint64_t SveVectorBytes();

}  // namespace hybridopt::prim
