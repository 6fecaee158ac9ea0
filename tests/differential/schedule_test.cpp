// The timing of streams does not change the bits: a thousand random schedules of the simulated
// device, and on a real one the caller's stream delayed at random; and a test of that test, in
// which one kind of wait is left out and wrong bits must be seen.
#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>

#include "../sanitizers.h"
#include "leaky_device.h"
#include "machine/context.h"
#include "memory/pinned_arena.h"
#include "optimizer/optimizer.h"
#include "rig.h"

namespace hybridopt {
namespace {

void Require(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message().c_str());
  std::abort();
}

template <typename T>
T Require(Result<T> result) {
  if (!result.ok()) Require(result.status());
  return std::move(result.value());
}

constexpr size_t kSteps = 2;

// Chunks of 1024 of these wrap around every ring; the small params make chunks of many fragments.
const std::vector<uint64_t> kCounts = {1500, 33, 700, 2100, 1, 1300, 1024};

// From problem kVouchedProblems on, the step without clipping has ASSUME_FINITE, so its verdict
// comes from the host. In problems with even numbers that is the second step.
constexpr uint64_t kVouchedProblems = 30;

// One of the steps is clipped and one is not, so that a verdict of another step shows; in some
// problems the first or the second is skipped.
Problem MakeProblem(uint64_t seed) {
  Random random(seed);
  Problem problem = RandomProblem(AlgorithmOfSeed(seed), SpecsOf(kCounts, random), kSteps, seed);
  StepInput& input = problem.steps[0];
  if (seed % 2 == 0) std::swap(input.grads, problem.steps[1].grads);
  if (seed % 2 == 0) std::swap(input.grad_scale, problem.steps[1].grad_scale);
  if (seed % 2 == 0) std::swap(input.grad_norm_max, problem.steps[1].grad_norm_max);
  if (seed % 3 == 1) problem.steps[seed % 2].flags = OFFLOAD_STEP_ASSUME_FINITE;
  if (seed >= kVouchedProblems)
    for (StepInput& step : problem.steps)
      if (step.grad_norm_max == 0) step.flags = OFFLOAD_STEP_ASSUME_FINITE;
  if (seed < kVouchedProblems && seed % 6 == 5) {
    const ParamSpec& spec = problem.params[3];
    Bytes grad = RandomArray(spec.grad_dtype, spec.count, false, random);
    PutElement(grad, spec.grad_dtype, spec.count - 1, BitsOf(spec.grad_dtype, INFINITY));
    problem.steps[seed / 6 % 2].grads[3] = grad;
  }
  return problem;
}

const Solved& SolvedProblem(uint64_t seed) {
  static std::map<uint64_t, Solved> solved;
  const auto found = solved.find(seed);
  if (found != solved.end()) return found->second;
  return solved.try_emplace(seed, MakeProblem(seed)).first->second;
}

// What happens to gradients before the step.
enum class Grads { kStay, kLeave, kAddUp };

struct Schedule {
  uint64_t problem = 0;
  uint64_t seed = 0;
  uint64_t delay_ns_max = 0;
  Leak leak = Leak::kNone;
  bool leak_in_commit = false;                 // else in the steps
  bool shares_queues = false;                  // of the device
  std::string slow_event;                      // its waits on the host are slow
  std::optional<int32_t> host_executors = {};  // else any
  Grads grads = Grads::kStay;
};

enum class Outcome { kRight, kWrongBits, kFailed };

// A training loop that is ordered only by streams. The host thread queues everything, waits once,
// and compares at once.
class Training {
 public:
  Training(const Solved& solved, const Schedule& schedule)
      : problem_(solved.problem),
        trace_(solved.trace),
        schedule_(schedule),
        layout_(problem_, schedule.seed) {
    Random random(schedule.seed);
    shared_grads_ = random.OneIn(2);
    MakeContext(1 + static_cast<uint32_t>(random.Below(2)));
    offload_optimizer_options_t options{};
    options.algorithm = problem_.AlgorithmOfGroup(0);
    options.device_fraction = std::vector<double>{0, 0.3, 0.7, 1}[random.Below(4)];
    options.chunk_elements = 1024;
    options.staging_slots = 2 + static_cast<uint32_t>(random.Below(3));
    if (schedule.grads != Grads::kStay) options.movable = OFFLOAD_MOVABLE_ACCUMULATE;
    OptimizerSetting setting;
    DrawExecutors(options.chunk_elements, random, setting);
    options.host_executors = schedule.host_executors.value_or(setting.host_executors);
    if (options.host_executors != OFFLOAD_EXECUTORS_CPU)
      options.stream_ring_bytes = setting.stream_ring_bytes;
    optimizer_ = Require(Optimizer::Create(context_, options));
    for (std::byte*& block : blocks_)
      block = static_cast<std::byte*>(Require(device().Allocate(layout_.bytes)));
    stream_ = Require(device().CreateStream(kCallersStreamLabel));
    other_stream_ = Require(device().CreateStream(kCallersStreamLabel));
    host_ = Require(PinnedArena::Map(device(), HostBytes()));
    if (TestsRunOnCuda())
      idle_work_ = static_cast<float*>(Require(device().Allocate(kIdleElements * sizeof(float))));
    Register();
  }

