// byte_model.h: a small decoder-only transformer over bytes, forward and backward written out.
//
// Nothing here knows of hybridopt. Model::forward reads bf16 params and Model::backward writes bf16
// gradients; how the params get their new values is 04_train_lm.cpp's affair.
#ifndef HYBRIDOPT_EXAMPLES_TRAIN_LM_BYTE_MODEL_H
#define HYBRIDOPT_EXAMPLES_TRAIN_LM_BYTE_MODEL_H

#include <cblas.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <string>

#include "../numbers.h"
#include "shape.h"

// What forward leaves for backward, and the gradients that flow between.
struct Activations {
  float *residual, *final_norm, *final_scale, *logits;
  struct Block {
    float *attention_in, *attention_scale, *query, *key, *value, *weights, *mixed;
    float *mlp_in, *mlp_scale, *rectified, *squared;
  } block[kBlocks];
  float *d_residual, *d_norm, *d_query, *d_key, *d_value, *d_weights, *d_hidden;

  // visit(floats per token, pointer)
  template <typename Visit>
  void for_each(Visit visit) {
    for (float** p : {&residual, &final_norm, &d_residual, &d_norm, &d_query, &d_key, &d_value}) {
      visit(kWidth, *p);
    }
    visit(1, final_scale), visit(kVocabulary, logits), visit(kHidden, d_hidden);
    static_assert(kContext % kBatch == 0);
    visit(kContext / kBatch, d_weights);  // one [context, context] in all
    for (Block& b : block) {
      for (float** p : {&b.attention_in, &b.query, &b.key, &b.value, &b.mixed, &b.mlp_in}) {
        visit(kWidth, *p);
      }
      visit(1, b.attention_scale), visit(1, b.mlp_scale), visit(kHeads * kContext, b.weights);
      visit(kHidden, b.rectified), visit(kHidden, b.squared);
    }
  }
};

// y = x w^T, x is [tokens, in], w is [out, in].
inline void linear(float* y, const float* x, const float* w, int in, int out, float keep = 0) {
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, kTokens, out, in, 1, x, in, w, in, keep, y,
              out);
}

// dw = dy^T x, and dx = keep dx + dy w.
inline void linear_backward(float* dx, float* dw, const float* dy, const float* x, const float* w,
                            int in, int out, float keep = 0) {
  cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, out, in, kTokens, 1, dy, out, x, in, 0, dw,
              in);
  cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, kTokens, in, out, 1, dy, out, w, in, keep,
              dx, in);
}

// Root-mean-square norm without a gain: y = x * scale, one scale a token.
inline void norm(float* y, float* scale, const float* x) {
  for (int t = 0; t < kTokens; ++t, x += kWidth, y += kWidth) {
    scale[t] = 1 / sqrtf(cblas_sdot(kWidth, x, 1, x, 1) / kWidth + 1e-6f);
    for (int c = 0; c < kWidth; ++c) y[c] = x[c] * scale[t];
  }
}

inline void norm_backward(float* dx, const float* dy, const float* y, const float* scale) {
  for (int t = 0; t < kTokens; ++t, dx += kWidth, dy += kWidth, y += kWidth) {
    const float along = cblas_sdot(kWidth, dy, 1, y, 1) / kWidth;
    for (int c = 0; c < kWidth; ++c) dx[c] += scale[t] * (dy[c] - y[c] * along);
  }
}

inline void softmax(float* x, int count) {
  const float top = *std::max_element(x, x + count);
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += x[i] = expf(x[i] - top);
  for (int i = 0; i < count; ++i) x[i] /= sum;
}

// One product per sequence and head. Matrices lie in [tokens, width] or [context, context] rows.
inline void small_product(bool transpose_a, bool transpose_b, int m, int n, int k, float scale,
                          const float* a, int lda, const float* b, int ldb, float* c, int ldc) {
  cblas_sgemm(CblasRowMajor, transpose_a ? CblasTrans : CblasNoTrans,
              transpose_b ? CblasTrans : CblasNoTrans, m, n, k, scale, a, lda, b, ldb, 0, c, ldc);
}

inline const float kAttentionScale = 1 / sqrtf(kHeadWidth);

