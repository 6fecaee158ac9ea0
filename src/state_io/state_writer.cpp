#include "state_io/state_writer.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "state_io/initial_state.h"
#include "state_io/shared_work.h"
#include "state_io/state_reader.h"

namespace hybridopt {
namespace {

// Bytes that are made at a time for a copy to the device: while one half of the staging memory is
// copied, the next values are made in the other half.
constexpr uint64_t kMadeBytes = Transfer::kStagingBytes / 2;

// The target of rounding a master: a param of this dtype whose masters have this format.
struct Rounded {
  int32_t dtype;
  Format master;
};

// Each way of rounding has its own loop, so that the compiler can vectorize it.
template <typename RoundOne>
void RoundEach(const std::byte* values, uint64_t count, RoundOne round_one, std::byte* rounded) {
  for (uint64_t i = 0; i < count; ++i)
    StoreElement<uint16_t>(rounded, i, round_one(LoadElement<float>(values, i)));
}

// Rounds masters to their params. The masters need not be aligned.
void RoundToParams(const std::byte* masters, uint64_t count, const Rounded& to, std::byte* params) {
  if (RowOf(to.master).beside_param) return RowOf(to.master).encode_params(masters, count, params);
  switch (to.dtype) {
    case OFFLOAD_FP32:
      std::memcpy(params, masters, count * sizeof(float));
      return;
    case OFFLOAD_FP16:
      return RoundEach(
          masters, count, [](float value) { return Fp32ToFp16(value); }, params);
    default:
      HYBRIDOPT_CHECK(to.dtype == OFFLOAD_BF16);
      RoundEach(
          masters, count, [](float value) { return Fp32ToBf16(value); }, params);
  }
}

// Stores an array of `dtype` in a format: fp32 is rounded to nearest, bf16 is widened exactly.
void Encode(Format format, int32_t dtype, const std::byte* values, uint64_t count,
            std::byte* stored) {
  if (IsArrayOf(format, dtype)) {
    std::memcpy(stored, values, RowOf(format).Bytes(count));
    return;
  }
  if (dtype == OFFLOAD_FP32) return RowOf(format).encode(values, count, stored);
  std::array<float, 1024> wide;
  for (uint64_t done = 0; done < count;) {
    const uint64_t now = std::min<uint64_t>(count - done, wide.size());
    RowOf(Format::kBf16).decode(values + done * DtypeBytes(dtype), nullptr, now, wide.data());
    RowOf(format).encode(reinterpret_cast<const std::byte*>(wide.data()), now,
                         stored + RowOf(format).Bytes(done));
    done += now;
  }
}

}  // namespace

Status StateWriter::Write(const StateElements& elements, const ParamLocation& location,
                          int32_t dtype, const std::byte* values) {
  has_written_ = true;
  for (uint64_t done = 0; done < elements.count;) {
    const uint64_t first = elements.first + done;
    StateRange range =
        locator_.At(elements.param, elements.slot, first, elements.count - done, location);
    HYBRIDOPT_TRY(range.BringToWrite());
    const std::byte* const from = values + done * DtypeBytes(dtype);
    HYBRIDOPT_TRY(WriteRange(range, dtype, from));
    if (elements.slot == kMaster && !range.is_param)
      HYBRIDOPT_TRY(WriteParams({elements.param, kMaster, first, range.count}, location, from));
    done += range.count;
  }
  return {};
}

// If masters are stored beside params, this writes only the array; WriteParams writes the params.
Status StateWriter::WriteRange(const StateRange& range, int32_t dtype, const std::byte* values) {
  const FormatRow& format = RowOf(range.format);
  if (range.on_device && values_ == Values::kStay && IsArrayOf(range.format, dtype))
    return transfer_.CopyUp(range.data, values, format.Bytes(range.count));
  return Put(range.data, range.count, format.Bytes(1), range.on_device,
             [&](uint64_t first, uint64_t count, std::byte* into) {
               Encode(range.format, dtype, values + first * DtypeBytes(dtype), count, into);
             });
}

Status StateWriter::WriteParams(const StateElements& elements, const ParamLocation& location,
                                const std::byte* masters) {
  const Rounded to{table_.param(elements.param).dtype,
                   shape_.params[elements.param].formats().master};
  const uint64_t param_bytes = DtypeBytes(to.dtype);
  const ParamRange params = locator_.Params(elements.param, elements.first, location);
  if (params.on_device && values_ == Values::kStay && to.dtype == OFFLOAD_FP32)
    return transfer_.CopyUp(params.data, masters, elements.count * param_bytes);
  return Put(params.data, elements.count, param_bytes, params.on_device,
             [&](uint64_t first, uint64_t count, std::byte* into) {
               RoundToParams(masters + first * sizeof(float), count, to, into);
             });
}

// Writes an array whose elements `make` computes: in place on the host, where the workers share the
// elements, or through the transfer's memory to the device.
Status StateWriter::Put(std::byte* array, uint64_t count, uint64_t element_bytes, bool on_device,
                        Make make) {
  const auto make_all = [&](uint64_t first, uint64_t number, std::byte* into) {
    return ShareWork(transfer_.context(), number, sizeof(float), [&](uint64_t begin, uint64_t end) {
      make(first + begin, end - begin, into + begin * element_bytes);
    });
  };
  if (!on_device) return make_all(0, count, array);
  for (uint64_t done = 0; done < count;) {
    const uint64_t now = std::min(count - done, kMadeBytes / element_bytes);
    HYBRIDOPT_ASSIGN(std::byte* const made, transfer_.Stage(now * element_bytes));
    HYBRIDOPT_TRY(make_all(done, now, made));
    HYBRIDOPT_TRY(transfer_.CopyUp(array + done * element_bytes, made, now * element_bytes));
    done += now;
  }
  return {};
}

Status StateWriter::End() {
  HYBRIDOPT_TRY(Await());
  return locator_.disk() != nullptr ? locator_.disk()->Flush() : Status();
}

Status StateWriter::Reset(uint32_t param, StateSlot slot, const ParamLocation& location,
                          float first_moment) {
  has_written_ = true;
  const uint64_t count = table_.param(param).count;
  const Pattern pattern = InitialPattern(shape_.params[param], slot, first_moment);
  for (uint64_t first = 0; first < count;) {
    StateRange range = locator_.At(param, slot, first, count - first, location);
    HYBRIDOPT_TRY(range.BringToWrite());
    if (range.on_device)
      HYBRIDOPT_TRY(transfer_.Fill(range.data, range.count, pattern));
    else
      FillArray(range.data, range.count, pattern);
    first += range.count;
  }
  return {};
}

}  // namespace hybridopt
