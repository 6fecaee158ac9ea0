// Compares the elements that an update notes as changed with those that it has changed: on every
// instruction set, for every source of old params, and for bits that begin anywhere.
#include "kernels/changes/changes.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "../../random.h"
#include "kernels/convert.h"
#include "kernels/stochastic_rounding.h"

namespace hybridopt {
namespace {

std::vector<const KernelTable*> AllTables() {
  std::vector<const KernelTable*> tables(SimdKernels().begin(), SimdKernels().end());
  tables.push_back(&ReferenceKernels());
  return tables;
}

// Counts around a unit of every instruction set, around a word of bits, and around the elements
// that are handled together.
constexpr uint64_t kCounts[] = {1,   7,   15,  16,   33,   63,   64,   65,  127,
                                511, 512, 513, 1000, 4095, 4096, 4097, 8300};
constexpr uint64_t kFirstBits[] = {0, 1, 31, 63, 64, 100};
constexpr uint64_t kWords = 140;

// SGD without momentum over one param: master -= lr * grad.
struct Update {
  Update(int32_t dtype, Format master_format, uint64_t count, Random& random)
      : types{OFFLOAD_FP32, dtype, {master_format, Format::kFp32, Format::kFp32}},
        grad(count),
        param(count * DtypeBytes(dtype)),
        master(count * 4) {
    std::vector<float> values(count);
    for (uint64_t i = 0; i < count; ++i) {
      values[i] = static_cast<float>(random.Between(-2, 2));
      if (random.OneIn(40)) values[i] = std::bit_cast<float>(0x7FC00000u | random.Bits());  // NaN
      if (random.OneIn(40)) values[i] = 0;
      // Most updates are too small for params of 16 bits, and some change nothing at all.
      grad[i] = random.OneIn(3) ? 0 : static_cast<float>(random.Between(-3e-3, 3e-3));
      if (random.OneIn(20)) grad[i] = 1;
      if (random.OneIn(50)) grad[i] = std::numeric_limits<float>::quiet_NaN();
    }
    const auto* const from = reinterpret_cast<const std::byte*>(values.data());
    RowOf(master_format).encode(from, count, master.data());
    for (uint64_t i = 0; i < count; ++i) {
      uint32_t bits = 0;
      std::memcpy(&bits, &values[i], 4);
      if (RowOf(master_format).beside_param)
        bits = Fp32ToBf16TiesAway(values[i]);
      else if (dtype == OFFLOAD_BF16)
        bits = Fp32ToBf16(values[i]);
      else if (dtype == OFFLOAD_FP16)
        bits = Fp32ToFp16(values[i]);
      std::memcpy(param.data() + i * DtypeBytes(dtype), &bits, DtypeBytes(dtype));
    }
    span = {grad.data(), param.data(), master.data(), nullptr, nullptr, count};
    span.rounding.ties_away = RowOf(master_format).beside_param;
    coefficients.grad_factor = 1;
    coefficients.step_size = 1;
  }

