#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <iterator>
#include <sstream>

#include "commands.h"
#include "handles.h"
#include "kernels/algorithms.h"
#include "kernels/dtypes.h"
#include "kernels/formats/format.h"
#include "text.h"

namespace tool {
namespace {

using hybridopt::kAlgorithms;

// The library can plan a real model only where its params are in memory. So the plan comes from two
// small models: a share takes a constant number of bytes and a fixed number per element. Both
// models are large enough to fill the rings, whose chunks have the size of those of a GPU.
constexpr uint64_t kGpuChunkElements = uint64_t{1} << 22;
constexpr uint64_t kSmallElements =
    32 * kGpuChunkElements;  // enough that most chunks have the full size
constexpr uint64_t kLargeElements = 2 * kSmallElements;
// The largest value of an option. The parser reads negative numbers as larger ones, so they are
// refused too.
constexpr uint64_t kSizeMaxBytes = uint64_t{1} << 50;
// The memory of the simulated device; an eighth of it is enough for the ring. Nothing accesses it.
constexpr uint64_t kDeviceBytes = uint64_t{4} << 30;

bool IsChoice(const hybridopt::DtypeRow& row) { return row.is_of_params; }
bool IsChoice(const hybridopt::Algorithm&) { return true; }
bool IsChoice(const hybridopt::FormatRow& row) {
  return row.master_layout != hybridopt::kNotOffered;
}

// Finds the row that an option names.
template <typename Row, size_t kCount>
Result<const Row*> FindName(const Row (&rows)[kCount], const std::string& name,
                            const char* option) {
  std::string names;
  for (const Row& row : rows) {
    if (!IsChoice(row)) continue;
    if (name == LowerCase(row.name)) return &row;
    names += (names.empty() ? "" : ", ") + LowerCase(row.name);
  }
  return Status::Error(OFFLOAD_INVALID_ARGUMENT, "%s is '%.100s', expected one of %s", option,
                       name.c_str(), names.c_str());
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

// Plans one param on the simulated device without a commit.
Result<offload_plan_t> SmallPlan(const PlanOptions& options, uint64_t elements,
                                 double device_fraction) {
  HYBRIDOPT_ASSIGN(const hybridopt::Algorithm* const algorithm,
                   FindName(kAlgorithms, options.algorithm, "--algorithm"));
  HYBRIDOPT_ASSIGN(const hybridopt::DtypeRow* const dtype,
                   FindName(hybridopt::kDtypeRows, options.dtype, "--dtype"));
  auto context_options = offload_init<offload_context_options_t>();
  context_options.device_kind = OFFLOAD_DEVICE_SIM;
  context_options.sim_memory_bytes = kDeviceBytes;
  Context context;
  HYBRIDOPT_TRY(context.Create(context_options));
  auto optimizer_options = offload_init<offload_optimizer_options_t>();
  optimizer_options.algorithm = algorithm->value;
  optimizer_options.device_fraction = device_fraction;
  optimizer_options.chunk_elements = kGpuChunkElements;
  std::string masters = options.master_layout;
  if (masters.empty()) masters = options.small_state ? "split" : "fp32";
  HYBRIDOPT_ASSIGN(const hybridopt::FormatRow* const format,
                   FindName(hybridopt::kFormats, masters, "--master-layout"));
  optimizer_options.master_layout = format->master_layout;
  if (options.small_state) optimizer_options.moment_dtype = OFFLOAD_BF16;
  if (options.hook_gradients) optimizer_options.movable = OFFLOAD_MOVABLE_GRADS;
  // Asks for room for all elements, which grows with their number; the caller reduces it to what
  // the option says.
  if (options.early_bytes > 0) optimizer_options.early_update_bytes = kSizeMaxBytes;
  Optimizer optimizer;
  HYBRIDOPT_TRY(optimizer.Create(context, optimizer_options));
  const offload_group_t group = GroupOf(*algorithm);
  auto param = offload_init<offload_param_t>();
  HYBRIDOPT_TRY(StatusOf(offload_optimizer_add_group(optimizer.get(), &group, &param.group)));
  param.name = "all";
  param.dtype = param.grad_dtype = dtype->dtype;
  param.count = elements;
  HYBRIDOPT_TRY(
      StatusOf(offload_device_alloc(context.get(), elements * dtype->bytes, &param.data)));
  HYBRIDOPT_TRY(StatusOf(offload_optimizer_add_params(optimizer.get(), &param, 1, nullptr)));
  auto plan = offload_init<offload_plan_t>();
  HYBRIDOPT_TRY(StatusOf(offload_optimizer_plan(optimizer.get(), &plan)));
  return plan;
}

struct Sizes {
  double host_bytes = 0;
  double pinned_bytes = 0;
  double device_bytes = 0;
  double ring_bytes = 0;
  double early_bytes = 0;  // that early updates take if they cover all elements
  double down_bytes = 0;   // a step
  double up_bytes = 0;
};

// Adds the bytes of a share of `elements`. The bytes of a large model are extrapolated from the
// plans of two smaller ones, because rings do not grow with the model.
Status AddShare(const PlanOptions& options, uint64_t elements, double device_fraction,
                Sizes& sizes) {
  if (elements == 0) return {};
  const bool is_small = elements <= kLargeElements;
  const uint64_t planned = is_small ? elements : kLargeElements;
  HYBRIDOPT_ASSIGN(const offload_plan_t plan, SmallPlan(options, planned, device_fraction));
  offload_plan_t smaller = plan;
  if (!is_small) {
    HYBRIDOPT_ASSIGN(smaller, SmallPlan(options, kSmallElements, device_fraction));
  }
  const double more = static_cast<double>(elements - planned);
  const auto add = [&](double& sum, auto bytes_of) {
    const double bytes = static_cast<double>(bytes_of(plan));
    const double slope =
        (bytes - static_cast<double>(bytes_of(smaller))) / double{kLargeElements - kSmallElements};
    sum += bytes + slope * more;
  };
  using P = offload_plan_t;
  add(sizes.host_bytes, [](const P& p) { return p.host_bytes - p.host_early_bytes; });
  add(sizes.early_bytes, [](const P& p) { return p.host_early_bytes; });
  add(sizes.pinned_bytes,
      [](const P& p) { return p.staging_bytes + p.pinned_state_bytes + p.host_grads_bytes; });
  add(sizes.device_bytes, [](const P& p) { return p.device_bytes; });
  add(sizes.ring_bytes, [](const P& p) { return p.device_ring_bytes; });
  add(sizes.down_bytes, [](const P& p) { return p.grads_down_bytes; });
  add(sizes.up_bytes, [](const P& p) { return p.params_up_bytes; });
  return {};
}

uint64_t Rounded(double bytes) { return static_cast<uint64_t>(std::llround(bytes)); }

std::string Grouped(uint64_t number) {
  std::string text = std::to_string(number);
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > 0; at -= 3)
    text.insert(static_cast<size_t>(at), ",");
  return text;
}

Status CheckSizes(const PlanOptions& options) {
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
  if (options.early_bytes > 0 && !options.hook_gradients)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "--early-updates is given without --hook-gradients, expected both: only "
                         "gradients that have left are used before the step");
  return {};
}

// What the training takes beside the optimizer, and the memory that there is for all of it.
struct Training {
  uint64_t model_bytes = 0;        // params; gradients take as much
  uint64_t activations_bytes = 0;  // that stay on the device
  uint64_t early_bytes = 0;        // for early updates
  uint64_t stash_bytes = 0;
  uint64_t host_bytes = 0;  // all of it
  uint64_t device_bytes = 0;
  uint64_t host_available_bytes = 0;
  uint64_t device_available_bytes = 0;  // 0: not known
};

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

// The free memory on the GPU of this machine; 0 without a GPU.
uint64_t DeviceFreeBytes() {
  Context context;
  auto options = offload_init<offload_context_options_t>();
  options.device_kind = OFFLOAD_DEVICE_CUDA;
  auto info = offload_init<offload_context_info_t>();
  if (!context.Create(options).ok() || offload_context_get_info(context.get(), &info) != OFFLOAD_OK)
    return 0;
  return info.device_memory_free_bytes;
}

Result<Training> TrainingOf(const PlanOptions& options, const Sizes& sizes) {
  Training training;
  HYBRIDOPT_ASSIGN(const hybridopt::DtypeRow* const dtype,
                   FindName(hybridopt::kDtypeRows, options.dtype, "--dtype"));
  training.model_bytes = options.elements * dtype->bytes;
  HYBRIDOPT_ASSIGN(training.stash_bytes, StashBytes(options.stash_bytes));
  training.activations_bytes =
      options.activations_bytes - std::min(options.activations_bytes, options.stash_bytes);
  training.early_bytes = Rounded(sizes.early_bytes);
  training.host_bytes = Rounded(sizes.host_bytes) + training.stash_bytes;
  training.device_bytes =
      2 * training.model_bytes + Rounded(sizes.device_bytes) + training.activations_bytes;
  HYBRIDOPT_ASSIGN(const offload_plan_t here, SmallPlan(options, 1, 0));
  training.host_available_bytes =
      options.host_memory_bytes != 0 ? options.host_memory_bytes : here.host_available_bytes;
  training.device_available_bytes =
      options.device_memory_bytes != 0 ? options.device_memory_bytes : DeviceFreeBytes();
  return training;
}

// "fits into 128.0 GiB, 9.1 GiB are left for the program"
std::string FitText(uint64_t needed, uint64_t available, const char* what_for) {
  if (needed > available)
    return "does not fit into " + SizeText(available) + ", " + SizeText(needed - available) +
           " are missing";
  return "fits into " + SizeText(available) + ", " + SizeText(available - needed) + " are left " +
         what_for;
}

std::string TrainingText(const PlanOptions& options, const Training& training) {
  std::ostringstream out;
  out << "training  on the device " << SizeText(training.device_bytes) << ": params and "
      << (options.hook_gradients ? "at most as much of gradients " : "gradients ")
      << SizeText(2 * training.model_bytes) << ", activations "
      << (options.activations_bytes == 0 ? "not counted (--activations)"
                                         : SizeText(training.activations_bytes))
      << "; "
      << (training.device_available_bytes == 0
              ? "there is no GPU here, --device-memory says how much another machine has"
              : FitText(training.device_bytes, training.device_available_bytes, "there"))
      << "\n          on the host " << SizeText(training.host_bytes) << ": state "
      << (options.hook_gradients ? "and gradients " : "")
      << SizeText(training.host_bytes - training.early_bytes - training.stash_bytes)
      << (training.early_bytes > 0 ? ", early updates " + SizeText(training.early_bytes) : "")
      << ", stash " << SizeText(training.stash_bytes) << "; "
      << FitText(training.host_bytes, training.host_available_bytes, "for the program itself")
      << "\n";
  return out.str();
}

Json Fit(uint64_t needed, uint64_t available) {
  return available == 0 ? Json(nullptr) : Json(needed <= available);
}

void AddTraining(const Training& training, Json& json) {
  json["training_device_bytes"] = training.device_bytes;
  json["training_host_bytes"] = training.host_bytes;
  json["params_bytes"] = training.model_bytes;
  json["activations_on_device_bytes"] = training.activations_bytes;
  json["early_updates_bytes"] = training.early_bytes;
  json["stash_bytes"] = training.stash_bytes;
  json["device_available_bytes"] = training.device_available_bytes;
  json["host_available_bytes"] = training.host_available_bytes;
  json["device_fits"] = Fit(training.device_bytes, training.device_available_bytes);
  json["host_fits"] = Fit(training.host_bytes, training.host_available_bytes);
}

}  // namespace

