// CallThread: a call on a thread of its own, and whether the thread sleeps in it.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "offload.h"

namespace hybridopt::fault {

class CallThread {
 public:
  explicit CallThread(std::function<int32_t()> call)
      : thread_([this, call = std::move(call)] {
          id_ = static_cast<int>(syscall(SYS_gettid));
          status_ = call();
          if (status_ != OFFLOAD_OK) error_ = offload_last_error();
          returned_ = true;
        }) {}
  ~CallThread() {
    if (thread_.joinable()) thread_.join();
  }

  // Waits until the thread sleeps in its call, or the call has returned.
  void AwaitAsleep() const {
    while (!returned_ && !IsAsleep()) std::this_thread::yield();
  }
  bool returned() const { return returned_; }

  int32_t Join() {
    thread_.join();
    return status_;
  }
  const std::string& error() const { return error_; }

 private:
  // Looks twice, since a thread may sleep for a moment for a lock.
  bool IsAsleep() const {
    for (int look = 0; look < 3; ++look) {
      if (id_ == 0 || State() != 'S') return false;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    return true;
  }
  char State() const {
    std::ifstream file("/proc/self/task/" + std::to_string(id_) + "/stat");
    std::string text;
    std::getline(file, text);
    const size_t name_end = text.rfind(')');
    return name_end == std::string::npos ? '?' : text[name_end + 2];
  }

  std::atomic<int> id_ = 0;
  std::atomic<bool> returned_ = false;
  int32_t status_ = OFFLOAD_OK;
  std::string error_;
  std::thread thread_;
};

}  // namespace hybridopt::fault
