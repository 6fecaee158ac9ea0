// Comm: the other ranks of an optimizer, behind the caller's table of functions.
#pragma once

#include <cstdint>
#include <mutex>

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

  bool present() const { return present_; }
  int32_t rank() const { return functions_.rank; }
  int32_t world() const { return present_ ? functions_.world : 1; }
  int64_t timeout_ns() const { return timeout_ns_; }  // of each call

  // All ranks get the sum of all ranks' sums of squares, and whether all of them are finite.
  // COMM_FAILED if another rank does not answer.
  Status AgreeOnNorm(double* sum, bool* finite) const;
  // Where a function of the table has not returned a while after its timeout: no other is called,
  // and whoever waits for that one gets this failure when it returns. Else OK. Any thread.
  Status GiveUpIfStuck() const;
  // In place: the largest of each of count values over all ranks. Nothing is asked in a world of 1.
  Status AgreeOnMax(int32_t* values, uint32_t count) const;

 private:
  Status AgreeOnMaxOfAll(int32_t* values, uint32_t count) const;
  // A function of the table, called and its status translated.
  Status Call(const char* what, FunctionRef<int32_t()> function) const;

  offload_comm_t functions_{};
  int64_t timeout_ns_ = 0;
  bool present_ = false;

  mutable std::mutex mutex_;           // guards all below
  mutable int64_t call_begin_ns_ = 0;  // of the function that is running; 0: none
  mutable const char* called_ = nullptr;
  mutable Status given_up_;
};

}  // namespace hybridopt
