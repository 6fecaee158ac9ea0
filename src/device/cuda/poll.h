// Bounded waits. CUDA's own have no timeout, and its host callbacks are not called after an error.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>

#include "base/prim.h"
#include "base/status.h"

namespace hybridopt::cuda {

// Calls done() (a Result<bool>) until it is true or fails, or timeout_ns has passed (negative: no
// limit): at first as fast as it can, since copies of a chunk take some 50 us, then with pauses.
template <typename Done>
Result<bool> PollUntil(Done&& done, int64_t timeout_ns) {
  constexpr int64_t kSpinNs = 100'000;
  constexpr int64_t kNapNsMax = 50'000;
  const int64_t begin_ns = prim::NowNs();
  while (true) {
    Result<bool> reached = done();
    if (!reached.ok() || reached.value()) return reached;
    const int64_t waited_ns = prim::NowNs() - begin_ns;
    if (timeout_ns >= 0 && waited_ns >= timeout_ns) return false;
    if (waited_ns < kSpinNs) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(waited_ns / 8, kNapNsMax)));
    }
  }
}

}  // namespace hybridopt::cuda
