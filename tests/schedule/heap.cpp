// The memory of objects. The memory that a task deletes is filled and kept until the run ends: a
// later read finds no pointer there, and a later write is found at the end. Runs are short, and
// each is a process of its own.
#include <malloc.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "scheduler.h"

namespace hybridopt::schedule {
namespace {

// Threads that wait for atomics share 16 queues by address, modulo 64. With this alignment that
// depends on the place of an atomic in its object, not on what has been allocated before.
constexpr size_t kAlignment = 64;
constexpr unsigned char kDeleted = 0xdb;
constexpr size_t kObjectBytesMax = 16384;  // larger ones are arrays, and take long to fill

struct Kept {
  unsigned char* data;
  size_t bytes;
};
Kept kept[1 << 16];
size_t kept_count = 0;

void Delete(void* data) {
  if (data == nullptr) return;
  const size_t bytes = malloc_usable_size(data);
  if (!IsTask() || kept_count == std::size(kept) || bytes > kObjectBytesMax) {
    std::free(data);
    return;
  }
  std::memset(data, kDeleted, bytes);
  kept[kept_count++] = {static_cast<unsigned char*>(data), bytes};
}

}  // namespace

void CheckDeleted() {
  for (size_t i = 0; i < kept_count; ++i)
    for (size_t at = 0; at < kept[i].bytes; ++at)
      if (kept[i].data[at] != kDeleted)
        Fail("byte " + std::to_string(at) + " of an object of up to " +
             std::to_string(kept[i].bytes) + " bytes was written after its delete");
  while (kept_count > 0) std::free(kept[--kept_count].data);
}

}  // namespace hybridopt::schedule

void* operator new(size_t bytes) {
  using hybridopt::schedule::kAlignment;
  void* const data = std::aligned_alloc(kAlignment, (bytes + kAlignment) / kAlignment * kAlignment);
  if (data == nullptr) throw std::bad_alloc();
  return data;
}
void operator delete(void* data) noexcept { hybridopt::schedule::Delete(data); }
void operator delete(void* data, size_t) noexcept { hybridopt::schedule::Delete(data); }
