// Every SIMD kernel is compared with the scalar specification, bit by bit. The specification itself
// is compared with independent arithmetic in coefficients_test.cpp and at the end of this file.
#include "kernels/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "../../random.h"
#include "../../sanitizers.h"
#include "base/system.h"
#include "kernels/coefficients.h"
#include "kernels/convert.h"

#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace hybridopt {
namespace {

constexpr int32_t kDtypes[] = {OFFLOAD_FP32, OFFLOAD_BF16, OFFLOAD_FP16};

// Every SIMD implementation and the specification.
std::vector<const KernelTable*> AllTables() {
  std::vector<const KernelTable*> tables(SimdKernels().begin(), SimdKernels().end());
  tables.push_back(&ReferenceKernels());
  return tables;
}

// Bytes between guards. `shift` bytes past a 64-byte boundary.
class Guarded {
 public:
  Guarded(uint64_t bytes, uint64_t shift)
      : storage_(bytes + 4 * kGuard, kFill), bytes_(bytes), shift_(shift) {}

  void* data() { return begin() + kGuard + shift_; }
  float* floats() { return static_cast<float*>(data()); }

  bool GuardsIntact() {
    const uint8_t* from = static_cast<uint8_t*>(data());
    for (const uint8_t& byte : storage_) {
      const bool inside = &byte >= from && &byte < from + bytes_;
      if (!inside && byte != kFill) return false;
    }
    return true;
  }

 private:
  static constexpr uint64_t kGuard = 128;
  static constexpr uint8_t kFill = 0xA5;

  uint8_t* begin() {
    const uintptr_t address = reinterpret_cast<uintptr_t>(storage_.data());
    return storage_.data() + (64 - address % 64) % 64;
  }

