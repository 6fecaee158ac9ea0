// A small training run through the public ABI. Two runs with the same setup have the same bits, so
// a test can compare a run with a fault to a run without one.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "../random.h"
#include "../scale.h"
#include "offload.h"

namespace hybridopt::fault {

// A struct as the header requires it: zero except for struct_size.
template <typename Struct>
Struct Make() {
  Struct value{};
  value.struct_size = sizeof(Struct);
  return value;
}

#define ASSERT_OFFLOAD_OK(call) ASSERT_EQ(call, OFFLOAD_OK) << ::offload_last_error()
#define EXPECT_OFFLOAD_OK(call) EXPECT_EQ(call, OFFLOAD_OK) << ::offload_last_error()

// Expects that a call returned this status, and that this thread's last error has all these words.
inline void ExpectError(int32_t got, int32_t status, const std::vector<std::string>& words) {
  const std::string text = offload_last_error();
  EXPECT_STREQ(offload_status_name(got), offload_status_name(status)) << text;
  for (const std::string& word : words)
    EXPECT_NE(text.find(word), std::string::npos) << "'" << word << "' is not in: " << text;
}

inline uint64_t ElementBytes(int32_t dtype) { return dtype == OFFLOAD_FP32 ? 4 : 2; }

// As offload_optimizer_wait. Work that hangs aborts the test program after a minute: its optimizer
// could not be destroyed, and the program would hang too.
inline int32_t WaitOrAbort(offload_optimizer_t optimizer, offload_ticket_t ticket) {
  const int32_t status = offload_optimizer_wait(optimizer, ticket, 60'000'000'000);
  if (status == OFFLOAD_TIMED_OUT) {
    std::fprintf(stderr, "work hangs: %s\n", offload_last_error());
    std::abort();
  }
  return status;
}

// Numbers in +-0.1, in fp32 or bf16: the same ones for the same `seed`.
inline void FillPattern(std::vector<unsigned char>& bytes, int32_t dtype, uint64_t seed) {
  Random random(seed);
  for (size_t i = 0; i < bytes.size(); i += ElementBytes(dtype)) {
    const float value = random.SignedUnit() / 10;
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    if (dtype == OFFLOAD_FP32) {
      std::memcpy(&bytes[i], &bits, sizeof(bits));
    } else {
      const uint16_t upper = static_cast<uint16_t>(bits >> 16);
      std::memcpy(&bytes[i], &upper, sizeof(upper));
    }
  }
}

// A function for offload_stream_run that blocks its stream until the test opens it.
struct Gate {
  std::atomic<bool> open = false;
  static void Hold(void* gate) {
    while (!static_cast<Gate*>(gate)->open) std::this_thread::yield();
  }
};

inline void DropLog(void*, int32_t, const char*) {}

// The options of the optimizer and the other settings of a run.
struct RunOptions : offload_optimizer_options_t {
  RunOptions() : offload_optimizer_options_t(Make<offload_optimizer_options_t>()) {
    algorithm = OFFLOAD_ADAMW;
    device_fraction = 0.3;
    chunk_elements = 1024;
    staging_slots = 2;
    comm_timeout_ns = 20'000'000'000;  // so that a test with a hanging rank ends soon
  }

  int32_t device_kind = OFFLOAD_DEVICE_SIM;
  uint32_t threads = 2;
  uint64_t sim_memory_bytes = uint64_t{1} << 20;
  uint64_t sim_seed = 1;
  uint64_t sim_delay_ns_max = 0;
  uint64_t sim_pinned_bytes_max = 0;
  int32_t allow_pageable = 0;
  uint64_t device_timeout_ns = 0;
  std::vector<uint64_t> counts = {3000, 1, 2500};
  const char* name_prefix = "p";  // of the params
  offload_log_function_t log = DropLog;
};

// One context, one optimizer, some params. Params alternate bf16 and fp32, gradients the reverse.
class Trainer {
 public:
  explicit Trainer(const RunOptions& options) : options_(options) {
    CreateContext();
    CreateOptimizer();
  }
  // In a context that another trainer owns.
  Trainer(const RunOptions& options, offload_context_t shared_context)
      : context(shared_context), options_(options), owns_context_(false) {
    CreateOptimizer();
  }
  ~Trainer() {
    if (optimizer != nullptr) {
      EXPECT_OFFLOAD_OK(offload_optimizer_destroy(optimizer));
    }
    if (owns_context_ && context != nullptr) {
      EXPECT_OFFLOAD_OK(offload_context_destroy(context));
    }
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // The struct with which param `index` is registered.
  offload_param_t Param(uint32_t index) const {
    auto param = Make<offload_param_t>();
    param.group = 0;
    param.dtype = index % 2 == 0 ? OFFLOAD_BF16 : OFFLOAD_FP32;
    param.grad_dtype = index % 2 == 0 ? OFFLOAD_FP32 : OFFLOAD_BF16;
    param.name = names_[index].c_str();
    param.data = data[index];
    param.grad = grads[index];
    param.count = options_.counts[index];
    return param;
  }

  void AddParams(uint32_t begin, uint32_t end) {
    for (uint32_t i = begin; i < end; ++i) {
      const offload_param_t param = Param(i);
      EXPECT_OFFLOAD_OK(offload_optimizer_add_params(optimizer, &param, 1, nullptr));
    }
  }
  void AddParams() { AddParams(0, size()); }
  void Commit() { EXPECT_OFFLOAD_OK(offload_optimizer_commit(optimizer, nullptr)); }

  // The gradients of step `number`.
  void UploadGrads(uint64_t number) {
    for (uint32_t i = 0; i < size(); ++i) {
      const offload_param_t param = Param(i);
      std::vector<unsigned char> bytes(param.count * ElementBytes(param.grad_dtype));
      FillPattern(bytes, param.grad_dtype, 1000 * number + i);
      EXPECT_OFFLOAD_OK(
          offload_device_upload(context, grads[i], bytes.data(), bytes.size(), nullptr));
    }
  }

  // Steps number `begin` to `end` - 1, each waited for.
  void Steps(uint64_t begin, uint64_t end) {
    for (uint64_t number = begin; number < end; ++number) {
      UploadGrads(number);
      offload_ticket_t ticket = 0;
      auto options = Make<offload_step_options_t>();
      options.grad_norm_max = 1;
      EXPECT_OFFLOAD_OK(offload_optimizer_step(optimizer, &options, &ticket));
      EXPECT_OFFLOAD_OK(WaitOrAbort(optimizer, ticket));
    }
  }

  std::vector<unsigned char> ParamBits(uint32_t index) const {
    std::vector<unsigned char> bits;
    AppendDevice(bits, data[index], options_.counts[index] * ElementBytes(Param(index).dtype));
    return bits;
  }

  // Params, masters, moments and step counts.
  std::vector<unsigned char> Bits() const {
    std::vector<unsigned char> bits;
    for (uint32_t i = 0; i < size(); ++i) {
      const offload_param_t param = Param(i);
      AppendDevice(bits, data[i], param.count * ElementBytes(param.dtype));
      for (int32_t kind = OFFLOAD_STATE_MASTER; kind <= OFFLOAD_STATE_SUM; ++kind) {
        auto view = Make<offload_state_view_t>();
        if (offload_optimizer_state(optimizer, i, kind, &view) != OFFLOAD_OK) continue;
        AppendDevice(bits, view.device_data, view.device_count * 4);
        Append(bits, view.host_data, view.host_count * 4);
        Append(bits, &view.step_count, sizeof(view.step_count));
      }
    }
    return bits;
  }

  uint32_t size() const { return static_cast<uint32_t>(options_.counts.size()); }
  const RunOptions& options() const { return options_; }

  offload_context_t context = nullptr;
  offload_optimizer_t optimizer = nullptr;
  offload_group_t group = Make<offload_group_t>();
  std::vector<void*> data, grads;

 private:
  void CreateContext() {
    auto options = Make<offload_context_options_t>();
    options.device_kind = options_.device_kind;
    options.threads = options_.threads;
    options.device_timeout_ns = options_.device_timeout_ns;
    options.allow_pageable = options_.allow_pageable;
    options.log = options_.log;
    if (options_.device_kind == OFFLOAD_DEVICE_SIM) {
      options.sim_memory_bytes = options_.sim_memory_bytes;
      options.sim_seed = options_.sim_seed;
      options.sim_delay_ns_max = options_.sim_delay_ns_max;
      options.sim_pinned_bytes_max = options_.sim_pinned_bytes_max;
    }
    ASSERT_OFFLOAD_OK(offload_context_create(&options, &context));
  }

  void CreateOptimizer() {
    ASSERT_OFFLOAD_OK(offload_optimizer_create(context, &options_, &optimizer));
    FillGroup();
    uint32_t group_id = 0;
    ASSERT_OFFLOAD_OK(offload_optimizer_add_group(optimizer, &group, &group_id));
    for (uint32_t i = 0; i < size(); ++i) AddArrays(i);
  }

  void FillGroup() {
    group.lr = 0.01;
    group.weight_decay = 0.1;
    switch (options_.algorithm) {
      case OFFLOAD_SGD:
      case OFFLOAD_SIGNUM:
        group.momentum = 0.9;
        break;
      case OFFLOAD_ADAGRAD:
        group.eps = 1e-8;
        break;
      case OFFLOAD_LION:
        group.beta1 = 0.9;
        group.beta2 = 0.99;
        break;
      default:
        group.beta1 = 0.9;
        group.beta2 = 0.999;
        group.eps = 1e-8;
    }
  }

  void AddArrays(uint32_t i) {
    names_.push_back(options_.name_prefix + std::to_string(i));
    data.push_back(nullptr);
    grads.push_back(nullptr);
    const offload_param_t param = Param(i);
    if (param.count == 0) return;
    std::vector<unsigned char> bytes(param.count * ElementBytes(param.dtype));
    FillPattern(bytes, param.dtype, 77 + i);
    ASSERT_OFFLOAD_OK(offload_device_alloc(context, bytes.size(), &data[i]));
    ASSERT_OFFLOAD_OK(
        offload_device_alloc(context, param.count * ElementBytes(param.grad_dtype), &grads[i]));
    ASSERT_OFFLOAD_OK(offload_device_upload(context, data[i], bytes.data(), bytes.size(), nullptr));
  }

  static void Append(std::vector<unsigned char>& bits, const void* source, uint64_t bytes) {
    const auto* begin = static_cast<const unsigned char*>(source);
    bits.insert(bits.end(), begin, begin + bytes);
  }
  void AppendDevice(std::vector<unsigned char>& bits, const void* source, uint64_t bytes) const {
    if (bytes == 0) return;
    std::vector<unsigned char> copy(bytes);
    EXPECT_OFFLOAD_OK(offload_device_download(context, copy.data(), source, bytes, nullptr));
    Append(bits, copy.data(), bytes);
  }

  const RunOptions options_;
  const bool owns_context_ = true;
  std::vector<std::string> names_;
};

}  // namespace hybridopt::fault
