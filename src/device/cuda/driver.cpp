#include "device/cuda/driver.h"

namespace hybridopt::cuda {
namespace {

// The version of cuda.h whose function signatures are used.
constexpr unsigned int kDriverVersion = 12000;

template <typename Function>
Status FindOne(const char* name, Function* function) {
  cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
  void* address = nullptr;
#if CUDART_VERSION >= 12050
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &address, kDriverVersion, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &address, cudaEnableDefault, &found);
#endif
  if (error != cudaSuccess || found != cudaDriverEntryPointSuccess || address == nullptr)
    return Status::Error(OFFLOAD_UNSUPPORTED,
                         "the NVIDIA driver has no %s as of CUDA %u.%u; install one of CUDA 12.4 "
                         "or newer",
                         name, kDriverVersion / 1000, kDriverVersion % 1000 / 10);
  *function = reinterpret_cast<Function>(address);
  return {};
}

// Whether an error concerns only one call. After all other errors the context is lost.
bool IsLocal(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue:
    case cudaErrorMemoryAllocation:
    case cudaErrorInvalidDevicePointer:
    case cudaErrorInvalidMemcpyDirection:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorNotReady:
    case cudaErrorNotSupported:
    case cudaErrorNotPermitted:
    case cudaErrorInvalidConfiguration:
    case cudaErrorLaunchOutOfResources:
    case cudaErrorHostMemoryAlreadyRegistered:
    case cudaErrorHostMemoryNotRegistered:
    case cudaErrorOperatingSystem:
    case cudaErrorSystemNotReady:
      return true;
    default:
      return false;
  }
}

bool IsOfCapture(cudaError_t error) {
  return error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread;
}

}  // namespace

Result<Driver> Driver::Find() {
  Driver driver{};
  HYBRIDOPT_TRY(FindOne("cuCtxGetCurrent", &driver.ctx_get_current));
  HYBRIDOPT_TRY(FindOne("cuCtxPushCurrent", &driver.ctx_push_current));
  HYBRIDOPT_TRY(FindOne("cuCtxPopCurrent", &driver.ctx_pop_current));
  HYBRIDOPT_TRY(FindOne("cuDeviceGet", &driver.device_get));
  HYBRIDOPT_TRY(FindOne("cuDeviceGetAttribute", &driver.device_get_attribute));
  HYBRIDOPT_TRY(FindOne("cuDevicePrimaryCtxRetain", &driver.primary_ctx_retain));
  HYBRIDOPT_TRY(FindOne("cuDevicePrimaryCtxRelease", &driver.primary_ctx_release));
  HYBRIDOPT_TRY(FindOne("cuStreamWaitValue64", &driver.stream_wait_value64));
  HYBRIDOPT_TRY(FindOne("cuPointerGetAttributes", &driver.pointer_get_attributes));
  HYBRIDOPT_TRY(FindOne("cuMemAddressReserve", &driver.mem_address_reserve));
  HYBRIDOPT_TRY(FindOne("cuMemAddressFree", &driver.mem_address_free));
  HYBRIDOPT_TRY(FindOne("cuMemCreate", &driver.mem_create));
  HYBRIDOPT_TRY(FindOne("cuMemRelease", &driver.mem_release));
  HYBRIDOPT_TRY(FindOne("cuMemMap", &driver.mem_map));
  HYBRIDOPT_TRY(FindOne("cuMemUnmap", &driver.mem_unmap));
  HYBRIDOPT_TRY(FindOne("cuMemSetAccess", &driver.mem_set_access));
  return driver;
}

Status Fault::Check(cudaError_t error, const char* what, const char* label) {
  if (error == cudaSuccess) return status();
  (void)cudaGetLastError();  // clears only the library's error: the runtime is linked statically
  const std::string on = *label != '\0' ? std::string(" on \"") + label + "\"" : "";
  if (IsOfCapture(error))
    return Status::Error(OFFLOAD_INVALID_STATE,
                         "%s%s: %s; a stream that captures a graph cannot be used here: end the "
                         "capture first",
                         what, on.c_str(), TextOf(error).c_str());
  if (IsLocal(error)) {
    HYBRIDOPT_TRY(status());
    return Status::Error(OFFLOAD_DEVICE_FAILED, "%s%s: %s", what, on.c_str(),
                         TextOf(error).c_str());
  }
  {
    std::lock_guard lock(mutex_);
    if (cause_.empty()) cause_ = std::string(what) + on + ": " + TextOf(error);
  }
  return status();
}

Status Fault::status() const {
  std::lock_guard lock(mutex_);
  if (cause_.empty()) return {};
  return Status::Error(OFFLOAD_DEVICE_FAILED,
                       "the CUDA device failed: %s. Some work on it, perhaps not the library's, "
                       "ended its context: this process cannot use the device again",
                       cause_.c_str());
}

std::string TextOf(cudaError_t error) {
  return std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error) + ")";
}

}  // namespace hybridopt::cuda
