#include "machine/context.h"

#include <cstdio>
#include <list>
#include <mutex>
#include <utility>
#include <vector>

#include "base/system.h"

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
  if (options.device_index != 0 && options.device_kind != OFFLOAD_DEVICE_CUDA)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.device_index is %d, expected 0 for the host and sim devices",
                         options.device_index);
  if (options.threads > kMaxThreads)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.threads is %u, expected at most %u (0 = one per CPU)",
                         options.threads, kMaxThreads);
  if (options.allow_pageable != 0 && options.allow_pageable != 1)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.allow_pageable is %d, expected 0 (commit fails where memory "
                         "cannot be pinned) or 1 (it is used unpinned)",
                         options.allow_pageable);
  if (options.numa_policy != OFFLOAD_NUMA_NEAR && options.numa_policy != OFFLOAD_NUMA_INTERLEAVED)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.numa_policy is %d, expected OFFLOAD_NUMA_NEAR (0: host memory "
                         "near the update threads) or OFFLOAD_NUMA_INTERLEAVED (1: on all nodes in "
                         "turn)",
                         options.numa_policy);
  if (options.device_timeout_ns > INT64_MAX)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.device_timeout_ns is %llu, expected at most 2^63 - 1",
                         static_cast<unsigned long long>(options.device_timeout_ns));
  const bool sim = options.device_kind == OFFLOAD_DEVICE_SIM;
  if (!sim && (options.sim_memory_bytes != 0 || options.sim_seed != 0 ||
               options.sim_delay_ns_max != 0 || options.sim_pinned_bytes_max != 0))
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

int64_t TimeoutNs(const offload_context_options_t& options) {
  return static_cast<int64_t>(options.device_timeout_ns != 0 ? options.device_timeout_ns
                                                             : kDefaultDeviceTimeoutNs);
}

Result<std::unique_ptr<Device>> CreateDevice(const offload_context_options_t& options,
                                             const KernelTable& kernels) {
  if (options.device_kind == OFFLOAD_DEVICE_HOST) return CreateHostDevice();
  if (options.device_kind == OFFLOAD_DEVICE_CUDA)
    return CreateCudaDevice({options.device_index, TimeoutNs(options)});
  SimOptions sim{};
  sim.memory_bytes =
      options.sim_memory_bytes != 0 ? options.sim_memory_bytes : kDefaultSimMemoryBytes;
  sim.seed = options.sim_seed;
  sim.delay_ns_max = options.sim_delay_ns_max;
  sim.timeout_ns = TimeoutNs(options);
  if (options.sim_pinned_bytes_max != 0) sim.pinned_bytes_max = options.sim_pinned_bytes_max;
  return CreateSimDevice(sim, kernels);
}

// Devices that must outlive their contexts; this list keeps them reachable, for leak checkers. The
// list is made when the library is loaded, because later there may be no memory for it.
std::list<std::unique_ptr<Device>>& left_behind = *new std::list<std::unique_ptr<Device>>;
std::mutex left_behind_mutex;

SeatRequest SeatRequestOf(const offload_context_options_t& options, const Device& device) {
  return {options.numa_nodes, options.local_rank, options.local_world, device.pci_id()};
}

NumaPolicyAsked PolicyAskedFor(int32_t policy, const Seats& seats, uint32_t threads,
                               bool shares_chunks) {
  NumaPolicyAsked asked{policy, {}, seats.interleaved, shares_chunks};
  for (const system::NumaNode& node : seats.nodes) asked.threads.push_back({node.id, 0});
  for (uint32_t index = 0; index < threads; ++index) {
    const uint32_t node = NodeOfThread(seats.nodes, index, threads).id;
    for (PageWish::Share& share : asked.threads) share.parts += share.node == node ? 1 : 0;
  }
  return asked;
}

}  // namespace

