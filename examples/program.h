// program.h: what the example programs share: errors end the program, and flags hold numbers.
#ifndef HYBRIDOPT_EXAMPLES_PROGRAM_H
#define HYBRIDOPT_EXAMPLES_PROGRAM_H

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>

#include <chrono>
#include <string>

#include "offload.h"

[[noreturn]] inline void fail(const std::string& text) {
  fflush(stdout);
  fprintf(stderr, "%s: %s\n", program_invocation_short_name, text.c_str());
  exit(1);
}

inline void must(int32_t status, const char* call) {
  if (status == OFFLOAD_OK) return;
  fail(std::string(call) + "\n" + offload_status_name(status) + ": " + offload_last_error());
}
// Every call of the library that has to succeed goes through here.
#define MUST(call) must(call, #call)

// Seconds.
inline double now() {
  using Clock = std::chrono::steady_clock;
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// The value of a flag; text is NULL if the command line ends before it.
inline double number(const std::string& flag, const char* text, double least, double most) {
  char* end = nullptr;
  const double value = text ? strtod(text, &end) : 0;
  if (!text || end == text || *end || !(value >= least && value <= most)) {
    char range[64];
    snprintf(range, sizeof range, "a number from %.15g to %.15g", least, most);
    const std::string got = text ? std::string("'").append(text) + "'" : "nothing";
    fail(flag + ": got " + got + ", expected " + range);
  }
  return value;
}

#endif  // HYBRIDOPT_EXAMPLES_PROGRAM_H
