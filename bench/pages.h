// Pages: memory from mmap that asks for huge pages, as the library's does. The thread that touches
// a page first decides on which node the page lies.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace bench {

class Pages {
 public:
  explicit Pages(uint64_t bytes) : mapped_bytes_(bytes + kHugePageBytes) {
    mapped_ =
        mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped_ == MAP_FAILED) {
      std::perror("hybridopt_bench: no memory; a smaller --elements needs less");
      std::exit(1);
    }
    const uintptr_t begin = reinterpret_cast<uintptr_t>(mapped_);
    data_ = static_cast<std::byte*>(mapped_) + (-begin & (kHugePageBytes - 1));
    madvise(data_, bytes, MADV_HUGEPAGE);
  }
  ~Pages() { munmap(mapped_, mapped_bytes_); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  template <typename T>
  T* at(uint64_t bytes = 0) const {
    return reinterpret_cast<T*>(data_ + bytes);
  }

 private:
  static constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;
  uint64_t mapped_bytes_;
  void* mapped_;
  std::byte* data_;
};

}  // namespace bench
