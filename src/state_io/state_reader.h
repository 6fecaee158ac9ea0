// StateReader: reads state in any format and from any place, and returns it as the numbers that
// checkpoints store and callers see.
#pragma once

#include <cstddef>
#include <cstdint>

#include "place/state_locator.h"
#include "state_io/transfer.h"

namespace hybridopt {

// Whether an array in this format has the same bytes as an array of this dtype.
inline bool IsArrayOf(Format format, int32_t dtype) {
  return !RowOf(format).beside_param && RowOf(format).view_dtype == dtype;
}

class StateReader {
 public:
  explicit StateReader(Transfer& transfer) : transfer_(transfer) {}

  // Reads elements [first, first + count) of a range as an array of `dtype`: fp32, or the dtype
  // that checkpoints store for the range's format. `into` is aligned to its elements and lives
  // until the transfer has been destroyed.
  Status Read(StateRange range, uint64_t first, uint64_t count, int32_t dtype, std::byte* into);
  // Reads the range as fp32 into memory of the caller. The device never copies to that memory. The
  // workers share the elements that are on the host.
  Status ReadForCaller(StateRange range, float* into);

 private:
  Status DecodeFromDevice(const StateRange& range, uint64_t first, uint64_t count, float* into);

  Transfer& transfer_;
};

}  // namespace hybridopt
