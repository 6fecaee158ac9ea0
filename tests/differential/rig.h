// Rig: the library under test, called through its ABI, together with a Model that tells what every
// byte must be.
#pragma once

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../devices.h"
#include "model.h"
#include "problem.h"
#include "state_bits.h"

namespace hybridopt {

// For calls that no test expects to fail.
#define MUST(call) ::hybridopt::Must((call), #call)
inline void Must(int32_t status, const char* call) {
  if (status == OFFLOAD_OK) return;
  std::fprintf(stderr, "%s: %s: %s\n", call, offload_status_name(status), offload_last_error());
  std::abort();
}

template <typename Struct>
Struct Make() {
  Struct result{};
  result.struct_size = sizeof(result);
  return result;
}

struct ContextSetting {
  int32_t device_kind = OFFLOAD_DEVICE_HOST;
  uint32_t threads = 1;
  std::string isa;  // empty: the best
  uint64_t seed = 0;
  uint64_t delay_ns_max = 0;
  uint64_t device_timeout_ns = 0;
  int32_t device_index = 0;
};

struct OptimizerSetting {
  double device_fraction = 0;
  uint64_t chunk_elements = 0;
  uint32_t staging_slots = 0;
  int32_t host_executors = OFFLOAD_EXECUTORS_AUTO;
  uint64_t stream_ring_bytes = 0;
  uint64_t early_update_bytes = 0;
  uint64_t save_buffer_bytes = 0;
  double disk_fraction = 0;
  std::string disk_paths = {};
  uint64_t disk_ring_bytes = 0;
};

// Draws which executors update the host share, and how large the device's ring is for such chunks.
// With fp32 state an element takes at most 12 bytes of the ring, in addition to padding.
inline void DrawExecutors(uint64_t chunk_elements, Random& random, OptimizerSetting& setting) {
  setting.host_executors = static_cast<int32_t>(random.Below(3));
  const bool rings = setting.host_executors != OFFLOAD_EXECUTORS_CPU;
  if (rings && random.OneIn(2))
    setting.stream_ring_bytes = (2 + random.Below(4)) * (chunk_elements * 16 + (64 << 10));
}

// What makes an optimizer one of several ranks.
struct RankSetting {
  const offload_comm_t* comm = nullptr;
  uint64_t comm_timeout_ns = 0;
  uint32_t movable = 0;
  std::vector<const offload_shard_t*> shards;  // per param
  std::vector<uint32_t> flags;                 // per param
};

inline std::string Text(const ContextSetting& context, const OptimizerSetting& optimizer) {
  char text[256];
  std::snprintf(text, sizeof(text),
                "%s, isa '%s', %u threads, fraction %g, chunks of %" PRIu64
                ", %u slots, executors %d, ring %" PRIu64,
                DeviceText(context.device_kind), context.isa.c_str(), context.threads,
                optimizer.device_fraction, optimizer.chunk_elements, optimizer.staging_slots,
                optimizer.host_executors, optimizer.stream_ring_bytes);
  return text;
}

class TestContext {
 public:
  explicit TestContext(const ContextSetting& setting) {
    auto options = Make<offload_context_options_t>();
    options.device_kind = setting.device_kind;
    options.device_index = setting.device_index;
    options.threads = setting.threads;
    options.device_timeout_ns = setting.device_timeout_ns;
    options.log = [](void*, int32_t, const char*) {};
    if (setting.device_kind == OFFLOAD_DEVICE_SIM) {
      options.sim_memory_bytes = 16 << 20;
      options.sim_seed = setting.seed;
      options.sim_delay_ns_max = setting.delay_ns_max;
    }
    if (setting.isa.empty()) {
      unsetenv("HYBRIDOPT_ISA");
    } else {
      setenv("HYBRIDOPT_ISA", setting.isa.c_str(), 1);
    }
    MUST(offload_context_create(&options, &handle_));
    unsetenv("HYBRIDOPT_ISA");
  }
  ~TestContext() { MUST(offload_context_destroy(handle_)); }
  TestContext(const TestContext&) = delete;
  TestContext& operator=(const TestContext&) = delete;

