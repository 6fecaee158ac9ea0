// The update of a matrix on the CPU, and its products.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>
#include <iterator>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "../../matrix_problem.h"
#include "kernels/matrix/newton_schulz.h"
#include "kernels/matrix/product.h"
#include "kernels/stochastic_rounding.h"

namespace hybridopt {
namespace {

constexpr SpanTypes kFp32Types = {OFFLOAD_FP32, OFFLOAD_FP32, {}};

const MatrixShape kShapes[] = {{1, 1},   {1, 7},    {9, 1},    {2, 2},    {33, 20}, {20, 33},
                               {64, 64}, {97, 250}, {250, 97}, {104, 99}, {99, 104}};

std::string NameOf(const MatrixShape& shape) {
  return std::to_string(shape.rows) + " x " + std::to_string(shape.cols);
}

void RunUpdate(const KernelTable& kernels, const MatrixProblem& problem, MatrixArrays& arrays) {
  std::vector<double> workspace(NewtonSchulzBytes(problem.shape) / sizeof(double));
  UpdateMatrix(kernels, UpdateOf(problem, arrays, workspace.data()));
}

// Every SIMD implementation and the specification.
std::vector<const KernelTable*> AllTables() {
  std::vector<const KernelTable*> tables(SimdKernels().begin(), SimdKernels().end());
  tables.push_back(&ReferenceKernels());
  return tables;
}

// ------------------------------------------------------------------------------------- products --

struct ProductSizes {
  uint64_t rows, cols, depth;
};
constexpr ProductSizes kSizes[] = {{1, 1, 1},    {5, 3, 7},     {6, 32, 192},  {7, 33, 193},
                                   {96, 96, 96}, {97, 95, 200}, {200, 31, 385}};

// Numbers as in training. If `awkward`, also zeros, denormals, huge ones, infinities and NaNs.
std::vector<uint16_t> RandomBf16(uint64_t count, uint64_t stream, bool awkward) {
  constexpr uint16_t kAwkward[] = {0x0000, 0x8000, 0x0001, 0x807F, 0x7F7F,
                                   0xFF7F, 0x7F80, 0xFF80, 0x7FC1, 0xFFC1};
  Random random(stream);
  std::vector<uint16_t> values(count);
  for (uint16_t& value : values)
    value = awkward && random.OneIn(400) ? kAwkward[random.Below(std::size(kAwkward))]
                                         : Fp32ToBf16(static_cast<float>(random.Noise()));
  return values;
}

std::vector<uint16_t> Multiplied(const KernelTable& kernels, MatrixProduct product) {
  constexpr uint64_t kGuard = 64;
  constexpr uint16_t kFill = 0xA5A5;
  const uint64_t count = product.rows * product.cols;
  std::vector<uint16_t> out(count + 2 * kGuard, kFill);
  product.out = out.data() + kGuard;
  for (uint64_t tile = TileCount(product); tile-- > 0;) kernels.multiply_tile(product, tile);
  for (uint64_t i = 0; i < kGuard; ++i) {
    EXPECT_EQ(out[i], kFill) << kernels.isa;
    EXPECT_EQ(out[kGuard + count + i], kFill) << kernels.isa;
  }
  return {out.begin() + kGuard, out.begin() + static_cast<ptrdiff_t>(kGuard + count)};
}

// The matrices of a product that is not symmetric.
struct ProductArrays {
  std::vector<uint16_t> left, right, addend;

  ProductArrays(const ProductSizes& sizes, uint64_t stream, bool awkward)
      : left(RandomBf16(sizes.rows * sizes.depth, stream, awkward)),
        right(RandomBf16(sizes.depth * sizes.cols, stream + 1, awkward)),
        addend(RandomBf16(sizes.rows * sizes.cols, stream + 2, awkward)) {}

