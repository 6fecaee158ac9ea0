// 03_rl_cycle.cpp shows the two phases of an RL trainer, taking turns on a device that holds only
// one of them. Takes 5 s on two CPUs. Expect a table of what the device holds in each phase, and at
// its end "same bits: yes": training has not noticed that its memory was away.
//
//   rollout   the generator's copy of the weights, and its KV cache
//   train     params, gradients, and the device's share of the AdamW state
//
// Before a rollout everything that training needs goes to the host, so that the library holds no
// byte on the device; afterwards it comes back, to other addresses. The gradients of the last batch
// have not been stepped yet when that happens: they go along, and no bit of them may be lost.
//
// Where there is a GPU, the work runs there (03_rl_cycle/gpu_policy.cu), queued on a CUDA stream of
// the program's own. A GPU has room for both phases; the table then has what cudaMemGetInfo
// measures.
//
// Read Trainer first: make_room and come_back are what an RL trainer has to write.
#include <string.h>

#include <memory>
#include <utility>
#include <vector>

#include "03_rl_cycle/gpu_policy.h"
#include "03_rl_cycle/policy.h"
#include "03_rl_cycle/timeline.h"
#include "device.h"
#include "numbers.h"
#include "offload_simple.h"
#include "program.h"

namespace {

constexpr uint64_t kParamBytes = kParamCount * sizeof(uint16_t);

// Device memory, and where functions on a stream of the simulated device see it.
template <typename T>
struct Buffer {
  T* device = nullptr;
  T* mapped = nullptr;
};

// What a function on the stream works on: it runs later than the call that queues it.
struct Job {
  const Prompts* prompts;
  Scores* scores;
  int step;
  const uint16_t* params;
  uint16_t* grads;
  uint16_t* weights;
  float* cache;
};

// -------------------------------------------------------------------------------------- trainer

class Trainer {
 public:
  Trainer(bool gpu, uint64_t device_bytes) {
    auto options = offload_init<offload_context_options_t>();
    options.device_kind = gpu ? OFFLOAD_DEVICE_CUDA : OFFLOAD_DEVICE_SIM;
    if (!gpu) options.sim_memory_bytes = device_bytes;
    MUST(offload_context_create(&options, &context_));
    if (gpu) {
      gpu_ = make_gpu_policy();
      gpu_free_at_start_ = gpu_->free_bytes();
      stream_ = gpu_->stream();
    } else {
      MUST(offload_stream_create(context_, &stream_));
    }
    MUST(allocate(kParamBytes, &params_));
    MUST(allocate(kParamBytes, &grads_));
    load_first_values();
    create_optimizer();
  }

  ~Trainer() {
    MUST(offload_optimizer_destroy(optimizer_));
    if (!gpu_) MUST(offload_stream_destroy(context_, stream_));
    gpu_.reset();
    MUST(offload_context_destroy(context_));  // and its memory
  }

  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Device memory of the rollout. The status is the caller's to look at.
  int32_t allocate_weights() { return allocate(kParamBytes, &weights_); }
  int32_t allocate_cache() { return allocate(kCacheBytes, &cache_); }
  void free_rollout() {
    release(&weights_);
    release(&cache_);
  }

  // The generator gets the weights of now.
  void hand_over_weights() {
    if (gpu_) {
      gpu_->copy(weights_.device, params_.device, kParamCount);
      return finish();
    }
    run([](void* user) {
      const Job* job = static_cast<Job*>(user);
      memcpy(job->weights, job->params, kParamBytes);
    });
  }

  // Before the rollout. The calls queue copies; once the last ticket has completed, all three
  // resources are on the host and their device memory is free for others.
  void make_room() {
    auto options = offload_init<offload_move_options_t>();  // all params
    options.streams = &stream_;
    options.stream_count = 1;
    offload_ticket_t ticket;
    MUST(offload_optimizer_offload_grads(optimizer_, &options, nullptr));
    MUST(offload_optimizer_offload_states(optimizer_, &options, nullptr));
    MUST(offload_optimizer_offload_params(optimizer_, &options, &ticket));
    MUST(offload_optimizer_wait(optimizer_, ticket, -1));
    release(&params_);
    release(&grads_);
  }