  offload_context_t handle() const { return handle_; }
  std::string isa() const {
    auto info = Make<offload_context_info_t>();
    MUST(offload_context_get_info(handle_, &info));
    return info.isa;
  }

 private:
  offload_context_t handle_ = nullptr;
};

// The instruction sets that this CPU can run; the scalar specification is always among them.
inline std::vector<std::string> UsableIsas() {
  std::vector<std::string> isas = {ReferenceKernels().isa};
  for (const KernelTable* table : SimdKernels()) isas.push_back(table->isa);
  return isas;
}

// The places of a problem's arrays in one block of memory: in random order, each at an odd element,
// with guard bytes between them. Params come before gradients.
struct Layout {
  Layout(const Problem& problem, uint64_t seed)
      : data(problem.params.size()), grad(problem.params.size()) {
    Random random(seed);
    std::vector<size_t> order;
    for (size_t id = 0; id < data.size(); ++id) order.push_back(id);
    random.Shuffle(order);
    for (size_t id : order)
      data[id] = Take(problem.params[id].dtype, problem.params[id].count, random);
    grads_begin = bytes;
    for (size_t id : order)
      grad[id] = Take(problem.params[id].grad_dtype, problem.params[id].count, random);
    bytes += 64;
  }

  std::vector<uint64_t> data;  // byte offsets, per param
  std::vector<uint64_t> grad;
  uint64_t grads_begin = 0;
  uint64_t bytes = 0;

 private:
  uint64_t Take(int32_t dtype, uint64_t count, Random& random) {
    const uint64_t element = DtypeBytes(dtype);
    const uint64_t begin = (bytes / 64 + 1) * 64 + (1 + 2 * random.Below(8)) * element;
    bytes = begin + count * element;
    return begin;
  }
};

inline constexpr std::byte kGuard{0xa5};

class Rig {
 public:
  // Commits at once; params and gradients are in block 0.
  Rig(const TestContext& context, const Problem& problem, const OptimizerSetting& setting,
      const RankSetting& rank = {})
      : context_(context.handle()), problem_(problem) {
    auto options = Make<offload_optimizer_options_t>();
    options.algorithm = problem.AlgorithmOfGroup(0);
    options.device_fraction = setting.device_fraction;
    options.chunk_elements = setting.chunk_elements;
    options.staging_slots = setting.staging_slots;
    options.host_executors = setting.host_executors;
    options.stream_ring_bytes = setting.stream_ring_bytes;
    options.early_update_bytes = setting.early_update_bytes;
    options.save_buffer_bytes = setting.save_buffer_bytes;
    options.disk_fraction = setting.disk_fraction;
    if (!setting.disk_paths.empty()) options.disk_paths = setting.disk_paths.c_str();
    options.disk_ring_bytes = setting.disk_ring_bytes;
    options.comm = rank.comm;
    options.comm_timeout_ns = rank.comm_timeout_ns;
    options.movable = rank.movable;
    problem.state.Put(options);
    MUST(offload_optimizer_create(context_, &options, &handle_));
    for (const offload_group_t& group : problem.groups) AddGroup(group);
    AddBlock(1);
    PutParams(0, Model(problem));
    AddParams(rank);
    MUST(offload_optimizer_commit(handle_, nullptr));
  }
  ~Rig() {
    MUST(offload_optimizer_destroy(handle_));
    for (const Block& block : blocks_) MUST(offload_device_free(context_, block.device));
  }
  Rig(const Rig&) = delete;
  Rig& operator=(const Rig&) = delete;

  offload_optimizer_t handle() const { return handle_; }
  void* DataAddress(size_t block, size_t id) const {
    return At(block, blocks_[block].layout.data[id]);
  }
  void* GradAddress(size_t block, size_t id) const {
    return At(block, blocks_[block].layout.grad[id]);
  }
  const Layout& layout(size_t block) const { return blocks_[block].layout; }

