#include "comm/adaptors/nccl_functions.h"

#include <dlfcn.h>

#include <cstdlib>
#include <mutex>

namespace hybridopt::adaptor {
namespace {

constexpr char kName[] = "libnccl.so.2";
constexpr char kPathVariable[] = "HYBRIDOPT_NCCL_PATH";
constexpr int kVersionMin = 21400;  // 2.14, the first release with non-blocking communicators

std::string DlError() {
  const char* const text = dlerror();
  return text != nullptr ? text : "unknown error";
}

// Opens the copy of NCCL that the process has loaded already, else the first one that can be
// loaded.
void* Open(std::string* why) {
  if (dlsym(RTLD_DEFAULT, "ncclGetVersion") != nullptr) return RTLD_DEFAULT;
  if (void* loaded = dlopen(kName, RTLD_NOLOAD | RTLD_LAZY | RTLD_LOCAL)) return loaded;
  const char* const path = std::getenv(kPathVariable);
  const bool named = path != nullptr && *path != '\0';
  (void)dlerror();
  void* const opened = dlopen(named ? path : kName, RTLD_LAZY | RTLD_LOCAL);
  if (opened == nullptr)
    *why = std::string("no libnccl: none is loaded, and ") +
           (named ? std::string(kPathVariable) + " names one that cannot be: " + DlError() +
                        "; name another file"
                  : DlError() + "; load it first, or name its file in " + kPathVariable);
  return opened;
}

template <typename Function>
bool Take(void* library, const char* name, Function* function, std::string* why) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function != nullptr) return true;
  *why = std::string("libnccl has no ") + name + "; it must be 2.14 or newer";
  return false;
}

std::string FileOf(const void* function) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "?";
}

bool Load(NcclFunctions* functions, std::string* why) {
  void* const library = Open(why);
  if (library == nullptr && !why->empty()) return false;
  if (!Take(library, "ncclGetVersion", &functions->get_version, why)) return false;
  int version = 0;
  if (functions->get_version(&version) != kNcclSuccess || version < kVersionMin) {
    *why = FileOf(reinterpret_cast<const void*>(functions->get_version)) + " is NCCL " +
           std::to_string(version) + ", expected 21400 (2.14) or newer";
    return false;
  }
  return Take(library, "ncclGetUniqueId", &functions->get_unique_id, why) &&
         Take(library, "ncclCommInitRankConfig", &functions->init_rank, why) &&
         Take(library, "ncclCommGetAsyncError", &functions->async_error, why) &&
         Take(library, "ncclAllGather", &functions->all_gather, why) &&
         Take(library, "ncclGroupStart", &functions->group_start, why) &&
         Take(library, "ncclSend", &functions->send, why) &&
         Take(library, "ncclRecv", &functions->receive, why) &&
         Take(library, "ncclGroupEnd", &functions->group_end, why) &&
         Take(library, "ncclCommAbort", &functions->abort, why) &&
         Take(library, "ncclGetErrorString", &functions->error_string, why);
}

}  // namespace

const NcclFunctions* FindNccl(std::string* why) {
  static std::mutex mutex;
  static NcclFunctions functions;
  static bool found = false;
  std::lock_guard lock(mutex);
  if (!found) found = Load(&functions, why);
  return found ? &functions : nullptr;
}

}  // namespace hybridopt::adaptor
