// LifecycleRig: plays the framework that uses the library. It owns the buffers of all params and
// gradients, frees and allocates them, moves them with the library's calls, and compares all bits
// with a Model, which knows nothing of residence.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../labelled_device.h"
#include "machine/context.h"
#include "optimizer/handle_table.h"
#include "rig.h"

namespace hybridopt {

inline constexpr uint32_t kMoveAll = OFFLOAD_MOVABLE_PARAMS | OFFLOAD_MOVABLE_GRADS |
                                     OFFLOAD_MOVABLE_STATES | OFFLOAD_MOVABLE_ACCUMULATE;

struct LifecycleSetting {
  int32_t device_kind = OFFLOAD_DEVICE_SIM;
  int32_t cuda_index = 0;  // of a real device
  uint32_t threads = 2;
  uint64_t seed = 0;
  uint64_t delay_ns_max = 0;
  uint64_t memory_bytes = 8 << 20;
  OptimizerSetting optimizer = {0, 1024, 2};
  uint32_t movable = kMoveAll;
  std::vector<int32_t> chunk_orders;  // per param; empty: all 0
  const offload_comm_t* comm = nullptr;
  int32_t track_changes = 0;
  std::string name_prefix = {};  // prefix of params' names: independent ranks have different names
  // Puts a device of the test between the library and the real device.
  std::function<std::unique_ptr<Device>(std::unique_ptr<Device>)> wrap;
  // Sets `wrap` to a function that makes a Wrapper. When the rig is made, *made becomes the address
  // of that device.
  template <typename Wrapper, typename... Arguments>
  void WrapIn(Wrapper** made, Arguments... arguments) {
    wrap = [=](std::unique_ptr<Device> device) {
      auto wrapper = std::make_unique<Wrapper>(std::move(device), arguments...);
      *made = wrapper.get();
      return wrapper;
    };
  }
  system::Files* files = nullptr;  // where checkpoints go; NULL: the system's
  // Threads that wait on the host for such events are slow; empty: none.
  std::string slow_event = {};
};

// Draws which waits are slow. Then the other executor updates most chunks; without slow waits, each
// executor takes chunks at its own speed.
inline std::string DrawSlowEvent(Random& random) {
  constexpr const char* kEvents[] = {"gradients landed", "state down", "", ""};
  return kEvents[random.Below(4)];
}

// Holds up each thread that waits on the host for an event of one kind.
class SlowDevice final : public LabelledDevice {
 public:
  SlowDevice(std::unique_ptr<Device> device, std::string slow_event)
      : LabelledDevice(std::move(device)), slow_event_(std::move(slow_event)) {}

  Status Wait(EventHandle event, int64_t timeout_ns) override {
    if (LabelOf(event) == slow_event_) std::this_thread::sleep_for(std::chrono::microseconds(100));
    return ForwardingDevice::Wait(event, timeout_ns);
  }

 private:
  const std::string slow_event_;
};

using MoveFunction = int32_t (*)(offload_optimizer_t, const offload_move_options_t*,
                                 offload_ticket_t*);

struct MoveArguments {
  std::vector<uint32_t> params = {};  // empty: all
  uint32_t flags = 0;
  std::vector<offload_stream_t> streams = {};
};

// A kernel of the caller that runs until Open().
class Gate {
 public:
  void Open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }
  // Queues a wait for Open() on a stream.
  void Close(offload_context_t context, offload_stream_t stream) {
    MUST(offload_stream_run(context, stream, Pass, this));
  }

 private:
  static void Pass(void* self) {
    auto* const gate = static_cast<Gate*>(self);
    std::unique_lock lock(gate->mutex_);
    gate->opened_.wait(lock, [gate] { return gate->open_; });
  }
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
};

