// The promises of every device with memory of its own about updates in state layouts other than
// fp32: the bits of the specification, for any alignment of the arrays, any order of the elements
// in their tensor, and any set of updates in one launch.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <limits>
#include <string>
#include <vector>

#include "../../devices.h"
#include "../../random.h"
#include "device_arrays.h"
#include "device_calls.h"
#include "kernels/kernels.h"

namespace hybridopt {
namespace {

constexpr float kGradFactor = 0.75f;
constexpr Coefficients kCoefficients[] = {
    {1, 0, 1e-4f, 1e-3f, 0.9f, 0.1f, 0.999f, 1e-3f, 3, 1e-8f, 0, 0},
    {-1, 1e-2f, 0, 1e-2f, 0.3f, 0.7f, 0.4f, 0.6f, 1.5f, 1e-30f, 0.9f, 1}};

std::vector<SpanTypes> AllTypes() {
  std::vector<SpanTypes> all;
  ForEachSpanTypes([&](const SpanTypes& types) { all.push_back(types); });
  return all;
}

std::string Text(const SpanTypes& types) {
  return RowOf(types.formats.master).name + std::string(" masters, ") +
         RowOf(types.formats.moment0).name + " moments, " + DtypeName(types.grad_dtype) +
         " gradient, " + DtypeName(types.param_dtype) + " param";
}

// The places of elements in their tensor: one run, runs that cross 2^32, and rows of every length
// compared with a quad and a tile.
constexpr ElementOrder kOrders[] = {
    {},
    {.first = 12'345},
    {.first = (uint64_t{7} << 32) - 5000},
    {.first = uint64_t{1} << 40, .row_length = 1, .row_stride = 3},
    {.first = 100, .row_length = 7, .row_stride = 7},
    {.first = 0, .row_length = 7, .row_stride = 100, .column = 3},
    {.first = (uint64_t{3} << 32) - 999, .row_length = 64, .row_stride = 1000, .column = 130},
    {.first = 5, .row_length = 1001, .row_stride = (uint64_t{1} << 31) + 3},
    {.first = 5, .row_length = 8192, .row_stride = 10'000, .column = 8190},
    {.first = 9,
     .row_length = uint64_t{1} << 33,
     .row_stride = uint64_t{1} << 34,
     .column = (uint64_t{1} << 33) - 777}};

// Elements of all kinds, including zeros, which other code has written over halves of masters;
// not_finite: NaN and infinity among them.
std::vector<std::byte> Numbers(int32_t dtype, uint64_t count, bool positive, bool not_finite,
                               Random& random) {
  std::vector<std::byte> array = AnyArray(dtype, count, random);
  const uint64_t bytes = DtypeBytes(dtype);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
  for (uint64_t i = 0; i < count; ++i)
    if (random.Below(8) == 0) std::memset(&array[i * bytes], 0, bytes - random.Below(2));
  for (uint64_t i = 0; not_finite && i < count; ++i) {
    if (random.Below(4) != 0) continue;
    const float value = std::vector<float>{kInfinity, -kInfinity, kNan, -kNan,
                                           std::numeric_limits<float>::max()}[random.Below(5)];
    uint32_t bits = std::bit_cast<uint32_t>(value);
    if (dtype == OFFLOAD_BF16) bits = Fp32ToBf16(value);
    if (dtype == OFFLOAD_FP16) bits = Fp32ToFp16(value);
    std::memcpy(&array[i * bytes], &bits, bytes);
  }
  for (uint64_t i = bytes - 1; positive && i < array.size(); i += bytes)
    array[i] &= std::byte{0x7f};
  return array;
}

// Updates on the device, compared with the same updates by the specification.
class Updates {
 public:
  Updates(Device& device, Rule rule, uint64_t seed) : device_(device), rule_(rule), random_(seed) {}

  void Add(const SpanTypes& types, uint64_t count, uint64_t skew, const Rounding& rounding,
           const ElementOrder& order, bool not_finite = false) {
    const FormatRow& masters = RowOf(types.formats.master);
    const auto add = [&](int32_t dtype, bool positive) -> SkewedArray& {
      return arrays_.emplace_back(device_, dtype, skew,
                                  arrays_.size() % 5 == 2 && masters.beside_param
                                      ? AnyArray(dtype, count, random_)
                                      : Numbers(dtype, count, positive, not_finite, random_));
    };
    const int32_t moment = RowOf(types.formats.moment0).view_dtype;
    SkewedArray& grad = add(types.grad_dtype, false);
    SkewedArray& param = add(types.param_dtype, false);
    SkewedArray& master = add(masters.view_dtype, false);
    SkewedArray& moment0 = add(moment, IsSumOfSquares(MomentOf(rule_, 0)));
    SkewedArray& moment1 = add(moment, true);
    const uint32_t which = updates_.size() % 2;
    const bool has_moment0 = MomentOf(rule_, 0) != kNoMoment;
    const bool has_moment1 = MomentOf(rule_, 1) != kNoMoment;
    updates_.push_back({{grad.device_data(), param.device_data(), master.device_data(),
                         has_moment0 ? moment0.device_data() : nullptr,
                         has_moment1 ? moment1.device_data() : nullptr, count, rounding, order},
                        types.grad_dtype,
                        types.param_dtype,
                        which,
                        types.formats});
    Coefficients scaled = kCoefficients[which];
    scaled.grad_factor *= kGradFactor;
    ReferenceKernels().Update(rule_, types)(
        scaled, {grad.host_data(), param.host_data(), master.host_data(),
                 has_moment0 ? moment0.host_data() : nullptr,
                 has_moment1 ? moment1.host_data() : nullptr, count, rounding, order});
  }

  // Launches them all at once and returns the differences.
  std::string Difference() {
    auto* const verdict = Upload(device_, std::vector<Verdict>{{1.0, 1.0, kGradFactor, 0}});
    EXPECT_TRUE(Ok(device_.Update(nullptr, {rule_, updates_, kCoefficients, verdict})));
    std::string difference;
    for (size_t i = 0; i < arrays_.size(); ++i) {
      const SkewedArray& array = arrays_[i];
      if (difference.empty() &&
          BitsOf(array.Now(device_), array.dtype) != BitsOf(array.image, array.dtype))
        difference = "array " + std::to_string(i % 5) + " of span " + std::to_string(i / 5) + ": " +
                     Text(updates_[i / 5].types());
      EXPECT_TRUE(Ok(device_.Free(array.block)));
    }
    EXPECT_TRUE(Ok(device_.Free(verdict)));
    return difference;
  }

 private:
  Device& device_;
  const Rule rule_;
  Random random_;
  std::deque<SkewedArray> arrays_;  // five of each update
  std::vector<DeviceUpdate> updates_;
};

class PortLayoutsTest : public AcceleratorTest {};

INSTANTIATE_TEST_SUITE_P(Devices, PortLayoutsTest, testing::ValuesIn(AcceleratorsUnderTest()),
                         [](const auto& info) { return std::string(DeviceText(info.param)); });

constexpr Rounding kNearest = {};
constexpr Rounding kTiesAway = {.ties_away = true};
constexpr Rounding kStochastic = {.stochastic = true, .key0 = 0x12345678, .key1 = 0x9abcdef0};
constexpr Rounding kBoth = {
    .stochastic = true, .ties_away = true, .key0 = 0xfedcba98, .key1 = 0x76543210};

// All settings that make a difference.
std::vector<Rounding> RoundingsOf(const SpanTypes& types) {
  std::vector<Rounding> roundings = {kNearest};
  const FormatRow& masters = RowOf(types.formats.master);
  const bool rounds = masters.is_rounded || RowOf(types.formats.moment0).is_rounded;
  if (rounds) roundings.push_back(kStochastic);
  if (types.param_dtype == OFFLOAD_BF16 && !masters.beside_param) {
    roundings.push_back(kTiesAway);
    if (rounds) roundings.push_back(kBoth);
  }
  return roundings;
}

// Every rule and mix of types; spans long enough for every path through a device's kernel, aligned
// for vectors and not.
TEST_P(PortLayoutsTest, UpdatesGiveTheBitsOfTheSpecification) {
  auto device = Make();
  uint64_t seed = 1;
  for (int32_t rule = 0; rule < kRuleCount; ++rule) {
    for (const SpanTypes& types : AllTypes()) {
      for (const Rounding& rounding : RoundingsOf(types)) {
        Updates updates(*device, Rule{rule}, ++seed);
        for (const auto& [count, skew] : std::vector<std::pair<uint64_t, uint64_t>>{
                 {8195, 0}, {2051, 0}, {5, 0}, {1033, 1}, {3, 3}, {2050, 2}, {1027, 4}})
          updates.Add(types, count, skew, rounding, {});
        ASSERT_EQ(updates.Difference(), "")
            << "rule " << rule << (rounding.stochastic ? ", stochastic" : "")
            << (rounding.ties_away ? ", ties away" : "");
      }
    }
  }
}

// The random bits are those of the element's index in its tensor.
TEST_P(PortLayoutsTest, RandomBitsFollowTheElementsOrder) {
  auto device = Make();
  for (int32_t rule = 0; rule < kRuleCount; ++rule) {
    for (const SpanTypes& types : AllTypes()) {
      if (types.grad_dtype != OFFLOAD_BF16 || types.param_dtype != OFFLOAD_BF16) continue;
      for (uint64_t skew : {0, 1}) {
        Updates updates(*device, Rule{rule}, 5);
        for (const ElementOrder& order : kOrders)
          updates.Add(types, 10'007, skew, kStochastic, order);
        ASSERT_EQ(updates.Difference(), "") << "rule " << rule << ", skew " << skew;
      }
    }
  }
}

// Any mixture of layouts, dtypes, roundings and orders, in any sequence.
TEST_P(PortLayoutsTest, AllKindsGoInOneLaunch) {
  auto device = Make();
  Random random(3);
  for (int32_t rule = 0; rule < kRuleCount; ++rule) {
    std::vector<SpanTypes> types = AllTypes();
    Updates updates(*device, Rule{rule}, 17);
    for (int round = 0; round < 3; ++round) {
      random.Shuffle(types);
      for (const SpanTypes& each : types) {
        const std::vector<Rounding> roundings = RoundingsOf(each);
        updates.Add(each, random.Below(50) == 0 ? 9000 : random.Below(40), random.Below(5),
                    roundings[random.Below(roundings.size())],
                    kOrders[random.Below(std::size(kOrders))]);
      }
    }
    ASSERT_EQ(updates.Difference(), "") << "rule " << rule;
  }
}

// NaN stays NaN and infinity is rounded to itself, but sums of squares stay finite.
TEST_P(PortLayoutsTest, NanAndInfinityGoThroughAsSpecified) {
  auto device = Make();
  for (int32_t rule = 0; rule < kRuleCount; ++rule) {
    for (const SpanTypes& types : AllTypes()) {
      Updates updates(*device, Rule{rule}, 23);
      for (uint64_t skew : {0, 1})
        for (const Rounding& rounding : {kNearest, kBoth})
          updates.Add(types, 1500, skew, rounding, {.first = 77}, true);
      ASSERT_EQ(updates.Difference(), "") << "rule " << rule;
    }
  }
}

}  // namespace
}  // namespace hybridopt
