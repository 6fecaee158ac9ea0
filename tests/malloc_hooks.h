// MallocHooks: reports every allocation of a test program, in all its threads and libraries, and
// can make it fail. To be used in one source file of a program, which defines all functions. glibc
// lets a program replace malloc and its relatives; operator new of libstdc++ calls malloc.
// Sanitizers have an allocator of their own, which is not replaced: HYBRIDOPT_SEES_MALLOC is 0
// then.
#pragma once

#include <cerrno>
#include <cstddef>

#include "sanitizers.h"

#define HYBRIDOPT_SEES_MALLOC (!HYBRIDOPT_ASAN && !HYBRIDOPT_TSAN)

namespace malloc_hooks {

bool Fails();                // the allocation that is asked for now
void Allocated(void* data);  // NULL where there was no memory
void Freeing(void* data);    // not NULL; the memory is still valid

}  // namespace malloc_hooks

#if HYBRIDOPT_SEES_MALLOC
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* data, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void* data);

inline bool malloc_hooks_fail() {
  if (!malloc_hooks::Fails()) return false;
  errno = ENOMEM;
  return true;
}
void* malloc(size_t bytes) noexcept {
  void* const data = malloc_hooks_fail() ? nullptr : __libc_malloc(bytes);
  malloc_hooks::Allocated(data);
  return data;
}
void* calloc(size_t count, size_t bytes) noexcept {
  void* const data = malloc_hooks_fail() ? nullptr : __libc_calloc(count, bytes);
  malloc_hooks::Allocated(data);
  return data;
}
void* realloc(void* data, size_t bytes) noexcept {
  if (malloc_hooks_fail()) return nullptr;
  if (data != nullptr) malloc_hooks::Freeing(data);
  void* const moved = __libc_realloc(data, bytes);
  const bool kept = moved == nullptr && bytes > 0;
  malloc_hooks::Allocated(kept ? data : moved);
  return moved;
}
void* memalign(size_t alignment, size_t bytes) noexcept {
  void* const data = malloc_hooks_fail() ? nullptr : __libc_memalign(alignment, bytes);
  malloc_hooks::Allocated(data);
  return data;
}
void* aligned_alloc(size_t alignment, size_t bytes) noexcept { return memalign(alignment, bytes); }
int posix_memalign(void** data, size_t alignment, size_t bytes) noexcept {
  *data = memalign(alignment, bytes);
  return *data != nullptr ? 0 : ENOMEM;
}
void free(void* data) noexcept {
  if (data != nullptr) malloc_hooks::Freeing(data);
  __libc_free(data);
}
}
#endif
