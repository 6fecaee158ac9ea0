// Muon: params of matrices, each updated as a whole, beside params of AdamW in one optimizer. The
// bits are the same on the host device and on the simulated one, at any device fraction, with any
// executor, number of threads and size of chunks and rings, across save and resume, and if a stack
// of matrices is cut between ranks; and each update is the one that torch.optim.Muon's formulas in
// float64 give, as far as products in bf16 allow. A CUDA device has bits of its own, which are the
// same at any fraction, chunk and ring.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../devices.h"
#include "../fault/trainer.h"
#include "../forwarding_device.h"
#include "../labelled_device.h"
#include "../matrix_problem.h"
#include "../scale.h"
#include "../temporary_directory.h"
#include "machine/context.h"
#include "optimizer/handle_table.h"
#include "problem.h"

namespace hybridopt {
namespace {

using fault::ExpectError;
using fault::Make;

struct Tensor {
  std::vector<int64_t> shape;
  int32_t dtype;
  int32_t grad_dtype;
  uint32_t group;
  // The part of the first dimension that this rank has; end 0: all of it.
  int64_t begin = 0;
  int64_t end = 0;
  std::vector<uint64_t> split_rows = {};
  // Has these rows of tensor `of`, whose matrix has of_rows; empty: is a tensor of its own.
  uint32_t of = 0;
  uint64_t of_rows = 0;
  std::vector<uint64_t> rows = {};

  int64_t first_extent() const { return (end == 0 ? shape[0] : end) - begin; }
  uint64_t row_count() const {  // elements of one index of the first dimension
    uint64_t count = 1;
    for (size_t i = 1; i < shape.size(); ++i) count *= static_cast<uint64_t>(shape[i]);
    return count;
  }
  uint64_t count() const { return static_cast<uint64_t>(first_extent()) * row_count(); }
  // The rows of each part of its matrices, counted in the matrix.
  std::vector<std::vector<uint64_t>> PartRows() const {
    const auto height = static_cast<uint64_t>(shape[shape.size() - 2]);
    const std::vector<uint64_t> list = split_rows.empty() ? std::vector{height} : split_rows;
    std::vector<std::vector<uint64_t>> parts(list.size());
    for (uint64_t row = 0; row < height;)
      for (size_t part = 0; part < list.size(); ++part)
        for (uint64_t i = 0; i < list[part]; ++i) parts[part].push_back(row++);
    return parts;
  }
};

// A fused matrix: gate and up, queries, keys and values one after the other, and by groups.
std::vector<Tensor> FusedTensors(int32_t dtype, int32_t grad_dtype) {
  return {{{24, 16}, dtype, grad_dtype, 0, 0, 0, {12, 12}},
          {{31, 20}, dtype, grad_dtype, 1, 0, 0, {17, 7, 7}},
          {{2, 12, 9}, dtype, grad_dtype, 1, 0, 0, {2, 10}},
          {{30, 33}, dtype, grad_dtype, 0, 0, 0, {3, 1, 2}},
          {{2, 12, 9}, dtype, grad_dtype, 1, 0, 0, {2, 1}},
          {{130, 70}, dtype, grad_dtype, 3, 0, 0, {9, 4}}};
}

// Matrices that are tall, wide, square, larger than a chunk and much smaller; a stack; none at all.
// Group 2 is AdamW's.
std::vector<Tensor> Tensors() {
  std::vector<Tensor> tensors = {
      {{40, 30}, OFFLOAD_BF16, OFFLOAD_FP32, 0},    {{30, 40}, OFFLOAD_FP32, OFFLOAD_BF16, 0},
      {{5, 20, 25}, OFFLOAD_BF16, OFFLOAD_BF16, 1}, {{3000}, OFFLOAD_BF16, OFFLOAD_FP32, 2},
      {{65, 33}, OFFLOAD_FP16, OFFLOAD_FP32, 1},    {{1, 7}, OFFLOAD_FP32, OFFLOAD_FP32, 0},
      {{64, 64}, OFFLOAD_BF16, OFFLOAD_BF16, 0},    {{77}, OFFLOAD_FP32, OFFLOAD_FP16, 2},
      {{0, 5}, OFFLOAD_BF16, OFFLOAD_BF16, 0},      {{90, 17}, OFFLOAD_BF16, OFFLOAD_FP16, 1},
      {{4, 6, 9}, OFFLOAD_FP32, OFFLOAD_FP32, 0}};
  for (const Tensor& fused : FusedTensors(OFFLOAD_BF16, OFFLOAD_FP32)) tensors.push_back(fused);
  return tensors;
}

using Triples = std::vector<std::array<double, 3>>;

// Amsel et al., "The Polar Express", 2025, divided by 1.01 as there.
const Triples kPolarExpress = {{8.2051, -22.9019, 16.4607}, {4.0664, -2.8612, 0.5184},
                               {3.9096, -2.8234, 0.5250},   {3.2856, -2.4153, 0.4853},
                               {2.2779, -1.6198, 0.3985},   {1.8726, -1.2307, 0.3585},
                               {1.8564, -1.2132, 0.3568},   {1.8750, -1.2500, 0.3750}};

void SetCoefficients(offload_group_t& group, const Triples& triples) {
  for (size_t i = 0; i < triples.size(); ++i)
    std::copy(triples[i].begin(), triples[i].end(), group.ns_coefficients[i]);
}

std::vector<offload_group_t> Groups() {
  std::vector<offload_group_t> groups(4, Make<offload_group_t>());
  groups[0].lr = 0.02;
  groups[0].weight_decay = 0.1;
  groups[0].momentum = 0.95;
  groups[0].nesterov = 1;
  groups[0].eps = 1e-7;
  groups[1] = groups[0];
  groups[1].nesterov = 0;
  groups[1].maximize = 1;
  groups[1].momentum = 0.4;
  groups[1].update_rms = 0.2;
  groups[1].ns_steps = 3;
  SetCoefficients(groups[1], {{3, -3.2, 1.2}, {2.8, -3.1, 1.3}});  // the last one twice
  groups[2].algorithm = OFFLOAD_ADAMW;
  groups[2].lr = 0.01;
  groups[2].weight_decay = 0.1;
  groups[2].beta1 = 0.9;
  groups[2].beta2 = 0.99;
  groups[2].eps = 1e-8;
  groups[3] = groups[0];
  groups[3].ns_steps = 8;
  SetCoefficients(groups[3], kPolarExpress);
  return groups;
}

struct Setting : offload_optimizer_options_t {
  Setting() : offload_optimizer_options_t(Make<offload_optimizer_options_t>()) {
    algorithm = OFFLOAD_MUON;
    chunk_elements = 1024;
  }
  int32_t device = DevicesUnderTest()[0];
  uint32_t threads = 1;
  uint64_t seed = 1;
  bool offloads_grads = false;
  bool assumes_finite = false;
  uint64_t pinned_bytes_max = 0;
  bool may_not_commit = false;
  // Puts a device of the test between the library and the real device.
  std::function<std::unique_ptr<Device>(std::unique_ptr<Device>)> wrap;
};

constexpr uint64_t kSteps = 6;
constexpr uint64_t kSkipped = 3;  // has a gradient that is not a number
constexpr uint64_t kMissing = 4;  // lacks the gradient of the first param
constexpr int32_t kKinds[] = {OFFLOAD_STATE_MASTER, OFFLOAD_STATE_EXP_AVG, OFFLOAD_STATE_EXP_AVG_SQ,
                              OFFLOAD_STATE_MOMENTUM_BUFFER};

class Training {
 public:
  explicit Training(const Setting& setting, std::vector<Tensor> tensors = Tensors())
      : setting_(setting), tensors_(std::move(tensors)) {
    MakeContext();
    EXPECT_OFFLOAD_OK(offload_optimizer_create(context, &setting_, &optimizer));
    uint32_t group_id = 0;
    for (const offload_group_t& group : Groups())
      EXPECT_OFFLOAD_OK(offload_optimizer_add_group(optimizer, &group, &group_id));
    for (uint32_t id = 0; id < tensors_.size(); ++id) Add(id);
    commit_status = offload_optimizer_commit(optimizer, nullptr);
    commit_error = commit_status == OFFLOAD_OK ? "" : offload_last_error();
    if (!setting_.may_not_commit) {
      EXPECT_EQ(commit_error, "");
    }
  }
  ~Training() {
    EXPECT_OFFLOAD_OK(offload_optimizer_destroy(optimizer));
    EXPECT_OFFLOAD_OK(offload_context_destroy(context));
  }
  Training(const Training&) = delete;
  Training& operator=(const Training&) = delete;

