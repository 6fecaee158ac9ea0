// The model of byte_model.h on a GPU, function by function: the same formulas in the same order.
// Products take bf16 inputs and are summed in fp32 by cuBLAS; all else is fp32 as on the CPU.
// Values that products read are written a second time, rounded to bf16; their names end in `_low`.
//
// Each run gives the same bits: every sum has a fixed order, no atomics.
#include "../gpu.h"
#include "gpu_model.h"

namespace {

// ------------------------------------------------------------------------------ lookup tables --

// A table, and which row of it each token looks up.
constexpr int kTables = 2 + kNgramTables, kPosition = 0, kByte = 1;  // others: n-grams of n bytes
struct Table {
  int kind, row_count;
  const bf16* value;
  bf16* grad;
  int* rows;  // [tokens]
};
struct Tables {
  Table table[kTables];
};

__global__ void find_rows(Batch batch, Table table) {
  const int t = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  table.rows[t] = table.kind == kPosition ? t % kContext
                  : table.kind == kByte   ? batch.token(t)
                                          : batch.ngram_row(t, table.kind);
}

// A block for each token, a thread for each of its numbers; likewise below.
__global__ void embed(Tables tables, float* residual) {
  const int t = blockIdx.x, c = threadIdx.x;
  float x = 0;
  for (const Table& table : tables.table)
    x += __bfloat162float(table.value[table.rows[t] * kWidth + c]);
  residual[t * kWidth + c] = x;
}

// A block for each row of the table: adds up what its tokens give it, in their order.
__global__ void embed_backward(Table table, const float* d_residual) {
  const int row = blockIdx.x, c = threadIdx.x;
  float sum = 0;
  for (int t = 0; t < kTokens; ++t)
    if (table.rows[t] == row) sum += d_residual[t * kWidth + c];
  table.grad[row * kWidth + c] = __float2bfloat16_rn(sum);
}

// ------------------------------------------------------------------------------ norm, softmax --

__global__ void norm(float* y, bf16* y_low, float* scale, const float* x) {
  const int t = blockIdx.x, i = t * kWidth + static_cast<int>(threadIdx.x);
  const float s = 1 / sqrtf(sum_of<kWidth>(x[i] * x[i]) / kWidth + 1e-6f);
  if (threadIdx.x == 0) scale[t] = s;
  y[i] = x[i] * s;
  y_low[i] = __float2bfloat16_rn(y[i]);
}

// Adds to dx, of which dx_low is to be the copy for products.
__global__ void norm_backward(float* dx, bf16* dx_low, const float* dy, const float* y,
                              const float* scale) {
  const int t = blockIdx.x, i = t * kWidth + static_cast<int>(threadIdx.x);
  const float along = sum_of<kWidth>(dy[i] * y[i]) / kWidth;
  dx[i] += scale[t] * (dy[i] - y[i] * along);
  dx_low[i] = __float2bfloat16_rn(dx[i]);
}

// A block for each row of attention weights, of one token: it sees itself and what came before.
__global__ void attention_softmax(float* p, bf16* p_low) {
  const int t = blockIdx.x % kContext, s = threadIdx.x;
  const size_t i = size_t{blockIdx.x} * kContext + s;
  const float score = s <= t ? p[i] : -INFINITY;
  const float power = expf(score - max_of<kContext>(score));  // 0 for what comes later
  p[i] = power / sum_of<kContext>(power);
  p_low[i] = __float2bfloat16_rn(p[i]);
}

__global__ void attention_softmax_backward(bf16* d_scores_low, const float* p, const float* dp) {
  const size_t i = size_t{blockIdx.x} * kContext + threadIdx.x;
  const float along = sum_of<kContext>(p[i] * dp[i]);
  d_scores_low[i] = __float2bfloat16_rn(p[i] * (dp[i] - along));
}

// -------------------------------------------------------------------------------- mlp and loss --

__global__ void rectify_and_square(float* x, bf16* squared_low) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (x[i] < 0) x[i] = 0;
  squared_low[i] = __float2bfloat16_rn(x[i] * x[i]);
}

__global__ void square_backward(bf16* dx_low, const float* dy, const float* rectified) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  dx_low[i] = __float2bfloat16_rn(dy[i] * (2 * rectified[i]));
}

