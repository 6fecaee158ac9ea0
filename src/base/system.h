// The library's only access to the operating system. Preconditions are stated here; all code above
// is portable C++.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/status.h"

namespace hybridopt::system {

// Rounds `value` up to a multiple of `multiple`. The result wraps around if it exceeds 2^64 - 1.
constexpr uint64_t RoundUp(uint64_t value, uint64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Bytes of a page that is not huge.
uint64_t PageBytes();

// Nanoseconds of a clock that only goes forward.
int64_t NowNs();

// The number of forks: a handle that was made under another value belongs to an ancestor of this
// process.
uint64_t ForkGeneration();

// Maps anonymous zero pages for `bytes` > 0, rounded up to whole pages. With huge_pages it asks for
// huge pages if the region is large enough for one; the system may refuse them. No page is touched:
// the first thread that touches a page decides its node. OUT_OF_HOST_MEMORY names the bytes.
Result<void*> MapPages(uint64_t bytes, bool huge_pages = true);
void UnmapPages(void* data, uint64_t bytes);

// Address space that faults on any access. UnmapPages gives it back. With huge_pages it is aligned
// to huge pages.
Result<void*> ReserveAddresses(uint64_t bytes, bool huge_pages = false);
// Gives reserved addresses memory: zero pages, for every page that the range touches. Pages that
// have memory already keep it.
Status BackPages(void* data, uint64_t bytes);
// Frees the memory of the pages that are wholly inside the range: they fault again.
void DiscardPages(void* data, uint64_t bytes);

inline constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
bool HugePagesAvailable();

// A function with a parameter `root` reads <root>/proc and <root>/sys, so that tests can give a
// tree of their own. A file that cannot be read counts as no limit.

// Bytes that this process can still allocate: the smaller of the free memory and of what the
// cgroup's limit leaves. File cache that the kernel would drop counts as free in both. If this
// process may not use every node's memory, only its own nodes count.
uint64_t AvailableBytes(const std::string& root = "");

// CPUs in the affinity mask of the calling thread, ascending.
std::vector<uint32_t> AllowedCpus();

// The CPU time that the cgroup grants, in CPUs, rounded up; 0: no limit.
uint32_t CgroupCpuLimit(const std::string& root = "");

struct NumaNode {
  uint32_t id;
  std::vector<uint32_t> cpus;  // cores' threads side by side; empty: memory only
};

// The online nodes, ascending; empty if the system does not say.
std::vector<NumaNode> NumaNodes(const std::string& root = "");

// The distance from one node to another, as the firmware gives it; UINT32_MAX if it gives none.
uint32_t NodeDistance(uint32_t from, uint32_t to, const std::string& root = "");

// The node of a PCI device, or -1 if that is not known, and the CPUs near it.
struct PciPlace {
  int64_t node;
  std::vector<uint32_t> cpus;
};
PciPlace PlaceOfPciDevice(const std::string& id, const std::string& root = "");

// One of the library's own threads. Its owner joins it, by Join or by destroying it. The
// application's signal handlers never run on it: the thread blocks all signals except those that a
// fault of the thread itself raises, which must still reach a crash reporter. A thread inherits its
// creator's flush-to-zero setting and rounding mode, which would change bits; so this thread sets
// the standard floating-point mode.
class Thread {
 public:
  Thread() = default;  // no thread
  Thread(Thread&& other) noexcept;
  Thread& operator=(Thread&& other) noexcept;
  ~Thread() { Join(); }

  // Calls (object->*kBody)() on a new thread. `name` is shown by debuggers, which keep 15 bytes of
  // it. The object must live until Join has returned. kBody must not throw: if it allocates it must
  // catch std::bad_alloc, because no caller can. OUT_OF_HOST_MEMORY where the system refuses
  // another thread.
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

// Starts threads, as Thread::Start does, until `count` of them run. If the system refuses a thread,
// fewer threads run; only if there is none at all this is an error. The caller has reserved room in
// *threads, so that appending a thread cannot fail.
template <auto kBody, typename Object>
Status StartThreads(const char* name, Object* object, size_t count, std::vector<Thread>* threads) {
  while (threads->size() < count) {
    Result<Thread> thread = Thread::Start<kBody>(name, object);
    if (!thread.ok()) return threads->empty() ? thread.status() : Status();
    threads->push_back(std::move(thread.value()));
  }
  return {};
}

// Binds the calling thread to `cpus` (not empty). False if the system refuses.
bool PinThisThread(const std::vector<uint32_t>& cpus);

// Lets the system wake the calling thread at most slack_ns later than its sleeps ask for. The
// system's default is 50 us. False if the system refuses.
bool SetTimerSlack(uint64_t slack_ns);

// Length of the calling thread's SVE vectors; 0 if the CPU or the system has none.
uint64_t SveVectorBytes();

}  // namespace hybridopt::system
