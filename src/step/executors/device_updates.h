// Lists of updates that go to the device in one launch.
#pragma once

#include <vector>

#include "base/check.h"
#include "device/device.h"
#include "state/shape.h"

namespace hybridopt {

// Adds the update of a param's elements [begin, begin + range.span.count), one for each stripe.
// `range` has the addresses of element `begin`. Does not allocate, because launches may still read
// the list.
inline void AddUpdates(const StateShape& shape, const ParamShape& param, uint64_t begin,
                       const DeviceUpdate& range, std::vector<DeviceUpdate>& updates) {
  ForEachStripe(shape, param, begin, range.span.count,
                [&](uint64_t offset, uint64_t count, ElementOrder order) {
                  HYBRIDOPT_CHECK(updates.size() < updates.capacity());
                  DeviceUpdate& part = updates.emplace_back(range);
                  part.span = Advanced(range.span, range.types(), offset);
                  part.span.count = count;
                  part.span.order = order;
                  part.noted = range.noted.From(offset);
                });
}

}  // namespace hybridopt