class LifecycleRig {
 public:
  LifecycleRig(const Problem& problem, const LifecycleSetting& setting)
      : data(problem.params.size()),
        grad(problem.params.size()),
        problem_(problem),
        setting_(setting) {
    MakeContext();
    MakeOptimizer();
    for (uint32_t id = 0; id < size(); ++id) {
      data[id] = Allocate(problem.params[id].data_bytes());
      Write(data[id], problem.initial[id]);
    }
    AddParams();
    MUST(offload_optimizer_commit(optimizer_, nullptr));
  }
  ~LifecycleRig() {
    if (optimizer_ != nullptr) DestroyOptimizer();
    for (const auto& [buffer, bytes] : buffers_) MUST(offload_device_free(context_, buffer));
    for (void* block : blocks_) MUST(offload_pool_free(block));
    if (pool_ != nullptr) MUST(offload_pool_destroy(pool_));
    MUST(offload_context_destroy(context_));
  }
  LifecycleRig(const LifecycleRig&) = delete;
  LifecycleRig& operator=(const LifecycleRig&) = delete;

  uint32_t size() const { return static_cast<uint32_t>(problem_.params.size()); }
  offload_context_t context() const { return context_; }
  offload_optimizer_t optimizer() const { return optimizer_; }
  const Problem& problem() const { return problem_; }
  void DestroyOptimizer() {
    MUST(offload_optimizer_destroy(optimizer_));
    optimizer_ = nullptr;
  }

  // ---- buffers

  std::vector<void*> data;  // per param: its address, or NULL
  std::vector<void*> grad;  // per param: the address for Bind; NULL: no gradient

  // At least one element, so that empty params have addresses too.
  void* Allocate(uint64_t bytes) {
    void* buffer = nullptr;
    MUST(offload_device_alloc(context_, std::max<uint64_t>(bytes, 4), &buffer));
    buffers_[buffer] = std::max<uint64_t>(bytes, 4);
    return buffer;
  }
  void Free(void*& buffer) {
    if (buffer == nullptr) return;
    // Code that still reads it gets NaNs, as on the simulated device.
    if (setting_.device_kind == OFFLOAD_DEVICE_HOST) std::memset(buffer, 0xff, buffers_[buffer]);
    MUST(offload_device_free(context_, buffer));
    buffers_.erase(buffer);
    buffer = nullptr;
  }
  void Write(void* buffer, const Bytes& bytes, offload_stream_t stream = nullptr) {
    MUST(offload_device_upload(context_, buffer, bytes.data(), bytes.size(), stream));
  }
  Bytes Read(const void* buffer, uint64_t bytes) const {
    Bytes read(bytes);
    MUST(offload_device_download(context_, read.data(), buffer, bytes, nullptr));
    return read;
  }

  // The gradient gets a buffer of its own; the old buffer stays as it is, or is freed.
  void NewGrad(uint32_t id, const Bytes& bytes) {
    grad[id] = Allocate(bytes.size());
    Write(grad[id], bytes);
  }
  void NewGrads(const StepInput& input) {
    for (uint32_t id = 0; id < size(); ++id) {
      Free(grad[id]);
      if (input.grads[id].has_value()) NewGrad(id, *input.grads[id]);
    }
  }
  void FreeAll() {
    for (uint32_t id = 0; id < size(); ++id) {
      Free(data[id]);
      Free(grad[id]);
    }
  }
  // Allocates new buffers, in random order and with gaps in between, so that no address stays the
  // same.
  void AllocateAll(bool grads_too, Random& random) {
    std::vector<uint32_t> order;
    for (uint32_t id = 0; id < size(); ++id) order.push_back(id);
    random.Shuffle(order);
    std::vector<void*> gaps;
    for (uint32_t id : order) {
      gaps.push_back(Allocate(256 * (1 + random.Below(8))));
      data[id] = Allocate(problem_.params[id].data_bytes());
      if (grads_too) grad[id] = Allocate(problem_.params[id].grad_bytes());
    }
    for (void* gap : gaps) Free(gap);
  }
  // Moves all params into a pool.
  void PutParamsIntoPool() {
    MUST(offload_pool_create(context_, &pool_));
    for (uint32_t id = 0; id < size(); ++id) {
      const uint64_t bytes = problem_.params[id].data_bytes();
      void* block = nullptr;
      MUST(offload_pool_alloc(pool_, std::max<uint64_t>(bytes, 4), &block));
      blocks_.push_back(block);
      Write(block, Read(data[id], bytes));
      Free(data[id]);
      data[id] = block;
    }
  }
  void ReleasePool() { MUST(offload_pool_release_memory(pool_)); }
  void TakePool() { MUST(offload_pool_take_memory(pool_)); }
  // The bytes that the device counts as the caller's.
  uint64_t allocated_bytes() const {
    uint64_t sum = 0;
    const uint64_t unit = setting_.device_kind == OFFLOAD_DEVICE_CUDA ? 2 << 20 : 256;
    for (const auto& [buffer, bytes] : buffers_) sum += (bytes + unit - 1) / unit * unit;
    return sum;
  }

