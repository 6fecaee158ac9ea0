#include "comm/comm.h"

#include <cmath>

#include "base/system.h"

namespace hybridopt {

Status Comm::Check(const offload_comm_t& functions) {
  if (functions.world < 1 || functions.rank < 0 || functions.rank >= functions.world)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "comm.rank is %d and comm.world is %d, expected 0 <= rank < world",
                         functions.rank, functions.world);
  if (functions.reserved != 0 || functions.reserved1 != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "comm.%s is %u, expected 0",
                         functions.reserved != 0 ? "reserved" : "reserved1",
                         functions.reserved != 0 ? functions.reserved : functions.reserved1);
  if (functions.exchange_on_host < 0 || functions.exchange_on_host > 1)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "comm.exchange_on_host is %d, expected 0 or 1",
                         functions.exchange_on_host);
  if (functions.sum == nullptr || functions.max == nullptr || functions.barrier == nullptr)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "comm.%s is NULL, expected a function",
                         functions.sum == nullptr   ? "sum"
                         : functions.max == nullptr ? "max"
                                                    : "barrier");
  return {};
}

Status Comm::CheckExchange(const offload_comm_t& functions) {
  HYBRIDOPT_TRY(Check(functions));
  if (functions.exchange != nullptr) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "comm.exchange is NULL, expected a function that sends and receives; tables "
                       "of offload_mpi.h and offload_nccl.h have one");
}

Status Comm::AgreeOnNorm(double* sum, bool* finite) const {
  if (!present_) return {};
  // The ranks agree on finiteness in a call of its own: a comm function may compute a sum over
  // ranks in a way that loses a NaN.
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

Status Comm::Exchange(std::span<const offload_message_t> messages, offload_stream_t stream) const {
  if (messages.empty()) return {};
  return Call("exchange", [&] {
    return functions_.exchange(functions_.user, messages.data(),
                               static_cast<uint32_t>(messages.size()), stream, timeout_ns_);
  });
}

Status Comm::GiveUpIfStuck() const {
  constexpr int64_t kGraceNs = 1'000'000'000;
  std::lock_guard lock(mutex_);
  if (call_begin_ns_ == 0 || system::NowNs() - call_begin_ns_ - kGraceNs < timeout_ns_)
    return given_up_;
  if (given_up_.ok())
    given_up_ = Status::Error(
        OFFLOAD_COMM_FAILED,
        "rank %d of %d: comm.%s has not returned %.1f s after its timeout (options.comm_timeout_ns "
        "is %.1f s); the library keeps the memory of this optimizer and of its context, and it "
        "touches no param or gradient any more; keep what the function uses until it returns",
        functions_.rank, functions_.world, called_, static_cast<double>(kGraceNs) * 1e-9,
        static_cast<double>(timeout_ns_) * 1e-9);
  return given_up_;
}

Status Comm::Call(const char* what, FunctionRef<int32_t()> function) const {
  {
    std::lock_guard lock(mutex_);
    HYBRIDOPT_TRY(given_up_);
    call_begin_ns_ = system::NowNs();
    called_ = what;
  }
  int32_t status = OFFLOAD_OK;
  const Status thrown = CatchExceptions("the function", [&]() -> Status {
    status = function();
    return {};
  });
  {
    std::lock_guard lock(mutex_);
    call_begin_ns_ = 0;
    HYBRIDOPT_TRY(given_up_);
  }
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
