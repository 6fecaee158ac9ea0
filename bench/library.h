// The library as its users see it: classes that own the handles of offload.h. An error prints the
// library's text and ends the process.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "loops.h"
#include "offload.h"

namespace bench {

// A struct of offload.h with struct_size set and all other fields zero.
template <typename Struct>
Struct Zeroed() {
  Struct value{};
  value.struct_size = sizeof(Struct);
  return value;
}

void Require(int32_t status, const char* call);

// `count` rounded up, so that a param fills its last cache line.
inline uint64_t AlignedCount(uint64_t count) { return (count + 31) / 32 * 32; }

class Context {
 public:
  Context(int32_t device_kind, uint32_t threads, uint64_t sim_memory_bytes = 0);
  explicit Context(offload_context_t context) : context_(context) {}  // takes ownership
  // The GPU of one of `local_world` ranks, with the rank's part of the CPUs.
  Context(int32_t device_index, uint32_t local_rank, uint32_t local_world, uint32_t threads);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  offload_context_t get() const { return context_; }
  offload_context_info_t Info() const;

 private:
  offload_context_t context_ = nullptr;
};

// AdamW with bf16 gradients and params. The state is fp32 unless `layout` says otherwise, and all
// of it is on the host unless `lifecycle` says otherwise.
class Optimizer {
 public:
  struct Shape {
    uint64_t params;
    uint64_t elements;  // of each param
    uint64_t stride;    // elements from one param to the next in the arrays
  };
  struct Lifecycle {
    double device_fraction = 0;
    uint32_t movable = 0;
    uint64_t chunk_elements = 0;
    int32_t host_executors = OFFLOAD_EXECUTORS_AUTO;
    uint32_t staging_slots = 0;
    uint64_t stream_ring_bytes = 0;
    uint64_t save_buffer_bytes = 0;
    double disk_fraction = 0;
    const char* disk_paths = nullptr;
  };
  struct Layout {
    int32_t masters;  // enum offload_master_layout
    int32_t moments;  // enum offload_dtype
  };
  Optimizer(const Context& context, void* data, const void* grad, const Shape& shape,
            const Lifecycle& lifecycle = {0, 0, 0, OFFLOAD_EXECUTORS_AUTO, 0, 0, 0, 0, nullptr},
            const Layout& layout = {OFFLOAD_MASTER_FP32, OFFLOAD_FP32});
  // Creates params of these element counts, each at the next cache line of the arrays.
  Optimizer(const Context& context, void* data, const void* grad, std::span<const uint64_t> counts,
            const Layout& layout = {OFFLOAD_MASTER_FP32, OFFLOAD_FP32});
  ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  offload_optimizer_t get() const { return optimizer_; }

  // Queues one step and waits for it.
  void Step(uint32_t flags, double grad_norm_max = 0);
  // Queues one of the functions that move arrays, for all params, and waits for it.
  using Move = int32_t (*)(offload_optimizer_t, const offload_move_options_t*, offload_ticket_t*);
  void Run(Move move);
  // Binds the gradients' addresses again, as frameworks do before every step.
  void BindAll();
  // Binds no gradient for every second param.
  void DropEverySecondGrad();
  offload_step_result_t LastResult() const;
  offload_stats_t Stats() const;
  const float* Master() const;  // of the first param

 private:
  void Add(uint64_t element, uint64_t count, void* data, const void* grad);

  offload_optimizer_t optimizer_ = nullptr;
  std::vector<offload_binding_t> bindings_;
};

}  // namespace bench
