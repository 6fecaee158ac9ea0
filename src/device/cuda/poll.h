// Waits with a bound. CUDA's own waits have no timeout, and CUDA does not call host callbacks after
// an error.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <thread>

#include "base/status.h"
#include "base/system.h"

namespace hybridopt::cuda {

// Calls done() (a Result<bool>) until it returns true or fails, or timeout_ns has passed (negative:
// no limit). At first it polls without pauses, since the copies of a chunk take about 50 us, then
// with pauses.
template <typename Done>
Result<bool> PollUntil(Done&& done, int64_t timeout_ns) {
  constexpr int64_t kSpinNs = 100'000;
  constexpr int64_t kNapNsMax = 50'000;
  const int64_t begin_ns = system::NowNs();
  while (true) {
    Result<bool> reached = done();
    if (!reached.ok() || reached.value()) return reached;
    const int64_t waited_ns = system::NowNs() - begin_ns;
    if (timeout_ns >= 0 && waited_ns >= timeout_ns) return false;
    if (waited_ns < kSpinNs) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(waited_ns / 8, kNapNsMax)));
    }
  }
}

}  // namespace hybridopt::cuda
