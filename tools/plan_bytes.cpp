#include "plan_bytes.h"

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <utility>

#include "kernels/formats/format.h"
#include "state/chunk_table.h"
#include "text.h"

namespace tool {
namespace {

// The library can plan a real model only where its params are in memory. So the plan comes from two
// small models: a share takes a constant number of bytes and a fixed number per element. The chunks
// have the size of those of a GPU. In a model of kSmallElements the first chunk has the full size,
// and the others become smaller towards the end of the step; from there on each chunk more has the
// full size. The models are as small as they may be, because the simulated device touches every
// page of their params: a machine may need more than a second for half a GiB.
constexpr uint64_t kGpuChunkElements = uint64_t{1} << 22;
constexpr uint64_t kSmallElements = hybridopt::kChunksAhead * kGpuChunkElements;
constexpr uint64_t kLargeElements = kSmallElements + kGpuChunkElements;
// The largest value of an option.
constexpr uint64_t kSizeMaxBytes = uint64_t{1} << 50;
// The memory of the simulated device; an eighth of it is enough for the ring. Only the params of a
// plan take pages of it.
constexpr uint64_t kDeviceBytes = uint64_t{4} << 30;

bool IsChoice(const hybridopt::DtypeRow& row) { return row.is_of_params; }
// Muon updates matrices, whose shapes the number of params does not say.
bool IsChoice(const hybridopt::Algorithm& algorithm) {
  return algorithm.rule != hybridopt::Rule::kMuon;
}
bool IsChoice(const hybridopt::FormatRow& row) {
  return row.master_layout != hybridopt::kNotOffered;
}

template <typename Row, size_t kCount>
std::vector<std::string> NamesOf(const Row (&rows)[kCount]) {
  std::vector<std::string> names;
  for (const Row& row : rows)
    if (IsChoice(row)) names.push_back(LowerCase(row.name));
  return names;
}

// Finds the row that an option names. The parser of the command line has checked the name.
template <typename Row, size_t kCount>
const Row* FindName(const Row (&rows)[kCount], const std::string& name) {
  return std::find_if(rows, rows + kCount - 1,
                      [&](const Row& row) { return IsChoice(row) && name == LowerCase(row.name); });
}

// A group that the algorithm accepts. Its values do not change the number of bytes, except that it
// has momentum.
offload_group_t GroupOf(const hybridopt::Algorithm& algorithm) {
  auto group = offload_init<offload_group_t>();
  for (const hybridopt::GroupField& field : hybridopt::kGroupFields)
    if (field.number != nullptr && field.ReadersOf(algorithm.value) != nullptr)
      group.*field.number = 0.5;
  return group;
}

Status CheckOptions(const PlanOptions& options) {
  const struct {
    const char* name;
    uint64_t bytes;
  } sizes[] = {{"--early-updates", options.early_bytes},
               {"--activations", options.activations_bytes},
               {"--stash", options.stash_bytes},
               {"--host-memory", options.host_memory_bytes},
               {"--device-memory", options.device_memory_bytes}};
  for (const auto& [name, bytes] : sizes)
    if (bytes > kSizeMaxBytes)
      return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                           "%s is %" PRIu64 " bytes, expected 0 to %s, as 8GiB", name, bytes,
                           SizeText(kSizeMaxBytes).c_str());
  if (options.dtype != "bf16" && !options.master_layout.empty() && options.master_layout != "fp32")
    return Status::Error(
        OFFLOAD_INVALID_ARGUMENT,
        "--master-layout is '%s' with --dtype %s, expected fp32: only the masters of "
        "bf16 params can be kept otherwise",
        options.master_layout.c_str(), options.dtype.c_str());
  if (options.early_bytes > 0 && !options.hook_gradients)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "--early-updates is given without --hook-gradients, expected both: only "
                         "gradients that have left are used before the step");
  return {};
}

Result<uint64_t> StashBytes(uint64_t budget_bytes) {
  if (budget_bytes == 0) return uint64_t{0};
  Context context;
  auto context_options = offload_init<offload_context_options_t>();
  context_options.device_kind = OFFLOAD_DEVICE_HOST;
  HYBRIDOPT_TRY(context.Create(context_options));
  auto options = offload_init<offload_stash_options_t>();
  options.budget_bytes = budget_bytes;
  auto plan = offload_init<offload_stash_plan_t>();
  HYBRIDOPT_TRY(StatusOf(offload_stash_plan(context.get(), &options, &plan)));
  return plan.host_bytes;
}

}  // namespace

std::vector<std::string> AlgorithmNames() { return NamesOf(hybridopt::kAlgorithms); }
std::vector<std::string> MasterLayoutNames() { return NamesOf(hybridopt::kFormats); }

uint64_t Rounded(double bytes) { return static_cast<uint64_t>(std::llround(bytes)); }

Result<std::unique_ptr<Planner>> Planner::Make(const PlanOptions& options) {
  HYBRIDOPT_TRY(CheckOptions(options));
  std::unique_ptr<Planner> planner(new Planner(options));
  planner->algorithm_ = FindName(hybridopt::kAlgorithms, options.algorithm);
  planner->dtype_ = FindName(hybridopt::kDtypeRows, options.dtype);
  HYBRIDOPT_ASSIGN(planner->stash_bytes_, StashBytes(options.stash_bytes));
  auto context_options = offload_init<offload_context_options_t>();
  context_options.device_kind = OFFLOAD_DEVICE_SIM;
  context_options.sim_memory_bytes = kDeviceBytes;
  HYBRIDOPT_TRY(planner->context_.Create(context_options));
  return planner;
}

