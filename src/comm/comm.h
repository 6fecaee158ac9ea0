// Comm: calls to the other ranks of an optimizer, through the caller's table of functions.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>

#include "base/function_ref.h"
#include "base/status.h"

namespace hybridopt {

class Comm {
 public:
  Comm() = default;  // no other ranks
  Comm(const offload_comm_t& functions, int64_t timeout_ns)
      : functions_(functions), timeout_ns_(timeout_ns), present_(true) {}

  // INVALID_ARGUMENT names the field.
  static Status Check(const offload_comm_t& functions);
  // For tables by which messages go, too.
  static Status CheckExchange(const offload_comm_t& functions);

  bool present() const { return present_; }
  int32_t rank() const { return functions_.rank; }
  int32_t world() const { return present_ ? functions_.world : 1; }
  int64_t timeout_ns() const { return timeout_ns_; }  // of each call

  // All ranks get the sum of all ranks' sums of squares, and whether all of them are finite.
  // COMM_FAILED if another rank does not answer in time.
  Status AgreeOnNorm(double* sum, bool* finite) const;
  // COMM_FAILED if a function of the table has not returned some time after its timeout. From then
  // on no function of the table is called, and the call that waits for the stuck function fails
  // when it returns. Otherwise OK. Any thread may call this.
  Status GiveUpIfStuck() const;
  // Replaces each of `count` values by its maximum over all ranks. Does nothing in a world of 1.
  Status AgreeOnMax(int32_t* values, uint32_t count) const;
  // Sends and receives messages; see offload_comm_t. COMM_FAILED as above.
  Status Exchange(std::span<const offload_message_t> messages, offload_stream_t stream) const;

 private:
  Status AgreeOnMaxOfAll(int32_t* values, uint32_t count) const;
  // Calls a function of the table and translates its status.
  Status Call(const char* what, FunctionRef<int32_t()> function) const;

  offload_comm_t functions_{};
  int64_t timeout_ns_ = 0;
  bool present_ = false;

  mutable std::mutex mutex_;           // guards all below
  mutable int64_t call_begin_ns_ = 0;  // when the running function was called; 0: none runs
  mutable const char* called_ = nullptr;
  mutable Status given_up_;
};

}  // namespace hybridopt
