// Tables: the arguments of launches, in device memory. Each table is pinned host memory and the
// same number of bytes of device memory. Launches use the tables in turns: a launch fills a table
// and copies it on its stream, and the table is free again when the launch has run. So a launch
// allocates nothing and does not keep the caller's arrays.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "base/status.h"
#include "device/cuda/driver.h"

namespace hybridopt::cuda {

class Tables {
 public:
  static constexpr uint64_t kBytes = uint64_t{128} << 10;  // of one table
  static constexpr uint32_t kCount = 16;

  static Result<std::unique_ptr<Tables>> Create(Fault& fault);
  ~Tables();
  Tables(const Tables&) = delete;
  Tables& operator=(const Tables&) = delete;

  struct Table {
    uint32_t index;
    void* host;
    void* device;
  };
  // Takes a table that is free. If none is, waits up to timeout_ns.
  Result<Table> Take(int64_t timeout_ns);
  // Copies the table's first bytes to the device.
  Status Send(const Table& table, uint64_t bytes, cudaStream_t stream);
  // Gives the table back. It becomes free when the stream has done the work that is queued on it
  // now.
  Status GiveBack(const Table& table, cudaStream_t stream);

 private:
  explicit Tables(Fault& fault) : fault_(fault) {}

  Fault& fault_;
  void* host_ = nullptr;
  void* device_ = nullptr;
  cudaEvent_t done_[kCount] = {};  // recorded after a table's latest launch
  std::mutex mutex_;
  bool taken_[kCount] = {};  // guarded by mutex_
  uint32_t next_ = 0;        // guarded by mutex_
};

}  // namespace hybridopt::cuda