  // Adds a block of arrays with its own layout; returns its number.
  size_t AddBlock(uint64_t seed) {
    Layout layout(problem_, seed);
    Block block{layout, nullptr, Bytes(layout.bytes, kGuard)};
    MUST(offload_device_alloc(context_, layout.bytes, &block.device));
    blocks_.push_back(std::move(block));
    Upload(blocks_.size() - 1, 0, layout.bytes);
    return blocks_.size() - 1;
  }

  // Frees the block, as a framework frees gradients that are no longer needed.
  void FreeBlock(size_t block) {
    MUST(offload_device_free(context_, blocks_[block].device));
    blocks_[block].device = nullptr;
  }

  // Exchanges the places of two params of the same size in a block; bind and fill the block
  // afterwards.
  void SwapPlaces(size_t block, size_t a, size_t b) {
    std::swap(blocks_[block].layout.data[a], blocks_[block].layout.data[b]);
  }

  void PutParams(size_t block, const Model& model) {
    ExpectParams(block, model);
    Upload(block, 0, blocks_[block].layout.grads_begin);
  }

  void PutGrads(size_t block, const StepInput& input) {
    ExpectGrads(block, input);
    const Layout& layout = blocks_[block].layout;
    Upload(block, layout.grads_begin, layout.bytes - layout.grads_begin);
  }

  // The block will hold these gradients, written by the caller or by the library.
  void ExpectGrads(size_t block, const StepInput& input) {
    for (size_t id = 0; id < input.grads.size(); ++id) {
      if (!input.grads[id].has_value()) continue;
      std::copy(
          input.grads[id]->begin(), input.grads[id]->end(),
          blocks_[block].image.begin() + static_cast<ptrdiff_t>(blocks_[block].layout.grad[id]));
    }
  }

  void Bind(size_t data_block, size_t grad_block, const StepInput& input) {
    std::vector<offload_binding_t> bindings;
    for (size_t id = 0; id < problem_.params.size(); ++id) {
      auto binding = Make<offload_binding_t>();
      binding.param = static_cast<uint32_t>(id);
      binding.data = DataAddress(data_block, id);
      binding.grad = input.grads[id].has_value() ? GradAddress(grad_block, id) : nullptr;
      bindings.push_back(binding);
    }
    MUST(offload_optimizer_bind(handle_, bindings.data(), static_cast<uint32_t>(bindings.size())));
    data_block_ = data_block;
  }

  void SetGroups(const std::vector<offload_group_t>& groups) {
    for (size_t id = 0; id < groups.size(); ++id)
      MUST(offload_optimizer_set_group(handle_, static_cast<uint32_t>(id), &groups[id]));
  }

  // Queues a step with what is bound.
  offload_ticket_t Queue(const StepInput& input, offload_stream_t stream = nullptr) {
    auto options = Make<offload_step_options_t>();
    options.flags = input.flags;
    options.grad_scale = input.grad_scale;
    options.grad_norm_max = input.grad_norm_max;
    options.stream = stream;
    offload_ticket_t ticket = 0;
    MUST(offload_optimizer_step(handle_, &options, &ticket));
    return ticket;
  }

  // One whole step, waited for: gradients through `block`.
  void Step(const StepInput& input, size_t block = 0) {
    PutGrads(block, input);
    Bind(data_block_, block, input);
    SetGroups(input.groups);
    MUST(offload_optimizer_wait(handle_, Queue(input), -1));
  }

  // Empty if every bit is the model's: the last step's result, the totals, every byte of every
  // block (guards and gradients included), masters, moments and counts. Otherwise describes the
  // first difference.
  std::string Difference(const Model& model) {
    const std::string difference = ResultDifference(model);
    return difference.empty() ? BitsDifference(model) : difference;
  }

  // The same, without the step's result.
  std::string BitsDifference(const Model& model) {
    ExpectParams(data_block_, model);
    std::string difference;
    for (size_t block = 0; block < blocks_.size() && difference.empty(); ++block)
      difference = BlockDifference(block);
    for (size_t id = 0; id < problem_.params.size() && difference.empty(); ++id)
      difference = StateDifference(id, model.params[id]);
    return difference;
  }

