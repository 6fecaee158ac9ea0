// Split and 24-bit masters and bf16 moments: every SIMD kernel is compared with the scalar
// specification, and the specification with fp32 masters, bit by bit; and the promises of rounding
// at random are tested.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "../../random.h"
#include "kernels/convert.h"
#include "kernels/kernels.h"
#include "kernels/stochastic_rounding.h"

namespace hybridopt {
namespace {

struct Kind {
  Rule rule;
  SpanTypes types;
};

std::vector<Kind> AllKinds() {
  std::vector<Kind> kinds;
  for (int32_t rule = 0; rule < kRuleCount; ++rule)
    ForEachSpanTypes([&](const SpanTypes& types) { kinds.push_back({Rule{rule}, types}); });
  return kinds;
}

const std::byte* BytesOf(const std::vector<float>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}

// An array of elements at an odd address, between guards.
class Array {
 public:
  Array(const std::vector<float>& values, int32_t dtype, uint64_t shift)
      : Array(values.size(), DtypeBytes(dtype), shift) {
    for (uint64_t i = 0; i < values.size(); ++i) {
      const uint32_t bits = dtype == OFFLOAD_FP32   ? std::bit_cast<uint32_t>(values[i])
                            : dtype == OFFLOAD_BF16 ? Fp32ToBf16(values[i])
                                                    : Fp32ToFp16(values[i]);
      std::memcpy(&bytes_[begin_ + i * element_bytes_], &bits, element_bytes_);
    }
  }
  Array(const std::vector<float>& values, Format format, uint64_t shift)
      : Array(values.size(), RowOf(format).Bytes(1), shift) {
    RowOf(format).encode(BytesOf(values), count_, reinterpret_cast<std::byte*>(data()));
  }
  // The params of masters in that format.
  static Array Params(const std::vector<float>& masters, Format format, int32_t dtype,
                      uint64_t shift) {
    if (!RowOf(format).beside_param) return Array(masters, dtype, shift);
    Array params(masters.size(), DtypeBytes(dtype), shift);
    RowOf(format).encode_params(BytesOf(masters), masters.size(),
                                reinterpret_cast<std::byte*>(params.data()));
    return params;
  }

  void* data() { return &bytes_[begin_]; }
  void PutNan(uint64_t i) {
    const uint32_t nan = 0x7FFFFFFF >> (32 - 8 * element_bytes_);
    std::memcpy(&bytes_[begin_ + i * element_bytes_], &nan, element_bytes_);
  }
  const std::byte* element(uint64_t i) const {
    return reinterpret_cast<const std::byte*>(&bytes_[begin_ + i * element_bytes_]);
  }
  template <typename T>
  T at(uint64_t i) const {
    T value;
    std::memcpy(&value, &bytes_[begin_ + i * sizeof(T)], sizeof(T));
    return value;
  }
  bool GuardsIntact() const {
    for (uint64_t i = 0; i < bytes_.size(); ++i)
      if ((i < begin_ || i >= begin_ + count_ * element_bytes_) && bytes_[i] != kFill) return false;
    return true;
  }
  bool operator==(const Array& other) const { return bytes_ == other.bytes_; }
  uint64_t Hash(uint64_t hash) const {
    for (uint8_t byte : bytes_) hash = (hash ^ byte) * 1099511628211u;
    return hash;
  }

 private:
  Array(uint64_t count, uint64_t element_bytes, uint64_t shift)
      : element_bytes_(element_bytes),
        count_(count),
        bytes_(2 * kGuard + shift * element_bytes + count * element_bytes, kFill),
        begin_(kGuard + shift * element_bytes) {}

  static constexpr uint64_t kGuard = 64;
  static constexpr uint8_t kFill = 0xA5;

  uint64_t element_bytes_;
  uint64_t count_;
  std::vector<uint8_t> bytes_;
  uint64_t begin_;
};

// All arrays of one update.
struct Arrays {
  Arrays(const Kind& kind, uint64_t count, uint64_t seed, uint64_t shift = 0,
         float grad_max = INFINITY)
      : kind_(kind),
        count_(count),
        grad(Clamped(Values(count, seed, 1.0f), grad_max), kind.types.grad_dtype, shift),
        param(Array::Params(Masters(count, seed), kind.types.formats.master, kind.types.param_dtype,
                            shift)),
        master(Masters(count, seed), kind.types.formats.master, shift),
        moment0(Positive(Values(count, seed + 2, 0.1f), IsSumOfSquares(MomentOf(kind.rule, 0))),
                kind.types.formats.moment0, shift),
        moment1(Positive(Values(count, seed + 3, 0.01f), true), kind.types.formats.moment1, shift) {
  }