  std::vector<uint8_t> storage_;
  uint64_t bytes_;
  uint64_t shift_;
};

std::vector<uint8_t> Narrow(const std::vector<float>& values, int32_t dtype) {
  std::vector<uint8_t> bytes(values.size() * DtypeBytes(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == OFFLOAD_FP32) {
      std::memcpy(&bytes[4 * i], &values[i], 4);
    } else {
      const uint16_t half = dtype == OFFLOAD_BF16 ? Fp32ToBf16(values[i]) : Fp32ToFp16(values[i]);
      std::memcpy(&bytes[2 * i], &half, 2);
    }
  }
  return bytes;
}

// Values as in training, mixed with awkward ones: signed zeros, denormals, huge numbers.
std::vector<float> AwkwardValues(uint64_t count, uint64_t seed, float scale, float max) {
  Random random(seed);
  std::vector<float> values(count);
  for (float& value : values) {
    const float unit = random.SignedUnit();
    switch (random.Bits() % 12) {
      case 0:
        value = std::copysign(0.0f, unit);
        break;
      case 1:
        value = unit * FLT_MIN;
        break;
      case 2:
        value = std::copysign(FLT_TRUE_MIN, unit);
        break;
      case 3:
        value = unit * max;
        break;
      case 4:
        value = std::copysign(max, unit);
        break;
      case 5:
        value = unit * 1e-20f;
        break;
      case 6:
        value = std::clamp(unit * 1e19f, -max, max);
        break;
      default:
        value = unit * scale;
    }
  }
  return values;
}

struct Kind {
  Rule rule;
  int32_t grad_dtype;
  int32_t param_dtype;
};

struct Inputs {
  std::vector<uint8_t> grad;
  std::vector<float> master;
  std::vector<float> moment0;
  std::vector<float> moment1;
};

// Sums of squares are not negative.
void MakeSumsPositive(const Kind& kind, Inputs& inputs) {
  for (float& value : inputs.moment1) value = std::fabs(value);
  if (!IsSumOfSquares(MomentOf(kind.rule, 0))) return;
  for (float& value : inputs.moment0) value = std::fabs(value);
}

Inputs AwkwardInputs(uint64_t count, const Kind& kind, uint64_t seed) {
  const float max = kind.grad_dtype == OFFLOAD_FP16 ? 65504.0f : 0x1.FEp127f;  // bf16's largest
  Inputs inputs = {Narrow(AwkwardValues(count, seed, 1.0f, max), kind.grad_dtype),
                   AwkwardValues(count, seed + 1, 0.1f, FLT_MAX),
                   AwkwardValues(count, seed + 2, 0.1f, FLT_MAX),
                   AwkwardValues(count, seed + 3, 0.01f, FLT_MAX)};
  MakeSumsPositive(kind, inputs);
  return inputs;
}

std::vector<Kind> AllKinds() {
  std::vector<Kind> kinds;
  for (int32_t rule = 0; rule < kRuleCount; ++rule) {
    for (int32_t grad : kDtypes) {
      for (int32_t param : kDtypes) kinds.push_back({static_cast<Rule>(rule), grad, param});
    }
  }
  return kinds;
}

std::string Describe(const KernelTable& table, const Kind& kind, uint64_t count) {
  return std::string(table.isa) + " rule " + std::to_string(static_cast<int>(kind.rule)) +
         " grad " + DtypeName(kind.grad_dtype) + " param " + DtypeName(kind.param_dtype) +
         " count " + std::to_string(count);
}

// All bits after an update, including those of an array that the rule does not use.
struct Outputs {
  std::vector<uint8_t> param;
  std::vector<uint8_t> state;
  bool operator==(const Outputs&) const = default;
};

struct Layout {
  uint64_t shift = 0;     // the offset of every array from a 64-byte boundary, in elements
  bool in_place = false;  // fp32 param and master are one array
  uint64_t split = 0;     // the first `split` elements are updated in a call of their own
};

// The span [begin, begin + count) of `span`.
UpdateSpan Part(const UpdateSpan& span, const Kind& kind, uint64_t begin, uint64_t count) {
  const auto* grad = static_cast<const uint8_t*>(span.grad);
  auto* param = static_cast<uint8_t*>(span.param);
  return {grad + begin * DtypeBytes(kind.grad_dtype),
          param + begin * DtypeBytes(kind.param_dtype),
          static_cast<float*>(span.master) + begin,
          span.moment0 == nullptr ? nullptr : static_cast<float*>(span.moment0) + begin,
          span.moment1 == nullptr ? nullptr : static_cast<float*>(span.moment1) + begin,
          count};
}

Outputs RunUpdate(const KernelTable& table, const Kind& kind, const Coefficients& coefficients,
                  const Inputs& inputs, const Layout& layout = {}) {
  const uint64_t count = inputs.master.size();
  const uint64_t param_bytes = count * DtypeBytes(kind.param_dtype);
  Guarded grad(inputs.grad.size(), layout.shift * DtypeBytes(kind.grad_dtype));
  Guarded param(param_bytes, layout.shift * DtypeBytes(kind.param_dtype));
  Guarded master(count * 4, layout.shift * 4);
  Guarded moment0(count * 4, layout.shift * 4 % 64);
  Guarded moment1(count * 4, (layout.shift + 1) * 4 % 64);
  if (count != 0) {
    std::memcpy(grad.data(), inputs.grad.data(), inputs.grad.size());
    std::memcpy(master.data(), inputs.master.data(), count * 4);
    std::memcpy(moment0.data(), inputs.moment0.data(), count * 4);
    std::memcpy(moment1.data(), inputs.moment1.data(), count * 4);
  }
  const bool has_moment0 = MomentOf(kind.rule, 0) != kNoMoment;
  const bool has_moment1 = MomentOf(kind.rule, 1) != kNoMoment;
  const UpdateSpan span = {grad.data(),
                           layout.in_place ? master.data() : param.data(),
                           master.floats(),
                           has_moment0 ? moment0.floats() : nullptr,
                           has_moment1 ? moment1.floats() : nullptr,
                           count};
  const UpdateFunction update = table.Update(kind.rule, kind.grad_dtype, kind.param_dtype);
  if (layout.split != 0) update(coefficients, Part(span, kind, 0, layout.split));
  update(coefficients, Part(span, kind, layout.split, count - layout.split));

  EXPECT_TRUE(grad.GuardsIntact() && param.GuardsIntact() && master.GuardsIntact() &&
              moment0.GuardsIntact() && moment1.GuardsIntact())
      << "bytes outside the span were written";
  if (count != 0) {
    EXPECT_EQ(std::memcmp(grad.data(), inputs.grad.data(), inputs.grad.size()), 0);
  }
  const auto* param_data = static_cast<const uint8_t*>(span.param);
  Outputs outputs = {{param_data, param_data + param_bytes}, {}};
  for (Guarded* array : {&master, &moment0, &moment1}) {
    const auto* data = static_cast<const uint8_t*>(array->data());
    outputs.state.insert(outputs.state.end(), data, data + count * 4);
  }
  return outputs;
}

Coefficients AnyCoefficients(float weight, int32_t nesterov) {
  return {.grad_factor = -0.37f,
          .l2_decay = 0.013f,
          .decoupled_decay = 1.7e-3f,
          .step_size = 3.1e-3f,
          .keep0 = 1.0f - weight,
          .weight0 = weight,
          .keep1 = 1.0f - weight / 3,
          .weight1 = weight / 3,
          .inverse_sqrt_bias_correction2 = 1.9f,
          .eps = 1e-8f,
          .nesterov_momentum = 0.9f,
          .nesterov = nesterov};
}

void ExpectReferenceBits(const Kind& kind, const Coefficients& coefficients, const Inputs& inputs,
                         const Layout& layout = {}) {
  const Outputs expected = RunUpdate(ReferenceKernels(), kind, coefficients, inputs, layout);
  for (const KernelTable* table : SimdKernels()) {
    EXPECT_TRUE(RunUpdate(*table, kind, coefficients, inputs, layout) == expected)
        << Describe(*table, kind, inputs.master.size()) << " shift " << layout.shift << " in place "
        << layout.in_place << " split " << layout.split;
  }
}

TEST(Update, EveryCountHasReferenceBits) {
  for (const Kind& kind : AllKinds()) {
    for (uint64_t count : {0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 1009, 4099}) {
      const Inputs inputs = AwkwardInputs(count, kind, count);
      for (float weight : {0.1f, 0.5f, 0.8f}) {
        ExpectReferenceBits(kind, AnyCoefficients(weight, weight > 0.5f), inputs);
      }
    }
  }
}

TEST(Update, EveryAddressHasReferenceBits) {
  for (const Kind& kind : AllKinds()) {
    const Inputs inputs = AwkwardInputs(101, kind, 5);
    const Coefficients coefficients = AnyCoefficients(0.1f, 0);
    const Outputs aligned = RunUpdate(ReferenceKernels(), kind, coefficients, inputs);
    for (uint64_t shift = 0; shift < 32; ++shift) {
      ExpectReferenceBits(kind, coefficients, inputs, {.shift = shift});
      EXPECT_TRUE(RunUpdate(ReferenceKernels(), kind, coefficients, inputs, {.shift = shift}) ==
                  aligned);
    }
  }
}

TEST(Update, InPlaceHasReferenceBits) {
  for (const Kind& kind : AllKinds()) {
    if (kind.param_dtype != OFFLOAD_FP32) continue;
    const Inputs inputs = AwkwardInputs(133, kind, 6);
    const Coefficients coefficients = AnyCoefficients(0.1f, 1);
    ExpectReferenceBits(kind, coefficients, inputs, {.in_place = true});
    EXPECT_TRUE(RunUpdate(ReferenceKernels(), kind, coefficients, inputs, {.in_place = true}) ==
                RunUpdate(ReferenceKernels(), kind, coefficients, inputs));
  }
}

TEST(Update, SplitAnywhereHasTheSameBits) {
  for (const Kind& kind : AllKinds()) {
    const Inputs inputs = AwkwardInputs(100, kind, 7);
    const Coefficients coefficients = AnyCoefficients(0.1f, 0);
    const Outputs whole = RunUpdate(ReferenceKernels(), kind, coefficients, inputs);
    for (uint64_t split = 1; split <= 100; ++split) {
      for (const KernelTable* table : SimdKernels()) {
        EXPECT_TRUE(RunUpdate(*table, kind, coefficients, inputs, {.split = split}) == whole)
            << Describe(*table, kind, 100) << " split " << split;
      }
    }
  }
}

TEST(Update, ParamIsTheMasterRoundedWhateverItIs) {
  Random random(8);
  Inputs inputs;
  for (uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (uint32_t low : {0u, 1u, 0xFFFu, 0x1000u, 0x1001u, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFFu}) {
      const uint32_t high = random.Bits() & 0x807F0000;
      inputs.master.push_back(std::bit_cast<float>(high | exponent << 23 | low));
    }
  }
  const uint64_t count = inputs.master.size();
  inputs.grad = Narrow(std::vector<float>(count, 0.0f), OFFLOAD_FP32);
  inputs.moment0.assign(count, 0.0f);
  inputs.moment1.assign(count, 0.0f);
  Coefficients still = {};
  still.grad_factor = 1.0f;
  for (int32_t param_dtype : kDtypes) {
    const Kind kind = {Rule::kSgdPlain, OFFLOAD_FP32, param_dtype};
    ExpectReferenceBits(kind, still, inputs);
    for (uint64_t i = 0; i < count; ++i) {  // a NaN that the update made quiet
      if (std::isnan(inputs.master[i])) {
        inputs.master[i] =
            std::bit_cast<float>(std::bit_cast<uint32_t>(inputs.master[i]) | 0x400000);
      }
    }
    const Outputs outputs = RunUpdate(ReferenceKernels(), kind, still, inputs);
    EXPECT_TRUE(outputs.param == Narrow(inputs.master, param_dtype));
  }
}

TEST(Update, ZeroLearningRateLeavesEveryWeightAsItIs) {
  for (const Kind& kind : AllKinds()) {
    Inputs inputs = AwkwardInputs(256, kind, 9);
    inputs.moment0.assign(256, 0.0f);
    inputs.grad = Narrow(std::vector<float>(256, -0.25f), kind.grad_dtype);
    Coefficients coefficients = AnyCoefficients(0.1f, 0);
    coefficients.step_size = 0.0f;
    coefficients.decoupled_decay = 0.0f;
    coefficients.l2_decay = 0.0f;
    const Outputs outputs = RunUpdate(ReferenceKernels(), kind, coefficients, inputs);
    EXPECT_EQ(std::memcmp(outputs.state.data(), inputs.master.data(), 256 * 4), 0)
        << Describe(ReferenceKernels(), kind, 256);
  }
}

TEST(Update, SecondMomentsStayFiniteForFiniteGradients) {
  const std::vector<float> huge = {FLT_MAX, -FLT_MAX, 1e30f, -1e20f};
  Inputs inputs = {Narrow(huge, OFFLOAD_FP32), {1, 1, 1, 1}, {0, 0, 0, 0}, {0, 0, 0, 0}};
  for (Rule rule : {Rule::kAdam, Rule::kAdagrad}) {
    Coefficients coefficients = AnyCoefficients(0.9f, 0);
    coefficients.grad_factor = 1.0f;
    const Outputs outputs =
        RunUpdate(ReferenceKernels(), {rule, OFFLOAD_FP32, OFFLOAD_FP32}, coefficients, inputs);
    float state[12];
    std::memcpy(state, outputs.state.data(), sizeof(state));
    const float* saturated = rule == Rule::kAdam ? state + 8 : state + 4;
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(std::isfinite(saturated[i])) << saturated[i];
      EXPECT_GT(saturated[i], 1e37f);
      EXPECT_TRUE(std::isfinite(state[i]));
    }
  }
}

