#include <sstream>

#include "commands.h"
#include "handles.h"
#include "text.h"

namespace tool {
namespace {

std::string VersionText(uint32_t version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000);
}

Result<offload_context_info_t> InfoOf(int32_t device_kind) {
  auto options = offload_init<offload_context_options_t>();
  options.device_kind = device_kind;
  Context context;
  HYBRIDOPT_TRY(context.Create(options));
  auto info = offload_init<offload_context_info_t>();
  HYBRIDOPT_TRY(StatusOf(offload_context_get_info(context.get(), &info)));
  return info;
}

}  // namespace

Result<Report> Info() {
  HYBRIDOPT_ASSIGN(const offload_context_info_t host, InfoOf(OFFLOAD_DEVICE_HOST));
  const Result<offload_context_info_t> cuda = InfoOf(OFFLOAD_DEVICE_CUDA);
  std::ostringstream out;
  out << offload_build_info() << "\nABI       " << VersionText(offload_abi_version())
      << "\nkernels   " << host.isa << "\nthreads   " << host.threads << " on " << host.nodes
      << (host.nodes == 1 ? " NUMA node, " : " NUMA nodes, ") << host.cpus_allowed
      << " CPUs allowed\n";
  if (host.notes[0] != '\0') out << "notes     " << host.notes << "\n";
  Json json{{"status", offload_status_name(OFFLOAD_OK)},
            {"build", offload_build_info()},
            {"abi_version", VersionText(offload_abi_version())},
            {"isa", host.isa},
            {"threads", host.threads},
            {"nodes", host.nodes},
            {"cpus_allowed", host.cpus_allowed},
            {"notes", host.notes}};
  if (cuda.ok()) {
    const offload_context_info_t& device = cuda.value();
    out << "CUDA      " << device.device_name << ", " << SizeText(device.device_memory_free_bytes)
        << " of " << SizeText(device.device_memory_bytes) << " free\n";
    json["cuda"] = {{"device_name", device.device_name},
                    {"memory_bytes", device.device_memory_bytes},
                    {"memory_free_bytes", device.device_memory_free_bytes}};
  } else {
    out << "CUDA      none: " << cuda.status().message() << "\n";
    json["cuda"] = nullptr;
    json["cuda_error"] = cuda.status().message();
  }
  return Report{out.str(), json, {}};
}

}  // namespace tool
