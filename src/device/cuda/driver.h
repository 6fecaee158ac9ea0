// The CUDA driver, found at run time: nothing links to libcuda. The static runtime opens it, and
// gives out its functions.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <mutex>
#include <string>

#include "base/status.h"

namespace hybridopt::cuda {

// What the runtime has no call for: contexts without a change of device, memory that can be given
// back while streams run, waits for a word of memory.
struct Driver {
  decltype(&cuCtxGetCurrent) ctx_get_current;
  decltype(&cuCtxPushCurrent) ctx_push_current;
  decltype(&cuCtxPopCurrent) ctx_pop_current;
  decltype(&cuDeviceGet) device_get;
  decltype(&cuDeviceGetAttribute) device_get_attribute;
  decltype(&cuDevicePrimaryCtxRetain) primary_ctx_retain;
  decltype(&cuDevicePrimaryCtxRelease) primary_ctx_release;
  decltype(&cuStreamWaitValue64) stream_wait_value64;
  decltype(&cuPointerGetAttributes) pointer_get_attributes;
  decltype(&cuMemAddressReserve) mem_address_reserve;
  decltype(&cuMemAddressFree) mem_address_free;
  decltype(&cuMemCreate) mem_create;
  decltype(&cuMemRelease) mem_release;
  decltype(&cuMemMap) mem_map;
  decltype(&cuMemUnmap) mem_unmap;
  decltype(&cuMemSetAccess) mem_set_access;

  // UNSUPPORTED where there is no driver, or one that is too old.
  static Result<Driver> Find();
};

// Inside it the calling thread works with our device; whatever context it had is back afterwards.
// A capture that another thread has begun is not disturbed by what we do.
class Scope {
 public:
  Scope(const Driver& driver, CUcontext context) : driver_(driver) {
    CUcontext current = nullptr;
    pushed_ = driver_.ctx_get_current(&current) != CUDA_SUCCESS || current != context;
    if (pushed_) pushed_ = driver_.ctx_push_current(context) == CUDA_SUCCESS;
    (void)cudaThreadExchangeStreamCaptureMode(&capture_mode_);
  }
  ~Scope() {
    (void)cudaThreadExchangeStreamCaptureMode(&capture_mode_);
    CUcontext popped = nullptr;
    if (pushed_) (void)driver_.ctx_pop_current(&popped);
  }
  Scope(const Scope&) = delete;
  Scope& operator=(const Scope&) = delete;

 private:
  const Driver& driver_;
  bool pushed_ = false;
  cudaStreamCaptureMode capture_mode_ = cudaStreamCaptureModeRelaxed;
};

// Turns errors into statuses. An error that the context does not survive stays the cause of all
// later failures.
class Fault {
 public:
  // `what` names the call and what it was for.
  Status Check(cudaError_t error, const char* what, const char* label = "");
  Status Check(CUresult error, const char* what, const char* label = "") {
    return Check(static_cast<cudaError_t>(error), what, label);  // the numbers are the same
  }
  Status status() const;  // OK, or DEVICE_FAILED with the cause

 private:
  mutable std::mutex mutex_;
  std::string cause_;
};

// "invalid argument (cudaErrorInvalidValue)".
std::string TextOf(cudaError_t error);

}  // namespace hybridopt::cuda
