#include "trace_lanes.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>

#include "model.h"

namespace tool {
namespace {

constexpr uint64_t kBytesMax = uint64_t{256} << 20;
constexpr double kTimeMost = 1e15;

struct Interval {
  double begin;
  double end;
};

struct Bars {
  std::vector<Interval> all;
  std::vector<Interval> waits;
};

// The time that at least one of the intervals covers.
double Covered(std::vector<Interval> intervals) {
  std::sort(intervals.begin(), intervals.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  double covered = 0;
  double end = -kTimeMost;
  for (const Interval& interval : intervals) {
    covered += std::max(0.0, interval.end - std::max(interval.begin, end));
    end = std::max(end, interval.end);
  }
  return covered;
}

// All bars that wait have such names: "wait", "stream wait", "await gradients".
bool IsWait(const std::string& name) {
  return name == "wait" || name == "stream wait" || name.starts_with("await ");
}

// Reads members of objects. `ok` becomes false if one is missing or wrong; its value is then empty.
struct LanesReader {
  const Json& Member(const Json& parent, const char* key) {
    static const Json nothing;
    const auto found = parent.is_object() ? parent.find(key) : parent.end();
    if (parent.is_object() && found != parent.end()) return *found;
    ok = false;
    return nothing;
  }
  std::string Text(const Json& parent, const char* key) {
    const Json& text = Member(parent, key);
    if (text.is_string()) return text.get<std::string>();
    ok = false;
    return "";
  }
  uint64_t Number(const Json& parent, const char* key) {
    const Json& number = Member(parent, key);
    if (number.is_number_unsigned()) return number.get<uint64_t>();
    ok = false;
    return 0;
  }
  double Time(const Json& parent, const char* key) {
    const Json& time = Member(parent, key);
    if (time.is_number() && std::abs(time.get<double>()) < kTimeMost) return time.get<double>();
    ok = false;
    return 0;
  }

  bool ok = true;
};

// Collects the events of a trace in any order.
class Collector {
 public:
  // Returns false if the event is none that the library writes.
  bool Add(const Json& event) {
    LanesReader reader;
    const std::string kind = reader.Text(event, "ph");
    const std::string name = reader.Text(event, "name");
    if (kind == "M" && name == "process_name") return true;
    const uint64_t number = reader.Number(event, "tid");
    const Json& args = reader.Member(event, "args");
    if (!reader.ok) return false;
    if (kind == "M" && name == "thread_name") {
      lanes_[number].name = reader.Text(args, "name");
    } else if (kind == "M" && name == "thread_sort_index") {
      lanes_[number].place = reader.Number(args, "sort_index");
    } else if (kind == "X") {
      const double begin = reader.Time(event, "ts");
      const double end = begin + std::max(0.0, reader.Time(event, "dur"));
      AddBar(number, {begin, end}, name, reader.Number(args, "step"));
      if (args.contains("bytes")) lanes_[number].bytes += reader.Number(args, "bytes");
    } else {
      return false;
    }
    return reader.ok;
  }

  Lanes Finish() {
    Lanes result;
    const double begin = begin_ <= end_ ? begin_ : 0;
    result.us = begin_ <= end_ ? end_ - begin_ : 0;
    result.steps = steps_;
    for (auto& [number, lane] : lanes_) {
      const Bars& bars = bars_[number];
      lane.bars = bars.all.size();
      lane.wait_us = Covered(bars.waits);
      lane.busy_us = Covered(bars.all) - lane.wait_us;
      result.lanes.push_back(lane);
    }
    std::stable_sort(result.lanes.begin(), result.lanes.end(),
                     [](const Lane& a, const Lane& b) { return a.place < b.place; });
    for (const auto& [number, wait] : waits_) {
      result.waits.push_back(wait);
      result.waits.back().lane = lanes_[number].name;
      result.waits.back().begin_us -= begin;
    }
    std::stable_sort(result.waits.begin(), result.waits.end(),
                     [](const Wait& a, const Wait& b) { return a.us > b.us; });
    return result;
  }

 private:
  void AddBar(uint64_t number, const Interval& bar, const std::string& name, uint64_t step) {
    begin_ = std::min(begin_, bar.begin);
    end_ = std::max(end_, bar.end);
    if (name == "step") steps_ += 1;
    bars_[number].all.push_back(bar);
    if (!IsWait(name)) return;
    bars_[number].waits.push_back(bar);
    waits_.push_back({number, Wait{"", name, step, bar.begin, bar.end - bar.begin}});
  }

  std::map<uint64_t, Lane> lanes_;
  std::map<uint64_t, Bars> bars_;
  std::vector<std::pair<uint64_t, Wait>> waits_;
  double begin_ = kTimeMost;
  double end_ = -kTimeMost;
  uint64_t steps_ = 0;
};

Status NoTrace(const std::string& path, const char* what) {
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "'%.500s' %s; expected a file that offload_optimizer_trace_stop, "
                       "optimizer.trace(path) of Python or this command has written",
                       path.c_str(), what);
}

}  // namespace

Result<Lanes> ReadLanes(const std::string& path) {
  HYBRIDOPT_ASSIGN(const Json json, ReadJson(path, kBytesMax, "a trace"));
  LanesReader reader;
  const Json& head = reader.Member(json, "otherData");
  const Json& events = reader.Member(json, "traceEvents");
  if (reader.Text(head, "library") != "hybridopt" || !events.is_array())
    return NoTrace(path, "is no trace of hybridopt");
  Collector collector;
  for (const Json& event : events)
    if (!collector.Add(event)) return NoTrace(path, "has an event that is not understood");
  Lanes lanes = collector.Finish();
  lanes.device = reader.Text(head, "device");
  lanes.dropped = reader.Number(head, "dropped_events");
  lanes.clock_error_us = reader.Time(head, "clock_error_us");
  if (!reader.ok) return NoTrace(path, "has otherData that is not understood");
  return lanes;
}

}  // namespace tool
