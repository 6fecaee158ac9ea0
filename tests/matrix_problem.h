// Updates of matrices for tests, and the same update in double, as torch.optim.Muon writes it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "kernels/convert.h"
#include "kernels/matrix/matrix_update.h"
#include "random.h"

namespace hybridopt {

inline constexpr NsStep kQuintic = {3.4445f, -4.7750f, 2.0315f};

struct MatrixProblem {
  MatrixShape shape;
  double momentum = 0.95, lr = 0.02, weight_decay = 0.1;
  bool nesterov = true;
  std::vector<NsStep> steps = std::vector<NsStep>(5, kQuintic);

  Coefficients coefficients() const {
    Coefficients c{};
    c.grad_factor = 1.0f;
    c.keep0 = static_cast<float>(momentum);
    c.weight0 = static_cast<float>(1 - momentum);
    c.nesterov = nesterov;
    c.eps = 1e-7f;
    c.step_size = static_cast<float>(lr);
    c.l2_decay = static_cast<float>(weight_decay);
    return c;
  }
};

// The arrays of a matrix. A param that is its own master has no master.
struct MatrixArrays {
  SpanTypes types;
  uint64_t count;
  std::vector<std::byte> grad, param, master, momentum;

  bool is_own_master() const { return master.empty(); }
  bool operator==(const MatrixArrays& other) const {
    return grad == other.grad && param == other.param && master == other.master &&
           momentum == other.momentum;
  }
};

inline std::vector<std::byte> Encoded(const std::vector<float>& values, const FormatRow& row) {
  std::vector<std::byte> stored(row.Bytes(values.size()));
  row.encode(reinterpret_cast<const std::byte*>(values.data()), values.size(), stored.data());
  return stored;
}

inline std::vector<std::byte> Narrowed(const std::vector<float>& values, int32_t dtype) {
  if (dtype == OFFLOAD_FP32) return Encoded(values, RowOf(Format::kFp32));
  if (dtype == OFFLOAD_BF16) return Encoded(values, RowOf(Format::kBf16));
  std::vector<std::byte> stored(values.size() * sizeof(uint16_t));
  for (size_t i = 0; i < values.size(); ++i) StoreElement(stored.data(), i, Fp32ToFp16(values[i]));
  return stored;
}

// Stores the values as the types say.
inline MatrixArrays ArraysOf(const SpanTypes& types, const std::vector<float>& grad,
                             const std::vector<float>& master, const std::vector<float>& momentum) {
  MatrixArrays arrays{types, master.size(), Narrowed(grad, types.grad_dtype), {}, {}, {}};
  const FormatRow& row = RowOf(types.formats.master);
  arrays.param = Narrowed(master, types.param_dtype);
  if (row.beside_param)
    row.encode_params(reinterpret_cast<const std::byte*>(master.data()), master.size(),
                      arrays.param.data());
  if (types.param_dtype != OFFLOAD_FP32) arrays.master = Encoded(master, row);
  arrays.momentum = Encoded(momentum, RowOf(types.formats.moment0));
  return arrays;
}

inline MatrixArrays RandomArrays(const SpanTypes& types, const MatrixShape& shape,
                                 uint64_t stream) {
  Random random(stream);
  std::vector<float> values[3];
  for (std::vector<float>& array : values)
    for (uint64_t i = 0; i < shape.count(); ++i)
      array.push_back(static_cast<float>(random.Noise()));
  return ArraysOf(types, values[0], values[1], values[2]);
}

// The masters and the momentum, as fp32.
inline std::vector<float> MastersOf(const MatrixArrays& arrays) {
  std::vector<float> values(arrays.count);
  const bool own = arrays.is_own_master();
  RowOf(own ? Format::kFp32 : arrays.types.formats.master)
      .decode(own ? arrays.param.data() : arrays.master.data(), arrays.param.data(), arrays.count,
              values.data());
  return values;
}
inline std::vector<float> MomentaOf(const MatrixArrays& arrays) {
  std::vector<float> values(arrays.count);
  RowOf(arrays.types.formats.moment0)
      .decode(arrays.momentum.data(), nullptr, arrays.count, values.data());
  return values;
}
inline std::vector<float> GradsOf(const MatrixArrays& arrays) {
  std::vector<float> values(arrays.count);
  for (uint64_t i = 0; i < arrays.count; ++i) {
    const std::byte* const grads = arrays.grad.data();
    values[i] = arrays.types.grad_dtype == OFFLOAD_FP32 ? LoadElement<float>(grads, i)
                : arrays.types.grad_dtype == OFFLOAD_BF16
                    ? Bf16ToFp32(LoadElement<uint16_t>(grads, i))
                    : Fp16ToFp32(LoadElement<uint16_t>(grads, i));
  }
  return values;
}

// The update of arrays at these addresses. `problem` must live until it has run.
inline MatrixUpdate UpdateAt(const MatrixProblem& problem, const SpanTypes& types, void* grad,
                             void* param, void* master, void* momentum, void* workspace) {
  MatrixUpdate update{};
  update.span.grad = grad;
  update.span.param = param;
  update.span.master = master != nullptr ? master : param;
  update.span.moment0 = momentum;
  update.span.count = problem.shape.count();
  update.types = types;
  update.shape = problem.shape;
  update.coefficients = problem.coefficients();
  update.steps = problem.steps;
  update.workspace = workspace;
  return update;
}

inline MatrixUpdate UpdateOf(const MatrixProblem& problem, MatrixArrays& arrays, void* workspace) {
  return UpdateAt(problem, arrays.types, arrays.grad.data(), arrays.param.data(),
                  arrays.is_own_master() ? nullptr : arrays.master.data(), arrays.momentum.data(),
                  workspace);
}

// A row-major matrix of double.
struct Matrix {
  uint64_t rows, cols;
  std::vector<double> at;