Result<std::shared_ptr<Context>> Context::Create(const offload_context_options_t& options) {
  HYBRIDOPT_TRY(CheckOptions(options));
  HYBRIDOPT_ASSIGN(const KernelTable* kernels, SelectKernels());
  HYBRIDOPT_ASSIGN(std::unique_ptr<Device> device, CreateDevice(options, *kernels));
  HYBRIDOPT_ASSIGN(Seats seats, ChooseSeats(SeatRequestOf(options, *device)));
  return std::make_shared<Context>(options, std::move(device), *kernels, std::move(seats));
}

Context::Context(const offload_context_options_t& options, std::unique_ptr<Device> device,
                 const KernelTable& kernels, Seats seats, Result<Numa> numa)
    : pinned_bytes_max_(options.pinned_bytes_max != 0 ? options.pinned_bytes_max : UINT64_MAX),
      device_timeout_ns_(TimeoutNs(options)),
      log_(options.log),
      log_user_(options.log_user),
      kernels_(kernels),
      device_(std::move(device)),
      link_(*device_, device_timeout_ns_),
      seats_(std::move(seats)),
      workers_(options.threads, seats_.nodes, seats_.cpu_limit),
      numa_(std::move(numa)),
      pages_(ChooseNumaPolicy(
          PolicyAskedFor(options.numa_policy, seats_, workers_.threads(), !device_->unified()),
          numa_)),
      allow_pageable_(options.allow_pageable != 0) {
  if (pages_.policy != options.numa_policy) Log(OFFLOAD_LOG_WARNING, Notes().c_str());
}

// If a thread is still inside a function of the caller, the device outlives the context: the thread
// uses the device again when that function returns.
Context::~Context() {
  if (device_->Stop()) return;
  Log(OFFLOAD_LOG_WARNING,
      "the context is destroyed, but a function that offload_stream_run was given has not returned "
      "within device_timeout_ns: its thread and the memory of the simulated device stay until the "
      "process ends");
  std::lock_guard lock(left_behind_mutex);
  kept_device_.front() = std::move(device_);
  left_behind.splice(left_behind.end(), kept_device_);
}

Status Context::AwaitEvent(EventHandle event, const char* waiter, const char* what) {
  Status status = device_->Wait(event, device_timeout_ns_);
  if (status.code() != OFFLOAD_TIMED_OUT) return status;
  return NoProgressOnEvent(status, waiter, what);
}

Status Context::NoProgressOnEvent(const Status& timed_out, const char* waiter,
                                  const char* what) const {
  return NoProgress("the device", device_timeout_ns_,
                    std::string(" while ") + waiter + " waited for " + what + ": " +
                        timed_out.message() + "; is that stream stuck?");
}

Result<void*> Context::AllocateForCaller(uint64_t bytes) {
  std::lock_guard lock(given_out_mutex_);
  // The node of the set is made first: memory that cannot be listed must not be allocated.
  auto room = allocations_.extract(allocations_.insert(nullptr).first);
  HYBRIDOPT_ASSIGN(void* data, device_->Allocate(bytes));
  room.value() = data;
  allocations_.insert(std::move(room));
  return data;
}

Status Context::FreeForCaller(void* data) {
  if (data == nullptr) return {};
  std::lock_guard lock(given_out_mutex_);
  if (allocations_.erase(data) == 0)
    return Status::Error(
        OFFLOAD_INVALID_ARGUMENT,
        "data is %p, expected an address that offload_device_alloc of this context gave "
        "and that has not been freed",
        data);
  return device_->Free(data);
}

Result<StreamHandle> Context::CreateStreamForCaller() {
  std::lock_guard lock(given_out_mutex_);
  auto room = streams_.extract(streams_.insert(nullptr).first);
  HYBRIDOPT_ASSIGN(const StreamHandle stream, device_->CreateStream(kCallersStreamLabel));
  room.value() = stream;
  streams_.insert(std::move(room));
  return stream;
}

