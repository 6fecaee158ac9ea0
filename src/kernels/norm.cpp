#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/kernels.h"

namespace hybridopt {

Verdict Decide(double sum_squares, double grad_scale, double grad_norm_max) {
  const double norm = std::sqrt(sum_squares) / grad_scale;
  if (!std::isfinite(sum_squares)) {
    return {.grad_norm = norm, .grad_clip = 1.0, .grad_factor = 0.0f, .skip = 1};
  }
  const double clip = grad_norm_max > 0.0 ? std::min(1.0, grad_norm_max / (norm + 1e-6)) : 1.0;
  return {.grad_norm = norm,
          .grad_clip = clip,
          .grad_factor = static_cast<float>(clip / grad_scale),
          .skip = 0};
}

Verdict AssumeFinite(double grad_scale) {
  return {.grad_norm = std::numeric_limits<double>::quiet_NaN(),
          .grad_clip = 1.0,
          .grad_factor = static_cast<float>(1.0 / grad_scale),
          .skip = 0};
}

}  // namespace hybridopt