  offload_step_result_t Step(uint64_t number) {
    SetGrads(number);
    ChangeGroup(number);
    if (setting_.offloads_grads) {
      auto move = Make<offload_move_options_t>();
      offload_ticket_t moved = 0;
      EXPECT_OFFLOAD_OK(offload_optimizer_offload_grads(optimizer, &move, &moved));
      EXPECT_OFFLOAD_OK(offload_optimizer_wait(optimizer, moved, -1));
    }
    auto options = Make<offload_step_options_t>();
    if (setting_.assumes_finite) options.flags = OFFLOAD_STEP_ASSUME_FINITE;
    if (number % 2 == 1 && !setting_.assumes_finite) {
      options.grad_norm_max = 0.5;
      options.grad_scale = 8;
    }
    EXPECT_OFFLOAD_OK(offload_optimizer_step(optimizer, &options, &ticket));
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(optimizer, ticket, -1));
    auto result = Make<offload_step_result_t>();
    EXPECT_OFFLOAD_OK(offload_optimizer_step_result(optimizer, ticket, &result));
    return result;
  }
  void Steps(uint64_t begin, uint64_t end) {
    for (uint64_t number = begin; number < end; ++number) (void)Step(number);
  }

  std::vector<float> State(uint32_t id, int32_t kind) const {
    std::vector<float> values(tensors_[id].count());
    if (offload_optimizer_read_state(optimizer, id, kind, 0, values.size(), values.data()) !=
        OFFLOAD_OK)
      values.clear();
    return values;
  }
  // Params and state of one tensor, or of all.
  std::string Bits(uint32_t id) const {
    std::string bits(tensors_[id].count() * DtypeBytes(tensors_[id].dtype), '\0');
    if (!bits.empty()) {
      EXPECT_OFFLOAD_OK(
          offload_device_download(context, bits.data(), data_[id], bits.size(), nullptr));
    }
    for (const int32_t kind : kKinds) {
      const std::vector<float> values = State(id, kind);
      bits.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float));
    }
    return bits;
  }
  std::vector<std::string> Bits() const {
    std::vector<std::string> bits;
    for (uint32_t id = 0; id < tensors_.size(); ++id) bits.push_back(Bits(id));
    return bits;
  }
  offload_plan_t Plan() const {
    auto plan = Make<offload_plan_t>();
    EXPECT_OFFLOAD_OK(offload_optimizer_plan(optimizer, &plan));
    return plan;
  }
  void Save(const std::string& path) {
    auto options = Make<offload_save_options_t>();
    options.path = path.c_str();
    EXPECT_OFFLOAD_OK(offload_optimizer_save(optimizer, &options, &saved));
  }
  void Load(const std::string& path) {
    auto options = Make<offload_load_options_t>();
    options.path = path.c_str();
    EXPECT_OFFLOAD_OK(offload_optimizer_load(optimizer, &options, &ticket));
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(optimizer, ticket, -1));
  }

  // The gradient of a step, as the float64 test needs it.
  std::vector<float> Grad(uint64_t number, uint32_t id) const {
    const Tensor& tensor = tensors_[id];
    Random random(1000 * number + Source(id) + 1);
    std::vector<float> values(WholeCount(tensor));
    for (float& value : values) value = random.SignedUnit();
    if (number == kSkipped && id == 2 && !values.empty() && !setting_.assumes_finite)
      values[values.size() / 2] = std::numeric_limits<float>::quiet_NaN();
    return Part(tensor, values);
  }

  offload_context_t context = nullptr;
  offload_optimizer_t optimizer = nullptr;
  offload_ticket_t ticket = 0, saved = 0;
  int32_t commit_status = OFFLOAD_OK;
  std::string commit_error;

 private:
  void MakeContext() {
    auto options = Make<offload_context_options_t>();
    options.device_kind = setting_.device;
    options.threads = setting_.threads;
    options.pinned_bytes_max = setting_.pinned_bytes_max;
    const SimOptions sim{uint64_t{1} << 24, setting_.seed, 20'000};
    if (setting_.device == OFFLOAD_DEVICE_SIM) {
      options.sim_memory_bytes = sim.memory_bytes;
      options.sim_seed = sim.seed;
      options.sim_delay_ns_max = sim.delay_ns_max;
    }
    if (!setting_.wrap) {
      EXPECT_OFFLOAD_OK(offload_context_create(&options, &context));
      return;
    }
    const KernelTable& kernels = *SelectKernels().value();
    using Contexts = HandleTable<Context, HandleKind::kContext>;
    auto made = std::make_shared<Context>(
        options, setting_.wrap(std::move(CreateSimDevice(sim, kernels).value())), kernels);
    context = static_cast<offload_context_t>(Contexts::Instance().Insert(std::move(made)).value());
  }

  uint32_t Source(uint32_t id) const { return tensors_[id].rows.empty() ? id : tensors_[id].of; }
  static uint64_t WholeCount(Tensor tensor) {
    if (!tensor.rows.empty()) return tensor.of_rows * tensor.row_count();
    tensor.begin = tensor.end = 0;
    return tensor.count();
  }
  static std::vector<float> Part(const Tensor& tensor, const std::vector<float>& values) {
    const uint64_t cols = tensor.row_count();
    std::vector<float> rows;
    for (const uint64_t row : tensor.rows)
      for (uint64_t j = 0; j < cols; ++j) rows.push_back(values[row * cols + j]);
    if (!rows.empty()) return rows;
    const uint64_t first = static_cast<uint64_t>(tensor.begin) * tensor.row_count();
    const auto begin = values.begin() + static_cast<ptrdiff_t>(first);
    return {begin, begin + static_cast<ptrdiff_t>(tensor.count())};
  }

  void Add(uint32_t id) {
    const Tensor& tensor = tensors_[id];
    data_.push_back(nullptr);
    grads_.push_back(nullptr);
    names_.push_back("tensor" + std::to_string(id));
    Random random(Source(id) + 77);
    std::vector<float> values(WholeCount(tensor));
    for (float& value : values) value = random.SignedUnit() / 10;
    if (tensor.count() > 0) {
      Upload(&data_[id], Narrowed(Part(tensor, values), tensor.dtype));
      Upload(&grads_[id], Narrowed(Grad(0, id), tensor.grad_dtype));
    }
    std::vector<int64_t> offset(tensor.shape.size(), 0), extent = tensor.shape;
    offset[0] = tensor.begin;
    extent[0] = tensor.first_extent();
    auto shard = Make<offload_shard_t>();
    shard.dimensions = static_cast<uint32_t>(tensor.shape.size());
    shard.box_count = 1;
    shard.global_shape = tensor.shape.data();
    shard.box_offsets = offset.data();
    shard.box_extents = extent.data();
    auto param = Make<offload_param_t>();
    param.group = tensor.group;
    param.dtype = tensor.dtype;
    param.grad_dtype = tensor.grad_dtype;
    param.name = names_.back().c_str();
    param.data = data_[id];
    param.grad = grads_[id];
    param.count = tensor.count();
    param.shard = &shard;
    param.split_count = static_cast<uint32_t>(tensor.split_rows.size());
    param.split_rows = tensor.split_rows.data();
    EXPECT_OFFLOAD_OK(offload_optimizer_add_params(optimizer, &param, 1, nullptr));
  }

  void Upload(void** to, const std::vector<std::byte>& bytes) {
    if (*to == nullptr) {
      EXPECT_OFFLOAD_OK(offload_device_alloc(context, bytes.size(), to));
    }
    EXPECT_OFFLOAD_OK(offload_device_upload(context, *to, bytes.data(), bytes.size(), nullptr));
  }

  void SetGrads(uint64_t number) {
    for (uint32_t id = 0; id < tensors_.size(); ++id) {
      if (tensors_[id].count() == 0) continue;
      Upload(&grads_[id], Narrowed(Grad(number, id), tensors_[id].grad_dtype));
      auto binding = Make<offload_binding_t>();
      binding.param = id;
      const bool is_missing = number == kMissing && id == 0 && !setting_.offloads_grads;
      binding.grad = is_missing ? nullptr : grads_[id];
      EXPECT_OFFLOAD_OK(offload_optimizer_bind(optimizer, &binding, 1));
    }
  }

  // The last steps have other coefficients.
  void ChangeGroup(uint64_t number) {
    if (number != kSteps - 2) return;
    offload_group_t group = Groups()[0];
    group.lr = 0.005;
    group.ns_steps = 2;
    EXPECT_OFFLOAD_OK(offload_optimizer_set_group(optimizer, 0, &group));
  }

  Setting setting_;
  const std::vector<Tensor> tensors_;
  std::vector<std::string> names_;
  std::vector<void*> data_, grads_;
};

