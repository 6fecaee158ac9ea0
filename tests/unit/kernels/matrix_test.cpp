// The update of a matrix against Newton-Schulz in double, with which it shares no code.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../../random.h"
#include "kernels/convert.h"
#include "kernels/matrix/newton_schulz.h"
#include "kernels/matrix/product.h"

namespace hybridopt {
namespace {

constexpr double kMomentum = 0.95;
constexpr double kLr = 0.02;
constexpr double kWeightDecay = 0.1;
constexpr NsStep kQuintic = {3.4445f, -4.7750f, 2.0315f};

Coefficients MuonCoefficients() {
  Coefficients c{};
  c.grad_factor = 1.0f;
  c.keep0 = static_cast<float>(kMomentum);
  c.weight0 = static_cast<float>(1 - kMomentum);
  c.nesterov = 1;
  c.eps = 1e-7f;
  c.step_size = static_cast<float>(kLr);
  c.l2_decay = static_cast<float>(kWeightDecay);
  return c;
}

// A matrix with all arrays in fp32, and the memory of its update.
struct Problem {
  MatrixShape shape;
  std::vector<float> grad, param, momentum;
  std::vector<NsStep> steps = std::vector<NsStep>(5, kQuintic);
  Coefficients coefficients = MuonCoefficients();
  std::vector<double> workspace;  // has the alignment of each type that is stored in it

  explicit Problem(const MatrixShape& shape) : shape(shape) {
    Random random(shape.rows * 1000 + shape.cols);
    for (uint64_t i = 0; i < shape.count(); ++i) {
      grad.push_back(static_cast<float>(random.Noise()));
      param.push_back(static_cast<float>(random.Noise()));
      momentum.push_back(static_cast<float>(0.3 * random.Noise()));
    }
    workspace.resize(NewtonSchulzBytes(shape) / sizeof(double) + 1);
  }

  MatrixUpdate Update() {
    MatrixUpdate update{};
    update.span.grad = grad.data();
    update.span.param = param.data();
    update.span.master = param.data();
    update.span.moment0 = momentum.data();
    update.span.count = shape.count();
    update.types = {OFFLOAD_FP32, OFFLOAD_FP32, {}};
    update.shape = shape;
    update.coefficients = coefficients;
    update.steps = steps;
    update.workspace = workspace.data();
    return update;
  }
};

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

Matrix Transposed(const Matrix& m) {
  Matrix turned(m.cols, m.rows);
  for (uint64_t i = 0; i < m.rows; ++i)
    for (uint64_t j = 0; j < m.cols; ++j) turned(j, i) = m(i, j);
  return turned;
}

// a * x + b * (y * z).
Matrix AddProduct(double a, const Matrix& x, double b, const Matrix& y, const Matrix& z) {
  Matrix result(y.rows, z.cols);
  for (uint64_t i = 0; i < y.rows; ++i)
    for (uint64_t k = 0; k < y.cols; ++k)
      for (uint64_t j = 0; j < z.cols; ++j) result(i, j) += b * y(i, k) * z(k, j);
  for (uint64_t i = 0; i < result.at.size(); ++i) result.at[i] += a * x.at[i];
  return result;
}

Matrix NewtonSchulzInDouble(Matrix u, const std::vector<NsStep>& steps, double eps) {
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

// The update of a Problem, as torch.optim.Muon writes it.
struct Expected {
  Matrix momentum, update, param;

  explicit Expected(const Problem& p)
      : momentum(p.shape.rows, p.shape.cols), update(momentum), param(momentum) {
    for (uint64_t i = 0; i < p.shape.count(); ++i) {
      momentum.at[i] = kMomentum * p.momentum[i] + (1 - kMomentum) * p.grad[i];
      update.at[i] = p.coefficients.nesterov
                         ? (1 - kMomentum) * p.grad[i] + kMomentum * momentum.at[i]
                         : momentum.at[i];
    }
    update = NewtonSchulzInDouble(update, p.steps, p.coefficients.eps);
    for (uint64_t i = 0; i < p.shape.count(); ++i)
      param.at[i] = p.param[i] * (1 - kLr * kWeightDecay) - kLr * update.at[i];
  }
};

// The update X that the change of the params shows.
Matrix UpdateOf(const Problem& before, const Problem& after) {
  Matrix x(before.shape.rows, before.shape.cols);
  for (uint64_t i = 0; i < x.at.size(); ++i)
    x.at[i] = (double{before.param[i]} * (1 - kLr * kWeightDecay) - after.param[i]) / kLr;
  return x;
}

double RelativeError(const Matrix& got, const Matrix& expected) {
  Matrix error = got;
  for (uint64_t i = 0; i < error.at.size(); ++i) error.at[i] -= expected.at[i];
  return error.Norm() / expected.Norm();
}

const MatrixShape kShapes[] = {{1, 1},   {1, 7},    {9, 1},    {2, 2},     {33, 20},  {20, 33},
                               {64, 64}, {97, 250}, {250, 97}, {200, 193}, {193, 200}};

// Rounding X, A and P to bf16 is an error of 2^-9 of each element at most. A step multiplies the
// error of X by at most its slope, which is 3.4445 where singular values are small and below 1.5
// elsewhere, and adds three such roundings. Errors of 0.012 to 0.025 are seen; a product or a step
// that is wrong leaves more than 0.3.
TEST(Matrix, UpdatesAreThoseOfDouble) {
  for (const MatrixShape& shape : kShapes) {
    for (const int32_t nesterov : {0, 1}) {
      Problem before(shape);
      before.coefficients.nesterov = nesterov;
      Problem after = before;
      UpdateMatrix(ReferenceKernels(), after.Update());
      const Expected expected(before);
      const double error = RelativeError(UpdateOf(before, after), expected.update);
      EXPECT_LT(error, 0.05) << shape.rows << " x " << shape.cols;
      for (uint64_t i = 0; i < shape.count(); ++i)
        EXPECT_NEAR(after.momentum[i], expected.momentum.at[i], 1e-6);
    }
  }
}

}  // namespace
}  // namespace hybridopt