// Cautious weight decay: where update and param have opposite signs the bits of AdamW without
// weight decay, elsewhere those of AdamW, zeros among them.
TEST(Update, CautiousWeightDecayDiffersOnlyWhereSignsDiffer) {
  const Kind plain = {Rule::kAdam, OFFLOAD_FP32, OFFLOAD_FP32};
  const Kind cautious = {Rule::kCautiousAdam, OFFLOAD_FP32, OFFLOAD_FP32};
  Coefficients decays = AnyCoefficients(0.1f, 0);
  decays.l2_decay = 0.0f;
  Coefficients does_not = decays;
  does_not.decoupled_decay = 0.0f;
  Inputs inputs = AwkwardInputs(5000, plain, 3);
  auto* grad = reinterpret_cast<float*>(inputs.grad.data());
  for (const size_t i : {7, 8}) {  // no update
    grad[i] = inputs.moment0[i] = 0.0f;
    inputs.moment1[i] = 1.0f;
    inputs.master[i] = i == 7 ? 1.0f : -1.0f;
  }
  const auto params = [&](const Kind& kind, const Coefficients& c) {
    const Outputs outputs = RunUpdate(ReferenceKernels(), kind, c, inputs);
    std::vector<float> values(inputs.master.size());
    std::memcpy(values.data(), outputs.param.data(), outputs.param.size());
    return std::pair(values, outputs.state);
  };
  const auto [expected_decayed, state] = params(plain, decays);
  const std::vector<float> expected_kept = params(plain, does_not).first;
  const std::vector<float> got = params(cautious, decays).first;
  int opposed = 0, differ = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    float moment0 = 0.0f, moment1 = 0.0f;
    std::memcpy(&moment0, state.data() + (got.size() + i) * 4, 4);
    std::memcpy(&moment1, state.data() + (2 * got.size() + i) * 4, 4);
    const float u = moment0 / std::fma(std::sqrt(moment1), 1.9f, 1e-8f), x = inputs.master[i];
    const bool is_opposed = (u > 0 && x < 0) || (u < 0 && x > 0);
    const float expected = is_opposed ? expected_kept[i] : expected_decayed[i];
    if (std::isnan(expected)) continue;
    ASSERT_EQ(std::memcmp(&got[i], &expected, 4), 0) << i << " " << u << " " << x;
    opposed += is_opposed;
    differ += std::memcmp(&expected_kept[i], &expected_decayed[i], 4) != 0;
  }
  EXPECT_GT(opposed, 1000);
  EXPECT_GT(differ, 1000);
  for (const size_t i : {7, 8}) EXPECT_LT(std::fabs(got[i]), 1.0f) << "no update, but decay";
}