  // Elements from `cut` on in a call of their own.
  void Update(const KernelTable& table, const Coefficients& c, const Rounding& rounding,
              const ElementOrder& order = {}, uint64_t cut = 0) {
    UpdateSpan span = {grad.data(),
                       param.data(),
                       master.data(),
                       MomentOf(kind_.rule, 0) == kNoMoment ? nullptr : moment0.data(),
                       MomentOf(kind_.rule, 1) == kNoMoment ? nullptr : moment1.data(),
                       cut == 0 ? count_ : cut,
                       rounding,
                       order};
    const UpdateFunction update = table.Update(kind_.rule, kind_.types);
    update(c, span);
    if (cut == 0) return;
    span = Advanced(span, kind_.types, cut);
    span.count = count_ - cut;
    update(c, span);
  }

  float Moment(const Array& moment, uint64_t i) const {
    float value = 0;
    RowOf(kind_.types.formats.moment0).decode(moment.element(i), nullptr, 1, &value);
    return value;
  }
  float Master(uint64_t i) const {
    float value = 0;
    RowOf(kind_.types.formats.master).decode(master.element(i), param.element(i), 1, &value);
    return value;
  }
  bool GuardsIntact() const {
    return grad.GuardsIntact() && param.GuardsIntact() && master.GuardsIntact() &&
           moment0.GuardsIntact() && moment1.GuardsIntact();
  }
  bool operator==(const Arrays& other) const {
    return grad == other.grad && param == other.param && master == other.master &&
           moment0 == other.moment0 && moment1 == other.moment1;
  }

 private:
  // Numbers of many magnitudes, zeros, denormals and huge ones among them.
  static std::vector<float> Values(uint64_t count, uint64_t seed, float scale) {
    Random random(seed);
    std::vector<float> values(count);
    for (float& value : values) {
      const uint64_t kind = random.Next() % 16;
      value = random.SignedUnit() * scale;
      if (kind == 0) value = std::copysign(0.0f, value);
      if (kind == 1) value *= FLT_MIN;
      if (kind == 2) value *= 1e30f;
      if (kind == 3) value = std::ldexp(value, static_cast<int>(random.Next() % 60) - 40);
      if (kind == 4)
        value = std::bit_cast<float>((std::bit_cast<uint32_t>(value) & ~0xFFFFu) | 0x8000);
    }
    return values;
  }
  static std::vector<float> Clamped(std::vector<float> values, float max) {
    for (float& value : values) value = std::clamp(value, -max, max);
    return values;
  }
  static std::vector<float> Masters(uint64_t count, uint64_t seed) {
    return Values(count, seed + 1, 0.1f);
  }
  static std::vector<float> Positive(std::vector<float> values, bool positive) {
    if (positive)
      for (float& value : values) value = std::fabs(value);
    return values;
  }

  Kind kind_;
  uint64_t count_;

