// A run that is saved at any step and loaded into any other setting goes on with the bits of a run
// without an interruption.
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <string_view>

#include "../forwarding_device.h"
#include "../scale.h"
#include "../temporary_directory.h"
#include "lifecycle_rig.h"

namespace hybridopt {
namespace {

constexpr size_t kSteps = 6;

struct Setting {
  ContextSetting context;
  OptimizerSetting optimizer;
};

Setting RandomSetting(Random& random) {
  Setting setting;
  setting.context.device_kind = random.OneIn(2) ? OFFLOAD_DEVICE_HOST : AcceleratorUnderTest();
  setting.context.threads = static_cast<uint32_t>(1 + random.Below(4));
  setting.context.seed = random.Below(1000);
  constexpr double kFractions[] = {0, 0.3, 1};
  setting.optimizer.device_fraction = kFractions[random.Below(3)];
  constexpr uint64_t kChunks[] = {1024, 1500, 4096, 0};
  setting.optimizer.chunk_elements = kChunks[random.Below(4)];
  setting.optimizer.staging_slots = static_cast<uint32_t>(2 + random.Below(3));
  if (setting.context.device_kind != OFFLOAD_DEVICE_HOST)
    setting.optimizer.host_executors = static_cast<int32_t>(random.Below(3));
  if (random.OneIn(2)) setting.optimizer.save_buffer_bytes = random.Below(uint64_t{128} << 10);
  return setting;
}

std::string Text(const Setting& setting) { return Text(setting.context, setting.optimizer); }

offload_save_options_t SaveTo(const std::string& path) {
  auto options = Make<offload_save_options_t>();
  options.path = path.c_str();
  return options;
}
offload_load_options_t LoadFrom(const std::string& path, uint32_t flags = 0) {
  auto options = Make<offload_load_options_t>();
  options.path = path.c_str();
  options.flags = flags;
  return options;
}

offload_ticket_t Save(Rig& rig, const std::string& path, uint32_t flags = 0) {
  offload_save_options_t options = SaveTo(path);
  options.flags = flags;
  offload_ticket_t ticket = 0;
  MUST(offload_optimizer_save(rig.handle(), &options, &ticket));
  return ticket;
}
void Load(Rig& rig, const std::string& path, uint32_t flags = 0) {
  const offload_load_options_t options = LoadFrom(path, flags);
  offload_ticket_t ticket = 0;
  MUST(offload_optimizer_load(rig.handle(), &options, &ticket));
  MUST(offload_optimizer_wait(rig.handle(), ticket, -1));
}

class CheckpointTest : public testing::TestWithParam<int32_t> {};

TEST_P(CheckpointTest, SavedAnywhereAndLoadedAnywhereGoesOnWithTheSameBits) {
  const TemporaryDirectory directory;
  const int rounds = Scaled(12);
  for (int round = 0; round < rounds; ++round) {
    const uint64_t seed = static_cast<uint64_t>(round) * 5 + static_cast<uint64_t>(GetParam());
    Random random(seed);
    Problem problem = RandomProblem(GetParam(), AllDtypePairs(), kSteps, seed);
    problem.state = StateChoices()[round % StateChoices().size()];
    const Solved solved(std::move(problem));
    const size_t saved_after = random.Below(kSteps);
    const std::string path = directory / ("checkpoint-" + std::to_string(round));
    const Setting from = RandomSetting(random);
    {
      const TestContext context(from.context);
      Rig rig(context, solved.problem, from.optimizer);
      for (size_t step = 0; step < saved_after; ++step) rig.Step(solved.problem.steps[step]);
      MUST(offload_optimizer_wait(rig.handle(), Save(rig, path), -1));
    }
    for (int load = 0; load < 3; ++load) {
      const Setting to = RandomSetting(random);
      const TestContext context(to.context);
      Rig rig(context, solved.problem, to.optimizer);
      // The earlier content is gone.
      if (random.OneIn(2)) rig.Step(solved.problem.steps[0]);
      Load(rig, path, random.OneIn(4) ? OFFLOAD_LOAD_NO_VERIFY : 0);
      for (size_t step = saved_after; step < kSteps; ++step) {
        rig.Step(solved.problem.steps[step]);
        ASSERT_EQ(rig.Difference(solved.trace[step + 1]), "")
            << "seed " << seed << ", saved after " << saved_after << " by " << Text(from)
            << ", loaded by " << Text(to) << ", step " << step;
      }
    }
  }
}

// The expected result of a load into another layout: the same masters (rounded to nearest if they
// have 24 bits), params as that layout rounds them, moments widened or rounded to nearest.
Model Converted(const Model& saved, const Problem& problem) {
  Model model = saved;
  for (size_t id = 0; id < problem.params.size(); ++id) {
    Model::Param& param = model.params[id];
    const int32_t dtype = problem.params[id].dtype;
    for (size_t i = 0; i < param.master.size(); ++i) {
      if (dtype == OFFLOAD_BF16 && problem.state.split24()) {
        const uint32_t bits = std::bit_cast<uint32_t>(param.master[i]);
        param.master[i] = std::bit_cast<float>((bits + 0x7F + (bits >> 8 & 1)) & 0xFFFFFF00);
      }
      const float master = param.master[i];
      const bool away = dtype == OFFLOAD_BF16 && problem.state.split();
      PutElement(param.data, dtype, i, away ? Fp32ToBf16TiesAway(master) : BitsOf(dtype, master));
      if (!problem.state.bf16()) continue;
      param.moment0[i] = Bf16ToFp32(Fp32ToBf16(param.moment0[i]));
      param.moment1[i] = Bf16ToFp32(Fp32ToBf16(param.moment1[i]));
    }
  }
  return model;
}

// A tenth of a run takes every third pair, so that each layout is saved and loaded with three
// others.
TEST_P(CheckpointTest, AnyLayoutLoadsWhatAnyOtherSaved) {
  const TemporaryDirectory directory;
  size_t pairs = 0;
  for (const StateChoice& from : StateChoices()) {
    Problem problem = RandomProblem(GetParam(), AllDtypePairs(), 2, 17);
    problem.state = from;
    const Solved solved(std::move(problem));
    ContextSetting setting;
    setting.device_kind = from.split() ? AcceleratorUnderTest() : OFFLOAD_DEVICE_HOST;
    const TestContext context(setting);
    const std::string path = directory / from.Text();
    {
      Rig rig(context, solved.problem, {0.4, 1024, 2});
      for (const StepInput& step : solved.problem.steps) rig.Step(step);
      MUST(offload_optimizer_wait(rig.handle(), Save(rig, path), -1));
    }
    for (const StateChoice& to : StateChoices()) {
      if (TestScale() < 1 && pairs++ % 3 != 0) continue;
      for (int32_t device : {int32_t{OFFLOAD_DEVICE_HOST}, AcceleratorUnderTest()}) {
        setting.device_kind = device;
        const TestContext other(setting);
        Problem loaded = solved.problem;
        loaded.state = to;
        Rig rig(other, loaded, {0.6, 1024, 2});
        Load(rig, path);
        EXPECT_EQ(rig.BitsDifference(Converted(solved.trace.back(), loaded)), "")
            << "from " << from.Text() << " to " << to.Text() << ", device " << device;
      }
    }
  }
}

TEST_P(CheckpointTest, ALoadBringsEveryBitAtOnce) {
  const TemporaryDirectory directory;
  const Solved solved(RandomProblem(GetParam(), AllDtypePairs(), 3, 7));
  ContextSetting setting;
  setting.device_kind = AcceleratorUnderTest();
  setting.threads = 2;
  const TestContext context(setting);
  Rig rig(context, solved.problem, {0.5, 1024, 2});
  for (size_t step = 0; step < 3; ++step) {
    Save(rig, directory / std::to_string(step));
    rig.Step(solved.problem.steps[step]);
  }
  for (size_t step : {2, 0, 1}) {
    Load(rig, directory / std::to_string(step));
    EXPECT_EQ(rig.BitsDifference(solved.trace[step]), "") << step;
  }
}

std::string NameOfCase(const testing::TestParamInfo<int32_t>& info) {
  return AlgorithmText(info.param);
}
INSTANTIATE_TEST_SUITE_P(Algorithms, CheckpointTest, testing::ValuesIn(kAlgorithmsAndMixed),
                         NameOfCase);

// The memory that the copies of a load read, as recorded when their stream is given up.
struct WatchedCopies {
  StreamHandle stream = nullptr;
  std::map<const std::byte*, uint64_t> pinned, copied;  // bytes
  int given_up = 0;
  int strays = 0;  // copies from memory that is not pinned, or not any more

