// The policy of policy.h on a GPU: products by cuBLAS, from bf16 to fp32, the rest in fp32. Each
// run gives the same bits: every sum has a fixed order.
#include "../gpu.h"
#include "gpu_policy.h"

namespace {

// A block for each token, a thread for each place.
__global__ void score(const float* cache, const bf16* prompts, float* squared_error) {
  const int token = blockIdx.x, j = threadIdx.x;
  const float target = __bfloat162float(prompts[token * kWidth + (j + 1) % kWidth]);
  float sum = 0;
  for (int layer = 0; layer < kLayers; ++layer) {
    const float error = cache[(token * kLayers + layer) * kWidth + j] - target;
    sum += error * error;
  }
  sum = sum_of<kWidth>(sum);
  if (j == 0) squared_error[token] = sum / (kLayers * kWidth);
}

// Computes the weighted errors of the outputs of one batch, [layer][token][place]. There is a block
// for each token of each layer. Tokens that came out worse in the rollout count more.
__global__ void weigh(bf16* errors, const float* outputs, const bf16* prompts,
                      const float* squared_error, float mean) {
  const int token = blockIdx.x % kBatch, j = threadIdx.x;
  const float target = __bfloat162float(prompts[token * kWidth + (j + 1) % kWidth]);
  const size_t i = size_t{blockIdx.x} * kWidth + j;
  errors[i] = __float2bfloat16_rn(squared_error[token] / mean / kBatch * (outputs[i] - target));
}

// What it works on beside the trainer's buffers, in one block that stays.
struct Workspace {
  bf16 prompts[kTokens * kWidth];  // +1 and -1: exact
  float squared_error[kTokens];
  float outputs[kLayers * kBatch * kWidth];
  bf16 errors[kLayers * kBatch * kWidth];
};

class Policy final : public GpuPolicy {
 public:
  Policy() {
    MUST_CUDA(cudaMalloc(&workspace_, sizeof *workspace_));
    MUST_CUDA(cudaMallocHost(&prompts_, sizeof workspace_->prompts));
    MUST_CUDA(cudaMallocHost(&scores_, sizeof *scores_));
  }
  ~Policy() override {
    MUST_CUDA(cudaStreamSynchronize(stream_.get()));
    MUST_CUDA(cudaFreeHost(scores_));
    MUST_CUDA(cudaFreeHost(prompts_));
    MUST_CUDA(cudaFree(workspace_));
  }

  void* stream() const override { return stream_.get(); }
  const Scores& scores() const override { return *scores_; }

  uint64_t free_bytes() const override {
    size_t free = 0, total = 0;
    MUST_CUDA(cudaMemGetInfo(&free, &total));
    return free;
  }

  void copy(uint16_t* to, const uint16_t* from, uint64_t count) override {
    MUST_CUDA(
        cudaMemcpyAsync(to, from, count * sizeof *to, cudaMemcpyDeviceToDevice, stream_.get()));
  }

  void generate(const Prompts& prompts, const uint16_t* weights, float* cache) override {
    for (int i = 0; i < kTokens * kWidth; ++i)
      prompts_[i] = narrow(prompts.values[i / kWidth][i % kWidth]);
    MUST_CUDA(cudaMemcpyAsync(workspace_->prompts, prompts_, sizeof workspace_->prompts,
                              cudaMemcpyHostToDevice, stream_.get()));
    // The cache is [token][layer][place]: one product per layer, kWidth apart.
    stream_.product(false, false, kTokens, kWidth, kWidth, 1, {workspace_->prompts, kWidth},
                    {matrices(weights), kWidth, kLayerCount}, 0, {cache, kLayers * kWidth, kWidth},
                    kLayers);
    score<<<kTokens, kWidth, 0, stream_.get()>>>(cache, workspace_->prompts,
                                                 workspace_->squared_error);
    MUST_CUDA(cudaGetLastError());  // of the launch
    MUST_CUDA(cudaMemcpyAsync(scores_->squared_error, workspace_->squared_error,
                              sizeof workspace_->squared_error, cudaMemcpyDeviceToHost,
                              stream_.get()));
  }

  void learn(int step, const uint16_t* params, uint16_t* grads) override {
    const bf16* const prompts = workspace_->prompts + step * kBatch * kWidth;
    constexpr int kLayerOutputs = kBatch * kWidth;
    stream_.product(false, false, kBatch, kWidth, kWidth, 1, {prompts, kWidth},
                    {matrices(params), kWidth, kLayerCount}, 0,
                    {workspace_->outputs, kWidth, kLayerOutputs}, kLayers);
    weigh<<<kLayers * kBatch, kWidth, 0, stream_.get()>>>(
        workspace_->errors, workspace_->outputs, prompts, workspace_->squared_error + step * kBatch,
        static_cast<float>(scores_->mean()));
    MUST_CUDA(cudaGetLastError());  // of the launch
    stream_.product(true, false, kWidth, kWidth, kBatch, 1, {prompts, kWidth},
                    {workspace_->errors, kWidth, kLayerOutputs}, 0,
                    {matrices(grads), kWidth, kLayerCount}, kLayers);
  }

 private:
  static const bf16* matrices(const uint16_t* data) { return reinterpret_cast<const bf16*>(data); }

  GpuStream stream_;
  Workspace* workspace_ = nullptr;  // device addresses
  uint16_t* prompts_ = nullptr;     // pinned, as is the next
  Scores* scores_ = nullptr;
};

}  // namespace

std::unique_ptr<GpuPolicy> make_gpu_policy() { return std::make_unique<Policy>(); }