// The same bits on every machine, with every compiler and in every release: a change here changes
// the numbers that users get.
TEST(Update, BitsArePinned) {
  const PinnedSeed pinned;
  constexpr uint64_t kCount = 1000;
  Random random(11);
  const auto values = [&random](float scale) {
    std::vector<float> result(kCount);
    for (float& value : result) {
      const int exponent = static_cast<int>(random.Bits() % 24) - 12;
      value = std::ldexp(random.SignedUnit() * scale, exponent);
    }
    return result;
  };
  const std::vector<float> grad = values(1.0f);
  const Inputs any = {{}, values(0.1f), values(0.1f), values(0.01f)};
  // Each is the hash of all rules up to this one.
  constexpr uint64_t kHashes[] = {0x3c741cfd4173b949u, 0x32743251a5026f4cu, 0xe90eac068c5cd8a7u,
                                  0xef5219a3399654bau, 0x78cd2b5abe0f6563u, 0xe4e89c5bb6f17082u,
                                  0xa3affaef93e5f019u};
  static_assert(std::size(kHashes) == kRuleCount);
  uint64_t hash = 14695981039346656037u;  // FNV-1a
  for (const Kind& kind : AllKinds()) {
    Inputs inputs = any;
    inputs.grad = Narrow(grad, kind.grad_dtype);
    MakeSumsPositive(kind, inputs);
    const Outputs outputs = RunUpdate(ReferenceKernels(), kind, AnyCoefficients(0.1f, 0), inputs);
    for (uint8_t byte : outputs.param) hash = (hash ^ byte) * 1099511628211u;
    for (uint8_t byte : outputs.state) hash = (hash ^ byte) * 1099511628211u;
    const bool last = kind.grad_dtype == OFFLOAD_FP16 && kind.param_dtype == OFFLOAD_FP16;
    if (last) {
      EXPECT_EQ(hash, kHashes[static_cast<int32_t>(kind.rule)]) << static_cast<int32_t>(kind.rule);
    }
  }
}

// ------------------------------------------------------------------------------------- norm

std::vector<double> SumSquares(const KernelTable& table, int32_t dtype,
                               const std::vector<uint8_t>& grad, uint64_t shift = 0) {
  const uint64_t count = grad.size() / DtypeBytes(dtype);
  const uint64_t blocks = (count + kNormBlockElements - 1) / kNormBlockElements;
  Guarded elements(grad.size(), shift * DtypeBytes(dtype));
  if (count != 0) std::memcpy(elements.data(), grad.data(), grad.size());
  Guarded sums(blocks * sizeof(double), 0);
  table.SumSquares(dtype)(elements.data(), count, static_cast<double*>(sums.data()));
  EXPECT_TRUE(sums.GuardsIntact());
  const auto* data = static_cast<const double*>(sums.data());
  return {data, data + blocks};
}

bool SameBits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

TEST(SumSquares, EveryCountAndAddressHasReferenceBits) {
  for (int32_t dtype : kDtypes) {
    const float max = dtype == OFFLOAD_FP16 ? 65504.0f : 0x1.FEp127f;
    for (uint64_t count :
         {0, 1, 15, 16, 17, 33, 4095, 4096, 4097, 8191, 8192, 16384, 20480, 36865, 70001}) {
      const std::vector<uint8_t> grad = Narrow(AwkwardValues(count, count, 1.0f, max), dtype);
      const std::vector<double> expected = SumSquares(ReferenceKernels(), dtype, grad);
      for (const KernelTable* table : SimdKernels()) {
        for (uint64_t shift : {0, 1, 13}) {
          EXPECT_TRUE(SameBits(SumSquares(*table, dtype, grad, shift), expected))
              << table->isa << " " << DtypeName(dtype) << " " << count;
        }
      }
    }
  }
}

TEST(SumSquares, FollowsTheTreeOfTheHeader) {
  // Lane 0 gets 2^54 and many ones, each lost in its rounding; lane 8 gets the same number of ones,
  // which survive. Any other tree gives another number.
  std::vector<float> grad(16 * 200, 0.0f);
  grad[0] = 0x1p27f;
  for (size_t i = 1; i < 200; ++i) grad[16 * i] = grad[16 * i + 8] = 1.0f;
  for (double value : SumSquares(ReferenceKernels(), OFFLOAD_FP32, Narrow(grad, OFFLOAD_FP32))) {
    EXPECT_EQ(value, 0x1p54 + 200);  // 199 is between two doubles, 4 apart
  }
}

TEST(SumSquares, HugeGradientsDoNotOverflow) {
  const std::vector<uint8_t> grad = Narrow(std::vector<float>(4096, -0x1p127f), OFFLOAD_FP32);
  EXPECT_EQ(SumSquares(ReferenceKernels(), OFFLOAD_FP32, grad), std::vector<double>{0x1p266});
}

TEST(SumSquares, OneInfOrNanAnywhereIsFound) {
  constexpr uint64_t kCount = 9 * kNormBlockElements + 37;
  for (int32_t dtype : kDtypes) {
    const std::vector<float> clean(kCount, 0.5f);
    const float payload_nan = std::bit_cast<float>(0xFFD12000u);
    for (float bad : {INFINITY, -INFINITY, NAN, payload_nan}) {
      for (uint64_t position = 0; position < kCount;
           position += position < 64 || position + 64 > kCount ? 1 : 997) {
        std::vector<float> grad = clean;
        grad[position] = bad;
        grad[position / 2] = position % 3 == 0 ? payload_nan : grad[position / 2];
        const std::vector<uint8_t> narrow = Narrow(grad, dtype);
        const std::vector<double> expected = SumSquares(ReferenceKernels(), dtype, narrow);
        for (uint64_t block = 0; block < expected.size(); ++block) {
          const bool hit = block == position / kNormBlockElements ||
                           (position % 3 == 0 && block == position / 2 / kNormBlockElements);
          ASSERT_EQ(std::isfinite(expected[block]), !hit);
        }
        for (const KernelTable* table : SimdKernels()) {
          ASSERT_TRUE(SameBits(SumSquares(*table, dtype, narrow), expected))
              << table->isa << " " << DtypeName(dtype) << " position " << position;
        }
      }
    }
  }
}

