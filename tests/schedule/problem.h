// The training problem of the programs: three params, gradients that depend only on the number of
// steps, and the expected bits after each number of steps. A trainer on the host device computes
// these step by step, waiting for each, without the scheduler. So the state of an optimizer is one
// number.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "offload.h"

namespace hybridopt::schedule {

using Bytes = std::vector<unsigned char>;

constexpr uint32_t kParams = 3;
constexpr uint64_t kCounts[kParams] = {1500, 3, 1100};
constexpr uint64_t kStepsMax = 12;
constexpr uint32_t kWorldMax = 3;
constexpr uint32_t kVariants = 4;
constexpr uint64_t kCommTimeoutNs = 1'000'000'000;

template <typename Struct>
Struct Make() {
  Struct value{};
  value.struct_size = sizeof(Struct);
  return value;
}

inline int32_t DtypeOf(uint32_t param) { return param % 2 == 0 ? OFFLOAD_BF16 : OFFLOAD_FP32; }
inline int32_t GradDtypeOf(uint32_t param) { return param % 2 == 0 ? OFFLOAD_FP32 : OFFLOAD_BF16; }
inline uint64_t BytesOf(int32_t dtype) { return dtype == OFFLOAD_BF16 ? 2 : 4; }
inline uint64_t DataBytes(uint32_t param) { return kCounts[param] * BytesOf(DtypeOf(param)); }
inline uint64_t GradBytes(uint32_t param) { return kCounts[param] * BytesOf(GradDtypeOf(param)); }

// Numbers in +-0.1, the same ones for every HYBRIDOPT_TEST_SEED.
inline Bytes Pattern(uint64_t count, int32_t dtype, uint64_t seed) {
  Bytes bytes(count * BytesOf(dtype));
  uint64_t state = seed * 0x9e3779b97f4a7c15 + 1;
  for (uint64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005 + 1442695040888963407;
    const float value = (static_cast<float>(state >> 40) - 8388608.0f) / 83886080.0f;
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    if (dtype == OFFLOAD_BF16) bits >>= 16;
    std::memcpy(&bytes[i * BytesOf(dtype)], &bits, BytesOf(dtype));
  }
  return bytes;
}

inline Bytes InitialData(uint32_t rank, uint32_t param) {
  return Pattern(kCounts[param], DtypeOf(param), 77 + 10 * rank + param);
}
// The gradient of the step that follows `steps` steps.
inline Bytes Gradient(uint32_t rank, uint32_t param, uint64_t steps) {
  return Pattern(kCounts[param], GradDtypeOf(param), 1000 + 100 * steps + 10 * rank + param);
}

inline offload_optimizer_options_t OptimizerOptions(uint32_t variant) {
  auto options = Make<offload_optimizer_options_t>();
  options.algorithm = OFFLOAD_ADAMW;
  options.chunk_elements = 1024;
  if (variant % 2 == 1) {
    options.master_layout = OFFLOAD_MASTER_SPLIT;
    options.moment_dtype = OFFLOAD_BF16;
    options.rounding_seed = 7;
  }
  return options;
}

// The first variants clip in each step, the others never clip.
inline double NormMax(uint32_t variant) { return variant < 2 ? 1 : 1000; }

inline offload_group_t Group() {
  auto group = Make<offload_group_t>();
  group.lr = 0.01;
  group.weight_decay = 0.1;
  group.beta1 = 0.9;
  group.beta2 = 0.999;
  group.eps = 1e-8;
  return group;
}

// The expected content of a rank after a number of steps: for each param its bits, and the bits of
// its states with their step counts.
struct Expected {
  Bytes data[kParams];
  Bytes states[kParams];
};
const Expected& ExpectedAfter(uint32_t variant, uint32_t world, uint32_t rank, uint64_t steps);

// The states of a param, element by element wherever they lie, and its step count. `read` copies
// from the device.
template <typename Read>
Bytes StatesOf(offload_optimizer_t optimizer, uint32_t param, Read&& read) {
  Bytes states;
  for (int32_t kind = OFFLOAD_STATE_MASTER; kind <= OFFLOAD_STATE_MASTER_LOW; ++kind) {
    auto view = Make<offload_state_view_t>();
    if (offload_optimizer_state(optimizer, param, kind, &view) != OFFLOAD_OK) continue;
    const uint64_t unit = view.dtype == OFFLOAD_FP32 ? 4 : 2;
    if (view.device_count > 0) {
      const Bytes part = read(view.device_data, view.device_count * unit);
      states.insert(states.end(), part.begin(), part.end());
    }
    const auto* host = static_cast<const unsigned char*>(view.host_data);
    if (view.host_count > 0) states.insert(states.end(), host, host + view.host_count * unit);
    const auto* count = reinterpret_cast<const unsigned char*>(&view.step_count);
    states.insert(states.end(), count, count + sizeof(view.step_count));
  }
  return states;
}

}  // namespace hybridopt::schedule
