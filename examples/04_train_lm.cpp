// 04_train_lm.cpp shows a byte-level language model that is trained on real text with its AdamW
// state offloaded. Takes two to three minutes, with --quick 20 s on two CPUs. Expect the refusal of
// a plan that does not fit, falling bits a byte, and at the end "same bits: yes": the state on the
// host, on the device, on both, and a run that was killed give the same params.
//
// The model (04_train_lm/byte_model.h) runs on the simulated device, whose memory is capped so that
// the model fits and its AdamW state does not. One step, all of it queued without waiting:
//
//   stream_run       forward, backward: bf16 params -> bf16 gradients      on the device's stream
//   optimizer_step   gradients down, AdamW by CPU threads, params up       the library
//   stream_wait      the next forward starts when its params are there     on the device's stream
//
// Where there is a GPU, the model runs there (04_train_lm/gpu_model.cu): kernels and cuBLAS are
// queued on a CUDA stream of the program's own instead of the function, and each layer starts when
// its own params are there, while the step goes on with those of the next layers. A GPU has no cap;
// what the state takes there is measured.
//
// Read Trainer first: it makes the calls of the library, the rest prints.
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "04_train_lm/byte_model.h"
#include "04_train_lm/gpu_model.h"
#include "04_train_lm/options.h"
#include "04_train_lm/text.h"
#include "device.h"
#include "numbers.h"
#include "offload_simple.h"
#include "program.h"

namespace {

constexpr double kMiB = 1024.0 * 1024.0;

// -------------------------------------------------------------------------------------- trainer

// What a queued forward and backward works on. Two take turns, so that the host prepares one step
// while the device runs the other.
struct Job {
  Model* model;  // on the CPU
  bool train;
  Batch batch;
  double* loss;
  offload_ticket_t ticket;
};

void run_job(void* user) {
  Job* job = static_cast<Job*>(user);
  *job->loss = job->model->forward(job->batch);
  if (job->train) job->model->backward(job->batch);
}

class Trainer {
 public:
  Trainer(const Options& options, uint64_t memory_bytes) : bf16_moments_(options.bf16_moments) {
    auto context_options = offload_init<offload_context_options_t>();
    context_options.device_kind = options.gpu ? OFFLOAD_DEVICE_CUDA : OFFLOAD_DEVICE_SIM;
    context_options.threads = options.threads;
    if (!options.gpu) context_options.sim_memory_bytes = memory_bytes;
    MUST(offload_context_create(&context_options, &context_));
    if (options.gpu) {
      gpu_ = make_gpu_model();
      stream_ = gpu_->stream();
    } else {
      MUST(offload_stream_create(context_, &stream_));
      openblas_set_num_threads(static_cast<int>(info().threads));
    }
    random_.state = options.seed;
    place_model();
  }

  ~Trainer() {
    destroy_optimizer();
    if (!gpu_) MUST(offload_stream_destroy(context_, stream_));
    gpu_.reset();
    MUST(offload_context_destroy(context_));  // and its memory
  }

  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  // Registers every tensor. Nothing is allocated: plan() tells what commit() would take.
  void create_optimizer(double device_fraction) {
    auto options = offload_init<offload_optimizer_options_t>();
    options.algorithm = OFFLOAD_ADAMW;
    options.device_fraction = device_fraction;
    if (bf16_moments_) options.moment_dtype = OFFLOAD_BF16;
    MUST(offload_optimizer_create(context_, &options, &optimizer_));
    for (bool table : {false, true}) {
      const offload_group_t group = hyperparameters(table, 0);
      uint32_t id;
      MUST(offload_optimizer_add_group(optimizer_, &group, &id));
    }
    uint64_t offset = 0;
    Weights{}.for_each([&](const std::string& name, int count, double, bool table, float*) {
      auto param = offload_init<offload_param_t>();
      param.name = name.c_str();
      param.group = table ? 1 : 0;
      param.dtype = param.grad_dtype = OFFLOAD_BF16;
      param.data = params_ + offset;
      param.grad = grads_ + offset;
      param.count = static_cast<uint64_t>(count);
      MUST(offload_optimizer_add_params(optimizer_, &param, 1, nullptr));
      offset += param.count;
    });
  }

  void destroy_optimizer() {
    if (optimizer_) MUST(offload_optimizer_destroy(optimizer_));
    optimizer_ = nullptr;
    last_step_ = 0;
  }