  SpanTypes types;
  std::vector<float> grad;
  std::vector<std::byte> param;
  std::vector<std::byte> master;
  UpdateSpan span;
  Coefficients coefficients{};
};

bool BitAt(const std::vector<uint64_t>& words, uint64_t bit) {
  return (words[bit / 64] >> (bit % 64) & 1) != 0;
}

struct Case {
  int32_t dtype;
  Format master;
  bool in_rows = false;  // a shard whose rows are rounded at random, each by indices of its own
};
constexpr Case kCases[] = {
    {OFFLOAD_FP32, Format::kFp32},    {OFFLOAD_BF16, Format::kFp32},
    {OFFLOAD_FP16, Format::kFp32},    {OFFLOAD_BF16, Format::kSplit},
    {OFFLOAD_BF16, Format::kSplit24}, {OFFLOAD_BF16, Format::kSplit24, true}};

void CheckOne(const KernelTable& table, const Case& one, uint64_t count, uint64_t first_bit,
              uint64_t seed) {
  Random random(seed);
  Update noted(one.dtype, one.master, count, random), plain = noted;
  if (one.in_rows) {
    noted.span.rounding = plain.span.rounding = StochasticRounding(seed, 2, 3);
    noted.span.order = plain.span.order = {7, 37, 100, 5};
  }
  plain.span.param = plain.param.data();
  plain.span.master = plain.master.data();
  noted.span.param = noted.param.data();
  noted.span.master = noted.master.data();
  const std::vector<std::byte> before = noted.param, old_master = noted.master;
  std::vector<uint64_t> words(kWords, 0);
  words[first_bit / 64] = uint64_t{1} << (first_bit % 64);  // a bit that is set already stays
  UpdateAndNote(table, Rule::kSgdPlain, noted.types, noted.coefficients, noted.span,
                {words.data(), first_bit});
  table.Update(Rule::kSgdPlain, plain.types)(plain.coefficients, plain.span);
  const std::string where = std::string(table.isa) + ", " + DtypeName(one.dtype) + ", format " +
                            RowOf(one.master).name + ", " + std::to_string(count) +
                            " elements from bit " + std::to_string(first_bit);
  ASSERT_TRUE(noted.param == plain.param && noted.master == plain.master) << where;
  const uint64_t bytes = DtypeBytes(one.dtype);
  // NaN and the ties of bf16 count as changed where masters are rounded to 16 bits.
  const bool rounds = one.dtype != OFFLOAD_FP32 && !RowOf(one.master).beside_param;
  const auto is_special = [&](float value) {
    return std::isnan(value) || (one.dtype == OFFLOAD_BF16 && IsTieOfBf16(value));
  };
  for (uint64_t bit = 0; bit < kWords * 64; ++bit) {
    const bool inside = bit >= first_bit && bit < first_bit + count;
    const uint64_t at = (bit - first_bit) * bytes;
    const bool changed =
        bit == first_bit ||
        (inside && std::memcmp(before.data() + at, noted.param.data() + at, bytes) != 0);
    if (inside && rounds && !changed) {
      float old = 0, now = 0;
      std::memcpy(&old, old_master.data() + 4 * (bit - first_bit), 4);
      std::memcpy(&now, noted.master.data() + 4 * (bit - first_bit), 4);
      if (is_special(old) || is_special(now)) continue;
    }
    ASSERT_EQ(BitAt(words, bit), changed) << where << ", bit " << bit;
  }
}

TEST(ChangesTest, EachChangedElementHasABitAndNoOtherHas) {
  uint64_t seed = 0;
  for (const KernelTable* table : AllTables())
    for (const Case& one : kCases)
      for (uint64_t count : kCounts)
        for (uint64_t first_bit : kFirstBits) CheckOne(*table, one, count, first_bit, ++seed);
}

// The bits of an update with a learning rate of 1, from a place of their own.
std::vector<uint64_t> BitsOf(const KernelTable& table, Rule rule, int32_t dtype,
                             const UpdateSpan& span) {
  std::vector<uint64_t> words(2, 0);
  Coefficients coefficients{};
  coefficients.grad_factor = coefficients.step_size = 1;
  UpdateAndNote(table, rule, {OFFLOAD_FP32, dtype, {}}, coefficients, span, {words.data(), 0});
  return words;
}

// With eps 0 a rule makes NaN of the zeros behind the last element, with which vectors are filled
// up.
TEST(ChangesTest, NothingBehindTheLastElementIsNoted) {
  for (const KernelTable* table : AllTables())
    for (uint64_t count = 1; count < 40; ++count) {
      std::vector<float> grad(count, 1.0f), master(count, 1.0f), sum(count, 0.0f);
      std::vector<uint16_t> param(count, 0x3F80);
      const UpdateSpan span{grad.data(), param.data(), master.data(), sum.data(), nullptr, count};
      const std::vector<uint64_t> words = BitsOf(*table, Rule::kAdagrad, OFFLOAD_BF16, span);
      EXPECT_EQ(words[0], (uint64_t{1} << count) - 1) << table->isa << ", " << count;
      EXPECT_EQ(words[1], 0u) << table->isa << ", " << count;
    }
}

// Checks that the updates change some elements, but not all.
TEST(ChangesTest, TheUpdatesOfThisTestChangeSomeElements) {
  Random random(1);
  Update update(OFFLOAD_BF16, Format::kFp32, 1000, random);
  const std::vector<std::byte> before = update.param;
  ReferenceKernels().Update(Rule::kSgdPlain, update.types)(update.coefficients, update.span);
  uint64_t changed = 0;
  for (uint64_t i = 0; i < 1000; ++i)
    changed += std::memcmp(before.data() + 2 * i, update.param.data() + 2 * i, 2) != 0;
  EXPECT_GT(changed, 50u);
  EXPECT_LT(changed, 900u);
}

// Other code may have rounded the master in the other direction. Then a step changes the param even
// if the master stays.
TEST(ChangesTest, AMasterThatIsATieCountsAsChanged) {
  for (const KernelTable* table : AllTables()) {
    std::vector<float> grad(100, 0.0f), master(100, 1.0f);
    std::vector<uint16_t> param(100, 0x3F80);
    master[70] = std::bit_cast<float>(0x3F808000u);
    param[70] = 0x3F81;
    const UpdateSpan span{grad.data(), param.data(), master.data(), nullptr, nullptr, 100};
    const std::vector<uint64_t> words = BitsOf(*table, Rule::kSgdPlain, OFFLOAD_BF16, span);
    EXPECT_EQ(param[70], 0x3F80) << table->isa;
    EXPECT_EQ(words[0], 0u) << table->isa;
    EXPECT_EQ(words[1], uint64_t{1} << 6) << table->isa;
  }
}

// Other code may have stored a NaN with other bits than those to which the master is rounded.
TEST(ChangesTest, NanCountsAsChanged) {
  for (const KernelTable* table : AllTables())
    for (const int32_t dtype : {int32_t{OFFLOAD_BF16}, int32_t{OFFLOAD_FP16}}) {
      std::vector<float> grad(100, 0.0f), master(100, 1.0f);
      const bool bf16 = dtype == OFFLOAD_BF16;
      std::vector<uint16_t> param(100, bf16 ? Fp32ToBf16(1) : Fp32ToFp16(1));
      master[70] = master[98] = std::numeric_limits<float>::quiet_NaN();
      param[70] = param[98] = bf16 ? 0x7F81 : 0x7C01;  // signalling
      const UpdateSpan span{grad.data(), param.data(), master.data(), nullptr, nullptr, 100};
      const std::vector<uint64_t> words = BitsOf(*table, Rule::kSgdPlain, dtype, span);
      EXPECT_NE(param[70], bf16 ? 0x7F81 : 0x7C01) << table->isa;
      EXPECT_EQ(words[0], 0u) << table->isa;
      EXPECT_EQ(words[1], uint64_t{1} << 6 | uint64_t{1} << 34) << table->isa;
    }
}

TEST(ChangesTest, FollowingNotesWhatOtherCodeHasWritten) {
  for (const KernelTable* table : AllTables()) {
    for (int32_t dtype : {int32_t{OFFLOAD_BF16}, int32_t{OFFLOAD_FP16}}) {
      std::vector<float> master(5000, 1.0f);
      std::vector<uint16_t> param(5000, dtype == OFFLOAD_BF16 ? Fp32ToBf16(1) : Fp32ToFp16(1));
      param[3] += 1;
      param[4900] += 1;
      std::vector<uint64_t> words(80, 0), expected(80, 0);
      for (uint64_t bit : {5 + 3, 5 + 4900}) expected[bit / 64] |= uint64_t{1} << (bit % 64);
      FollowAndNote(*table, dtype, param.data(), 5000, master.data(), {words.data(), 5});
      EXPECT_EQ(words, expected) << table->isa;
      EXPECT_NE(master[3], 1.0f) << table->isa;
      EXPECT_EQ(master[4], 1.0f) << table->isa;
    }
  }
}

}  // namespace
}  // namespace hybridopt
