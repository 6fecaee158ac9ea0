// Reads a param's state through the ABI, in any layout, and returns the fp32 numbers that it
// represents.
#pragma once

#include <bit>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "problem.h"

namespace hybridopt {

struct StateBits {
  std::string error;  // if there is no such state
  std::vector<float> values;
  uint64_t step_count = 0;
};

// Reads bytes at a device address.
using ReadDevice = std::function<Bytes(const void* data, uint64_t bytes)>;

inline Bytes ReadView(const offload_state_view_t& view, const ReadDevice& read) {
  const uint64_t element_bytes = DtypeBytes(view.dtype);
  Bytes bytes;
  if (view.device_count > 0) bytes = read(view.device_data, view.device_count * element_bytes);
  const auto* host = static_cast<const std::byte*>(view.host_data);
  if (view.host_count > 0) bytes.insert(bytes.end(), host, host + view.host_count * element_bytes);
  return bytes;
}

template <typename T>
std::vector<T> ElementsOf(const Bytes& bytes) {
  std::vector<T> elements(bytes.size() / sizeof(T));
  if (!bytes.empty()) std::memcpy(elements.data(), bytes.data(), bytes.size());
  return elements;
}

// `data` is what the param holds.
inline StateBits ReadState(offload_optimizer_t optimizer, uint32_t id, int32_t kind,
                           const Bytes& data, const ReadDevice& read) {
  StateBits state;
  offload_state_view_t view{}, low{};
  view.struct_size = low.struct_size = sizeof(view);
  const bool is_master = kind == OFFLOAD_STATE_MASTER;
  const bool whole = offload_optimizer_state(optimizer, id, kind, &view) == OFFLOAD_OK;
  if (!whole) state.error = offload_last_error();
  const bool halves = is_master && offload_optimizer_state(optimizer, id, OFFLOAD_STATE_MASTER_LOW,
                                                           &low) == OFFLOAD_OK;
  if (!whole && !halves) return state;
  state.error.clear();
  state.step_count = whole ? view.step_count : low.step_count;
  if (const offload_state_view_t& found = whole ? view : low; found.disk_count > 0) {
    state.values.resize(found.device_count + found.host_count + found.disk_count);
    if (offload_optimizer_read_state(optimizer, id, kind, 0, state.values.size(),
                                     state.values.data()) != OFFLOAD_OK)
      state.error = offload_last_error();
    return state;
  }
  std::vector<float> values;
  if (whole && view.dtype == OFFLOAD_FP32) {
    values = ElementsOf<float>(ReadView(view, read));
  } else if (whole) {
    for (uint16_t bits : ElementsOf<uint16_t>(ReadView(view, read)))
      values.push_back(Bf16ToFp32(bits));
  }
  if (halves) {  // on the device, in front of the host's fp32 masters; or all of them
    const std::vector<uint16_t> upper = ElementsOf<uint16_t>(data);
    std::vector<float> joined;
    std::vector<int32_t> all_lost;
    if (low.dtype == OFFLOAD_U16)
      for (int16_t lower : ElementsOf<int16_t>(ReadView(low, read))) all_lost.push_back(lower);
    else
      for (int8_t lower : ElementsOf<int8_t>(ReadView(low, read))) all_lost.push_back(lower * 256);
    for (int32_t lost : all_lost) {
      const uint32_t rounded = uint32_t{upper[joined.size()]} << 16;
      joined.push_back(std::bit_cast<float>(rounded + static_cast<uint32_t>(lost)));
    }
    values.insert(values.begin(), joined.begin(), joined.end());
  }
  state.values = std::move(values);
  return state;
}

}  // namespace hybridopt