Status Planner::TakeData(uint64_t bytes) {
  if (bytes <= data_bytes_) return {};
  HYBRIDOPT_TRY(StatusOf(offload_device_free(context_.get(), data_)));
  data_bytes_ = 0;
  HYBRIDOPT_TRY(StatusOf(offload_device_alloc(context_.get(), bytes, &data_)));
  data_bytes_ = bytes;
  return {};
}

// Plans one param on the simulated device without a commit.
Result<offload_plan_t> Planner::Plan(uint64_t elements, double device_fraction,
                                     const StateChoice& choice) {
  const auto key = std::tuple(elements, device_fraction, choice.masters, choice.bf16_moments);
  if (const auto found = plans_.find(key); found != plans_.end()) return found->second;
  auto options = offload_init<offload_optimizer_options_t>();
  options.algorithm = algorithm_->value;
  options.device_fraction = device_fraction;
  options.chunk_elements = kGpuChunkElements;
  options.master_layout = FindName(hybridopt::kFormats, choice.masters)->master_layout;
  if (choice.bf16_moments) options.moment_dtype = OFFLOAD_BF16;
  if (options_.hook_gradients) options.movable = OFFLOAD_MOVABLE_GRADS;
  // Asks for room for all elements, which grows with their number; the caller reduces it to what
  // the option says.
  if (options_.early_bytes > 0) options.early_update_bytes = kSizeMaxBytes;
  HYBRIDOPT_TRY(TakeData(elements * dtype_->bytes));
  Optimizer optimizer;
  HYBRIDOPT_TRY(optimizer.Create(context_, options));
  const offload_group_t group = GroupOf(*algorithm_);
  auto param = offload_init<offload_param_t>();
  HYBRIDOPT_TRY(StatusOf(offload_optimizer_add_group(optimizer.get(), &group, &param.group)));
  param.name = "all";
  param.dtype = param.grad_dtype = dtype_->dtype;
  param.count = elements;
  param.data = data_;
  HYBRIDOPT_TRY(StatusOf(offload_optimizer_add_params(optimizer.get(), &param, 1, nullptr)));
  auto plan = offload_init<offload_plan_t>();
  HYBRIDOPT_TRY(StatusOf(offload_optimizer_plan(optimizer.get(), &plan)));
  plans_.emplace(key, plan);
  return plan;
}

// Adds the bytes of a share of `elements`. The bytes of a large model are extrapolated from the
// plans of two smaller ones, because rings do not grow with the model.
Status Planner::AddShare(uint64_t elements, double device_fraction, const StateChoice& choice,
                         StateBytes& sum) {
  if (elements == 0) return {};
  const bool is_small = elements <= kLargeElements;
  const uint64_t planned = is_small ? elements : kLargeElements;
  HYBRIDOPT_ASSIGN(const offload_plan_t plan, Plan(planned, device_fraction, choice));
  offload_plan_t smaller = plan;
  if (!is_small) {
    HYBRIDOPT_ASSIGN(smaller, Plan(kSmallElements, device_fraction, choice));
  }
  const double more = static_cast<double>(elements - planned);
  const auto add = [&](double& bytes_sum, auto bytes_of) {
    const double bytes = static_cast<double>(bytes_of(plan));
    const double slope =
        (bytes - static_cast<double>(bytes_of(smaller))) / double{kLargeElements - kSmallElements};
    bytes_sum += bytes + slope * more;
  };
  using P = offload_plan_t;
  add(sum.host, [](const P& p) { return p.host_bytes - p.host_early_bytes; });
  add(sum.early, [](const P& p) { return p.host_early_bytes; });
  add(sum.pinned,
      [](const P& p) { return p.staging_bytes + p.pinned_state_bytes + p.host_grads_bytes; });
  add(sum.device, [](const P& p) { return p.device_bytes; });
  add(sum.ring, [](const P& p) { return p.device_ring_bytes; });
  add(sum.down, [](const P& p) { return p.grads_down_bytes; });
  add(sum.up, [](const P& p) { return p.params_up_bytes; });
  return {};
}

Result<StateBytes> Planner::State(uint64_t elements, const StateChoice& choice) {
  const auto on_device =
      static_cast<uint64_t>(static_cast<double>(elements) * (1 - choice.offload_fraction));
  StateBytes sum;
  HYBRIDOPT_TRY(AddShare(elements - on_device, 0, choice, sum));
  HYBRIDOPT_TRY(AddShare(on_device, 1, choice, sum));
  // The plans assume room for early updates of all elements.
  sum.early = std::min(sum.early, static_cast<double>(options_.early_bytes));
  sum.host += sum.early;
  sum.pinned += sum.early;
  return sum;
}

TrainingBytes Planner::Training(uint64_t elements, const StateBytes& state) const {
  TrainingBytes training;
  training.params = elements * dtype_->bytes;
  training.stash = stash_bytes_;
  training.activations =
      options_.activations_bytes - std::min(options_.activations_bytes, options_.stash_bytes);
  training.early = Rounded(state.early);
  training.host = Rounded(state.host) + training.stash;
  training.device = 2 * training.params + Rounded(state.device) + training.activations;
  return training;
}

}  // namespace tool
