#include "team.h"

#include <sched.h>

#include <algorithm>

namespace bench {
namespace {

constexpr uint64_t kGrainElements = 64;

// Pins the calling thread to the index-th CPU that this process may use.
void PinThisThread(uint32_t index) {
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &allowed) || index-- > 0) continue;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof(one), &one);
    return;
  }
}

}  // namespace

Team::Team(uint32_t threads, bool pinned) : size_(threads), begin_(threads + 1), end_(threads + 1) {
  for (uint32_t index = 0; index < threads; ++index) {
    threads_.emplace_back([this, index, pinned] {
      if (pinned) PinThisThread(index);
      ThreadMain(index);
    });
  }
}

Team::~Team() {
  body_ = nullptr;
  begin_.arrive_and_wait();
  for (std::thread& thread : threads_) thread.join();
}

void Team::Split(uint64_t count, const std::function<void(uint64_t, uint64_t)>& body) {
  count_ = count;
  body_ = &body;
  begin_.arrive_and_wait();
  end_.arrive_and_wait();
}

void Team::ThreadMain(uint32_t index) {
  while (true) {
    begin_.arrive_and_wait();
    if (body_ == nullptr) return;
    const uint64_t grains = (count_ + kGrainElements - 1) / kGrainElements;
    const uint64_t each = grains / size_, extra = grains % size_;
    const auto cut = [&](uint64_t thread) {
      return std::min(count_, (each * thread + std::min(thread, extra)) * kGrainElements);
    };
    (*body_)(cut(index), cut(index + uint64_t{1}));
    end_.arrive_and_wait();
  }
}

}  // namespace bench
