// Calls that the tests of a real GPU share.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>

#include "../differential/rig.h"

namespace hybridopt {

#define ASSERT_CUDA(call) ASSERT_EQ(call, cudaSuccess)

inline bool LastErrorHas(const std::string& words) {
  return std::string(offload_last_error()).find(words) != std::string::npos;
}

// An AdamW with one group and no params yet.
inline offload_optimizer_t NewAdamW(const TestContext& context, double device_fraction) {
  auto options = Make<offload_optimizer_options_t>();
  options.algorithm = OFFLOAD_ADAMW;
  options.device_fraction = device_fraction;
  offload_optimizer_t optimizer = nullptr;
  MUST(offload_optimizer_create(context.handle(), &options, &optimizer));
  auto group = Make<offload_group_t>();
  group.lr = 1e-3;
  group.eps = 1e-8;
  uint32_t id = 0;
  MUST(offload_optimizer_add_group(optimizer, &group, &id));
  return optimizer;
}

}  // namespace hybridopt