  int32_t commit() { return offload_optimizer_commit(optimizer_, stream_); }

  offload_plan_t plan() const {
    auto plan = offload_init<offload_plan_t>();
    MUST(offload_optimizer_plan(optimizer_, &plan));
    return plan;
  }

  offload_context_info_t info() const {
    auto info = offload_init<offload_context_info_t>();
    MUST(offload_context_get_info(context_, &info));
    return info;
  }

  // rate scales the learning rates. At most two steps may be unfinished.
  void queue_step(const Text& text, double rate) {
    Job& job = jobs_[queued_++ % 2];
    job.train = true;
    sample(job.batch, text.train, random_);
    for (uint32_t group : {0, 1}) {
      const offload_group_t values = hyperparameters(group == 1, rate);
      MUST(offload_optimizer_set_group(optimizer_, group, &values));
    }
    queue_model(job);
    auto options = offload_init<offload_step_options_t>();
    options.grad_norm_max = 1;
    options.stream = stream_;
    MUST(offload_optimizer_step(optimizer_, &options, &job.ticket));
    last_step_ = job.ticket;
  }

  // Waits for the oldest unfinished step and returns its bits per byte.
  double finish_step() {
    const Job& job = jobs_[finished_++ % 2];
    MUST(offload_optimizer_wait(optimizer_, job.ticket, -1));
    return *job.loss / log(2);
  }

  // The state after all steps that are queued; training goes on meanwhile.
  offload_ticket_t save(const std::string& path) {
    auto options = offload_init<offload_save_options_t>();
    options.path = path.c_str();
    offload_ticket_t ticket;
    MUST(offload_optimizer_save(optimizer_, &options, &ticket));
    return ticket;
  }
  void wait(offload_ticket_t ticket) { MUST(offload_optimizer_wait(optimizer_, ticket, -1)); }

  // Goes on where a checkpoint was saved, and draws the text again that was drawn until then.
  // Returns its step.
  uint64_t load(const std::string& path, const Text& text) {
    auto info = offload_init<offload_checkpoint_info_t>();
    MUST(offload_checkpoint_inspect(path.c_str(), &info, nullptr, nullptr));
    auto options = offload_init<offload_load_options_t>();
    options.path = path.c_str();
    options.stream = stream_;
    offload_ticket_t ticket;
    MUST(offload_optimizer_load(optimizer_, &options, &ticket));
    MUST(offload_optimizer_wait(optimizer_, ticket, -1));
    for (uint64_t i = 0; i < info.step; ++i) sample(jobs_[0].batch, text.train, random_);
    return info.step;
  }

  offload_stats_t stats() const {
    auto stats = offload_init<offload_stats_t>();
    MUST(offload_optimizer_get_stats(optimizer_, &stats));
    return stats;
  }

  // Bits per byte of the held-out text.
  double evaluate(const Text& text) {
    constexpr int kParts = 16;
    Job& job = jobs_[2];
    job.train = false;
    double loss = 0;
    for (int i = 0; i < kParts; ++i) {
      sample_evenly(job.batch, text.held_out, i, kParts);
      queue_model(job);
      MUST(offload_stream_synchronize(context_, stream_, -1));
      loss += *job.loss;
    }
    return loss / kParts / log(2);
  }

  // What cudaMemGetInfo says, on a GPU.
  uint64_t gpu_free_bytes() const { return gpu_->free_bytes(); }

  // FNV-1a over all bf16 params, as they lie on the device.
  uint64_t params_hash() {
    return hash_device(kHashStart, params_, parameter_count() * sizeof(uint16_t));
  }

  // The same over all fp32 masters: of each tensor the device's share, then the host's.
  uint64_t masters_hash() {
    uint64_t hash = kHashStart;
    for (uint32_t id = 0; id < plan().param_count; ++id) {
      auto view = offload_init<offload_state_view_t>();
      MUST(offload_optimizer_state(optimizer_, id, OFFLOAD_STATE_MASTER, &view));
      hash = hash_device(hash, view.device_data, view.device_count * sizeof(float));
      hash = hash_bytes(hash, view.host_data, view.host_count * sizeof(float));
    }
    return hash;
  }

 private:
  uint64_t hash_device(uint64_t hash, const void* data, uint64_t bytes) {
    if (bytes == 0) return hash;
    std::vector<uint8_t> copy(bytes);
    MUST(offload_device_download(context_, copy.data(), data, bytes, stream_));
    return hash_bytes(hash, copy.data(), bytes);
  }

