// Array: memory of the caller, on the context's device. On the host device it has pages of its own,
// which cannot be accessed while the library has no right to use them: an access then ends the run.
// On the simulated device freed memory is filled with NaNs, and an access to it fails.
#pragma once

#include <cstdint>

#include "offload.h"
#include "problem.h"

namespace hybridopt::schedule {

// Thrown by the functions of an array when the device has failed.
struct DeviceFailed {};

class Array {
 public:
  Array(offload_context_t context, bool sim, uint64_t bytes);
  ~Array();
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  void* data() const { return data_; }

  // Lend allows the library to access the array from now on, TakeBack forbids it.
  void Lend();
  void TakeBack();
  // Writes to an array that is lent.
  void Write(const Bytes& bytes, offload_stream_t stream);
  Bytes Read() const;

 private:
  const offload_context_t context_;
  const bool sim_;
  const uint64_t bytes_;
  void* data_ = nullptr;
};

// An access to an array that is taken back ends the run with a report.
void WatchArrays();

}  // namespace hybridopt::schedule
