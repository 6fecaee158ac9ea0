// What a profiler is told: a library that NVTX takes for one writes down the ranges of every
// thread.
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

// What each thread did, as its outermost ranges with those in them: "step 1(norm, update 0)".
Told Take() {
  void* const recorder = dlopen(std::getenv("NVTX_INJECTION64_PATH"), RTLD_NOW | RTLD_NOLOAD);
  void* const take = recorder == nullptr ? nullptr : dlsym(recorder, "TakeRecorded");
  if (take == nullptr) return {"NVTX_INJECTION64_PATH is not the recorder's, or NVTX ignores it"};
  std::vector<RecordedEvent> events;
  reinterpret_cast<TakeRecordedFunction*>(take)(&events);
  dlclose(recorder);
  Told told;
  std::map<std::thread::id, std::vector<std::string>> open;
  for (const RecordedEvent& event : events) {
    std::vector<std::string>& ranges = open[event.thread];
    if (!event.name.empty()) {
      ranges.push_back(event.name + "(");
      continue;
    }
    if (ranges.empty()) return {"a range has ended that had not begun"};
    std::string ended = ranges.back() + ")";
    ranges.pop_back();
    if (ended.ends_with("()")) ended.resize(ended.size() - 2);
    if (ranges.empty())
      told.push_back(ended);
    else
      ranges.back() += (ranges.back().ends_with("(") ? "" : ", ") + ended;
  }
  for (const auto& [thread, ranges] : open)
    if (!ranges.empty()) told.push_back(ranges.front() + " has not ended");
  std::sort(told.begin(), told.end());  // threads are unordered
  return told;
}

// What a run leaves, when all threads that serve it are gone.
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

TEST(Ranges, OfAStepAreItsLanesAndChunks) {
  const Told told =
      Record(ThreeChunks(OFFLOAD_DEVICE_SIM), [](Trainer& trainer) { trainer.Steps(0, 1); });
  EXPECT_EQ(told, (Told{"step 1(queue grads down 0, queue grads down 1, await gradients, norm, "
                        "await grads down 0, update 0, queue params up 0, queue grads down 2, "
                        "await grads down 1, update 1, queue params up 1, "
                        "await device update, await params up 0, await grads down 2, update 2, "
                        "queue params up 2, await params up 1, await params up 2)",
                        "update 0", "update 0", "update 1", "update 1", "update 2", "update 2"}));
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