  // ---- calls

  void Bind(const std::vector<uint32_t>& ids) {
    std::vector<offload_binding_t> bindings;
    for (uint32_t id : ids) {
      auto binding = Make<offload_binding_t>();
      binding.param = id;
      binding.data = data[id];
      binding.grad = grad[id];
      bindings.push_back(binding);
    }
    MUST(offload_optimizer_bind(optimizer_, bindings.data(),
                                static_cast<uint32_t>(bindings.size())));
  }
  void BindAll() {
    std::vector<uint32_t> ids;
    for (uint32_t id = 0; id < size(); ++id) ids.push_back(id);
    Bind(ids);
  }

  int32_t TryMove(MoveFunction move, const MoveArguments& arguments = {},
                  offload_ticket_t* ticket = nullptr) {
    auto options = Make<offload_move_options_t>();
    options.flags = arguments.flags;
    options.params = arguments.params.data();
    options.param_count = static_cast<uint32_t>(arguments.params.size());
    options.streams = arguments.streams.data();
    options.stream_count = static_cast<uint32_t>(arguments.streams.size());
    return move(optimizer_, &options, ticket);
  }
  offload_ticket_t Move(MoveFunction move, const MoveArguments& arguments = {}) {
    offload_ticket_t ticket = 0;
    MUST(TryMove(move, arguments, &ticket));
    return ticket;
  }

  offload_ticket_t SetDeviceFraction(double fraction) {
    offload_ticket_t ticket = 0;
    MUST(offload_optimizer_set_device_fraction(optimizer_, fraction, &ticket));
    return ticket;
  }
  offload_ticket_t SetFractions(double device, double disk) {
    offload_ticket_t ticket = 0;
    MUST(offload_optimizer_set_fractions(optimizer_, device, disk, &ticket));
    return ticket;
  }

  void SetGroups(const std::vector<offload_group_t>& groups) {
    for (uint32_t id = 0; id < groups.size(); ++id)
      MUST(offload_optimizer_set_group(optimizer_, id, &groups[id]));
  }
  int32_t TryStep(const StepInput& input, offload_stream_t stream = nullptr,
                  offload_ticket_t* ticket = nullptr) {
    auto options = Make<offload_step_options_t>();
    options.flags = input.flags;
    options.grad_scale = input.grad_scale;
    options.grad_norm_max = input.grad_norm_max;
    options.stream = stream;
    return offload_optimizer_step(optimizer_, &options, ticket);
  }
  offload_ticket_t Step(const StepInput& input, offload_stream_t stream = nullptr) {
    SetGroups(input.groups);
    offload_ticket_t ticket = 0;
    MUST(TryStep(input, stream, &ticket));
    return ticket;
  }
  offload_ticket_t Save(const std::string& path, uint32_t io_depth = 0) {
    auto options = Make<offload_save_options_t>();
    options.path = path.c_str();
    options.io_depth = io_depth;
    offload_ticket_t ticket = 0;
    MUST(offload_optimizer_save(optimizer_, &options, &ticket));
    return ticket;
  }
  // Loads, waits, and returns the outcome.
  int32_t TryLoad(const std::string& path, uint32_t flags = 0, uint32_t io_depth = 0) {
    auto options = Make<offload_load_options_t>();
    options.path = path.c_str();
    options.flags = flags;
    options.io_depth = io_depth;
    offload_ticket_t ticket = 0;
    const int32_t status = offload_optimizer_load(optimizer_, &options, &ticket);
    return status == OFFLOAD_OK ? offload_optimizer_wait(optimizer_, ticket, -1) : status;
  }
  void Wait(offload_ticket_t ticket = 0) { MUST(offload_optimizer_wait(optimizer_, ticket, -1)); }
  // What a step that has completed did.
  offload_step_result_t ResultOf(offload_ticket_t ticket) const {
    auto result = Make<offload_step_result_t>();
    MUST(offload_optimizer_step_result(optimizer_, ticket, &result));
    return result;
  }
  // A step over new gradients, from its first call until its result is known.
  offload_step_result_t StepOnce(const StepInput& input) {
    NewGrads(input);
    BindAll();
    const offload_ticket_t ticket = Step(input);
    Wait();
    return ResultOf(ticket);
  }