 public:
  Array grad, param, master, moment0, moment1;
};

Coefficients AnyCoefficients() {
  return {.grad_factor = -0.37f,
          .l2_decay = 0.013f,
          .decoupled_decay = 1.7e-3f,
          .step_size = 3.1e-3f,
          .keep0 = 0.9f,
          .weight0 = 0.1f,
          .keep1 = 0.97f,
          .weight1 = 0.03f,
          .inverse_sqrt_bias_correction2 = 1.9f,
          .eps = 1e-8f,
          .nesterov_momentum = 0.9f,
          .nesterov = 1};
}

std::vector<Rounding> Roundings() {
  return {{}, {.stochastic = false, .ties_away = true}, StochasticRounding(7, 8, 9)};
}

// Rows of 23 elements, 100 apart, from the 5th element of one on.
constexpr ElementOrder kRows = {.first = 1000, .row_length = 23, .row_stride = 100, .column = 5};

std::string Text(const KernelTable& table, const Kind& kind) {
  return std::string(table.isa) + " rule " + std::to_string(static_cast<int>(kind.rule)) +
         " masters " + RowOf(kind.types.formats.master).name + " moments " +
         RowOf(kind.types.formats.moment0).name + " grad " + DtypeName(kind.types.grad_dtype) +
         " param " + DtypeName(kind.types.param_dtype);
}

TEST(StateLayouts, EveryCountAndAddressHasReferenceBits) {
  for (const Kind& kind : AllKinds()) {
    for (const Rounding& rounding : Roundings()) {
      for (uint64_t count : {0, 1, 15, 16, 17, 31, 32, 33, 65, 131, 517}) {
        for (uint64_t shift : {0, 1, 7}) {
          for (const ElementOrder& order : {ElementOrder{}, kRows}) {
            Arrays expected(kind, count, count + 1, shift);
            expected.Update(ReferenceKernels(), AnyCoefficients(), rounding, order);
            ASSERT_TRUE(expected.GuardsIntact());
            for (const KernelTable* table : SimdKernels()) {
              Arrays got(kind, count, count + 1, shift);
              got.Update(*table, AnyCoefficients(), rounding, order);
              ASSERT_TRUE(got == expected) << Text(*table, kind) << " count " << count << " shift "
                                           << shift << " rows " << (order.row_length == 23);
            }
          }
        }
      }
    }
  }
}

// A NaN whose lower bits would carry into its sign if it were rounded as a number. Only one NaN in
// an operation: with two, the processor chooses which one is the result.
TEST(StateLayouts, OneNanHasReferenceBits) {
  constexpr uint64_t kCount = 70;
  for (const Kind& kind : AllKinds()) {
    for (const Rounding& rounding : Roundings()) {
      for (uint64_t at : {0, 1, 31, 33, 69}) {
        const auto updated = [&](const KernelTable& table, int where) {
          Arrays arrays(kind, kCount, at);
          if (where == 0) arrays.grad.PutNan(at);
          if (where == 1) arrays.master.PutNan(at);
          if (where == 1) arrays.param.PutNan(at);
          if (where == 2) arrays.moment0.PutNan(at);
          arrays.Update(table, AnyCoefficients(), rounding);
          return arrays;
        };
        for (int where : {0, 1, 2}) {
          const Arrays expected = updated(ReferenceKernels(), where);
          for (const KernelTable* table : SimdKernels())
            ASSERT_TRUE(updated(*table, where) == expected)
                << Text(*table, kind) << " element " << at << " array " << where;
        }
      }
    }
  }
}

TEST(StateLayouts, CutAnywhereHasTheSameBits) {
  for (const Kind& kind : AllKinds()) {
    if (kind.types.grad_dtype != OFFLOAD_BF16 || kind.types.param_dtype != OFFLOAD_BF16) continue;
    for (const ElementOrder& order :
         {ElementOrder{}, kRows, ElementOrder{.first = (uint64_t{5} << 32) - 40}}) {
      Arrays whole(kind, 100, 3);
      whole.Update(ReferenceKernels(), AnyCoefficients(), StochasticRounding(1, 2, 3), order);
      for (uint64_t cut = 1; cut < 100; ++cut) {
        for (const KernelTable* table : SimdKernels()) {
          Arrays parts(kind, 100, 3);
          parts.Update(*table, AnyCoefficients(), StochasticRounding(1, 2, 3), order, cut);
          ASSERT_TRUE(parts == whole) << Text(*table, kind) << " cut " << cut;
        }
      }
    }
  }
}

// The same bits on every machine, from every compiler and in every release. Gradients are finite in
// every dtype: the sign of a NaN depends on the processor.
TEST(StateLayouts, BitsArePinned) {
  const PinnedSeed pinned;
  uint64_t of_signum = 14695981039346656037u;  // FNV-1a
  uint64_t of_others = of_signum, of_cautious_adam = of_signum, of_24_bits = of_signum;
  for (const Kind& kind : AllKinds()) {
    if (kind.types.formats == StateFormats{}) continue;  // kernels_test.cpp
    uint64_t& hash = kind.types.formats.master == Format::kSplit24 ? of_24_bits
                     : kind.rule == Rule::kSignum                  ? of_signum
                     : kind.rule == Rule::kCautiousAdam            ? of_cautious_adam
                                                                   : of_others;
    for (const Rounding& rounding : Roundings()) {
      Arrays arrays(kind, 500, 17, 0, 65504.0f);
      for (int step = 0; step < 3; ++step)
        arrays.Update(ReferenceKernels(), AnyCoefficients(), rounding, kRows);
      hash = arrays.param.Hash(arrays.master.Hash(hash));
      hash = arrays.moment0.Hash(arrays.moment1.Hash(hash));
    }
  }
  EXPECT_EQ(of_others, 0x5f5059a591d642bau);
  EXPECT_EQ(of_signum, 0xb57b296e6f0bb76u);
  EXPECT_EQ(of_cautious_adam, 0x457efbcfa3ce7c07u);
  EXPECT_EQ(of_24_bits, 0x6d17e9764ce86f0bu);
}

// -------------------------------------------------------------------------------- split masters --

TEST(SplitMasters, HalvesJoinToTheNumberTheyCameFrom) {
  for (uint32_t high = 0; high < 65536; ++high) {
    for (uint32_t low :
         {0u, 1u, 0x7FFEu, 0x7FFFu, 0x8000u, 0x8001u, 0xFFFEu, 0xFFFFu, high ^ 0x5A5A}) {
      const float value = std::bit_cast<float>(high << 16 | low);
      const uint16_t param = Fp32ToBf16TiesAway(value);
      const float joined = JoinHalves(param, LowHalf(value));
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(joined) && std::isnan(Bf16ToFp32(param)));
        ASSERT_EQ(param, high | 0x40);
        ASSERT_EQ(std::bit_cast<uint32_t>(joined), (high | 0x40) << 16);
        continue;
      }
      ASSERT_EQ(std::bit_cast<uint32_t>(joined), high << 16 | low);
      // The one difference to rounding to nearest even.
      ASSERT_EQ(param, low == 0x8000 ? high + 1 : Fp32ToBf16(value));
    }
  }
}

