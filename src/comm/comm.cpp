#include "comm/comm.h"

#include <cmath>

namespace hybridopt {

Status Comm::Check(const offload_comm_t& functions) {
  if (functions.world < 1 || functions.rank < 0 || functions.rank >= functions.world)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "comm.rank is %d and comm.world is %d, expected 0 <= rank < world",
                         functions.rank, functions.world);
  if (functions.reserved != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "comm.reserved is %u, expected 0",
                         functions.reserved);
  if (functions.sum == nullptr || functions.max == nullptr || functions.barrier == nullptr)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "comm.%s is NULL, expected a function",
                         functions.sum == nullptr   ? "sum"
                         : functions.max == nullptr ? "max"
                                                    : "barrier");
  return {};
}

Status Comm::AgreeOnNorm(double* sum, bool* finite) const {
  if (!present_) return {};
  // Flags travel apart from sums: a sum over ranks may be computed in ways that lose a NaN.
  int32_t not_finite = *finite ? 0 : 1;
  if (!*finite) *sum = 0;
  HYBRIDOPT_TRY(Call("sum", [&] { return functions_.sum(functions_.user, sum, 1, timeout_ns_); }));
  HYBRIDOPT_TRY(AgreeOnMaxOfAll(&not_finite, 1));
  *finite = not_finite == 0 && std::isfinite(*sum);
  return {};
}

Status Comm::AgreeOnMax(int32_t* values, uint32_t count) const {
  if (world() == 1) return {};
  return AgreeOnMaxOfAll(values, count);
}

Status Comm::AgreeOnMaxOfAll(int32_t* values, uint32_t count) const {
  return Call("max", [&] { return functions_.max(functions_.user, values, count, timeout_ns_); });
}

Status Comm::Call(const char* what, FunctionRef<int32_t()> function) const {
  int32_t status = OFFLOAD_OK;
  const Status thrown = CatchExceptions("the function", [&]() -> Status {
    status = function();
    return {};
  });
  if (!thrown.ok())
    return Status::Error(OFFLOAD_COMM_FAILED, "rank %d of %d: comm.%s: %s", functions_.rank,
                         functions_.world, what, thrown.message().c_str());
  if (status == OFFLOAD_OK) return {};
  if (status == OFFLOAD_TIMED_OUT)
    return Status::Error(OFFLOAD_COMM_FAILED,
                         "rank %d of %d: comm.%s: another rank did not answer within %.1f s "
                         "(options.comm_timeout_ns)",
                         functions_.rank, functions_.world, what,
                         static_cast<double>(timeout_ns_) * 1e-9);
  return Status::Error(OFFLOAD_COMM_FAILED,
                       "rank %d of %d: comm.%s returned %d; another rank has failed or is gone",
                       functions_.rank, functions_.world, what, status);
}

}  // namespace hybridopt