std::vector<std::string> BitsOf(const Setting& setting) {
  Training training(setting);
  training.Steps(0, kSteps);
  return training.Bits();
}

void ExpectSame(const std::vector<std::string>& got, const std::vector<std::string>& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t id = 0; id < got.size(); ++id)
    EXPECT_TRUE(got[id] == expected[id]) << "tensor " << id << " has other bits";
}

Setting WithState(const StateChoice& state) {
  Setting setting;
  state.Put(setting);
  return setting;
}

// Settings that must not change a bit of a CUDA device.
std::map<std::string, std::function<void(Setting&)>> VariationsOnCuda() {
  return {
      {"device", [](Setting& s) { s.device_fraction = 1; }},
      {"streamed", [](Setting& s) { s.host_executors = OFFLOAD_EXECUTORS_STREAMED; }},
      {"large chunks, a large ring",
       [](Setting& s) {
         s.chunk_elements = uint64_t{1} << 20;
         s.stream_ring_bytes = uint64_t{1} << 25;
       }},
      {"a third",
       [](Setting& s) {
         s.device_fraction = 0.33;
         s.chunk_elements = 3000;
       }},
      {"changes",
       [](Setting& s) {
         s.device_fraction = 0.4;
         s.track_changes = 1;
       }},
      {"all on disk",
       [](Setting& s) {
         s.disk_fraction = 1;
         s.disk_paths = "/tmp";
       }},
      {"half on disk",
       [](Setting& s) {
         s.device_fraction = 0.2;
         s.disk_fraction = 0.5;
         s.disk_paths = "/tmp";
       }},
  };
}

