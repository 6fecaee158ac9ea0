// policy.h: something small to generate with and to learn, so that real bits flow in each phase.
//
// The policy is a stack of square matrices; each has to learn to shift a prompt of +1 and -1 by one
// place. Nothing here knows of hybridopt.
#ifndef HYBRIDOPT_EXAMPLES_RL_CYCLE_POLICY_H
#define HYBRIDOPT_EXAMPLES_RL_CYCLE_POLICY_H

#include <vector>

#include "../numbers.h"

inline constexpr int kLayers = 16, kWidth = 256, kTokens = 512, kTrainSteps = 4;
inline constexpr int kBatch = kTokens / kTrainSteps;  // tokens a train step learns from
inline constexpr uint64_t kLayerCount = kWidth * kWidth, kParamCount = kLayers * kLayerCount;
inline constexpr uint64_t kCacheBytes = sizeof(float) * kTokens * kLayers * kWidth;

// The same prompts on every run, new ones in every iteration.
struct Prompts {
  float values[kTokens][kWidth];
  explicit Prompts(int iteration) {
    Random random{static_cast<uint64_t>(iteration)};
    for (auto& prompt : values)
      for (float& value : prompt) value = random.next() >> 63 ? 1.0f : -1.0f;
  }
  float target(int token, int place) const { return values[token][(place + 1) % kWidth]; }
};

// How far from the target each token came out: generated in the rollout, used in training.
struct Scores {
  float squared_error[kTokens];
  double mean() const {
    double sum = 0;
    for (float value : squared_error) sum += value;
    return sum / kTokens;
  }
};

// output = prompt x matrix
inline void multiply(const float* prompt, const uint16_t* matrix, float* output) {
  for (int j = 0; j < kWidth; ++j) output[j] = 0;
  for (int i = 0; i < kWidth; ++i)
    for (int j = 0; j < kWidth; ++j) output[j] += prompt[i] * widen(matrix[i * kWidth + j]);
}

// The rollout: fills the KV cache token by token, then scores what it reads back from it.
inline void generate(const Prompts& prompts, const uint16_t* weights, float* cache,
                     Scores* scores) {
  const auto entry = [&](int token, int layer) {
    return cache + (static_cast<size_t>(token) * kLayers + layer) * kWidth;
  };
  for (int token = 0; token < kTokens; ++token)
    for (int layer = 0; layer < kLayers; ++layer)
      multiply(prompts.values[token], weights + layer * kLayerCount, entry(token, layer));
  for (int token = 0; token < kTokens; ++token) {
    float sum = 0;
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int j = 0; j < kWidth; ++j) {
        const float error = entry(token, layer)[j] - prompts.target(token, j);
        sum += error * error;
      }
    }
    scores->squared_error[token] = sum / (kLayers * kWidth);
  }
}

// Gradients of one batch. Tokens that came out worse in the rollout count more.
inline void learn(const Prompts& prompts, const Scores& scores, int step, const uint16_t* params,
                  uint16_t* grads) {
  const float mean = static_cast<float>(scores.mean());
  std::vector<float> sum(kLayerCount);
  float error[kWidth];
  for (int layer = 0; layer < kLayers; ++layer) {
    sum.assign(kLayerCount, 0);
    for (int token = step * kBatch; token < (step + 1) * kBatch; ++token) {
      const float weight = scores.squared_error[token] / mean / kBatch;
      multiply(prompts.values[token], params + layer * kLayerCount, error);
      for (int j = 0; j < kWidth; ++j) error[j] = weight * (error[j] - prompts.target(token, j));
      for (int i = 0; i < kWidth; ++i)
        for (int j = 0; j < kWidth; ++j) sum[i * kWidth + j] += prompts.values[token][i] * error[j];
    }
    for (uint64_t i = 0; i < kLayerCount; ++i) grads[layer * kLayerCount + i] = narrow(sum[i]);
  }
}

#endif  // HYBRIDOPT_EXAMPLES_RL_CYCLE_POLICY_H
