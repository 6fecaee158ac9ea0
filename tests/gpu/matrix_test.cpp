// Updates of matrices on a GPU, with products of cuBLASLt.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../matrix_problem.h"
#include "device/cuda/matrices.h"
#include "device/device.h"
#include "kernels/matrix/newton_schulz.h"
#include "kernels/stochastic_rounding.h"

namespace hybridopt {
namespace {

constexpr SpanTypes kFp32Types = {OFFLOAD_FP32, OFFLOAD_FP32, {}};
constexpr int64_t kLongNs = 60'000'000'000;  // no timed assertion: only the end of a hang

const MatrixShape kShapes[] = {{1, 1},    {1, 9},     {9, 1},     {33, 20},   {20, 33},  {64, 64},
                               {128, 96}, {129, 257}, {257, 129}, {256, 512}, {512, 256}};

std::string NameOf(const MatrixShape& shape) {
  return std::to_string(shape.rows) + " x " + std::to_string(shape.cols);
}

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess)
#define MUST_OK(expression)                                 \
  do {                                                      \
    const Status must_status = (expression);                \
    ASSERT_TRUE(must_status.ok()) << must_status.message(); \
  } while (false)

class GpuMatrix : public testing::Test {
 protected:
  void SetUp() override {
    auto device = CreateCudaDevice({.device_index = 0, .timeout_ns = kLongNs});
    ASSERT_TRUE(device.ok()) << device.status().message();
    device_ = std::move(device.value());
    ASSERT_CUDA(cudaSetDevice(0));
    matrices_ = std::make_unique<cuda::Matrices>(*device_, fault_);
    const Status opened = matrices_->Open();
    if (opened.code() == OFFLOAD_UNSUPPORTED) GTEST_SKIP() << opened.message();
    MUST_OK(opened);
  }
  void TearDown() override { matrices_.reset(); }

