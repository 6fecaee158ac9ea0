// A random training problem, drawn from a seed: params of every combination of dtypes and awkward
// counts, and the inputs of each step: gradients (some missing), hyperparameters, loss scale,
// clipping.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../random.h"
#include "../scale.h"
#include "kernels/convert.h"
#include "kernels/kernels.h"
#include "offload.h"

namespace hybridopt {

using Bytes = std::vector<std::byte>;

inline constexpr int32_t kDtypes[] = {OFFLOAD_FP32, OFFLOAD_BF16, OFFLOAD_FP16};

// enum offload_algorithm: all that update elements. muon_test.cpp has matrices.
inline constexpr auto kAlgorithmValues = [] {
  std::array<int32_t, std::size(kAlgorithms) - 1> values{};
  size_t count = 0;
  for (const Algorithm& row : kAlgorithms)
    if (!IsOfMatrices(row.value)) values[count++] = row.value;
  return values;
}();
// Stands for an algorithm where each group has its own: see kMixture.
inline constexpr int32_t kMixed = -1;
// Those of the groups. The first one names none and has that of the options.
inline constexpr int32_t kMixture[] = {OFFLOAD_ADAMW, OFFLOAD_ADAGRAD, OFFLOAD_SGD};
inline constexpr auto kAlgorithmsAndMixed = [] {
  std::array<int32_t, kAlgorithmValues.size() + 1> values{};
  std::copy(kAlgorithmValues.begin(), kAlgorithmValues.end(), values.begin());
  values.back() = kMixed;
  return values;
}();
inline std::string AlgorithmText(int32_t algorithm) {
  return algorithm == kMixed ? "Mixed" : AlgorithmOf(algorithm)->name;
}
// The algorithms take turns from seed to seed.
inline int32_t AlgorithmOfSeed(uint64_t seed) {
  return kAlgorithmValues[seed % kAlgorithmValues.size()];
}

struct ParamSpec {
  int32_t dtype;
  int32_t grad_dtype;
  int32_t placement;
  uint32_t group;
  uint64_t count;

  uint64_t data_bytes() const { return count * DtypeBytes(dtype); }
  uint64_t grad_bytes() const { return count * DtypeBytes(grad_dtype); }
  std::string Text() const {
    return std::string(DtypeName(dtype)) + " param, " + DtypeName(grad_dtype) + " grad, " +
           std::to_string(count) + " elements";
  }
};

struct StepInput {
  std::vector<std::optional<Bytes>> grads;  // per param; none = NULL
  std::vector<offload_group_t> groups;
  uint32_t flags = 0;
  double grad_scale = 0;
  double grad_norm_max = 0;
};

// How state is stored; the default is all fp32.
struct StateChoice {
  int32_t master_layout = OFFLOAD_MASTER_FP32;
  int32_t moment_dtype = 0;
  int32_t moment_rounding = OFFLOAD_ROUND_STOCHASTIC;
  uint64_t rounding_seed = 0;

  bool bf16() const { return moment_dtype == OFFLOAD_BF16; }
  bool split() const { return master_layout != OFFLOAD_MASTER_FP32; }  // beside bf16 params
  bool split24() const { return master_layout == OFFLOAD_MASTER_SPLIT24; }
  bool random() const {
    return (bf16() || split24()) && moment_rounding == OFFLOAD_ROUND_STOCHASTIC;
  }
  void Put(offload_optimizer_options_t& options) const {
    options.master_layout = master_layout;
    options.moment_dtype = moment_dtype;
    options.moment_rounding = moment_rounding;
    options.rounding_seed = rounding_seed;
  }
  std::string Text() const {
    return std::string(split24() ? "24-bit masters"
                       : split() ? "split masters"
                                 : "fp32 masters") +
           (bf16() ? ", bf16 moments" : ", fp32 moments") +
           (random()              ? " at random"
            : bf16() || split24() ? " to nearest"
                                  : "");
  }
};

// All of them.
inline std::vector<StateChoice> StateChoices() {
  std::vector<StateChoice> choices;
  for (int32_t master : {OFFLOAD_MASTER_FP32, OFFLOAD_MASTER_SPLIT}) {
    choices.push_back({master, 0, 0, 0});
    choices.push_back({master, OFFLOAD_BF16, OFFLOAD_ROUND_STOCHASTIC, 77});
    choices.push_back({master, OFFLOAD_BF16, OFFLOAD_ROUND_NEAREST, 0});
  }
  for (int32_t moments : {0, int32_t{OFFLOAD_BF16}}) {
    choices.push_back({OFFLOAD_MASTER_SPLIT24, moments, OFFLOAD_ROUND_STOCHASTIC, 77});
    choices.push_back({OFFLOAD_MASTER_SPLIT24, moments, OFFLOAD_ROUND_NEAREST, 0});
  }
  return choices;
}

struct Problem {
  int32_t algorithm;                    // enum offload_algorithm, or kMixed
  std::vector<offload_group_t> groups;  // at commit
  std::vector<ParamSpec> params;
  std::vector<Bytes> initial;  // per param
  std::vector<StepInput> steps;
  StateChoice state = {};

