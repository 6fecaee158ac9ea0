// HeldFiles: a disk that stops at two points of a save until the test lets it go on.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>

#include "base/files.h"

namespace hybridopt {

class HeldFiles : public system::Files {
 public:
  int Allocate(int file, uint64_t bytes) override {
    WaitWhile(before_reading);
    return is_broken ? EIO : Files::Allocate(file, bytes);
  }
  int Truncate(int file, uint64_t bytes) override {
    WaitWhile(before_end);
    return Files::Truncate(file, bytes);
  }
  std::atomic<bool> before_reading = false;  // no byte of state has been read
  std::atomic<bool> before_end = false;      // all has been read, and the save goes on
  std::atomic<bool> is_broken = false;       // the save fails where it has not read any state

 private:
  static void WaitWhile(const std::atomic<bool>& held) {
    while (held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
};

}  // namespace hybridopt