// Settings that must not change a bit.
std::map<std::string, std::function<void(Setting&)>> Variations() {
  if (TestsRunOnCuda()) return VariationsOnCuda();
  const auto sim = [](auto change) {
    return [change](Setting& s) {
      s.device = OFFLOAD_DEVICE_SIM;
      s.threads = 2;
      change(s);
    };
  };
  return {
      {"host, 3 threads", [](Setting& s) { s.threads = 3; }},
      {"host, all on disk",
       [](Setting& s) {
         s.disk_fraction = 1;
         s.disk_paths = "/tmp";
       }},
      {"sim, cpu", sim([](Setting& s) { s.host_executors = OFFLOAD_EXECUTORS_CPU; })},
      {"sim, cpu, large chunks", sim([](Setting& s) {
         s.host_executors = OFFLOAD_EXECUTORS_CPU;
         s.chunk_elements = 8192;
         s.threads = 3;
         s.staging_slots = 2;
       })},
      {"sim, cpu, half", sim([](Setting& s) {
         s.host_executors = OFFLOAD_EXECUTORS_CPU;
         s.device_fraction = 0.5;
       })},
      {"sim, streamed", sim([](Setting& s) { s.host_executors = OFFLOAD_EXECUTORS_STREAMED; })},
      {"sim, streamed, a third", sim([](Setting& s) {
         s.host_executors = OFFLOAD_EXECUTORS_STREAMED;
         s.device_fraction = 0.33;
         s.chunk_elements = 3000;
       })},
      {"sim, both", sim([](Setting& s) { s.device_fraction = 0.1; })},
      {"sim, device", sim([](Setting& s) { s.device_fraction = 1; })},
      {"sim, a third on disk", sim([](Setting& s) {
         s.disk_fraction = 0.33;
         s.disk_paths = "/tmp";
         s.device_fraction = 0.2;
       })},
      {"sim, all on disk, streamed", sim([](Setting& s) {
         s.disk_fraction = 1;
         s.disk_paths = "/tmp";
         s.host_executors = OFFLOAD_EXECUTORS_STREAMED;
       })},
      {"sim, changes", sim([](Setting& s) {
         s.device_fraction = 0.4;
         s.track_changes = 1;
       })},
  };
}

class MuonTest : public testing::TestWithParam<StateChoice> {};

TEST_P(MuonTest, NoSettingChangesABit) {
  const std::vector<std::string> expected = BitsOf(WithState(GetParam()));
  for (const auto& [name, vary] : Variations()) {
    SCOPED_TRACE(name);
    Setting setting = WithState(GetParam());
    vary(setting);
    ExpectSame(BitsOf(setting), expected);
  }
}

// The save runs while the next steps wait for room, and the state comes back under other settings.
TEST_P(MuonTest, ResumingChangesNoBit) {
  for (const int32_t device : DevicesUnderTest())
    for (const uint64_t buffer_bytes : {uint64_t{0}, uint64_t{1} << 20}) {
      const TemporaryDirectory directory;
      Setting setting = WithState(GetParam());
      setting.device = device;
      setting.threads = 2;
      setting.device_fraction = device == OFFLOAD_DEVICE_HOST ? 0 : 0.4;
      setting.save_buffer_bytes = buffer_bytes;
      Training first(setting);
      first.Steps(0, 2);
      first.Save(directory / "saved");
      first.Steps(2, kSteps);
      EXPECT_OFFLOAD_OK(offload_optimizer_wait(first.optimizer, first.saved, -1));
      setting.device = AcceleratorUnderTest();
      setting.device_fraction = 0.7;
      setting.chunk_elements = 2048;
      Training second(setting);
      second.Load(directory / "saved");
      second.Steps(2, kSteps);
      ExpectSame(second.Bits(), first.Bits());
      ExpectSame(first.Bits(), BitsOf(WithState(GetParam())));
    }
}

// With all formats a sanitizer takes ten minutes: a tenth of a run has fp32, split masters and
// masters of 24 bits, two of them with moments of 16 bits.
std::vector<StateChoice> StatesOfMuon() {
  const std::vector<StateChoice> all = StateChoices();
  return TestScale() < 1 ? std::vector{all[0], all[4], all[8]} : all;
}

INSTANTIATE_TEST_SUITE_P(States, MuonTest, testing::ValuesIn(StatesOfMuon()));

TEST(Muon, ChangesOfTheFractionCutBetweenMatrices) {
  Setting setting;
  const std::vector<std::string> expected = BitsOf(setting);
  setting.device = AcceleratorUnderTest();
  Training training(setting);
  for (uint64_t number = 0; number < kSteps; ++number) {
    const double fraction = 0.19 * static_cast<double>((number * 3) % 5);
    EXPECT_OFFLOAD_OK(offload_optimizer_set_device_fraction(training.optimizer, fraction, nullptr));
    (void)training.Step(number);
  }
  ExpectSame(training.Bits(), expected);
}

TEST(Muon, UpdatesBeforeTheStepAndGradientsOnTheHostChangeNoBit) {
  Setting setting;
  setting.device = AcceleratorUnderTest();
  setting.movable = OFFLOAD_MOVABLE_GRADS;
  setting.offloads_grads = true;
  setting.threads = 2;
  const std::vector<std::string> expected = BitsOf(setting);
  setting.device_fraction = 0.6;
  ExpectSame(BitsOf(setting), expected);
  setting.device_fraction = 0.2;
  setting.host_executors = OFFLOAD_EXECUTORS_STREAMED;
  ExpectSame(BitsOf(setting), expected);
  if (TestsRunOnCuda()) return;  // there no CPU thread updates a matrix
  setting.host_executors = OFFLOAD_EXECUTORS_CPU;
  setting.early_update_bytes = uint64_t{1} << 22;
  Training training(setting);
  uint64_t early = 0, undone = 0;
  for (uint64_t number = 0; number < kSteps; ++number) {
    const offload_step_result_t result = training.Step(number);
    early += result.early_elements;
    undone += result.undone_elements;
  }
  EXPECT_GT(early + undone, 0u);
  ExpectSame(training.Bits(), expected);
}

