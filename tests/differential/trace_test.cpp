// Traces: the events of a step are complete and in order, the ring is bounded, and no bit of any
// result depends on a trace.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "../held_files.h"
#include "../temporary_directory.h"
#include "lifecycle_rig.h"

namespace hybridopt {
namespace {

const std::vector<uint64_t> kCounts = {3000, 1, 1027, 0, 5000, 640, 2048, 77};
constexpr size_t kSteps = 4;
constexpr uint32_t kThreads = 2;

// Every param has a gradient in every step, and no step clips or skips.
Problem ProblemOf(uint64_t seed, const std::vector<uint64_t>& counts = kCounts) {
  Random random(seed + 1);
  Problem problem = RandomProblem(OFFLOAD_ADAMW, SpecsOf(counts, random), kSteps, seed);
  for (StepInput& step : problem.steps) {
    step.grad_scale = 0;
    step.grad_norm_max = 1e30;
    step.flags = 0;
    for (size_t id = 0; id < problem.params.size(); ++id) {
      const ParamSpec& spec = problem.params[id];
      step.grads[id] = RandomArray(spec.grad_dtype, spec.count, false, random);
    }
  }
  return problem;
}

LifecycleSetting SettingOf(uint64_t seed, int32_t executors) {
  LifecycleSetting setting;
  setting.device_kind = AcceleratorUnderTest();
  setting.threads = kThreads;
  setting.seed = seed;
  setting.delay_ns_max = seed % 2 == 0 ? 0 : 20'000;
  setting.optimizer.chunk_elements = 1024;
  setting.optimizer.staging_slots = 2;
  setting.optimizer.host_executors = executors;
  return setting;
}

struct Event {
  std::string name;
  std::string row;
  double begin_us;
  double end_us;
  uint64_t step;
  int64_t chunk;  // -1: none
  uint64_t bytes;
};

// The value behind `"key":` in a line; "" if there is none.
std::string ValueOf(const std::string& line, const std::string& key) {
  const std::string quoted = "\"" + key + "\":";
  const size_t at = line.find(quoted);
  if (at == std::string::npos) return "";
  std::string value = line.substr(at + quoted.size());
  if (value[0] == '"') return value.substr(1, value.find('"', 1) - 1);
  return value.substr(0, value.find_first_of(",}"));
}

// A trace has a line for each event, and one for all that is told about it.
struct Picture {
  explicit Picture(const std::string& path) {
    std::ifstream file(path);
    std::map<std::string, std::string> rows;
    for (std::string line; std::getline(file, line);) {
      if (line.find("dropped_events") != std::string::npos) head = line;
      const size_t named = line.find("\"args\":{\"name\":\"");
      if (ValueOf(line, "name") == "thread_name")
        rows[ValueOf(line, "tid")] = ValueOf(line.substr(named + 7), "name");
      if (ValueOf(line, "ph") != "X") continue;
      const double begin_us = std::stod(ValueOf(line, "ts"));
      const std::string chunk = ValueOf(line, "chunk"), bytes = ValueOf(line, "bytes");
      events.push_back({ValueOf(line, "name"), rows[ValueOf(line, "tid")], begin_us,
                        begin_us + std::stod(ValueOf(line, "dur")),
                        std::stoull(ValueOf(line, "step")), chunk.empty() ? -1 : std::stoll(chunk),
                        bytes.empty() ? 0 : std::stoull(bytes)});
    }
  }
  std::vector<Event> Find(const std::string& name, uint64_t step, int64_t chunk = -2) const {
    std::vector<Event> found;
    for (const Event& event : events)
      if (event.name == name && event.step == step && (chunk == -2 || event.chunk == chunk))
        found.push_back(event);
    return found;
  }
  uint64_t Bytes(const std::string& name) const {
    uint64_t sum = 0;
    for (const Event& event : events)
      if (event.name == name) sum += event.bytes;
    return sum;
  }