struct Model {
  Weights value, grad;  // fp32 working copies: BLAS knows no bf16
  Activations act;
  const uint16_t* params;  // bf16, as the optimizer leaves them
  uint16_t* grads;         // bf16, as the optimizer takes them

  static uint64_t workspace_bytes() {
    uint64_t floats = 2 * parameter_count();
    Activations{}.for_each([&](int per_token, float*) { floats += per_token * kTokens; });
    return floats * sizeof(float);
  }

  void lay_out(float* workspace) {
    for (Weights* w : {&value, &grad}) {
      w->for_each([&](const std::string&, int count, double, bool, float*& pointer) {
        pointer = workspace;
        workspace += count;
      });
    }
    act.for_each([&](int per_token, float*& pointer) {
      pointer = workspace;
      workspace += per_token * kTokens;
    });
  }

  // Returns the mean loss in nats per byte and leaves the gradient of the logits in act.logits.
  double forward(const Batch& batch) {
    const uint64_t count = parameter_count();
    for (uint64_t i = 0; i < count; ++i) value.embedding[i] = widen(params[i]);
    embed(batch);
    for (int i = 0; i < kBlocks; ++i) {
      attention(value.block[i], act.block[i]);
      mlp(value.block[i], act.block[i]);
    }
    norm(act.final_norm, act.final_scale, act.residual);
    linear(act.logits, act.final_norm, value.head, kWidth, kVocabulary);
    return cross_entropy(batch);
  }

  void backward(const Batch& batch) {
    linear_backward(act.d_norm, grad.head, act.logits, act.final_norm, value.head, kWidth,
                    kVocabulary);
    memset(act.d_residual, 0, sizeof(float) * kTokens * kWidth);
    norm_backward(act.d_residual, act.d_norm, act.final_norm, act.final_scale);
    for (int i = kBlocks - 1; i >= 0; --i) {
      mlp_backward(value.block[i], grad.block[i], act.block[i]);
      attention_backward(value.block[i], grad.block[i], act.block[i]);
    }
    embed_backward(batch);
    const uint64_t count = parameter_count();
    for (uint64_t i = 0; i < count; ++i) grads[i] = narrow(grad.embedding[i]);
  }

  void embed(const Batch& batch) {
    for (int t = 0; t < kTokens; ++t) {
      const float* byte = value.embedding + batch.token(t) * kWidth;
      const float* position = value.position + t % kContext * kWidth;
      float* x = act.residual + t * kWidth;
      for (int c = 0; c < kWidth; ++c) x[c] = byte[c] + position[c];
      for (int i = 0; i < kNgramTables; ++i) {
        const float* row = value.ngram[i] + batch.ngram_row(t, kNgrams[i]) * kWidth;
        for (int c = 0; c < kWidth; ++c) x[c] += row[c];
      }
    }
  }

  void embed_backward(const Batch& batch) {
    memset(grad.embedding, 0, sizeof(float) * (grad.block[0].query - grad.embedding));
    for (int t = 0; t < kTokens; ++t) {
      const float* dx = act.d_residual + t * kWidth;
      cblas_saxpy(kWidth, 1, dx, 1, grad.embedding + batch.token(t) * kWidth, 1);
      cblas_saxpy(kWidth, 1, dx, 1, grad.position + t % kContext * kWidth, 1);
      for (int i = 0; i < kNgramTables; ++i) {
        const int row = batch.ngram_row(t, kNgrams[i]);
        cblas_saxpy(kWidth, 1, dx, 1, grad.ngram[i] + row * kWidth, 1);
      }
    }
  }

  void attention(const Weights::Block& w, Activations::Block& a) {
    norm(a.attention_in, a.attention_scale, act.residual);
    linear(a.query, a.attention_in, w.query, kWidth, kWidth);
    linear(a.key, a.attention_in, w.key, kWidth, kWidth);
    linear(a.value, a.attention_in, w.value, kWidth, kWidth);
    for (int i = 0; i < kBatch * kHeads; ++i) {
      const int at = i / kHeads * kContext * kWidth + i % kHeads * kHeadWidth;
      float* weights = a.weights + i * kContext * kContext;
      small_product(false, true, kContext, kContext, kHeadWidth, kAttentionScale, a.query + at,
                    kWidth, a.key + at, kWidth, weights, kContext);
      for (int t = 0; t < kContext; ++t) {  // a token sees itself and what came before
        softmax(weights + t * kContext, t + 1);
        std::fill(weights + t * kContext + t + 1, weights + (t + 1) * kContext, 0.0f);
      }
      small_product(false, false, kContext, kHeadWidth, kContext, 1, weights, kContext,
                    a.value + at, kWidth, a.mixed + at, kWidth);
    }
    linear(act.residual, a.mixed, w.output, kWidth, kWidth, 1);
  }

