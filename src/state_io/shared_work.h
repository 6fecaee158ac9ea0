// ShareWork: the workers share elements, unless there are so few elements that one thread is
// faster.
#pragma once

#include <cstdint>

#include "base/function_ref.h"
#include "machine/context.h"
#include "runtime/work_pieces.h"

namespace hybridopt {

// Calls work(begin, end) for parts of [0, count) that are cut at multiples of `grain`.
inline Status ShareWork(Context& context, uint64_t count, uint64_t element_bytes,
                        FunctionRef<void(uint64_t begin, uint64_t end)> work,
                        uint64_t grain = kWorkGrainElements) {
  // The fewest bytes for which it is worth waking the workers.
  constexpr uint64_t kSharedBytes = uint64_t{256} << 10;
  if (count * element_bytes < kSharedBytes) {
    if (count > 0) work(0, count);
    return {};
  }
  const uint32_t workers = context.workers().threads();
  return context.workers().Run([&](uint32_t worker) {
    const WorkRange part = RangeOfWorker(count, grain, worker, workers);
    if (part.begin < part.end) work(part.begin, part.end);
  });
}

}  // namespace hybridopt
