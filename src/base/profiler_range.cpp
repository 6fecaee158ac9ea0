#include "base/profiler_range.h"

#ifdef HYBRIDOPT_HAS_NVTX
#include <nvtx3/nvToolsExt.h>

#include <cinttypes>
#include <cstdio>
#endif

namespace hybridopt {

#ifdef HYBRIDOPT_HAS_NVTX
namespace {

constexpr size_t kNameBytes = 64;

// NULL without a profiler. NVTX looks for a profiler in the environment, once.
nvtxDomainHandle_t Domain() {
  static const nvtxDomainHandle_t domain = nvtxDomainCreateA("hybridopt");
  return domain;
}

void Push(const char* name) {
  nvtxEventAttributes_t event{};
  event.version = NVTX_VERSION;
  event.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  event.messageType = NVTX_MESSAGE_TYPE_ASCII;
  event.message.ascii = name;
  (void)nvtxDomainRangePushEx(Domain(), &event);
}

}  // namespace

ProfilerRange::ProfilerRange(const char* name) {
  if (Domain() != nullptr) Push(name);
}

ProfilerRange::ProfilerRange(const char* name, uint64_t number) {
  if (Domain() == nullptr) return;
  char numbered[kNameBytes];
  std::snprintf(numbered, sizeof numbered, "%s %" PRIu64, name, number);
  Push(numbered);
}

ProfilerRange::~ProfilerRange() {
  if (Domain() != nullptr) (void)nvtxDomainRangePop(Domain());
}

#else

ProfilerRange::ProfilerRange(const char*) {}
ProfilerRange::ProfilerRange(const char*, uint64_t) {}
ProfilerRange::~ProfilerRange() = default;

#endif

}  // namespace hybridopt
