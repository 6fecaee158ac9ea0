// The share of a long test that a run does: HYBRIDOPT_TEST_SCALE in the environment, otherwise the
// build's default (1, or 0.1 under the sanitizers and in the emulator).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace hybridopt {

inline double TestScale() {
  const char* text = std::getenv("HYBRIDOPT_TEST_SCALE");
  return text == nullptr ? HYBRIDOPT_TEST_SCALE_DEFAULT : std::atof(text);
}

// `count` iterations of a full run, at least one.
template <typename Count>
Count Scaled(Count count) {
  const double scaled = std::round(static_cast<double>(count) * TestScale());
  return std::max(Count{1}, static_cast<Count>(scaled));
}

}  // namespace hybridopt
