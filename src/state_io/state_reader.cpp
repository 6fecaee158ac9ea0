#include "state_io/state_reader.h"

#include <algorithm>
#include <cstring>

#include "state_io/shared_work.h"

namespace hybridopt {
namespace {

// For state that is copied from the device first: the bytes for encoded elements, of at most 4
// bytes each, that are decoded at a time. They take the first half of the staging memory; the
// params that go with them take the second half.
constexpr uint64_t kHalfBytes = Transfer::kStagingBytes / 2;
constexpr uint64_t kDecodedTogether = kHalfBytes / sizeof(float);

bool OnHost(const StateRange& range) {
  return !range.on_device && (range.params == nullptr || !range.params_on_device);
}

const std::byte* ParamsFrom(const StateRange& range, uint64_t element) {
  return range.params == nullptr ? nullptr : range.params + element * sizeof(uint16_t);
}

// Decodes a range that is wholly on the host.
void Decode(const StateRange& range, uint64_t first, uint64_t count, float* into) {
  const FormatRow& format = RowOf(range.format);
  const std::byte* const data = range.data + format.Bytes(first);
  if (IsArrayOf(range.format, OFFLOAD_FP32))
    std::memcpy(into, data, count * sizeof(float));
  else
    format.decode(data, ParamsFrom(range, first), count, into);
}

}  // namespace

Status StateReader::Read(StateRange range, uint64_t first, uint64_t count, int32_t dtype,
                         std::byte* into) {
  HYBRIDOPT_TRY(range.Bring());
  if (IsArrayOf(range.format, dtype)) {
    const FormatRow& format = RowOf(range.format);
    const std::byte* const data = range.data + format.Bytes(first);
    if (range.on_device) return transfer_.CopyDown(into, data, format.Bytes(count));
    std::memcpy(into, data, format.Bytes(count));
    return {};
  }
  HYBRIDOPT_CHECK(dtype == OFFLOAD_FP32);
  auto* const values = reinterpret_cast<float*>(into);
  if (!OnHost(range)) return DecodeFromDevice(range, first, count, values);
  Decode(range, first, count, values);
  return {};
}

Status StateReader::DecodeFromDevice(const StateRange& range, uint64_t first, uint64_t count,
                                     float* into) {
  const FormatRow& format = RowOf(range.format);
  for (uint64_t done = 0; done < count;) {
    const uint64_t now = std::min(kDecodedTogether, count - done);
    const std::byte* data = range.data + format.Bytes(first + done);
    const std::byte* params = ParamsFrom(range, first + done);
    std::byte* const staged = transfer_.staging();
    if (range.on_device) {
      HYBRIDOPT_TRY(transfer_.CopyDown(staged, data, format.Bytes(now)));
      data = staged;
    }
    if (params != nullptr && range.params_on_device) {
      HYBRIDOPT_TRY(transfer_.CopyDown(staged + kHalfBytes, params, now * sizeof(uint16_t)));
      params = staged + kHalfBytes;
    }
    if (IsArrayOf(range.format, OFFLOAD_FP32))
      std::memcpy(into + done, data, now * sizeof(float));
    else
      format.decode(data, params, now, into + done);
    done += now;
  }
  return {};
}

Status StateReader::ReadForCaller(StateRange range, float* into) {
  HYBRIDOPT_TRY(range.Bring());
  if (!OnHost(range)) return DecodeFromDevice(range, 0, range.count, into);
  return ShareWork(
      transfer_.context(), range.count, sizeof(float),
      [&](uint64_t begin, uint64_t end) { Decode(range, begin, end - begin, into + begin); });
}

}  // namespace hybridopt
