// The functions that code compiled with -fsanitize=thread calls at each atomic operation and each
// access to memory. They replace the thread sanitizer's own functions: every atomic operation is a
// point of the scheduler. Plain accesses are not checked here; the thread sanitizer itself does
// that.
#include <cstddef>
#include <cstdint>

#include "scheduler.h"

using hybridopt::schedule::Enter;
using hybridopt::schedule::IsTask;
using hybridopt::schedule::Leave;
using hybridopt::schedule::Point;
using hybridopt::schedule::Whim;

namespace {

void MaybePoint() {
  if (IsTask()) Point();
}

template <typename T>
int Exchange(volatile T* word, T* expected, T desired, bool weak) {
  MaybePoint();
  if (weak && IsTask() && Whim()) {
    *expected = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    return 0;
  }
  return __atomic_compare_exchange_n(word, expected, desired, false, __ATOMIC_SEQ_CST,
                                     __ATOMIC_SEQ_CST);
}

}  // namespace

#define ATOMIC_READ_MODIFY_WRITE(bits, type, name)                                \
  type __tsan_atomic##bits##_fetch_##name(volatile type* word, type value, int) { \
    MaybePoint();                                                                 \
    return __atomic_fetch_##name(word, value, __ATOMIC_SEQ_CST);                  \
  }

#define ATOMICS(bits, type)                                                              \
  type __tsan_atomic##bits##_load(const volatile type* word, int) {                      \
    MaybePoint();                                                                        \
    return __atomic_load_n(word, __ATOMIC_SEQ_CST);                                      \
  }                                                                                      \
  void __tsan_atomic##bits##_store(volatile type* word, type value, int) {               \
    MaybePoint();                                                                        \
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);                                     \
  }                                                                                      \
  type __tsan_atomic##bits##_exchange(volatile type* word, type value, int) {            \
    MaybePoint();                                                                        \
    return __atomic_exchange_n(word, value, __ATOMIC_SEQ_CST);                           \
  }                                                                                      \
  ATOMIC_READ_MODIFY_WRITE(bits, type, add)                                              \
  ATOMIC_READ_MODIFY_WRITE(bits, type, sub)                                              \
  ATOMIC_READ_MODIFY_WRITE(bits, type, and)                                              \
  ATOMIC_READ_MODIFY_WRITE(bits, type, or)                                               \
  ATOMIC_READ_MODIFY_WRITE(bits, type, xor)                                              \
  ATOMIC_READ_MODIFY_WRITE(bits, type, nand)                                             \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile type* word, type* expected, \
                                                    type desired, int, int) {            \
    return Exchange(word, expected, desired, false);                                     \
  }                                                                                      \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile type* word, type* expected,   \
                                                  type desired, int, int) {              \
    return Exchange(word, expected, desired, true);                                      \
  }                                                                                      \
  type __tsan_atomic##bits##_compare_exchange_val(volatile type* word, type expected,    \
                                                  type desired, int, int) {              \
    Exchange(word, &expected, desired, false);                                           \
    return expected;                                                                     \
  }

#define ACCESSES(bytes)                       \
  void __tsan_read##bytes(void*) {}           \
  void __tsan_write##bytes(void*) {}          \
  void __tsan_unaligned_read##bytes(void*) {} \
  void __tsan_unaligned_write##bytes(void*) {}

#pragma GCC visibility push(default)
extern "C" {

ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)

void __tsan_atomic_thread_fence(int) { MaybePoint(); }
void __tsan_atomic_signal_fence(int) {}

ACCESSES(1)
ACCESSES(2)
ACCESSES(4)
ACCESSES(8)
ACCESSES(16)
void __tsan_read_range(void*, size_t) {}
void __tsan_write_range(void*, size_t) {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

void __tsan_func_entry(void* caller) {
  if (IsTask()) Enter(caller);
}
void __tsan_func_exit() {
  if (IsTask()) Leave();
}
void __tsan_init() {}

}  // extern "C"
#pragma GCC visibility pop
