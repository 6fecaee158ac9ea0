// DeviceWindow: a range of device addresses whose first bytes have memory behind them. It grows and
// shrinks without a change of address.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device/device.h"

namespace hybridopt {

class DeviceWindow {
 public:
  DeviceWindow() = default;
  // Reserves addresses for `bytes`; 0: an empty window.
  static Result<DeviceWindow> Reserve(Device& device, uint64_t bytes);
  ~DeviceWindow();
  DeviceWindow(DeviceWindow&& other) noexcept { *this = std::move(other); }
  DeviceWindow& operator=(DeviceWindow&& other) noexcept;

  // The bytes that the first `bytes` of a window of `range_bytes` take, in whole pages.
  static uint64_t PageBytes(const Device& device, uint64_t range_bytes, uint64_t bytes);

  // Takes the memory that the window needs to grow from one size to another; takes none if the
  // window shrinks. Any thread may call this at any time.
  Result<DevicePages> Take(uint64_t from_bytes, uint64_t to_bytes) const;
  // Appends the memory that Take has returned to the end of the window.
  Status Grow(DevicePages& pages) const;
  // Frees the memory behind the first `bytes`, which must not be in use any more.
  void Shrink(uint64_t bytes) const;

  std::byte* data() const { return static_cast<std::byte*>(range_); }
  uint64_t bytes() const { return bytes_; }  // as reserved

 private:
  Device* device_ = nullptr;
  uint64_t bytes_ = 0;
  void* range_ = nullptr;  // device addresses
};

}  // namespace hybridopt
