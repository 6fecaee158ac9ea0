#include "device/cuda/update_rows.h"

#include "base/check.h"

namespace hybridopt::cuda {
namespace {

constexpr uint64_t kAtOnce = 4;  // elements that the kernel reads at once

bool CanReadAtOnce(const void* array, uint64_t element_bytes) {
  return reinterpret_cast<uintptr_t>(array) % (kAtOnce * element_bytes) == 0;
}

bool Vectors(const UpdateSpan& span, const SpanTypes& types) {
  return CanReadAtOnce(span.grad, DtypeBytes(types.grad_dtype)) &&
         CanReadAtOnce(span.param, DtypeBytes(types.param_dtype)) &&
         CanReadAtOnce(span.master, types.master_bytes()) &&
         CanReadAtOnce(span.moment0, types.moment_bytes()) &&
         CanReadAtOnce(span.moment1, types.moment_bytes());
}

}  // namespace

UpdateKind KindOf(Rule rule, const DeviceUpdate& update) {
  const SpanTypes types = update.types();
  const bool is_bf16 = types.param_dtype == OFFLOAD_BF16;
  HYBRIDOPT_CHECK(is_bf16 || !IsSplit(types.layout));
  const Rounding& rounding = update.span.rounding;
  return {rule, types, IsSplit(types.layout) || (is_bf16 && rounding.ties_away),
          HasBf16Moments(types.layout) && rounding.stochastic};
}

uint32_t NumberOf(const UpdateKind& kind) {
  const auto layout = static_cast<int32_t>(kind.types.layout);
  const int32_t dtypes = (kind.types.grad_dtype - 1) * kDtypeCount + kind.types.param_dtype - 1;
  const int32_t roundings = 2 * kind.ties_away + kind.stochastic;
  return static_cast<uint32_t>((layout * kDtypeCount * kDtypeCount + dtypes) * 4 + roundings);
}

UpdateRow RowOf(const DeviceUpdate& update, const Coefficients& coefficients, uint32_t first_tile) {
  return {update.span, coefficients, first_tile, Vectors(update.span, update.types())};
}

}  // namespace hybridopt::cuda
