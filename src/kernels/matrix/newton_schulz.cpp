#include "kernels/matrix/newton_schulz.h"

#include <algorithm>
#include <cstddef>

#include "base/check.h"
#include "base/system.h"
#include "kernels/matrix/product.h"
#include "kernels/stochastic_rounding.h"

namespace hybridopt {
namespace {

// The elements of a piece of the phases that have no product: whole norm blocks.
constexpr uint64_t kPieceElements = 4 * kNormBlockElements;
// The rows and columns of a block that is turned at a time.
constexpr uint64_t kTurnBlock = 64;

constexpr uint32_t kPhasesBefore = 3;  // momentum, divisor, divide
constexpr uint32_t kPhasesOfStep = 3;  // gram, polynomial, next

constexpr uint64_t PartsOf(uint64_t count, uint64_t part) { return (count + part - 1) / part; }

// Where the parts of the workspace are; `bytes` is the offset of its end.
struct Layout {
  uint64_t iterates[2];
  uint64_t gram;
  uint64_t polynomial;
  uint64_t block_sums;
  uint64_t divisor;
  uint64_t bytes = 0;

  explicit Layout(const MatrixShape& shape) {
    const uint64_t square = shape.short_side() * shape.short_side();
    iterates[0] = Take(shape.count() * sizeof(uint16_t));
    iterates[1] = Take(shape.count() * sizeof(uint16_t));
    gram = Take(square * sizeof(uint16_t));
    polynomial = Take(square * sizeof(uint16_t));
    block_sums = Take(NormBlocksOf(shape.count()) * sizeof(double));
    divisor = Take(sizeof(float));
  }

