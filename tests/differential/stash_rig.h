// StashRig: a stash driven through the ABI, on a device that may leave out one kind of wait, and
// the streams and memory of a caller that uses it.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "../devices.h"
#include "../fault/trainer.h"
#include "../labelled_device.h"
#include "machine/context.h"
#include "memory/pinned_arena.h"
#include "optimizer/handle_table.h"

namespace hybridopt {

using fault::Gate;
using fault::Make;

// If a wait never ends, the test must fail instead of hanging.
constexpr int64_t kLongNs = 120'000'000'000;

// The waits of the stash.
enum class StashLeak {
  kNone,
  kDownBehindProducer,  // the copy to the host waits for the work that writes the memory
  kDownBehindUp,        // ..and for the last copy out of its slabs
  kUpBehindUsers,       // the copy to the device waits for the work that used its destination
  kUpBehindDown,        // ..and for the copy to the host
  kBehindDown,          // the caller's stream waits for the copy to the host: release, drop
  kBehindUp,            // ..and for the copy to the device: pop, drop
  kReached,             // a check whether slabs may be used again
  kWait,                // a wait on the host
  kSynchronize,         // destroy waits for the copies
};

// Leaves out one kind of wait of a device while `leaking` is true; `leaking` outlives this object.
class StashLeakyDevice final : public LabelledDevice {
 public:
  StashLeakyDevice(std::unique_ptr<Device> device, StashLeak leak, const std::atomic<bool>& leaking)
      : LabelledDevice(std::move(device)), leak_(leak), leaking_(leaking) {}

  // The number of times that memory was pinned or an event or a stream was made.
  int taken() const { return taken_; }

  Status PinHost(void* data, uint64_t bytes) override {
    taken_ += 1;
    return ForwardingDevice::PinHost(data, bytes);
  }
  Result<StreamHandle> CreateStream(const char* label) override {
    taken_ += 1;
    return LabelledDevice::CreateStream(label);
  }
  Result<EventHandle> CreateEvent(const char* label) override {
    taken_ += 1;
    return LabelledDevice::CreateEvent(label);
  }

  Status StreamWait(StreamHandle stream, EventHandle event) override {
    return Leaks(LeakOf(LabelOf(stream), LabelOf(event)))
               ? Status()
               : ForwardingDevice::StreamWait(stream, event);
  }
  Result<bool> Reached(EventHandle event) override {
    if (Leaks(StashLeak::kReached) && LabelOf(event) != "stash interval") return true;
    return ForwardingDevice::Reached(event);
  }
  Status Wait(EventHandle event, int64_t timeout_ns) override {
    return Leaks(StashLeak::kWait) ? Status() : ForwardingDevice::Wait(event, timeout_ns);
  }
  Status Synchronize(StreamHandle stream, int64_t timeout_ns) override {
    if (Leaks(StashLeak::kSynchronize) && LabelOf(stream).starts_with("stash")) return {};
    return ForwardingDevice::Synchronize(stream, timeout_ns);
  }

 private:
  static StashLeak LeakOf(const std::string& stream, const std::string& event) {
    const bool by_caller = event == "stash: caller ready";
    if (stream == "stash down")
      return by_caller ? StashLeak::kDownBehindProducer : StashLeak::kDownBehindUp;
    if (stream == "stash up")
      return by_caller ? StashLeak::kUpBehindUsers : StashLeak::kUpBehindDown;
    if (event == "stash: down") return StashLeak::kBehindDown;
    return event == "stash: up" ? StashLeak::kBehindUp : StashLeak::kNone;
  }
  bool Leaks(StashLeak leak) const { return leaking_ && leak == leak_ && leak != StashLeak::kNone; }

  const StashLeak leak_;
  const std::atomic<bool>& leaking_;
  std::atomic<int> taken_ = 0;
};

struct StashSetting {
  int32_t device_kind = OFFLOAD_DEVICE_SIM;
  uint64_t device_bytes = 16 << 20;
  uint64_t seed = 0;
  uint64_t delay_ns_max = 0;
  uint32_t slabs = 16;
  uint32_t lanes = 1;
  uint32_t tickets_max = 0;
  StashLeak leak = StashLeak::kNone;
  std::function<std::unique_ptr<Device>(std::unique_ptr<Device>)> wrap;  // the device, if given
};

class StashRig {
 public:
  static constexpr uint64_t kSlabBytes = 4096;
  static constexpr uint64_t kHostBytes = 16 << 20;

