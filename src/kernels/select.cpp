#include <cstdlib>
#include <string>

#include "kernels/kernels.h"

namespace hybridopt {
namespace {

constexpr const char* kNames[] = {"reference", "avx2", "avx512", "neon", "sve"};

// The table with that name; NULL if this CPU cannot run it.
const KernelTable* FindUsable(const std::string& name) {
  for (const KernelTable* table : SimdKernels()) {
    if (name == table->isa) return table;
  }
  return name == ReferenceKernels().isa ? &ReferenceKernels() : nullptr;
}

bool IsKnown(const std::string& name) {
  for (const char* known : kNames) {
    if (name == known) return true;
  }
  return false;
}

std::string UsableNames() {
  std::string names;
  for (const KernelTable* table : SimdKernels()) names += std::string(table->isa) + ", ";
  return names + ReferenceKernels().isa;
}

}  // namespace

Result<const KernelTable*> SelectKernels() {
  const char* name = std::getenv("HYBRIDOPT_ISA");
  if (name == nullptr || *name == '\0') {
    return SimdKernels().empty() ? &ReferenceKernels() : SimdKernels().front();
  }
  if (const KernelTable* table = FindUsable(name)) return table;
  if (!IsKnown(name)) {
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "HYBRIDOPT_ISA is \"%s\", expected one of reference, avx2, avx512, neon, "
                         "sve; this CPU can use %s; unset it to get the best of them",
                         name, UsableNames().c_str());
  }
  return Status::Error(OFFLOAD_UNSUPPORTED,
                       "HYBRIDOPT_ISA is \"%s\", which this CPU or this build cannot run; "
                       "it can use %s; unset it to get the best of them",
                       name, UsableNames().c_str());
}

}  // namespace hybridopt
