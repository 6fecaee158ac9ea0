// Step counts of params without elements: a save and a load keep them, although nothing else of
// these params is stored.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../fault/trainer.h"
#include "../temporary_directory.h"

namespace hybridopt::fault {
namespace {

using Counts = std::vector<uint64_t>;

RunOptions Options(const Counts& elements) {
  RunOptions run;
  run.device_kind = OFFLOAD_DEVICE_HOST;
  run.counts = elements;
  return run;
}

// A committed optimizer whose params have had these numbers of steps.
class Counted : public Trainer {
 public:
  explicit Counted(const Counts& elements, const Counts& steps = {}) : Trainer(Options(elements)) {
    AddParams();
    Commit();
    for (uint32_t i = 0; i < steps.size(); ++i)
      EXPECT_OFFLOAD_OK(offload_optimizer_set_step_count(optimizer, i, steps[i]));
  }
  Counts StepCounts() const {
    Counts counts;
    for (uint32_t i = 0; i < size(); ++i) {
      auto view = Make<offload_state_view_t>();
      EXPECT_OFFLOAD_OK(offload_optimizer_state(optimizer, i, OFFLOAD_STATE_EXP_AVG, &view));
      counts.push_back(view.step_count);
    }
    return counts;
  }
  // Returns the version of the format.
  uint32_t Save(const std::string& path) {
    auto options = Make<offload_save_options_t>();
    options.path = path.c_str();
    EXPECT_OFFLOAD_OK(offload_optimizer_save(optimizer, &options, nullptr));
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(optimizer, 0, -1));
    auto info = Make<offload_checkpoint_info_t>();
    EXPECT_OFFLOAD_OK(offload_checkpoint_inspect(path.c_str(), &info, nullptr, nullptr));
    EXPECT_OFFLOAD_OK(offload_checkpoint_verify(path.c_str(), nullptr));
    return info.format_version;
  }
  void Load(const std::string& path, uint32_t flags = 0) {
    auto options = Make<offload_load_options_t>();
    options.path = path.c_str();
    options.flags = flags;
    EXPECT_OFFLOAD_OK(offload_optimizer_load(optimizer, &options, nullptr));
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(optimizer, 0, -1));
  }
};

TEST(CheckpointCounts, OfParamsWithoutElementsAreKept) {
  const TemporaryDirectory directory;
  const Counts elements = {40, 0, 0, 30}, steps = {2, 5, 0, 3};
  EXPECT_EQ(Counted(elements, steps).Save(directory / "saved"), 2u);
  Counted other(elements, {9, 9, 9, 9});
  other.Load(directory / "saved");
  EXPECT_EQ(other.StepCounts(), steps);
  EXPECT_EQ(other.Save(directory / "again"), 2u);
  Counted third(elements);
  third.Load(directory / "again");
  EXPECT_EQ(third.StepCounts(), steps);
}

TEST(CheckpointCounts, WithFreshMomentsAreKeptIfAskedFor) {
  const TemporaryDirectory directory;
  const Counts elements = {40, 0}, steps = {2, 5};
  (void)Counted(elements, steps).Save(directory / "saved");
  Counted other(elements, {9, 9});
  other.Load(directory / "saved", OFFLOAD_LOAD_FRESH_MOMENTS);
  EXPECT_EQ(other.StepCounts(), Counts({0, 0}));
  other.Load(directory / "saved", OFFLOAD_LOAD_FRESH_MOMENTS | OFFLOAD_LOAD_KEEP_STEPS);
  EXPECT_EQ(other.StepCounts(), steps);
}

// Releases that know only version 1 can read such checkpoints only where possible.
TEST(CheckpointCounts, OfZeroTakeNoLaterFormat) {
  const TemporaryDirectory directory;
  EXPECT_EQ(Counted({40, 0}, {2, 0}).Save(directory / "saved"), 1u);
  Counted other({40, 0}, {9, 9});
  other.Load(directory / "saved");
  EXPECT_EQ(other.StepCounts(), Counts({2, 0}));
}

// A param without elements may be missing on either side.
TEST(CheckpointCounts, AreNoReasonToRefuseACheckpoint) {
  const TemporaryDirectory directory;
  (void)Counted({40, 0}, {2, 5}).Save(directory / "saved");
  Counted fewer({40}, {9});
  fewer.Load(directory / "saved");
  EXPECT_EQ(fewer.StepCounts(), Counts({2}));
  Counted more({40, 0, 0}, {9, 9, 9});
  more.Load(directory / "saved");
  EXPECT_EQ(more.StepCounts(), Counts({2, 5, 0}));
}

}  // namespace
}  // namespace hybridopt::fault