// Numbers that other code writes over the params of split masters, whatever the lower halves are,
// are the start of the next step; and a step with lr 0 leaves zeros zero.
TEST(SplitMasters, ZerosThatOthersWriteStayZeros) {
  constexpr uint64_t kCount = 131;
  Coefficients still = AnyCoefficients();
  still.step_size = still.decoupled_decay = 0;
  for (const Kind& kind : AllKinds()) {
    if (!RowOf(kind.types.formats.master).beside_param) continue;
    for (const uint16_t zero : {uint16_t{0}, uint16_t{0x8000}}) {
      const auto updated = [&](const KernelTable& table) {
        Arrays arrays(kind, kCount, 5, 0, 65504.0f);
        auto* const params = static_cast<uint8_t*>(arrays.param.data());
        for (uint64_t i = 0; i < kCount; i += 3) std::memcpy(params + 2 * i, &zero, sizeof(zero));
        arrays.Update(table, still, {});
        return arrays;
      };
      const Arrays expected = updated(ReferenceKernels());
      for (uint64_t i = 0; i < kCount; i += 3) {
        ASSERT_EQ(expected.param.at<uint16_t>(i), zero) << "element " << i;
        ASSERT_LT(std::abs(expected.Master(i)), FLT_MIN) << "element " << i;
      }
      for (const KernelTable* table : SimdKernels())
        ASSERT_TRUE(updated(*table) == expected) << Text(*table, kind);
    }
  }
}

// After each of 50 steps with all kinds of numbers the masters are those of the fp32 layout.
TEST(SplitMasters, MastersHaveTheBitsOfFp32Masters) {
  for (int32_t rule = 0; rule < kRuleCount; ++rule) {
    for (const bool bf16 : {false, true}) {
      const Format moment = bf16 ? Format::kBf16 : Format::kFp32;
      const Kind split = {Rule{rule},
                          {OFFLOAD_BF16, OFFLOAD_BF16, {Format::kSplit, moment, moment}}};
      const Kind whole = {Rule{rule},
                          {OFFLOAD_BF16, OFFLOAD_BF16, {Format::kFp32, moment, moment}}};
      Arrays a(split, 700, 23), b(whole, 700, 23);
      const Arrays start(split, 700, 23);
      for (uint64_t step = 1; step <= 50; ++step) {
        const Rounding rounding = bf16 ? StochasticRounding(1, 2, step) : Rounding{};
        const KernelTable& table =
            SimdKernels().empty() ? ReferenceKernels() : *SimdKernels().front();
        a.Update(table, AnyCoefficients(), rounding);
        b.Update(table, AnyCoefficients(), rounding);
        for (uint64_t i = 0; i < 700; ++i) {
          const uint32_t bits = std::bit_cast<uint32_t>(b.Master(i));
          ASSERT_EQ(std::bit_cast<uint32_t>(a.Master(i)), bits);
          const bool tie = (bits & 0xFFFF) == 0x8000;
          const uint16_t up = static_cast<uint16_t>((bits >> 16) + 1);
          ASSERT_EQ(a.param.at<uint16_t>(i), tie ? up : b.param.at<uint16_t>(i));
        }
      }
      ASSERT_FALSE(a.param == start.param);  // the step changed it
    }
  }
}

// ------------------------------------------------------------------------------- 24-bit masters --

float OfBits(uint32_t bits) { return std::bit_cast<float>(bits); }
uint32_t BitsOf(float value) { return std::bit_cast<uint32_t>(value); }

using Split24 = Codec<Format::kSplit24>;

TEST(MastersOf24Bits, JoinToTheNumberTheyCameFrom) {
  for (uint32_t bits = 0; bits < 1u << 24; bits += 1 + bits % 7) {
    const float value = OfBits(bits << 8);
    const uint16_t param = Fp32ToBf16TiesAway(value);
    const uint32_t joined = BitsOf(Split24::Decode(Split24::Encode(value), param));
    if (std::isnan(value)) {  // sign and upper payload
      ASSERT_EQ(joined, (bits << 8 & 0xFFFF0000) | 0x00400000);
    } else {
      ASSERT_EQ(joined, bits << 8);
    }
    // A number of 24 bits is not rounded, at random neither.
    for (const bool stochastic : {false, true})
      ASSERT_EQ(BitsOf(Split24::Keep(value, stochastic, 0xFF)), bits << 8);
  }
}