  uint64_t Take(uint64_t part_bytes) {
    constexpr uint64_t kLine = 64;
    const uint64_t at = bytes;
    bytes += system::RoundUp(part_bytes, kLine);
    return at;
  }
};

// The arguments of UpdateMomenta: `count` elements that lie from the place `begin` of a span on.
struct MomentumRange {
  const MatrixUpdate& update;
  uint64_t begin;
  uint64_t count;
  uint16_t* out;  // U
};

template <int32_t kGradDtype, Format kFormat>
void UpdateMomenta(const MomentumRange& range) {
  using Grad = Element<kGradDtype>;
  using Moment = Codec<kFormat>;
  const Coefficients& c = range.update.coefficients;
  const UpdateSpan span = Advanced(range.update.span, range.update.types, range.begin);
  const auto* const grad = static_cast<const typename Grad::Stored*>(span.grad);
  auto* const momentum = static_cast<typename Moment::Stored*>(span.moment0);
  const bool stochastic = Moment::kIsRounded && span.rounding.stochastic;
  for (uint64_t i = 0; i < range.count; ++i) {
    uint32_t random = 0;
    if (stochastic) {
      const uint64_t index = IndexOf(span.order, i);
      random = RandomBits(CounterOf(span.rounding, index), TweakOf(span.rounding, index)) & 0xFFFF;
    }
    float moment = Moment::Decode(momentum[i]);
    range.out[i] = Fp32ToBf16(UpdateMomentum(c, Grad::Widen(grad[i]) * c.grad_factor, moment));
    momentum[i] = Moment::template EncodeMoment<false>(moment, stochastic, random);
  }
}

template <int32_t kGradDtype>
void UpdateMomenta(const MomentumRange& range) {
  if (range.update.types.formats.moment0 == Format::kFp32)
    return UpdateMomenta<kGradDtype, Format::kFp32>(range);
  HYBRIDOPT_CHECK(range.update.types.formats.moment0 == Format::kBf16);
  UpdateMomenta<kGradDtype, Format::kBf16>(range);
}

void UpdateMomenta(const MomentumRange& range) {
  switch (range.update.types.grad_dtype) {
    case OFFLOAD_FP32:
      return UpdateMomenta<OFFLOAD_FP32>(range);
    case OFFLOAD_BF16:
      return UpdateMomenta<OFFLOAD_BF16>(range);
    default:
      return UpdateMomenta<OFFLOAD_FP16>(range);
  }
}

// Writes rows [begin, end) of `to`, which has `cols` columns: element (i, j) is map(element of
// `from` at i * row_stride + j * col_stride).
template <typename Map>
void CopyRows(const uint16_t* from, uint64_t row_stride, uint64_t col_stride, uint16_t* to,
              uint64_t begin, uint64_t end, uint64_t cols, Map&& map) {
  for (uint64_t col = 0; col < cols; col += kTurnBlock) {
    const uint64_t col_end = std::min(col + kTurnBlock, cols);
    for (uint64_t i = begin; i < end; ++i)
      for (uint64_t j = col; j < col_end; ++j)
        to[i * cols + j] = map(from[i * row_stride + j * col_stride]);
  }
}

}  // namespace

uint64_t NewtonSchulzBytes(const MatrixShape& shape) { return Layout(shape).bytes; }

NewtonSchulz::NewtonSchulz(const KernelTable& kernels, const MatrixUpdate& update)
    : kernels_(kernels),
      update_(update),
      steps_(static_cast<uint32_t>(update.steps.size())),
      short_(update.shape.short_side()),
      long_(update.shape.long_side()) {
  HYBRIDOPT_CHECK(update.span.count == MatrixPart({0, update.shape, update.runs}).extent());
  const Layout layout(update.shape);
  auto* const base = static_cast<std::byte*>(update.workspace);
  for (uint32_t i = 0; i < 2; ++i)
    iterates_[i] = reinterpret_cast<uint16_t*>(base + layout.iterates[i]);
  gram_ = reinterpret_cast<uint16_t*>(base + layout.gram);
  polynomial_ = reinterpret_cast<uint16_t*>(base + layout.polynomial);
  block_sums_ = reinterpret_cast<double*>(base + layout.block_sums);
  divisor_ = reinterpret_cast<float*>(base + layout.divisor);
}

uint32_t NewtonSchulz::phases() const { return kPhasesBefore + kPhasesOfStep * steps_ + 2; }

NewtonSchulz::Phase NewtonSchulz::PhaseOf(uint32_t phase) const {
  constexpr Kind kBefore[kPhasesBefore] = {Kind::kMomentum, Kind::kDivisor, Kind::kDivide};
  constexpr Kind kOfStep[kPhasesOfStep] = {Kind::kGram, Kind::kPolynomial, Kind::kNext};
  if (phase < kPhasesBefore) return {kBefore[phase], 0};
  const uint32_t later = phase - kPhasesBefore;
  if (later < kPhasesOfStep * steps_)
    return {kOfStep[later % kPhasesOfStep], later / kPhasesOfStep};
  return {phase + 2 == phases() ? Kind::kTurn : Kind::kApply, steps_};
}

MatrixProduct NewtonSchulz::ProductOf(const Phase& phase) const {
  const uint16_t* const x = iterate(phase.step);
  const NsStep& step = update_.steps[phase.step];
  MatrixProduct product{};
  product.cols = short_;
  switch (phase.kind) {
    case Kind::kGram:
      product.left = x;
      product.left_row_stride = 1;
      product.left_depth_stride = short_;
      product.right = x;
      product.out = gram_;
      product.rows = short_;
      product.depth = long_;
      product.symmetric = true;
      break;
    case Kind::kPolynomial:
      product.left = gram_;
      product.left_row_stride = short_;
      product.left_depth_stride = 1;
      product.right = gram_;
      product.addend = gram_;
      product.out = polynomial_;
      product.rows = short_;
      product.depth = short_;
      product.product_factor = step.c;
      product.addend_factor = step.b;
      product.symmetric = true;
      break;
    default:
      product.left = x;
      product.left_row_stride = short_;
      product.left_depth_stride = 1;
      product.right = polynomial_;
      product.addend = x;
      product.out = iterate(phase.step + 1);
      product.rows = long_;
      product.depth = short_;
      product.product_factor = 1.0f;
      product.addend_factor = step.a;
  }
  return product;
}

uint64_t NewtonSchulz::pieces(uint32_t phase) const {
  const Phase what = PhaseOf(phase);
  switch (what.kind) {
    case Kind::kMomentum:
    case Kind::kApply:
      return PartsOf(update_.shape.count(), kPieceElements);
    case Kind::kDivisor:
      return 1;
    case Kind::kDivide:
      return PartsOf(long_, kTurnBlock);
    case Kind::kTurn:
      return update_.shape.is_tall() ? 0 : PartsOf(update_.shape.rows, kTurnBlock);
    default:
      return TileCount(ProductOf(what));
  }
}

void NewtonSchulz::RunMomentum(uint64_t piece) const {
  const uint64_t begin = piece * kPieceElements;
  const uint64_t count = std::min(kPieceElements, update_.shape.count() - begin);
  uint16_t* const out = iterate(1) + begin;
  ForEachRun(update_.shape, update_.runs, begin, count,
             [&](uint64_t at, uint64_t offset, uint64_t in_run) {
               UpdateMomenta({update_, at, in_run, out + offset});
             });
  kernels_.SumSquares(OFFLOAD_BF16)(out, count, block_sums_ + begin / kNormBlockElements);
}

void NewtonSchulz::RunDivide(uint64_t piece) const {
  const uint64_t begin = piece * kTurnBlock;
  const bool tall = update_.shape.is_tall();
  CopyRows(iterate(1), tall ? short_ : 1, tall ? 1 : long_, iterate(0), begin,
           std::min(begin + kTurnBlock, long_), short_,
           [divisor = *divisor_](uint16_t u) { return RoundProduct(Bf16ToFp32(u) / divisor); });
}

void NewtonSchulz::RunTurn(uint64_t piece) const {
  const uint64_t begin = piece * kTurnBlock;
  CopyRows(iterate(steps_), 1, short_, iterate(steps_ + 1), begin,
           std::min(begin + kTurnBlock, short_), long_, [](uint16_t x) { return x; });
}

void NewtonSchulz::RunApply(uint64_t piece) const {
  const uint64_t begin = piece * kPieceElements;
  const uint64_t count = std::min(kPieceElements, update_.shape.count() - begin);
  const uint16_t* const x = iterate(update_.shape.is_tall() ? steps_ : steps_ + 1) + begin;
  SpanTypes types = update_.types;
  types.grad_dtype = OFFLOAD_BF16;
  ForEachRun(update_.shape, update_.runs, begin, count,
             [&](uint64_t at, uint64_t offset, uint64_t in_run) {
               UpdateSpan part = Advanced(update_.span, update_.types, at);
               part.grad = x + offset;
               part.moment0 = nullptr;
               part.count = in_run;
               UpdateAndNote(kernels_, kMatrixRule, types, OfMatrixRule(update_), part,
                             update_.noted.From(at));
             });
  kernels_.publish();
}

void NewtonSchulz::RunPiece(uint32_t phase, uint64_t piece) const {
  const Phase what = PhaseOf(phase);
  switch (what.kind) {
    case Kind::kMomentum:
      return RunMomentum(piece);
    case Kind::kDivisor: {
      double sum = 0;
      for (uint64_t i = 0; i < NormBlocksOf(update_.shape.count()); ++i) sum += block_sums_[i];
      *divisor_ = DivisorOf(sum, update_.coefficients.eps);
      return;
    }
    case Kind::kDivide:
      return RunDivide(piece);
    case Kind::kTurn:
      return RunTurn(piece);
    case Kind::kApply:
      return RunApply(piece);
    default:
      kernels_.multiply_tile(ProductOf(what), piece);
  }
}

void UpdateMatrix(const KernelTable& kernels, const MatrixUpdate& update) {
  const NewtonSchulz work(kernels, update);
  for (uint32_t phase = 0; phase < work.phases(); ++phase)
    for (uint64_t piece = 0; piece < work.pieces(phase); ++piece) work.RunPiece(phase, piece);
}

}  // namespace hybridopt