// The loss of each token, and the gradient of its logits.
__global__ void cross_entropy(Batch batch, const float* logits, bf16* d_logits_low, float* losses) {
  const int t = blockIdx.x, v = threadIdx.x, i = t * kVocabulary + v;
  const float power = expf(logits[i] - max_of<kVocabulary>(logits[i]));
  const float p = power / sum_of<kVocabulary>(power);
  const bool right = v == batch.token(t, 1);
  if (right) losses[t] = -logf(p + 1e-30f);
  d_logits_low[i] = __float2bfloat16_rn((right ? p - 1 : p) / kTokens);
}

// One thread, so that the order is fixed.
__global__ void mean_loss(const float* losses, double* mean) {
  double sum = 0;
  for (int t = 0; t < kTokens; ++t) sum += static_cast<double>(losses[t]);
  *mean = sum / kTokens;
}

// ----------------------------------------------------------------------------------- the model --

class Model final : public GpuModel {
 public:
  Model() {
    lay_out(nullptr);
    MUST_CUDA(cudaMalloc(&workspace_, used_));
    lay_out(workspace_);
    MUST_CUDA(cudaMallocHost(&losses_, kLosses * sizeof *losses_));
  }
  ~Model() override {
    MUST_CUDA(cudaStreamSynchronize(stream_.get()));
    MUST_CUDA(cudaFreeHost(losses_));
    MUST_CUDA(cudaFree(workspace_));
  }

  void* stream() const override { return stream_.get(); }
  double* losses() override { return losses_; }

  uint64_t free_bytes() const override {
    size_t free = 0, total = 0;
    MUST_CUDA(cudaMemGetInfo(&free, &total));
    return free;
  }

  void place(uint16_t* params, uint16_t* grads) override {
    uint64_t offset = 0;
    value_.for_each([&](const std::string&, int count, double, bool, const bf16*& pointer) {
      pointer = reinterpret_cast<const bf16*>(params) + offset;
      offset += count;
    });
    offset = 0;
    grad_.for_each([&](const std::string&, int count, double, bool, bf16*& pointer) {
      pointer = reinterpret_cast<bf16*>(grads) + offset;
      offset += count;
    });
  }

  void queue(const Batch& batch, bool train, double* loss,
             const std::function<void(int layer)>& before_layer) override {
    forward(batch, before_layer);
    MUST_CUDA(
        cudaMemcpyAsync(loss, mean_loss_, sizeof *loss, cudaMemcpyDeviceToHost, stream_.get()));
    if (train) backward();
    MUST_CUDA(cudaGetLastError());  // of the kernels' launches
  }