  // Rows of a lookup table get few gradients: they take larger steps and no weight decay.
  static offload_group_t hyperparameters(bool table, double rate) {
    auto group = offload_init<offload_group_t>();
    group.lr = rate * (table ? 3e-2 : 1e-3);
    group.beta1 = 0.9;
    group.beta2 = 0.98;
    group.eps = 1e-8;
    group.weight_decay = table ? 0 : 0.1;
    return group;
  }

  // Forward, and backward if it trains, behind what is on the stream.
  void queue_model(Job& job) {
    if (gpu_) {
      gpu_->queue(job.batch, job.train, job.loss, [this](int layer) { await_layer(layer); });
    } else {
      if (last_step_)
        MUST(offload_optimizer_stream_wait(optimizer_, last_step_, stream_, nullptr, 0));
      MUST(offload_stream_run(context_, stream_, run_job, &job));
    }
  }

  // Work that is queued after this call reads the params of this layer as the last step leaves
  // them.
  void await_layer(int layer) {
    if (!last_step_) return;
    std::vector<uint32_t> ids(static_cast<size_t>(tensors_of_layer(layer)));
    uint32_t first = 0;
    for (int before = 0; before < layer; ++before)
      first += static_cast<uint32_t>(tensors_of_layer(before));
    std::iota(ids.begin(), ids.end(), first);
    MUST(offload_optimizer_stream_wait(optimizer_, last_step_, stream_, ids.data(),
                                       static_cast<uint32_t>(ids.size())));
  }

  template <typename T>
  T* allocate(uint64_t bytes) {
    void* data = nullptr;
    MUST(offload_device_alloc(context_, bytes, &data));
    return static_cast<T*>(data);
  }

  // Where functions on a stream of the simulated device see its memory.
  template <typename T>
  T* map(T* data, uint64_t bytes) {
    void* mapped = nullptr;
    MUST(offload_device_map(context_, data, bytes, &mapped));
    return static_cast<T*>(mapped);
  }

  void place_model() {
    const uint64_t bytes = parameter_count() * sizeof(uint16_t);
    params_ = allocate<uint16_t>(bytes);
    grads_ = allocate<uint16_t>(bytes);
    if (gpu_) {
      gpu_->place(params_, grads_);
    } else {
      const uint64_t workspace_bytes = Model::workspace_bytes();
      model_.params = map(params_, bytes);
      model_.grads = map(grads_, bytes);
      model_.lay_out(map(allocate<float>(workspace_bytes), workspace_bytes));
    }
    for (int i = 0; i < kJobs; ++i) {
      jobs_[i].model = &model_;
      jobs_[i].loss = gpu_ ? gpu_->losses() + i : &losses_[i];
    }

    std::vector<uint16_t> start;
    Weights{}.for_each([&](const std::string&, int size, double deviation, bool, float*) {
      for (int i = 0; i < size; ++i) {
        start.push_back(narrow(static_cast<float>(deviation ? deviation * random_.normal() : 0)));
      }
    });
    MUST(offload_device_upload(context_, params_, start.data(), bytes, stream_));
  }

