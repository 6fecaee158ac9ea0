#include <algorithm>
#include <cmath>
#include <iterator>
#include <sstream>

#include "commands.h"
#include "handles.h"
#include "kernels/algorithms.h"
#include "text.h"

namespace tool {
namespace {

using hybridopt::kAlgorithms;

// The library plans a real model only where its params lie in memory, so the plan is made of two
// models that are small: what a share takes is a constant and so much for each element. Both fill
// the rings, whose chunks are those of a GPU.
constexpr uint64_t kGpuChunkElements = uint64_t{1} << 22;
constexpr uint64_t kSmallElements =
    32 * kGpuChunkElements;  // more than have smaller last chunks alone
constexpr uint64_t kLargeElements = 2 * kSmallElements;
// Of the simulated device: an eighth of it is enough for the ring. Nothing touches it.
constexpr uint64_t kDeviceBytes = uint64_t{4} << 30;

struct DtypeRow {
  const char* name;
  int32_t value;
  uint64_t bytes;
};
constexpr DtypeRow kDtypes[] = {
    {"fp32", OFFLOAD_FP32, 4}, {"bf16", OFFLOAD_BF16, 2}, {"fp16", OFFLOAD_FP16, 2}};

template <typename Rows>
Result<std::ptrdiff_t> FindName(const Rows& rows, const std::string& name, const char* option) {
  std::string names;
  for (const auto& row : rows) {
    if (name == LowerCase(row.name)) return &row - std::begin(rows);
    names += (names.empty() ? "" : ", ") + LowerCase(row.name);
  }
  return Status::Error(OFFLOAD_INVALID_ARGUMENT, "%s is '%.100s', expected one of %s", option,
                       name.c_str(), names.c_str());
}

// A group that the algorithm accepts. No number of it changes what is taken, but momentum is there.
offload_group_t GroupOf(const hybridopt::Algorithm& algorithm) {
  auto group = Make<offload_group_t>();
  for (const hybridopt::ReadNumber& read : algorithm.reads)
    if (read.field != nullptr) group.*read.field = 0.5;
  return group;
}

// The plan of one param on the simulated device; nothing is committed.
Result<offload_plan_t> SmallPlan(const PlanOptions& options, uint64_t elements,
                                 double device_fraction) {
  HYBRIDOPT_ASSIGN(const std::ptrdiff_t algorithm,
                   FindName(kAlgorithms, options.algorithm, "--algorithm"));
  HYBRIDOPT_ASSIGN(const std::ptrdiff_t dtype, FindName(kDtypes, options.dtype, "--dtype"));
  auto context_options = Make<offload_context_options_t>();
  context_options.device_kind = OFFLOAD_DEVICE_SIM;
  context_options.sim_memory_bytes = kDeviceBytes;
  Context context;
  HYBRIDOPT_TRY(context.Create(context_options));
  auto optimizer_options = Make<offload_optimizer_options_t>();
  optimizer_options.algorithm = kAlgorithms[algorithm].value;
  optimizer_options.device_fraction = device_fraction;
  optimizer_options.chunk_elements = kGpuChunkElements;
  if (options.small_state) {
    optimizer_options.master_layout = OFFLOAD_MASTER_SPLIT;
    optimizer_options.moment_dtype = OFFLOAD_BF16;
  }
  Optimizer optimizer;
  HYBRIDOPT_TRY(optimizer.Create(context, optimizer_options));
  const offload_group_t group = GroupOf(kAlgorithms[algorithm]);
  auto param = Make<offload_param_t>();
  HYBRIDOPT_TRY(StatusOf(offload_optimizer_add_group(optimizer.get(), &group, &param.group)));
  param.name = "all";
  param.dtype = param.grad_dtype = kDtypes[dtype].value;
  param.count = elements;
  HYBRIDOPT_TRY(
      StatusOf(offload_device_alloc(context.get(), elements * kDtypes[dtype].bytes, &param.data)));
  HYBRIDOPT_TRY(StatusOf(offload_optimizer_add_params(optimizer.get(), &param, 1, nullptr)));
  auto plan = Make<offload_plan_t>();
  HYBRIDOPT_TRY(StatusOf(offload_optimizer_plan(optimizer.get(), &plan)));
  return plan;
}

struct Sizes {
  double host_bytes = 0;
  double pinned_bytes = 0;
  double device_bytes = 0;
  double ring_bytes = 0;
  double down_bytes = 0;  // a step
  double up_bytes = 0;
};

// Adds what `elements` of a share take. Those of a large model come from the plans of two smaller
// ones: rings do not grow with them.
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
  add(sizes.host_bytes, [](const P& p) { return p.host_bytes; });
  add(sizes.pinned_bytes, [](const P& p) { return p.staging_bytes + p.pinned_state_bytes; });
  add(sizes.device_bytes, [](const P& p) { return p.device_bytes; });
  add(sizes.ring_bytes, [](const P& p) { return p.device_ring_bytes; });
  add(sizes.down_bytes, [](const P& p) { return p.grads_down_bytes; });
  add(sizes.up_bytes, [](const P& p) { return p.params_up_bytes; });
  return {};
}

std::string Grouped(uint64_t number) {
  std::string text = std::to_string(number);
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > 0; at -= 3)
    text.insert(static_cast<size_t>(at), ",");
  return text;
}

}  // namespace

Result<Report> Plan(const PlanOptions& options) {
  // Written so that NaN is refused too.
  if (!(options.offload_fraction >= 0 && options.offload_fraction <= 1))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "--offload-fraction is %g, expected 0 to 1",
                         options.offload_fraction);
  const auto on_device =
      static_cast<uint64_t>(static_cast<double>(options.elements) * (1 - options.offload_fraction));
  Sizes sizes;
  HYBRIDOPT_TRY(AddShare(options, options.elements - on_device, 0, sizes));
  HYBRIDOPT_TRY(AddShare(options, on_device, 1, sizes));
  const auto bytes = [](double size) { return static_cast<uint64_t>(std::llround(size)); };
  std::ostringstream out;
  out << options.algorithm << " over " << Grouped(options.elements) << " elements of "
      << options.dtype << ", " << std::lround(100 * options.offload_fraction)
      << " % of the state on the host\n"
      << "host      " << SizeText(bytes(sizes.host_bytes)) << ", of it "
      << SizeText(bytes(sizes.pinned_bytes)) << " pinned\n"
      << "device    " << SizeText(bytes(sizes.device_bytes)) << ", of it "
      << SizeText(bytes(sizes.ring_bytes)) << " for state that streams\n"
      << "per step  " << SizeText(bytes(sizes.down_bytes)) << " down, "
      << SizeText(bytes(sizes.up_bytes)) << " up, if CPU threads update the host's share\n";
  Json json{
      {"status", offload_status_name(OFFLOAD_OK)},   {"elements", options.elements},
      {"host_bytes", bytes(sizes.host_bytes)},       {"pinned_bytes", bytes(sizes.pinned_bytes)},
      {"device_bytes", bytes(sizes.device_bytes)},   {"device_ring_bytes", bytes(sizes.ring_bytes)},
      {"grads_down_bytes", bytes(sizes.down_bytes)}, {"params_up_bytes", bytes(sizes.up_bytes)}};
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