TEST(Verdict, ClipsAsTorchDoes) {
  const Verdict clipped = Decide(2500.0 * 4.0, 2.0, 5.0);  // norm 100 / 2 = 50
  EXPECT_EQ(clipped.grad_norm, 50.0);
  EXPECT_EQ(clipped.grad_clip, 5.0 / (50.0 + 1e-6));
  EXPECT_EQ(clipped.grad_factor, static_cast<float>(5.0 / (50.0 + 1e-6) / 2.0));
  EXPECT_EQ(clipped.skip, 0);

  const Verdict within = Decide(9.0, 1.0, 5.0);
  EXPECT_EQ(within.grad_clip, 1.0);
  EXPECT_EQ(within.grad_factor, 1.0f);

  const Verdict no_clipping = Decide(1e20, 4.0, 0.0);
  EXPECT_EQ(no_clipping.grad_norm, 2.5e9);
  EXPECT_EQ(no_clipping.grad_factor, 0.25f);
}

TEST(Verdict, SkipsWhatIsNotFinite) {
  for (double sum : {double{INFINITY}, double{NAN}}) {
    const Verdict verdict = Decide(sum, 8.0, 1.0);
    EXPECT_EQ(verdict.skip, 1);
    EXPECT_EQ(verdict.grad_factor, 0.0f);
    EXPECT_EQ(verdict.grad_clip, 1.0);
    EXPECT_FALSE(std::isfinite(verdict.grad_norm));
    EXPECT_EQ(std::isnan(verdict.grad_norm), std::isnan(sum));
  }
  const Verdict unasked = AssumeFinite(8.0);
  EXPECT_TRUE(std::isnan(unasked.grad_norm));
  EXPECT_EQ(unasked.grad_clip, 1.0);
  EXPECT_EQ(unasked.grad_factor, 0.125f);
  EXPECT_EQ(unasked.skip, 0);
}

// ---------------------------------------------------------------------------------- conversions

// The value of a 16-bit float with the given field widths, by its definition.
double Decode(uint16_t bits, int exponent_bits, int mantissa_bits) {
  const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1);
  const int mantissa = bits & ((1 << mantissa_bits) - 1);
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double magnitude = exponent == (1 << exponent_bits) - 1 ? (mantissa == 0 ? INFINITY : NAN)
                           : exponent == 0 ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
                                           : std::ldexp((1 << mantissa_bits) + mantissa,
                                                        exponent - bias - mantissa_bits);
  return std::copysign(magnitude, bits & 0x8000 ? -1.0 : 1.0);
}

// Rounds to nearest even in double, on the grid of the 16-bit format.
double RoundByDouble(double value, int exponent_min, int mantissa_bits, double max) {
  if (!std::isfinite(value) || value == 0.0) return value;
  const int exponent = std::max(std::ilogb(value), exponent_min);
  const double quantum = std::ldexp(1.0, exponent - mantissa_bits);
  const double rounded = std::nearbyint(value / quantum) * quantum;
  return std::fabs(rounded) > max ? std::copysign(INFINITY, value) : rounded;
}

bool SameNumber(double a, double b) {
  return std::isnan(a) ? std::isnan(b) : a == b && std::signbit(a) == std::signbit(b);
}

TEST(Convert, EveryPatternWidensExactly) {
  std::vector<uint16_t> patterns(65536);
  for (uint32_t i = 0; i < 65536; ++i) {
    patterns[i] = static_cast<uint16_t>(i);
    EXPECT_TRUE(SameNumber(Bf16ToFp32(patterns[i]), Decode(patterns[i], 8, 7))) << i;
    EXPECT_TRUE(SameNumber(Fp16ToFp32(patterns[i]), Decode(patterns[i], 5, 10))) << i;
  }
  for (int32_t dtype : kDtypes) {
    const uint64_t count = 65536 / (DtypeBytes(dtype) / 2);
    for (uint64_t shortened : {0, 1, 5, 15, 31}) {
      Guarded expected((count - shortened) * 4, 0);
      ReferenceKernels().ToFp32(dtype)(patterns.data(), count - shortened, expected.floats());
      for (const KernelTable* table : SimdKernels()) {
        Guarded wide((count - shortened) * 4, 4);
        table->ToFp32(dtype)(patterns.data(), count - shortened, wide.floats());
        EXPECT_EQ(std::memcmp(wide.data(), expected.data(), (count - shortened) * 4), 0)
            << table->isa << " " << DtypeName(dtype);
        EXPECT_TRUE(wide.GuardsIntact());
      }
    }
  }
}

void ExpectRounds(uint32_t bits) {
  const float value = std::bit_cast<float>(bits);
  const double bf16 = RoundByDouble(value, -126, 7, 0x1.FEp127);
  const double fp16 = RoundByDouble(value, -14, 10, 65504.0);
  ASSERT_TRUE(SameNumber(Decode(Fp32ToBf16(value), 8, 7), bf16)) << std::hex << bits;
  ASSERT_TRUE(SameNumber(Decode(Fp32ToFp16(value), 5, 10), fp16)) << std::hex << bits;
}