  offload_context_t context_ = nullptr;
  const bool bf16_moments_;
  offload_stream_t stream_ = nullptr;
  offload_optimizer_t optimizer_ = nullptr;
  offload_ticket_t last_step_ = 0;                 // 0: there was none
  uint16_t *params_ = nullptr, *grads_ = nullptr;  // device addresses: never touched by the host
  Model model_{};
  std::unique_ptr<GpuModel> gpu_;  // instead of it, on a GPU
  static constexpr int kJobs = 3;  // two that train, and one that evaluates
  static_assert(kJobs <= GpuModel::kLosses);
  Job jobs_[kJobs];
  double losses_[kJobs];
  uint64_t queued_ = 0, finished_ = 0;
  Random random_{};
};

// ------------------------------------------------------------------------------------- the show

// Room for the model, its gradients and activations, and for half of the AdamW state.
uint64_t memory_cap() { return Model::workspace_bytes() + parameter_count() * (2 + 2 + 12 / 2); }

void show_model(const Text& text, const offload_context_info_t& info) {
  printf("%s\n", offload_build_info());
  printf("machine  %u update threads on %u CPUs, %u NUMA node(s), kernels %s\n", info.threads,
         info.cpus_allowed, info.nodes, info.isa);
  printf("device   %s, %s%.1f MiB\n", info.device_name,
         info.device_kind == OFFLOAD_DEVICE_CUDA ? "" : "capped to ",
         info.device_memory_bytes / kMiB);
  printf("data     %s: %zu files, %.1f MB to learn, %.1f MB held out\n\n", text.where.c_str(),
         text.files, text.train.size() / 1e6, text.held_out.size() / 1e6);
  printf("model         tensors  parameters  bf16 MiB\n");
  struct Row {
    std::string group;
    int tensors;
    int64_t parameters;
  };
  std::vector<Row> rows;
  Row total{"total", 0, 0};
  Weights{}.for_each([&](const std::string& name, int count, double, bool, float*) {
    const std::string group = name.substr(0, name.find('.'));
    if (rows.empty() || rows.back().group != group) rows.push_back({group, 0, 0});
    for (Row* row : {&rows.back(), &total}) ++row->tensors, row->parameters += count;
  });
  rows.push_back(total);
  for (const Row& row : rows) {
    printf("  %-11s %7d %11lld %9.2f\n", row.group.c_str(), row.tensors,
           static_cast<long long>(row.parameters), 2 * row.parameters / kMiB);
  }
}

void show_plans(const offload_plan_t& device, const offload_plan_t& host) {
  printf("\nplan, MiB       device_fraction 1   device_fraction 0\n");
  printf("                  device     host     device     host\n");
  const auto row = [](const char* kind, uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    printf("  %-13s %8.2f %8.2f   %8.2f %8.2f\n", kind, a / kMiB, b / kMiB, c / kMiB, d / kMiB);
  };
  const char* kinds[] = {"master", "exp_avg", "exp_avg_sq"};
  for (int i = OFFLOAD_STATE_MASTER; i <= OFFLOAD_STATE_EXP_AVG_SQ; ++i) {
    row(kinds[i], device.state_bytes[OFFLOAD_TIER_DEVICE][i],
        device.state_bytes[OFFLOAD_TIER_HOST][i], host.state_bytes[OFFLOAD_TIER_DEVICE][i],
        host.state_bytes[OFFLOAD_TIER_HOST][i]);
  }
  row("staging", 0, device.staging_bytes, 0, host.staging_bytes);
  row("scratch", device.device_scratch_bytes, device.host_scratch_bytes, host.device_scratch_bytes,
      host.host_scratch_bytes);
  row("total", device.device_bytes, device.host_bytes, host.device_bytes, host.host_bytes);
  row("free now", device.device_free_bytes, device.host_available_bytes, host.device_free_bytes,
      host.host_available_bytes);
  printf("  fits          %17s   %17s\n", device.fits ? "yes" : "no", host.fits ? "yes" : "no");
}

// All state on the device must be refused; leaves the optimizer with all state on the host.
void show_refusal_and_commit(Trainer& trainer) {
  trainer.create_optimizer(1);
  const offload_plan_t device = trainer.plan();
  const int32_t status = trainer.commit();
  const std::string message = offload_last_error();
  trainer.destroy_optimizer();
  if (status != OFFLOAD_OUT_OF_DEVICE_MEMORY) fail("device_fraction 1 was not refused");
  trainer.create_optimizer(0);
  show_plans(device, trainer.plan());
  printf("\ncommit at device_fraction 1: %s\n  %s\n", offload_status_name(status), message.c_str());
  MUST(trainer.commit());
  printf("commit at device_fraction 0: OK, %.1f MiB of device memory saved\n",
         (device.device_bytes - trainer.plan().device_bytes) / kMiB);
}

// The same on a GPU, which has room for all state: measures the memory that each commit takes.
// Leaves the optimizer with all state on the host.
void measure_and_commit(Trainer& trainer) {
  offload_plan_t plans[2];
  double taken[2];  // MiB
  // The first commit is not counted, because CUDA keeps the memory that it takes at the first use
  // of something.
  for (double fraction : {1.0, 1.0, 0.0}) {
    trainer.destroy_optimizer();
    trainer.create_optimizer(fraction);
    const int place = fraction == 1 ? 0 : 1;
    plans[place] = trainer.plan();
    const double before = trainer.gpu_free_bytes() / kMiB;
    MUST(trainer.commit());
    taken[place] = before - trainer.gpu_free_bytes() / kMiB;
  }
  show_plans(plans[0], plans[1]);
  printf("\ncommit at device_fraction 1: OK, cudaMemGetInfo shows %.1f MiB less\n", taken[0]);
  printf("commit at device_fraction 0: OK, cudaMemGetInfo shows %.1f MiB less\n", taken[1]);
  printf("  %.1f MiB of device memory saved, %.1f MiB by the plan\n", taken[0] - taken[1],
         (plans[0].device_bytes - plans[1].device_bytes) / kMiB);
}

// Warms up over 40 steps, then falls to zero over the last 70 % of the run.
double learning_rate(int64_t step, double progress) {
  return std::min(1.0, (step + 1) / 40.0) * std::clamp((1 - progress) / 0.7, 0.0, 1.0);
}

// One line of 78 columns: redrawn on a terminal, else written now and then.
class Progress {
 public:
  void show(int64_t step, double progress, double elapsed, double bits) {
    if (elapsed - shown_ < (terminal_ ? 0.1 : 10)) return;
    shown_ = elapsed;
    const int filled = static_cast<int>(12 * progress);
    printf("%s  [%.*s%.*s] %3.0f %%  step %4lld  %5.0f tokens/s  %.3f bits/byte  ETA %3.0f s%s",
           terminal_ ? "\r" : "", filled, "############", 12 - filled, "............",
           100 * progress, static_cast<long long>(step), step * kTokens / elapsed, bits,
           progress > 0 ? elapsed / progress - elapsed : 0, terminal_ ? "" : "\n");
    fflush(stdout);
  }
  void clear() const {
    if (terminal_) printf("\r\033[K");  // erase the line
  }

