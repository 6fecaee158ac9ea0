// Team: threads for the comparison loops. Each is pinned to a CPU and works on the range that a
// thread of the library begins with.
#pragma once

#include <barrier>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace bench {

class Team {
 public:
  Team(uint32_t threads, bool pinned);
  ~Team();

  // Calls body(begin, end) on every thread with its part of `count` elements, cut at multiples of
  // 64, and returns when all calls have returned.
  void Split(uint64_t count, const std::function<void(uint64_t begin, uint64_t end)>& body);

 private:
  void ThreadMain(uint32_t index);

  const uint32_t size_;
  std::barrier<> begin_;
  std::barrier<> end_;
  uint64_t count_ = 0;
  const std::function<void(uint64_t, uint64_t)>* body_ = nullptr;  // null tells the threads to end
  std::vector<std::thread> threads_;
};

}  // namespace bench
