// The update of a matrix on the CPU, and its products.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "../../matrix_problem.h"
#include "kernels/matrix/newton_schulz.h"
#include "kernels/matrix/product.h"

namespace hybridopt {
namespace {

constexpr SpanTypes kFp32Types = {OFFLOAD_FP32, OFFLOAD_FP32, {}};

const MatrixShape kShapes[] = {{1, 1},   {1, 7},    {9, 1},    {2, 2},     {33, 20},  {20, 33},
                               {64, 64}, {97, 250}, {250, 97}, {200, 193}, {193, 200}};

std::string NameOf(const MatrixShape& shape) {
  return std::to_string(shape.rows) + " x " + std::to_string(shape.cols);
}

void RunUpdate(const KernelTable& kernels, const MatrixProblem& problem, MatrixArrays& arrays) {
  std::vector<double> workspace(NewtonSchulzBytes(problem.shape) / sizeof(double));
  UpdateMatrix(kernels, UpdateOf(problem, arrays, workspace.data()));
}

TEST(Matrix, UpdatesAreThoseOfDouble) {
  for (const MatrixShape& shape : kShapes) {
    for (const bool nesterov : {false, true}) {
      MatrixProblem problem{shape};
      problem.nesterov = nesterov;
      const MatrixArrays before = RandomArrays(kFp32Types, shape, 1);
      MatrixArrays after = before;
      RunUpdate(ReferenceKernels(), problem, after);
      const ExpectedUpdate expected(problem, before);
      EXPECT_LT(RelativeError(ShownUpdate(problem, before, after), expected.x), kBf16Error)
          << NameOf(shape);
      const std::vector<float> momenta = MomentaOf(after);
      for (uint64_t i = 0; i < shape.count(); ++i)
        EXPECT_NEAR(momenta[i], expected.momentum.at[i], 1e-6) << NameOf(shape);
    }
  }
}

}  // namespace
}  // namespace hybridopt