// Without a norm each matrix of a stack is a problem of its own.
TEST(Muon, AStackThatRanksShareHasTheSameBits) {
  for (const int32_t moments : {0, int32_t{OFFLOAD_BF16}}) {
    Setting setting;
    setting.moment_dtype = moments;
    setting.rounding_seed = moments != 0 ? 5 : 0;
    setting.assumes_finite = true;
    const Tensor stack = {{5, 20, 25}, OFFLOAD_BF16, OFFLOAD_BF16, 1};
    Training whole(setting, {stack});
    whole.Steps(0, 3);
    std::vector<float> masters, momenta;
    for (const auto& [begin, end] : {std::pair{0, 2}, std::pair{2, 5}}) {
      Tensor part = stack;
      part.begin = begin;
      part.end = end;
      Training rank(setting, {part});
      rank.Steps(0, 3);
      for (const float value : rank.State(0, OFFLOAD_STATE_MASTER)) masters.push_back(value);
      for (const float value : rank.State(0, OFFLOAD_STATE_MOMENTUM_BUFFER))
        momenta.push_back(value);
    }
    EXPECT_EQ(masters, whole.State(0, OFFLOAD_STATE_MASTER));
    EXPECT_EQ(momenta, whole.State(0, OFFLOAD_STATE_MOMENTUM_BUFFER));
  }
}

// Tensors of which each has one part of a fused matrix.
std::vector<Tensor> PartsOf(const std::vector<Tensor>& fused) {
  std::vector<Tensor> parts;
  for (uint32_t id = 0; id < fused.size(); ++id)
    for (const std::vector<uint64_t>& rows : fused[id].PartRows()) {
      Tensor part = fused[id];
      part.shape = {static_cast<int64_t>(rows.size()), fused[id].shape.back()};
      part.split_rows = {};
      part.of = id;
      part.of_rows = static_cast<uint64_t>(fused[id].shape[0]);
      part.rows = rows;
      parts.push_back(part);
    }
  return parts;
}

// Each part of a split matrix has the bits of a param of its own.
TEST(Muon, PartsOfFusedMatricesAreMatrices) {
  for (const int32_t device : DevicesUnderTest()) {
    Setting setting;
    setting.assumes_finite = true;
    setting.device = device;
    setting.device_fraction = device == OFFLOAD_DEVICE_HOST ? 0 : 0.5;
    std::vector<Tensor> fused = FusedTensors(OFFLOAD_BF16, OFFLOAD_FP32);
    std::erase_if(fused, [](const Tensor& tensor) { return tensor.shape.size() == 3; });
    const std::vector<Tensor> parts = PartsOf(fused);
    Training together(setting, fused), apart(setting, parts);
    together.Steps(0, 3);
    apart.Steps(0, 3);
    for (uint32_t id = 0; id < parts.size(); ++id)
      for (const int32_t kind : {OFFLOAD_STATE_MASTER, OFFLOAD_STATE_MOMENTUM_BUFFER}) {
        const std::vector<float> all = together.State(parts[id].of, kind);
        const auto cols = static_cast<uint64_t>(parts[id].shape[1]);
        std::vector<float> own;
        for (const uint64_t row : parts[id].rows)
          for (uint64_t j = 0; j < cols; ++j) own.push_back(all[row * cols + j]);
        EXPECT_EQ(own, apart.State(id, kind)) << "part " << id << ", state " << kind;
      }
  }
}

// ------------------------------------------------------------------------------------- float64 --

// The rows of a matrix that begins at element `first`.
Matrix MatrixAt(const std::vector<float>& values, uint64_t first, const std::vector<uint64_t>& rows,
                uint64_t cols) {
  Matrix matrix(rows.size(), cols);
  for (uint64_t i = 0; i < rows.size(); ++i)
    for (uint64_t j = 0; j < cols; ++j) matrix(i, j) = values[first + rows[i] * cols + j];
  return matrix;
}

std::vector<NsStep> StepsOf(const offload_group_t& group) {
  std::vector<NsStep> steps;
  for (const auto& row : group.ns_coefficients)
    if (row[0] != 0)
      steps.push_back(
          {static_cast<float>(row[0]), static_cast<float>(row[1]), static_cast<float>(row[2])});
  if (steps.empty()) steps.push_back(kQuintic);
  steps.resize(static_cast<size_t>(group.ns_steps != 0 ? group.ns_steps : 5), steps.back());
  return steps;
}

struct MatrixStates {
  Matrix grad, momentum, master, new_momentum, new_master;
};

void ExpectUpdateOfFloat64(const offload_group_t& group, const MatrixStates& states) {
  const Matrix& grad = states.grad;
  // torch.optim.Muon's "original" and "match_rms_adamw".
  const double scale =
      group.update_rms > 0
          ? group.update_rms * std::sqrt(static_cast<double>(std::max(grad.rows, grad.cols)))
          : std::sqrt(
                std::max(1.0, static_cast<double>(grad.rows) / static_cast<double>(grad.cols)));
  Matrix momentum = states.momentum, u = momentum, shown = momentum;
  for (uint64_t i = 0; i < grad.at.size(); ++i) {
    const double g = group.maximize ? -grad.at[i] : grad.at[i];
    momentum.at[i] = group.momentum * momentum.at[i] + (1 - group.momentum) * g;
    u.at[i] = group.nesterov ? (1 - group.momentum) * g + group.momentum * momentum.at[i]
                             : momentum.at[i];
    EXPECT_NEAR(states.new_momentum.at[i], momentum.at[i], 1e-6);
    shown.at[i] =
        (states.master.at[i] * (1 - group.lr * group.weight_decay) - states.new_master.at[i]) /
        (group.lr * scale);
  }
  EXPECT_LT(RelativeError(shown, NewtonSchulzInDouble(u, StepsOf(group), group.eps)), kBf16Error);
}