TEST(MastersOf24Bits, AreRoundedToNearestTiesToEven) {
  const uint32_t cases[][2] = {
      {0x3F800000, 0x3F800000}, {0x3F80007F, 0x3F800000},
      {0x3F800080, 0x3F800000},                            // a tie, down to even
      {0x3F800081, 0x3F800100}, {0x3F800180, 0x3F800200},  // a tie, up to even
      {0x3F807F80, 0x3F808000},                            // up to a tie of the param
      {0x3FFFFFFF, 0x40000000},                            // a carry into the exponent
      {0x00000080, 0x00000000},                            // denormal numbers
      {0x00000081, 0x00000100}, {0x007FFFFF, 0x00800000},
      {0x00000000, 0x00000000}, {0x7F7FFF7F, 0x7F7FFF00},  // the largest number of 24 bits
      {0x7F7FFF80, 0x7F800000},                            // above it: infinite
      {0x7F800000, 0x7F800000}, {0x7FC00001, 0x7FC00001},  // NaN
      {0x7FFFFFFF, 0x7FFFFFFF}};
  for (const auto& [from, to] : cases)
    for (const uint32_t sign : {0u, 0x80000000u})
      EXPECT_EQ(BitsOf(Split24::Keep(OfBits(from | sign), false, 0)), to | sign)
          << std::hex << from;
}

TEST(MastersOf24Bits, AreRoundedAtRandomUpAsOftenAsTheLostBitsSay) {
  for (const uint32_t high : {0x3F807Fu, 0xBF8000u, 0x000000u, 0x807FFFu, 0x7F7FFFu}) {
    for (uint32_t lost = 0; lost < 256; ++lost) {
      uint32_t up = 0;
      for (uint32_t random = 0; random < 256; ++random) {
        const uint32_t kept = BitsOf(Split24::Keep(OfBits(high << 8 | lost), true, random));
        ASSERT_TRUE(kept == high << 8 || kept == (high + 1) << 8);
        up += kept == (high + 1) << 8;
      }
      ASSERT_EQ(up, lost) << std::hex << high;
    }
  }
  for (const uint32_t nan : {0x7FFFFFFFu, 0xFF800001u})
    EXPECT_TRUE(std::isnan(Split24::Keep(OfBits(nan), true, 0xFF)));
}

// If rounding to 24 bits gives a tie of the param, param and byte must be rounded in the same
// direction.
TEST(MastersOf24Bits, ArraysOfParamsAndBytesFitEachOther) {
  std::vector<float> values;
  for (const uint32_t high : {0x3F80u, 0xBF81u, 0x0000u, 0x7F7Fu})
    for (uint32_t low = 0; low < 1 << 16; ++low) values.push_back(OfBits(high << 16 | low));
  const FormatRow& row = RowOf(Format::kSplit24);
  std::vector<std::byte> stored(row.Bytes(values.size())), params(2 * values.size());
  std::vector<float> decoded(values.size());
  row.encode(BytesOf(values), values.size(), stored.data());
  row.encode_params(BytesOf(values), values.size(), params.data());
  row.decode(stored.data(), params.data(), values.size(), decoded.data());
  for (size_t i = 0; i < values.size(); ++i)
    ASSERT_EQ(BitsOf(decoded[i]), BitsOf(Split24::Keep(values[i], false, 0))) << values[i];
}

// Every step rounds what a step of fp32 masters gives, with the random bits of the element.
TEST(MastersOf24Bits, AreFp32MastersRounded) {
  constexpr uint64_t kCount = 700;
  for (const Kind& kind : AllKinds()) {
    if (kind.types.formats.master != Format::kSplit24) continue;
    Kind whole = kind;
    whole.types.formats.master = Format::kFp32;
    for (const Rounding& rounding : {Rounding{}, StochasticRounding(1, 2, 3)}) {
      Arrays a(kind, kCount, 23, 0, 65504.0f), b(whole, kCount, 23, 0, 65504.0f);
      const Arrays start(kind, kCount, 23, 0, 65504.0f);
      for (uint64_t i = 0; i < kCount; ++i) static_cast<float*>(b.master.data())[i] = a.Master(i);
      const KernelTable& table =
          SimdKernels().empty() ? ReferenceKernels() : *SimdKernels().front();
      a.Update(table, AnyCoefficients(), rounding);
      b.Update(ReferenceKernels(), AnyCoefficients(), rounding);
      for (uint64_t i = 0; i < kCount; ++i) {
        const uint32_t random = RandomBits(CounterOf(rounding, i), TweakOf(rounding, i));
        const float kept = Split24::Keep(b.Master(i), rounding.stochastic, MasterBits(random));
        ASSERT_EQ(BitsOf(a.Master(i)), BitsOf(kept)) << Text(table, kind) << " element " << i;
        ASSERT_EQ(a.param.at<uint16_t>(i), Fp32ToBf16TiesAway(kept));
      }
      ASSERT_TRUE(a.moment0 == b.moment0 && a.moment1 == b.moment1);
      ASSERT_FALSE(a.param == start.param);  // the step changed it
    }
  }
}

