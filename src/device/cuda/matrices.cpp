#include "device/cuda/matrices.h"

#include <array>
#include <cinttypes>
#include <cstddef>

#include "base/check.h"
#include "base/system.h"
#include "kernels/cuda/cuda_kernels.h"

namespace hybridopt::cuda {
namespace {

constexpr uint64_t kAlignment = 256;
// What a product may use beside its matrices. It is the same for all shapes, because the choice of
// an algorithm depends on it.
constexpr uint64_t kLibraryBytes = uint64_t{8} << 20;
// How many algorithms cuBLASLt is asked for. The best ones may split sums.
constexpr int kAlgorithmsAsked = 32;
// The runs of rows of a part that one launch updates.
constexpr size_t kRunsAtOnce = 32;

// The parts of a workspace; `bytes` is the offset of its end.
struct Parts {
  void* iterates[2];  // X, row-major; the first one is U at the start
  void* gram;
  void* polynomial;
  double* block_sums;
  MatrixScalars* scalars;
  void* library;
  uint64_t bytes = 0;

  Parts(const MatrixShape& shape, void* workspace) : base_(workspace) {
    const uint64_t square = shape.short_side() * shape.short_side();
    iterates[0] = Take(shape.count() * sizeof(uint16_t));
    iterates[1] = Take(shape.count() * sizeof(uint16_t));
    gram = Take(square * sizeof(uint16_t));
    polynomial = Take(square * sizeof(uint16_t));
    block_sums = static_cast<double*>(Take(NormBlocksOf(shape.count()) * sizeof(double)));
    scalars = static_cast<MatrixScalars*>(Take(sizeof(MatrixScalars)));
    library = Take(kLibraryBytes);
  }
  uint16_t* u() const { return static_cast<uint16_t*>(iterates[0]); }

 private:
  void* Take(uint64_t part_bytes) {
    void* const part = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(base_) + bytes);
    bytes += system::RoundUp(part_bytes, kAlignment);
    return part;
  }
  void* const base_;
};

bool InQuads(const void* array, uint64_t element_bytes) {
  return reinterpret_cast<uintptr_t>(array) % (4 * element_bytes) == 0;
}

Status CheckLt(LtOutcome outcome, const char* what) {
  if (outcome == 0) return {};
  return Status::Error(OFFLOAD_DEVICE_FAILED, "%s: cuBLASLt returns status %d", what, outcome);
}

}  // namespace

Matrices::~Matrices() {
  for (const auto& [shape, product] : products_) Destroy(product);
  if (lt_.handle != nullptr) (void)lt_.functions.destroy(lt_.handle);
}

uint64_t Matrices::WorkspaceBytes(const MatrixShape& shape) { return Parts(shape, nullptr).bytes; }

Status Matrices::Open() {
  std::lock_guard lock(mutex_);
  if (lt_.handle != nullptr) return {};
  HYBRIDOPT_ASSIGN(lt_, OpenCublasLt());
  return {};
}

std::string Matrices::Version() {
  std::lock_guard lock(mutex_);
  HYBRIDOPT_CHECK(lt_.handle != nullptr);
  return "cuBLASLt " + std::to_string(lt_.functions.get_version());
}

// ------------------------------------------------------------------------------------- products --

Result<const Matrices::Product*> Matrices::Find(const ProductShape& shape) {
  std::lock_guard lock(mutex_);
  HYBRIDOPT_CHECK(lt_.handle != nullptr);
  const auto found = products_.find(shape);
  if (found != products_.end()) return &found->second;
  Product product;
  Status status = Make(shape, &product);
  if (!status.ok()) {
    Destroy(product);
    return status;
  }
  return &products_.emplace(shape, product).first->second;
}

Status Matrices::Make(const ProductShape& shape, Product* product) {
  const CublasLt& lt = lt_.functions;
  HYBRIDOPT_TRY(CheckLt(lt.operation_create(&product->operation, kLtCompute32F, CUDA_R_32F),
                        "cublasLtMatmulDescCreate"));
  const auto transpose = [&](int which) {
    return CheckLt(
        lt.operation_set(product->operation, which, &kLtTransposed, sizeof(kLtTransposed)),
        "cublasLtMatmulDescSetAttribute");
  };
  if (shape.transposed_a) HYBRIDOPT_TRY(transpose(kLtTransposeA));
  if (shape.transposed_b) HYBRIDOPT_TRY(transpose(kLtTransposeB));
  const auto lay_out = [&](LtLayout* layout, uint64_t rows, uint64_t cols, bool transposed) {
    const uint64_t stored_rows = transposed ? cols : rows;
    return CheckLt(lt.layout_create(layout, CUDA_R_16BF, stored_rows, transposed ? rows : cols,
                                    static_cast<int64_t>(stored_rows)),
                   "cublasLtMatrixLayoutCreate");
  };
  HYBRIDOPT_TRY(lay_out(&product->a, shape.rows, shape.depth, shape.transposed_a));
  HYBRIDOPT_TRY(lay_out(&product->b, shape.depth, shape.cols, shape.transposed_b));
  HYBRIDOPT_TRY(lay_out(&product->d, shape.rows, shape.cols, false));
  return Choose(shape, product);
}

