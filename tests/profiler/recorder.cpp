// A profiler that records ranges. NVTX opens it if NVTX_INJECTION64_PATH names it; the test opens
// it too and reads the record.
#include "recorder.h"

#include <nvtx3/nvToolsExt.h>

#include <mutex>

namespace {

std::mutex mutex;
std::vector<RecordedEvent> events;
char domain;  // its address is the handle

void Write(const char* name) {
  std::lock_guard lock(mutex);
  events.push_back({std::this_thread::get_id(), name});
}

nvtxDomainHandle_t CreateDomain(const char* name) {
  const bool ours = std::string(name) == "hybridopt";
  return ours ? reinterpret_cast<nvtxDomainHandle_t>(&domain) : nullptr;
}
int Push(nvtxDomainHandle_t, const nvtxEventAttributes_t* event) {
  Write(event->message.ascii);
  return 0;
}
int Pop(nvtxDomainHandle_t) {
  Write("");
  return 0;
}

template <class Function>
void Set(NvtxFunctionTable table, NvtxCallbackIdCore2 id, Function* function) {
  *table[id] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(
    NvtxGetExportTableFunc_t get_export_table) {
  const auto* const callbacks =
      static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr ||
      callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0)
    return 0;
  Set(table, NVTX_CBID_CORE2_DomainCreateA, CreateDomain);
  Set(table, NVTX_CBID_CORE2_DomainRangePushEx, Push);
  Set(table, NVTX_CBID_CORE2_DomainRangePop, Pop);
  return 1;
}

__attribute__((visibility("default"))) void TakeRecorded(std::vector<RecordedEvent>* taken) {
  std::lock_guard lock(mutex);
  taken->swap(events);
  events.clear();
}
}