 private:
  const bool terminal_ = isatty(STDOUT_FILENO);
  double shown_ = 0;
};

void show_held_out(Trainer& trainer, const Text& text, int64_t step) {
  printf("  step %5lld  held out %.3f bits/byte\n", static_cast<long long>(step),
         trainer.evaluate(text));
  fflush(stdout);
}

// Where the time of a step went, as the library measured it.
void show_lanes(const offload_stats_t& stats, double elapsed) {
  const double steps = std::max<double>(1, static_cast<double>(stats.steps_applied));
  const auto row = [&](const char* lane, double seconds) {
    printf("  %-34s %8.2f\n", lane, 1e3 * seconds / steps);
  };
  printf("\nmean of %.0f steps, ms (%llu skipped)\n", steps,
         static_cast<unsigned long long>(stats.steps_skipped));
  row("forward, backward and optimizer", elapsed);
  row("optimizer, from start to end", stats.total_seconds);
  row("  gradient norm and verdict known", stats.norm_seconds);
  row("  lane: gradients down", stats.grads_down_seconds);
  row("  lane: update on the CPU", stats.update_seconds);
  row("  lane: params up", stats.params_up_seconds);
  row("  stall: CPU waiting for a lane", stats.stall_seconds);
}

void train(Trainer& trainer, const Text& text, const Options& options) {
  printf("\ntraining with all AdamW state on the host\n");
  show_held_out(trainer, text, 0);
  Progress line;
  double bits = 8, elapsed = 0, evaluated = 0, next_evaluation = 0.2;
  int64_t step = 0;
  trainer.queue_step(text, learning_rate(0, 0));
  for (double progress = 0, start = now(); progress < 1;) {
    // The next step is queued before this one is looked at: the device never waits for the host.
    const bool last = step + 1 >= options.steps || elapsed >= options.seconds;
    if (!last) trainer.queue_step(text, learning_rate(step + 1, progress));
    bits += (trainer.finish_step() - bits) * std::max(0.05, 1.0 / ++step);
    elapsed = now() - start - evaluated;
    progress = last ? 1
                    : std::min(0.999, std::max(elapsed / options.seconds,
                                               static_cast<double>(step) / options.steps));
    line.show(step, progress, elapsed, bits);
    if (progress < next_evaluation) continue;
    while (next_evaluation <= progress) next_evaluation += 0.2;
    line.clear();
    const double before = now();
    show_held_out(trainer, text, step);
    evaluated += now() - before;
  }
  show_lanes(trainer.stats(), elapsed);
}

// The job of the replay, which saves at its middle and is killed in a step after that.
[[noreturn]] void be_killed(const Text& text, const Options& options) {
  Trainer trainer(options, 2 * memory_cap());
  trainer.create_optimizer(0.3);
  MUST(trainer.commit());
  const int middle = options.replay_steps / 2;
  offload_ticket_t save = 0;
  for (int step = 0;; ++step) {
    trainer.queue_step(text, learning_rate(step, 0));
    if (step + 1 == middle) save = trainer.save(options.killed + "/middle");
    trainer.finish_step();
    if (step < middle) continue;
    trainer.wait(save);  // steps do not; killed before, it would leave nothing to resume
    trainer.queue_step(text, learning_rate(step + 1, 0));
    raise(SIGKILL);
  }
}

// Runs that job as a process of its own, then goes on from what it left to the end of the replay.
std::pair<uint64_t, uint64_t> kill_and_resume(const Text& text, const Options& options) {
  char directory[] = "/tmp/train_lm-XXXXXX";
  if (!mkdtemp(directory)) fail("cannot make a directory in /tmp");
  fflush(nullptr);
  const pid_t child = fork();
  if (child == 0) {
    const std::string threads = std::to_string(options.threads),
                      seed = std::to_string(options.seed),
                      steps = std::to_string(options.replay_steps);
    execl("/proc/self/exe", "train_lm", "--killed", directory, "--threads", threads.c_str(),
          "--seed", seed.c_str(), "--replay-steps", steps.c_str(), "--moments",
          options.bf16_moments ? "bf16" : "fp32", "--device", options.gpu ? "gpu" : "cpu",
          options.data.empty() ? nullptr : "--data", options.data.c_str(), nullptr);
    _exit(127);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) fail("cannot run a process");
  if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) fail("the job was not killed");