// Masters that a step makes larger than 24 bits can hold become infinite, and stay so.
TEST(MastersOf24Bits, AboveTheLargestAreInfinite) {
  constexpr uint64_t kCount = 67;
  const Kind kind = {Rule::kSgdPlain, {OFFLOAD_FP32, OFFLOAD_BF16, {.master = Format::kSplit24}}};
  Coefficients c = {};
  c.grad_factor = c.step_size = 1;
  for (const KernelTable* table : SimdKernels()) {
    for (const Rounding& rounding : {Rounding{}, StochasticRounding(1, 2, 3)}) {
      Arrays arrays(kind, kCount, 1), expected(kind, kCount, 1);
      for (Arrays* each : {&arrays, &expected}) {
        std::fill_n(static_cast<float*>(each->grad.data()), kCount, -FLT_MAX);
        std::fill_n(static_cast<uint16_t*>(each->param.data()), kCount, uint16_t{0});
        std::fill_n(static_cast<int8_t*>(each->master.data()), kCount, int8_t{0});
      }
      arrays.Update(*table, c, rounding);
      expected.Update(ReferenceKernels(), c, rounding);
      ASSERT_TRUE(arrays == expected) << table->isa;
      for (uint64_t i = 0; i < kCount && !rounding.stochastic; ++i) {
        EXPECT_EQ(arrays.Master(i), INFINITY);
        EXPECT_EQ(arrays.param.at<uint16_t>(i), 0x7F80);
      }
    }
  }
}

// --------------------------------------------------------------------------- rounding at random --

// Chi-square of a byte's frequencies: 255 degrees of freedom, standard deviation 22.6.
double ChiSquare(const std::vector<uint64_t>& counts, uint64_t total) {
  const double expected = static_cast<double>(total) / static_cast<double>(counts.size());
  double sum = 0;
  for (uint64_t count : counts)
    sum += std::pow(static_cast<double>(count) - expected, 2) / expected;
  return sum;
}

void ExpectUniform(const std::vector<uint32_t>& words, const std::string& what) {
  for (int shift = 0; shift < 32; shift += 8) {
    std::vector<uint64_t> counts(256);
    for (uint32_t word : words) ++counts[word >> shift & 0xFF];
    const double chi = ChiSquare(counts, words.size());
    EXPECT_LT(chi, 255 + 5 * 22.6) << what << ", byte at bit " << shift;
    EXPECT_GT(chi, 255 - 5 * 22.6) << what << ", byte at bit " << shift;
  }
}

// The words' bits, packed: bit 0 of all of them, bit 1, ...
std::vector<std::vector<uint64_t>> Slices(const std::vector<uint32_t>& words) {
  std::vector<std::vector<uint64_t>> slices(32, std::vector<uint64_t>(words.size() / 64));
  for (size_t k = 0; k < words.size(); ++k)
    for (int i = 0; i < 32; ++i) slices[i][k / 64] |= uint64_t{words[k] >> i & 1} << k % 64;
  return slices;
}

// Bits of neighbouring draws agree half of the time, each with each other.
void ExpectIndependent(const std::vector<uint32_t>& a, const std::vector<uint32_t>& b,
                       const std::string& what) {
  const double count = static_cast<double>(a.size());
  const auto of_a = Slices(a), of_b = Slices(b);
  for (int i = 0; i < 32; ++i) {
    for (int j = 0; j < 32; ++j) {
      int64_t agree = 0;
      for (size_t k = 0; k < of_a[i].size(); ++k)
        agree += std::popcount(~(of_a[i][k] ^ of_b[j][k]));
      EXPECT_NEAR(static_cast<double>(agree), count / 2, 5.5 * std::sqrt(count) / 2)
          << what << ", bits " << i << " and " << j;
    }
  }
}

uint32_t Draw(const Rounding& rounding, uint64_t index) {
  return RandomBits(CounterOf(rounding, index), TweakOf(rounding, index));
}

TEST(StochasticRounding, BitsAreUniformAndIndependent) {
  constexpr uint64_t kCount = 1 << 16;
  std::vector<uint32_t> indices, neighbours, steps, next_steps, seeds, names, far;
  for (uint64_t i = 0; i < kCount; ++i) {
    indices.push_back(Draw(StochasticRounding(0, 1, 1), i));
    neighbours.push_back(Draw(StochasticRounding(0, 1, 1), i + 1));
    steps.push_back(Draw(StochasticRounding(0, 1, i), 12345));
    next_steps.push_back(Draw(StochasticRounding(0, 1, i + 1), 12345));
    seeds.push_back(Draw(StochasticRounding(i, 1, 1), 12345));
    names.push_back(Draw(StochasticRounding(0, i, 1), 12345));
    far.push_back(Draw(StochasticRounding(0, 1, 1), i + (uint64_t{1} << 32)));
  }
  ExpectUniform(indices, "indices");
  ExpectUniform(steps, "steps");
  ExpectUniform(seeds, "seeds");
  ExpectUniform(names, "names");
  ExpectUniform(far, "beyond 2^32");
  ExpectIndependent(indices, neighbours, "neighbours");
  ExpectIndependent(steps, next_steps, "steps that follow each other");
  ExpectIndependent(indices, far, "2^32 apart");
  std::vector<uint32_t> upper;
  for (uint32_t word : indices) upper.push_back(word >> 16 | word << 16);
  for (int bit = 0; bit < 16; ++bit) {  // moment0's bits against moment1's
    uint64_t agree = 0;
    for (size_t k = 0; k < kCount; ++k) agree += ((indices[k] ^ upper[k]) >> bit & 1) == 0;
    EXPECT_NEAR(static_cast<double>(agree), kCount / 2.0, 5.5 * std::sqrt(double{kCount}) / 2);
  }
}

