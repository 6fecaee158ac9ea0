// Status and Result<T>: how every function below the ABI reports failure. The library's own code
// does not throw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/check.h"
#include "offload.h"

namespace hybridopt {

// OFFLOAD_OK, or one of enum offload_status with a text that names the parameter, what was got,
// what was expected and the way out. An OK status owns no memory, and copies share their text.
class [[nodiscard]] Status {
 public:
  Status() = default;

  static constexpr size_t kTextBytesMax = 1023;
  // The text is made printable (utf8.h), because it may quote files; what does not fit is cut off.
  // If there is no memory for the text, the status has the code and a fixed text.
  [[gnu::format(printf, 2, 3)]] static Status Error(int32_t code, const char* format, ...) noexcept;
  // The status for the exception that is being handled: OUT_OF_HOST_MEMORY for std::bad_alloc, else
  // INTERNAL. `what` names the work that threw it, as in "a save".
  static Status OfException(const char* what) noexcept;

  bool ok() const { return code_ == OFFLOAD_OK; }
  int32_t code() const { return code_; }
  const std::string& message() const;

 private:
  int32_t code_ = OFFLOAD_OK;
  std::shared_ptr<const std::string> message_;  // NULL: OK, or there was no memory for the text
};

// Returns the status of call(), or that of the exception that it throws.
template <typename Call>
Status CatchExceptions(const char* what, Call&& call) noexcept {
  try {
    return call();
  } catch (...) {
    return Status::OfException(what);
  }
}

// A value, or the status that says why there is none.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) { HYBRIDOPT_CHECK(!status_.ok()); }

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() { return *value_; }
  const T& value() const { return *value_; }

 private:
  Status status_;
  std::optional<T> value_;
};

}  // namespace hybridopt

// Returns the failure of `expression` (a Status) to the caller.
#define HYBRIDOPT_TRY(expression)                                                           \
  do {                                                                                      \
    if (::hybridopt::Status try_status = (expression); !try_status.ok()) return try_status; \
  } while (false)

#define HYBRIDOPT_JOIN_INNER(a, b) a##b
#define HYBRIDOPT_JOIN(a, b) HYBRIDOPT_JOIN_INNER(a, b)

// Moves the value of `expression` (a Result) into `target`, or returns its failure to the caller.
#define HYBRIDOPT_ASSIGN(target, expression)                                                      \
  auto HYBRIDOPT_JOIN(result_, __LINE__) = (expression);                                          \
  if (!HYBRIDOPT_JOIN(result_, __LINE__).ok()) return HYBRIDOPT_JOIN(result_, __LINE__).status(); \
  target = std::move(HYBRIDOPT_JOIN(result_, __LINE__).value())