  // Compares a step's result with the model that has just made the same step.
  std::string ResultDifference(const Model& model, offload_ticket_t ticket = 0) {
    if (model.steps_applied + model.steps_skipped == 0) return "";
    auto result = Make<offload_step_result_t>();
    MUST(offload_optimizer_step_result(handle_, ticket, &result));
    const Verdict& verdict = model.verdict;
    char text[256] = "";
    if (result.skipped != verdict.skip || result.step != model.steps_applied ||
        !SameBits(result.grad_norm, verdict.grad_norm) ||
        !SameBits(result.grad_clip, verdict.grad_clip))
      std::snprintf(text, sizeof(text),
                    "result: skipped %d, step %" PRIu64 ", norm %a, clip %a; expected %d, %" PRIu64
                    ", %a, %a",
                    result.skipped, result.step, result.grad_norm, result.grad_clip, verdict.skip,
                    model.steps_applied, verdict.grad_norm, verdict.grad_clip);
    return text;
  }

  std::string StatsDifference(const Model& model) {
    auto stats = Make<offload_stats_t>();
    MUST(offload_optimizer_get_stats(handle_, &stats));
    if (stats.steps_applied == model.steps_applied && stats.steps_skipped == model.steps_skipped)
      return "";
    return "stats: " + std::to_string(stats.steps_applied) + " applied, " +
           std::to_string(stats.steps_skipped) + " skipped";
  }

 private:
  struct Block {
    Layout layout;
    void* device;
    Bytes image;  // what it must hold
  };

  static bool SameBits(double a, double b) {
    return std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
  }

  void* At(size_t block, uint64_t offset) const {
    return static_cast<std::byte*>(blocks_[block].device) + offset;
  }

  void Upload(size_t block, uint64_t begin, uint64_t bytes) {
    MUST(offload_device_upload(context_, At(block, begin), blocks_[block].image.data() + begin,
                               bytes, nullptr));
  }

  void ExpectParams(size_t block, const Model& model) {
    for (size_t id = 0; id < model.params.size(); ++id)
      std::copy(
          model.params[id].data.begin(), model.params[id].data.end(),
          blocks_[block].image.begin() + static_cast<ptrdiff_t>(blocks_[block].layout.data[id]));
  }

  void AddGroup(const offload_group_t& group) {
    uint32_t id = 0;
    MUST(offload_optimizer_add_group(handle_, &group, &id));
  }

  void AddParams(const RankSetting& rank) {
    std::vector<offload_param_t> params;
    std::vector<std::string> names;
    for (size_t id = 0; id < problem_.params.size(); ++id)
      names.push_back("param" + std::to_string(id));
    for (size_t id = 0; id < problem_.params.size(); ++id) {
      const ParamSpec& spec = problem_.params[id];
      auto param = Make<offload_param_t>();
      param.group = spec.group;
      param.dtype = spec.dtype;
      param.grad_dtype = spec.grad_dtype;
      param.placement = spec.placement;
      param.name = names[id].c_str();
      param.data = DataAddress(0, id);
      param.count = spec.count;
      if (!rank.shards.empty()) param.shard = rank.shards[id];
      if (!rank.flags.empty()) param.flags = rank.flags[id];
      params.push_back(param);
    }
    MUST(offload_optimizer_add_params(handle_, params.data(), static_cast<uint32_t>(params.size()),
                                      nullptr));
  }

  std::string BlockDifference(size_t number) const {
    const Block& block = blocks_[number];
    if (block.device == nullptr) return "";
    Bytes got(block.image.size());
    MUST(offload_device_download(context_, got.data(), block.device, got.size(), nullptr));
    if (got == block.image) return "";
    const auto at = static_cast<uint64_t>(
        std::mismatch(got.begin(), got.end(), block.image.begin()).first - got.begin());
    return "block " + std::to_string(number) + ", byte " + std::to_string(at) + ": " +
           Describe(block.layout, at);
  }

