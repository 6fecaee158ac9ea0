// StateWriter: writes state in any format and to any place, from the numbers that checkpoints store
// and callers give. When it writes a master, it also writes the param: the master, rounded.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/function_ref.h"
#include "place/state_locator.h"
#include "state_io/transfer.h"

namespace hybridopt {

// Elements [first, first + count) of one state of a param.
struct StateElements {
  uint32_t param;
  StateSlot slot;
  uint64_t first;
  uint64_t count;
};

class StateWriter {
 public:
  // What Write may assume about the values that it gets.
  enum class Values {
    kStay,      // they stay unchanged until Await, and the device may copy from them
    kOfCaller,  // the device must not access them
  };
  StateWriter(Transfer& transfer, const ParamTable& table, const StateShape& shape,
              const StateLocator& locator, Values values)
      : transfer_(transfer), table_(table), shape_(shape), locator_(locator), values_(values) {}

  // Whether an array of this dtype can be written to a slot: masters are fp32 numbers, moments fp32
  // or bf16.
  static bool Takes(int32_t dtype, StateSlot slot) {
    return dtype == OFFLOAD_FP32 || (slot != kMaster && dtype == OFFLOAD_BF16);
  }

  // Writes the values, which need not be aligned. Values that the format cannot represent are
  // rounded to nearest.
  Status Write(const StateElements& elements, const ParamLocation& location, int32_t dtype,
               const std::byte* values);
  // Sets all elements of a moment to its initial value (InitialPattern).
  Status Reset(uint32_t param, StateSlot slot, const ParamLocation& location, float first_moment);
  // Waits until queued writes have read the values.
  Status Await() { return transfer_.AwaitUp(); }
  // The last call: waits until all has been written.
  Status End();
  // Whether state may have been written. If so, after a failure the state is partly old and partly
  // new.
  bool has_written() const { return has_written_; }

 private:
  using Make = FunctionRef<void(uint64_t first, uint64_t count, std::byte* into)>;
  Status WriteRange(const StateRange& range, int32_t dtype, const std::byte* values);
  Status WriteParams(const StateElements& elements, const ParamLocation& location,
                     const std::byte* masters);
  Status Put(std::byte* array, uint64_t count, uint64_t element_bytes, bool on_device, Make make);

  Transfer& transfer_;
  const ParamTable& table_;
  const StateShape& shape_;
  const StateLocator& locator_;
  const Values values_;
  bool has_written_ = false;
};

}  // namespace hybridopt
