// Device memory and streams.
#include <gtest/gtest.h>

#include "calls.h"

namespace hybridopt::fault::random_calls {
namespace {

// ------------------------------------------------------------------------------------- memory --

void Alloc(World& world) {
  Random& random = world.random;
  const offload_context_t context = world.PickContext();
  if (world.IsDoomed(context)) return;
  const auto bytes = random.OneOf<uint64_t>({0, 1, 256, 4000, uint64_t{1} << 50, UINT64_MAX});
  void* data = nullptr;
  const int32_t status = offload_device_alloc(context, bytes, random.Chance(98) ? &data : nullptr);
  if (world.Judge(status, context)) world.extra_arrays.emplace_back(context, data);
}

void Free(World& world) {
  const offload_context_t context = world.PickContext();
  if (!world.extra_arrays.empty() && world.random.Chance(80)) {
    const auto [owner, data] = world.extra_arrays.back();
    world.extra_arrays.pop_back();
    if (world.Find(owner) != nullptr) {
      world.Judge(offload_device_free(owner, data), owner);
      world.Judge(offload_device_free(owner, data), owner);  // once more
      return;
    }
  }
  void* data = world.random.Chance(50) ? nullptr : world.host_array.data();
  world.Judge(offload_device_free(context, data), context);
}

void Upload(World& world) {
  Random& random = world.random;
  const offload_context_t context = world.PickContext();
  std::vector<unsigned char>& array = world.host_array;
  const ContextModel* model = world.Find(context);
  if (model == nullptr) {
    world.Judge(offload_device_upload(context, array.data(), array.data(), 4, nullptr), context);
    return;
  }
  world.Settle(context);
  FillPattern(array, OFFLOAD_BF16, random.Next());
  if (random.Chance(20)) array[2] = array[3] = 0x7f;  // not a finite number
  const uint64_t bytes = random.Below(kArrayBytes + 1);
  const void* source = random.Chance(97) ? array.data() : nullptr;
  void* target = world.Pointer(model->grads, bytes, model->kind);
  world.Judge(offload_device_upload(context, target, source, bytes, world.PickStream(context)),
              context);
}

void Download(World& world) {
  const offload_context_t context = world.PickContext();
  const ContextModel* model = world.Find(context);
  const uint64_t bytes = world.random.Below(kArrayBytes + 1);
  const void* source = model == nullptr ? nullptr : world.Pointer(model->grads, bytes, model->kind);
  void* target = world.random.Chance(97) ? world.host_array.data() : nullptr;
  world.Judge(offload_device_download(context, target, source, bytes, world.PickStream(context)),
              context);
}

void Map(World& world) {
  Random& random = world.random;
  const offload_context_t context = world.PickContext();
  const ContextModel* model = world.Find(context);
  const auto bytes = random.OneOf<uint64_t>({0, 1, kArrayBytes, UINT64_MAX});
  void* data = model == nullptr ? nullptr : world.Pointer(model->grads, 4, model->kind);
  void* mapped = nullptr;
  world.Judge(offload_device_map(context, data, bytes, random.Chance(98) ? &mapped : nullptr),
              context);
}

// ------------------------------------------------------------------------------------ streams --

void CreateStream(World& world) {
  const offload_context_t context = world.PickContext();
  ContextModel* model = world.Find(context);
  if (model != nullptr && model->streams.size() >= 3) return;
  offload_stream_t stream = nullptr;
  if (!world.Judge(offload_stream_create(context, &stream), context)) return;
  if (stream != nullptr) model->streams.push_back(stream);
}

void DestroyStream(World& world) {
  const offload_context_t context = world.PickContext();
  const offload_stream_t stream = world.PickStream(context);
  if (!world.Judge(offload_stream_destroy(context, stream), context)) return;
  std::erase(world.contexts.at(context).streams, stream);
  world.dead_streams.push_back(stream);
}

void Synchronize(World& world) {
  const offload_context_t context = world.PickContext();
  const auto timeout_ns = world.random.OneOf<int64_t>({0, 1000, -1, INT64_MAX});
  world.Judge(offload_stream_synchronize(context, world.PickStream(context), timeout_ns), context);
}

void CountRun(void* counter) { static_cast<std::atomic<uint64_t>*>(counter)->fetch_add(1); }

void RunOnStream(World& world) {
  const offload_context_t context = world.PickContext();
  const offload_stream_t stream = world.PickStream(context);
  const auto function = world.random.Chance(95) ? CountRun : nullptr;
  world.Judge(offload_stream_run(context, stream, function, &world.stream_runs), context);
}

constexpr Call kCalls[] = {
    {"device_alloc", Alloc, 3},
    {"device_free", Free, 3},
    {"device_upload", Upload, 4},
    {"device_download", Download, 4},
    {"device_map", Map, 4},
    {"stream_create", CreateStream, 2},
    {"stream_destroy", DestroyStream, 1},
    {"stream_synchronize", Synchronize, 4},
    {"stream_run", RunOnStream, 4},
};

}  // namespace

std::span<const Call> DeviceCalls() { return kCalls; }

}  // namespace hybridopt::fault::random_calls
