#include "storage/raw_file.h"

#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace bench {

void Fail(const std::string& what) {
  std::perror(("hybridopt_bench: " + what).c_str());
  std::exit(1);
}

void ReadBlock(int file, std::byte* block, uint64_t bytes, uint64_t at) {
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t moved = pread(file, block + done, bytes - done, static_cast<off_t>(at + done));
    if (moved <= 0) Fail("a read of a raw file");
    done += static_cast<uint64_t>(moved);
  }
}

void WriteBlock(int file, std::byte* block, uint64_t bytes, uint64_t at) {
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t moved = pwrite(file, block + done, bytes - done, static_cast<off_t>(at + done));
    if (moved <= 0) Fail("a write of a raw file");
    done += static_cast<uint64_t>(moved);
  }
}

void OnThreads(uint32_t threads, const std::function<void(uint32_t)>& work) {
  std::vector<std::thread> made;
  for (uint32_t i = 0; i < threads; ++i) made.emplace_back(work, i);
  for (std::thread& thread : made) thread.join();
}

}  // namespace bench