// Steps begin at the library's own state, so that errors of earlier steps do not add up.
TEST(Muon, UpdatesAreThoseOfFloat64) {
  Setting setting;
  setting.assumes_finite = true;
  std::vector<Tensor> tensors = FusedTensors(OFFLOAD_FP32, OFFLOAD_FP32);
  for (const uint32_t group : {0u, 1u, 3u}) {
    tensors.push_back({{48, 20}, OFFLOAD_FP32, OFFLOAD_FP32, group});
    tensors.push_back({{20, 48}, OFFLOAD_FP32, OFFLOAD_FP32, group});
    // A square matrix has a tiny singular value, of which Polar Express multiplies each rounding by
    // some hundreds.
    tensors.push_back({{3, 24, group == 3 ? 12 : 24}, OFFLOAD_FP32, OFFLOAD_FP32, group});
  }
  Training training(setting, tensors);
  for (uint64_t number = 0; number < 3; ++number) {
    std::vector<std::vector<float>> masters, momenta;
    for (uint32_t id = 0; id < tensors.size(); ++id) {
      masters.push_back(training.State(id, OFFLOAD_STATE_MASTER));
      momenta.push_back(training.State(id, OFFLOAD_STATE_MOMENTUM_BUFFER));
    }
    (void)training.Step(number);
    for (uint32_t id = 0; id < tensors.size(); ++id) {
      SCOPED_TRACE("step " + std::to_string(number) + ", tensor " + std::to_string(id));
      const std::vector<float> grads = training.Grad(number, id);
      const std::vector<float> new_masters = training.State(id, OFFLOAD_STATE_MASTER);
      const std::vector<float> new_momenta = training.State(id, OFFLOAD_STATE_MOMENTUM_BUFFER);
      const auto cols = static_cast<uint64_t>(tensors[id].shape.back());
      const uint64_t count =
          static_cast<uint64_t>(tensors[id].shape[tensors[id].shape.size() - 2]) * cols;
      for (uint64_t first = 0; first < grads.size(); first += count)
        for (const std::vector<uint64_t>& rows : tensors[id].PartRows()) {
          const auto at = [&](const std::vector<float>& values) {
            return MatrixAt(values, first, rows, cols);
          };
          ExpectUpdateOfFloat64(
              Groups()[tensors[id].group],
              {at(grads), at(momenta[id]), at(masters[id]), at(new_momenta), at(new_masters)});
        }
    }
  }
}

// --------------------------------------------------------------------------- plans and refusals --

// -------------------------------------------------------------- devices that have bits of their
// own --

// A device whose matrices have bits that the CPU workers do not have. It may refuse to pin memory.
class DeviceOfOtherBits final : public ForwardingDevice {
 public:
  using ForwardingDevice::ForwardingDevice;

  std::string matrix_products() const override { return "the test 1 on a device"; }
  Status PrepareMatrices(StreamHandle stream, const MatrixShape& shape, void* workspace) override {
    EXPECT_NE(workspace, nullptr);
    EXPECT_TRUE(prepared_.insert({shape.rows, shape.cols}).second) << "prepared twice";
    return ForwardingDevice::PrepareMatrices(stream, shape, workspace);
  }
  Status UpdateMatrices(StreamHandle stream, const UpdateLaunch& launch) override {
    for (const DeviceUpdate& update : launch.updates)
      EXPECT_TRUE(prepared_.contains({update.matrix.rows, update.matrix.cols}));
    return ForwardingDevice::UpdateMatrices(stream, launch);
  }
  Status PinHost(void* data, uint64_t bytes) override {
    if (refuses_state && std::this_thread::get_id() != tests_thread_)
      return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY, "the test pins no more");
    return ForwardingDevice::PinHost(data, bytes);
  }

  // Refuses to pin what the library's own threads pin: state.
  bool refuses_state = false;

 private:
  const std::thread::id tests_thread_ = std::this_thread::get_id();
  std::set<std::pair<uint64_t, uint64_t>> prepared_;
};

Setting WithOtherBits(DeviceOfOtherBits** made = nullptr) {
  Setting setting;
  setting.device = OFFLOAD_DEVICE_SIM;
  setting.threads = 2;
  setting.wrap = [made](std::unique_ptr<Device> device) {
    auto wrapped = std::make_unique<DeviceOfOtherBits>(std::move(device));
    if (made != nullptr) *made = wrapped.get();
    return wrapped;
  };
  return setting;
}

TEST(Muon, NoCpuThreadUpdatesWhereTheDeviceHasBitsOfItsOwn) {
  const std::vector<std::string> expected = BitsOf(Setting());
  for (const auto& [device, disk] :
       std::vector<std::pair<double, double>>{{0, 0}, {0.5, 0}, {1, 0}, {0, 1}, {0.25, 0.5}}) {
    Setting setting = WithOtherBits();
    setting.device_fraction = device;
    setting.disk_fraction = disk;
    if (disk > 0) setting.disk_paths = "/tmp";
    Training training(setting);
    for (uint64_t number = 0; number < kSteps; ++number) {
      const offload_step_result_t result = training.Step(number);
      EXPECT_EQ(result.cpu_elements, 0u);
      if (number != kSkipped) {
        EXPECT_EQ(result.streamed_elements > 0, device < 1);
      }
    }
    ExpectSame(training.Bits(), expected);
  }
}

TEST(Muon, WhereOnlyTheDeviceUpdatesCpuThreadsAreRefused) {
  const auto expect_refused = [](Setting setting, int32_t status,
                                 const std::vector<std::string>& texts) {
    setting.may_not_commit = true;
    const Training training(setting);
    EXPECT_EQ(training.commit_status, status);
    for (const std::string& text : texts)
      EXPECT_NE(training.commit_error.find(text), std::string::npos) << training.commit_error;
  };
  Setting setting = WithOtherBits();
  setting.host_executors = OFFLOAD_EXECUTORS_CPU;
  expect_refused(setting, OFFLOAD_INVALID_ARGUMENT,
                 {"options.host_executors is OFFLOAD_EXECUTORS_CPU", "OFFLOAD_MUON",
                  "use OFFLOAD_EXECUTORS_AUTO"});
  setting = WithOtherBits();
  setting.movable = OFFLOAD_MOVABLE_GRADS;
  setting.early_update_bytes = 4096;
  expect_refused(setting, OFFLOAD_INVALID_ARGUMENT,
                 {"options.early_update_bytes is 4096", "OFFLOAD_MUON", "leave it 0"});
  setting = WithOtherBits();
  setting.stream_ring_bytes = 4096;
  expect_refused(setting, OFFLOAD_INVALID_ARGUMENT, {"options.stream_ring_bytes is 4096"});
  setting = WithOtherBits();
  setting.pinned_bytes_max = 200'000;
  expect_refused(setting, OFFLOAD_INVALID_ARGUMENT,
                 {"only the device updates matrices of OFFLOAD_MUON", "pinned_bytes_max",
                  "raise device_fraction"});
  setting.disk_fraction = 1;
  setting.disk_paths = "/tmp";
  expect_refused(setting, OFFLOAD_INVALID_ARGUMENT, {"pinned_bytes_max", "disk_ring_bytes"});
}