Status Context::DestroyStreamForCaller(StreamHandle stream) {
  if (stream == nullptr) return {};
  {
    std::lock_guard lock(given_out_mutex_);
    if (streams_.count(stream) == 0)
      return Status::Error(
          OFFLOAD_INVALID_ARGUMENT,
          "stream is %p, expected NULL or a stream that offload_stream_create of this context gave "
          "and that has not been destroyed",
          stream);
  }
  HYBRIDOPT_TRY(device_->DestroyStream(stream));
  std::lock_guard lock(given_out_mutex_);
  streams_.erase(stream);
  return {};
}

Status Context::CheckPinned(uint64_t bytes, const char* shrinks) const {
  std::lock_guard lock(pinned_mutex_);
  return CheckPinnedLocked(bytes, shrinks);
}

Status Context::CheckPinnedLocked(uint64_t bytes, const char* shrinks) const {
  if (bytes <= pinned_bytes_max_ - pinned_bytes_) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "options.pinned_bytes_max of the context is %llu with %llu in use, but "
                       "%llu more are needed; raise it to at least %llu, or make %s smaller",
                       static_cast<unsigned long long>(pinned_bytes_max_),
                       static_cast<unsigned long long>(pinned_bytes_),
                       static_cast<unsigned long long>(bytes),
                       static_cast<unsigned long long>(pinned_bytes_ + bytes), shrinks);
}

Status Context::ReservePinned(uint64_t bytes, const char* shrinks) {
  std::lock_guard lock(pinned_mutex_);
  HYBRIDOPT_TRY(CheckPinnedLocked(bytes, shrinks));
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

// First touch places memory only if threads stay on their nodes.
int32_t Context::NumaRung() const {
  const bool needs_seats = pages_.state.policy == PagePolicy::kToucher;
  if (pages_.placed() && (workers_.seated() || !needs_seats)) return OFFLOAD_NUMA_PLACED;
  return workers_.seated() ? OFFLOAD_NUMA_FIRST_TOUCH : OFFLOAD_NUMA_NONE;
}

void Context::Note(const char* text) {
  {
    std::lock_guard lock(notes_mutex_);
    notes_.insert(text);
  }
  Log(OFFLOAD_LOG_WARNING, text);
}

std::string Context::Notes() const {
  std::string notes = seats_.note + pages_.note;
  if (!workers_.seated()) notes += "threads do not keep to their node: the system refused; ";
  if (!system::HugePagesAvailable())
    notes += "no huge pages: transparent_hugepage is off; ";
  else if (!pages_.state.huge_pages)
    notes += "no huge pages for state: several nodes share each chunk; ";
  {
    std::lock_guard lock(notes_mutex_);
    for (const std::string& note : notes_) notes += note + "; ";
  }
  if (!notes.empty()) notes.resize(notes.size() - 2);
  return notes;
}

Result<offload_context_info_t> Context::Info() const {
  offload_context_info_t info{};
  info.device_kind = device_->kind();
  info.threads = workers_.threads();
  info.cpus_allowed = seats_.cpus_allowed;
  info.nodes = seats_.nodes_allowed;
  info.threads_seated = workers_.seated() ? 1 : 0;
  info.huge_pages = system::HugePagesAvailable() && pages_.state.huge_pages ? 1 : 0;
  info.local_rank = seats_.local_rank;
  info.local_world = seats_.local_world;
  info.cpus = workers_.cpus();
  info.numa_rung = NumaRung();
  for (const system::NumaNode& node : seats_.nodes)
    if (node.id < 64) info.numa_nodes |= uint64_t{1} << node.id;
  info.numa_policy = pages_.policy;
  for (const uint32_t node : pages_.pinned.nodes)
    if (node < 64) info.numa_memory_nodes |= uint64_t{1} << node;
  std::snprintf(info.notes, sizeof(info.notes), "%s", Notes().c_str());
  info.optimizers = optimizers_;
  info.stashes = stashes_;
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
    // An exception of the caller's log function does not change the outcome of the call that logs.
    (void)CatchExceptions("the log function", [&]() -> Status {
      log_(log_user_, level, text);
      return {};
    });
  } else if (level >= OFFLOAD_LOG_WARNING) {
    std::fprintf(stderr, "hybridopt: %s\n", text);
  }
}

}  // namespace hybridopt
