// Addresses and hyperparameters that change between steps, steps queued ahead, and streams that
// wait for some params only.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "../forwarding_device.h"
#include "machine/context.h"
#include "optimizer/optimizer.h"
#include "rig.h"

namespace hybridopt {
namespace {

constexpr int64_t kTenSecondsNs = 10'000'000'000;

ContextSetting OnDevice(int32_t device) {
  ContextSetting setting;
  setting.device_kind = device;
  setting.threads = 2;
  return setting;
}

// Blocks the stream on which it is queued until it is opened.
class Gate {
 public:
  void Close(const TestContext& context, offload_stream_t stream) {
    MUST(offload_stream_run(context.handle(), stream, Wait, &open_));
  }
  void Open() { open_ = true; }
  ~Gate() { Open(); }

 private:
  static void Wait(void* open) {
    while (!*static_cast<std::atomic<bool>*>(open))
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  std::atomic<bool> open_ = false;
};

class Stream {
 public:
  explicit Stream(const TestContext& context) : context_(context) {
    MUST(offload_stream_create(context.handle(), &handle_));
  }
  ~Stream() { MUST(offload_stream_destroy(context_.handle(), handle_)); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator offload_stream_t() const { return handle_; }  // NOLINT: stands for its handle

 private:
  const TestContext& context_;
  offload_stream_t handle_ = nullptr;
};

class BindTest : public testing::TestWithParam<std::tuple<int32_t, int32_t>> {
 protected:
  int32_t algorithm() const { return std::get<0>(GetParam()); }
  int32_t device() const { return std::get<1>(GetParam()); }
};

// Params and gradients move before every step, apart from each other; the old places keep their
// bytes. A third of the gradients is missing.
TEST_P(BindTest, NewAddressesEveryStep) {
  Problem problem = RandomProblem(algorithm(), AllDtypePairs(), 4, 1);
  for (size_t i = 0; i < problem.steps.size(); ++i)
    for (size_t id = i; id < problem.params.size(); id += 3) problem.steps[i].grads[id].reset();
  const TestContext context(OnDevice(device()));
  Rig rig(context, problem, {0.4, 1024, 2});
  Model model(problem);
  for (size_t i = 0; i < problem.steps.size(); ++i) {
    const StepInput& input = problem.steps[i];
    const size_t data_block = rig.AddBlock(10 + i);
    const size_t grad_block = rig.AddBlock(20 + i);
    rig.PutParams(data_block, model);
    rig.PutGrads(grad_block, input);
    rig.Bind(data_block, grad_block, input);
    rig.SetGroups(input.groups);
    MUST(offload_optimizer_wait(rig.handle(), rig.Queue(input), -1));
    model.Step(input);
    ASSERT_EQ(rig.Difference(model), "") << "step " << i + 1;
  }
}

// Two params of the same kind exchange their addresses: Bind's check for overlaps must allow it,
// and each param must keep its own state.
TEST_P(BindTest, TwoParamsSwapTheirBuffers) {
  std::vector<ParamSpec> params;
  for (int32_t dtype : kDtypes)
    for (int i = 0; i < 2; ++i)
      params.push_back({dtype, OFFLOAD_BF16, OFFLOAD_PLACE_AUTO, 0, 1500});
  const Problem problem = RandomProblem(algorithm(), params, 3, 2);
  const TestContext context(OnDevice(device()));
  Rig rig(context, problem, {0.4, 1024, 2});
  Model model(problem);
  for (const StepInput& input : problem.steps) {
    for (size_t a = 0; a < params.size(); ++a)
      for (size_t b = a + 1; b < params.size(); ++b)
        if (problem.params[a].dtype == problem.params[b].dtype) rig.SwapPlaces(0, a, b);
    rig.PutParams(0, model);
    rig.Step(input);
    model.Step(input);
    ASSERT_EQ(rig.Difference(model), "");
  }
}

// Each param's step count is set by the caller: the next step uses these counts, also to decide
// whether it is the first step of a momentum buffer.
TEST_P(BindTest, StepCountsAreSet) {
  const Problem problem = RandomProblem(algorithm(), AllDtypePairs(), 4, 5);
  const TestContext context(OnDevice(device()));
  Rig rig(context, problem, {0.4, 1024, 2});
  Model model(problem);
  for (const StepInput& input : problem.steps) {
    for (uint32_t id = 0; id < problem.params.size(); ++id) {
      model.params[id].step_count = id * 1000;
      MUST(offload_optimizer_set_step_count(rig.handle(), id, id * 1000));
    }
    rig.Step(input);
    model.Step(input);
    ASSERT_EQ(rig.Difference(model), "");
  }
}

// If a count could change while a step is queued, timing would decide whether that step or the next
// one uses the new count.
TEST(StepCountTest, RefusedWhileAStepIsQueued) {
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 1, 6);
  const TestContext context(OnDevice(OFFLOAD_DEVICE_SIM));
  const Stream stream(context);
  Gate gate;
  Rig rig(context, problem, {0.4, 1024, 2});
  rig.PutGrads(0, problem.steps[0]);
  rig.Bind(0, 0, problem.steps[0]);
  gate.Close(context, stream);
  rig.Queue(problem.steps[0], stream);
  EXPECT_EQ(offload_optimizer_set_step_count(rig.handle(), 0, 7), OFFLOAD_INVALID_STATE);
  EXPECT_NE(std::string(offload_last_error()).find("offload_optimizer_wait first"),
            std::string::npos);
  gate.Open();
  MUST(offload_optimizer_wait(rig.handle(), 0, -1));
  MUST(offload_optimizer_set_step_count(rig.handle(), 0, 7));
}

// Eight steps queued ahead, each with addresses, gradients that are missing and hyperparameters of
// its own; afterwards all of these are changed again. On sim a gate makes sure that they really are
// queued.
TEST_P(BindTest, QueuedStepsUseWhatHeldWhenTheyWereQueued) {
  constexpr size_t kQueued = 8;
  const Problem problem = RandomProblem(algorithm(), AllDtypePairs(), kQueued, 3);
  const TestContext context(OnDevice(device()));
  const Stream stream(context);
  Gate gate;
  Rig rig(context, problem, {0.4, 1024, 3});
  if (device() == OFFLOAD_DEVICE_SIM) gate.Close(context, stream);
  std::vector<size_t> blocks;
  for (size_t i = 0; i <= kQueued; ++i) blocks.push_back(rig.AddBlock(30 + i));
  for (size_t i = 0; i < kQueued; ++i) rig.PutGrads(blocks[i], problem.steps[i]);
  std::vector<offload_ticket_t> tickets;
  for (size_t i = 0; i < kQueued; ++i) {
    rig.Bind(0, blocks[i], problem.steps[i]);
    rig.SetGroups(problem.steps[i].groups);
    tickets.push_back(rig.Queue(problem.steps[i], stream));
  }
  std::vector<offload_group_t> other_groups = problem.steps[0].groups;
  for (offload_group_t& group : other_groups) group.lr = 1000;
  rig.SetGroups(other_groups);
  rig.Bind(0, blocks[kQueued], problem.steps[0]);
  if (device() == OFFLOAD_DEVICE_SIM) {
    offload_ticket_t ninth = 0;
    EXPECT_EQ(offload_optimizer_step(rig.handle(), nullptr, &ninth), OFFLOAD_INVALID_STATE);
    EXPECT_NE(std::string(offload_last_error()).find("8 steps are queued"), std::string::npos);
    EXPECT_EQ(offload_optimizer_wait(rig.handle(), tickets[0], 0), OFFLOAD_TIMED_OUT);
  }
  gate.Open();
  MUST(offload_optimizer_wait(rig.handle(), 0, -1));
  Model model(problem);
  for (size_t i = 0; i < kQueued; ++i) {
    model.Step(problem.steps[i]);
    EXPECT_EQ(rig.ResultDifference(model, tickets[i]), "") << "queued step " << i + 1;
  }
  EXPECT_EQ(rig.Difference(model), "");
}

INSTANTIATE_TEST_SUITE_P(Algorithms, BindTest,
                         testing::Combine(testing::ValuesIn(kAlgorithmValues),
                                          testing::ValuesIn(DevicesUnderTest())));

// --------------------------------------------------------------------------------- stream waits --

// Copies params out, on the device, as the caller's next forward pass would read them.
class Reader {
 public:
  Reader(const TestContext& context, const Rig& rig, const Problem& problem,
         const std::vector<uint32_t>& params) {
    for (uint32_t id : params) {
      void* mapped = nullptr;
      const uint64_t bytes = problem.params[id].data_bytes();
      MUST(offload_device_map(context.handle(), rig.DataAddress(0, id), bytes, &mapped));
      sources_.push_back(static_cast<const std::byte*>(mapped));
      copies.emplace_back(bytes);
    }
  }
  static void Run(void* self) {
    auto* reader = static_cast<Reader*>(self);
    for (size_t i = 0; i < reader->copies.size(); ++i)
      std::copy_n(reader->sources_[i], reader->copies[i].size(), reader->copies[i].begin());
  }