std::string NotesOf(const Training& training) {
  auto info = Make<offload_context_info_t>();
  EXPECT_OFFLOAD_OK(offload_context_get_info(training.context, &info));
  return info.notes;
}

TEST(Muon, ACheckpointTellsWhatMultipliedItsMatrices) {
  const TemporaryDirectory directory;
  const std::string path = directory / "saved";
  Training first(WithOtherBits());
  first.Steps(0, 2);
  first.Save(path);
  EXPECT_OFFLOAD_OK(offload_optimizer_wait(first.optimizer, first.saved, -1));
  Training same(WithOtherBits());
  same.Load(path);
  EXPECT_EQ(NotesOf(same).find("multiplied"), std::string::npos);
  Training other((Setting()));
  other.Load(path);
  EXPECT_NE(NotesOf(other).find("multiplied by the test 1 on a device, and are now by hybridopt on "
                                "the CPU"),
            std::string::npos)
      << NotesOf(other);
  ExpectSame(other.Bits(), first.Bits());
}

// What the system does not pin cannot stream, so the optimizer must not go on.
TEST(Muon, WhereOnlyTheDeviceUpdatesStateThatCannotBePinnedIsAnError) {
  DeviceOfOtherBits* device = nullptr;
  Setting setting = WithOtherBits(&device);
  setting.device_fraction = 1;
  Training training(setting);
  training.Steps(0, 2);
  device->refuses_state = true;
  offload_ticket_t moved = 0;
  ASSERT_OFFLOAD_OK(offload_optimizer_set_device_fraction(training.optimizer, 0, &moved));
  EXPECT_EQ(offload_optimizer_wait(training.optimizer, moved, -1), OFFLOAD_OUT_OF_HOST_MEMORY);
  EXPECT_NE(std::string(offload_last_error()).find("only the device updates matrices"),
            std::string::npos)
      << offload_last_error();
}

TEST(Muon, RingsAreAsLargeAsTheLargestMatrixNeeds) {
  Setting setting;
  setting.device = OFFLOAD_DEVICE_SIM;
  setting.staging_slots = 2;
  setting.host_executors = OFFLOAD_EXECUTORS_CPU;
  const std::vector<Tensor> tensors = {{{64, 64}, OFFLOAD_BF16, OFFLOAD_FP32, 0},
                                       {{9, 9}, OFFLOAD_BF16, OFFLOAD_FP32, 0}};
  const offload_plan_t cpu = Training(setting, tensors).Plan();
  EXPECT_GE(cpu.staging_bytes, 2u * 64 * 64 * (4 + 2));
  EXPECT_EQ(cpu.chunk_count, 2u);
  // Two iterates, a gram matrix and a polynomial.
  EXPECT_GE(cpu.host_scratch_bytes, 4u * 64 * 64 * 2);
  EXPECT_GE(cpu.device_scratch_bytes, 4u * 64 * 64 * 2);
  setting.host_executors = OFFLOAD_EXECUTORS_STREAMED;
  const offload_plan_t streamed = Training(setting, tensors).Plan();
  EXPECT_GE(streamed.device_ring_bytes, 2u * 64 * 64 * (4 + 4));
  EXPECT_GE(streamed.device_scratch_bytes, streamed.device_ring_bytes + 4u * 64 * 64 * 2);
  EXPECT_LT(streamed.device_scratch_bytes, streamed.device_ring_bytes + 8u * 64 * 64 * 2);
  // The first matrix on the device and the second on the host use one workspace in turns.
  setting.device_fraction = 0.99;
  const offload_plan_t both = Training(setting, tensors).Plan();
  EXPECT_GT(both.elements[OFFLOAD_TIER_HOST], 0u);
  EXPECT_GE(both.device_scratch_bytes, both.device_ring_bytes + 4u * 64 * 64 * 2);
  EXPECT_LT(both.device_scratch_bytes, both.device_ring_bytes + 8u * 64 * 64 * 2);
}

// Sees on the simulated device whether matrices of the device's share are updated first, although
// their stream is slow.
class DeviceOfTwoTiers final : public LabelledDevice {
 public:
  using LabelledDevice::LabelledDevice;

  Status UpdateMatrices(StreamHandle stream, const UpdateLaunch& launch) override {
    const bool streams = LabelOf(stream) != "device update";
    if (!streams) updates_left += 1;
    HYBRIDOPT_TRY(Run(stream, streams ? &CheckTurn : &TakeTime, this));
    HYBRIDOPT_TRY(ForwardingDevice::UpdateMatrices(stream, launch));
    return streams ? Status() : Run(stream, &EndTurn, this);
  }
  std::atomic<int> updates_left = 0;  // of the device's share
  std::atomic<int> streamed = 0;      // launches

 private:
  static void TakeTime(void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }
  static void EndTurn(void* self) { static_cast<DeviceOfTwoTiers*>(self)->updates_left -= 1; }
  static void CheckTurn(void* self) {
    auto* const device = static_cast<DeviceOfTwoTiers*>(self);
    device->streamed += 1;
    EXPECT_EQ(device->updates_left, 0) << "matrices of both tiers are in the workspace";
  }
};

TEST(Muon, MatricesThatStreamWaitForTheWorkspace) {
  Setting setting;
  setting.device = OFFLOAD_DEVICE_SIM;
  setting.host_executors = OFFLOAD_EXECUTORS_STREAMED;
  setting.device_fraction = 0.5;
  DeviceOfTwoTiers* device = nullptr;
  setting.wrap = [&](std::unique_ptr<Device> sim) {
    auto wrapped = std::make_unique<DeviceOfTwoTiers>(std::move(sim));
    device = wrapped.get();
    return wrapped;
  };
  Training training(setting);
  for (uint64_t number = 0; number < kSteps; ++number) (void)training.Step(number);
  EXPECT_EQ(device->updates_left, 0);
  EXPECT_GT(device->streamed, 0);
}

