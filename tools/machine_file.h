// MachineFile: the part of the output of hybridopt doctor --json that plan uses.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "commands.h"

namespace tool {

class MachineFile {
 public:
  // INVALID_ARGUMENT names what is missing or wrong.
  static Result<MachineFile> Read(const std::string& path);

  const std::string& date() const { return date_; }
  uint64_t elements() const { return elements_; }  // of the trainings that were measured
  bool has_device() const { return has_device_; }
  bool is_simulated() const { return is_simulated_; }
  uint64_t host_available_bytes() const { return host_available_bytes_; }
  uint64_t device_free_bytes() const { return device_free_bytes_; }

  // The seconds of a step of AdamW over bf16 params. The state of `on_host` params is on the host
  // and that of `on_device` params on the device. Empty if a rate of this layout (Layout::name) was
  // not measured.
  std::optional<double> StepSeconds(const std::string& layout, double on_host,
                                    double on_device) const;

 private:
  std::string date_;
  uint64_t elements_ = 0;
  bool has_device_ = false;
  bool is_simulated_ = false;
  uint64_t host_available_bytes_ = 0;
  uint64_t device_free_bytes_ = 0;
  std::map<std::pair<std::string, std::string>, double> rates_;  // by layout and executor
};

}  // namespace tool