// Takes the first algorithm, in cuBLASLt's order, that adds each sum in one thread block.
Status Matrices::Choose(const ProductShape& shape, Product* product) {
  const CublasLt& lt = lt_.functions;
  LtPreference preference = nullptr;
  HYBRIDOPT_TRY(CheckLt(lt.preference_create(&preference), "cublasLtMatmulPreferenceCreate"));
  const uint64_t bytes_max = kLibraryBytes;
  LtOutcome outcome =
      lt.preference_set(preference, kLtWorkspaceBytesMax, &bytes_max, sizeof(bytes_max));
  if (outcome == 0)
    outcome =
        lt.preference_set(preference, kLtReductionMask, &kLtNoReduction, sizeof(kLtNoReduction));
  LtHeuristic found[kAlgorithmsAsked] = {};
  int count = 0;
  if (outcome == 0)
    outcome = lt.heuristic(lt_.handle, product->operation, product->a, product->b, product->d,
                           product->d, preference, kAlgorithmsAsked, found, &count);
  (void)lt.preference_destroy(preference);
  const auto is_whole = [&](const LtHeuristic& one) {
    int32_t parts = 0;
    uint32_t reduction = 1;
    size_t written = 0;
    const LtAlgorithm* const algorithm = &one.algorithm;
    return one.outcome == 0 && one.workspace_bytes <= kLibraryBytes &&
           lt.algorithm_get(algorithm, kLtSplitK, &parts, sizeof(parts), &written) == 0 &&
           lt.algorithm_get(algorithm, kLtReduction, &reduction, sizeof(reduction), &written) ==
               0 &&
           parts <= 1 && reduction == kLtNoReduction;
  };
  for (int i = 0; outcome == 0 && i < count; ++i) {
    if (!is_whole(found[i])) continue;
    product->algorithm = found[i].algorithm;
    return {};
  }
  return Status::Error(OFFLOAD_UNSUPPORTED,
                       "cuBLASLt %zu has no algorithm without split sums for a product of %" PRIu64
                       " x %" PRIu64 " by %" PRIu64 " x %" PRIu64
                       " in bf16 (status %d); update this matrix with another algorithm",
                       lt.get_version(), shape.rows, shape.depth, shape.depth, shape.cols, outcome);
}

void Matrices::Destroy(const Product& product) {
  for (LtLayout layout : {product.a, product.b, product.d})
    if (layout != nullptr) (void)lt_.functions.layout_destroy(layout);
  if (product.operation != nullptr) (void)lt_.functions.operation_destroy(product.operation);
}

Status Matrices::Multiply(StreamHandle stream, const ProductShape& shape, const Operands& operands,
                          void* workspace) {
  HYBRIDOPT_ASSIGN(const Product* const product, Find(shape));
  return CheckLt(lt_.functions.multiply(lt_.handle, product->operation, &operands.alpha, operands.a,
                                        product->a, operands.b, product->b, &operands.beta,
                                        operands.c, product->d, operands.d, product->d,
                                        &product->algorithm, workspace, kLibraryBytes, Of(stream)),
                 "cublasLtMatmul");
}

// --------------------------------------------------------------------------------------- update --

// In cuBLASLt's order a row-major X is X'. A wide X has the Gram matrix X X' = (X')' X', and the
// next X' is X' P; a tall one has X' X and P X'.
Status Matrices::Orthogonalize(StreamHandle stream, const MatrixUpdate& update) {
  const MatrixShape& shape = update.shape;
  const bool tall = shape.is_tall();
  const uint64_t short_side = shape.short_side(), long_side = shape.long_side();
  const Parts parts(shape, update.workspace);
  const ProductShape gram = {short_side, short_side, long_side, !tall, tall};
  const ProductShape polynomial = {short_side, short_side, short_side, false, false};
  const ProductShape next = {shape.cols, shape.rows, short_side, false, false};
  for (size_t i = 0; i < update.steps.size(); ++i) {
    const NsStep& step = update.steps[i];
    void* const x = parts.iterates[i % 2];
    HYBRIDOPT_TRY(
        Multiply(stream, gram, {1.0f, x, x, 0.0f, parts.gram, parts.gram}, parts.library));
    HYBRIDOPT_TRY(Multiply(stream, polynomial,
                           {step.c, parts.gram, parts.gram, step.b, parts.gram, parts.polynomial},
                           parts.library));
    HYBRIDOPT_TRY(Multiply(stream, next,
                           {1.0f, tall ? parts.polynomial : x, tall ? x : parts.polynomial, step.a,
                            x, parts.iterates[(i + 1) % 2]},
                           parts.library));
  }
  return {};
}

