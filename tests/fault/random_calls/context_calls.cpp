// Contexts.
#include <gtest/gtest.h>

#include "calls.h"

namespace hybridopt::fault::random_calls {
namespace {

void* NewArray(World& world, offload_context_t context) {
  void* data = nullptr;
  EXPECT_OFFLOAD_OK(offload_device_alloc(context, kArrayBytes, &data));
  std::vector<unsigned char> bytes(kArrayBytes);
  FillPattern(bytes, OFFLOAD_BF16, world.random.Next());
  EXPECT_OFFLOAD_OK(offload_device_upload(context, data, bytes.data(), bytes.size(), nullptr));
  return data;
}

void CreateContext(World& world) {
  Random& random = world.random;
  auto options = Make<offload_context_options_t>();
  options.struct_size = world.StructSize(sizeof(options));
  options.device_kind = static_cast<int32_t>(random.Below(2));
  options.threads = 1 + static_cast<uint32_t>(random.Below(2));
  options.log = DropLog;
  if (options.device_kind == OFFLOAD_DEVICE_SIM) {
    options.sim_memory_bytes = 512 << 10;
    options.sim_seed = random.Next();
    options.sim_delay_ns_max = random.Chance(30) ? 5000 : 0;
  }
  if (random.Chance(30)) options.pinned_bytes_max = 1 << random.Below(22);
  // Not a GPU where there is one: these calls map device memory and write to it.
  if (random.Chance(10)) options.device_kind = random.OneOf({-1, 3, 99});
  if (random.Chance(5)) options.threads = random.OneOf<uint32_t>({1025, UINT32_MAX});
  if (random.Chance(5)) options.device_index = -1;
  if (world.contexts.size() >= 4) options.struct_size = 0;  // enough of them
  offload_context_t context = nullptr;
  const int32_t status = offload_context_create(&options, random.Chance(98) ? &context : nullptr);
  if (!world.Judge(status)) return;
  ContextModel model{options.device_kind, 0, 0, false, {}, {}};
  for (uint32_t i = 0; i < kGradArrays; ++i) model.grads.push_back(NewArray(world, context));
  world.contexts.emplace(context, std::move(model));
}

void DestroyContext(World& world) {
  const offload_context_t context = world.PickContext();
  const ContextModel* model = world.Find(context);
  const bool used = model != nullptr && model->optimizers + model->stashes > 0;
  const int32_t status = offload_context_destroy(context);
  if (used) {
    EXPECT_EQ(status, OFFLOAD_INVALID_STATE);
  }
  if (!world.Judge(status, context)) return;
  for (offload_stream_t stream : model->streams) world.dead_streams.push_back(stream);
  world.contexts.erase(context);
  world.dead_contexts.push_back(context);
}

void ContextInfo(World& world) {
  const offload_context_t context = world.PickContext();
  auto info = Make<offload_context_info_t>();
  info.struct_size = world.StructSize(sizeof(info));
  const int32_t status =
      offload_context_get_info(context, world.random.Chance(98) ? &info : nullptr);
  if (!world.Judge(status, context)) return;
  const ContextModel& model = world.contexts.at(context);
  EXPECT_EQ(info.optimizers, model.optimizers);
  if (info.struct_size == sizeof(info)) {
    EXPECT_EQ(info.stashes, model.stashes);
  }
}

constexpr Call kCalls[] = {
    {"context_create", CreateContext, 2},
    {"context_destroy", DestroyContext, 1},
    {"context_get_info", ContextInfo, 2},
};

}  // namespace

std::span<const Call> ContextCalls() { return kCalls; }

}  // namespace hybridopt::fault::random_calls
