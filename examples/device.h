// device.h: what an example runs on: a GPU where there is one, else the simulated device.
#ifndef HYBRIDOPT_EXAMPLES_DEVICE_H
#define HYBRIDOPT_EXAMPLES_DEVICE_H

#include "offload_simple.h"
#include "program.h"

// Whether the program has its part for a GPU, and why not if it has none.
#ifdef HYBRIDOPT_EXAMPLES_CUBLAS
inline constexpr bool kGpuBuilt = true;
#else
inline constexpr bool kGpuBuilt = false;
#endif
#ifdef HYBRIDOPT_EXAMPLES_CUDA
inline constexpr char kNoGpuPart[] =
    "this program was built without cuBLAS, which multiplies its matrices on a GPU; install it and "
    "configure again, with -DHYBRIDOPT_CUBLAS_ROOT=FOLDER if it is not in the CUDA toolkit: FOLDER "
    "holds include/cublas_v2.h and lib/libcublas.so*";
#else
inline constexpr char kNoGpuPart[] =
    "this program was built without CUDA; build it where nvcc is, with -DHYBRIDOPT_CUDA=ON";
#endif

// The value of --device; text is NULL if the command line ends before it.
inline std::string device_flag(const char* text) {
  const std::string got = text ? text : "nothing";
  if (got != "auto" && got != "cpu" && got != "gpu")
    fail("--device: got " + got + ", expected auto, cpu or gpu");
  return got;
}

// Whether to run on the GPU. Where `auto` finds none the program says why, and goes on without.
inline bool use_gpu(const std::string& flag) {
  if (flag == "cpu") return false;
  std::string why;
  if (kGpuBuilt) {
    auto options = offload_init<offload_context_options_t>();
    options.device_kind = OFFLOAD_DEVICE_CUDA;
    offload_context_t context = nullptr;
    if (offload_context_create(&options, &context) == OFFLOAD_OK) {
      MUST(offload_context_destroy(context));
      return true;
    }
    why = offload_last_error();
  } else {
    why = kNoGpuPart;
  }
  if (flag == "gpu") fail("--device gpu: " + why);
  printf("no GPU: %s\n", why.c_str());
  return false;
}

#endif  // HYBRIDOPT_EXAMPLES_DEVICE_H