  // After it. Every second time the buffers swap places: addresses are nothing to rely on.
  void come_back(int iteration) {
    if (iteration % 2 == 0) MUST(allocate(kParamBytes, &params_));
    MUST(allocate(kParamBytes, &grads_));
    if (iteration % 2 == 1) MUST(allocate(kParamBytes, &params_));
    std::vector<offload_binding_t> bindings(kLayers, offload_init<offload_binding_t>());
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      bindings[layer].param = layer;
      bindings[layer].data = params_.device + layer * kLayerCount;
      bindings[layer].grad = grads_.device + layer * kLayerCount;
    }
    MUST(offload_optimizer_bind(optimizer_, bindings.data(), kLayers));
    MUST(offload_optimizer_reload_params(optimizer_, nullptr, nullptr));
    MUST(offload_optimizer_reload_grads(optimizer_, nullptr, nullptr));
    MUST(offload_optimizer_reload_states(optimizer_, nullptr, nullptr));
    MUST(offload_optimizer_wait(optimizer_, 0, -1));
  }

  void rollout(int iteration) {
    prompts_ = std::make_unique<Prompts>(iteration);
    if (gpu_) {
      gpu_->generate(*prompts_, weights_.device, cache_.device);
      return finish();
    }
    run([](void* user) {
      const Job* job = static_cast<Job*>(user);
      generate(*job->prompts, job->weights, job->cache, job->scores);
    });
  }
  // Mean squared, of the last rollout.
  double error() const { return gpu_ ? gpu_->scores().mean() : scores_.mean(); }

  // A batch's gradients are stepped when the next batch begins, the last ones after the next
  // rollout.
  void train() {
    for (int step = 0; step < kTrainSteps; ++step) {
      if (has_grads_) queue_step();
      make_grads(step);
      has_grads_ = true;
    }
  }

  Bytes bytes() const {
    Bytes bytes{};
    bytes.library = offload_init<offload_stats_t>();
    MUST(offload_optimizer_get_stats(optimizer_, &bytes.library));
    auto info = offload_init<offload_context_info_t>();
    MUST(offload_context_get_info(context_, &info));
    const offload_stats_t& library = bytes.library;
    bytes.scratch = library.device_bytes - library.state_bytes[OFFLOAD_TIER_DEVICE];
    bytes.weights = weights_.device ? kParamBytes : 0;
    bytes.cache = cache_.device ? kCacheBytes : 0;
    bytes.free = info.device_memory_free_bytes;
    if (gpu_) measure(&bytes);
    return bytes;
  }

  std::string device_name() const {
    auto info = offload_init<offload_context_info_t>();
    MUST(offload_context_get_info(context_, &info));
    return info.device_name;
  }

  // A hash of the bf16 params as they lie on the device.
  uint64_t params_hash() { return hash_device(kHashStart, params_.device, kParamBytes); }

