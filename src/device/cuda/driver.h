// The CUDA driver, found at run time: the library does not link to libcuda. The static runtime
// opens the driver and returns its functions.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <mutex>
#include <string>

#include "base/status.h"
#include "device/device.h"

namespace hybridopt::cuda {

// The stream behind a handle of the port.
inline cudaStream_t Of(StreamHandle stream) { return static_cast<cudaStream_t>(stream); }

// Driver functions for which the runtime has no equal: contexts without a change of device, memory
// that can be freed while streams run, waits for a word of memory.
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

  // UNSUPPORTED if there is no driver, or if it is too old.
  static Result<Driver> Find();
};

// In its scope the calling thread uses the library's device. Its destructor restores the context
// that the thread had. Calls in the scope do not disturb a capture that another thread has begun.
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

// Turns errors into statuses. An error that the context does not survive is kept as the cause of
// all later failures.
class Fault {
 public:
  // `what` names the call and its purpose.
  Status Check(cudaError_t error, const char* what, const char* label = "");
  Status Check(CUresult error, const char* what, const char* label = "") {
    return Check(static_cast<cudaError_t>(error), what, label);  // both enums have the same numbers
  }
  Status status() const;  // OK, or DEVICE_FAILED with the cause

 private:
  mutable std::mutex mutex_;
  std::string cause_;
};

// "invalid argument (cudaErrorInvalidValue)".
std::string TextOf(cudaError_t error);

}  // namespace hybridopt::cuda