  ~Training() {
    optimizer_.reset();
    (void)device().Synchronize(stream_, -1);  // it still uses the memory that is freed next
  }

  Outcome Run(std::string* difference) {
    WriteParams();
    leaking_ = schedule_.leak_in_commit;
    if (!Good(optimizer_->Commit(stream_), difference)) return Outcome::kFailed;
    leaking_ = !schedule_.leak_in_commit;
    offload_ticket_t ticket = 0;
    for (size_t i = 0; i < kSteps; ++i) {
      const size_t block = shared_grads_ ? 0 : i;
      if (i > 0 && shared_grads_ && !Good(ForwardPass(ticket, i), difference))
        return Outcome::kFailed;
      WriteGrads(block, problem_.steps[i]);
      if (!Good(TellGrads(block, problem_.steps[i]), difference)) return Outcome::kFailed;
      Result<offload_ticket_t> queued = Step(problem_.steps[i]);
      if (!Good(queued.status(), difference)) return Outcome::kFailed;
      ticket = queued.value();
    }
    if (!Good(ForwardPass(ticket, kSteps), difference)) return Outcome::kFailed;
    if (!Good(optimizer_->Wait(ticket, -1), difference)) return Outcome::kFailed;
    *difference = StateDifference();
    if (!Good(device().Synchronize(stream_, -1), difference)) return Outcome::kFailed;
    if (difference->empty()) *difference = ReadsDifference();
    return difference->empty() ? Outcome::kRight : Outcome::kWrongBits;
  }

 private:
  // A param as the caller's stream has read it, and as expected.
  struct Read {
    const std::byte* got;
    const Bytes* expected;
    std::string where;
  };

  static bool Good(const Status& status, std::string* difference) {
    if (!status.ok()) *difference = status.message();
    return status.ok();
  }

  Device& device() { return context_->device(); }

  void MakeContext(uint32_t threads) {
    offload_context_options_t options{};
    options.threads = threads;
    options.log = [](void*, int32_t, const char*) {};
    const KernelTable& kernels = *Require(SelectKernels());
    auto accelerator =
        Require(MakeAccelerator({1 << 20, schedule_.seed, schedule_.delay_ns_max}, kernels));
    auto leaky = std::make_unique<LeakyDevice>(std::move(accelerator), schedule_.leak, leaking_,
                                               schedule_.shares_queues, schedule_.slow_event);
    context_ = std::make_shared<Context>(options, std::move(leaky), kernels);
  }

