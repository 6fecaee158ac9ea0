// CHECK: a broken invariant of the library aborts the process with a text, before it can lead to a
// wrong result.
#pragma once

#include <cstdio>
#include <cstdlib>

#define HYBRIDOPT_CHECK(condition)                                                            \
  do {                                                                                        \
    if (!(condition)) [[unlikely]] {                                                          \
      std::fprintf(stderr, "hybridopt: broken invariant %s at %s:%d\n", #condition, __FILE__, \
                   __LINE__);                                                                 \
      std::abort();                                                                           \
    }                                                                                         \
  } while (false)
