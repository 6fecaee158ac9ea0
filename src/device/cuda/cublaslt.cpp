#include "device/cuda/cublaslt.h"

#include <dlfcn.h>

namespace hybridopt::cuda {
namespace {

// The newest comes first. The driver may be too old for it.
constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};

template <typename Function>
bool Take(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

bool TakeAll(void* library, CublasLt* lt) {
  return Take(library, "cublasLtGetVersion", &lt->get_version) &&
         Take(library, "cublasLtCreate", &lt->create) &&
         Take(library, "cublasLtDestroy", &lt->destroy) &&
         Take(library, "cublasLtMatmulDescCreate", &lt->operation_create) &&
         Take(library, "cublasLtMatmulDescDestroy", &lt->operation_destroy) &&
         Take(library, "cublasLtMatmulDescSetAttribute", &lt->operation_set) &&
         Take(library, "cublasLtMatrixLayoutCreate", &lt->layout_create) &&
         Take(library, "cublasLtMatrixLayoutDestroy", &lt->layout_destroy) &&
         Take(library, "cublasLtMatmulPreferenceCreate", &lt->preference_create) &&
         Take(library, "cublasLtMatmulPreferenceDestroy", &lt->preference_destroy) &&
         Take(library, "cublasLtMatmulPreferenceSetAttribute", &lt->preference_set) &&
         Take(library, "cublasLtMatmulAlgoGetHeuristic", &lt->heuristic) &&
         Take(library, "cublasLtMatmulAlgoConfigGetAttribute", &lt->algorithm_get) &&
         Take(library, "cublasLtMatmul", &lt->multiply);
}

// Whether the library of this name can be used; else appends the reason to *why.
bool TryOne(const char* name, int flags, OpenedCublasLt* opened, std::string* why) {
  (void)dlerror();
  void* const library = dlopen(name, flags | RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const text = dlerror();
    if ((flags & RTLD_NOLOAD) == 0) *why += std::string("; ") + (text != nullptr ? text : name);
    return false;
  }
  if (!TakeAll(library, &opened->functions)) {
    *why += std::string("; ") + name + " lacks functions of CUDA 12";
    return false;
  }
  const LtOutcome outcome = opened->functions.create(&opened->handle);
  if (outcome == 0) return true;
  *why += std::string("; cublasLtCreate of ") + name + " fails with status " +
          std::to_string(outcome) + ", the driver may be too old for it";
  return false;
}

}  // namespace

Result<OpenedCublasLt> OpenCublasLt() {
  OpenedCublasLt opened{};
  std::string why;
  for (const int flags : {RTLD_NOLOAD, 0})
    for (const char* const name : kNames)
      if (TryOne(name, flags, &opened, &why)) return opened;
  return Status::Error(OFFLOAD_UNSUPPORTED,
                       "Muon on a CUDA device needs cuBLASLt of CUDA 12 or 13, and none can be "
                       "used%s; import torch first, which loads one, or add the folder of one to "
                       "LD_LIBRARY_PATH; or use another algorithm",
                       why.c_str());
}

}  // namespace hybridopt::cuda