  // A hash of masters and both moments, of the device's share and the host's.
  uint64_t states_hash() {
    uint64_t hash = kHashStart;
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      for (int kind : {OFFLOAD_STATE_MASTER, OFFLOAD_STATE_EXP_AVG, OFFLOAD_STATE_EXP_AVG_SQ}) {
        auto view = offload_init<offload_state_view_t>();
        MUST(offload_optimizer_state(optimizer_, layer, kind, &view));
        hash = hash_device(hash, view.device_data, view.device_count * sizeof(float));
        hash = hash_bytes(hash, view.host_data, view.host_count * sizeof(float));
      }
    }
    return hash;
  }

 private:
  template <typename T>
  int32_t allocate(uint64_t bytes, Buffer<T>* buffer) {
    void *device = nullptr, *mapped = nullptr;
    const int32_t status = offload_device_alloc(context_, bytes, &device);
    if (status != OFFLOAD_OK) return status;
    if (!gpu_) MUST(offload_device_map(context_, device, bytes, &mapped));
    *buffer = {static_cast<T*>(device), static_cast<T*>(mapped)};
    return OFFLOAD_OK;
  }

  template <typename T>
  void release(Buffer<T>* buffer) {
    MUST(offload_device_free(context_, buffer->device));
    *buffer = {};
  }

  void load_first_values() {
    Random random{1};
    std::vector<uint16_t> values(kParamCount, 0);
    MUST(offload_device_upload(context_, grads_.device, values.data(), kParamBytes, stream_));
    for (uint16_t& value : values) value = narrow(static_cast<float>(0.03 * random.normal()));
    MUST(offload_device_upload(context_, params_.device, values.data(), kParamBytes, stream_));
  }

  // Half of the state lives on the device; room on the host for all that moves is part of commit.
  void create_optimizer() {
    auto options = offload_init<offload_optimizer_options_t>();
    options.algorithm = OFFLOAD_ADAMW;
    options.device_fraction = 0.5;
    options.chunk_elements = kParamCount;  // a GPU's larger default would only take more scratch
    options.movable = OFFLOAD_MOVABLE_PARAMS | OFFLOAD_MOVABLE_GRADS | OFFLOAD_MOVABLE_STATES;
    MUST(offload_optimizer_create(context_, &options, &optimizer_));
    auto group = offload_init<offload_group_t>();
    group.lr = 0.2;
    group.beta1 = 0.8;
    group.beta2 = 0.98;
    group.eps = 1;  // far above the gradients: steps in proportion to them suit this problem
    auto param = offload_init<offload_param_t>();
    MUST(offload_optimizer_add_group(optimizer_, &group, &param.group));
    param.dtype = param.grad_dtype = OFFLOAD_BF16;
    param.count = kLayerCount;
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::string name = "layer" + std::to_string(layer) + ".weight";
      param.name = name.c_str();
      param.data = params_.device + layer * kLayerCount;
      param.grad = grads_.device + layer * kLayerCount;
      MUST(offload_optimizer_add_params(optimizer_, &param, 1, nullptr));
    }
    MUST(offload_optimizer_commit(optimizer_, stream_));
  }

  void queue_step() {
    auto options = offload_init<offload_step_options_t>();
    options.grad_norm_max = 50;
    options.stream = stream_;
    offload_ticket_t ticket;
    MUST(offload_optimizer_step(optimizer_, &options, &ticket));
    MUST(offload_optimizer_stream_wait(optimizer_, ticket, stream_, nullptr, 0));
  }

  void make_grads(int step) {
    if (gpu_) {
      gpu_->learn(step, params_.device, grads_.device);
      return finish();
    }
    run(
        [](void* user) {
          const Job* job = static_cast<Job*>(user);
          learn(*job->prompts, *job->scores, job->step, job->params, job->grads);
        },
        step);
  }

  // Shows a GPU as if it had as much memory as the simulated device, counted from what was free at
  // the start. What cudaMemGetInfo misses beyond the counted bytes counts as scratch, too: pages
  // have 2 MiB.
  void measure(Bytes* bytes) const {
    const uint64_t free = gpu_->free_bytes();
    const uint64_t used = gpu_free_at_start_ - std::min(gpu_free_at_start_, free);
    const offload_stats_t& library = bytes->library;
    const uint64_t counted =
        library.params_bytes[OFFLOAD_TIER_DEVICE] + library.grads_bytes[OFFLOAD_TIER_DEVICE] +
        library.state_bytes[OFFLOAD_TIER_DEVICE] + bytes->weights + bytes->cache;
    bytes->scratch = std::clamp(used, counted, kDeviceBytes) - counted;
    bytes->free = kDeviceBytes - counted - bytes->scratch;
  }

  void finish() { MUST(offload_stream_synchronize(context_, stream_, -1)); }

  // Runs a function on the simulated device's stream and waits for it.
  void run(offload_stream_function_t function, int step = 0) {
    Job job{prompts_.get(), &scores_,        step,         params_.mapped,
            grads_.mapped,  weights_.mapped, cache_.mapped};
    MUST(offload_stream_run(context_, stream_, function, &job));
    finish();
  }

  uint64_t hash_device(uint64_t hash, const void* data, uint64_t bytes) {
    if (bytes == 0) return hash;
    std::vector<uint8_t> copy(bytes);
    MUST(offload_device_download(context_, copy.data(), data, bytes, stream_));
    return hash_bytes(hash, copy.data(), bytes);
  }

  offload_context_t context_ = nullptr;
  std::unique_ptr<GpuPolicy> gpu_;  // on a GPU
  uint64_t gpu_free_at_start_ = 0;
  offload_stream_t stream_ = nullptr;
  offload_optimizer_t optimizer_ = nullptr;
  Buffer<uint16_t> params_, grads_, weights_;
  Buffer<float> cache_;
  std::unique_ptr<Prompts> prompts_;
  Scores scores_{};
  bool has_grads_ = false;
};

// ------------------------------------------------------------------------------------- the show