  std::string head;
  std::vector<Event> events;
};

void Start(const LifecycleRig& rig, uint64_t ring_bytes = 0) {
  MUST(offload_optimizer_trace_start(rig.optimizer(), ring_bytes));
}

Picture Stop(const LifecycleRig& rig, const std::string& path) {
  uint64_t dropped = 0;
  MUST(offload_optimizer_trace_stop(rig.optimizer(), path.c_str(), &dropped));
  Picture picture(path);
  EXPECT_EQ(ValueOf(picture.head, "dropped_events"), std::to_string(dropped));
  return picture;
}

// The chunks that have such an event in a step; each has it `times` times.
std::vector<int64_t> ChunksOf(const Picture& picture, const std::string& name, uint64_t step,
                              size_t times = 1) {
  std::vector<int64_t> chunks;
  for (const Event& event : picture.Find(name, step)) chunks.push_back(event.chunk);
  std::sort(chunks.begin(), chunks.end());
  std::vector<int64_t> all = chunks;
  chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());
  EXPECT_EQ(all.size(), times * chunks.size()) << name << ", step " << step;
  return chunks;
}

// The device's events may be shown too early, by no more than the trace says. Text has thousandths
// of microseconds.
void ExpectOrder(const Picture& picture, const std::vector<std::string>& names, uint64_t step,
                 int64_t chunk) {
  const double error_us = std::stod(ValueOf(picture.head, "clock_error_us")) + 0.01;
  double before_us = -1e300;
  for (const std::string& name : names) {
    double begin_us = 1e300, end_us = -1e300;
    for (const Event& event : picture.Find(name, step, chunk)) {
      begin_us = std::min(begin_us, event.begin_us);
      end_us = std::max(end_us, event.end_us);
    }
    EXPECT_LE(before_us, begin_us + error_us) << name << ", chunk " << chunk;
    before_us = end_us;
  }
}

void ExpectEachChunkOnce(const Picture& picture, uint64_t step, size_t chunks) {
  const std::vector<int64_t> down = ChunksOf(picture, "grads down", step);
  const std::vector<int64_t> state = ChunksOf(picture, "state up", step);
  EXPECT_EQ(down, ChunksOf(picture, "update", step, kThreads));
  EXPECT_EQ(down, ChunksOf(picture, "params up", step));
  EXPECT_EQ(state, ChunksOf(picture, "update state", step));
  EXPECT_EQ(state, ChunksOf(picture, "state down", step));
  std::vector<int64_t> all = down;
  all.insert(all.end(), state.begin(), state.end());
  std::sort(all.begin(), all.end());
  ASSERT_EQ(all.size(), chunks);
  for (size_t chunk = 0; chunk < chunks; ++chunk)
    EXPECT_EQ(all[chunk], static_cast<int64_t>(chunk));
  for (int64_t chunk : down)
    ExpectOrder(picture, {"grads down", "update", "params up"}, step, chunk);
  for (int64_t chunk : state)
    ExpectOrder(picture, {"state up", "update state", "state down"}, step, chunk);
}

TEST(TraceTest, EachChunkIsThereOnceWithItsBytes) {
  const TemporaryDirectory directory;
  constexpr int32_t kExecutors[] = {OFFLOAD_EXECUTORS_CPU, OFFLOAD_EXECUTORS_STREAMED,
                                    OFFLOAD_EXECUTORS_AUTO};
  for (uint64_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Solved solved(ProblemOf(seed));
    LifecycleRig rig(solved.problem, SettingOf(seed, kExecutors[seed % 3]));
    (void)rig.StepOnce(solved.problem.steps[0]);
    const offload_stats_t before = rig.Stats();
    Start(rig);
    for (size_t step = 1; step < kSteps; ++step) (void)rig.StepOnce(solved.problem.steps[step]);
    const offload_stats_t after = rig.Stats();
    const Picture picture = Stop(rig, directory / "trace.json");
    EXPECT_EQ(ValueOf(picture.head, "dropped_events"), "0");
    const size_t chunks = (rig.Plan().elements[OFFLOAD_TIER_HOST] + 1023) / 1024;
    for (size_t step = 2; step <= kSteps; ++step) {
      ExpectEachChunkOnce(picture, step, chunks);
      ASSERT_EQ(picture.Find("step", step).size(), 1u);
      EXPECT_EQ(picture.Find("step", step)[0].row, "steps and moves");
      EXPECT_EQ(picture.Find("call step", step).size(), 1u);
      const double error_us = std::stod(ValueOf(picture.head, "clock_error_us")) + 0.01;
      for (const Event& event : picture.events) {
        if (event.step != step || event.name.find("wait") == 0 || event.name == "call step")
          continue;
        EXPECT_GE(event.begin_us + error_us, picture.Find("step", step)[0].begin_us) << event.name;
        EXPECT_LE(event.end_us, picture.Find("step", step)[0].end_us + 0.01) << event.name;
      }
    }
    EXPECT_EQ(picture.Bytes("grads down"), after.grads_down_bytes - before.grads_down_bytes);
    EXPECT_EQ(picture.Bytes("params up"), after.params_up_bytes - before.params_up_bytes);
    EXPECT_EQ(picture.Bytes("state up"), after.state_up_bytes - before.state_up_bytes);
    EXPECT_EQ(picture.Bytes("state down"), after.state_down_bytes - before.state_down_bytes);
    EXPECT_EQ(rig.Difference(solved.trace[kSteps]), "");
  }
}

TEST(TraceTest, OnTheHostEachWorkerIsThereOnceAStep) {
  const TemporaryDirectory directory;
  const Solved solved(ProblemOf(1, {400'000, 3, 100'000}));
  LifecycleSetting setting;
  setting.device_kind = OFFLOAD_DEVICE_HOST;
  setting.threads = 3;
  LifecycleRig rig(solved.problem, setting);
  Start(rig);
  for (const StepInput& input : solved.problem.steps) (void)rig.StepOnce(input);
  const Picture picture = Stop(rig, directory / "trace.json");
  for (size_t step = 1; step <= kSteps; ++step) {
    std::vector<std::string> rows;
    for (const Event& event : picture.Find("update", step)) rows.push_back(event.row);
    std::sort(rows.begin(), rows.end());
    EXPECT_EQ(rows, (std::vector<std::string>{"worker 0", "worker 1", "worker 2"}));
    EXPECT_EQ(picture.Find("norm", step).size(), 1u);
    ExpectOrder(picture, {"norm", "update"}, step, -2);
  }
  EXPECT_EQ(rig.Difference(solved.trace[kSteps]), "");
}

TEST(TraceTest, MovesTellTheirBytes) {
  const TemporaryDirectory directory;
  const Solved solved(ProblemOf(1));
  LifecycleSetting setting = SettingOf(1, OFFLOAD_EXECUTORS_CPU);
  setting.optimizer.device_fraction = 0.5;
  LifecycleRig rig(solved.problem, setting);
  Start(rig);
  rig.Move(offload_optimizer_offload_states);
  rig.Move(offload_optimizer_reload_states);
  const offload_stats_t stats = (rig.Wait(), rig.Stats());
  const Picture picture = Stop(rig, directory / "trace.json");
  EXPECT_EQ(picture.Bytes("move down"), stats.offloaded_bytes);
  EXPECT_EQ(picture.Bytes("move up"), stats.reloaded_bytes);
  EXPECT_EQ(picture.Bytes("offload states"), stats.offloaded_bytes);
  EXPECT_EQ(picture.Bytes("reload states"), stats.reloaded_bytes);
}

// The state of the chunk goes up, to the save's buffer, and down again.
TEST(TraceTest, AChunkBehindASaveIsPutAsideBeforeItsUpdate) {
  const TemporaryDirectory directory;
  const Solved solved(ProblemOf(0));
  HeldFiles files;
  LifecycleSetting setting = SettingOf(0, OFFLOAD_EXECUTORS_STREAMED);
  setting.optimizer.device_fraction = 0;
  setting.optimizer.save_buffer_bytes = UINT64_MAX;
  setting.files = &files;
  LifecycleRig rig(solved.problem, setting);
  (void)rig.StepOnce(solved.problem.steps[0]);
  files.before_reading = true;
  const offload_ticket_t save = rig.Save(directory / "saved");
  Start(rig);
  const offload_ticket_t step =
      rig.Step((rig.NewGrads(solved.problem.steps[1]), rig.BindAll(), solved.problem.steps[1]));
  rig.Wait(step);
  files.before_reading = false;
  rig.Wait(save);
  const Picture picture = Stop(rig, directory / "trace.json");
  uint64_t aside_bytes = 0;
  for (const Event& event : picture.Find("put aside", 2)) {
    if (event.row != "stream: copies down") continue;
    aside_bytes += event.bytes;
    const Event up = picture.Find("state up", 2, event.chunk).at(0);
    const Event update = picture.Find("update state", 2, event.chunk).at(0);
    EXPECT_LE(up.end_us, event.begin_us + 0.01);
    EXPECT_LE(event.end_us, update.begin_us + 0.01);
  }
  uint64_t state_bytes = 0;  // masters and two moments
  for (const uint64_t count : kCounts) state_bytes += 3 * count * sizeof(float);
  EXPECT_EQ(aside_bytes, state_bytes);
}

// Early updates, a save that runs, and a caller that does not wait.
TEST(TraceTest, NoBitDependsOnIt) {
  const TemporaryDirectory directory;
  for (uint64_t seed = 0; seed < 12; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const Solved solved(ProblemOf(seed));
    HeldFiles files;
    LifecycleSetting setting =
        SettingOf(seed, seed % 3 == 0 ? OFFLOAD_EXECUTORS_AUTO : OFFLOAD_EXECUTORS_CPU);
    setting.optimizer.device_fraction = seed % 2 == 0 ? 0 : 0.3;
    setting.optimizer.early_update_bytes = 1 << 20;
    setting.optimizer.save_buffer_bytes = 1 << 20;
    setting.files = &files;
    LifecycleRig rig(solved.problem, setting);
    Start(rig, seed % 4 == 0 ? 4096 : 0);
    offload_ticket_t save = 0;
    const std::string path = directory / std::to_string(seed);
    for (size_t step = 0; step < kSteps; ++step) {
      const StepInput& input = solved.problem.steps[step];
      rig.SetGroups(input.groups);
      rig.NewGrads(input);
      rig.BindAll();
      rig.Move(offload_optimizer_offload_grads);
      for (void*& grad : rig.grad) grad = nullptr;
      (void)rig.Step(input);
      if (step != 1) continue;
      rig.Wait();
      files.before_end = true;
      save = rig.Save(path);
    }
    files.before_end = false;
    const Picture picture = Stop(rig, directory / "trace.json");
    // A small ring has the latest events alone, and the save may have ended before those.
    if (seed % 4 != 0) {
      EXPECT_EQ(picture.Find("save", 3).size() + picture.Find("save", 4).size() +
                    picture.Find("save", 5).size(),
                1u);
    }
    rig.Wait(save);
    EXPECT_EQ(rig.Difference(solved.trace[kSteps]), "");
    LifecycleSetting on_host;
    on_host.device_kind = OFFLOAD_DEVICE_HOST;
    LifecycleRig loaded(solved.problem, on_host);
    ASSERT_EQ(loaded.TryLoad(path), OFFLOAD_OK) << offload_last_error();
    EXPECT_EQ(loaded.Difference(solved.trace[2]), "");
  }
}

TEST(TraceTest, ASmallRingKeepsTheLatestAndTellsTheRest) {
  const TemporaryDirectory directory;
  const Solved solved(ProblemOf(0));
  LifecycleRig rig(solved.problem, SettingOf(0, OFFLOAD_EXECUTORS_CPU));
  size_t all = 0;
  for (uint64_t ring_bytes : {uint64_t{0}, uint64_t{4096}}) {
    Start(rig, ring_bytes);
    for (const StepInput& input : solved.problem.steps) (void)rig.StepOnce(input);
    uint64_t dropped = 0;
    const std::string path = directory / "trace.json";
    MUST(offload_optimizer_trace_stop(rig.optimizer(), path.c_str(), &dropped));
    const Picture picture(path);
    if (ring_bytes == 0) {
      EXPECT_EQ(dropped, 0u);
      all = picture.events.size();
      continue;
    }
    EXPECT_LE(picture.events.size() * sizeof(void*) * 5, ring_bytes);
    EXPECT_LE(std::stoull(ValueOf(picture.head, "ring_bytes")), ring_bytes);
    EXPECT_GT(dropped, 0u);
    EXPECT_GT(all, picture.events.size());
    EXPECT_EQ(picture.Find("step", 2 * kSteps).size(), 1u);
    EXPECT_TRUE(picture.Find("step", kSteps + 1).empty());
  }
}

void ExpectError(int32_t status, int32_t expected, const std::vector<std::string>& words) {
  EXPECT_EQ(status, expected);
  const std::string text = offload_last_error();
  for (const std::string& word : words)
    EXPECT_NE(text.find(word), std::string::npos) << word << " in " << text;
}

TEST(TraceTest, WrongCallsAreRefused) {
  const TemporaryDirectory directory;
  const Solved solved(ProblemOf(0));
  LifecycleRig rig(solved.problem, SettingOf(0, OFFLOAD_EXECUTORS_CPU));
  const offload_optimizer_t optimizer = rig.optimizer();
  const std::string path = directory / "trace.json";
  ExpectError(offload_optimizer_trace_stop(optimizer, path.c_str(), nullptr), OFFLOAD_INVALID_STATE,
              {"no trace has been started", "offload_optimizer_trace_start"});
  ExpectError(offload_optimizer_trace_start(optimizer, 4095), OFFLOAD_INVALID_ARGUMENT,
              {"ring_bytes is 4095", "4096", "0 = 16777216"});
  ExpectError(offload_optimizer_trace_start(optimizer, UINT64_MAX), OFFLOAD_INVALID_ARGUMENT,
              {"ring_bytes is 18446744073709551615", "4294967296"});
  Start(rig);
  ExpectError(offload_optimizer_trace_start(optimizer, 0), OFFLOAD_INVALID_STATE,
              {"started already", "offload_optimizer_trace_stop"});
  (void)rig.StepOnce(solved.problem.steps[0]);
  const std::string nowhere = directory / "missing/trace.json";
  ExpectError(offload_optimizer_trace_stop(optimizer, nowhere.c_str(), nullptr), OFFLOAD_IO_FAILED,
              {"path is '" + nowhere, "No such file or directory", "another path", "NULL"});
  ExpectError(offload_optimizer_trace_start(optimizer, 0), OFFLOAD_INVALID_STATE,
              {"not been written", "NULL"});
  // The recording has ended, and is kept.
  (void)rig.StepOnce(solved.problem.steps[1]);
  const Picture picture = Stop(rig, path);
  EXPECT_EQ(picture.Find("step", 1).size(), 1u);
  EXPECT_TRUE(picture.Find("step", 2).empty());
  // NULL gives a trace up; a directory is no file.
  Start(rig);
  ExpectError(
      offload_optimizer_trace_stop(optimizer, std::string(directory / ".").c_str(), nullptr),
      OFFLOAD_IO_FAILED, {"no trace could be written"});
  MUST(offload_optimizer_trace_stop(optimizer, nullptr, nullptr));
  ExpectError(offload_optimizer_trace_stop(optimizer, nullptr, nullptr), OFFLOAD_INVALID_STATE,
              {"no trace has been started"});
}

}  // namespace
}  // namespace hybridopt
