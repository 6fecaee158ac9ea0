// The promises of every device with memory of its own: streams, events, flags, and kernels that
// give the host's bits.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "../../devices.h"
#include "../../random.h"
#include "device_arrays.h"
#include "device_calls.h"
#include "kernels/convert.h"
#include "kernels/table.h"
#include "memory/address_pool.h"
#include "memory/device_window.h"

namespace hybridopt {
namespace {

class PortTest : public AcceleratorTest {};

INSTANTIATE_TEST_SUITE_P(Devices, PortTest, testing::ValuesIn(AcceleratorsUnderTest()),
                         [](const auto& info) { return std::string(DeviceText(info.param)); });

// Blocks a stream until it is opened, or until this object is destroyed.
class Gate {
 public:
  explicit Gate(Device& device) : device_(device) {
    auto flag = device.NewFlag();
    EXPECT_TRUE(Ok(flag));
    flag_ = flag.value();
  }
  ~Gate() { Open(); }
  void Close(StreamHandle stream) { EXPECT_TRUE(Ok(device_.StreamWaitFlag(stream, flag_, 1))); }
  void Open() { flag_->store(1, std::memory_order_release); }

 private:
  Device& device_;
  std::atomic<uint64_t>* flag_ = nullptr;
};

// ------------------------------------------------------------------------------------- streams --

TEST_P(PortTest, WaitsTimeOutAndTheWorkGoesOn) {
  auto device = Make();
  StreamHandle stream = MakeStream(*device, "slow lane");
  EventHandle event = MakeEvent(*device, "end of work");
  Gate gate(*device);
  gate.Close(stream);
  ASSERT_TRUE(Ok(device->Record(event, stream)));
  for (int64_t timeout_ns : {0, 1'000'000}) {
    EXPECT_TRUE(Fails(device->Synchronize(stream, timeout_ns), OFFLOAD_TIMED_OUT,
                      {"slow lane", std::to_string(timeout_ns) + " ns"}));
    EXPECT_TRUE(Fails(device->Wait(event, timeout_ns), OFFLOAD_TIMED_OUT,
                      {"end of work", "slow lane", std::to_string(timeout_ns) + " ns"}));
  }
  gate.Open();
  EXPECT_TRUE(Ok(device->Wait(event, INT64_MAX)));
  EXPECT_TRUE(Ok(device->Synchronize(stream, INT64_MAX)));
  EXPECT_TRUE(Ok(device->Wait(event, 0)));
  EXPECT_TRUE(Ok(device->Synchronize(stream, 0)));
}

// ------------------------------------------------------------------------------ events ----- --

TEST_P(PortTest, NeverRecordedIsComplete) {
  auto device = Make();
  EventHandle event = MakeEvent(*device);
  EXPECT_TRUE(device->Reached(event).value());
  EXPECT_TRUE(Ok(device->Wait(event, 0)));
  EXPECT_TRUE(Ok(device->StreamWait(nullptr, event)));
  EXPECT_TRUE(Ok(device->Synchronize(nullptr, -1)));
}

TEST_P(PortTest, StandsForItsLatestRecord) {
  auto device = Make();
  StreamHandle blocked = MakeStream(*device, "blocked"), open = MakeStream(*device, "open");
  EventHandle event = MakeEvent(*device);
  Gate gate(*device);
  gate.Close(blocked);
  ASSERT_TRUE(Ok(device->Record(event, blocked)));
  EXPECT_FALSE(device->Reached(event).value());
  EXPECT_TRUE(Fails(device->Wait(event, 0), OFFLOAD_TIMED_OUT, {}));
  ASSERT_TRUE(Ok(device->Record(event, open)));
  EXPECT_TRUE(Ok(device->Wait(event, -1)));  // although the older record was not reached
  EXPECT_TRUE(device->Reached(event).value());
  ASSERT_TRUE(Ok(device->Record(event, blocked)));
  EXPECT_TRUE(Fails(device->Wait(event, 0), OFFLOAD_TIMED_OUT, {}));
  gate.Open();
  EXPECT_TRUE(Ok(device->Wait(event, -1)));
}

TEST_P(PortTest, RecordingAgainDoesNotMoveWhoWaitsAlready) {
  auto device = Make();
  StreamHandle first = MakeStream(*device, "first"), second = MakeStream(*device, "second");
  StreamHandle waiter = MakeStream(*device, "waiter");
  EventHandle event = MakeEvent(*device);
  Gate first_gate(*device), second_gate(*device);
  first_gate.Close(first);
  second_gate.Close(second);
  ASSERT_TRUE(Ok(device->Record(event, first)));
  ASSERT_TRUE(Ok(device->StreamWait(waiter, event)));
  ASSERT_TRUE(Ok(device->Record(event, second)));
  EXPECT_TRUE(Fails(device->Synchronize(waiter, 1'000'000), OFFLOAD_TIMED_OUT, {}));
  first_gate.Open();
  EXPECT_TRUE(Ok(device->Synchronize(waiter, -1)));  // the second gate is still closed

  // The opposite case: a later record that is reached does not release a wait for an older one.
  Gate third_gate(*device);
  third_gate.Close(first);
  ASSERT_TRUE(Ok(device->Record(event, first)));
  ASSERT_TRUE(Ok(device->StreamWait(waiter, event)));
  second_gate.Open();
  ASSERT_TRUE(Ok(device->Record(event, second)));
  ASSERT_TRUE(Ok(device->Wait(event, -1)));
  EXPECT_TRUE(Fails(device->Synchronize(waiter, 1'000'000), OFFLOAD_TIMED_OUT, {}));
  third_gate.Open();
  EXPECT_TRUE(Ok(device->Synchronize(waiter, -1)));
}

// ----------------------------------------------------------------------------- kernels ----- --

// Rows of one distance go to rows of another one, and nothing between them changes. A single row
// may be longer than its distance.
TEST_P(PortTest, CopyRowsCopiesRowsAlone) {
  auto device = Make();
  std::vector<uint16_t> from(60), expected(70, uint16_t{9999});
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint16_t>(i);
  auto* source = Upload(*device, from);
  auto* target = Upload(*device, expected);
  for (size_t row = 0; row < 4; ++row)
    for (size_t i = 0; i < 3; ++i) expected[5 + 9 * row + i] = from[2 + 7 * row + i];
  ASSERT_TRUE(Ok(device->CopyRows(nullptr, {target + 5, 18, source + 2, 14, 6, 4})));
  for (size_t i = 0; i < 20; ++i) expected[45 + i] = from[40 + i];
  ASSERT_TRUE(Ok(device->CopyRows(nullptr, {target + 45, 2, source + 40, 2, 40, 1})));
  EXPECT_EQ(Download(*device, target, 70), expected);
}

TEST_P(PortTest, FillSetsElementsOfOneTwoAndFourBytes) {
  auto device = Make();
  auto* data = Upload(*device, std::vector<float>(100, -1.0f));
  ASSERT_TRUE(Ok(device->Fill(nullptr, data + 1, 98, PatternOf(Format::kFp32, 2.5f))));
  const std::vector<float> filled = Download(*device, data, 100);
  EXPECT_TRUE(filled[0] == -1.0f && filled[99] == -1.0f);
  EXPECT_EQ(std::count(filled.begin(), filled.end(), 2.5f), 98);

  const Pattern pattern = PatternOf(Format::kBf16, 1.0009765625f);
  auto* halves = Upload(*device, std::vector<uint16_t>(3, uint16_t{7}));
  ASSERT_TRUE(Ok(device->Fill(nullptr, halves + 1, 1, pattern)));
  EXPECT_EQ(Download(*device, halves, 3), (std::vector<uint16_t>{7, 0x3f80, 7}));
  auto* bytes = Upload(*device, std::vector<uint8_t>(4, uint8_t{7}));
  ASSERT_TRUE(Ok(device->Fill(nullptr, bytes + 1, 2, {1, 0xfe})));
  EXPECT_EQ(Download(*device, bytes, 4), (std::vector<uint8_t>{7, 0xfe, 0xfe, 7}));
}

// A param of 1 beside masters that are 1, rounded: the last one is a tie that other layouts round
// to 1. Then params that other code has written, of which a zero has the other sign.
TEST_P(PortTest, MastersFollowParamsThatWereWritten) {
  auto device = Make();
  const std::vector<uint16_t> params = {0x3f80, 0x3f80, 0x3f80, 0xc000, 0x8000, 0x0001, 0x7fc0};
  const std::vector<float> before = {1.0f, 1.001f, 0x1.FFp-1f, 1.0f, 0.0f, 1.0f, -1.0f};
  auto* masters = Upload(*device, before);
  ASSERT_TRUE(Ok(device->FollowParams(nullptr, Upload(*device, params), OFFLOAD_BF16, params.size(),
                                      masters)));
  const std::vector<float> expected = {
      1.0f, 1.001f, 0x1.FFp-1f, -2.0f, -0.0f, 0x1p-133f, std::bit_cast<float>(0x7fc00000)};
  EXPECT_TRUE(SameBits(Download(*device, masters, before.size()), expected));
}

TEST_P(PortTest, TheNormFollowsTheFixedTree) {
  const uint64_t counts[] = {1, 4096, 0, 10'000, 4097, 20'000, 33};
  for (bool finite : {true, false}) {
    auto device = Make();
    std::vector<NormInput> inputs;
    uint64_t blocks = 0;
    double total = 0;
    for (uint64_t count : counts) {
      std::vector<float> grad = RandomValues(count, count);
      if (!finite && count == 4097) grad[4096] = std::numeric_limits<float>::infinity();
      total += TreeSum(grad);
      float* data = count == 0 ? nullptr : Upload(*device, grad);
      inputs.push_back({data, count, OFFLOAD_FP32, blocks});
      blocks += (count + kNormBlockElements - 1) / kNormBlockElements;
    }
    auto* sums = AllocateArray<double>(*device, blocks);
    auto* verdict = AllocateArray<Verdict>(*device, 1);
    ASSERT_TRUE(Ok(device->Norm(nullptr, {inputs, sums, 1, 0.01, verdict})));
    const Verdict expected = Decide(total, 1, 0.01);
    EXPECT_EQ(expected.skip, finite ? 0 : 1);
    EXPECT_TRUE(SameBits(Download(*device, verdict, 1), {expected}));
  }
}

// One block after the other, each 1 would be lost against 2^53.
TEST_P(PortTest, TheNormAddsTheBlocksOfAParamBeforeTheParams) {
  constexpr uint64_t kBlocks = 64;
  auto device = Make();
  const std::vector<float> huge(2, 0x1p26f);
  std::vector<float> ones(kBlocks * kNormBlockElements, 0.0f);
  for (uint64_t block = 0; block < kBlocks; ++block) ones[block * kNormBlockElements] = 1.0f;
  const NormInput inputs[] = {{Upload(*device, huge), huge.size(), OFFLOAD_FP32, 0},
                              {Upload(*device, ones), ones.size(), OFFLOAD_FP32, 1}};
  auto* sums = AllocateArray<double>(*device, 1 + kBlocks);
  auto* verdict = AllocateArray<Verdict>(*device, 1);
  ASSERT_TRUE(Ok(device->Norm(nullptr, {inputs, sums, 1, 0, verdict})));
  const Verdict expected = Decide(0x1p53 + kBlocks, 1, 0);
  EXPECT_TRUE(SameBits(Download(*device, verdict, 1), {expected}));
  EXPECT_NE(expected.grad_norm, Decide(0x1p53, 1, 0).grad_norm);
}

TEST_P(PortTest, AnUpdateGivesTheBitsOfTheHostKernelOrNone) {
  const std::vector<uint64_t> counts = {1, 33, 1000};
  for (bool skip : {false, true}) {
    auto device = Make();
    std::vector<DeviceUpdate> updates;
    std::vector<Coefficients> coefficients;
    std::vector<std::vector<uint16_t>> params;  // expected, as the others
    std::vector<std::vector<float>> expected;
    Verdict verdict = Decide(3.0, 8, 0.5);
    verdict.skip = skip;
    for (size_t i = 0; i < counts.size(); ++i) {
      const float sign = i == 1 ? -1.0f : 1.0f;  // one group maximizes
      coefficients.push_back({sign, 0, 1e-4f, 1e-3f, 0.9f, 0.1f, 0.99f, 0.01f, 3, 1e-8f, 0, 0});
      std::vector<float> grad = RandomValues(counts[i], 1), master = RandomValues(counts[i], 2);
      std::vector<float> moment0 = RandomValues(counts[i], 3), moment1(counts[i], 0.5f);
      std::vector<uint16_t> param(counts[i], 0x3f80);
      updates.push_back({{Upload(*device, grad), Upload(*device, param), Upload(*device, master),
                          Upload(*device, moment0), Upload(*device, moment1), counts[i]},
                         OFFLOAD_FP32,
                         OFFLOAD_BF16,
                         static_cast<uint32_t>(i)});
      if (!skip) {
        Coefficients scaled = coefficients.back();
        scaled.grad_factor = sign * verdict.grad_factor;
        ReferenceKernels().Update(Rule::kAdam, OFFLOAD_FP32, OFFLOAD_BF16)(
            scaled,
            {grad.data(), param.data(), master.data(), moment0.data(), moment1.data(), counts[i]});
      }
      params.push_back(param);
      for (auto* array : {&master, &moment0, &moment1}) expected.push_back(*array);
    }
    auto* device_verdict = AllocateArray<Verdict>(*device, 1);
    ASSERT_TRUE(Ok(device->SetVerdict(nullptr, verdict, device_verdict)));
    ASSERT_TRUE(Ok(device->Update(nullptr, {Rule::kAdam, updates, coefficients, device_verdict})));
    for (size_t i = 0; i < counts.size(); ++i) {
      const UpdateSpan& span = updates[i].span;
      EXPECT_EQ(Download(*device, static_cast<const uint16_t*>(span.param), counts[i]), params[i])
          << "update " << i << (skip ? ", skipped" : "");
      const void* results[] = {span.master, span.moment0, span.moment1};
      for (size_t k = 0; k < 3; ++k) {
        EXPECT_TRUE(SameBits(Download(*device, static_cast<const float*>(results[k]), counts[i]),
                             expected[3 * i + k]))
            << "array " << k << " of update " << i << (skip ? ", skipped" : "");
      }
    }
  }
}

// ----------------------------------------------------------------------------- every last bit --

// Spans that are long enough for every path through a device's kernel: whole tiles, vectors, the
// rest after them, and arrays that are not aligned for vectors. The numbers are of every magnitude,
// so some quotients and roots are denormal or infinite.
TEST_P(PortTest, UpdatesGiveTheBitsOfTheSpecification) {
  auto device = Make();
  Random random(7);
  constexpr int32_t kDtypes[] = {OFFLOAD_FP32, OFFLOAD_BF16, OFFLOAD_FP16};
  auto* verdict = Upload(*device, std::vector<Verdict>{{1.0, 1.0, 0.75f, 0}});
  for (int32_t rule = 0; rule < kRuleCount; ++rule) {
    for (int32_t grad_dtype : kDtypes) {
      for (int32_t param_dtype : kDtypes) {
        std::vector<SkewedArray> arrays;
        std::vector<DeviceUpdate> updates;
        const std::vector<Coefficients> coefficients = {
            {1, 0, 1e-4f, 1e-3f, 0.9f, 0.1f, 0.999f, 1e-3f, 3, 1e-8f, 0, 0},
            {-1, 1e-2f, 0, 1e-2f, 0.3f, 0.7f, 0.4f, 0.6f, 1.5f, 1e-30f, 0.9f, 1}};
        const std::pair<uint64_t, uint64_t> spans[] = {{20'483, 0}, {8192, 0}, {5, 0},
                                                       {9001, 1},   {3, 3},    {8195, 2}};
        arrays.reserve(5 * std::size(spans));
        for (const auto& [count, skew] : spans) {
          const auto add = [&](int32_t dtype, bool positive) -> SkewedArray& {
            std::vector<std::byte> values = AnyArray(dtype, count, random);
            for (uint64_t i = 3; positive && i < values.size(); i += 4)
              values[i] &= std::byte{0x7f};
            return arrays.emplace_back(*device, dtype, skew, std::move(values));
          };
          SkewedArray& grad = add(grad_dtype, false);
          SkewedArray& param = add(param_dtype, false);
          SkewedArray& master = add(OFFLOAD_FP32, false);
          SkewedArray& moment0 = add(OFFLOAD_FP32, IsSumOfSquares(MomentOf(Rule{rule}, 0)));
          SkewedArray& moment1 = add(OFFLOAD_FP32, true);
          const uint32_t which = updates.size() % 2;
          updates.push_back(
              {{grad.device_data(), param.device_data(), static_cast<float*>(master.device_data()),
                static_cast<float*>(moment0.device_data()),
                static_cast<float*>(moment1.device_data()), count},
               grad_dtype,
               param_dtype,
               which});
          Coefficients scaled = coefficients[which];
          scaled.grad_factor *= 0.75f;
          ReferenceKernels().Update(Rule{rule}, grad_dtype, param_dtype)(
              scaled,
              {grad.host_data(), param.host_data(), reinterpret_cast<float*>(master.host_data()),
               reinterpret_cast<float*>(moment0.host_data()),
               reinterpret_cast<float*>(moment1.host_data()), count});
        }
        ASSERT_TRUE(Ok(device->Update(nullptr, {Rule{rule}, updates, coefficients, verdict})));
        for (size_t i = 0; i < arrays.size(); ++i)
          ASSERT_EQ(BitsOf(arrays[i].Now(*device), arrays[i].dtype),
                    BitsOf(arrays[i].image, arrays[i].dtype))
              << "rule " << rule << ", " << DtypeName(grad_dtype) << " gradient, "
              << DtypeName(param_dtype) << " param, array " << i % 5 << " of span " << i / 5;
        for (SkewedArray& array : arrays) ASSERT_TRUE(Ok(device->Free(array.block)));
      }
    }
  }
}

// Every bf16 and fp16 number, NaNs included, with various masters: 0, numbers that round to the
// param or nearly do, and random bits. Arrays start at no multiple of a vector.
TEST_P(PortTest, MastersFollowEveryHalf) {
  auto device = Make();
  std::vector<uint16_t> halves(1 + 65536);
  for (size_t i = 0; i < halves.size(); ++i) halves[i] = static_cast<uint16_t>(i);
  auto* params = Upload(*device, halves);
  Random random(21);
  for (int32_t dtype : {OFFLOAD_BF16, OFFLOAD_FP16}) {
    std::vector<float> widened(65536);
    ReferenceKernels().ToFp32(dtype)(halves.data() + 1, 65536, widened.data());
    for (uint32_t lost : {0u, 0xFFFu, 0x1000u, 0x8000u, 0x18000u, 0xFFFFFFFFu}) {
      std::vector<float> expected(65536, 0.0f);
      for (size_t i = 0; i < expected.size() && lost != 0; ++i) {
        const uint32_t bits = lost == 0xFFFFFFFF
                                  ? random.Bits()
                                  : std::bit_cast<uint32_t>(widened[i]) + lost -
                                        2 * static_cast<uint32_t>(random.Below(lost));
        expected[i] = std::bit_cast<float>(bits);
      }
      auto* masters = Upload(*device, expected);
      ReferenceKernels().FollowParams(dtype)(halves.data() + 1, 65536, expected.data(), nullptr);
      ASSERT_TRUE(Ok(device->FollowParams(nullptr, params + 1, dtype, 65536, masters)));
      EXPECT_TRUE(SameBits(Download(*device, masters, 65536), expected))
          << DtypeName(dtype) << ", " << lost;
      if (lost == 0) {
        EXPECT_TRUE(SameBits(expected, widened)) << DtypeName(dtype);
      }
    }
  }
}

TEST_P(PortTest, ParamsInFp32AreTheirMasters) {
  auto device = Make();
  const std::vector<float> params = RandomValues(1001, 5);
  auto* masters = Upload(*device, RandomValues(1001, 6));
  ASSERT_TRUE(
      Ok(device->FollowParams(nullptr, Upload(*device, params) + 1, OFFLOAD_FP32, 1000, masters)));
  EXPECT_TRUE(SameBits(Download(*device, masters, 1000),
                       std::vector<float>(params.begin() + 1, params.end())));
}

// More rows than one table of a launch holds, of every dtype, some of them empty.
TEST_P(PortTest, ManySmallGradientsMakeOneNorm) {
  auto device = Make();
  constexpr uint64_t kInputs = 9'000;
  Random random(11);
  std::vector<NormInput> inputs;
  std::vector<double> sums;
  double total = 0;
  std::vector<std::byte> block(kInputs * 64 * 4);
  std::vector<uint64_t> offsets;
  uint64_t offset = 0;
  for (uint64_t i = 0; i < kInputs; ++i) {
    const auto dtype = static_cast<int32_t>(1 + i % 3);
    const uint64_t count = random.Below(40);
    const std::vector<float> values = RandomValues(count, i);
    offset = (offset + 3) / 4 * 4 + (dtype == OFFLOAD_FP32 ? 0 : 2 * (random.Below(2)));
    for (uint64_t e = 0; e < count; ++e) {
      uint32_t bits = std::bit_cast<uint32_t>(values[e]);
      if (dtype == OFFLOAD_BF16) bits = Fp32ToBf16(values[e]);
      if (dtype == OFFLOAD_FP16) bits = Fp32ToFp16(values[e]);
      std::memcpy(&block[offset + e * DtypeBytes(dtype)], &bits, DtypeBytes(dtype));
    }
    double sum = 0;
    if (count > 0) ReferenceKernels().SumSquares(dtype)(&block[offset], count, &sum);
    total += sum;
    offsets.push_back(offset);
    inputs.push_back({nullptr, count, dtype, i});
    offset += count * DtypeBytes(dtype);
  }
  auto* there = Upload(*device, block);
  for (uint64_t i = 0; i < kInputs; ++i) inputs[i].grad = there + offsets[i];
  auto* block_sums = AllocateArray<double>(*device, kInputs);
  auto* verdict = AllocateArray<Verdict>(*device, 1);
  ASSERT_TRUE(Ok(device->Norm(nullptr, {inputs, block_sums, 8, 0.5, verdict})));
  EXPECT_TRUE(SameBits(Download(*device, verdict, 1), {Decide(total, 8, 0.5)}));
}

// Blocks of every dtype, aligned for vectors and not, with the sums of each seen.
TEST_P(PortTest, BlockSumsGiveTheBitsOfTheSpecification) {
  auto device = Make();
  Random random(13);
  auto* sums = AllocateArray<double>(*device, 100);
  for (int32_t dtype : {OFFLOAD_FP32, OFFLOAD_BF16, OFFLOAD_FP16}) {
    for (uint64_t skew : {0, 1, 4}) {
      for (uint64_t count : {1, 15, 127, 128, 4095, 4096, 4097, 150'001}) {
        SkewedArray grad(*device, dtype, skew, AnyArray(dtype, count, random));
        const NormInput input = {grad.device_data(), count, dtype, 3};
        std::vector<double> expected((count + kNormBlockElements - 1) / kNormBlockElements);
        ReferenceKernels().SumSquares(dtype)(grad.host_data(), count, expected.data());
        ASSERT_TRUE(Ok(device->Norm(nullptr, {{&input, 1}, sums, 1, 0, nullptr})));
        ASSERT_TRUE(SameBits(Download(*device, sums + 3, expected.size()), expected))
            << DtypeName(dtype) << ", skew " << skew << ", " << count << " elements";
        ASSERT_TRUE(Ok(device->Free(grad.block)));
      }
    }
  }
}

TEST_P(PortTest, SkippedUpdatesWriteNothing) {
  auto device = Make();
  const std::vector<float> before(20'000, 0.5f);
  float* arrays[5];
  for (float*& array : arrays) array = Upload(*device, before);
  auto* verdict = Upload(*device, std::vector<Verdict>{{1.0, 1.0, 1.0f, 1}});
  const DeviceUpdate update = {{arrays[0], arrays[1], arrays[2], arrays[3], arrays[4], 20'000},
                               OFFLOAD_FP32,
                               OFFLOAD_FP32,
                               0};
  const Coefficients coefficients = {1, 0, 0, 1, 0.5f, 0.5f, 0.5f, 0.5f, 1, 1, 0, 0};
  for (int32_t rule = 0; rule < kRuleCount; ++rule)
    ASSERT_TRUE(
        Ok(device->Update(nullptr, {Rule{rule}, {&update, 1}, {&coefficients, 1}, verdict})));
  DeviceUpdate matrix = update;
  matrix.matrix = {100, 200};
  matrix.ns_steps = {&kNsDefault, 1};
  if (device->CheckMatrices().ok()) {
    auto* workspace =
        Upload(*device, std::vector<std::byte>(device->MatrixWorkspaceBytes(matrix.matrix)));
    ASSERT_TRUE(Ok(device->PrepareMatrices(nullptr, matrix.matrix, workspace)));
    ASSERT_TRUE(Ok(device->UpdateMatrices(
        nullptr, {Rule::kMuon, {&matrix, 1}, {&coefficients, 1}, verdict, workspace})));
  }
  for (float* array : arrays) EXPECT_TRUE(SameBits(Download(*device, array, 20'000), before));
}

TEST_P(PortTest, CommandsOnNothingDoNothing) {
  auto device = Make();
  auto* verdict = Upload(*device, std::vector<Verdict>{AssumeFinite(1)});
  const NormInput input = {nullptr, 0, OFFLOAD_FP32, 0};
  const DeviceUpdate update = {{}, OFFLOAD_FP32, OFFLOAD_FP32, 0};
  const Coefficients coefficients = {};
  EXPECT_TRUE(Ok(device->CopyToHost(nullptr, nullptr, nullptr, 0)));
  EXPECT_TRUE(Ok(device->CopyRows(nullptr, {nullptr, 8, nullptr, 8, 0, 3})));
  EXPECT_TRUE(Ok(device->CopyRows(nullptr, {nullptr, 8, nullptr, 8, 4, 0})));
  EXPECT_TRUE(Ok(device->Fill(nullptr, nullptr, 0, PatternOf(Format::kFp32, 1.0f))));
  EXPECT_TRUE(Ok(device->FollowParams(nullptr, nullptr, OFFLOAD_BF16, 0, nullptr)));
  EXPECT_TRUE(
      Ok(device->Update(nullptr, {Rule::kAdam, {&update, 1}, {&coefficients, 1}, verdict})));
  EXPECT_TRUE(Ok(device->Norm(nullptr, {{&input, 1}, nullptr, 1, 0, verdict})));
  EXPECT_TRUE(Ok(device->Synchronize(nullptr, -1)));
  EXPECT_TRUE(SameBits(Download(*device, verdict, 1), {Decide(0, 1, 0)}));
  EXPECT_TRUE(Ok(device->Norm(nullptr, {{}, nullptr, 1, 0, verdict})));
  EXPECT_TRUE(SameBits(Download(*device, verdict, 1), {Decide(0, 1, 0)}));
}

TEST_P(PortTest, RefusesWhatItCannotAllocateOrFree) {
  auto device = Make();
  const DeviceMemory memory = device->Memory().value();
  EXPECT_GT(memory.total_bytes, memory.free_bytes / 2);
  EXPECT_TRUE(Fails(device->Allocate(0), OFFLOAD_INVALID_ARGUMENT, {"bytes is 0"}));
  for (uint64_t bytes : {UINT64_MAX, memory.total_bytes + 1})
    EXPECT_TRUE(Fails(device->Allocate(bytes), OFFLOAD_OUT_OF_DEVICE_MEMORY,
                      {"asked for " + std::to_string(bytes) + " bytes", "are free"}));
  auto* data = AllocateArray<char>(*device, 1000);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % 256, 0u);
  int foreign = 0;
  for (void* bad : {static_cast<void*>(&foreign), static_cast<void*>(data + 1)})
    EXPECT_TRUE(Fails(device->Free(bad), OFFLOAD_INVALID_ARGUMENT, {"data is", "expected"}));
  EXPECT_TRUE(Ok(device->CheckRange(data, 1000)));
  EXPECT_TRUE(Ok(device->CheckRange(nullptr, 0)));
  for (const void* bad : {static_cast<const void*>(&foreign), static_cast<const void*>(nullptr)})
    EXPECT_TRUE(Fails(device->CheckRange(bad, 4), OFFLOAD_INVALID_ARGUMENT,
                      {"not in this device's memory", "expected a range"}));
  EXPECT_TRUE(Ok(device->Free(data)));
  EXPECT_TRUE(Fails(device->Free(data), OFFLOAD_INVALID_ARGUMENT, {"data is"}));
  EXPECT_TRUE(Ok(device->Free(nullptr)));
}

// Memory that stays keeps its bits and its address; memory that is added and removed is the
// device's.
TEST_P(PortTest, AWindowGrowsAndShrinksAtOneAddress) {
  auto device = Make();
  constexpr uint64_t kRange = uint64_t{16} << 20;
  const uint64_t free_bytes = device->Memory().value().free_bytes;
  DeviceWindow window = std::move(DeviceWindow::Reserve(*device, kRange).value());
  EXPECT_EQ(device->Memory().value().free_bytes, free_bytes) << "addresses are not memory";
  const uint64_t page = device->page_bytes(kRange);
  EXPECT_TRUE(Fails(device->CheckRange(window.data(), 1), OFFLOAD_INVALID_ARGUMENT, {"expected"}));

  DevicePages pages = std::move(window.Take(0, 2 * page + 1).value());
  EXPECT_EQ(pages.bytes, 3 * page) << "whole pages";
  EXPECT_EQ(DeviceWindow::PageBytes(*device, kRange, 2 * page + 1), 3 * page);
  EXPECT_TRUE(Ok(window.Grow(pages)));
  EXPECT_EQ(pages.bytes, 0u);
  EXPECT_TRUE(Ok(device->CheckRange(window.data(), 3 * page)));
  const std::vector<float> values = RandomValues(page / 4, 1);
  const auto upload = [&](uint64_t at) {
    EXPECT_TRUE(Ok(device->CopyToDevice(nullptr, window.data() + at, values.data(), page)));
    EXPECT_TRUE(Ok(device->Synchronize(nullptr, -1)));
  };
  const auto holds = [&](uint64_t at) {
    const auto* data = reinterpret_cast<const float*>(window.data() + at);
    return SameBits(Download(*device, data, values.size()), values);
  };
  upload(0);
  upload(2 * page);
  window.Shrink(page);
  EXPECT_TRUE(holds(0));
  EXPECT_TRUE(
      Fails(device->CheckRange(window.data() + page, 1), OFFLOAD_INVALID_ARGUMENT, {"expected"}));
  EXPECT_EQ(window.Take(page, 1).value().bytes, 0u) << "a page more is not needed";
  pages = std::move(window.Take(page, 3 * page).value());
  EXPECT_TRUE(Ok(window.Grow(pages)));
  EXPECT_TRUE(holds(0));
  EXPECT_FALSE(holds(2 * page)) << "that memory was given away";
  window.Shrink(0);
  if (!TestsRunOnCuda()) {  // whose driver keeps memory for itself
    EXPECT_EQ(device->Memory().value().free_bytes, free_bytes);
  }
}

TEST_P(PortTest, PagesThatAreNotThereAreRefused) {
  auto device = Make();
  const uint64_t total = device->Memory().value().total_bytes;
  DeviceWindow window = std::move(DeviceWindow::Reserve(*device, 2 * total).value());
  const uint64_t free_bytes = device->Memory().value().free_bytes;
  EXPECT_TRUE(Fails(window.Take(0, 2 * total).status(), OFFLOAD_OUT_OF_DEVICE_MEMORY,
                    {"asked for", "bytes of device memory", "are free"}));
  if (!TestsRunOnCuda()) {
    EXPECT_EQ(device->Memory().value().free_bytes, free_bytes);
  }
}

// ------------------------------------------------------------------------------ pools ----- --

// A pool, and the values that each block should hold. While the memory is released there are none.
class PoolProgram {
 public:
  explicit PoolProgram(std::shared_ptr<Device> device)
      : device_(std::move(device)), pool_(AddressPool::Create(device_).value()) {}
  ~PoolProgram() {
    while (!blocks_.empty()) Free(0);
    pool_->Retire();
  }
  PoolProgram(const PoolProgram&) = delete;
  PoolProgram& operator=(const PoolProgram&) = delete;

  Status Allocate(uint64_t count) {
    HYBRIDOPT_ASSIGN(void* const data, pool_->Allocate(4 * count));
    blocks_.push_back({static_cast<float*>(data), {}, count});
    Write(blocks_.back());
    return {};
  }
  void Free(size_t block) {
    EXPECT_TRUE(Ok(AddressPool::Free(blocks_[block].data)));
    blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(block));
  }
  void Release() {
    EXPECT_TRUE(Ok(pool_->ReleaseMemory()));
    for (const Block& block : blocks_)
      EXPECT_FALSE(device_->CheckRange(block.data, 4 * block.count).ok());
  }
  Status Take() { return pool_->TakeMemory(); }
  void WriteAll() {
    for (Block& block : blocks_) Write(block);
  }
  void ExpectAll() {
    for (const Block& block : blocks_)
      EXPECT_TRUE(SameBits(Download(*device_, block.data, block.count), block.values));
  }
  std::vector<const void*> addresses() const {
    std::vector<const void*> found;
    for (const Block& block : blocks_) found.push_back(block.data);
    return found;
  }
  size_t blocks() const { return blocks_.size(); }
  AddressPool& pool() { return *pool_; }

 private:
  struct Block {
    float* data;
    std::vector<float> values;
    uint64_t count;
  };
  void Write(Block& block) {
    block.values = RandomValues(block.count, ++writes_);
    EXPECT_TRUE(
        Ok(device_->CopyToDevice(nullptr, block.data, block.values.data(), 4 * block.count)));
    EXPECT_TRUE(Ok(device_->Synchronize(nullptr, -1)));
  }

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<AddressPool> pool_;
  std::vector<Block> blocks_;
  uint64_t writes_ = 0;
};

TEST_P(PortTest, APoolKeepsAddressesWhileItsMemoryIsAway) {
  const std::shared_ptr<Device> device = Make();
  const uint64_t free_bytes = device->Memory().value().free_bytes;
  {
    PoolProgram program(device);
    for (const uint64_t count : {1u, 700'000u, 3'000'000u})
      ASSERT_TRUE(Ok(program.Allocate(count)));
    const auto addresses = program.addresses();
    const uint64_t bytes = free_bytes - device->Memory().value().free_bytes;
    EXPECT_GE(bytes, 4u * 3'700'001);
    program.Release();
    if (!TestsRunOnCuda()) {
      EXPECT_EQ(device->Memory().value().free_bytes, free_bytes);
    }
    EXPECT_TRUE(Fails(program.Allocate(1), OFFLOAD_INVALID_STATE,
                      {"the memory of the pool is released", "offload_pool_take_memory"}));
    program.Release();  // does nothing
    EXPECT_TRUE(Ok(program.Take()));
    EXPECT_TRUE(Ok(program.Take())) << "does nothing";
    EXPECT_EQ(program.addresses(), addresses);
    program.WriteAll();
    ASSERT_TRUE(Ok(program.Allocate(5)));
    program.ExpectAll();
  }
  if (!TestsRunOnCuda()) {
    EXPECT_EQ(device->Memory().value().free_bytes, free_bytes);
  }
}

// The work of all streams ends before memory is released or freed.
TEST_P(PortTest, APoolWaitsForTheWorkThatUsesIt) {
  const std::shared_ptr<Device> device = Make();
  const std::shared_ptr<AddressPool> pool = AddressPool::Create(device).value();
  constexpr uint64_t kBytes = 8 << 20;
  void* const data = pool->Allocate(kBytes).value();
  const StreamHandle stream = MakeStream(*device, "another");
  std::vector<std::byte> host(kBytes);
  for (const bool frees : {false, true}) {
    for (int copy = 0; copy < 8; ++copy)
      ASSERT_TRUE(Ok(device->CopyToDevice(stream, data, host.data(), kBytes)));
    EXPECT_TRUE(Ok(frees ? AddressPool::Free(data) : pool->ReleaseMemory()));
    EXPECT_TRUE(Ok(device->Synchronize(stream, -1))) << "no copy has missed its memory";
    if (!frees) {
      EXPECT_TRUE(Ok(pool->TakeMemory()));
    }
  }
  pool->Retire();
  EXPECT_TRUE(Ok(device->DestroyStream(stream)));
}

TEST_P(PortTest, APoolTakesAllMemoryOrNone) {
  if (TestsRunOnCuda()) GTEST_SKIP() << "how much the driver can still give is not known";
  const std::shared_ptr<Device> device = Make();
  PoolProgram program(device);
  for (int block = 0; block < 4; ++block) ASSERT_TRUE(Ok(program.Allocate(1 << 20)));
  const auto addresses = program.addresses();
  program.Release();
  // All memory but that of two blocks is somebody else's.
  const uint64_t free_bytes = device->Memory().value().free_bytes;
  constexpr uint64_t kSpared = uint64_t{10} << 20;
  void* others = device->Allocate(free_bytes - kSpared).value();
  const uint64_t left = device->Memory().value().free_bytes;
  for (int again = 0; again < 2; ++again) {
    EXPECT_TRUE(Fails(program.Take(), OFFLOAD_OUT_OF_DEVICE_MEMORY,
                      {"asked for 16777216 bytes of device memory for a pool", "are free",
                       "nothing has been taken"}));
    EXPECT_EQ(device->Memory().value().free_bytes, left);
    EXPECT_FALSE(device->CheckRange(addresses[0], 4).ok());
  }
  EXPECT_TRUE(Ok(device->Free(others)));
  EXPECT_TRUE(Ok(program.Take()));
  EXPECT_EQ(program.addresses(), addresses);
  program.WriteAll();
  program.ExpectAll();
  EXPECT_TRUE(Fails(program.pool().Allocate(device->Memory().value().total_bytes + 1),
                    OFFLOAD_OUT_OF_DEVICE_MEMORY, {"asked for", "are free"}));
  EXPECT_TRUE(Fails(program.pool().Allocate(0), OFFLOAD_INVALID_ARGUMENT, {"bytes is 0"}));
}

TEST_P(PortTest, BlocksOutliveTheirPoolAndFindIt) {
  const std::shared_ptr<Device> device = Make();
  const uint64_t free_bytes = device->Memory().value().free_bytes;
  std::shared_ptr<AddressPool> pool = AddressPool::Create(device).value();
  const std::weak_ptr<AddressPool> alive = pool;
  void* const first = pool->Allocate(100).value();
  void* const second = pool->Allocate(100).value();
  EXPECT_TRUE(Ok(pool->ReleaseMemory()));
  pool->Retire();
  EXPECT_TRUE(
      Fails(pool->Allocate(1), OFFLOAD_INVALID_STATE, {"another thread destroys the pool"}));
  pool.reset();
  int elsewhere = 0;
  EXPECT_TRUE(Fails(AddressPool::Free(&elsewhere), OFFLOAD_INVALID_ARGUMENT,
                    {"expected the address of a block of a pool"}));
  EXPECT_TRUE(Ok(AddressPool::Free(second)));
  EXPECT_TRUE(Fails(AddressPool::Free(second), OFFLOAD_INVALID_ARGUMENT, {"data is 0x"}));
  EXPECT_FALSE(alive.expired());
  EXPECT_TRUE(Ok(AddressPool::Free(first)));
  EXPECT_TRUE(alive.expired()) << "the pool ends with its last block";
  EXPECT_TRUE(Ok(AddressPool::Free(nullptr)));
  if (!TestsRunOnCuda()) {
    EXPECT_EQ(device->Memory().value().free_bytes, free_bytes);
  }
}

TEST_P(PortTest, PoolsGiveTheSameAddressesAfterRandomPrograms) {
  const std::shared_ptr<Device> device = Make();
  const uint64_t free_bytes = device->Memory().value().free_bytes;
  for (uint64_t run = 0; run < (TestsRunOnCuda() ? 3u : 40u); ++run) {
    SCOPED_TRACE("run " + std::to_string(run));
    Random random(run);
    PoolProgram programs[2] = {PoolProgram(device), PoolProgram(device)};
    bool is_released[2] = {};
    for (int call = 0; call < 60; ++call) {
      const uint64_t which = random.Below(2);
      PoolProgram& program = programs[which];
      const auto addresses = program.addresses();
      if (random.OneIn(4) && program.blocks() > 0) {
        program.Free(random.Below(program.blocks()));
      } else if (random.OneIn(3)) {
        if (std::exchange(is_released[which], !is_released[which])) {
          EXPECT_TRUE(Ok(program.Take()));
          program.WriteAll();
        } else {
          program.Release();
        }
        EXPECT_EQ(program.addresses(), addresses);
      } else {
        EXPECT_EQ(program.Allocate(1 + random.Below(random.OneIn(9) ? 1 << 16 : 3000)).ok(),
                  !is_released[which]);
      }
      for (const uint64_t each : {0u, 1u})
        if (!is_released[each]) programs[each].ExpectAll();
    }
  }
  if (!TestsRunOnCuda()) {
    EXPECT_EQ(device->Memory().value().free_bytes, free_bytes);
  }
}

TEST_P(PortTest, PinnedMemoryIsPinnedOnce) {
  auto device = Make();
  std::vector<std::byte> host(3 << 12);
  ASSERT_TRUE(Ok(device->PinHost(host.data(), host.size())));
  EXPECT_TRUE(Fails(device->PinHost(host.data(), host.size()), OFFLOAD_INVALID_ARGUMENT,
                    {"cannot pin", "nothing is pinned yet"}));
  device->UnpinHost(host.data());
  ASSERT_TRUE(Ok(device->PinHost(host.data(), host.size())));
  device->UnpinHost(host.data());
}

// Copies of pinned memory are queued; the stream keeps their order.
TEST_P(PortTest, CopiesOfPinnedMemoryAreQueued) {
  auto device = Make();
  StreamHandle stream = MakeStream(*device, "copies");
  std::vector<std::byte> host(2 << 20, std::byte{1});
  ASSERT_TRUE(Ok(device->PinHost(host.data(), host.size())));
  const uint64_t half = host.size() / 2;
  auto* data = AllocateArray<std::byte>(*device, half);
  {
    Gate gate(*device);
    gate.Close(stream);
    ASSERT_TRUE(Ok(device->CopyToDevice(stream, data, host.data(), half)));
    ASSERT_TRUE(Ok(device->CopyToHost(stream, host.data() + half, data, half)));
    std::memset(host.data(), 2, half);
    EXPECT_EQ(host[half], std::byte{1});
    EXPECT_TRUE(Fails(device->Synchronize(stream, 1'000'000), OFFLOAD_TIMED_OUT, {"copies"}));
  }
  ASSERT_TRUE(Ok(device->Synchronize(stream, -1)));
  EXPECT_EQ(host[half], std::byte{2});
  EXPECT_EQ(host[host.size() - 1], std::byte{2});
  device->UnpinHost(host.data());
  EXPECT_TRUE(Ok(device->DestroyStream(stream)));
}

}  // namespace
}  // namespace hybridopt