// Writes U without gaps; the runs of rows of a part have a launch each.
Status Matrices::UpdateMomenta(StreamHandle stream, const MatrixUpdate& update,
                               const Verdict* verdict, uint16_t* u) {
  Status status;
  const auto queue = [&](uint64_t at, uint64_t offset, uint64_t count) {
    if (!status.ok()) return;
    MatrixUpdate run = update;
    run.span = Advanced(update.span, update.types, at);
    run.span.count = count;
    uint16_t* const out = u + offset;
    const bool quads = InQuads(run.span.grad, DtypeBytes(update.types.grad_dtype)) &&
                       InQuads(run.span.moment0, RowOf(update.types.formats.moment0).Bytes(1)) &&
                       InQuads(out, sizeof(*out));
    status = fault_.Check(LaunchMomentum(Of(stream), run, quads, verdict, out), "momentum");
  };
  ForEachRun(update.shape, update.runs, 0, update.shape.count(), queue);
  return status;
}

Status Matrices::Divide(StreamHandle stream, const MatrixUpdate& update, const Verdict* verdict) {
  const Parts parts(update.shape, update.workspace);
  const uint64_t count = update.shape.count();
  HYBRIDOPT_TRY(UpdateMomenta(stream, update, verdict, parts.u()));
  const NormInput input = {parts.u(), count, OFFLOAD_BF16, 0};
  NormLaunch launch{};
  launch.inputs = {&input, 1};
  launch.block_sums = parts.block_sums;
  HYBRIDOPT_TRY(device_.Norm(stream, launch));
  return fault_.Check(LaunchDivide(Of(stream), parts.block_sums, count, update.coefficients.eps,
                                   verdict, parts.scalars, parts.u()),
                      "division by the norm");
}

Status Matrices::Apply(StreamHandle stream, const MatrixUpdate& update) {
  const Parts parts(update.shape, update.workspace);
  const auto* const x = static_cast<const uint16_t*>(parts.iterates[update.steps.size() % 2]);
  const Coefficients coefficients = OfMatrixRule(update);
  std::array<DeviceUpdate, kRunsAtOnce> runs;
  size_t listed = 0;
  Status status;
  const auto launch = [&] {
    status = device_.Update(
        stream,
        {kMatrixRule, std::span(runs).first(listed), {&coefficients, 1}, &parts.scalars->verdict});
    listed = 0;
  };
  const auto list = [&](uint64_t at, uint64_t offset, uint64_t count) {
    if (!status.ok()) return;
    DeviceUpdate& run = runs[listed++] = {};
    run.span = Advanced(update.span, update.types, at);
    run.span.count = count;
    run.span.grad = x + offset;
    run.span.moment0 = nullptr;
    run.grad_dtype = OFFLOAD_BF16;
    run.param_dtype = update.types.param_dtype;
    run.formats = update.types.formats;
    run.noted = update.noted.From(at);
    if (listed == runs.size()) launch();
  };
  ForEachRun(update.shape, update.runs, 0, update.shape.count(), list);
  if (status.ok() && listed > 0) launch();
  return status;
}

Status Matrices::Prepare(StreamHandle stream, const MatrixShape& shape, void* workspace) {
  if (shape.count() == 0) return {};
  const NsStep step{};
  MatrixUpdate update{};
  update.shape = shape;
  update.steps = {&step, 1};
  update.workspace = workspace;
  HYBRIDOPT_TRY(Open());
  return Orthogonalize(stream, update);
}

Status Matrices::Update(StreamHandle stream, const MatrixUpdate& update, const Verdict* verdict) {
  if (update.span.count == 0) return {};
  HYBRIDOPT_CHECK(update.span.count == MatrixPart({0, update.shape, update.runs}).extent());
  HYBRIDOPT_CHECK(reinterpret_cast<uintptr_t>(update.workspace) % kAlignment == 0);
  HYBRIDOPT_TRY(Open());
  HYBRIDOPT_TRY(Divide(stream, update, verdict));
  HYBRIDOPT_TRY(Orthogonalize(stream, update));
  return Apply(stream, update);
}

}  // namespace hybridopt::cuda