  bool IsPinned(const std::byte* data, uint64_t bytes) const {
    const auto next = pinned.upper_bound(data);
    if (next == pinned.begin()) return false;
    const auto& [begin, size] = *std::prev(next);
    return data + bytes <= begin + size;
  }
};
class CopyWatchingDevice final : public ForwardingDevice {
 public:
  CopyWatchingDevice(std::unique_ptr<Device> device, WatchedCopies& watched)
      : ForwardingDevice(std::move(device)), watched_(watched) {}
  Status PinHost(void* data, uint64_t bytes) override {
    watched_.pinned[static_cast<std::byte*>(data)] = bytes;
    return ForwardingDevice::PinHost(data, bytes);
  }
  void UnpinHost(void* data) override {
    watched_.pinned.erase(static_cast<std::byte*>(data));
    ForwardingDevice::UnpinHost(data);
  }
  Result<StreamHandle> CreateStream(const char* label) override {
    Result<StreamHandle> stream = ForwardingDevice::CreateStream(label);
    if (std::string_view(label) == "checkpoint") watched_.stream = stream.value();
    return stream;
  }
  Status CopyToDevice(StreamHandle stream, void* device, const void* host,
                      uint64_t bytes) override {
    if (stream != nullptr && stream == watched_.stream)
      watched_.copied[static_cast<const std::byte*>(host)] = bytes;
    return ForwardingDevice::CopyToDevice(stream, device, host, bytes);
  }
  void AbandonStream(StreamHandle stream) override {
    if (stream == watched_.stream) {
      watched_.given_up += 1;
      for (const auto& [host, bytes] : watched_.copied)
        if (!watched_.IsPinned(host, bytes)) watched_.strays += 1;
    }
    ForwardingDevice::AbandonStream(stream);
  }

