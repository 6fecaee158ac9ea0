// Stopwatch: adds the time until the end of its scope to a sum.
#pragma once

#include <cstdint>

#include "base/system.h"

namespace hybridopt {

inline double SecondsSince(int64_t begin_ns) {
  return static_cast<double>(system::NowNs() - begin_ns) * 1e-9;
}

class Stopwatch {
 public:
  explicit Stopwatch(double& sum) : sum_(sum) {}
  ~Stopwatch() { sum_ += SecondsSince(begin_ns_); }

 private:
  double& sum_;
  const int64_t begin_ns_ = system::NowNs();
};

}  // namespace hybridopt