  void Register() {
    for (const offload_group_t& group : problem_.groups) Require(optimizer_->AddGroup(group));
    std::vector<ParamInput> inputs;
    std::deque<std::string> names;
    for (size_t id = 0; id < problem_.params.size(); ++id) {
      const ParamSpec& spec = problem_.params[id];
      ParamInput input{};
      input.param.group = spec.group;
      input.param.dtype = spec.dtype;
      input.param.grad_dtype = spec.grad_dtype;
      input.param.name = names.emplace_back("param" + std::to_string(id)).c_str();
      input.param.data = blocks_[0] + layout_.data[id];
      input.param.count = spec.count;
      inputs.push_back(input);
    }
    Require(optimizer_->AddParams(inputs));
  }

  // Pinned room for all that the caller's stream copies.
  uint64_t HostBytes() const { return 8 * kSteps * layout_.bytes; }
  std::byte* TakeHost(uint64_t bytes) {
    std::byte* const taken = host_.data() + host_taken_;
    host_taken_ += (bytes + 63) / 64 * 64;
    HYBRIDOPT_CHECK(host_taken_ <= host_.bytes());
    return taken;
  }

  // Other work of the caller's stream. On a real device it takes up to some milliseconds, so that
  // code that does not wait for it comes too early.
  void WorkOnStream() {
    if (idle_work_ == nullptr) return;
    const uint64_t rounds = std::max<uint64_t>(1, schedule_.delay_ns_max / 100'000);
    for (uint64_t i = random_.Below(8) * rounds; i > 0; --i)
      Require(device().Fill(stream_, idle_work_, kIdleElements, PatternOf(Format::kFp32, 1.0f)));
  }

  void WriteOnStream(std::byte* to, const Bytes& bytes) { WriteOn(stream_, to, bytes); }
  void WriteOn(StreamHandle stream, std::byte* to, const Bytes& bytes) {
    std::byte* const from = TakeHost(bytes.size());
    std::copy(bytes.begin(), bytes.end(), from);
    Require(device().CopyToDevice(stream, to, from, bytes.size()));
  }

  void WriteParams() {
    WorkOnStream();
    for (size_t id = 0; id < problem_.params.size(); ++id)
      WriteOnStream(blocks_[0] + layout_.data[id], problem_.initial[id]);
  }

  void WriteGrads(size_t block, const StepInput& input) {
    WorkOnStream();
    for (size_t id = 0; id < problem_.params.size(); ++id)
      if (input.grads[id].has_value())
        WriteOnStream(blocks_[block] + layout_.grad[id], *input.grads[id]);
  }

  // Gradients that leave do so as in a backward pass, the last params first, some at a time.
  Status TellGrads(size_t block, const StepInput& input) {
    HYBRIDOPT_TRY(Bind(block, input));
    if (schedule_.grads == Grads::kStay) return {};
    HYBRIDOPT_TRY(Leave(block, input));
    if (schedule_.grads == Grads::kLeave) return {};
    // Adds another micro-batch of -0, which changes no bit of the sum.
    WorkOnStream();
    for (size_t id = 0; id < problem_.params.size(); ++id) {
      const ParamSpec& spec = problem_.params[id];
      if (!input.grads[id].has_value()) continue;
      Bytes zeros(spec.grad_bytes());
      for (uint64_t i = 0; i < spec.count; ++i)
        PutElement(zeros, spec.grad_dtype, i, BitsOf(spec.grad_dtype, -0.0f));
      WriteOnStream(blocks_[block] + layout_.grad[id], zeros);
    }
    HYBRIDOPT_TRY(Bind(block, input));
    return Leave(block, input);
  }

  Status Bind(size_t block, const StepInput& input) {
    std::vector<offload_binding_t> bindings;
    for (uint32_t id = 0; id < problem_.params.size(); ++id) {
      offload_binding_t binding{};
      binding.param = id;
      if (input.grads[id].has_value()) binding.grad = blocks_[block] + layout_.grad[id];
      bindings.push_back(binding);
    }
    return optimizer_->Bind(bindings);
  }

  // After the tickets have completed, other code uses the memory.
  Status Leave(size_t block, const StepInput& input) {
    const Move move =
        schedule_.grads == Grads::kAddUp ? Move::kAccumulateGrads : Move::kOffloadGrads;
    std::vector<uint32_t> ids;
    offload_ticket_t ticket = 0;
    for (uint32_t left = static_cast<uint32_t>(problem_.params.size()); left > 0; --left) {
      ids.push_back(left - 1);
      if (left > 1 && random_.OneIn(2)) continue;
      HYBRIDOPT_ASSIGN(ticket, optimizer_->MoveResource(move, ids, {&stream_, 1}));
      ids.clear();
    }
    HYBRIDOPT_TRY(optimizer_->Wait(ticket, -1));
    for (size_t id = 0; id < problem_.params.size(); ++id)
      if (input.grads[id].has_value())
        WriteOn(other_stream_, blocks_[block] + layout_.grad[id],
                Bytes(problem_.params[id].grad_bytes(), std::byte{0x3f}));
    return device().Synchronize(other_stream_, -1);
  }

  Result<offload_ticket_t> Step(const StepInput& input) {
    for (uint32_t id = 0; id < input.groups.size(); ++id)
      HYBRIDOPT_TRY(optimizer_->SetGroup(id, input.groups[id]));
    offload_step_options_t options{};
    options.grad_scale = input.grad_scale;
    options.grad_norm_max = input.grad_norm_max;
    options.flags = input.flags;
    options.stream = stream_;
    return optimizer_->Step(options);
  }

  // The caller's stream reads the first params as soon as they are there, then the others.
  Status ForwardPass(offload_ticket_t ticket, size_t steps) {
    const auto count = static_cast<uint32_t>(problem_.params.size());
    for (uint32_t id = 0; id < count; ++id) {
      if (id < 3) HYBRIDOPT_TRY(optimizer_->StreamWait(ticket, stream_, std::span(&id, 1)));
      if (id == 3) HYBRIDOPT_TRY(optimizer_->StreamWait(ticket, stream_, {}));
      const uint64_t bytes = problem_.params[id].data_bytes();
      std::byte* const got = TakeHost(bytes);
      reads_.push_back(
          {got, &trace_[steps].params[id].data,
           "param " + std::to_string(id) + " read after step " + std::to_string(steps)});
      HYBRIDOPT_TRY(device().CopyToHost(stream_, got, blocks_[0] + layout_.data[id], bytes));
    }
    return {};
  }

  std::string ReadsDifference() const {
    for (const Read& read : reads_)
      if (!std::equal(read.expected->begin(), read.expected->end(), read.got)) return read.where;
    return "";
  }

  // Compares the bytes of this moment, without a wait for queued work.
  bool SameOnDevice(void* address, const void* expected, uint64_t bytes) {
    if (bytes == 0) return true;
    if (const Result<void*> mapped = device().Map(address, bytes); mapped.ok())
      return std::memcmp(mapped.value(), expected, bytes) == 0;
    Bytes got(bytes);
    Require(device().CopyToHost(other_stream_, got.data(), address, bytes));
    Require(device().Synchronize(other_stream_, -1));
    return std::memcmp(got.data(), expected, bytes) == 0;
  }

  std::string StateDifference() {
    const Model& model = trace_.back();
    for (uint32_t id = 0; id < problem_.params.size(); ++id) {
      const Model::Param& expected = model.params[id];
      if (!SameOnDevice(blocks_[0] + layout_.data[id], expected.data.data(), expected.data.size()))
        return "data of param " + std::to_string(id);
      for (int32_t kind = OFFLOAD_STATE_MASTER; kind <= OFFLOAD_STATE_SUM; ++kind) {
        const Result<offload_state_view_t> view = optimizer_->State(id, kind);
        if (view.ok() && !SameState(view.value(), ExpectedState(expected, kind), expected))
          return "state " + std::to_string(kind) + " of param " + std::to_string(id);
      }
    }
    const offload_step_result_t result = Require(optimizer_->StepResult(0));
    const bool same_norm = std::bit_cast<uint64_t>(result.grad_norm) ==
                           std::bit_cast<uint64_t>(model.verdict.grad_norm);
    return same_norm && result.step == model.steps_applied ? "" : "result";
  }

  static const std::vector<float>& ExpectedState(const Model::Param& param, int32_t kind) {
    if (kind == OFFLOAD_STATE_MASTER) return param.master;
    return kind == OFFLOAD_STATE_EXP_AVG_SQ ? param.moment1 : param.moment0;
  }

  bool SameState(const offload_state_view_t& view, const std::vector<float>& expected,
                 const Model::Param& param) {
    const uint64_t host_bytes = view.host_count * sizeof(float);
    const bool same_device =
        SameOnDevice(view.device_data, expected.data(), view.device_count * sizeof(float));
    const bool same_host =
        host_bytes == 0 ||
        std::memcmp(view.host_data, expected.data() + view.device_count, host_bytes) == 0;
    return same_device && same_host && view.step_count == param.step_count;
  }

  const Problem& problem_;
  const std::vector<Model>& trace_;
  const Schedule schedule_;
  const Layout layout_;
  bool shared_grads_ = false;  // both steps use one buffer, the second behind a stream wait
  std::atomic<bool> leaking_ = false;
  static constexpr uint64_t kIdleElements = uint64_t{1} << 26;
  Random random_{schedule_.seed};
  std::vector<Read> reads_;
  std::shared_ptr<Context> context_;
  std::shared_ptr<Optimizer> optimizer_;
  std::byte* blocks_[kSteps] = {};
  StreamHandle stream_ = nullptr;
  StreamHandle other_stream_ = nullptr;
  PinnedArena host_;
  uint64_t host_taken_ = 0;
  float* idle_work_ = nullptr;  // of a real device
};

Outcome Train(const Schedule& schedule, std::string* difference) {
  Training training(SolvedProblem(schedule.problem), schedule);
  return training.Run(difference);
}

TEST(ScheduleTest, AThousandSchedulesGiveTheModelsBits) {
  const int schedules = Scaled(1000);
  for (int seed = 0; seed < schedules; ++seed) {
    Schedule schedule;
    schedule.seed = static_cast<uint64_t>(seed);
    schedule.problem = schedule.seed % (kVouchedProblems + 10);
    schedule.delay_ns_max = seed % 2 == 0 ? 20'000 : 60'000;
    schedule.shares_queues = seed % 4 == 3;
    // The CPU workers' chunks, those that are streamed, or neither.
    schedule.slow_event = std::vector<std::string>{"gradients landed", "state down", ""}[seed % 3];
    constexpr Grads kGrads[] = {Grads::kStay, Grads::kLeave, Grads::kStay, Grads::kAddUp};
    schedule.grads = kGrads[seed / 12 % 4];
    std::string difference;
    ASSERT_EQ(Train(schedule, &difference), Outcome::kRight)
        << "seed " << seed << ": " << difference;
  }
}

// ------------------------------------------------------------------------- the test of the test --

struct LeakCase {
  const char* name;
  Leak leak;
  bool in_commit;
  bool streamed = false;  // chunks go through the device, and none through the CPU workers
  Grads grads = Grads::kStay;
  bool shares_queues = false;
};

void PrintTo(const LeakCase& leak_case, std::ostream* out) { *out << leak_case.name; }

class LeakTest : public testing::TestWithParam<LeakCase> {};

TEST_P(LeakTest, AMissingWaitGivesWrongBits) {
  if (HYBRIDOPT_TSAN)
    GTEST_SKIP() << "a missing wait is a data race: the thread sanitizer would end the program";
  // It is a matter of chance whether a schedule shows a missing wait, so the test lengthens the
  // delays until some schedule shows it.
  constexpr int kSchedulesMax = 400;
  bool shown = false;
  int failed = 0;
  for (int seed = 0; seed < kSchedulesMax && !shown; ++seed) {
    Schedule schedule;
    schedule.seed = static_cast<uint64_t>(seed);
    // None of these is vouched finite: with a wait missing, the next step, which then waits for no
    // verdict, could rewrite a launch under the device, and a CHECK would end the program.
    schedule.problem = schedule.seed * 3 % 30;
    // But a verdict that the host has first must be waited for on the device.
    if (GetParam().leak == Leak::kUpdateBehindVerdict)
      schedule.problem = kVouchedProblems + schedule.seed % 5 * 2;
    if (GetParam().streamed) schedule.host_executors = OFFLOAD_EXECUTORS_STREAMED;
    // Commit starts the workers, which takes longer than a short delay of who writes the params.
    const uint64_t shortest_ns = GetParam().in_commit ? 2'000'000 : 100'000;
    schedule.delay_ns_max = shortest_ns * (1 + static_cast<uint64_t>(seed) / 40);
    schedule.leak = GetParam().leak;
    schedule.shares_queues = GetParam().shares_queues;
    schedule.leak_in_commit = GetParam().in_commit;
    schedule.grads = GetParam().grads;
    std::string difference;
    const Outcome outcome = Train(schedule, &difference);
    shown = outcome == Outcome::kWrongBits;
    failed += outcome == Outcome::kFailed;
  }
  EXPECT_TRUE(shown) << "none of " << kSchedulesMax << " schedules showed it; " << failed
                     << " failed";
}

std::vector<LeakCase> LeakCases() {
  std::vector<LeakCase> cases = {{"GradientsBeforeTheyComeDown", Leak::kDownBehindGradients, false},
                                 {"GradientsBeforeTheNorm", Leak::kComputeBehindGradients, false},
                                 {"Verdict", Leak::kVerdict, false},
                                 {"ParamsBeforeCommit", Leak::kVerdict, true},
                                 {"ParamsLandedInCommit", Leak::kLanded, true}};
  cases.push_back({"LeavingGradients", Leak::kReady, false, false, Grads::kLeave});
  cases.push_back({"GradientsToAddUp", Leak::kReady, false, false, Grads::kAddUp});
  // A real device finishes such small copies and updates before other work can come too early.
  if (TestsRunOnCuda()) return cases;
  cases.push_back({"ChunkLanded", Leak::kLanded, false});
  cases.push_back({"LeavingGradientsLanded", Leak::kMoved, false, false, Grads::kLeave});
  cases.push_back({"LeavingGradientsSummed", Leak::kSummed, false, false, Grads::kLeave});
  cases.push_back({"GradientsToAddUpLanded", Leak::kLanded, false, false, Grads::kAddUp});
  cases.push_back({"ChunkUploaded", Leak::kUploaded, false});
  cases.push_back({"DeviceUpdated", Leak::kDeviceUpdated, false});
  cases.push_back({"CallersStream", Leak::kCallersStream, false});
  const auto behind = [&](const char* name, Leak leak, bool streamed) {
    cases.push_back({name, leak, false, streamed, Grads::kStay, true});
  };
  behind("CallersStreamBehindDeviceUpdate", Leak::kBehindDeviceUpdate, false);
  behind("CallersStreamBehindParamsUp", Leak::kBehindParamsUp, false);
  behind("CallersStreamBehindStreamedUpdate", Leak::kBehindStreamedUpdate, true);
  cases.push_back({"StreamedVerdict", Leak::kUpdateBehindVerdict, false, true});
  cases.push_back({"StreamedStateUp", Leak::kUpdateBehindState, false, true});
  cases.push_back({"StreamedUpdate", Leak::kDownBehindUpdate, false, true});
  cases.push_back({"StreamedStateDown", Leak::kStateDown, false, true});
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Waits, LeakTest, testing::ValuesIn(LeakCases()),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace hybridopt
