// network.h: the model of 09_zero1, element by element, in code that both CPUs and GPUs run. Two
// layers learn a function of three of their inputs. Each sum has a fixed order, so that the same
// micro-batch gives the same bits on whichever rank computes it.
#ifndef HYBRIDOPT_EXAMPLES_ZERO1_NETWORK_H
#define HYBRIDOPT_EXAMPLES_ZERO1_NETWORK_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define ANY_DEVICE __host__ __device__
#else
#define ANY_DEVICE
#endif

inline constexpr uint64_t kInputs = 16, kHidden = 256, kSamples = 32;

// The params follow each other in one flat array of bf16.
struct Tensor {
  const char* name;
  int64_t rows, columns;
};
inline constexpr Tensor kTensors[] = {{"hidden.weight", kHidden, kInputs},
                                      {"hidden.bias", 1, kHidden},
                                      {"out.weight", 1, kHidden},
                                      {"out.bias", 1, 1}};
inline constexpr uint64_t kHiddenBias = kHidden * kInputs, kOutWeight = kHiddenBias + kHidden,
                          kOutBias = kOutWeight + kHidden, kElements = kOutBias + 1;

ANY_DEVICE inline float value(uint16_t bf16) {
  const uint32_t bits = static_cast<uint32_t>(bf16) << 16;
  float number;
  memcpy(&number, &bits, sizeof number);
  return number;
}

// Input i of a sample: from -1 to 1, drawn from a hash of its place (splitmix64).
ANY_DEVICE inline float input(uint64_t micro_batch, uint64_t sample, uint64_t i) {
  uint64_t z = ((micro_batch * kSamples + sample) * kInputs + i + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return static_cast<float>((z ^ (z >> 31)) >> 40) * 0x1p-23f - 1;
}

ANY_DEVICE inline float target(uint64_t micro_batch, uint64_t sample) {
  return input(micro_batch, sample, 0) * input(micro_batch, sample, 1) +
         0.5f * input(micro_batch, sample, 2);
}

// The memory of one micro-batch: what it reads, what it leaves.
struct MicroBatch {
  const uint16_t* params;  // [kElements], bf16
  float* hidden;           // [kSamples][kHidden]
  float* errors;           // [kSamples]
  float* grads;            // [kElements]
  uint64_t number;
};

// The passes, each with one independent element per call.
struct HiddenPass {
  MicroBatch m;
  ANY_DEVICE void operator()(uint64_t i) const {
    const uint64_t sample = i / kHidden, unit = i % kHidden;
    float sum = value(m.params[kHiddenBias + unit]);
    for (uint64_t j = 0; j < kInputs; ++j)
      sum += value(m.params[unit * kInputs + j]) * input(m.number, sample, j);
    m.hidden[i] = tanhf(sum);
  }
};

struct ErrorPass {
  MicroBatch m;
  ANY_DEVICE void operator()(uint64_t sample) const {
    float sum = value(m.params[kOutBias]);
    for (uint64_t unit = 0; unit < kHidden; ++unit)
      sum += value(m.params[kOutWeight + unit]) * m.hidden[sample * kHidden + unit];
    m.errors[sample] = sum - target(m.number, sample);
  }
};

// The gradient of the mean squared error for element i of the params.
struct GradientPass {
  MicroBatch m;
  ANY_DEVICE void operator()(uint64_t i) const {
    const bool weight = i < kHiddenBias, bias = !weight && i < kOutWeight;
    const uint64_t unit = weight ? i / kInputs : (i - kHiddenBias) % kHidden;
    float sum = 0;
    for (uint64_t sample = 0; sample < kSamples; ++sample) {
      const float hidden = m.hidden[sample * kHidden + unit];
      float slope = m.errors[sample];
      if (weight || bias) slope *= value(m.params[kOutWeight + unit]) * (1 - hidden * hidden);
      if (weight) slope *= input(m.number, sample, i % kInputs);
      if (!weight && !bias && i < kOutBias) slope *= hidden;
      sum += slope;
    }
    m.grads[i] = sum * (2.0f / kSamples);
  }
};

struct AddPass {
  float* sum;
  const float* other;
  ANY_DEVICE void operator()(uint64_t i) const { sum[i] += other[i]; }
};

// Forward and backward. run(count, pass) calls pass(0) to pass(count - 1), in any order.
template <typename Run>
void forward_backward(const MicroBatch& m, Run run) {
  run(kSamples * kHidden, HiddenPass{m});
  run(kSamples, ErrorPass{m});
  run(kElements, GradientPass{m});
}

#endif  // HYBRIDOPT_EXAMPLES_ZERO1_NETWORK_H
