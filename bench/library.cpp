#include "library.h"

#include <cstdio>
#include <cstdlib>
#include <string>

namespace bench {

void Require(int32_t status, const char* call) {
  if (status == OFFLOAD_OK) return;
  std::fprintf(stderr, "hybridopt_bench: %s: %s: %s\n", call, offload_status_name(status),
               offload_last_error());
  std::exit(1);
}

Context::Context(int32_t device_kind, uint32_t threads, uint64_t sim_memory_bytes) {
  auto options = Zeroed<offload_context_options_t>();
  options.device_kind = device_kind;
  options.threads = threads;
  options.sim_memory_bytes = sim_memory_bytes;
  Require(offload_context_create(&options, &context_), "offload_context_create");
}

Context::Context(int32_t device_index, uint32_t local_rank, uint32_t local_world,
                 uint32_t threads) {
  auto options = Zeroed<offload_context_options_t>();
  options.device_kind = OFFLOAD_DEVICE_CUDA;
  options.device_index = device_index;
  options.local_rank = local_rank;
  options.local_world = local_world;
  options.threads = threads;
  Require(offload_context_create(&options, &context_), "offload_context_create");
}

Context::~Context() { Require(offload_context_destroy(context_), "offload_context_destroy"); }

offload_context_info_t Context::Info() const {
  auto info = Zeroed<offload_context_info_t>();
  Require(offload_context_get_info(context_, &info), "offload_context_get_info");
  return info;
}

namespace {

offload_optimizer_t Create(const Context& context, const Optimizer::Lifecycle& lifecycle,
                           const Optimizer::Layout& layout) {
  offload_optimizer_t optimizer = nullptr;
  auto options = Zeroed<offload_optimizer_options_t>();
  options.algorithm = OFFLOAD_ADAMW;
  options.device_fraction = lifecycle.device_fraction;
  options.movable = lifecycle.movable;
  options.chunk_elements = lifecycle.chunk_elements;
  options.host_executors = lifecycle.host_executors;
  options.staging_slots = lifecycle.staging_slots;
  options.stream_ring_bytes = lifecycle.stream_ring_bytes;
  options.save_buffer_bytes = lifecycle.save_buffer_bytes;
  options.disk_fraction = lifecycle.disk_fraction;
  options.disk_paths = lifecycle.disk_paths;
  options.master_layout = layout.masters;
  options.moment_dtype = layout.moments;
  Require(offload_optimizer_create(context.get(), &options, &optimizer),
          "offload_optimizer_create");
  const AdamWFactors factors;
  auto group = Zeroed<offload_group_t>();
  group.lr = factors.lr;
  group.beta1 = factors.beta1;
  group.beta2 = factors.beta2;
  group.eps = factors.eps;
  group.weight_decay = factors.weight_decay;
  uint32_t id = 0;  // the only group
  Require(offload_optimizer_add_group(optimizer, &group, &id), "offload_optimizer_add_group");
  return optimizer;
}

}  // namespace

Optimizer::Optimizer(const Context& context, void* data, const void* grad, const Shape& shape,
                     const Lifecycle& lifecycle, const Layout& layout)
    : optimizer_(Create(context, lifecycle, layout)) {
  for (uint64_t i = 0; i < shape.params; ++i) Add(i * shape.stride, shape.elements, data, grad);
  Require(offload_optimizer_commit(optimizer_, nullptr), "offload_optimizer_commit");
}

Optimizer::Optimizer(const Context& context, void* data, const void* grad,
                     std::span<const uint64_t> counts, const Layout& layout)
    : optimizer_(Create(context, {}, layout)) {
  uint64_t element = 0;
  for (uint64_t count : counts) {
    Add(element, count, data, grad);
    element += AlignedCount(count);
  }
  Require(offload_optimizer_commit(optimizer_, nullptr), "offload_optimizer_commit");
}

void Optimizer::Add(uint64_t element, uint64_t count, void* data, const void* grad) {
  const std::string name = "param" + std::to_string(bindings_.size());
  auto param = Zeroed<offload_param_t>();
  param.dtype = OFFLOAD_BF16;
  param.grad_dtype = OFFLOAD_BF16;
  param.count = count;
  param.name = name.c_str();
  param.data = static_cast<uint16_t*>(data) + element;
  param.grad = static_cast<const uint16_t*>(grad) + element;
  auto binding = Zeroed<offload_binding_t>();
  Require(offload_optimizer_add_params(optimizer_, &param, 1, &binding.param),
          "offload_optimizer_add_params");
  binding.grad = param.grad;
  bindings_.push_back(binding);
}

void Optimizer::DropEverySecondGrad() {
  for (size_t i = 0; i < bindings_.size(); i += 2) bindings_[i].grad = nullptr;
  BindAll();
}

Optimizer::~Optimizer() {
  Require(offload_optimizer_destroy(optimizer_), "offload_optimizer_destroy");
}

void Optimizer::Step(uint32_t flags, double grad_norm_max) {
  auto options = Zeroed<offload_step_options_t>();
  options.flags = flags;
  options.grad_norm_max = grad_norm_max;
  Require(offload_optimizer_step(optimizer_, &options, nullptr), "offload_optimizer_step");
  Require(offload_optimizer_wait(optimizer_, 0, -1), "offload_optimizer_wait");
}

void Optimizer::Run(Move move) {
  Require(move(optimizer_, nullptr, nullptr), "offload_optimizer_offload_ or _reload_");
  Require(offload_optimizer_wait(optimizer_, 0, -1), "offload_optimizer_wait");
}

void Optimizer::BindAll() {
  Require(
      offload_optimizer_bind(optimizer_, bindings_.data(), static_cast<uint32_t>(bindings_.size())),
      "offload_optimizer_bind");
}

offload_step_result_t Optimizer::LastResult() const {
  auto result = Zeroed<offload_step_result_t>();
  Require(offload_optimizer_step_result(optimizer_, 0, &result), "offload_optimizer_step_result");
  return result;
}

offload_stats_t Optimizer::Stats() const {
  auto stats = Zeroed<offload_stats_t>();
  Require(offload_optimizer_get_stats(optimizer_, &stats), "offload_optimizer_get_stats");
  return stats;
}

const float* Optimizer::Master() const {
  auto view = Zeroed<offload_state_view_t>();
  Require(offload_optimizer_state(optimizer_, 0, OFFLOAD_STATE_MASTER, &view),
          "offload_optimizer_state");
  return static_cast<const float*>(view.host_data);
}

}  // namespace bench
