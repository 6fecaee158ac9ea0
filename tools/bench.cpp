#include <algorithm>
#include <cmath>
#include <optional>
#include <sstream>
#include <utility>
#include <vector>

#include "bench/machine.h"
#include "commands.h"
#include "machine/stopwatch.h"
#include "measure.h"
#include "text.h"

namespace tool {
namespace {

// A kind of step. To check gradients on the host, the library must read them once more.
struct Variant {
  const char* text;
  const Executor* executor;
  uint32_t flags;
  double check_bytes;
};
constexpr Variant kVariants[] = {
    {"CPU threads, params on the host", &kExecutors[0], 0, 2},
    {".. gradients known to be finite", &kExecutors[0], OFFLOAD_STEP_ASSUME_FINITE, 0},
    {"CPU threads, params on the device", &kExecutors[1], 0, 0},
    {"state streams through the device", &kExecutors[2], 0, 0},
    {"CPU threads and streams", &kExecutors[3], 0, 0},
    {"state on the device", &kExecutors[4], 0, 0},
};

// The bytes that a step moves.
struct Moved {
  double memory = 0;  // bytes of the host's memory, read and written
  double down = 0;    // from the device to the host
  double up = 0;
};

// The ceiling that limits a step, and the seconds that the bytes need at least under this ceiling.
struct Limit {
  const char* name = "-";
  double seconds = 0;
};

struct Row {
  const Variant* variant = nullptr;
  const Layout* layout = nullptr;
  size_t rounds = 0;
  double seconds = 0;  // the median
  Moved moved;
  Limit limit;       // in the last round
  double share = 0;  // the median of the limit's seconds divided by those of the step
};

// All rounds of one row.
struct Rounds {
  std::vector<double> seconds, shares;
};

Moved MovedBy(const Variant& variant, const Layout& layout, uint64_t elements,
              const offload_step_result_t& result) {
  if (variant.executor->on_host)
    return {static_cast<double>(elements) * (layout.step_bytes + variant.check_bytes), 0, 0};
  Moved moved;
  moved.down = static_cast<double>(result.grads_down_bytes + result.state_down_bytes);
  moved.up = static_cast<double>(result.params_up_bytes + result.state_up_bytes);
  const auto by_cpu = static_cast<double>(result.cpu_elements);
  // CPU threads also need the param, which is the upper half of its master.
  if (layout.master_layout == OFFLOAD_MASTER_SPLIT) moved.down += by_cpu * sizeof(uint16_t);
  // The bytes that CPU threads read and write, and those that the device's copies read and write.
  moved.memory = by_cpu * layout.step_bytes + moved.down + moved.up;
  return moved;
}

// The ceiling under which the bytes take longest.
Limit LimitOf(const Moved& moved, double memory_rate, const std::optional<LinkRates>& link) {
  Limit limit;
  const auto meet = [&](const char* name, double bytes, double rate) {
    if (bytes > 0 && bytes / rate > limit.seconds) limit = {name, bytes / rate};
  };
  meet("memory", moved.memory, memory_rate);
  if (!link) return limit;
  meet("link down", moved.down, link->down);
  meet("link up", moved.up, link->up);
  meet("link both ways", moved.down + moved.up, std::max(link->both, link->down));
  return limit;
}

// The devices and sizes of the measurement.
struct Measurement {
  const Context* host = nullptr;
  const Context* device = nullptr;  // NULL: no device is measured
  uint64_t elements = 0;
  double seconds_each = 0;  // of a row
  MemoryRate* memory = nullptr;
  std::optional<LinkRates> link;
  std::vector<double> memory_rates;  // all that were measured
};

// Measures rounds of one pass over memory and one step, so that both meet the same conditions.
Result<Row> MeasureRow(Measurement& bench, const Variant& variant, const Layout& layout) {
  constexpr size_t kRoundsLeast = 3, kRoundsMost = 200;
  const Context& context = variant.executor->on_host ? *bench.host : *bench.device;
  HYBRIDOPT_ASSIGN(const auto training,
                   SmallTraining::Make(context, layout, *variant.executor, bench.elements));
  HYBRIDOPT_TRY(training->Step(variant.flags).status());  // touches memory, starts threads
  Row row;
  row.variant = &variant;
  row.layout = &layout;
  Rounds rounds;
  const int64_t begin_ns = hybridopt::system::NowNs();
  while (rounds.seconds.size() < kRoundsLeast ||
         (rounds.seconds.size() < kRoundsMost &&
          hybridopt::SecondsSince(begin_ns) < bench.seconds_each)) {
    HYBRIDOPT_ASSIGN(const double memory_rate, bench.memory->Measure());
    HYBRIDOPT_ASSIGN(const double seconds, training->Step(variant.flags));
    HYBRIDOPT_ASSIGN(const offload_step_result_t result, training->LastResult());
    row.moved = MovedBy(variant, layout, bench.elements, result);
    row.limit = LimitOf(row.moved, memory_rate, bench.link);
    rounds.seconds.push_back(seconds);
    rounds.shares.push_back(row.limit.seconds / seconds);
    bench.memory_rates.push_back(memory_rate);
  }
  row.rounds = rounds.seconds.size();
  row.seconds = MedianOf(std::move(rounds.seconds));
  row.share = MedianOf(std::move(rounds.shares));
  return row;
}

Result<std::vector<Row>> MeasureAll(Measurement& bench, StageLine& stage) {
  std::vector<Row> rows;
  for (const Variant& variant : kVariants) {
    if (!variant.executor->on_host && bench.device == nullptr) continue;
    for (const Layout& layout : kLayouts) {
      stage.Show((std::string("measuring ") + variant.text + ", " + layout.text).c_str());
      HYBRIDOPT_ASSIGN(const Row row, MeasureRow(bench, variant, layout));
      rows.push_back(row);
    }
  }
  return rows;
}

size_t CountRows(bool has_device) {
  const auto measured = [&](const Variant& variant) {
    return variant.executor->on_host || has_device;
  };
  return std::size(kLayouts) *
         static_cast<size_t>(std::count_if(std::begin(kVariants), std::end(kVariants), measured));
}

// -------------------------------------------------------------------------------------- output --

std::string TextOf(const std::vector<Row>& rows, const Measurement& bench,
                   const bench::Machine& machine, double busy, bool noisy) {
  std::ostringstream out;
  out << offload_build_info() << "\n"
      << machine.cpu << ", " << machine.date << ", AdamW over "
      << NumberText(static_cast<double>(bench.elements) / (1 << 20))
      << " Mi params of bf16; other processes kept " << NumberText(busy) << " CPUs busy"
      << (noisy ? ": run it again while the machine is quiet, these figures say little" : "")
      << "\nmemory " << NumberText(MedianOf(bench.memory_rates) * 1e-9)
      << " GB/s read and written by the update threads";
  if (bench.link)
    out << "; link " << NumberText(bench.link->down * 1e-9) << " GB/s down, "
        << NumberText(bench.link->up * 1e-9) << " up, " << NumberText(bench.link->both * 1e-9)
        << " both at once";
  out << "\n\n";
  using Align = Table::Align;
  Table table({{"step", Align::kLeft},
               {"state", Align::kLeft},
               {"ms", Align::kRight},
               {"G params/s", Align::kRight},
               {"limit", Align::kLeft},
               {"% of speed of light", Align::kRight}});
  for (const Row& row : rows)
    table.Add({row.variant->text, row.layout->text, NumberText(row.seconds * 1e3),
               NumberText(static_cast<double>(bench.elements) / row.seconds * 1e-9), row.limit.name,
               row.limit.seconds > 0 ? std::to_string(std::lround(100 * row.share)) : "-"});
  table.Print(out);
  return out.str();
}

Json JsonOf(const std::vector<Row>& rows, const Measurement& bench, const bench::Machine& machine,
            double busy) {
  Json json_rows = Json::array();
  for (const Row& row : rows) {
    const bool has_limit = row.limit.seconds > 0;
    json_rows.push_back({{"executor", row.variant->executor->name},
                         {"gradients_checked", row.variant->flags == 0},
                         {"layout", row.layout->name},
                         {"rounds", row.rounds},
                         {"seconds", row.seconds},
                         {"params_per_s", static_cast<double>(bench.elements) / row.seconds},
                         {"memory_bytes", row.moved.memory},
                         {"down_bytes", row.moved.down},
                         {"up_bytes", row.moved.up},
                         {"limit", has_limit ? Json(row.limit.name) : Json(nullptr)},
                         {"speed_of_light_share", has_limit ? Json(row.share) : Json(nullptr)}});
  }
  Json link = nullptr;
  if (bench.link)
    link = {{"down_bytes_per_s", bench.link->down},
            {"up_bytes_per_s", bench.link->up},
            {"both_bytes_per_s", bench.link->both}};
  return {{"status", offload_status_name(OFFLOAD_OK)},
          {"build", offload_build_info()},
          {"date", machine.date},
          {"cpu", machine.cpu},
          {"elements", bench.elements},
          {"memory_bytes_per_s", MedianOf(bench.memory_rates)},
          {"link", link},
          {"cpus_of_others", busy},
          {"rows", json_rows}};
}

}  // namespace

Result<Report> Bench(const BenchOptions& options) {
  HYBRIDOPT_ASSIGN(const Sizes sizes, SizesOf(options.memory_bytes));
  const bench::Machine machine = bench::DescribeMachine();
  const bench::Neighbours neighbours;
  HYBRIDOPT_ASSIGN(const auto host, MakeContext(OFFLOAD_DEVICE_HOST));
  HYBRIDOPT_ASSIGN(const offload_context_info_t info, InfoOf(*host));
  HYBRIDOPT_ASSIGN(const std::unique_ptr<Context> device, OpenDeviceOrNone(options.device));
  StageLine stage;
  Measurement bench;
  bench.host = host.get();
  bench.device = device.get();
  // A quarter of the memory is for the ceiling.
  bench.elements = std::max(sizes.elements / 4 * 3, uint64_t{1} << 18);
  bench.seconds_each = options.seconds / static_cast<double>(CountRows(device != nullptr));
  HYBRIDOPT_ASSIGN(const auto memory, MemoryRate::Make(info.threads, sizes.memory_bytes / 4));
  bench.memory = memory.get();
  if (device != nullptr) {
    stage.Show("measuring the link");
    HYBRIDOPT_ASSIGN(bench.link, MeasureLink(*device, sizes.memory_bytes));
  }
  HYBRIDOPT_ASSIGN(const std::vector<Row> rows, MeasureAll(bench, stage));
  const double busy = neighbours.CpusBusy();
  const bool noisy = busy > kNoisyCpus * info.cpus_allowed;
  return Report{TextOf(rows, bench, machine, busy, noisy), JsonOf(rows, bench, machine, busy), {}};
}

}  // namespace tool
