#include "memory/device_window.h"

#include <utility>

namespace hybridopt {

Result<DeviceWindow> DeviceWindow::Reserve(Device& device, uint64_t bytes) {
  DeviceWindow window;
  if (bytes == 0) return window;
  HYBRIDOPT_ASSIGN(window.range_, device.Reserve(bytes));
  window.device_ = &device;
  window.bytes_ = bytes;
  return window;
}

DeviceWindow::~DeviceWindow() {
  if (device_ != nullptr) device_->Unreserve(range_);
}

DeviceWindow& DeviceWindow::operator=(DeviceWindow&& other) noexcept {
  std::swap(device_, other.device_);
  std::swap(bytes_, other.bytes_);
  std::swap(range_, other.range_);
  return *this;
}

uint64_t DeviceWindow::PageBytes(const Device& device, uint64_t range_bytes, uint64_t bytes) {
  if (bytes == 0) return 0;
  const uint64_t page_bytes = device.page_bytes(range_bytes);
  return (bytes + page_bytes - 1) / page_bytes * page_bytes;
}

Result<DevicePages> DeviceWindow::Take(uint64_t from_bytes, uint64_t to_bytes) const {
  if (device_ == nullptr) return DevicePages{};
  const uint64_t from = PageBytes(*device_, bytes_, from_bytes);
  const uint64_t to = PageBytes(*device_, bytes_, to_bytes);
  if (to <= from) return DevicePages{};
  return device_->TakePages(bytes_, to - from);
}

Status DeviceWindow::Grow(DevicePages& pages) const {
  return pages.bytes > 0 ? device_->AppendPages(range_, pages) : Status();
}

void DeviceWindow::Shrink(uint64_t bytes) const {
  if (device_ != nullptr) device_->TruncatePages(range_, PageBytes(*device_, bytes_, bytes));
}

}  // namespace hybridopt