TEST(Convert, RoundsToNearestEven) {
  Random random(10);
  for (uint32_t exponent = 0; exponent < 256; ++exponent) {
    for (uint32_t cut = 0; cut <= 23; ++cut) {  // ties, and their neighbours, at every bit
      for (int repeat = 0; repeat < 8; ++repeat) {
        const uint32_t above = repeat == 0   ? 0
                               : repeat == 1 ? 0x007FFFFF
                                             : random.Bits() & 0x007FFFFF;
        const uint32_t tie = ((above >> cut) << cut) | ((1u << cut) >> 1);
        for (uint32_t mantissa : {tie - 1, tie, tie + 1, above}) {
          ExpectRounds(exponent << 23 | (mantissa & 0x007FFFFF));
          ExpectRounds(0x80000000 | exponent << 23 | (mantissa & 0x007FFFFF));
        }
      }
    }
  }
  for (int i = 0; i < 1000000; ++i) ExpectRounds(random.Bits());
}

TEST(Convert, NanKeepsItsSignAndTopPayloadBits) {
  const float quiet = std::bit_cast<float>(0xFFC56789u);
  const float signalling = std::bit_cast<float>(0x7F812345u);
  EXPECT_EQ(Fp32ToBf16(quiet), 0xFFC5);
  EXPECT_EQ(Fp32ToBf16(signalling), 0x7FC1);
  EXPECT_EQ(Fp32ToFp16(quiet), 0xFE2B);
  EXPECT_EQ(Fp32ToFp16(signalling), 0x7E09);
  EXPECT_EQ(Fp32ToBf16(std::bit_cast<float>(0x7FFFFFFFu)), 0x7FFF);
  EXPECT_EQ(Fp32ToFp16(std::bit_cast<float>(0x7F800001u)), 0x7E00);
  EXPECT_EQ(std::bit_cast<uint32_t>(Fp16ToFp32(0xFC01)), 0xFFC02000u);
  EXPECT_EQ(std::bit_cast<uint32_t>(Bf16ToFp32(0x7F81)), 0x7F810000u);
}

// ---------------------------------------------------------------------------------- accumulate

// `sum` after `grad` was added to it; the first `split` elements in a call of their own.
std::vector<uint8_t> Accumulated(const KernelTable& table, int32_t dtype,
                                 const std::vector<uint8_t>& grad, const std::vector<float>& sum,
                                 const Layout& layout = {}) {
  const uint64_t count = sum.size();
  Guarded elements(grad.size(), layout.shift * DtypeBytes(dtype));
  Guarded sums(count * 4, (layout.shift + 1) * 4 % 64);
  if (count != 0) {
    std::memcpy(elements.data(), grad.data(), grad.size());
    std::memcpy(sums.data(), sum.data(), count * 4);
  }
  const AccumulateFunction add = table.Accumulate(dtype);
  const auto* source = static_cast<const uint8_t*>(elements.data());
  if (layout.split != 0) add(source, layout.split, sums.floats());
  add(source + layout.split * DtypeBytes(dtype), count - layout.split,
      sums.floats() + layout.split);
  EXPECT_TRUE(sums.GuardsIntact() && elements.GuardsIntact());
  if (count != 0) {
    EXPECT_EQ(std::memcmp(elements.data(), grad.data(), grad.size()), 0) << "grad was written";
  }
  const auto* data = static_cast<const uint8_t*>(sums.data());
  return {data, data + count * 4};
}

// One fp32 addition an element, by the definition of the dtypes.
std::vector<uint8_t> AddedOneByOne(int32_t dtype, const std::vector<uint8_t>& grad,
                                   std::vector<float> sum) {
  for (uint64_t i = 0; i < sum.size(); ++i) {
    float wide = 0;
    uint16_t half = 0;
    std::memcpy(&wide, &grad[i * DtypeBytes(dtype)], DtypeBytes(dtype) == 4 ? 4 : 0);
    std::memcpy(&half, &grad[i * DtypeBytes(dtype)], 2);
    if (dtype == OFFLOAD_BF16) wide = Bf16ToFp32(half);
    if (dtype == OFFLOAD_FP16) wide = Fp16ToFp32(half);
    sum[i] = sum[i] + wide;
  }
  return Narrow(sum, OFFLOAD_FP32);
}

TEST(Accumulate, EveryCountAndAddressIsOneFp32Addition) {
  for (int32_t dtype : kDtypes) {
    const float max = dtype == OFFLOAD_FP16 ? 65504.0f : 0x1.FEp127f;
    for (uint64_t count : {0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 1009, 4099}) {
      const std::vector<uint8_t> grad = Narrow(AwkwardValues(count, count, 1.0f, max), dtype);
      const std::vector<float> sum = AwkwardValues(count, count + 1, 1.0f, FLT_MAX);
      const std::vector<uint8_t> expected = AddedOneByOne(dtype, grad, sum);
      EXPECT_TRUE(Accumulated(ReferenceKernels(), dtype, grad, sum) == expected)
          << "reference " << DtypeName(dtype) << " " << count;
      for (const KernelTable* table : SimdKernels()) {
        for (uint64_t shift : {0, 1, 5, 13, 31}) {
          EXPECT_TRUE(Accumulated(*table, dtype, grad, sum, {.shift = shift}) == expected)
              << table->isa << " " << DtypeName(dtype) << " " << count << " shift " << shift;
        }
      }
    }
  }
}

TEST(Accumulate, SplitAnywhereHasTheSameBits) {
  for (int32_t dtype : kDtypes) {
    const std::vector<uint8_t> grad = Narrow(AwkwardValues(100, 12, 1.0f, 60000.0f), dtype);
    const std::vector<float> sum = AwkwardValues(100, 13, 1.0f, FLT_MAX);
    const std::vector<uint8_t> whole = AddedOneByOne(dtype, grad, sum);
    for (const KernelTable* table : SimdKernels()) {
      for (uint64_t split = 1; split <= 100; ++split) {
        EXPECT_TRUE(Accumulated(*table, dtype, grad, sum, {.split = split}) == whole)
            << table->isa << " " << DtypeName(dtype) << " split " << split;
      }
    }
  }
}

