// Lists of updates that go to the device in one launch.
#pragma once

#include <vector>

#include "base/check.h"
#include "device/device.h"
#include "state/shape.h"

namespace hybridopt {

// Adds the update of one part of a matrix whose addresses `matrix` has. A matrix is in one stripe.
inline void AddPart(const MatrixPart& part, uint32_t index, const DeviceUpdate& matrix,
                    std::vector<DeviceUpdate>& updates) {
  HYBRIDOPT_CHECK(updates.size() < updates.capacity());
  DeviceUpdate& update = updates.emplace_back(matrix);
  update.span = Advanced(matrix.span, matrix.types(), part.begin());
  update.span.count = part.extent();
  update.noted = matrix.noted.From(part.begin());
  update.coefficients = matrix.coefficients + index;
  update.matrix = part.shape;
  update.runs = part.runs;
}

// Adds the update of a param's elements [begin, begin + range.span.count), one for each stripe, or
// for each part of a matrix.
// `range` has the addresses of element `begin`. Does not allocate, because launches may still read
// the list.
inline void AddUpdates(const StateShape& shape, const ParamShape& param, uint64_t begin,
                       const DeviceUpdate& range, std::vector<DeviceUpdate>& updates) {
  const uint64_t most = param.is_of_matrices() ? param.matrix.count() : range.span.count;
  for (uint64_t first = 0; first < range.span.count; first += most)
    ForEachStripe(shape, param, begin + first, most,
                  [&](uint64_t offset, uint64_t count, ElementOrder order) {
                    DeviceUpdate part = range;
                    part.span = Advanced(range.span, range.types(), first + offset);
                    part.span.count = count;
                    part.span.order = order;
                    part.noted = range.noted.From(first + offset);
                    for (uint32_t i = 0; i < param.parts.size(); ++i)
                      AddPart(param.parts[i], i, part, updates);
                    if (param.is_of_matrices()) return;
                    HYBRIDOPT_CHECK(updates.size() < updates.capacity());
                    updates.push_back(part);
                  });
}

}  // namespace hybridopt
