#include "base/status.h"

#include <cstdarg>
#include <cstdio>

namespace hybridopt {

Status Status::Error(int32_t code, const char* format, ...) {
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  Status status;
  status.code_ = code;
  status.message_ = text;
  return status;
}

}  // namespace hybridopt