  MatrixProduct Of(const ProductSizes& sizes, bool by_row, bool adds) const {
    MatrixProduct product{};
    product.left = left.data();
    product.left_row_stride = by_row ? sizes.depth : 1;
    product.left_depth_stride = by_row ? 1 : sizes.rows;
    product.right = right.data();
    product.addend = adds ? addend.data() : nullptr;
    product.rows = sizes.rows;
    product.cols = sizes.cols;
    product.depth = sizes.depth;
    product.product_factor = 2.0315f;
    product.addend_factor = -4.775f;
    return product;
  }
};

TEST(Product, AllKernelsHaveTheBitsOfTheSpecification) {
  for (const ProductSizes& sizes : kSizes) {
    for (const bool awkward : {false, true}) {
      const ProductArrays arrays(sizes, 10, awkward);
      for (const bool by_row : {false, true}) {
        for (const bool adds : {false, true}) {
          const MatrixProduct product = arrays.Of(sizes, by_row, adds);
          const std::vector<uint16_t> expected = Multiplied(ReferenceKernels(), product);
          for (const KernelTable* kernels : SimdKernels())
            EXPECT_EQ(Multiplied(*kernels, product), expected)
                << kernels->isa << " " << sizes.rows << " x " << sizes.cols << " x " << sizes.depth
                << " by row " << by_row << " adds " << adds << " awkward " << awkward;
        }
      }
    }
  }
}

// A symmetric product computes only one half, and has the bits that computing both gives.
TEST(Product, HalfOfASymmetricProductIsMirrored) {
  for (const uint64_t size : {1, 40, 96, 193, 300}) {
    const uint64_t depth = 70;
    const std::vector<uint16_t> x = RandomBf16(size * depth, 20, false);
    MatrixProduct product{};
    product.left = x.data();
    product.left_row_stride = 1;
    product.left_depth_stride = size;
    product.right = x.data();
    product.rows = size;
    product.cols = size;
    product.depth = depth;
    const std::vector<uint16_t> whole = Multiplied(ReferenceKernels(), product);
    product.symmetric = true;
    for (const KernelTable* kernels : AllTables())
      EXPECT_EQ(Multiplied(*kernels, product), whole) << kernels->isa << " " << size;
  }
}

// The error of a sum in fp32 is at most depth * 2^-24 of the sum of absolute products; rounding to
// bf16 is an error of 2^-9 of the result.
TEST(Product, IsThatOfDouble) {
  const ProductSizes sizes = {50, 45, 300};
  const ProductArrays arrays(sizes, 30, false);
  const MatrixProduct product = arrays.Of(sizes, true, true);
  const std::vector<uint16_t> got = Multiplied(ReferenceKernels(), product);
  for (uint64_t i = 0; i < sizes.rows; ++i) {
    for (uint64_t j = 0; j < sizes.cols; ++j) {
      double sum = 0, absolute = 0;
      for (uint64_t k = 0; k < sizes.depth; ++k) {
        const double term = double{Bf16ToFp32(arrays.left[i * sizes.depth + k])} *
                            double{Bf16ToFp32(arrays.right[k * sizes.cols + j])};
        sum += term;
        absolute += std::abs(term);
      }
      const double addend =
          double{product.addend_factor} * double{Bf16ToFp32(arrays.addend[i * sizes.cols + j])};
      const double expected = double{product.product_factor} * sum + addend;
      const double bound = 0x1p-24 * static_cast<double>(sizes.depth + 2) *
                               (double{product.product_factor} * absolute + std::abs(addend)) +
                           0x1p-8 * std::abs(expected);
      EXPECT_NEAR(Bf16ToFp32(got[i * sizes.cols + j]), expected, bound);
    }
  }
}

// -------------------------------------------------------------------------------------- updates --

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

// Eigenvalues of a symmetric matrix, by Jacobi's rotations.
std::vector<double> Eigenvalues(Matrix m) {
  for (int sweep = 0; sweep < 30; ++sweep) {
    for (uint64_t p = 0; p < m.rows; ++p) {
      for (uint64_t q = p + 1; q < m.rows; ++q) {
        if (m(p, q) == 0) continue;
        const double angle = 0.5 * std::atan2(2 * m(p, q), m(p, p) - m(q, q));
        const double c = std::cos(angle), s = std::sin(angle);
        for (uint64_t k = 0; k < m.rows; ++k) {
          const double a = m(k, p), b = m(k, q);
          m(k, p) = c * a + s * b;
          m(k, q) = c * b - s * a;
        }
        for (uint64_t k = 0; k < m.rows; ++k) {
          const double a = m(p, k), b = m(q, k);
          m(p, k) = c * a + s * b;
          m(q, k) = c * b - s * a;
        }
      }
    }
  }
  std::vector<double> values;
  for (uint64_t i = 0; i < m.rows; ++i) values.push_back(m(i, i));
  return values;
}

// Five steps of the quintic bring singular values from 0.01 of the norm on to between 0.68 and
// 1.14; bf16 adds an error of some percent. Those of a random wide matrix are all above 0.01.
TEST(Matrix, SingularValuesAreInTheBandOfTheCoefficients) {
  for (const MatrixShape& shape : {MatrixShape{16, 48}, MatrixShape{48, 16}}) {
    const MatrixProblem problem{shape};
    const MatrixArrays before = RandomArrays(kFp32Types, shape, 2);
    MatrixArrays after = before;
    RunUpdate(ReferenceKernels(), problem, after);
    Matrix x = ShownUpdate(problem, before, after);
    if (shape.is_tall()) x = Transposed(x);
    const Matrix zero(x.rows, x.rows);
    for (const double square : Eigenvalues(AddProduct(0, zero, 1, x, Transposed(x)))) {
      EXPECT_GT(std::sqrt(square), 0.65) << NameOf(shape);
      EXPECT_LT(std::sqrt(square), 1.18) << NameOf(shape);
    }
  }
}

TEST(Matrix, AllKernelsAndTypesHaveTheBitsOfTheSpecification) {
  for (const MatrixShape& shape : {MatrixShape{20, 50}, MatrixShape{131, 40}}) {
    const MatrixProblem problem{shape};
    ForEachSpanTypes([&](const SpanTypes& types) {
      const MatrixArrays before = RandomArrays(types, shape, 3);
      for (const bool stochastic : {false, true}) {
        MatrixArrays expected = before;
        for (const KernelTable* kernels : {&ReferenceKernels(), SelectKernels().value()}) {
          MatrixArrays after = before;
          std::vector<double> workspace(NewtonSchulzBytes(shape) / sizeof(double));
          MatrixUpdate update = UpdateOf(problem, after, workspace.data());
          if (stochastic) update.span.rounding = StochasticRounding(1, 2, 3);
          UpdateMatrix(*kernels, update);
          if (kernels == &ReferenceKernels()) expected = after;
          ASSERT_TRUE(after == expected) << kernels->isa << " " << NameOf(shape);
        }
        EXPECT_FALSE(expected == before);
      }
    });
  }
}

// The order in which pieces of a phase run, and who runs them, changes nothing; nor does what the
// workspace held before.
TEST(Matrix, BitsDoNotDependOnWhoRunsAPiece) {
  for (const MatrixShape& shape : {MatrixShape{200, 300}, MatrixShape{300, 200}}) {
    const MatrixProblem problem{shape};
    const MatrixArrays before = RandomArrays(kFp32Types, shape, 4);
    MatrixArrays expected = before;
    RunUpdate(ReferenceKernels(), problem, expected);
    for (const KernelTable* kernels : SimdKernels()) {
      for (const uint32_t threads : {1, 3}) {
        MatrixArrays after = before;
        std::vector<double> workspace(NewtonSchulzBytes(shape) / sizeof(double),
                                      std::numeric_limits<double>::quiet_NaN());
        const MatrixUpdate update = UpdateOf(problem, after, workspace.data());
        const NewtonSchulz work(*kernels, update);
        for (uint32_t phase = 0; phase < work.phases(); ++phase) {
          std::atomic<uint64_t> left = work.pieces(phase);
          const auto take = [&] {
            for (uint64_t piece = left.load(); piece > 0;)
              if (left.compare_exchange_weak(piece, piece - 1)) {
                work.RunPiece(phase, piece - 1);
                piece = left.load();
              }
          };
          std::vector<std::thread> others;
          for (uint32_t i = 1; i < threads; ++i) others.emplace_back(take);
          take();
          for (std::thread& other : others) other.join();
        }
        EXPECT_TRUE(after == expected) << kernels->isa << " " << NameOf(shape) << " " << threads;
      }
    }
  }
}

TEST(Matrix, ZerosStayZeros) {
  MatrixProblem problem{{24, 72}};
  problem.weight_decay = 0;
  const std::vector<float> zeros(problem.shape.count()), ones(problem.shape.count(), 1.0f);
  for (const KernelTable* kernels : AllTables()) {
    MatrixArrays arrays = ArraysOf(kFp32Types, zeros, ones, zeros);
    RunUpdate(*kernels, problem, arrays);
    EXPECT_EQ(MastersOf(arrays), ones) << kernels->isa;
    EXPECT_EQ(MomentaOf(arrays), zeros) << kernels->isa;
  }
}

TEST(Matrix, AnEmptyMatrixIsNoWork) {
  for (const MatrixShape& shape : {MatrixShape{0, 5}, MatrixShape{5, 0}, MatrixShape{0, 0}}) {
    const MatrixProblem problem{shape};
    MatrixArrays arrays = RandomArrays(kFp32Types, shape, 5);
    for (const KernelTable* kernels : AllTables()) RunUpdate(*kernels, problem, arrays);
  }
}

// One gradient that is not a number reaches every param, as in torch, with the same bits whatever
// the kernels.
TEST(Matrix, ANanReachesAllParams) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::infinity()}) {
    const MatrixProblem problem{{30, 40}};
    MatrixArrays before = RandomArrays(kFp32Types, problem.shape, 6);
    StoreElement(before.grad.data(), 77, bad);
    MatrixArrays expected = before;
    RunUpdate(ReferenceKernels(), problem, expected);
    for (const float param : MastersOf(expected)) EXPECT_TRUE(std::isnan(param));
    for (const KernelTable* kernels : SimdKernels()) {
      MatrixArrays after = before;
      RunUpdate(*kernels, problem, after);
      EXPECT_TRUE(after == expected) << kernels->isa;
    }
  }
}

// The update notes the params that it changes, and no others.
TEST(Matrix, ChangesAreNoted) {
  const MatrixProblem problem{{20, 70}};
  MatrixArrays after = RandomArrays(kFp32Types, problem.shape, 7);
  const std::vector<float> before = MastersOf(after);
  std::vector<double> workspace(NewtonSchulzBytes(problem.shape) / sizeof(double));
  std::vector<uint64_t> words(NotedWords(problem.shape.count()));
  MatrixUpdate update = UpdateOf(problem, after, workspace.data());
  update.noted = {words.data(), 0};
  UpdateMatrix(*SelectKernels().value(), update);
  const std::vector<float> params = MastersOf(after);
  for (uint64_t i = 0; i < params.size(); ++i)
    EXPECT_EQ((words[i / 64] >> (i % 64) & 1) != 0, params[i] != before[i]) << i;
}

}  // namespace
}  // namespace hybridopt