// The bits with which masters are rounded are uniform, even if bits of a moment are known. For
// moment0 the test counts all cases; for moment1 it draws some.
TEST(StochasticRounding, BitsOfMastersTellNothingOfTheMoments) {
  for (const uint32_t lower : {0u, 1u, 0x1234u, 0x8000u, 0xFFFFu}) {
    std::vector<uint64_t> counts(256);
    for (uint32_t upper = 0; upper < 1 << 16; ++upper) ++counts[MasterBits(upper << 16 | lower)];
    EXPECT_EQ(std::count(counts.begin(), counts.end(), 256), 256) << lower;
  }
  constexpr uint64_t kCount = 1 << 18;
  std::vector<uint64_t> counts(256), beside_moment1(1 << 16);
  std::vector<uint32_t> masters, moments;
  for (uint64_t i = 0; i < kCount; ++i) {
    const uint32_t bits = Draw(StochasticRounding(0, 1, 1), i);
    masters.push_back(MasterBits(bits));
    moments.push_back(bits);
    ++counts[masters.back()];
    ++beside_moment1[masters.back() << 8 | bits >> 24];
  }
  EXPECT_LT(ChiSquare(counts, kCount), 255 + 5 * 22.6);
  EXPECT_GT(ChiSquare(counts, kCount), 255 - 5 * 22.6);
  EXPECT_LT(ChiSquare(beside_moment1, kCount), 65535 + 5 * 362.0);
  for (int i = 0; i < 8; ++i) {
    for (int j = 0; j < 32; ++j) {
      uint64_t agree = 0;
      for (size_t k = 0; k < kCount; ++k) agree += ((masters[k] >> i ^ moments[k] >> j) & 1) == 0;
      EXPECT_NEAR(static_cast<double>(agree), kCount / 2.0, 5.5 * std::sqrt(double{kCount}) / 2)
          << "bits " << i << " and " << j;
    }
  }
}

// Elements of different rows of one tensor are as independent as neighbours, and so are elements at
// both ends of a large tensor.
TEST(StochasticRounding, ElementsFarApartAreIndependent) {
  constexpr uint64_t kCount = 1 << 16;
  std::vector<uint64_t> distances = {3, 5, 7, 48, 768, 1000, 5120, 14336, 28672, 50257, 1000000};
  for (int bit = 1; bit < 32; ++bit) distances.push_back(uint64_t{1} << bit);
  for (uint64_t distance : distances) {
    const Rounding rounding = StochasticRounding(1, 2, distance);
    std::vector<uint32_t> near, far;
    for (uint64_t i = 0; i < kCount; ++i) {
      near.push_back(Draw(rounding, i));
      far.push_back(Draw(rounding, i + distance));
    }
    ExpectIndependent(near, far, std::to_string(distance) + " apart");
  }
}

// Where the upper half of the counters changes inside of an array, kernels mix it in another way.
TEST(StochasticRounding, CountersThatPassTheirLowerHalfHaveReferenceBits) {
  const Rounding rounding = StochasticRounding(1, 2, 3);
  for (const Kind& kind : AllKinds()) {
    if (kind.types.grad_dtype != OFFLOAD_BF16 || kind.types.param_dtype != OFFLOAD_BF16) continue;
    for (uint32_t before = 0; before <= 130; ++before) {
      ElementOrder order;
      order.first = uint32_t{0x30000} - before - CounterOf(rounding, 0);
      ASSERT_EQ(CounterOf(rounding, order.first + before), 0x30000u);
      Arrays expected(kind, 130, before);
      expected.Update(ReferenceKernels(), AnyCoefficients(), rounding, order);
      for (const KernelTable* table : SimdKernels()) {
        Arrays got(kind, 130, before);
        got.Update(*table, AnyCoefficients(), rounding, order);
        ASSERT_TRUE(got == expected) << Text(*table, kind) << " before " << before;
      }
    }
  }
}

