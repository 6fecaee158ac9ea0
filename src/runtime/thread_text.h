// ThreadText: one text for each thread, for example the text of its last failure. A thread keeps
// its buffer, because failures also occur when memory has run out.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "base/status.h"
#include "runtime/thread_value.h"

namespace hybridopt {

class ThreadText {
 public:
  const char* text() const {
    const void* const buffer = buffer_.get();
    return buffer != nullptr ? static_cast<const char*>(buffer) : "";
  }
  void Set(const char* text) {
    void* buffer = buffer_.get();
    if (buffer == nullptr || buffer == no_memory_) {
      buffer = std::malloc(kBytes);
      if (!buffer_.Set(buffer != nullptr ? buffer : no_memory_)) {
        std::free(buffer);
        return;
      }
    }
    if (buffer != nullptr) std::snprintf(static_cast<char*>(buffer), kBytes, "%s", text);
  }

 private:
  static constexpr size_t kBytes = Status::kTextBytesMax + 1;
  static void Free(void* buffer) {
    if (buffer != no_memory_) std::free(buffer);
  }
  // The text of a thread for whose buffer there was no memory.
  static inline char no_memory_[] = "out of host memory, also for the text of the last error";

  ThreadValue buffer_{Free};
};

}  // namespace hybridopt
