#include <cinttypes>
#include <memory>
#include <sstream>
#include <utility>

#include "base/system.h"
#include "base/utf8.h"
#include "commands.h"
#include "given_paths.h"
#include "measure.h"
#include "model.h"
#include "text.h"
#include "trace_lanes.h"

namespace tool {
namespace {

constexpr size_t kWaitsShown = 5;

// The training that is recorded: one bf16 param, of as many elements as the model has.
struct Recording {
  uint64_t elements = 0;
  const Layout* layout = nullptr;
  std::unique_ptr<Context> context;
  Executor executor = kExecutors[0];
};

Result<uint64_t> ElementsOf(const std::string& params) {
  HYBRIDOPT_ASSIGN(const Model model, FindModel(params));
  const uint64_t available = hybridopt::system::AvailableBytes();
  if (model.elements > available / kTrainingBytes)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "--params '%.100s' is %" PRIu64 " params, expected 1 to %" PRIu64
                         ", for which %s of memory are available here",
                         params.c_str(), model.elements, available / kTrainingBytes,
                         SizeText(available).c_str());
  return model.elements;
}

Result<Recording> Prepare(const TraceOptions& options) {
  HYBRIDOPT_TRY(
      CheckNewFile("FILE", options.path,
                   "give another FILE, or --read to see the table of the trace that it has"));
  Recording recording;
  HYBRIDOPT_ASSIGN(recording.elements, ElementsOf(options.params));
  recording.layout = &kLayouts[options.small_state ? 2 : 0];
  HYBRIDOPT_ASSIGN(recording.context, OpenDeviceOrNone(options.device));
  if (recording.context != nullptr) {
    recording.executor = {"", "", false, 1 - options.offload_fraction, OFFLOAD_EXECUTORS_AUTO};
  } else {
    HYBRIDOPT_ASSIGN(recording.context, MakeContext(OFFLOAD_DEVICE_HOST));
  }
  return recording;
}

Status Record(const Recording& recording, uint32_t steps, const std::string& path) {
  StageLine stage;
  stage.Show("recording steps");
  HYBRIDOPT_ASSIGN(const auto training,
                   SmallTraining::Make(*recording.context, *recording.layout, recording.executor,
                                       recording.elements));
  HYBRIDOPT_TRY(training->Step(0).status());  // touches the memory and starts the threads
  HYBRIDOPT_TRY(training->StartTrace());
  for (uint32_t step = 0; step < steps; ++step) HYBRIDOPT_TRY(training->Step(0).status());
  return training->StopTrace(path);
}

// -------------------------------------------------------------------------------------- output --

std::string PercentText(double us, const Lanes& lanes) {
  return NumberText(lanes.us > 0 ? 100 * us / lanes.us : 0);
}

void PrintLanes(const Lanes& lanes, std::ostream& out) {
  using Align = Table::Align;
  Table table({{"row", Align::kLeft},
               {"busy %", Align::kRight},
               {"waits %", Align::kRight},
               {"bars", Align::kRight},
               {"copied", Align::kRight}});
  for (const Lane& lane : lanes.lanes)
    table.Add({lane.name, PercentText(lane.busy_us, lanes), PercentText(lane.wait_us, lanes),
               std::to_string(lane.bars), lane.bytes == 0 ? "" : SizeText(lane.bytes)});
  table.Print(out);
}

void PrintWaits(const Lanes& lanes, std::ostream& out) {
  using Align = Table::Align;
  Table table({{"longest waits", Align::kLeft},
               {"row", Align::kLeft},
               {"step", Align::kRight},
               {"ms", Align::kRight},
               {"from ms", Align::kRight}});
  for (const Wait& wait : lanes.waits)
    table.Add({wait.name, wait.lane, std::to_string(wait.step), NumberText(wait.us * 1e-3),
               NumberText(wait.begin_us * 1e-3)});
  table.Print(out);
}

std::string TextOf(const Lanes& lanes, const std::string& recorded, const std::string& path) {
  std::ostringstream out;
  out << lanes.steps << (lanes.steps == 1 ? " step" : " steps") << recorded << " on "
      << hybridopt::Printable(lanes.device) << ", " << NumberText(lanes.us * 1e-3)
      << " ms from the first bar to the last\n";
  if (lanes.dropped != 0)
    out << Yellow(std::to_string(lanes.dropped) +
                  " events are missing: the trace had no room for them")
        << '\n';
  out << '\n';
  PrintLanes(lanes, out);
  if (!lanes.waits.empty()) {
    out << '\n';
    PrintWaits(lanes, out);
  }
  out << "\nThe picture: open https://ui.perfetto.dev and drag " << hybridopt::Printable(path)
      << " there; it stays on your machine.\n";
  return out.str();
}

Json JsonOf(const Lanes& lanes, const std::string& path) {
  Json rows = Json::array();
  for (const Lane& lane : lanes.lanes)
    rows.push_back({{"row", lane.name},
                    {"busy_seconds", lane.busy_us * 1e-6},
                    {"wait_seconds", lane.wait_us * 1e-6},
                    {"bars", lane.bars},
                    {"bytes", lane.bytes}});
  Json waits = Json::array();
  for (const Wait& wait : lanes.waits)
    waits.push_back({{"wait", wait.name},
                     {"row", wait.lane},
                     {"step", wait.step},
                     {"begin_seconds", wait.begin_us * 1e-6},
                     {"seconds", wait.us * 1e-6}});
  return {{"status", offload_status_name(OFFLOAD_OK)},
          {"path", path},
          {"device", lanes.device},
          {"steps", lanes.steps},
          {"seconds", lanes.us * 1e-6},
          {"dropped_events", lanes.dropped},
          {"clock_error_seconds", lanes.clock_error_us * 1e-6},
          {"rows", rows},
          {"longest_waits", waits}};
}

}  // namespace

Result<Report> Trace(const TraceOptions& options) {
  std::string recorded;
  if (options.read) {
    HYBRIDOPT_TRY(CheckFile("FILE", options.path));
  } else {
    HYBRIDOPT_ASSIGN(const Recording recording, Prepare(options));
    HYBRIDOPT_TRY(Record(recording, options.steps, options.path));
    recorded = " of AdamW, behind a first one, over " +
               NumberText(static_cast<double>(recording.elements) * 1e-6) +
               " M params of bf16 with " + recording.layout->text;
  }
  HYBRIDOPT_ASSIGN(Lanes lanes, ReadLanes(options.path));
  if (lanes.waits.size() > kWaitsShown) lanes.waits.resize(kWaitsShown);
  return Report{TextOf(lanes, recorded, options.path), JsonOf(lanes, options.path), {}};
}

}  // namespace tool
