// The policy of examples/03_rl_cycle on a GPU, compared with the one on the CPU. For the second
// product the CPU uses errors in fp32, but the GPU uses errors rounded to bf16, which differ by up
// to half a unit in the eighth bit.
#include "../../examples/03_rl_cycle/gpu_policy.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

namespace {

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess)

constexpr uint64_t kParamBytes = kParamCount * sizeof(uint16_t);

class GpuPolicyTest : public testing::Test {
 protected:
  void SetUp() override {
    Random random{1};
    for (uint16_t& param : params_) param = narrow(static_cast<float>(0.03 * random.normal()));
    ASSERT_CUDA(cudaMalloc(&gpu_params_, kParamBytes));
    ASSERT_CUDA(cudaMalloc(&gpu_weights_, kParamBytes));
    ASSERT_CUDA(cudaMalloc(&gpu_grads_, kParamBytes));
    ASSERT_CUDA(cudaMalloc(&gpu_cache_, kCacheBytes));
    ASSERT_CUDA(cudaMemcpy(gpu_params_, params_.data(), kParamBytes, cudaMemcpyHostToDevice));
  }
  void TearDown() override {
    for (void* data : {gpu_params_, gpu_weights_, gpu_grads_, gpu_cache_}) (void)cudaFree(data);
  }

  // Runs both phases with a new policy and returns their results. Memory that the phases must write
  // starts as NaNs.
  void RunGpu(int step, Scores* scores, std::vector<float>* cache, std::vector<uint16_t>* grads) {
    const std::unique_ptr<GpuPolicy> gpu = make_gpu_policy();
    const auto stream = static_cast<cudaStream_t>(gpu->stream());
    ASSERT_CUDA(cudaMemset(gpu_weights_, 0xff, kParamBytes));
    ASSERT_CUDA(cudaMemset(gpu_grads_, 0xff, kParamBytes));
    ASSERT_CUDA(cudaMemset(gpu_cache_, 0xff, kCacheBytes));
    auto* const params = static_cast<uint16_t*>(gpu_params_);
    auto* const weights = static_cast<uint16_t*>(gpu_weights_);
    gpu->copy(weights, params, kParamCount);
    gpu->generate(*prompts_, weights, static_cast<float*>(gpu_cache_));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    *scores = gpu->scores();
    gpu->learn(step, params, static_cast<uint16_t*>(gpu_grads_));
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    cache->resize(kCacheBytes / sizeof(float));
    grads->resize(kParamCount);
    ASSERT_CUDA(cudaMemcpy(cache->data(), gpu_cache_, kCacheBytes, cudaMemcpyDeviceToHost));
    ASSERT_CUDA(cudaMemcpy(grads->data(), gpu_grads_, kParamBytes, cudaMemcpyDeviceToHost));
  }

  std::unique_ptr<Prompts> prompts_ = std::make_unique<Prompts>(1);
  std::vector<uint16_t> params_ = std::vector<uint16_t>(kParamCount);
  void *gpu_params_ = nullptr, *gpu_weights_ = nullptr, *gpu_grads_ = nullptr;
  void* gpu_cache_ = nullptr;
};

TEST_F(GpuPolicyTest, HasTheOutputsScoresAndGradientsOfTheCpu) {
  std::vector<float> cpu_cache(kCacheBytes / sizeof(float)), gpu_cache;
  std::vector<uint16_t> cpu_grads(kParamCount), gpu_grads;
  Scores cpu_scores, gpu_scores;
  generate(*prompts_, params_.data(), cpu_cache.data(), &cpu_scores);
  for (int step : {0, kTrainSteps - 1}) {
    learn(*prompts_, cpu_scores, step, params_.data(), cpu_grads.data());
    ASSERT_NO_FATAL_FAILURE(RunGpu(step, &gpu_scores, &gpu_cache, &gpu_grads));
    for (size_t i = 0; i < cpu_cache.size(); ++i) ASSERT_NEAR(gpu_cache[i], cpu_cache[i], 1e-5);
    for (int i = 0; i < kTokens; ++i) {
      ASSERT_NEAR(gpu_scores.squared_error[i], cpu_scores.squared_error[i],
                  1e-5 * cpu_scores.squared_error[i]);
    }
    for (int layer = 0; layer < kLayers; ++layer) {
      double error = 0, norm = 0;
      for (uint64_t i = layer * kLayerCount; i < (layer + 1) * kLayerCount; ++i) {
        const double cpu = widen(cpu_grads[i]), gpu = widen(gpu_grads[i]);
        error += (gpu - cpu) * (gpu - cpu);
        norm += cpu * cpu;
      }
      EXPECT_GT(norm, 0);
      printf("step %d, layer %2d: gradient off by %.6f of its norm\n", step, layer,
             std::sqrt(error / norm));
      EXPECT_LT(std::sqrt(error / norm), 0.005) << "layer " << layer;
    }
  }
}

TEST_F(GpuPolicyTest, GivesTheSameBitsAgain) {
  std::vector<float> cache, cache_again;
  std::vector<uint16_t> grads, grads_again;
  Scores scores, scores_again;
  ASSERT_NO_FATAL_FAILURE(RunGpu(1, &scores, &cache, &grads));
  ASSERT_NO_FATAL_FAILURE(RunGpu(1, &scores_again, &cache_again, &grads_again));
  EXPECT_EQ(memcmp(&scores, &scores_again, sizeof scores), 0);
  EXPECT_EQ(memcmp(cache.data(), cache_again.data(), kCacheBytes), 0);
  EXPECT_EQ(memcmp(grads.data(), grads_again.data(), kParamBytes), 0);
}

}  // namespace
