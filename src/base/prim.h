// The one door to the operating system. Preconditions are stated here once; everything above is
// portable C++.
#pragma once

#include <pthread.h>

#include <cstdint>
#include <string>
#include <vector>

#include "base/status.h"

namespace hybridopt::prim {

// Nanoseconds of a clock that only goes forward.
int64_t NowNs();

// Counts forks: a handle made under another value belongs to an ancestor of this process.
uint64_t ForkGeneration();

// Anonymous zero pages, `bytes` > 0, rounded up to whole pages; huge pages are asked for (not
// insisted on) when the region has room for one. No page is touched: the first toucher places it.
// OUT_OF_HOST_MEMORY names the bytes.
Result<void*> MapPages(uint64_t bytes);
void UnmapPages(void* data, uint64_t bytes);

// Address space that faults on any access. UnmapPages gives it back.
Result<void*> ReserveAddresses(uint64_t bytes);

inline constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
bool HugePagesAvailable();

// Where a function below takes a `root`, it reads <root>/proc and <root>/sys: tests give a tree of
// their own. What cannot be read counts as no limit.

// Bytes this process could still allocate: free memory, and what the cgroup's limit leaves. File
// cache that the kernel would drop counts as free in both.
uint64_t AvailableBytes(const std::string& root = "");

// CPUs in the affinity mask of the calling thread, ascending.
std::vector<uint32_t> AllowedCpus();

// Whole CPUs' worth of time the cgroup grants, rounded up; 0 = no limit.
uint32_t CgroupCpuLimit(const std::string& root = "");

// NUMA nodes that have a CPU of `cpus`; 1 if the system does not say.
uint32_t NodeCount(const std::vector<uint32_t>& cpus, const std::string& root = "");

// Starts a thread that runs body(argument). The application's signal handlers never run on it: all
// signals are blocked but those that a fault of the thread itself raises, which must still reach a
// crash reporter. OUT_OF_HOST_MEMORY where the system refuses another thread.
Result<pthread_t> StartThread(void* (*body)(void*), void* argument);
void JoinThread(pthread_t thread);

// Ties the calling thread to `cpus` (not empty). False where the system refuses.
bool PinThisThread(const std::vector<uint32_t>& cpus);

// Gives the calling thread the standard floating-point mode: threads inherit their creator's
// flush-to-zero setting and rounding mode, which would change bits.
void ResetFloatingPointMode();

// Names the calling thread for debuggers; at most 15 bytes are kept.
void NameThisThread(const char* name);

}  // namespace hybridopt::prim