 private:
  WatchedCopies& watched_;
};

// A device that hangs may read the memory until its stream is given up, although the load has
// failed long before.
TEST(CheckpointCopies, ReadMemoryThatIsThereUntilTheirStreamIsGivenUp) {
  const StateChoice full, split{OFFLOAD_MASTER_SPLIT},
      narrow{OFFLOAD_MASTER_FP32, OFFLOAD_BF16, OFFLOAD_ROUND_NEAREST};
  const std::pair<StateChoice, StateChoice> cases[] = {
      {full, full}, {full, split}, {full, narrow}, {narrow, full}};
  for (const auto& [saved, loaded] : cases) {
    SCOPED_TRACE(saved.Text() + " into " + loaded.Text());
    const TemporaryDirectory directory;
    const std::string path = directory / "saved";
    const std::vector<ParamSpec> params(3, {OFFLOAD_BF16, OFFLOAD_BF16, 0, 0, 40'001});
    Problem problem = RandomProblem(OFFLOAD_ADAMW, params, 1, 3);
    LifecycleSetting setting;
    setting.optimizer.device_fraction = 1;
    problem.state = saved;
    {
      LifecycleRig rig(problem, setting);
      rig.Wait(rig.Save(path));
    }
    problem.state = loaded;
    WatchedCopies watched;
    setting.wrap = [&](std::unique_ptr<Device> device) {
      return std::make_unique<CopyWatchingDevice>(std::move(device), watched);
    };
    LifecycleRig rig(problem, setting);
    ASSERT_EQ(rig.TryLoad(path), OFFLOAD_OK) << offload_last_error();
    EXPECT_EQ(watched.given_up, 1);
    EXPECT_GT(watched.copied.size(), 0u);
    EXPECT_EQ(watched.strays, 0);
  }
}

// Weights are rounded into 512 KiB of staging memory, from where they are copied to the device: the
// next piece is rounded when those copies have ended. The halves of split masters are joined piece
// by piece too.
TEST(CheckpointCopies, OfMoreThanTheStagingMemoryHoldsGiveEveryBit) {
  const std::vector<ParamSpec> params(3, {OFFLOAD_BF16, OFFLOAD_BF16, 0, 0, 300'001});
  for (const StateChoice& state : {StateChoice{}, StateChoice{OFFLOAD_MASTER_SPLIT}}) {
    SCOPED_TRACE(state.Text());
    const TemporaryDirectory directory;
    const std::string path = directory / "saved";
    Problem problem = RandomProblem(OFFLOAD_ADAMW, params, 1, 4);
    problem.state = state;
    const Solved saved(problem);
    Problem other = problem;
    other.initial = RandomProblem(OFFLOAD_ADAMW, params, 1, 5).initial;
    LifecycleSetting setting;
    setting.optimizer = {0, 100'000, 2};
    {
      LifecycleRig rig(saved.problem, setting);
      rig.NewGrads(problem.steps[0]);
      rig.BindAll();
      rig.Step(problem.steps[0]);
      rig.Wait(rig.Save(path));
    }
    setting.delay_ns_max = 2'000'000;
    LifecycleRig rig(other, setting);
    EXPECT_NE(rig.Difference(saved.trace[1]), "");
    ASSERT_EQ(rig.TryLoad(path), OFFLOAD_OK) << offload_last_error();
    EXPECT_EQ(rig.Difference(saved.trace[1]), "");
  }
}

}  // namespace
}  // namespace hybridopt
