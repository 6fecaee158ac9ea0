// Helpers that call the device port, for its tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "../../devices.h"
#include "../../random.h"
#include "device/device.h"

namespace hybridopt {

using ::testing::AssertionFailure;
using ::testing::AssertionResult;
using ::testing::AssertionSuccess;

inline AssertionResult Ok(const Status& status) {
  if (status.ok()) return AssertionSuccess();
  return AssertionFailure() << status.code() << ": " << status.message();
}

template <typename T>
AssertionResult Ok(const Result<T>& result) {
  return Ok(result.status());
}

// Asserts that `status` has this code and that its text has all these words.
inline AssertionResult Fails(const Status& status, int32_t code,
                             const std::vector<std::string>& words) {
  if (status.code() != code) {
    return AssertionFailure() << "code " << status.code() << ": " << status.message();
  }
  for (const std::string& word : words) {
    if (status.message().find(word) == std::string::npos) {
      return AssertionFailure() << "no \"" << word << "\" in: " << status.message();
    }
  }
  return AssertionSuccess();
}

template <typename T>
AssertionResult Fails(const Result<T>& result, int32_t code,
                      const std::vector<std::string>& words) {
  return Fails(result.status(), code, words);
}

// For tests of promises of every device with memory of its own.
class AcceleratorTest : public testing::TestWithParam<int32_t> {
 protected:
  static std::unique_ptr<Device> Make() {
    auto device = MakeAccelerator({uint64_t{256} << 20, 1, 0}, ReferenceKernels());
    EXPECT_TRUE(Ok(device));
    EXPECT_EQ(device.value()->kind(), GetParam());
    return std::move(device.value());
  }
};

inline StreamHandle MakeStream(Device& device, const char* label) {
  auto stream = device.CreateStream(label);
  EXPECT_TRUE(Ok(stream));
  return stream.value();
}

inline EventHandle MakeEvent(Device& device, const char* label = "event") {
  auto event = device.CreateEvent(label);
  EXPECT_TRUE(Ok(event));
  return event.value();
}

template <typename T>
T* AllocateArray(Device& device, uint64_t count) {
  auto data = device.Allocate(count * sizeof(T));
  EXPECT_TRUE(Ok(data));
  return static_cast<T*>(data.value());
}

template <typename T>
T* Upload(Device& device, const std::vector<T>& values) {
  T* data = AllocateArray<T>(device, values.size());
  EXPECT_TRUE(Ok(device.CopyToDevice(nullptr, data, values.data(), values.size() * sizeof(T))));
  EXPECT_TRUE(Ok(device.Synchronize(nullptr, -1)));
  return data;
}

template <typename T>
std::vector<T> Download(Device& device, const T* data, uint64_t count) {
  std::vector<T> values(count);
  EXPECT_TRUE(Ok(device.CopyToHost(nullptr, values.data(), data, count * sizeof(T))));
  EXPECT_TRUE(Ok(device.Synchronize(nullptr, -1)));
  return values;
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

inline std::vector<float> RandomValues(uint64_t count, uint64_t seed) {
  Random random(seed);
  std::vector<float> values(count);
  for (float& value : values) value = static_cast<float>(random.Noise());
  return values;
}

// A second implementation of the tree in kernels.h.
inline double TreeSum(const std::vector<float>& grad) {
  double of_param = 0;
  for (uint64_t begin = 0; begin < grad.size(); begin += kNormBlockElements) {
    double lanes[kNormLanes] = {};
    const uint64_t end = std::min<uint64_t>(begin + kNormBlockElements, grad.size());
    for (uint64_t i = begin; i < end; ++i) {
      lanes[(i - begin) % kNormLanes] += static_cast<double>(grad[i]) * grad[i];
    }
    for (uint32_t half = kNormLanes / 2; half >= 1; half /= 2) {
      for (uint32_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    of_param += lanes[0];
  }
  return of_param;
}

}  // namespace hybridopt
