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

// Whether this library can be used; else appends the reason to *why.
bool TryLibrary(void* library, const char* name, OpenedCublasLt* opened, std::string* why) {
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
  for (const char* const name : kNames)
    if (void* const loaded = dlopen(name, RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL))
      if (TryLibrary(loaded, name, &opened, &why)) return opened;
  for (const char* const name : kNames) {
    if (dlopen(name, RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL) != nullptr) continue;  // tried above
    (void)dlerror();
    if (void* const library = dlopen(name, RTLD_LAZY | RTLD_LOCAL)) {
      if (TryLibrary(library, name, &opened, &why)) return opened;
    } else {
      const char* const text = dlerror();
      why += std::string("; ") + (text != nullptr ? text : name);
    }
  }
  return Status::Error(OFFLOAD_UNSUPPORTED,
                       "Muon on a CUDA device needs cuBLASLt of CUDA 12 or 13, and none can be "
                       "used%s; import torch first, which loads one, or add the folder of one to "
                       "LD_LIBRARY_PATH; or use another algorithm",
                       why.c_str());
}

}  // namespace hybridopt::cuda
