// The devices on which a test program runs: host and sim, or those in HYBRIDOPT_TEST_DEVICES. ctest
// has a separate entry for "cuda" (tests/gpu), which is skipped if there is no GPU.
#pragma once

#include <cstdlib>
#include <string>
#include <vector>

#include "device/device.h"
#include "offload.h"

namespace hybridopt {

inline bool TestsRunOnCuda() {
  const char* const names = std::getenv("HYBRIDOPT_TEST_DEVICES");
  return names != nullptr && std::string(names) == "cuda";
}

inline std::vector<int32_t> DevicesUnderTest() {
  if (TestsRunOnCuda()) return {OFFLOAD_DEVICE_CUDA};
  return {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM};
}

// The devices with memory of their own.
inline std::vector<int32_t> AcceleratorsUnderTest() {
  if (TestsRunOnCuda()) return {OFFLOAD_DEVICE_CUDA};
  return {OFFLOAD_DEVICE_SIM};
}

inline int32_t AcceleratorUnderTest() { return AcceleratorsUnderTest()[0]; }

// Tests of the internals make a device themselves.
inline Result<std::unique_ptr<Device>> MakeAccelerator(const SimOptions& sim,
                                                       const KernelTable& kernels,
                                                       int32_t cuda_index = 0) {
  constexpr int64_t kTimeoutNs = 60'000'000'000;
  if (TestsRunOnCuda()) return CreateCudaDevice({cuda_index, kTimeoutNs});
  return CreateSimDevice(sim, kernels);
}

inline const char* DeviceText(int32_t kind) {
  return kind == OFFLOAD_DEVICE_CUDA ? "Cuda" : kind == OFFLOAD_DEVICE_SIM ? "Sim" : "Host";
}

}  // namespace hybridopt