// While training holds its memory there is no room for the KV cache, and the device says so. A GPU
// has room.
void show_refusal(Trainer& trainer, bool gpu) {
  if (gpu) {
    printf("\nThis GPU has room for the KV cache while training holds its memory.\n");
    return;
  }
  MUST(trainer.allocate_weights());
  const int32_t status = trainer.allocate_cache();
  const std::string message = offload_last_error();
  trainer.free_rollout();
  if (status != OFFLOAD_OUT_OF_DEVICE_MEMORY) fail("the KV cache was not refused");
  printf("\nThe KV cache, while training holds its memory: %s\n", offload_status_name(status));
  print_wrapped(message);
}

// ------------------------------------------------------------------------------------- the runs

struct Hashes {
  uint64_t params, states;
};

// With `offloading`, everything of training leaves the device for each rollout; else nothing ever
// moves. Either way the same work is done. `shown`: as the table.
Hashes run_cycles(Trainer& trainer, int iterations, bool offloading, bool shown) {
  for (int iteration = 1; iteration <= iterations; ++iteration) {
    std::string when = std::to_string(iteration);  // shown once
    const auto phase = [&](const char* name, auto body) {
      const double start = now();
      body();
      if (shown) show(std::exchange(when, ""), name, now() - start, trainer.bytes());
    };
    if (shown) printf("\n");
    phase("offload", [&] {
      MUST(trainer.allocate_weights());
      trainer.hand_over_weights();
      if (offloading) trainer.make_room();
    });
    phase("rollout", [&] {
      MUST(trainer.allocate_cache());
      trainer.rollout(iteration);
    });
    phase("reload", [&] {
      trainer.free_rollout();
      if (offloading) trainer.come_back(iteration);
    });
    phase("train", [&] { trainer.train(); });
    if (shown) printf("      mean squared error of the rollout: %.3f\n", trainer.error());
  }
  return {trainer.params_hash(), trainer.states_hash()};
}

bool compare(const Hashes& moved, const Hashes& stayed, bool gpu) {
  const auto row = [](const char* run, const Hashes& hashes) {
    printf("  %-32s %016llx   %016llx\n", run, static_cast<unsigned long long>(hashes.params),
           static_cast<unsigned long long>(hashes.states));
  };
  printf("\n  hashes                           params             states\n");
  row("offloaded for every rollout", moved);
  row(gpu ? "nothing ever moved" : "nothing ever moved, cap lifted", stayed);
  const bool same = moved.params == stayed.params && moved.states == stayed.states;
  printf("  same bits: %s\n", same ? "yes" : "NO");
  return same;
}

struct Options {
  int iterations = 4;
  std::string device = "auto";
};

constexpr char kHelp[] =
    "03_rl_cycle: rollout and training take turns on a device that holds only one of them\n"
    "  --iterations N  rollouts, each followed by training (default 4)\n"
    "  --device KIND   gpu, cpu, or auto: a GPU where there is one (default auto)\n"
    "  --quick         2 iterations\n";

Options parse_options(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string flag = arguments[i];
    const char* value = i + 1 < count ? arguments[i + 1] : nullptr;
    if (flag == "--help") {
      fputs(kHelp, stdout);
      exit(0);
    } else if (flag == "--quick") {
      options.iterations = 2;
      continue;
    } else if (flag == "--iterations") {
      options.iterations = static_cast<int>(number(flag, value, 1, 1000));
    } else if (flag == "--device") {
      options.device = device_flag(value);
    } else {
      fail(flag + ": no such flag; --help lists them");
    }
    ++i;
  }
  return options;
}

}  // namespace

int main(int count, char** arguments) {
  const Options options = parse_options(count, arguments);
  const bool gpu = use_gpu(options.device);
  if (gpu) {  // CUDA keeps the memory that it takes at a first use: before bytes are shown.
    Trainer trainer(gpu, 0);
    run_cycles(trainer, 1, true, false);
  }
  Hashes moved, stayed;
  {
    Trainer trainer(gpu, kDeviceBytes);
    show_header(gpu ? trainer.device_name() : "");
    show("", "start", 0, trainer.bytes());
    show_refusal(trainer, gpu);
    moved = run_cycles(trainer, options.iterations, true, true);
  }
  {
    Trainer trainer(gpu, 2 * kDeviceBytes);
    stayed = run_cycles(trainer, options.iterations, false, false);
  }
  return compare(moved, stayed, gpu) ? 0 : 1;
}
