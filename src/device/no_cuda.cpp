// Replaces device/cuda in a build without CUDA.
#include "device/device.h"

namespace hybridopt {

Result<std::unique_ptr<Device>> CreateCudaDevice(const CudaOptions&) {
  return Status::Error(
      OFFLOAD_UNSUPPORTED,
      "options.device_kind is OFFLOAD_DEVICE_CUDA, but this build has no CUDA; "
      "build it with HYBRIDOPT_CUDA=ON where nvcc is, or use OFFLOAD_DEVICE_HOST or "
      "OFFLOAD_DEVICE_SIM");
}

}  // namespace hybridopt