  int32_t AlgorithmOfGroup(uint32_t group) const {
    return algorithm == kMixed ? kMixture[group] : algorithm;
  }
  int32_t AlgorithmOfParam(size_t id) const { return AlgorithmOfGroup(params[id].group); }
};

// ------------------------------------------------------------------------------------ elements --

inline void PutElement(Bytes& array, int32_t dtype, uint64_t index, uint32_t bits) {
  std::memcpy(array.data() + index * DtypeBytes(dtype), &bits, DtypeBytes(dtype));
}

inline uint32_t BitsOf(int32_t dtype, float value) {
  if (dtype == OFFLOAD_BF16) return Fp32ToBf16(value);
  if (dtype == OFFLOAD_FP16) return Fp32ToFp16(value);
  return std::bit_cast<uint32_t>(value);
}

inline uint32_t SignBit(int32_t dtype) { return dtype == OFFLOAD_FP32 ? 0x80000000 : 0x8000; }

inline uint32_t RandomDenormal(int32_t dtype, Random& random) {
  const uint32_t mantissas = dtype == OFFLOAD_FP32 ? 1u << 23 : dtype == OFFLOAD_BF16 ? 128 : 1024;
  return 1 + static_cast<uint32_t>(random.Below(mantissas - 1));
}

// Ordinary numbers, with zeros and denormals of both signs among them. Huge numbers stay so far
// below overflow that no state becomes Inf, because it is not specified which NaN an operation with
// Inf then makes.
inline uint32_t RandomBits(int32_t dtype, bool huge, Random& random) {
  const uint32_t sign = random.OneIn(2) ? SignBit(dtype) : 0;
  switch (random.Below(16)) {
    case 0:
      return sign;
    case 1:
      return sign | RandomDenormal(dtype, random);
    case 2:
      if (!huge) break;
      return sign |
             BitsOf(dtype, dtype == OFFLOAD_FP16 ? 65504.0f
                                                 : static_cast<float>(random.Between(1e36, 1e37)));
    case 3:  // far apart in magnitude
      return sign | BitsOf(dtype, std::exp2(static_cast<float>(random.Between(-40, 10))));
  }
  return sign | BitsOf(dtype, static_cast<float>(random.Between(0.01, 2)));
}

inline Bytes RandomArray(int32_t dtype, uint64_t count, bool huge, Random& random) {
  Bytes array(count * DtypeBytes(dtype));
  for (uint64_t i = 0; i < count; ++i) PutElement(array, dtype, i, RandomBits(dtype, huge, random));
  return array;
}

// ------------------------------------------------------------------------------------- problems --

// Groups 0, 1 and 2 differ in their flags; the numbers are random. The first groups of a problem
// (`first`) decide which SGD groups have a momentum_buffer.
inline offload_group_t RandomGroup(int32_t algorithm, uint32_t index, bool first, Random& random) {
  offload_group_t group{};
  group.struct_size = sizeof(group);
  group.maximize = index == 1;
  group.lr = random.Between(1e-4, 1e-1);
  group.weight_decay = random.OneIn(3) ? 0 : random.Between(0, 0.1);
  const bool adam = algorithm == OFFLOAD_ADAMW || algorithm == OFFLOAD_ADAM;
  if (adam || algorithm == OFFLOAD_LION) {
    group.beta1 = random.OneIn(4) ? 0 : random.Between(0.3, 0.99);
    group.beta2 = random.Between(0.4, 0.9999);
  }
  if (adam || algorithm == OFFLOAD_ADAGRAD) group.eps = random.Between(1e-10, 1e-4);
  if (algorithm == OFFLOAD_ADAGRAD) {
    group.lr_decay = random.Between(0, 0.1);
    group.initial_accumulator_value = index == 0 ? 0 : random.Between(0.01, 1);
  }
  if (algorithm == OFFLOAD_ADAMW && index == 2) group.cautious_weight_decay = !random.OneIn(3);
  if (algorithm == OFFLOAD_SIGNUM) group.momentum = random.OneIn(4) ? 0 : random.Between(0.3, 0.99);
  if (algorithm == OFFLOAD_SGD && index != 1) {
    // Momentum may fall to 0 after commit, and keeps its buffer.
    group.momentum = !first && random.OneIn(4) ? 0 : random.Between(0.5, 0.99);
    group.nesterov = index == 2 && group.momentum > 0;
    group.dampening = index == 0 && group.momentum > 0 ? random.Between(0, 0.9) : 0;
  }
  return group;
}

inline constexpr uint32_t kGroupCount = 3;

inline std::vector<offload_group_t> RandomGroups(int32_t algorithm, bool first, Random& random) {
  std::vector<offload_group_t> groups;
  for (uint32_t i = 0; i < kGroupCount; ++i) {
    const int32_t own = algorithm == kMixed ? kMixture[i] : algorithm;
    groups.push_back(RandomGroup(own, i, first, random));
    if (algorithm == kMixed && i > 0) groups.back().algorithm = own;
  }
  return groups;
}

// Kinds of steps take turns: norm without clipping; loss scale and clipping; ASSUME_FINITE.
inline StepInput RandomStep(const Problem& problem, size_t number, Random& random) {
  StepInput input;
  input.groups = number == 0 ? problem.groups : RandomGroups(problem.algorithm, false, random);
  const size_t kind = number % 3;
  if (kind == 1) {
    input.grad_scale = random.OneIn(2) ? 1024 : 3;
    input.grad_norm_max = random.Between(0.1, 2);
  }
  if (kind == 2) input.flags = OFFLOAD_STEP_ASSUME_FINITE;
  const bool huge = kind != 1;  // the clip factor would make all other gradients 0
  for (const ParamSpec& param : problem.params) {
    input.grads.emplace_back();
    if (random.OneIn(8)) continue;
    input.grads.back() = RandomArray(param.grad_dtype, param.count, huge, random);
  }
  return input;
}

// Params of these counts, of random dtypes.
inline std::vector<ParamSpec> SpecsOf(const std::vector<uint64_t>& counts, Random& random) {
  std::vector<ParamSpec> params;
  for (uint64_t count : counts)
    params.push_back(
        {kDtypes[random.Below(3)], kDtypes[random.Below(3)], OFFLOAD_PLACE_AUTO, 0, count});
  return params;
}

// Params as given, in random order and groups, with random values and steps.
inline Problem RandomProblem(int32_t algorithm, std::vector<ParamSpec> params, size_t steps,
                             uint64_t seed) {
  Random random(seed);
  Problem problem;
  problem.algorithm = algorithm;
  problem.groups = RandomGroups(algorithm, true, random);
  random.Shuffle(params);
  problem.params = std::move(params);
  for (ParamSpec& param : problem.params) {
    param.group = static_cast<uint32_t>(random.Below(kGroupCount));
    problem.initial.push_back(RandomArray(param.dtype, param.count, true, random));
  }
  for (size_t i = 0; i < steps; ++i) problem.steps.push_back(RandomStep(problem, i, random));
  return problem;
}

// Every param dtype with every gradient dtype, each at a small and at a larger count: 0, 1, around
// a SIMD register and a worker's grain, primes, across the norm's blocks, several chunks of 1024.
inline std::vector<ParamSpec> AllDtypePairs() {
  constexpr uint64_t kSmall[] = {0, 1, 31, 32, 33, 63, 65, 7, 16};
  constexpr uint64_t kLarge[] = {997, 1024, 4099, 2048, 129, 3001, 1021, 4096, 257};
  std::vector<ParamSpec> params;
  size_t i = 0;
  for (int32_t dtype : kDtypes) {
    for (int32_t grad_dtype : kDtypes) {
      params.push_back({dtype, grad_dtype, OFFLOAD_PLACE_AUTO, 0, kSmall[i]});
      params.push_back({dtype, grad_dtype, OFFLOAD_PLACE_AUTO, 0, kLarge[i]});
      ++i;
    }
  }
  return params;
}

}  // namespace hybridopt