  // A copy of host bytes in device memory, `shift` bytes behind an address that is aligned.
  class OnDevice {
   public:
    OnDevice(std::vector<std::byte>& bytes, uint64_t shift) : bytes_(bytes), shift_(shift) {
      if (bytes.empty()) return;
      EXPECT_EQ(cudaMalloc(&memory_, bytes.size() + shift), cudaSuccess);
      EXPECT_EQ(cudaMemcpy(data(), bytes.data(), bytes.size(), cudaMemcpyDefault), cudaSuccess);
    }
    ~OnDevice() { (void)cudaFree(memory_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;
    void* data() const {
      return memory_ != nullptr ? static_cast<std::byte*>(memory_) + shift_ : nullptr;
    }
    void CopyBack() {
      if (memory_ == nullptr) return;
      EXPECT_EQ(cudaMemcpy(bytes_.data(), data(), bytes_.size(), cudaMemcpyDefault), cudaSuccess);
    }

   private:
    std::vector<std::byte>& bytes_;
    const uint64_t shift_;
    void* memory_ = nullptr;
  };

  struct How {
    Verdict verdict = AssumeFinite(1.0);
    bool prepare = false;
    uint64_t shift = 0;      // of the arrays, in bytes
    uint8_t garbage = 0xFF;  // what the workspace holds before: NaN in every format
    Rounding rounding = {};
  };

  // Updates the arrays on the GPU.
  void Update(const MatrixProblem& problem, MatrixArrays& arrays, const How& how) {
    OnDevice grad(arrays.grad, how.shift), param(arrays.param, how.shift);
    OnDevice master(arrays.master, how.shift), momentum(arrays.momentum, how.shift);
    std::vector<std::byte> room(cuda::Matrices::WorkspaceBytes(problem.shape),
                                std::byte{how.garbage});
    std::vector<std::byte> verdict_bytes(sizeof(Verdict));
    std::memcpy(verdict_bytes.data(), &how.verdict, sizeof(Verdict));
    OnDevice workspace(room, 0), verdict(verdict_bytes, 0);
    MatrixUpdate update = UpdateAt(problem, arrays.types, grad.data(), param.data(), master.data(),
                                   momentum.data(), workspace.data());
    update.span.rounding = how.rounding;
    auto stream = device_->CreateStream("matrices");
    ASSERT_TRUE(stream.ok());
    if (how.prepare) {
      MUST_OK(matrices_->Prepare(stream.value(), problem.shape, workspace.data()));
    }
    MUST_OK(matrices_->Update(stream.value(), update, static_cast<const Verdict*>(verdict.data())));
    MUST_OK(device_->Synchronize(stream.value(), kLongNs));
    MUST_OK(device_->DestroyStream(stream.value()));
    for (OnDevice* array : {&param, &master, &momentum}) array->CopyBack();
  }

  std::unique_ptr<Device> device_;
  cuda::Fault fault_;
  std::unique_ptr<cuda::Matrices> matrices_;
};

void UpdateOnCpu(const MatrixProblem& problem, MatrixArrays& arrays, const Rounding& rounding) {
  std::vector<double> workspace(NewtonSchulzBytes(problem.shape) / sizeof(double));
  MatrixUpdate update = UpdateOf(problem, arrays, workspace.data());
  update.span.rounding = rounding;
  UpdateMatrix(*SelectKernels().value(), update);
}

TEST_F(GpuMatrix, UpdatesAreThoseOfDouble) {
  for (const MatrixShape& shape : kShapes) {
    const MatrixProblem problem{shape};
    const MatrixArrays before = RandomArrays(kFp32Types, shape, 1);
    MatrixArrays after = before;
    Update(problem, after, {});
    const ExpectedUpdate expected(problem, before);
    const double error = RelativeError(ShownUpdate(problem, before, after), expected.x);
    EXPECT_LT(error, kBf16Error) << NameOf(shape);
  }
}

// Without products all operations are the CPU's: momentum, norm, division and the update of params,
// for all types.
TEST_F(GpuMatrix, AllButTheProductsHasTheBitsOfTheCpu) {
  for (const MatrixShape& shape : {MatrixShape{65, 129}, MatrixShape{200, 77}}) {
    MatrixProblem problem{shape};
    problem.steps.clear();
    ForEachSpanTypes([&](const SpanTypes& types) {
      for (const bool stochastic : {false, true}) {
        for (const uint64_t shift : {0, 4}) {
          const Rounding rounding = stochastic ? StochasticRounding(1, 2, 3) : Rounding{};
          MatrixArrays on_gpu = RandomArrays(types, shape, 2);
          MatrixArrays on_cpu = on_gpu;
          How how;
          how.shift = shift;
          how.rounding = rounding;
          Update(problem, on_gpu, how);
          UpdateOnCpu(problem, on_cpu, rounding);
          ASSERT_TRUE(on_gpu == on_cpu)
              << NameOf(shape) << " grad " << types.grad_dtype << " param " << types.param_dtype
              << " master " << RowOf(types.formats.master).name << " momentum "
              << RowOf(types.formats.moment0).name << " stochastic " << stochastic << " shift "
              << shift;
        }
      }
    });
  }
}

// The momentum does not depend on the products, and X differs from the CPU's only by the order of
// sums, which changes some roundings to bf16.
TEST_F(GpuMatrix, IsNearTheCpu) {
  for (const MatrixShape& shape : kShapes) {
    const MatrixProblem problem{shape};
    const MatrixArrays before = RandomArrays(kFp32Types, shape, 3);
    MatrixArrays on_gpu = before, on_cpu = before;
    Update(problem, on_gpu, {});
    UpdateOnCpu(problem, on_cpu, {});
    EXPECT_EQ(on_gpu.momentum, on_cpu.momentum) << NameOf(shape);
    EXPECT_LT(
        RelativeError(ShownUpdate(problem, before, on_gpu), ShownUpdate(problem, before, on_cpu)),
        kBf16Error)
        << NameOf(shape);
  }
}

TEST_F(GpuMatrix, BitsRepeatWhateverTheMemoryHolds) {
  for (const MatrixShape& shape : kShapes) {
    const MatrixProblem problem{shape};
    MatrixArrays first = RandomArrays(kFp32Types, shape, 4);
    const MatrixArrays before = first;
    Update(problem, first, {});
    for (const uint8_t garbage : {0x00, 0x3F}) {
      MatrixArrays again = before;
      How how;
      how.garbage = garbage;
      how.shift = garbage == 0 ? 0 : 4;
      how.prepare = garbage == 0;
      Update(problem, again, how);
      EXPECT_TRUE(first == again) << NameOf(shape);
    }
  }
}

// Two streams at once, each with a workspace of its own.
TEST_F(GpuMatrix, BitsRepeatBesideAnotherStream) {
  const MatrixProblem problem{{512, 768}};
  const MatrixArrays before = RandomArrays(kFp32Types, problem.shape, 5);
  MatrixArrays alone = before;
  Update(problem, alone, {});
  constexpr int kStreams = 2, kRounds = 4;
  MatrixArrays arrays[kStreams] = {before, before};
  std::vector<std::unique_ptr<OnDevice>> memory;
  std::vector<std::byte> verdict_bytes(sizeof(Verdict));
  const Verdict verdict = AssumeFinite(1.0);
  std::memcpy(verdict_bytes.data(), &verdict, sizeof(verdict));
  OnDevice there(verdict_bytes, 0);
  std::vector<std::byte> room(cuda::Matrices::WorkspaceBytes(problem.shape));
  StreamHandle streams[kStreams];
  MatrixUpdate updates[kStreams];
  for (int s = 0; s < kStreams; ++s) {
    auto stream = device_->CreateStream("matrices");
    ASSERT_TRUE(stream.ok());
    streams[s] = stream.value();
    for (std::vector<std::byte>* bytes :
         {&arrays[s].grad, &arrays[s].param, &arrays[s].momentum, &room})
      memory.push_back(std::make_unique<OnDevice>(*bytes, 0));
    const size_t first = memory.size() - 4;
    updates[s] = UpdateAt(problem, kFp32Types, memory[first]->data(), memory[first + 1]->data(),
                          nullptr, memory[first + 2]->data(), memory[first + 3]->data());
  }
  for (int round = 0; round < kRounds; ++round)
    for (int s = 0; s < kStreams; ++s)
      MUST_OK(matrices_->Update(streams[s], updates[s], static_cast<const Verdict*>(there.data())));
  for (int s = 0; s < kStreams; ++s) {
    MUST_OK(device_->Synchronize(streams[s], kLongNs));
    MUST_OK(device_->DestroyStream(streams[s]));
  }
  for (int round = 1; round < kRounds; ++round) Update(problem, alone, {});
  for (const auto& one : memory) one->CopyBack();
  for (int s = 0; s < kStreams; ++s) EXPECT_TRUE(arrays[s] == alone) << s;
}

TEST_F(GpuMatrix, ASkippedStepChangesNothing) {
  const MatrixProblem problem{{96, 40}};
  const MatrixArrays before = RandomArrays({OFFLOAD_BF16, OFFLOAD_BF16, {}}, problem.shape, 6);
  MatrixArrays after = before;
  How how;
  how.verdict.skip = 1;
  Update(problem, after, how);
  EXPECT_TRUE(after == before);
}

// A factor that is a power of two changes no bit of U / |U| unless it is not applied to the
// gradient, or applied to X.
TEST_F(GpuMatrix, TheVerdictScalesGradientsOnly) {
  MatrixProblem problem{{40, 96}};
  problem.momentum = 0;
  MatrixArrays plain = RandomArrays(kFp32Types, problem.shape, 7);
  MatrixArrays scaled = plain;
  Update(problem, plain, {});
  How how;
  how.verdict.grad_factor = 0.25f;
  Update(problem, scaled, how);
  EXPECT_EQ(scaled.param, plain.param);
  const std::vector<float> expected = MomentaOf(plain), got = MomentaOf(scaled);
  for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], 0.25f * expected[i]);
}

TEST_F(GpuMatrix, ZerosStayZeros) {
  MatrixProblem problem{{24, 72}};
  problem.weight_decay = 0;
  const std::vector<float> zeros(problem.shape.count()), ones(problem.shape.count(), 1.0f);
  const MatrixArrays before = ArraysOf(kFp32Types, zeros, ones, zeros);
  MatrixArrays after = before;
  Update(problem, after, {});
  EXPECT_EQ(MastersOf(after), ones);
}

}  // namespace
}  // namespace hybridopt