Result<Report> Plan(const PlanOptions& options) {
  // Written so that NaN is refused too.
  if (!(options.offload_fraction >= 0 && options.offload_fraction <= 1))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "--offload-fraction is %g, expected 0 to 1",
                         options.offload_fraction);
  HYBRIDOPT_TRY(CheckSizes(options));
  const auto on_device =
      static_cast<uint64_t>(static_cast<double>(options.elements) * (1 - options.offload_fraction));
  Sizes sizes;
  HYBRIDOPT_TRY(AddShare(options, options.elements - on_device, 0, sizes));
  HYBRIDOPT_TRY(AddShare(options, on_device, 1, sizes));
  // The plans assume room for early updates of all elements.
  sizes.early_bytes = std::min(sizes.early_bytes, static_cast<double>(options.early_bytes));
  sizes.host_bytes += sizes.early_bytes;
  sizes.pinned_bytes += sizes.early_bytes;
  HYBRIDOPT_ASSIGN(const Training training, TrainingOf(options, sizes));
  std::ostringstream out;
  out << options.algorithm << " over " << Grouped(options.elements) << " elements of "
      << options.dtype << ", " << std::lround(100 * options.offload_fraction)
      << " % of the state on the host\n"
      << "host      " << SizeText(Rounded(sizes.host_bytes)) << ", of it "
      << SizeText(Rounded(sizes.pinned_bytes)) << " pinned\n"
      << "device    " << SizeText(Rounded(sizes.device_bytes)) << ", of it "
      << SizeText(Rounded(sizes.ring_bytes)) << " for state that streams\n"
      << "per step  " << SizeText(Rounded(sizes.down_bytes)) << " down, "
      << SizeText(Rounded(sizes.up_bytes)) << " up, if CPU threads update the host's share\n"
      << TrainingText(options, training);
  Json json{{"status", offload_status_name(OFFLOAD_OK)},
            {"elements", options.elements},
            {"host_bytes", Rounded(sizes.host_bytes)},
            {"pinned_bytes", Rounded(sizes.pinned_bytes)},
            {"device_bytes", Rounded(sizes.device_bytes)},
            {"device_ring_bytes", Rounded(sizes.ring_bytes)},
            {"grads_down_bytes", Rounded(sizes.down_bytes)},
            {"params_up_bytes", Rounded(sizes.up_bytes)}};
  AddTraining(training, json);
  return Report{out.str(), json, {}};
}

Result<uint64_t> ElementCount(const std::string& text) {
  constexpr struct {
    char letter;
    double factor;
  } kFactors[] = {{'K', 1e3}, {'M', 1e6}, {'B', 1e9}, {'T', 1e12}};
  char* end = nullptr;
  double count = std::strtod(text.c_str(), &end);
  if (end != text.c_str())
    for (const auto& [letter, factor] : kFactors)
      if (std::toupper(static_cast<unsigned char>(*end)) == letter) {
        count *= factor;
        ++end;
        break;
      }
  if (text.empty() || *end != '\0' || !(count >= 1 && count <= 1e15))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "'%.100s', expected how many parameters, 1 to 1e15, as 7e9, 7B or 350M",
                         text.c_str());
  return static_cast<uint64_t>(count);
}

}  // namespace tool