  char path[4096];
  MUST(offload_checkpoint_newest(directory, nullptr, path, sizeof path));
  Trainer trainer(options, 2 * memory_cap());
  trainer.create_optimizer(0.6);
  MUST(trainer.commit());
  const uint64_t saved = trainer.load(path, text);
  for (int step = static_cast<int>(saved); step < options.replay_steps; ++step) {
    trainer.queue_step(text, learning_rate(step, 0));
    trainer.finish_step();
  }
  const uint64_t params = trainer.params_hash(), masters = trainer.masters_hash();
  printf("  killed, resumed  %016llx      %016llx\n", static_cast<unsigned long long>(params),
         static_cast<unsigned long long>(masters));
  printf("  (saved after step %llu at device_fraction 0.3, killed in step %llu, resumed at 0.6)\n",
         static_cast<unsigned long long>(saved), static_cast<unsigned long long>(saved + 2));
  std::filesystem::remove_all(directory);
  return {params, masters};
}

// The first steps once more, from the same seed, with the state at three places, and once killed.
bool replay(const Text& text, const Options& options) {
  printf("\nthe first %d steps again%s\n", options.replay_steps, options.gpu ? "" : ", cap lifted");
  printf("  device_fraction  hash of bf16 params  hash of fp32 masters\n");
  std::vector<std::pair<uint64_t, uint64_t>> hashes;
  for (double fraction : {0.0, 0.3, 1.0}) {
    Trainer trainer(options, 2 * memory_cap());
    trainer.create_optimizer(fraction);
    MUST(trainer.commit());
    trainer.queue_step(text, learning_rate(0, 0));
    for (int step = 1; step < options.replay_steps; ++step) {
      trainer.queue_step(text, learning_rate(step, 0));  // behind one that runs, as in training
      trainer.finish_step();
    }
    trainer.finish_step();
    hashes.push_back({trainer.params_hash(), trainer.masters_hash()});
    printf("  %15.1f     %016llx      %016llx\n", fraction,
           static_cast<unsigned long long>(hashes.back().first),
           static_cast<unsigned long long>(hashes.back().second));
    fflush(stdout);
  }
  hashes.push_back(kill_and_resume(text, options));
  const bool same = hashes[0] == hashes[1] && hashes[0] == hashes[2] && hashes[0] == hashes[3];
  printf("  same bits: %s\n", same ? "yes" : "NO");
  return same;
}

}  // namespace

int main(int count, char** arguments) {
  Options options = parse_options(count, arguments);
  options.gpu = use_gpu(options.device);
  const Text text = load_text(options.data);
  if (!options.killed.empty()) be_killed(text, options);
  {
    Trainer trainer(options, memory_cap());
    show_model(text, trainer.info());
    if (options.gpu) {
      measure_and_commit(trainer);
    } else {
      show_refusal_and_commit(trainer);
    }
    train(trainer, text, options);
  }
  return replay(text, options) ? 0 : 1;
}