// A number is rounded up as often as the discarded bits require: the mean is the number.
TEST(StochasticRounding, IsUnbiased) {
  constexpr uint64_t kCount = 1 << 18;
  for (uint32_t lost : {1u, 0x1000u, 0x4000u, 0x8000u, 0xC000u, 0xFFFFu}) {
    for (uint32_t high : {0x3F80u, 0xBDCDu, 0x0001u}) {
      const float value = std::bit_cast<float>(high << 16 | lost);
      uint64_t up[2] = {0, 0};
      for (uint64_t i = 0; i < kCount; ++i) {
        const uint32_t bits = Draw(StochasticRounding(3, 4, 5), i);
        for (int half : {0, 1}) {
          const uint16_t rounded =
              Fp32ToBf16Randomly(value, half == 0 ? bits & 0xFFFF : bits >> 16);
          ASSERT_TRUE(rounded == high || rounded == high + 1);
          up[half] += rounded == high + 1;
        }
      }
      const double p = lost / 65536.0;
      for (int half : {0, 1})
        EXPECT_NEAR(static_cast<double>(up[half]), kCount * p,
                    5 * std::sqrt(kCount * p * (1 - p)) + 1)
            << std::hex << (high << 16 | lost);
    }
  }
}

TEST(StochasticRounding, KeepsZerosInfinitiesAndNans) {
  for (uint32_t random : {0u, 1u, 0x7FFFu, 0xFFFFu}) {
    EXPECT_EQ(Fp32ToBf16Randomly(0.0f, random), 0x0000);
    EXPECT_EQ(Fp32ToBf16Randomly(-0.0f, random), 0x8000);
    EXPECT_EQ(Fp32ToBf16Randomly(1.5f, random), 0x3FC0);  // a bf16 number stays
    EXPECT_EQ(Fp32ToBf16Randomly(INFINITY, random), 0x7F80);
    EXPECT_EQ(Fp32ToBf16Randomly(std::bit_cast<float>(0x7FFFFFFFu), random), 0x7FFF);
    EXPECT_EQ(Fp32ToBf16Randomly(std::bit_cast<float>(0xFF800001u), random), 0xFFC0);
  }
}

// A second moment that grows by less than half a bf16 step per update: rounded at random it follows
// the double, rounded to nearest it never changes. Therefore random rounding is the default.
constexpr StateFormats kBf16Moments = {Format::kFp32, Format::kBf16, Format::kBf16};

TEST(StochasticRounding, SmallChangesAreNotLost) {
  constexpr uint64_t kCount = 4096, kSteps = 1000;
  const Kind kind = {Rule::kAdam, {OFFLOAD_FP32, OFFLOAD_BF16, kBf16Moments}};
  Coefficients c = AnyCoefficients();
  c.keep1 = 0.999f;
  c.weight1 = 0.001f;
  c.grad_factor = 1.0f;
  c.l2_decay = 0.0f;
  double exact = 1.0, mean[2] = {0, 0};
  for (uint64_t step = 0; step < kSteps; ++step) exact += 0.001 * (4.0 - exact);
  for (const bool stochastic : {false, true}) {
    Arrays arrays(kind, kCount, 1);
    const float two = 2.0f;
    for (uint64_t i = 0; i < kCount; ++i) {
      std::memcpy(static_cast<float*>(arrays.grad.data()) + i, &two, 4);
      static_cast<uint16_t*>(arrays.moment1.data())[i] = 0x3F80;  // 1
    }
    for (uint64_t step = 1; step <= kSteps; ++step) {
      const Rounding rounding = stochastic ? StochasticRounding(1, 2, step) : Rounding{};
      arrays.Update(ReferenceKernels(), c, rounding);
    }
    for (uint64_t i = 0; i < kCount; ++i)
      mean[stochastic] += arrays.Moment(arrays.moment1, i) / double{kCount};
  }
  EXPECT_NEAR(mean[true], exact, 0.003 * exact);
  EXPECT_EQ(mean[false], 1.0);
  EXPECT_GT(exact, 2.8);
}

TEST(StateLayouts, SumsInBf16StayFinite) {
  for (Rule rule : {Rule::kAdam, Rule::kAdagrad}) {
    for (const Rounding& rounding : Roundings()) {
      for (const KernelTable* table : SimdKernels()) {
        const Kind kind = {rule, {OFFLOAD_FP32, OFFLOAD_BF16, kBf16Moments}};
        Arrays arrays(kind, 40, 1);
        for (uint64_t i = 0; i < 40; ++i) {
          const float huge = i % 2 == 0 ? FLT_MAX : -1e30f;
          std::memcpy(static_cast<float*>(arrays.grad.data()) + i, &huge, 4);
        }
        Coefficients c = AnyCoefficients();
        c.grad_factor = 1.0f;
        c.weight1 = 0.99f;
        c.keep1 = 0.01f;
        for (int step = 0; step < 4; ++step) arrays.Update(*table, c, rounding);
        const Array& sum = rule == Rule::kAdam ? arrays.moment1 : arrays.moment0;
        for (uint64_t i = 0; i < 40; ++i) EXPECT_EQ(sum.at<uint16_t>(i), 0x7F7F);
      }
    }
  }
}

}  // namespace
}  // namespace hybridopt