 private:
  // The workspace, one tensor behind the other; adds up how much of it is used.
  template <typename T>
  void take(T*& pointer, size_t count) {
    constexpr size_t kAlignment = 256;
    pointer = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(next_) + used_);
    used_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
  }

  void lay_out(void* workspace) {
    constexpr size_t kWide = size_t{kTokens} * kWidth, kWider = size_t{kTokens} * kHidden;
    constexpr size_t kPairs = size_t{kTokens} * kHeads * kContext;
    next_ = workspace;
    used_ = 0;
    for (int*& rows : rows_) take(rows, kTokens);
    for (float** p : {&residual_, &final_norm_, &d_residual_, &d_norm_}) take(*p, kWide);
    for (bf16** p : {&final_norm_low_, &d_residual_low_, &d_query_low_, &d_key_low_, &d_value_low_,
                     &d_mixed_low_})
      take(*p, kWide);
    take(final_scale_, kTokens), take(losses_of_tokens_, kTokens), take(mean_loss_, 1);
    take(logits_, size_t{kTokens} * kVocabulary),
        take(d_logits_low_, size_t{kTokens} * kVocabulary);
    take(d_weights_, kPairs), take(d_scores_low_, kPairs);
    take(d_hidden_, kWider), take(d_hidden_low_, kWider);
    for (Block& b : block_) {
      for (float** p : {&b.attention_in, &b.mlp_in}) take(*p, kWide);
      for (bf16** p : {&b.attention_in_low, &b.query_low, &b.key_low, &b.value_low, &b.mixed_low,
                       &b.mlp_in_low})
        take(*p, kWide);
      take(b.attention_scale, kTokens), take(b.mlp_scale, kTokens);
      take(b.weights, kPairs), take(b.weights_low, kPairs);
      take(b.rectified, kWider), take(b.squared_low, kWider);
    }
  }

  struct Block;
  using Weights = WeightsOf<const bf16>;
  using Grads = WeightsOf<bf16>;

  Tables tables() const {
    Tables tables;
    tables.table[0] = {kByte, kVocabulary, value_.embedding, grad_.embedding, rows_[0]};
    tables.table[1] = {kPosition, kContext, value_.position, grad_.position, rows_[1]};
    for (int i = 0; i < kNgramTables; ++i)
      tables.table[2 + i] = {kNgrams[i], kNgramRows, value_.ngram[i], grad_.ngram[i], rows_[2 + i]};
    return tables;
  }

  void forward(const Batch& batch, const std::function<void(int layer)>& before_layer) {
    before_layer(0);
    for (const Table& table : tables().table)
      find_rows<<<kTokens / kContext, kContext, 0, stream_.get()>>>(batch, table);
    embed<<<kTokens, kWidth, 0, stream_.get()>>>(tables(), residual_);
    for (int i = 0; i < kBlocks; ++i) {
      before_layer(1 + i);
      attention(value_.block[i], block_[i]);
      mlp(value_.block[i], block_[i]);
    }
    before_layer(1 + kBlocks);
    norm<<<kTokens, kWidth, 0, stream_.get()>>>(final_norm_, final_norm_low_, final_scale_,
                                                residual_);
    linear(logits_, final_norm_low_, value_.head, kWidth, kVocabulary);
    cross_entropy<<<kTokens, kVocabulary, 0, stream_.get()>>>(batch, logits_, d_logits_low_,
                                                              losses_of_tokens_);
    mean_loss<<<1, 1, 0, stream_.get()>>>(losses_of_tokens_, mean_loss_);
  }

  void backward() {
    linear_backward(d_norm_, grad_.head, d_logits_low_, final_norm_low_, value_.head, kWidth,
                    kVocabulary);
    MUST_CUDA(cudaMemsetAsync(d_residual_, 0, sizeof(float) * kTokens * kWidth, stream_.get()));
    backward_of_norm(final_norm_, final_scale_);
    for (int i = kBlocks - 1; i >= 0; --i) {
      mlp_backward(value_.block[i], grad_.block[i], block_[i]);
      attention_backward(value_.block[i], grad_.block[i], block_[i]);
    }
    for (const Table& table : tables().table)
      embed_backward<<<table.row_count, kWidth, 0, stream_.get()>>>(table, d_residual_);
  }

  void attention(const Weights::Block& w, const Block& a) {
    norm<<<kTokens, kWidth, 0, stream_.get()>>>(a.attention_in, a.attention_in_low,
                                                a.attention_scale, residual_);
    linear(a.query_low, a.attention_in_low, w.query, kWidth, kWidth);
    linear(a.key_low, a.attention_in_low, w.key, kWidth, kWidth);
    linear(a.value_low, a.attention_in_low, w.value, kWidth, kWidth);
    for (int h = 0; h < kHeads; ++h) {
      product_of_head(false, true, kScale, of_head(a.query_low, h), of_head(a.key_low, h),
                      weights_of_head(a.weights, h));
    }
    attention_softmax<<<kTokens * kHeads, kContext, 0, stream_.get()>>>(a.weights, a.weights_low);
    for (int h = 0; h < kHeads; ++h) {
      product_of_head(false, false, 1, weights_of_head(a.weights_low, h), of_head(a.value_low, h),
                      of_head(a.mixed_low, h));
    }
    linear(residual_, a.mixed_low, w.output, kWidth, kWidth, 1);
  }

  void attention_backward(const Weights::Block& w, const Grads::Block& g, const Block& a) {
    linear_backward(d_mixed_low_, g.output, d_residual_low_, a.mixed_low, w.output, kWidth, kWidth);
    for (int h = 0; h < kHeads; ++h) {
      product_of_head(true, false, 1, weights_of_head(a.weights_low, h), of_head(d_mixed_low_, h),
                      of_head(d_value_low_, h));
      product_of_head(false, true, 1, of_head(d_mixed_low_, h), of_head(a.value_low, h),
                      weights_of_head(d_weights_, h));
    }
    attention_softmax_backward<<<kTokens * kHeads, kContext, 0, stream_.get()>>>(
        d_scores_low_, a.weights, d_weights_);
    for (int h = 0; h < kHeads; ++h) {
      product_of_head(false, false, kScale, weights_of_head(d_scores_low_, h),
                      of_head(a.key_low, h), of_head(d_query_low_, h));
      product_of_head(true, false, kScale, weights_of_head(d_scores_low_, h),
                      of_head(a.query_low, h), of_head(d_key_low_, h));
    }
    linear_backward(d_norm_, g.query, d_query_low_, a.attention_in_low, w.query, kWidth, kWidth);
    linear_backward(d_norm_, g.key, d_key_low_, a.attention_in_low, w.key, kWidth, kWidth, 1);
    linear_backward(d_norm_, g.value, d_value_low_, a.attention_in_low, w.value, kWidth, kWidth, 1);
    backward_of_norm(a.attention_in, a.attention_scale);
  }

  void mlp(const Weights::Block& w, const Block& a) {
    norm<<<kTokens, kWidth, 0, stream_.get()>>>(a.mlp_in, a.mlp_in_low, a.mlp_scale, residual_);
    linear(a.rectified, a.mlp_in_low, w.up, kWidth, kHidden);
    rectify_and_square<<<kTokens * kHidden / kWidth, kWidth, 0, stream_.get()>>>(a.rectified,
                                                                                 a.squared_low);
    linear(residual_, a.squared_low, w.down, kHidden, kWidth, 1);
  }

  void mlp_backward(const Weights::Block& w, const Grads::Block& g, const Block& a) {
    linear_backward(d_hidden_, g.down, d_residual_low_, a.squared_low, w.down, kHidden, kWidth);
    square_backward<<<kTokens * kHidden / kWidth, kWidth, 0, stream_.get()>>>(
        d_hidden_low_, d_hidden_, a.rectified);
    linear_backward(d_norm_, g.up, d_hidden_low_, a.mlp_in_low, w.up, kWidth, kHidden);
    backward_of_norm(a.mlp_in, a.mlp_scale);
  }

  void backward_of_norm(const float* y, const float* scale) {
    norm_backward<<<kTokens, kWidth, 0, stream_.get()>>>(d_residual_, d_residual_low_, d_norm_, y,
                                                         scale);
  }

  // y = x w^T + keep y, x is [tokens, in], w is [out, in].
  template <typename T>
  void linear(T* y, const bf16* x, const bf16* w, int in, int out, float keep = 0) const {
    stream_.product(false, true, kTokens, out, in, 1, {x, in}, {w, in}, keep, {y, out});
  }

  // dw = dy^T x, and dx = keep dx + dy w.
  template <typename T>
  void linear_backward(T* dx, bf16* dw, const bf16* dy, const bf16* x, const bf16* w, int in,
                       int out, float keep = 0) const {
    stream_.product(true, false, out, in, kTokens, 1, {dy, out}, {x, in}, 0, {dw, in});
    stream_.product(false, false, kTokens, in, out, 1, {dy, out}, {w, in}, keep, {dx, in});
  }

  // What a head has in [tokens, width] and in the [context, context] weights of all heads, in the
  // first sequence, and how far it is to the next.
  template <typename T>
  static GpuStream::Matrix of_head(T* data, int head) {
    return {data + head * kHeadWidth, kWidth, kContext * kWidth};
  }
  template <typename T>
  static GpuStream::Matrix weights_of_head(T* data, int head) {
    constexpr int kSquare = kContext * kContext;
    return {data + head * kSquare, kContext, kHeads * kSquare};
  }

  // One product per sequence.
  void product_of_head(bool transpose_a, bool transpose_b, float scale, GpuStream::Matrix a,
                       GpuStream::Matrix b, GpuStream::Matrix c) const {
    static_assert(kContext == kHeadWidth, "these products are all of one size");
    stream_.product(transpose_a, transpose_b, kContext, kContext, kContext, scale, a, b, 0, c,
                    kBatch);
  }

  static inline const float kScale = 1 / sqrtf(kHeadWidth);

  // What forward leaves for backward, and the gradients that flow between.
  struct Block {
    float *attention_in, *attention_scale, *weights, *mlp_in, *mlp_scale, *rectified;
    bf16 *attention_in_low, *query_low, *key_low, *value_low, *weights_low, *mixed_low;
    bf16 *mlp_in_low, *squared_low;
  } block_[kBlocks];
  float *residual_, *final_norm_, *final_scale_, *logits_, *losses_of_tokens_;
  bf16 *final_norm_low_, *d_logits_low_;
  double* mean_loss_;
  float *d_residual_, *d_norm_, *d_weights_, *d_hidden_;
  bf16 *d_residual_low_, *d_query_low_, *d_key_low_, *d_value_low_, *d_mixed_low_, *d_scores_low_;
  bf16* d_hidden_low_;
  int* rows_[kTables];

  GpuStream stream_;
  void* workspace_ = nullptr;
  void* next_ = nullptr;  // of the workspace, while it is laid out
  size_t used_ = 0;
  double* losses_ = nullptr;
  Weights value_{};
  Grads grad_{};
};

}  // namespace

std::unique_ptr<GpuModel> make_gpu_model() { return std::make_unique<Model>(); }
