// CHECK: a broken invariant of our own aborts with text; it never becomes a wrong result.
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
