// The ranges that a profiler gets: a library that NVTX loads as a profiler records the ranges of
// every thread.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "../fault/trainer.h"
#include "../temporary_directory.h"
#include "recorder.h"

namespace hybridopt::fault {
namespace {

using Told = std::vector<std::string>;

// "update 0", or "step 1(norm, update 0)" if it contains ranges. These are in alphabetical order,
// because it may depend on other threads whether a thread waits before or after another action.
std::string Described(std::string name, Told inside) {
  if (inside.empty()) return name;
  std::sort(inside.begin(), inside.end());
  name += "(" + inside.front();
  for (size_t i = 1; i < inside.size(); ++i) name += ", " + inside[i];
  return name + ")";
}

// The work of each thread: its outermost ranges with the ranges inside of them.
Told Take() {
  void* const recorder = dlopen(std::getenv("NVTX_INJECTION64_PATH"), RTLD_NOW | RTLD_NOLOAD);
  void* const take = recorder == nullptr ? nullptr : dlsym(recorder, "TakeRecorded");
  if (take == nullptr) return {"NVTX_INJECTION64_PATH is not the recorder's, or NVTX ignores it"};
  std::vector<RecordedEvent> events;
  reinterpret_cast<TakeRecordedFunction*>(take)(&events);
  dlclose(recorder);
  struct Open {
    std::string name;
    Told inside;
  };
  Told told;
  std::map<std::thread::id, std::vector<Open>> open;
  for (const RecordedEvent& event : events) {
    std::vector<Open>& ranges = open[event.thread];
    if (!event.name.empty()) {
      ranges.push_back({event.name, {}});
      continue;
    }
    if (ranges.empty()) return {"a range has ended that had not begun"};
    const std::string ended = Described(ranges.back().name, ranges.back().inside);
    ranges.pop_back();
    (ranges.empty() ? told : ranges.back().inside).push_back(ended);
  }
  for (const auto& [thread, ranges] : open)
    if (!ranges.empty()) told.push_back(ranges.front().name + " has not ended");
  std::sort(told.begin(), told.end());  // threads are unordered
  return told;
}

// The record of a run, when all its threads have ended.
template <class Work>
Told Record(const RunOptions& run, Work work) {
  {
    Trainer trainer(run);
    trainer.AddParams();
    trainer.Commit();
    work(trainer);
  }
  return Take();
}

RunOptions ThreeChunks(int32_t device_kind) {
  RunOptions run;
  run.device_kind = device_kind;
  run.counts = {2500};
  run.device_fraction = 0;
  return run;
}

// Each range by itself, at any depth.
Told Flattened(const Told& told) {
  Told names;
  for (const std::string& one : told) {
    size_t begin = 0;
    for (size_t end = 0; end != std::string::npos; begin = one.find_first_not_of("(), ", end)) {
      if (begin == std::string::npos) break;
      end = one.find_first_of("(),", begin);
      names.push_back(one.substr(begin, end - begin));
    }
  }
  std::sort(names.begin(), names.end());
  return names;
}

// The speed of threads decides which thread advances a chunk, and what it has to wait for.
TEST(Ranges, OfAStepAreItsLanesAndChunks) {
  RunOptions run = ThreeChunks(OFFLOAD_DEVICE_SIM);
  run.host_executors = OFFLOAD_EXECUTORS_CPU;
  Told told = Flattened(Record(run, [](Trainer& trainer) { trainer.Steps(0, 1); }));
  EXPECT_GE(std::erase(told, "await workers"), 1u);
  EXPECT_EQ(std::erase(told, "await grads down 0"), 1u);
  std::erase(told, "await grads down 1");
  std::erase(told, "await grads down 2");
  EXPECT_EQ(told, (Told{"await device update", "await gradients", "await params up 0",
                        "await params up 1", "await params up 2", "norm", "queue grads down 0",
                        "queue grads down 1", "queue grads down 2", "queue params up 0",
                        "queue params up 1", "queue params up 2", "step 1", "update 0", "update 0",
                        "update 1", "update 1", "update 2", "update 2"}));
}

TEST(Ranges, OfAStreamedStepAreTheWaysOfItsState) {
  RunOptions run = ThreeChunks(OFFLOAD_DEVICE_SIM);
  run.host_executors = OFFLOAD_EXECUTORS_STREAMED;
  const Told told = Flattened(Record(run, [](Trainer& trainer) { trainer.Steps(0, 1); }));
  EXPECT_EQ(told, (Told{"await device update", "await gradients", "await state down 0",
                        "await state down 1", "await state down 2", "norm", "queue state up 0",
                        "queue state up 1", "queue state up 2", "step 1"}));
}

TEST(Ranges, OfAStepInPlaceAreNormAndUpdate) {
  const Told told =
      Record(ThreeChunks(OFFLOAD_DEVICE_HOST), [](Trainer& trainer) { trainer.Steps(0, 2); });
  EXPECT_EQ(told, (Told{"step 1(norm, update 0)", "step 2(norm, update 0)"}));
}

TEST(Ranges, OfASaveAndALoadAreOnTheThreadsThatDoThem) {
  const TemporaryDirectory directory;
  const std::string path = directory / "checkpoint";
  const Told told = Record(ThreeChunks(OFFLOAD_DEVICE_SIM), [&](Trainer& trainer) {
    auto save = Make<offload_save_options_t>();
    save.path = path.c_str();
    EXPECT_OFFLOAD_OK(offload_optimizer_save(trainer.optimizer, &save, nullptr));
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, -1));
    auto load = Make<offload_load_options_t>();
    load.path = path.c_str();
    EXPECT_OFFLOAD_OK(offload_optimizer_load(trainer.optimizer, &load, nullptr));
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, -1));
  });
  EXPECT_EQ(told, (Told{"load", "publish save", "save"}));
}

TEST(Ranges, OfMovesAreTheirNames) {
  RunOptions run = ThreeChunks(OFFLOAD_DEVICE_SIM);
  run.device_fraction = 0.5;
  run.movable = OFFLOAD_MOVABLE_STATES;
  const Told told = Record(run, [](Trainer& trainer) {
    const auto move = Make<offload_move_options_t>();
    EXPECT_OFFLOAD_OK(offload_optimizer_offload_states(trainer.optimizer, &move, nullptr));
    EXPECT_OFFLOAD_OK(offload_optimizer_reload_states(trainer.optimizer, &move, nullptr));
    EXPECT_OFFLOAD_OK(offload_optimizer_refresh_masters(trainer.optimizer, &move, nullptr));
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(trainer.optimizer, 0, -1));
  });
  EXPECT_EQ(told, (Told{"offload states", "refresh masters", "reload states"}));
}

}  // namespace
}  // namespace hybridopt::fault