  std::string Describe(const Layout& layout, uint64_t at) const {
    for (size_t id = 0; id < problem_.params.size(); ++id) {
      const ParamSpec& spec = problem_.params[id];
      if (at >= layout.data[id] && at < layout.data[id] + spec.data_bytes())
        return "data of param " + std::to_string(id) + " (" + spec.Text() + ") at element " +
               std::to_string((at - layout.data[id]) / DtypeBytes(spec.dtype));
      if (at >= layout.grad[id] && at < layout.grad[id] + spec.grad_bytes())
        return "gradient of param " + std::to_string(id);
    }
    return "guard";
  }

  std::string StateDifference(size_t id, const Model::Param& expected) const {
    std::string difference = ArrayDifference(id, OFFLOAD_STATE_MASTER, expected.master, expected);
    if (!difference.empty()) return difference;
    const Algorithm& row = *AlgorithmOf(problem_.AlgorithmOfParam(id));
    const double momentum = problem_.groups[problem_.params[id].group].momentum;
    if (RuleOf(row.value, momentum) != row.rule) return "";  // no moments
    const std::vector<float>* moments[] = {&expected.moment0, &expected.moment1};
    for (int32_t i = 0; i < kMomentsMax && difference.empty(); ++i)
      if (row.moments[i] != kNoMoment)
        difference = ArrayDifference(id, row.moments[i], *moments[i], expected);
    return difference;
  }

  Bytes Download(const void* data, uint64_t bytes) const {
    Bytes copy(bytes);
    MUST(offload_device_download(context_, copy.data(), data, bytes, nullptr));
    return copy;
  }

  std::string ArrayDifference(size_t id, int32_t kind, const std::vector<float>& expected,
                              const Model::Param& param) const {
    const StateBits state =
        ReadState(handle_, static_cast<uint32_t>(id), kind, param.data,
                  [this](const void* data, uint64_t bytes) { return Download(data, bytes); });
    const std::string where = "state " + std::to_string(kind) + " of param " + std::to_string(id) +
                              " (" + problem_.params[id].Text() + ")";
    if (!state.error.empty()) return where + ": " + state.error;
    const std::vector<float>& got = state.values;
    if (got.size() != expected.size()) return where + ": count";
    if (state.step_count != param.step_count)
      return where + ": step count " + std::to_string(state.step_count) + ", expected " +
             std::to_string(param.step_count);
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::bit_cast<uint32_t>(got[i]) == std::bit_cast<uint32_t>(expected[i])) continue;
      char text[96];
      std::snprintf(text, sizeof(text), ": element %zu is %a, expected %a", i, got[i], expected[i]);
      return where + text;
    }
    return "";
  }

  const offload_context_t context_;
  const Problem& problem_;
  offload_optimizer_t handle_ = nullptr;
  std::vector<Block> blocks_;
  size_t data_block_ = 0;
};

// A problem with its model after every step.
struct Solved {
  explicit Solved(Problem p) : problem(std::move(p)), trace(TraceOf(problem)) {}
  Solved(const Solved&) = delete;
  Solved& operator=(const Solved&) = delete;
  Problem problem;
  std::vector<Model> trace;
};

// Every step of the problem on the library; empty if every bit was the model's after each.
inline std::string RunAll(const TestContext& context, const Solved& solved,
                          const OptimizerSetting& setting) {
  Rig rig(context, solved.problem, setting);
  std::string difference = rig.Difference(solved.trace[0]);
  for (size_t i = 0; i < solved.problem.steps.size() && difference.empty(); ++i) {
    rig.Step(solved.problem.steps[i]);
    difference = rig.Difference(solved.trace[i + 1]);
    if (!difference.empty()) difference = "step " + std::to_string(i + 1) + ": " + difference;
  }
  return difference.empty() ? rig.StatsDifference(solved.trace.back()) : difference;
}

}  // namespace hybridopt
