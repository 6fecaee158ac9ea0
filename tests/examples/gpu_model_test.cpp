// The model of examples/04_train_lm on a GPU, compared with the one on the CPU. Here both round the
// inputs of products to bf16, so only the order of sums differs, and some values are rounded the
// other way: at most 0.004 of a gradient's norm. One wrong or missing term of the backward pass
// makes 0.05 or more.
#include <cblas.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "../../examples/numbers.h"

namespace {

std::vector<float> Rounded(const float* matrix, int rows, int columns, int step) {
  std::vector<float> rounded;
  for (int i = 0; i < rows; ++i) {
    for (int j = 0; j < columns; ++j) rounded.push_back(widen(narrow(matrix[i * step + j])));
  }
  return rounded;
}

void ProductOfRounded(CBLAS_ORDER order, CBLAS_TRANSPOSE transpose_a, CBLAS_TRANSPOSE transpose_b,
                      int m, int n, int k, float scale, const float* a, int a_step, const float* b,
                      int b_step, float keep, float* c, int c_step) {
  const bool turned_a = transpose_a == CblasTrans, turned_b = transpose_b == CblasTrans;
  const std::vector<float> x = Rounded(a, turned_a ? k : m, turned_a ? m : k, a_step);
  const std::vector<float> y = Rounded(b, turned_b ? n : k, turned_b ? k : n, b_step);
  cblas_sgemm(order, transpose_a, transpose_b, m, n, k, scale, x.data(), turned_a ? m : k, y.data(),
              turned_b ? k : n, keep, c, c_step);
}

}  // namespace

#define cblas_sgemm ProductOfRounded
#include "../../examples/04_train_lm/byte_model.h"
#undef cblas_sgemm
#include "../../examples/04_train_lm/gpu_model.h"

namespace {

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess)

// One batch and the params, on both sides. All params are random, even those that are zero at the
// start of training; otherwise many gradients would be zero.
class GpuModelTest : public testing::Test {
 protected:
  void SetUp() override {
    Random random{1};
    for (auto& window : batch_.bytes) {
      for (uint8_t& byte : window) byte = static_cast<uint8_t>('a' + random.next() % 5);
    }
    Weights{}.for_each([&](const std::string&, int size, double deviation, bool, float*) {
      const double scale = deviation > 0 ? deviation : 0.05;
      for (int i = 0; i < size; ++i)
        params_.push_back(narrow(static_cast<float>(scale * random.normal())));
    });
    bytes_ = params_.size() * sizeof(uint16_t);
    gpu_ = make_gpu_model();
    ASSERT_CUDA(cudaMalloc(&gpu_params_, bytes_));
    ASSERT_CUDA(cudaMalloc(&gpu_grads_, bytes_));
    ASSERT_CUDA(cudaMemcpy(gpu_params_, params_.data(), bytes_, cudaMemcpyHostToDevice));
    gpu_->place(static_cast<uint16_t*>(gpu_params_), static_cast<uint16_t*>(gpu_grads_));
  }
  void TearDown() override {
    gpu_.reset();
    (void)cudaFree(gpu_params_);
    (void)cudaFree(gpu_grads_);
  }

  // The gradients start as NaNs, so that one that is not written shows.
  void RunGpu(bool train, double* loss, std::vector<uint16_t>* grads) {
    ASSERT_CUDA(cudaMemset(gpu_grads_, 0xff, bytes_));
    *gpu_->losses() = NAN;
    gpu_->queue(batch_, train, gpu_->losses(), [](int) {});
    ASSERT_CUDA(cudaStreamSynchronize(static_cast<cudaStream_t>(gpu_->stream())));
    *loss = *gpu_->losses();
    grads->resize(params_.size());
    ASSERT_CUDA(cudaMemcpy(grads->data(), gpu_grads_, bytes_, cudaMemcpyDeviceToHost));
  }

  double RunCpu(std::vector<uint16_t>* grads) {
    std::vector<float> workspace(Model::workspace_bytes() / sizeof(float));
    grads->resize(params_.size());
    Model model{};
    model.params = params_.data();
    model.grads = grads->data();
    model.lay_out(workspace.data());
    const double loss = model.forward(batch_);
    model.backward(batch_);
    return loss;
  }

  Batch batch_;
  std::vector<uint16_t> params_;
  size_t bytes_ = 0;
  void *gpu_params_ = nullptr, *gpu_grads_ = nullptr;
  std::unique_ptr<GpuModel> gpu_;
};

TEST_F(GpuModelTest, HasTheLossAndGradientsOfTheCpu) {
  std::vector<uint16_t> cpu_grads, gpu_grads;
  const double cpu_loss = RunCpu(&cpu_grads);
  double gpu_loss = 0;
  ASSERT_NO_FATAL_FAILURE(RunGpu(true, &gpu_loss, &gpu_grads));
  EXPECT_NEAR(gpu_loss, cpu_loss, 1e-5 * cpu_loss);
  size_t at = 0;
  Weights{}.for_each([&](const std::string& name, int count, double, bool, float*) {
    double error = 0, norm = 0;
    for (int i = 0; i < count; ++i, ++at) {
      const double cpu = widen(cpu_grads[at]), gpu = widen(gpu_grads[at]);
      error += (gpu - cpu) * (gpu - cpu);
      norm += cpu * cpu;
    }
    EXPECT_GT(norm, 0) << name;
    printf("%-32s off by %.6f of its norm\n", name.c_str(), std::sqrt(error / norm));
    EXPECT_LT(std::sqrt(error / norm), 0.01) << name;
  });
}

TEST_F(GpuModelTest, GivesTheSameBitsAgain) {
  std::vector<uint16_t> first, second;
  double first_loss = 0, second_loss = 0;
  ASSERT_NO_FATAL_FAILURE(RunGpu(true, &first_loss, &first));
  gpu_ = make_gpu_model();
  gpu_->place(static_cast<uint16_t*>(gpu_params_), static_cast<uint16_t*>(gpu_grads_));
  ASSERT_NO_FATAL_FAILURE(RunGpu(true, &second_loss, &second));
  EXPECT_EQ(first_loss, second_loss);
  EXPECT_EQ(memcmp(first.data(), second.data(), bytes_), 0);
}

TEST_F(GpuModelTest, LeavesGradientsAloneUnlessItTrains) {
  std::vector<uint16_t> trained, evaluated;
  double trained_loss = 0, evaluated_loss = 0;
  ASSERT_NO_FATAL_FAILURE(RunGpu(true, &trained_loss, &trained));
  ASSERT_NO_FATAL_FAILURE(RunGpu(false, &evaluated_loss, &evaluated));
  EXPECT_EQ(trained_loss, evaluated_loss);
  for (uint16_t grad : evaluated) ASSERT_EQ(grad, 0xffff);
}

}  // namespace
