// cblas.h: what byte_model.h uses of BLAS, as plain loops, for builds without a BLAS. Slower.
#ifndef HYBRIDOPT_EXAMPLES_TRAIN_LM_PLAIN_BLAS_CBLAS_H
#define HYBRIDOPT_EXAMPLES_TRAIN_LM_PLAIN_BLAS_CBLAS_H

#include <stddef.h>

#include <vector>

enum CBLAS_ORDER { CblasRowMajor = 101 };
enum CBLAS_TRANSPOSE { CblasNoTrans = 111, CblasTrans = 112 };

inline void openblas_set_num_threads(int) {}  // there is but one

inline float cblas_sdot(int count, const float* x, int x_step, const float* y, int y_step) {
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += x[i * x_step] * y[i * y_step];
  return sum;
}

inline void cblas_saxpy(int count, float scale, const float* x, int x_step, float* y, int y_step) {
  for (int i = 0; i < count; ++i) y[i * y_step] += scale * x[i * x_step];
}

// c = scale a b + keep c, where a is [m, k] and b [k, n] or their transposes.
inline void cblas_sgemm(CBLAS_ORDER, CBLAS_TRANSPOSE transpose_a, CBLAS_TRANSPOSE transpose_b,
                        int m, int n, int k, float scale, const float* a, int a_step,
                        const float* b, int b_step, float keep, float* c, int c_step) {
  std::vector<float> rows(static_cast<size_t>(k) * n), sum(n);  // b, not transposed
  for (int i = 0; i < k; ++i) {
    for (int j = 0; j < n; ++j)
      rows[i * n + j] = transpose_b == CblasTrans ? b[j * b_step + i] : b[i * b_step + j];
  }
  for (int row = 0; row < m; ++row) {
    sum.assign(n, 0);
    for (int i = 0; i < k; ++i) {
      const float x = transpose_a == CblasTrans ? a[i * a_step + row] : a[row * a_step + i];
      for (int j = 0; j < n; ++j) sum[j] += x * rows[i * n + j];
    }
    for (int j = 0; j < n; ++j) {
      float& y = c[row * c_step + j];
      y = scale * sum[j] + (keep != 0 ? keep * y : 0);  // BLAS does not read what it does not keep
    }
  }
}

#endif  // HYBRIDOPT_EXAMPLES_TRAIN_LM_PLAIN_BLAS_CBLAS_H