  offload_stats_t Stats() const {
    auto stats = Make<offload_stats_t>();
    MUST(offload_optimizer_get_stats(optimizer_, &stats));
    return stats;
  }
  offload_plan_t Plan() const {
    auto plan = Make<offload_plan_t>();
    MUST(offload_optimizer_plan(optimizer_, &plan));
    return plan;
  }
  // On a GPU these are the bytes of all programs: tests that count need the GPU to themselves.
  uint64_t DeviceBytesUsed() const {
    auto info = Make<offload_context_info_t>();
    MUST(offload_context_get_info(context_, &info));
    return info.device_memory_bytes - info.device_memory_free_bytes - idle_bytes_;
  }

  // ---- bits

  // Empty if every bit of params, states and counts is the model's; otherwise describes the first
  // difference.
  std::string Difference(const Model& model) const {
    for (uint32_t id = 0; id < size(); ++id) {
      const std::string where =
          " of param " + std::to_string(id) + " (" + problem_.params[id].Text() + ")";
      if (Read(data[id], problem_.params[id].data_bytes()) != model.params[id].data)
        return "data" + where;
      for (int32_t kind = OFFLOAD_STATE_MASTER; kind <= OFFLOAD_STATE_SUM; ++kind) {
        const std::string difference = StateDifference(id, kind, model.params[id]);
        if (!difference.empty()) return difference + where;
      }
    }
    return "";
  }

  // Compares the result of a step with the model that has just made the same step.
  std::string ResultDifference(const Model& model, offload_ticket_t ticket = 0) const {
    const offload_step_result_t result = ResultOf(ticket);
    const Verdict& verdict = model.verdict;
    char text[200] = "";
    if (result.skipped != verdict.skip || result.step != model.steps_applied ||
        std::bit_cast<uint64_t>(result.grad_norm) != std::bit_cast<uint64_t>(verdict.grad_norm) ||
        std::bit_cast<uint64_t>(result.grad_clip) != std::bit_cast<uint64_t>(verdict.grad_clip))
      std::snprintf(text, sizeof(text),
                    "skipped %d, step %" PRIu64 ", norm %a, clip %a; expected %d, %" PRIu64
                    ", %a, %a",
                    result.skipped, result.step, result.grad_norm, result.grad_clip, verdict.skip,
                    model.steps_applied, verdict.grad_norm, verdict.grad_clip);
    return text;
  }

 private:
  void MakeContext() {
    offload_context_options_t options{};
    options.threads = setting_.threads;
    options.log = [](void*, int32_t, const char*) {};
    const KernelTable& kernels = *SelectKernels().value();
    const SimOptions sim{setting_.memory_bytes, setting_.seed, setting_.delay_ns_max};
    std::unique_ptr<Device> device =
        setting_.device_kind == OFFLOAD_DEVICE_HOST
            ? CreateHostDevice()
            : std::move(MakeAccelerator(sim, kernels, setting_.cuda_index).value());
    if (!setting_.slow_event.empty())
      device = std::make_unique<SlowDevice>(std::move(device), setting_.slow_event);
    if (setting_.wrap) device = setting_.wrap(std::move(device));
    using Contexts = HandleTable<Context, HandleKind::kContext>;
    auto context = std::make_shared<Context>(options, std::move(device), kernels);
    if (setting_.files != nullptr) context->UseFiles(*setting_.files);
    context_ =
        static_cast<offload_context_t>(Contexts::Instance().Insert(std::move(context)).value());
    idle_bytes_ = 0;
    idle_bytes_ = DeviceBytesUsed();
  }