// -0 + -0 is the only sum that is -0; 33 elements put every case in a whole vector and in a tail.
TEST(Accumulate, SignedZerosAndWhatIsNotFinite) {
  struct Case {
    float sum, grad, expected;
  };
  const Case cases[] = {{-0.0f, -0.0f, -0.0f},       {-0.0f, 0.0f, 0.0f},
                        {0.0f, -0.0f, 0.0f},         {1.0f, -1.0f, 0.0f},
                        {FLT_MAX, 1.0f, FLT_MAX},    {INFINITY, 1.0f, INFINITY},
                        {1.0f, -INFINITY, -INFINITY}};
  for (const Case& c : cases) {
    for (int32_t dtype : kDtypes) {
      const std::vector<uint8_t> grad = Narrow(std::vector<float>(33, c.grad), dtype);
      const std::vector<uint8_t> expected =
          Narrow(std::vector<float>(33, c.expected), OFFLOAD_FP32);
      for (const KernelTable* table : AllTables()) {
        EXPECT_TRUE(Accumulated(*table, dtype, grad, std::vector<float>(33, c.sum)) == expected)
            << table->isa << " " << DtypeName(dtype) << ": " << c.sum << " + " << c.grad;
      }
    }
  }
  const std::vector<float> grad(33, INFINITY);
  for (const KernelTable* table : AllTables()) {
    const std::vector<uint8_t> nan = Accumulated(*table, OFFLOAD_FP32, Narrow(grad, OFFLOAD_FP32),
                                                 std::vector<float>(33, -INFINITY));
    for (uint64_t i = 0; i < 33; ++i) {
      float value = 0;
      std::memcpy(&value, &nan[4 * i], 4);
      EXPECT_TRUE(std::isnan(value)) << table->isa << " element " << i;
    }
  }
}

// ------------------------------------------------------------------------------ follow params

// Params that are their rounded masters (to even or, in bf16, away from zero), and some params that
// other code has written.
std::vector<uint8_t> PartlyWritten(const std::vector<float>& masters, int32_t dtype,
                                   Random& random) {
  std::vector<uint8_t> params = Narrow(masters, dtype);
  for (size_t i = 0; i < masters.size(); ++i) {
    auto bits = static_cast<uint16_t>(random.Bits());
    if (dtype == OFFLOAD_BF16 && random.OneIn(2)) bits = Fp32ToBf16TiesAway(masters[i]);
    if (random.OneIn(4)) std::memcpy(&params[2 * i], &bits, 2);
  }
  return params;
}

// Ties between two bf16 numbers among them.
std::vector<float> MastersOf(uint64_t count, Random& random) {
  std::vector<float> masters = AwkwardValues(count, random.Bits(), 1.0f, 60000.0f);
  for (float& master : masters)
    if (random.OneIn(3))
      master = std::bit_cast<float>((std::bit_cast<uint32_t>(master) & 0xFFFF0000) | 0x8000);
  return masters;
}

TEST(FollowParams, OnlyWrittenElementsChangeInEveryCountAndAddress) {
  Random random(15);
  for (int32_t dtype : {OFFLOAD_BF16, OFFLOAD_FP16}) {
    for (uint64_t count : {0, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 1009}) {
      const std::vector<float> before = MastersOf(count, random);
      const std::vector<uint8_t> params = PartlyWritten(before, dtype, random);
      std::vector<float> expected = before;
      std::vector<uint8_t> expected_changed((count + 7) / 8);
      for (uint64_t i = 0; i < count; ++i) {
        uint16_t bits = 0;
        std::memcpy(&bits, &params[2 * i], 2);
        const bool is_bf16 = dtype == OFFLOAD_BF16;
        const bool is_rounded = bits == (is_bf16 ? Fp32ToBf16(before[i]) : Fp32ToFp16(before[i])) ||
                                (is_bf16 && bits == Fp32ToBf16TiesAway(before[i]));
        if (!is_rounded) expected[i] = is_bf16 ? Bf16ToFp32(bits) : Fp16ToFp32(bits);
        if (!is_rounded || std::isnan(before[i]) || (is_bf16 && IsTieOfBf16(before[i])))
          expected_changed[i / 8] |= static_cast<uint8_t>(1 << (i % 8));
      }
      for (const KernelTable* table : AllTables()) {
        for (uint64_t shift : {0, 1, 5, 13, 31}) {
          Guarded param(params.size(), 2 * shift), master(4 * count, (shift + 1) * 4 % 64);
          std::copy(params.begin(), params.end(), static_cast<uint8_t*>(param.data()));
          std::copy(before.begin(), before.end(), master.floats());
          Guarded changed(expected_changed.size(), shift);
          const bool notes = shift % 2 == 1;
          table->FollowParams(dtype)(param.data(), count, master.floats(),
                                     notes ? static_cast<uint8_t*>(changed.data()) : nullptr);
          const std::string which = std::string(table->isa) + " " + DtypeName(dtype) + " " +
                                    std::to_string(count) + " shift " + std::to_string(shift);
          EXPECT_TRUE(count == 0 || std::memcmp(master.floats(), expected.data(), 4 * count) == 0)
              << which;
          EXPECT_TRUE(
              !notes || count == 0 ||
              std::memcmp(changed.data(), expected_changed.data(), expected_changed.size()) == 0)
              << which;
          EXPECT_TRUE(param.GuardsIntact() && master.GuardsIntact() && changed.GuardsIntact());
        }
      }
    }
  }
}

TEST(FollowParams, AnyMasterIsItsOwnRounding) {
  Random random(16);
  for (int i = 0; i < 200'000; i += 64) {
    std::vector<float> masters(64);
    for (float& master : masters) master = std::bit_cast<float>(random.Bits());  // NaN among them
    for (int32_t dtype : {OFFLOAD_BF16, OFFLOAD_FP16}) {
      const std::vector<uint8_t> params = Narrow(masters, dtype);
      for (const KernelTable* table : SimdKernels()) {
        std::vector<float> after = masters;
        table->FollowParams(dtype)(params.data(), masters.size(), after.data(), nullptr);
        ASSERT_EQ(std::memcmp(after.data(), masters.data(), 4 * masters.size()), 0) << table->isa;
      }
    }
  }
}

