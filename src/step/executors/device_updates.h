// Lists of updates that go to the device in one launch.
#pragma once

#include <vector>

#include "base/check.h"
#include "device/device.h"
#include "state/shape.h"

namespace hybridopt {

// Adds the update of a param's elements [begin, begin + range.span.count), one for each stripe or
// matrix. A matrix is in one stripe.
// `range` has the addresses of element `begin`. Does not allocate, because launches may still read
// the list.
inline void AddUpdates(const StateShape& shape, const ParamShape& param, uint64_t begin,
                       const DeviceUpdate& range, std::vector<DeviceUpdate>& updates) {
  const uint64_t most = param.is_of_matrices() ? param.matrix.count() : range.span.count;
  for (uint64_t first = 0; first < range.span.count; first += most)
    ForEachStripe(shape, param, begin + first, most,
                  [&](uint64_t offset, uint64_t count, ElementOrder order) {
                    HYBRIDOPT_CHECK(updates.size() < updates.capacity());
                    DeviceUpdate& part = updates.emplace_back(range);
                    part.span = Advanced(range.span, range.types(), first + offset);
                    part.span.count = count;
                    part.span.order = order;
                    part.noted = range.noted.From(first + offset);
                    part.matrix = param.matrix;
                  });
}

}  // namespace hybridopt
