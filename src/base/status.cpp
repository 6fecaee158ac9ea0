#include "base/status.h"

#include <cstdarg>
#include <cstdio>
#include <exception>
#include <new>

#include "base/utf8.h"

namespace hybridopt {
namespace {

// These strings are made when the library is loaded, because later there may be no memory for them.
// They are never destroyed, because threads may still use them when the process ends.
const std::string& kEmpty = *new std::string;
const std::string& kNoMemoryForText =
    *new std::string("out of host memory, also for the text of this error");

}  // namespace

Status Status::Error(int32_t code, const char* format, ...) noexcept {
  char text[kTextBytesMax + 1];
  va_list arguments;
  va_start(arguments, format);
  const int written = std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  Status status;
  status.code_ = code;
  if (written < 0) return status;  // the C library had no memory
  try {
    status.message_ = std::make_shared<const std::string>(Printable(text, kTextBytesMax));
  } catch (const std::bad_alloc&) {
  }
  return status;
}

Status Status::OfException(const char* what) noexcept {
  try {
    throw;
  } catch (const std::bad_alloc&) {
    return Error(OFFLOAD_OUT_OF_HOST_MEMORY, "out of host memory for %s", what);
  } catch (const std::exception& error) {
    return Error(OFFLOAD_INTERNAL, "%s ended in an exception: %s", what, error.what());
  } catch (...) {
    return Error(OFFLOAD_INTERNAL, "%s ended in an exception of unknown type", what);
  }
}

const std::string& Status::message() const {
  if (message_ != nullptr) return *message_;
  return ok() ? kEmpty : kNoMemoryForText;
}

}  // namespace hybridopt
