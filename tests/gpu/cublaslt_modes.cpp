// What is said where the cuBLASLt that the process has loaded cannot be used.
// Usage: cublaslt_modes FAKE_LIBRARY TEXT
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "device/cuda/cublaslt.h"

int main(int argc, char** argv) {
  if (argc != 3 || dlopen(argv[1], RTLD_LAZY) == nullptr) {
    std::fprintf(stderr, "FAILED: usage: cublaslt_modes FAKE_LIBRARY TEXT\n");
    return 1;
  }
  const auto opened = hybridopt::cuda::OpenCublasLt();
  if (opened.ok()) {
    // A real one that the system finds is used in place of the fake one.
    std::printf("a cuBLASLt of this system is used\n");
    return 77;
  }
  const char* const text = opened.status().message().c_str();
  std::printf("%s\n", text);
  const bool right = opened.status().code() == OFFLOAD_UNSUPPORTED &&
                     std::strstr(text, argv[2]) != nullptr &&
                     std::strstr(text, "import torch first") != nullptr &&
                     std::strstr(text, "LD_LIBRARY_PATH") != nullptr;
  if (!right) std::fprintf(stderr, "FAILED: expected UNSUPPORTED and \"%s\"\n", argv[2]);
  return right ? 0 : 1;
}