// ---------------------------------------------------------------------------- past the caches

TEST(CopyPastCaches, EveryCountAndAddressGetsTheseBytes) {
  Random random(14);
  for (uint64_t bytes : {0, 1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 200, 4099}) {
    std::vector<uint8_t> content(bytes);
    for (uint8_t& byte : content) byte = static_cast<uint8_t>(random.Bits());
    for (const KernelTable* table : AllTables()) {
      for (uint64_t to_shift = 0; to_shift < 64; ++to_shift) {
        const uint64_t from_shift = random.Below(64);
        Guarded from(bytes, from_shift), to(bytes, to_shift);
        std::copy(content.begin(), content.end(), static_cast<uint8_t*>(from.data()));
        table->copy_past_caches(to.data(), from.data(), bytes);
        table->publish();
        EXPECT_TRUE(std::equal(content.begin(), content.end(), static_cast<uint8_t*>(to.data())))
            << table->isa << " " << bytes << " bytes from " << from_shift << " to " << to_shift;
        EXPECT_TRUE(to.GuardsIntact() && from.GuardsIntact());
      }
    }
  }
}

// ------------------------------------------------------------------------------------- select

class Select : public testing::Test {
 protected:
  void SetUp() override {
    const char* before = std::getenv("HYBRIDOPT_ISA");
    if (before != nullptr) before_ = std::make_unique<std::string>(before);
    unsetenv("HYBRIDOPT_ISA");
  }
  void TearDown() override {
    if (before_ != nullptr) setenv("HYBRIDOPT_ISA", before_->c_str(), 1);
    if (before_ == nullptr) unsetenv("HYBRIDOPT_ISA");
  }

 private:
  std::unique_ptr<std::string> before_;
};

TEST_F(Select, EachNameGivesItsTable) {
  for (const KernelTable* table : AllTables()) {
    setenv("HYBRIDOPT_ISA", table->isa, 1);
    const Result<const KernelTable*> selected = SelectKernels();
    ASSERT_TRUE(selected.ok()) << selected.status().message();
    EXPECT_EQ(selected.value(), table);
  }
}

TEST_F(Select, WithoutANameTheBestIsTaken) {
  const KernelTable* best = SimdKernels().empty() ? &ReferenceKernels() : SimdKernels().front();
  EXPECT_EQ(SelectKernels().value(), best);
  setenv("HYBRIDOPT_ISA", "", 1);
  EXPECT_EQ(SelectKernels().value(), best);
}

TEST_F(Select, UnknownNameIsRefusedWithTheList) {
  setenv("HYBRIDOPT_ISA", "AVX2", 1);
  const Result<const KernelTable*> selected = SelectKernels();
  ASSERT_FALSE(selected.ok());
  EXPECT_EQ(selected.status().code(), OFFLOAD_INVALID_ARGUMENT);
  const std::string& message = selected.status().message();
  EXPECT_NE(
      message.find("HYBRIDOPT_ISA is \"AVX2\", expected one of reference, avx2, avx512, neon, sve"),
      std::string::npos)
      << message;
  EXPECT_NE(message.find("this CPU can use"), std::string::npos) << message;
}

TEST_F(Select, NameThisCpuCannotRunIsRefusedWithTheList) {
#if defined(__x86_64__)
  const char* foreign = "neon";
#else
  const char* foreign = "avx2";
#endif
  setenv("HYBRIDOPT_ISA", foreign, 1);
  const Result<const KernelTable*> selected = SelectKernels();
  ASSERT_FALSE(selected.ok());
  EXPECT_EQ(selected.status().code(), OFFLOAD_UNSUPPORTED);
  std::string usable;
  for (const KernelTable* table : SimdKernels()) usable += std::string(table->isa) + ", ";
  EXPECT_EQ(selected.status().message(),
            std::string("HYBRIDOPT_ISA is \"") + foreign +
                "\", which this CPU or this build cannot run; it can use " + usable +
                "reference; unset it to get the best of them");
}

#if defined(__x86_64__) && defined(__linux__)
TEST_F(Select, WhatTheKernelSaysTheCpuHasIsThere) {
  std::ifstream cpuinfo("/proc/cpuinfo");
  std::string line;
  while (std::getline(cpuinfo, line) && line.rfind("flags", 0) != 0) {
  }
  std::vector<std::string> flags;
  std::istringstream words(line);
  for (std::string word; words >> word;) flags.push_back(word);
  const auto has = [&](const char* flag) {
    return std::find(flags.begin(), flags.end(), flag) != flags.end();
  };
  const bool avx2 = has("avx2") && has("fma") && has("f16c") && has("bmi1") && has("bmi2");
  const bool avx512 =
      avx2 && has("avx512f") && has("avx512vl") && has("avx512dq") && has("avx512bw");
  std::vector<std::string> expected;
  const bool sanitized = HYBRIDOPT_ASAN || HYBRIDOPT_TSAN;  // such builds have one target
  if (avx512 && !sanitized) expected.push_back("avx512");
  if (avx2) expected.push_back("avx2");
  std::vector<std::string> got;
  for (const KernelTable* table : SimdKernels()) got.push_back(table->isa);
  EXPECT_EQ(got, expected);
}
#elif defined(__aarch64__) && defined(__linux__)
// Longer vectors than NEON's have precedence, vectors of NEON's length come last, odd lengths are
// not used.
TEST_F(Select, WhatTheKernelSaysTheCpuHasIsThere) {
  std::vector<std::string> expected = {"neon"};
  const uint64_t bytes = system::SveVectorBytes();
  EXPECT_EQ(bytes != 0, (getauxval(AT_HWCAP) & HWCAP_SVE) != 0);
  if (std::has_single_bit(bytes))
    expected.insert(bytes > 16 ? expected.begin() : expected.end(), "sve");
  std::vector<std::string> got;
  for (const KernelTable* table : SimdKernels()) got.push_back(table->isa);
  EXPECT_EQ(got, expected);
}
#endif

}  // namespace
}  // namespace hybridopt
