// offload_optimizer_read_state and _write_state: any range of any state, in every layout and at
// every place, is the fp32 numbers that the model has; steps go on from what was written.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <string>
#include <vector>

#include "../temporary_directory.h"
#include "rig.h"

namespace hybridopt {
namespace {

constexpr uint32_t kMovable = OFFLOAD_MOVABLE_PARAMS | OFFLOAD_MOVABLE_STATES;

// The kinds of state that a param has.
std::vector<int32_t> KindsOf(const Problem& problem, size_t id) {
  std::vector<int32_t> kinds = {OFFLOAD_STATE_MASTER};
  const Algorithm& row = *AlgorithmOf(problem.AlgorithmOfParam(id));
  const double momentum = problem.groups[problem.params[id].group].momentum;
  for (int32_t i = 0; i < kMomentsMax; ++i)
    if (RuleOf(row.value, momentum) == row.rule && row.moments[i] != kNoMoment)
      kinds.push_back(row.moments[i]);
  return kinds;
}

std::vector<float>& ValuesOf(Model& model, const Problem& problem, size_t id, int32_t kind) {
  Model::Param& param = model.params[id];
  if (kind == OFFLOAD_STATE_MASTER) return param.master;
  return AlgorithmOf(problem.AlgorithmOfParam(id))->moments[0] == kind ? param.moment0
                                                                       : param.moment1;
}

// The stored value of a number.
float Kept(float value, const Problem& problem, size_t id, int32_t kind) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if (kind != OFFLOAD_STATE_MASTER)
    return problem.state.bf16() ? Bf16ToFp32(Fp32ToBf16(value)) : value;
  if (problem.params[id].dtype != OFFLOAD_BF16 || !problem.state.split24()) return value;
  return std::bit_cast<float>((bits + 0x7F + (bits >> 8 & 1)) & 0xFFFFFF00);
}

// Writes numbers into the library and into the model: with a master its param.
void Write(const Rig& rig, Model& model, const Problem& problem, size_t id, int32_t kind,
           uint64_t first, const std::vector<float>& values) {
  MUST(offload_optimizer_write_state(rig.handle(), static_cast<uint32_t>(id), kind, first,
                                     values.size(), values.data()));
  std::vector<float>& kept = ValuesOf(model, problem, id, kind);
  const int32_t dtype = problem.params[id].dtype;
  const bool away = dtype == OFFLOAD_BF16 && problem.state.split();
  for (size_t i = 0; i < values.size(); ++i) {
    const float value = Kept(values[i], problem, id, kind);
    kept[first + i] = value;
    if (kind == OFFLOAD_STATE_MASTER)
      PutElement(model.params[id].data, dtype, first + i,
                 away ? Fp32ToBf16TiesAway(value) : BitsOf(dtype, value));
  }
}

std::vector<float> RandomValues(uint64_t count, Random& random) {
  std::vector<float> values(count);
  for (float& value : values)  // moments of Adagrad and AdamW are not negative
    value = std::abs(std::bit_cast<float>(RandomBits(OFFLOAD_FP32, false, random)));
  return values;
}

struct Range {
  uint64_t first;
  uint64_t count;
};

Range RandomRange(uint64_t count, Random& random) {
  if (random.OneIn(3)) return {0, count};
  const uint64_t first = random.Below(count + 1);
  return {first, random.Below(count - first + 1)};
}

// Empty if a range of each state equals the model's, and no byte outside of the range is written.
std::string ReadDifference(const Rig& rig, Model& model, const Problem& problem, Random& random) {
  constexpr float kUntouched = -123.5f;
  for (size_t id = 0; id < problem.params.size(); ++id)
    for (int32_t kind : KindsOf(problem, id)) {
      const std::vector<float>& expected = ValuesOf(model, problem, id, kind);
      const Range range = RandomRange(expected.size(), random);
      std::vector<float> got(range.count + 2, kUntouched);
      MUST(offload_optimizer_read_state(rig.handle(), static_cast<uint32_t>(id), kind, range.first,
                                        range.count, got.data() + 1));
      std::vector<float> wanted(
          expected.begin() + static_cast<ptrdiff_t>(range.first),
          expected.begin() + static_cast<ptrdiff_t>(range.first + range.count));
      wanted.insert(wanted.begin(), kUntouched);
      wanted.push_back(kUntouched);
      if (std::memcmp(got.data(), wanted.data(), got.size() * sizeof(float)) == 0) continue;
      return "state " + std::to_string(kind) + " of param " + std::to_string(id) + " (" +
             problem.params[id].Text() + "), " + std::to_string(range.count) + " elements from " +
             std::to_string(range.first) + " on";
    }
  return "";
}

void WriteSome(const Rig& rig, Model& model, const Problem& problem, Random& random) {
  for (size_t id = 0; id < problem.params.size(); ++id)
    for (int32_t kind : KindsOf(problem, id)) {
      if (random.OneIn(3)) continue;
      const Range range = RandomRange(problem.params[id].count, random);
      Write(rig, model, problem, id, kind, range.first, RandomValues(range.count, random));
    }
}

struct Setting {
  ContextSetting context;
  OptimizerSetting optimizer;
  RankSetting rank;
  bool offloads_params = false;
  bool offloads_states = false;
};

Setting RandomSetting(Random& random) {
  Setting setting;
  setting.context.device_kind = random.OneIn(3) ? OFFLOAD_DEVICE_HOST : AcceleratorUnderTest();
  setting.context.threads = static_cast<uint32_t>(1 + random.Below(4));
  setting.context.seed = random.Below(1000);
  constexpr double kFractions[] = {0, 0.3, 1};
  setting.optimizer.device_fraction = kFractions[random.Below(3)];
  setting.optimizer.chunk_elements = 1024;
  setting.optimizer.staging_slots = 2;
  if (setting.context.device_kind == OFFLOAD_DEVICE_HOST) return setting;
  setting.rank.movable = kMovable;
  setting.offloads_params = random.OneIn(2);
  setting.offloads_states = random.OneIn(2);
  return setting;
}

std::string Text(const Setting& setting) {
  return Text(setting.context, setting.optimizer) +
         (setting.offloads_params ? ", params offloaded" : "") +
         (setting.offloads_states ? ", states offloaded" : "");
}

// Offloads what the setting names, or reloads it.
void MoveAway(const Rig& rig, const Setting& setting) {
  if (setting.offloads_states)
    MUST(offload_optimizer_offload_states(rig.handle(), nullptr, nullptr));
  if (setting.offloads_params)
    MUST(offload_optimizer_offload_params(rig.handle(), nullptr, nullptr));
  MUST(offload_optimizer_wait(rig.handle(), 0, -1));
}

void BringBack(Rig& rig, const Setting& setting, const StepInput& input) {
  rig.Bind(0, 0, input);
  if (setting.offloads_params)
    MUST(offload_optimizer_reload_params(rig.handle(), nullptr, nullptr));
  if (setting.offloads_states)
    MUST(offload_optimizer_reload_states(rig.handle(), nullptr, nullptr));
  MUST(offload_optimizer_wait(rig.handle(), 0, -1));
}

void Save(const Rig& rig, const std::string& path) {
  auto options = Make<offload_save_options_t>();
  options.path = path.c_str();
  MUST(offload_optimizer_save(rig.handle(), &options, nullptr));
  MUST(offload_optimizer_wait(rig.handle(), 0, -1));
}

void Load(const Rig& rig, const std::string& path) {
  auto options = Make<offload_load_options_t>();
  options.path = path.c_str();
  MUST(offload_optimizer_load(rig.handle(), &options, nullptr));
  MUST(offload_optimizer_wait(rig.handle(), 0, -1));
}

class StateIo : public testing::TestWithParam<int32_t> {};

TEST_P(StateIo, AnyRangeIsReadAndWrittenWhereverItIs) {
  const TemporaryDirectory directory;
  const int rounds = Scaled(20);
  for (int round = 0; round < rounds; ++round) {
    const uint64_t seed = static_cast<uint64_t>(round) * 7 + static_cast<uint64_t>(GetParam());
    Random random(seed);
    Problem made = RandomProblem(GetParam(), AllDtypePairs(), 2, seed);
    made.state = StateChoices()[static_cast<size_t>(round) % StateChoices().size()];
    const Solved solved(std::move(made));
    const Problem& problem = solved.problem;
    const Setting setting = RandomSetting(random);
    const std::string where =
        "seed " + std::to_string(seed) + ", " + problem.state.Text() + ", " + Text(setting);
    const TestContext context(setting.context);
    Rig rig(context, problem, setting.optimizer, setting.rank);
    rig.Step(problem.steps[0]);
    Model model = solved.trace[1];

    MoveAway(rig, setting);
    ASSERT_EQ(ReadDifference(rig, model, problem, random), "") << where;
    WriteSome(rig, model, problem, random);
    ASSERT_EQ(ReadDifference(rig, model, problem, random), "") << where << ", written";
    BringBack(rig, setting, problem.steps[0]);
    ASSERT_EQ(rig.BitsDifference(model), "") << where << ", brought back";

    // A checkpoint has the same numbers.
    const std::string path = directory / std::to_string(round);
    Save(rig, path);
    {
      const TestContext other({});
      const Rig loaded(other, problem, {});
      Load(loaded, path);
      ASSERT_EQ(ReadDifference(loaded, model, problem, random), "") << where << ", loaded";
    }
    rig.Step(problem.steps[1]);
    model.Step(problem.steps[1]);
    ASSERT_EQ(rig.BitsDifference(model), "") << where << ", stepped";
  }
}

INSTANTIATE_TEST_SUITE_P(Algorithms, StateIo, testing::ValuesIn(kAlgorithmsAndMixed));

Problem OneParam(uint64_t count) {
  return RandomProblem(OFFLOAD_ADAMW, {{OFFLOAD_BF16, OFFLOAD_BF16, OFFLOAD_PLACE_AUTO, 0, count}},
                       0, 1);
}

// The state is larger than a piece for the workers, and larger than the memory through which the
// device copies.
TEST(StateIo, LargeStateGoesInPieces) {
  constexpr uint64_t kCount = 300'007;
  Random random(3);
  for (int32_t device_kind : {int32_t{OFFLOAD_DEVICE_HOST}, AcceleratorUnderTest()})
    for (const StateChoice& state : StateChoices()) {
      Problem problem = OneParam(kCount);
      problem.state = state;
      ContextSetting setting;
      setting.device_kind = device_kind;
      setting.threads = 3;
      const TestContext context(setting);
      Rig rig(context, problem, {0.5, 0, 2});
      Model model(problem);
      for (int32_t kind : KindsOf(problem, 0))
        Write(rig, model, problem, 0, kind, 1, RandomValues(kCount - 1, random));
      ASSERT_EQ(ReadDifference(rig, model, problem, random), "") << state.Text();
      ASSERT_EQ(rig.BitsDifference(model), "") << state.Text();
    }
}

// Rounding is that of the layout; NaN stays NaN, and no bit of an fp32 number is lost.
TEST(StateIo, SpecialNumbersAreKept) {
  const float nan = std::bit_cast<float>(0x7FC12345u);
  const std::vector<float> special = {0.0f, -0.0f,  INFINITY,       -INFINITY,
                                      nan,  1e-45f, 1.0f + 0x1p-8f, 1.0f + 3 * 0x1p-8f};
  Problem problem = OneParam(special.size());
  for (const StateChoice& state : StateChoices()) {
    problem.state = state;
    const TestContext context({});
    const Rig rig(context, problem, {});
    for (int32_t kind : KindsOf(problem, 0)) {
      MUST(offload_optimizer_write_state(rig.handle(), 0, kind, 0, special.size(), special.data()));
      std::vector<float> got(special.size());
      MUST(offload_optimizer_read_state(rig.handle(), 0, kind, 0, got.size(), got.data()));
      for (size_t i = 0; i < special.size(); ++i) {
        if (std::isnan(special[i]))
          EXPECT_TRUE(std::isnan(got[i]));
        else
          EXPECT_EQ(std::bit_cast<uint32_t>(got[i]),
                    std::bit_cast<uint32_t>(Kept(special[i], problem, 0, kind)))
              << state.Text() << ", kind " << kind << ", " << special[i];
      }
    }
  }
}

}  // namespace
}  // namespace hybridopt