// The workspace comes and goes with matrices on the device or in its ring.
TEST(Muon, MatricesOfBothTiersAreUpdatedInOneWorkspace) {
  Setting setting;
  const std::vector<std::string> expected = BitsOf(setting);
  setting.device = AcceleratorUnderTest();
  setting.host_executors = OFFLOAD_EXECUTORS_STREAMED;
  for (const double first : {0.0, 0.5, 1.0}) {
    setting.device_fraction = first;
    Training training(setting);
    for (uint64_t number = 0; number < kSteps; ++number) {
      if (number > 0) {
        const double next = number % 3 == 0 ? 0.0 : number % 3 == 1 ? 0.5 : 1.0;
        EXPECT_OFFLOAD_OK(offload_optimizer_set_device_fraction(training.optimizer, next, nullptr));
      }
      (void)training.Step(number);
    }
    ExpectSame(training.Bits(), expected);
  }
}

int32_t AddParam(offload_optimizer_t optimizer, const std::vector<int64_t>& shape,
                 const std::vector<int64_t>& offset, const std::vector<int64_t>& extent,
                 const uint64_t* range = nullptr, const std::vector<uint64_t>& split_rows = {},
                 uint32_t group = 0) {
  static float data[4096];
  auto shard = Make<offload_shard_t>();
  shard.dimensions = static_cast<uint32_t>(shape.size());
  shard.box_count = 1;
  shard.global_shape = shape.data();
  shard.box_offsets = offset.data();
  shard.box_extents = extent.data();
  auto param = Make<offload_param_t>();
  param.dtype = param.grad_dtype = OFFLOAD_FP32;
  param.name = "w";
  param.data = data;
  param.count = 1;
  for (const int64_t size : extent) param.count *= static_cast<uint64_t>(size);
  if (range != nullptr) {
    shard.flags = OFFLOAD_SHARD_RANGE;
    shard.range_begin = range[0];
    shard.range_count = param.count = range[1];
  }
  param.shard = shape.empty() ? nullptr : &shard;
  param.group = group;
  param.split_count = static_cast<uint32_t>(split_rows.size());
  param.split_rows = split_rows.data();
  return offload_optimizer_add_params(optimizer, &param, 1, nullptr);
}

TEST(Muon, WhatIsNoWholeMatrixIsRefused) {
  auto context_options = Make<offload_context_options_t>();
  offload_context_t context = nullptr;
  ASSERT_OFFLOAD_OK(offload_context_create(&context_options, &context));
  const Setting setting;
  offload_optimizer_t optimizer = nullptr;
  ASSERT_OFFLOAD_OK(offload_optimizer_create(context, &setting, &optimizer));
  uint32_t group_id = 0;
  ASSERT_OFFLOAD_OK(offload_optimizer_add_group(optimizer, &Groups()[0], &group_id));
  ExpectError(AddParam(optimizer, {}, {}, {}), OFFLOAD_INVALID_ARGUMENT,
              {"'w'", "has 1 dimensions", "group of another algorithm"});
  ExpectError(AddParam(optimizer, {2, 2, 2, 2}, {0, 0, 0, 0}, {2, 2, 2, 2}),
              OFFLOAD_INVALID_ARGUMENT, {"has 4 dimensions", "expected 2"});
  ExpectError(
      AddParam(optimizer, {4, 6}, {0, 0}, {2, 6}), OFFLOAD_UNSUPPORTED,
      {"cuts matrices of 4 x 6", "give each matrix to one rank, to which offload_exchange_create"});
  ExpectError(AddParam(optimizer, {4, 6}, {0, 2}, {4, 4}), OFFLOAD_UNSUPPORTED,
              {"cuts matrices of 4 x 6"});
  ExpectError(AddParam(optimizer, {3, 4, 6}, {0, 0, 0}, {3, 2, 6}), OFFLOAD_UNSUPPORTED,
              {"cuts matrices of 4 x 6"});
  constexpr uint64_t kCut[] = {24, 30}, kLate[] = {12, 24}, kWhole[] = {24, 48};
  ExpectError(AddParam(optimizer, {3, 4, 6}, {0, 0, 0}, {3, 4, 6}, kCut), OFFLOAD_UNSUPPORTED,
              {"cuts matrices of 4 x 6"});
  ExpectError(AddParam(optimizer, {3, 4, 6}, {0, 0, 0}, {3, 4, 6}, kLate), OFFLOAD_UNSUPPORTED,
              {"cuts matrices of 4 x 6"});
  ASSERT_OFFLOAD_OK(offload_optimizer_add_group(optimizer, &Groups()[2], &group_id));
  const auto split = [&](const std::vector<uint64_t>& rows, uint32_t group = 0) {
    return AddParam(optimizer, {12, 6}, {0, 0}, {12, 6}, nullptr, rows, group);
  };
  ExpectError(split({7, 4}), OFFLOAD_INVALID_ARGUMENT,
              {"split_rows add up to 11", "the matrix has 12 rows", "multiple of the sum"});
  ExpectError(split({12, 12}), OFFLOAD_INVALID_ARGUMENT, {"split_rows add up to 24"});
  ExpectError(split({12, 0}), OFFLOAD_INVALID_ARGUMENT, {"split_rows[1] is 0"});
  ExpectError(split({UINT64_MAX, 13}), OFFLOAD_INVALID_ARGUMENT,
              {"split_rows[0] is 18446744073709551615"});
  auto unlisted = Make<offload_param_t>();
  unlisted.name = "u";
  unlisted.dtype = unlisted.grad_dtype = OFFLOAD_FP32;
  unlisted.split_count = 2;
  auto empty = Make<offload_shard_t>();
  constexpr int64_t kShape[] = {0, 4}, kOffset[] = {0, 0};
  empty.dimensions = 2;
  empty.box_count = 1;
  empty.global_shape = empty.box_extents = kShape;
  empty.box_offsets = kOffset;
  unlisted.shard = &empty;
  ExpectError(offload_optimizer_add_params(optimizer, &unlisted, 1, nullptr),
              OFFLOAD_INVALID_ARGUMENT, {"split_rows is NULL, but split_count is 2"});
  ExpectError(split({6, 6}, group_id), OFFLOAD_INVALID_ARGUMENT,
              {"split_count is 2", "AdamW", "leave it 0"});
  EXPECT_OFFLOAD_OK(AddParam(optimizer, {3, 4, 6}, {0, 0, 0}, {3, 4, 6}, kWhole));
  EXPECT_OFFLOAD_OK(offload_optimizer_destroy(optimizer));
  EXPECT_OFFLOAD_OK(offload_context_destroy(context));
}

}  // namespace
}  // namespace hybridopt
