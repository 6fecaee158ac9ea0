#include "device/cuda/update_rows.h"

#include "base/check.h"

namespace hybridopt::cuda {
namespace {

constexpr uint64_t kAtOnce = 4;  // elements that the kernel loads together

bool CanReadAtOnce(const void* array, uint64_t element_bytes) {
  return reinterpret_cast<uintptr_t>(array) % (kAtOnce * element_bytes) == 0;
}

bool Vectors(const UpdateSpan& span, const SpanTypes& types) {
  return CanReadAtOnce(span.grad, DtypeBytes(types.grad_dtype)) &&
         CanReadAtOnce(span.param, DtypeBytes(types.param_dtype)) &&
         CanReadAtOnce(span.master, RowOf(types.formats.master).Bytes(1)) &&
         CanReadAtOnce(span.moment0, RowOf(types.formats.moment0).Bytes(1)) &&
         CanReadAtOnce(span.moment1, RowOf(types.formats.moment1).Bytes(1));
}

}  // namespace

UpdateKind KindOf(Rule rule, const DeviceUpdate& update) {
  const SpanTypes types = update.types();
  const bool is_bf16 = types.param_dtype == OFFLOAD_BF16;
  const bool beside_param = RowOf(types.formats.master).beside_param;
  HYBRIDOPT_CHECK(is_bf16 || !beside_param);
  const Rounding& rounding = update.span.rounding;
  const bool rounds =
      RowOf(types.formats.master).is_rounded || RowOf(types.formats.moment0).is_rounded;
  return {rule, types, beside_param || (is_bf16 && rounding.ties_away),
          rounds && rounding.stochastic};
}

uint32_t NumberOf(const UpdateKind& kind) {
  return IndexOf(kind.rule, kind.types) * 4 + 2 * kind.ties_away + kind.stochastic;
}

UpdateRow RowOf(const DeviceUpdate& update, const Coefficients& coefficients, uint32_t first_tile) {
  return {update.span, update.noted, coefficients, first_tile,
          Vectors(update.span, update.types())};
}

}  // namespace hybridopt::cuda
