// ThreadText: one text for each thread, for example the text of its last failure. A thread keeps
// its buffer, because failures also occur when memory has run out. The buffer is not thread_local:
// in a library that was loaded at run time, the first use of a thread_local variable allocates, and
// the system ends the process if that allocation fails.
#pragma once

#include <pthread.h>

#include <cstdio>
#include <cstdlib>

#include "base/status.h"

namespace hybridopt {

class ThreadText {
 public:
  ThreadText() { has_key_ = pthread_key_create(&key_, Free) == 0; }
  ~ThreadText() {
    if (has_key_) pthread_key_delete(key_);
  }
  ThreadText(const ThreadText&) = delete;
  ThreadText& operator=(const ThreadText&) = delete;

  const char* text() const {
    const void* const buffer = has_key_ ? pthread_getspecific(key_) : nullptr;
    return buffer != nullptr ? static_cast<const char*>(buffer) : "";
  }
  void Set(const char* text) {
    if (!has_key_) return;
    void* buffer = pthread_getspecific(key_);
    if (buffer == nullptr || buffer == no_memory_) {
      buffer = std::malloc(kBytes);
      if (pthread_setspecific(key_, buffer != nullptr ? buffer : no_memory_) != 0) {
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

  pthread_key_t key_ = 0;
  bool has_key_ = false;
};

}  // namespace hybridopt