  void attention_backward(const Weights::Block& w, Weights::Block& g, Activations::Block& a) {
    linear_backward(act.d_norm, g.output, act.d_residual, a.mixed, w.output, kWidth, kWidth);
    const float* d_mixed = act.d_norm;
    for (int i = 0; i < kBatch * kHeads; ++i) {
      const int at = i / kHeads * kContext * kWidth + i % kHeads * kHeadWidth;
      const float* weights = a.weights + i * kContext * kContext;
      small_product(true, false, kContext, kHeadWidth, kContext, 1, weights, kContext, d_mixed + at,
                    kWidth, act.d_value + at, kWidth);
      small_product(false, true, kContext, kContext, kHeadWidth, 1, d_mixed + at, kWidth,
                    a.value + at, kWidth, act.d_weights, kContext);
      for (int t = 0; t < kContext; ++t) {
        const float* p = weights + t * kContext;
        float* dp = act.d_weights + t * kContext;
        const float along = cblas_sdot(t + 1, p, 1, dp, 1);
        for (int s = 0; s < kContext; ++s) dp[s] = p[s] * (dp[s] - along);
      }
      small_product(false, false, kContext, kHeadWidth, kContext, kAttentionScale, act.d_weights,
                    kContext, a.key + at, kWidth, act.d_query + at, kWidth);
      small_product(true, false, kContext, kHeadWidth, kContext, kAttentionScale, act.d_weights,
                    kContext, a.query + at, kWidth, act.d_key + at, kWidth);
    }
    linear_backward(act.d_norm, g.query, act.d_query, a.attention_in, w.query, kWidth, kWidth);
    linear_backward(act.d_norm, g.key, act.d_key, a.attention_in, w.key, kWidth, kWidth, 1);
    linear_backward(act.d_norm, g.value, act.d_value, a.attention_in, w.value, kWidth, kWidth, 1);
    norm_backward(act.d_residual, act.d_norm, a.attention_in, a.attention_scale);
  }

  void mlp(const Weights::Block& w, Activations::Block& a) {
    norm(a.mlp_in, a.mlp_scale, act.residual);
    linear(a.rectified, a.mlp_in, w.up, kWidth, kHidden);
    for (int i = 0; i < kTokens * kHidden; ++i) {
      a.rectified[i] = std::max(a.rectified[i], 0.0f);
      a.squared[i] = a.rectified[i] * a.rectified[i];
    }
    linear(act.residual, a.squared, w.down, kHidden, kWidth, 1);
  }

  void mlp_backward(const Weights::Block& w, Weights::Block& g, Activations::Block& a) {
    linear_backward(act.d_hidden, g.down, act.d_residual, a.squared, w.down, kHidden, kWidth);
    for (int i = 0; i < kTokens * kHidden; ++i) act.d_hidden[i] *= 2 * a.rectified[i];
    linear_backward(act.d_norm, g.up, act.d_hidden, a.mlp_in, w.up, kWidth, kHidden);
    norm_backward(act.d_residual, act.d_norm, a.mlp_in, a.mlp_scale);
  }

  double cross_entropy(const Batch& batch) {
    double loss = 0;
    for (int t = 0; t < kTokens; ++t) {
      float* p = act.logits + t * kVocabulary;
      softmax(p, kVocabulary);
      float& right = p[batch.token(t, 1)];
      loss -= logf(right + 1e-30f);
      right -= 1;
      for (int i = 0; i < kVocabulary; ++i) p[i] /= kTokens;
    }
    return loss / kTokens;
  }
};

#endif  // HYBRIDOPT_EXAMPLES_TRAIN_LM_BYTE_MODEL_H
