// ThreadValue: one pointer for each thread. It is not thread_local: in a library that was loaded at
// run time, the first use of a thread_local variable allocates, and the system ends the process if
// that allocation fails.
#pragma once

#include <pthread.h>

namespace hybridopt {

class ThreadValue {
 public:
  // `free` gets the pointer of a thread that ends, unless that is NULL.
  explicit ThreadValue(void (*free)(void*) = nullptr) {
    has_key_ = pthread_key_create(&key_, free) == 0;
  }
  ~ThreadValue() {
    if (has_key_) pthread_key_delete(key_);
  }
  ThreadValue(const ThreadValue&) = delete;
  ThreadValue& operator=(const ThreadValue&) = delete;

  // NULL before the thread's first Set.
  void* get() const { return has_key_ ? pthread_getspecific(key_) : nullptr; }
  // Returns false if there is no memory for it.
  bool Set(void* value) const { return has_key_ && pthread_setspecific(key_, value) == 0; }

 private:
  pthread_key_t key_ = 0;
  bool has_key_ = false;
};

}  // namespace hybridopt
