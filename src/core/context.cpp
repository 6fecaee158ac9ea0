#include "core/context.h"

#include <cstdio>

#include "base/prim.h"

namespace hybridopt {
namespace {

constexpr uint32_t kMaxThreads = 1024;
constexpr uint64_t kDefaultSimMemoryBytes = uint64_t{1} << 30;
constexpr uint64_t kMinSimMemoryBytes = 4096;
constexpr uint64_t kMaxSimDelayNs = 1'000'000'000;
constexpr uint64_t kDefaultDeviceTimeoutNs = 600'000'000'000;

Status CheckOptions(const offload_context_options_t& options) {
  if (options.device_kind < OFFLOAD_DEVICE_HOST || options.device_kind > OFFLOAD_DEVICE_CUDA)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.device_kind is %d, expected OFFLOAD_DEVICE_HOST (0), _SIM (1) or "
                         "_CUDA (2)",
                         options.device_kind);
  if (options.device_kind == OFFLOAD_DEVICE_CUDA)
    return Status::Error(OFFLOAD_UNSUPPORTED,
                         "options.device_kind is OFFLOAD_DEVICE_CUDA, but this build has no CUDA; "
                         "use OFFLOAD_DEVICE_HOST or OFFLOAD_DEVICE_SIM");
  if (options.device_index != 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.device_index is %d, expected 0 for the host and sim devices",
                         options.device_index);
  if (options.threads > kMaxThreads)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.threads is %u, expected at most %u (0 = one per CPU)",
                         options.threads, kMaxThreads);
  if (options.device_timeout_ns > INT64_MAX)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.device_timeout_ns is %llu, expected at most 2^63 - 1",
                         static_cast<unsigned long long>(options.device_timeout_ns));
  const bool sim = options.device_kind == OFFLOAD_DEVICE_SIM;
  if (!sim &&
      (options.sim_memory_bytes != 0 || options.sim_seed != 0 || options.sim_delay_ns_max != 0))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.sim_* are set, but device_kind is not OFFLOAD_DEVICE_SIM; leave "
                         "them 0");
  if (options.sim_memory_bytes != 0 && options.sim_memory_bytes < kMinSimMemoryBytes)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.sim_memory_bytes is %llu, expected at least %llu (0 = 1 GiB)",
                         static_cast<unsigned long long>(options.sim_memory_bytes),
                         static_cast<unsigned long long>(kMinSimMemoryBytes));
  if (options.sim_delay_ns_max > kMaxSimDelayNs)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.sim_delay_ns_max is %llu, expected at most 1 s",
                         static_cast<unsigned long long>(options.sim_delay_ns_max));
  return {};
}

Result<std::unique_ptr<Device>> CreateDevice(const offload_context_options_t& options,
                                             const KernelTable& kernels) {
  if (options.device_kind == OFFLOAD_DEVICE_HOST) return CreateHostDevice();
  SimOptions sim{};
  sim.memory_bytes =
      options.sim_memory_bytes != 0 ? options.sim_memory_bytes : kDefaultSimMemoryBytes;
  sim.seed = options.sim_seed;
  sim.delay_ns_max = options.sim_delay_ns_max;
  return CreateSimDevice(sim, kernels);
}

}  // namespace

Result<std::shared_ptr<Context>> Context::Create(const offload_context_options_t& options) {
  HYBRIDOPT_TRY(CheckOptions(options));
  HYBRIDOPT_ASSIGN(const KernelTable* kernels, SelectKernels());
  HYBRIDOPT_ASSIGN(std::unique_ptr<Device> device, CreateDevice(options, *kernels));
  return std::make_shared<Context>(options, std::move(device), *kernels);
}

Context::Context(const offload_context_options_t& options, std::unique_ptr<Device> device,
                 const KernelTable& kernels)
    : pinned_bytes_max_(options.pinned_bytes_max != 0 ? options.pinned_bytes_max : UINT64_MAX),
      device_timeout_ns_(static_cast<int64_t>(
          options.device_timeout_ns != 0 ? options.device_timeout_ns : kDefaultDeviceTimeoutNs)),
      log_(options.log),
      log_user_(options.log_user),
      kernels_(kernels),
      device_(std::move(device)),
      workers_(options.threads) {}

Status Context::CheckPinned(uint64_t bytes) const {
  std::lock_guard lock(pinned_mutex_);
  return CheckPinnedLocked(bytes);
}

Status Context::CheckPinnedLocked(uint64_t bytes) const {
  if (bytes <= pinned_bytes_max_ - pinned_bytes_) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "options.pinned_bytes_max of the context is %llu with %llu in use, but the "
                       "staging ring needs %llu more; raise it, or make chunk_elements or "
                       "staging_slots smaller",
                       static_cast<unsigned long long>(pinned_bytes_max_),
                       static_cast<unsigned long long>(pinned_bytes_),
                       static_cast<unsigned long long>(bytes));
}

Status Context::ReservePinned(uint64_t bytes) {
  std::lock_guard lock(pinned_mutex_);
  HYBRIDOPT_TRY(CheckPinnedLocked(bytes));
  pinned_bytes_ += bytes;
  return {};
}

void Context::ReleasePinned(uint64_t bytes) {
  std::lock_guard lock(pinned_mutex_);
  pinned_bytes_ -= bytes;
}

uint64_t Context::PinnedBytesLeft() const {
  std::lock_guard lock(pinned_mutex_);
  return pinned_bytes_max_ == UINT64_MAX ? UINT64_MAX : pinned_bytes_max_ - pinned_bytes_;
}

std::atomic<uint64_t>& Context::NewProgress() {
  std::lock_guard lock(progress_mutex_);
  return progress_.emplace_back(0);
}

Result<offload_context_info_t> Context::Info() const {
  offload_context_info_t info{};
  info.device_kind = device_->kind();
  info.threads = workers_.threads();
  info.cpus_allowed = workers_.cpus_allowed();
  info.nodes = prim::NodeCount(prim::AllowedCpus());
  info.threads_pinned = workers_.pinned() ? 1 : 0;
  info.huge_pages = prim::HugePagesAvailable() ? 1 : 0;
  info.optimizers = optimizers_;
  if (!device_->unified()) {
    HYBRIDOPT_ASSIGN(const DeviceMemory memory, device_->Memory());
    info.device_memory_bytes = memory.total_bytes;
    info.device_memory_free_bytes = memory.free_bytes;
  }
  {
    std::lock_guard lock(pinned_mutex_);
    info.pinned_bytes = pinned_bytes_;
  }
  std::snprintf(info.isa, sizeof(info.isa), "%s", kernels_.isa);
  std::snprintf(info.device_name, sizeof(info.device_name), "%s", device_->name());
  return info;
}

void Context::Log(int32_t level, const char* text) const {
  if (log_ != nullptr) {
    log_(log_user_, level, text);
  } else if (level >= OFFLOAD_LOG_WARNING) {
    std::fprintf(stderr, "hybridopt: %s\n", text);
  }
}

}  // namespace hybridopt