  explicit StashRig(const StashSetting& setting) {
    offload_context_options_t options{};
    options.threads = 1;
    options.log = fault::DropLog;
    const KernelTable& kernels = *SelectKernels().value();
    std::unique_ptr<Device> device = CreateHostDevice();
    if (setting.device_kind != OFFLOAD_DEVICE_HOST)
      device = std::move(
          MakeAccelerator({setting.device_bytes, setting.seed, setting.delay_ns_max}, kernels)
              .value());
    if (setting.wrap) device = setting.wrap(std::move(device));
    auto leaky = std::make_unique<StashLeakyDevice>(std::move(device), setting.leak, leaking);
    leaky_device = leaky.get();
    internals = std::make_shared<Context>(options, std::move(leaky), kernels);
    context = static_cast<offload_context_t>(
        HandleTable<Context, HandleKind::kContext>::Instance().Insert(internals).value());
    host_ = std::move(PinnedArena::Map(internals->device(), kHostBytes).value());
    for (offload_stream_t& stream : streams)
      EXPECT_OFFLOAD_OK(offload_stream_create(context, &stream));
    auto stash_options = Make<offload_stash_options_t>();
    stash_options.budget_bytes = setting.slabs * kSlabBytes;
    stash_options.slab_bytes = kSlabBytes;
    stash_options.min_bytes = 1;
    stash_options.lanes = setting.lanes;
    stash_options.tickets_max = setting.tickets_max;
    EXPECT_OFFLOAD_OK(offload_stash_create(context, &stash_options, &stash));
  }

  ~StashRig() {
    if (stash != nullptr) {
      EXPECT_OFFLOAD_OK(offload_stash_destroy(stash));
    }
    for (offload_stream_t stream : streams) {
      EXPECT_OFFLOAD_OK(offload_stream_destroy(context, stream));
    }
    host_ = {};
    std::weak_ptr<Context> gone = internals;
    internals.reset();
    EXPECT_OFFLOAD_OK(offload_context_destroy(context));
    EXPECT_TRUE(gone.expired());
  }
  StashRig(const StashRig&) = delete;
  StashRig& operator=(const StashRig&) = delete;

  Device& device() { return internals->device(); }

  std::byte* Allocate(uint64_t bytes) {
    void* data = nullptr;
    EXPECT_OFFLOAD_OK(offload_device_alloc(context, bytes, &data));
    return static_cast<std::byte*>(data);
  }

  static std::vector<std::byte> RandomBytes(uint64_t bytes, Random& random) {
    std::vector<std::byte> content(bytes);
    for (std::byte& byte : content) byte = static_cast<std::byte>(random.Below(256));
    return content;
  }

  // Queues the write of `content` to device memory.
  void Write(offload_stream_t stream, std::byte* to, const std::vector<std::byte>& content) {
    std::byte* const from = TakeHost(content.size());
    std::copy(content.begin(), content.end(), from);
    EXPECT_TRUE(device().CopyToDevice(stream, to, from, content.size()).ok());
  }
  // Queues a read; the bytes are there when the stream has done its work.
  const std::byte* Read(offload_stream_t stream, const std::byte* from, uint64_t bytes) {
    std::byte* const to = TakeHost(bytes);
    EXPECT_TRUE(device().CopyToHost(stream, to, from, bytes).ok());
    return to;
  }
  void Synchronize(offload_stream_t stream) {
    EXPECT_OFFLOAD_OK(offload_stream_synchronize(context, stream, kLongNs));
  }

  offload_stash_stats_t Stats() {
    auto stats = Make<offload_stash_stats_t>();
    EXPECT_OFFLOAD_OK(offload_stash_get_stats(stash, &stats));
    return stats;
  }

  std::atomic<bool> leaking = false;
  std::shared_ptr<Context> internals;
  const StashLeakyDevice* leaky_device = nullptr;
  offload_context_t context = nullptr;
  offload_stream_t streams[3] = {};
  offload_stash_t stash = nullptr;

 private:
  std::byte* TakeHost(uint64_t bytes) {
    std::byte* const taken = host_.data() + host_taken_;
    host_taken_ += (bytes + 63) / 64 * 64;
    HYBRIDOPT_CHECK(host_taken_ <= host_.bytes());
    return taken;
  }

  PinnedArena host_;
  uint64_t host_taken_ = 0;
};

}  // namespace hybridopt