  std::vector<Bytes> copies;

 private:
  std::vector<const std::byte*> sources_;
};

std::vector<ParamSpec> TwelveParams() {
  std::vector<ParamSpec> params;
  for (int i = 0; i < 12; ++i)
    params.push_back({kDtypes[i % 3], kDtypes[i / 3 % 3], OFFLOAD_PLACE_AUTO, 0, 1500});
  return params;
}

// A stream that waits for some params sees their new values, in every schedule.
TEST(StreamWaitTest, NamedParamsAreNewBehindTheirChunks) {
  for (int seed = 0; seed < Scaled(60); ++seed) {
    Problem problem = RandomProblem(AlgorithmOfSeed(seed), TwelveParams(), 2, 40);
    const std::vector<Model> trace = TraceOf(problem);
    ContextSetting setting = OnDevice(OFFLOAD_DEVICE_SIM);
    setting.seed = static_cast<uint64_t>(seed);
    setting.delay_ns_max = 100'000;
    const TestContext context(setting);
    const Stream stream(context);
    Rig rig(context, problem, {seed % 2 == 0 ? 0 : 0.3, 1024, 2});
    rig.Step(problem.steps[0]);
    rig.PutGrads(0, problem.steps[1]);
    rig.Bind(0, 0, problem.steps[1]);
    rig.SetGroups(problem.steps[1].groups);
    const uint32_t last = static_cast<uint32_t>(seed) % 4;
    const std::vector<uint32_t> params = {last, 0};
    Reader reader(context, rig, problem, params);
    const offload_ticket_t ticket = rig.Queue(problem.steps[1]);
    MUST(offload_optimizer_stream_wait(rig.handle(), ticket, stream, params.data(), 2));
    MUST(offload_stream_run(context.handle(), stream, Reader::Run, &reader));
    MUST(offload_stream_synchronize(context.handle(), stream, -1));
    for (size_t i = 0; i < params.size(); ++i)
      EXPECT_EQ(reader.copies[i], trace[2].params[params[i]].data) << "seed " << seed;
    MUST(offload_optimizer_wait(rig.handle(), ticket, -1));
    EXPECT_EQ(rig.Difference(trace[2]), "") << "seed " << seed;
  }
}

// Blocks the call that copies to one address until the test opens it.
class HoldingDevice final : public ForwardingDevice {
 public:
  HoldingDevice(std::unique_ptr<Device> device, const std::atomic<const void*>& held)
      : ForwardingDevice(std::move(device)), held_(held) {}