  void MakeOptimizer() {
    auto options = Make<offload_optimizer_options_t>();
    options.algorithm = problem_.AlgorithmOfGroup(0);
    options.device_fraction = setting_.optimizer.device_fraction;
    options.chunk_elements = setting_.optimizer.chunk_elements;
    options.staging_slots = setting_.optimizer.staging_slots;
    options.host_executors = setting_.optimizer.host_executors;
    options.stream_ring_bytes = setting_.optimizer.stream_ring_bytes;
    options.early_update_bytes = setting_.optimizer.early_update_bytes;
    options.save_buffer_bytes = setting_.optimizer.save_buffer_bytes;
    options.disk_fraction = setting_.optimizer.disk_fraction;
    if (!setting_.optimizer.disk_paths.empty())
      options.disk_paths = setting_.optimizer.disk_paths.c_str();
    options.disk_ring_bytes = setting_.optimizer.disk_ring_bytes;
    options.movable = setting_.movable;
    options.comm = setting_.comm;
    options.track_changes = setting_.track_changes;
    problem_.state.Put(options);
    MUST(offload_optimizer_create(context_, &options, &optimizer_));
    for (const offload_group_t& group : problem_.groups) {
      uint32_t id = 0;
      MUST(offload_optimizer_add_group(optimizer_, &group, &id));
    }
  }

  void AddParams() {
    for (uint32_t id = 0; id < size(); ++id) {
      const ParamSpec& spec = problem_.params[id];
      const std::string name = setting_.name_prefix + "param" + std::to_string(id);
      auto param = Make<offload_param_t>();
      param.group = spec.group;
      param.dtype = spec.dtype;
      param.grad_dtype = spec.grad_dtype;
      param.placement = spec.placement;
      param.name = name.c_str();
      param.data = data[id];
      param.count = spec.count;
      if (!setting_.chunk_orders.empty()) param.chunk_order = setting_.chunk_orders[id];
      MUST(offload_optimizer_add_params(optimizer_, &param, 1, nullptr));
    }
  }

  std::string StateDifference(uint32_t id, int32_t kind, const Model::Param& param) const {
    const StateBits state =
        ReadState(optimizer_, id, kind, param.data,
                  [this](const void* data, uint64_t bytes) { return Read(data, bytes); });
    if (!state.error.empty())
      return kind == OFFLOAD_STATE_MASTER ? state.error : "";  // not of this algorithm
    if (state.step_count != param.step_count) return "step count";
    const std::vector<float>& expected = kind == OFFLOAD_STATE_MASTER       ? param.master
                                         : kind == OFFLOAD_STATE_EXP_AVG_SQ ? param.moment1
                                                                            : param.moment0;
    if (state.values.size() != expected.size()) return "count of state " + std::to_string(kind);
    for (size_t i = 0; i < expected.size(); ++i)
      if (std::memcmp(&state.values[i], &expected[i], 4) != 0)
        return "element " + std::to_string(i) + " of state " + std::to_string(kind);
    return "";
  }

  const Problem& problem_;
  const LifecycleSetting setting_;
  offload_context_t context_ = nullptr;
  offload_optimizer_t optimizer_ = nullptr;
  std::map<void*, uint64_t> buffers_;  // all that are allocated, with their bytes
  offload_pool_t pool_ = nullptr;
  std::vector<void*> blocks_;  // of the pool
  uint64_t idle_bytes_ = 0;    // what a real device's driver takes for itself
};

// ---------------------------------------------------------------------------- helpers of models --

// A gradient widened to fp32, exactly.
inline std::vector<float> Widened(int32_t dtype, const Bytes& array) {
  std::vector<float> wide(array.size() / DtypeBytes(dtype));
  ReferenceKernels().ToFp32(dtype)(array.data(), wide.size(), wide.data());
  return wide;
}

// Adds one micro-batch, or starts with it.
inline void AddTo(std::optional<std::vector<float>>& sum, int32_t dtype, const Bytes& grad) {
  const std::vector<float> wide = Widened(dtype, grad);
  if (!sum.has_value()) {
    sum = wide;
    return;
  }
  for (size_t i = 0; i < wide.size(); ++i) (*sum)[i] = (*sum)[i] + wide[i];
}

inline Bytes BytesOf(const std::vector<float>& values) {
  Bytes bytes(values.size() * 4);
  if (!values.empty()) std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

}  // namespace hybridopt