  Matrix(uint64_t rows, uint64_t cols) : rows(rows), cols(cols), at(rows * cols) {}
  double& operator()(uint64_t i, uint64_t j) { return at[i * cols + j]; }
  double operator()(uint64_t i, uint64_t j) const { return at[i * cols + j]; }

  double Norm() const {
    double sum = 0;
    for (const double value : at) sum += value * value;
    return std::sqrt(sum);
  }
};

inline Matrix Transposed(const Matrix& m) {
  Matrix turned(m.cols, m.rows);
  for (uint64_t i = 0; i < m.rows; ++i)
    for (uint64_t j = 0; j < m.cols; ++j) turned(j, i) = m(i, j);
  return turned;
}

// a * x + b * (y * z).
inline Matrix AddProduct(double a, const Matrix& x, double b, const Matrix& y, const Matrix& z) {
  Matrix result(y.rows, z.cols);
  for (uint64_t i = 0; i < y.rows; ++i)
    for (uint64_t k = 0; k < y.cols; ++k)
      for (uint64_t j = 0; j < z.cols; ++j) result(i, j) += b * y(i, k) * z(k, j);
  for (uint64_t i = 0; i < result.at.size(); ++i) result.at[i] += a * x.at[i];
  return result;
}

inline Matrix NewtonSchulzInDouble(const Matrix& u, const std::vector<NsStep>& steps, double eps) {
  const bool tall = u.rows > u.cols;
  Matrix x = tall ? Transposed(u) : u;
  const double divisor = std::max(x.Norm(), eps);
  for (double& value : x.at) value /= divisor;
  const Matrix zero(x.rows, x.rows);
  for (const NsStep& step : steps) {
    const Matrix gram = AddProduct(0, zero, 1, x, Transposed(x));
    const Matrix polynomial = AddProduct(step.b, gram, step.c, gram, gram);
    x = AddProduct(step.a, x, 1, polynomial, x);
  }
  return tall ? Transposed(x) : x;
}

struct ExpectedUpdate {
  Matrix momentum, x;

  ExpectedUpdate(const MatrixProblem& p, const MatrixArrays& before)
      : momentum(p.shape.rows, p.shape.cols), x(momentum) {
    const std::vector<float> grads = GradsOf(before), momenta = MomentaOf(before);
    for (uint64_t i = 0; i < p.shape.count(); ++i) {
      momentum.at[i] = p.momentum * momenta[i] + (1 - p.momentum) * grads[i];
      x.at[i] =
          p.nesterov ? (1 - p.momentum) * grads[i] + p.momentum * momentum.at[i] : momentum.at[i];
    }
    x = NewtonSchulzInDouble(x, p.steps, 1e-7);
  }
};

// The X that the change of the masters shows.
inline Matrix ShownUpdate(const MatrixProblem& p, const MatrixArrays& before,
                          const MatrixArrays& after) {
  Matrix x(p.shape.rows, p.shape.cols);
  const std::vector<float> from = MastersOf(before), to = MastersOf(after);
  for (uint64_t i = 0; i < x.at.size(); ++i)
    x.at[i] = (double{from[i]} * (1 - p.lr * p.weight_decay) - to[i]) / p.lr;
  return x;
}

inline double RelativeError(const Matrix& got, const Matrix& expected) {
  Matrix error = got;
  for (uint64_t i = 0; i < error.at.size(); ++i) error.at[i] -= expected.at[i];
  return error.Norm() / expected.Norm();
}

// Rounding X, A and P to bf16 is an error of 2^-9 of each element at most. A step multiplies the
// error of X by at most its slope, which is 3.4445 where singular values are small and below 1.5
// elsewhere, and adds three such roundings. Errors of 0.012 to 0.025 are seen; a product or a step
// that is wrong leaves more than 0.3.
inline constexpr double kBf16Error = 0.05;

}  // namespace hybridopt