  Status CopyToDevice(StreamHandle stream, void* device, const void* host,
                      uint64_t bytes) override {
    while (held_ == device) std::this_thread::sleep_for(std::chrono::microseconds(50));
    return ForwardingDevice::CopyToDevice(stream, device, host, bytes);
  }

 private:
  const std::atomic<const void*>& held_;
};

// The stream need not wait for the rest of the step: it goes on while the test holds the copy of
// the last param. The chunks before that param have gone up, because the ring has two slots.
TEST(StreamWaitTest, NamedParamsAreNotHeldUpByLaterChunks) {
  constexpr uint64_t kParams = 12, kCount = 1500, kBytes = kCount * sizeof(float);
  std::atomic<const void*> held = nullptr;
  offload_context_options_t context_options{};
  context_options.threads = 2;
  context_options.log = [](void*, int32_t, const char*) {};
  const KernelTable& kernels = *SelectKernels().value();
  std::unique_ptr<Device> sim = std::move(CreateSimDevice({16 << 20, 1, 0}, kernels).value());
  auto context = std::make_shared<Context>(
      context_options, std::make_unique<HoldingDevice>(std::move(sim), held), kernels);
  Device& device = context->device();
  auto* const params = static_cast<std::byte*>(device.Allocate(2 * kParams * kBytes).value());
  ASSERT_TRUE(
      device.Fill(nullptr, params, 2 * kParams * kCount, PatternOf(Format::kFp32, 1.0f)).ok());
  offload_optimizer_options_t options{};
  options.algorithm = OFFLOAD_SGD;
  options.chunk_elements = 1024;
  options.staging_slots = 2;
  options.host_executors = OFFLOAD_EXECUTORS_CPU;
  auto optimizer = Optimizer::Create(context, options).value();
  offload_group_t group{};
  group.lr = 0.5;
  ASSERT_TRUE(optimizer->AddGroup(group).ok());
  std::vector<offload_binding_t> bindings(kParams);
  for (uint32_t id = 0; id < kParams; ++id) {
    const std::string name = std::to_string(id);
    ParamInput input{};
    input.param.dtype = input.param.grad_dtype = OFFLOAD_FP32;
    input.param.name = name.c_str();
    input.param.data = params + id * kBytes;
    input.param.count = kCount;
    ASSERT_TRUE(optimizer->AddParams({&input, 1}).ok());
    bindings[id].param = id;
    bindings[id].grad = params + (kParams + id) * kBytes;
  }
  ASSERT_TRUE(optimizer->Commit(nullptr).ok());
  ASSERT_TRUE(optimizer->Bind(bindings).ok());
  held = params + (kParams - 1) * kBytes;
  const offload_ticket_t ticket = optimizer->Step({}).value();
  const StreamHandle stream = device.CreateStream(kCallersStreamLabel).value();
  const uint32_t first = 0;
  EXPECT_TRUE(optimizer->StreamWait(ticket, stream, {&first, 1}).ok());
  const Status reached = device.Synchronize(stream, 6 * kTenSecondsNs);
  EXPECT_TRUE(reached.ok()) << reached.message();
  EXPECT_EQ(optimizer->Wait(ticket, 0).code(), OFFLOAD_TIMED_OUT);
  held = nullptr;
  EXPECT_TRUE(optimizer->Wait(ticket, -1).ok());
  std::vector<float> values(kParams * kCount);
  EXPECT_TRUE(device.CopyToHost(nullptr, values.data(), params, kParams * kBytes).ok());
  EXPECT_TRUE(device.Synchronize(nullptr, -1).ok());
  EXPECT_EQ(values, std::vector<float>(values.size(), 0.5f));
}

// NULL as `params` means all params; ticket 0 means the last queued step.
TEST(StreamWaitTest, AllParamsAreNewBehindTheWholeStep) {
  for (int seed = 0; seed < Scaled(20); ++seed) {
    Problem problem = RandomProblem(AlgorithmOfSeed(seed), TwelveParams(), 1, 41);
    const std::vector<Model> trace = TraceOf(problem);
    ContextSetting setting = OnDevice(OFFLOAD_DEVICE_SIM);
    setting.seed = static_cast<uint64_t>(seed);
    setting.delay_ns_max = 50'000;
    const TestContext context(setting);
    const Stream stream(context);
    Rig rig(context, problem, {0.25 * (seed % 5), 1024, 3});
    rig.PutGrads(0, problem.steps[0]);
    rig.Bind(0, 0, problem.steps[0]);
    std::vector<uint32_t> params(problem.params.size());
    for (uint32_t id = 0; id < params.size(); ++id) params[id] = id;
    Reader reader(context, rig, problem, params);
    rig.Queue(problem.steps[0]);
    MUST(offload_optimizer_stream_wait(rig.handle(), 0, stream, nullptr, 0));
    MUST(offload_stream_run(context.handle(), stream, Reader::Run, &reader));
    MUST(offload_stream_synchronize(context.handle(), stream, -1));
    for (uint32_t id : params) EXPECT_EQ(reader.copies[id], trace[1].params[id].data);
    MUST(offload_optimizer_wait(rig.handle(), 0, -1));
  }
}

// A step whose gradients never become ready fails after device_timeout_ns. The device itself is all
// right, so only the poisoned timeline can release the waiting stream.
TEST(StreamWaitTest, AFailedStepReleasesWaitingStreams) {
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, TwelveParams(), 1, 42);
  ContextSetting setting = OnDevice(OFFLOAD_DEVICE_SIM);
  setting.device_timeout_ns = 1'000'000'000;
  const TestContext context(setting);
  const Stream producer(context);
  const Stream consumer(context);
  Rig rig(context, problem, {0.5, 1024, 2});
  rig.PutGrads(0, problem.steps[0]);
  rig.Bind(0, 0, problem.steps[0]);
  Gate gate;
  gate.Close(context, producer);
  const offload_ticket_t ticket = rig.Queue(problem.steps[0], producer);
  const uint32_t param = 3;
  MUST(offload_optimizer_stream_wait(rig.handle(), ticket, consumer, &param, 1));
  MUST(offload_optimizer_stream_wait(rig.handle(), ticket, consumer, nullptr, 0));
  EXPECT_EQ(offload_stream_synchronize(context.handle(), consumer, kTenSecondsNs), OFFLOAD_OK);
  EXPECT_EQ(offload_optimizer_wait(rig.handle(), ticket, -1), OFFLOAD_DEVICE_FAILED);
  EXPECT_NE(std::string(offload_last_error()).find("device_timeout_ns"), std::string::npos);
  EXPECT_EQ(offload_optimizer_step(rig.handle(), nullptr, nullptr), OFFLOAD_POISONED);
  gate.Open();
  MUST(offload_stream_synchronize(context.handle(), producer, kTenSecondsNs));
}

}  // namespace
}  // namespace hybridopt
