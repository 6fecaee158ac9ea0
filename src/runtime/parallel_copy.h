// Copies in host memory, divided among the workers.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>

#include "runtime/worker_pool.h"

namespace hybridopt {

struct HostCopy {
  const std::byte* from;
  std::byte* to;
  uint64_t bytes;
};

// Each worker copies its part of all bytes.
inline Status CopyInParallel(WorkerPool& workers, std::span<const HostCopy> copies) {
  constexpr uint64_t kPageBytes = 4096;
  uint64_t total_bytes = 0;
  for (const HostCopy& copy : copies) total_bytes += copy.bytes;
  if (total_bytes == 0) return {};
  return workers.Run([&](uint32_t worker) {
    const WorkRange range = RangeOfWorker(total_bytes, kPageBytes, worker, workers.threads());
    uint64_t first = 0;  // the copy's first byte, counted through all copies
    for (const HostCopy& copy : copies) {
      const uint64_t begin = std::max(range.begin, first);
      const uint64_t end = std::min(range.end, first + copy.bytes);
      if (begin < end)
        std::memcpy(copy.to + (begin - first), copy.from + (begin - first), end - begin);
      first += copy.bytes;
    }
  });
}

}  // namespace hybridopt
