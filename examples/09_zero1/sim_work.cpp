#include <functional>
#include <utility>

#include "device_work.h"

namespace {

class SimWork final : public DeviceWork {
 public:
  SimWork(offload_context_t context, offload_stream_t stream, MPI_Comm ranks)
      : context_(context), stream_(stream), ranks_(ranks) {
    MPI_Comm_size(ranks, &world_);
  }

  void queue(const MicroBatch& m) override {
    const MicroBatch seen{mapped(m.params, kElements), mapped(m.hidden, kSamples * kHidden),
                          mapped(m.errors, kSamples), mapped(m.grads, kElements), m.number};
    run([seen] { forward_backward(seen, for_each); });
  }

  void add(float* sum, const float* other, uint64_t count) override {
    const AddPass pass{mapped(sum, count), mapped(other, count)};
    run([=] { for_each(count, pass); });
  }

  void exchange(const float* mine, float* received, uint64_t count) override {
    const auto* from = mapped(mine, count * world());
    auto* to = mapped(received, count * world());
    run([this, from, to, count] {
      MPI_Alltoall(from, static_cast<int>(count), MPI_FLOAT, to, static_cast<int>(count), MPI_FLOAT,
                   ranks_);
    });
  }

  void gather(uint16_t* params, uint64_t count) override {
    auto* all = mapped(params, count * world());
    run([this, all, count] {
      MPI_Allgather(MPI_IN_PLACE, 0, MPI_DATATYPE_NULL, all, static_cast<int>(count), MPI_UINT16_T,
                    ranks_);
    });
  }

 private:
  static constexpr auto for_each = [](uint64_t count, const auto& pass) {
    for (uint64_t i = 0; i < count; ++i) pass(i);
  };

  uint64_t world() const { return static_cast<uint64_t>(world_); }

  // Where a function on the stream sees the device's memory.
  template <typename T>
  T* mapped(T* data, uint64_t count) {
    void* seen = nullptr;
    void* asked = const_cast<void*>(static_cast<const void*>(data));
    MUST(offload_device_map(context_, asked, count * sizeof(T), &seen));
    return static_cast<T*>(seen);
  }

  void run(std::function<void()> function) {
    using Function = std::function<void()>;
    const auto call = [](void* user) {
      const std::unique_ptr<Function> queued(static_cast<Function*>(user));
      (*queued)();
    };
    MUST(offload_stream_run(context_, stream_, call, new Function(std::move(function))));
  }

  offload_context_t context_;
  offload_stream_t stream_;
  MPI_Comm ranks_;
  int world_ = 0;
};

}  // namespace

std::unique_ptr<DeviceWork> make_sim_work(offload_context_t context, offload_stream_t stream,
                                          MPI_Comm ranks) {
  return std::make_unique<SimWork>(context, stream, ranks);
}
