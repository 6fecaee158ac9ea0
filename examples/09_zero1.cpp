// 09_zero1.cpp shows ZeRO-1 in a C++ trainer: every rank holds all params, and the state of its
// part of them alone, a quarter of it on the device and the rest on the host.
//
//   mpirun -n 4 09_zero1                       on four simulated devices; with fewer than four
//                                              CPUs mpirun needs --oversubscribe
//   mpirun -n 4 09_zero1 --gpu                 on four GPUs, with NCCL between them
//   mpirun -n 4 09_zero1 --steps 20 --save DIR   DIR must not exist yet, its parent must
//   mpirun -n 2 09_zero1 --load DIR            goes on from there, on another number of ranks
//
// Takes seconds. Expect a loss that is lower at the end and two hashes, which are the same for 1,
// 2, 4 and 8 ranks and for a run that was saved and loaded in between.
//
// One step, all of it queued without waiting:
//
//   micro-batches    this rank's share of eight; their gradients are added in a binary tree
//   exchange         each rank gets all ranks' sums for its part, and adds them in the same tree
//   optimizer_step   AdamW on this rank's part of the params                        the library
//   stream_wait      what follows on the stream waits for the new params            the library
//   gather           each rank gets the other ranks' params
//
// Exchange and tree are a reduce-scatter whose additions have one order. That of NCCL or of MPI
// adds in an order that depends on the number of ranks, and gives other bits on other numbers.
// Nothing is clipped here: the norm is a sum over ranks, whose last bits depend on their number
// (docs/NUMERICS.md, "Norm, clip, skip").
//
// Read Trainer first: it makes the calls of the library.
#include <offload_mpi.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "09_zero1/device_work.h"
#include "numbers.h"
#include "offload_simple.h"
#include "program.h"

namespace {

constexpr int kMicroBatches = 8;

struct Options {
  uint64_t steps = 40;
  bool gpu = false;
  std::string save, load;
};

class Trainer {
 public:
  explicit Trainer(const Options& options) {
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &world_);
    if (kMicroBatches % world_ != 0)
      fail("got " + std::to_string(world_) + " ranks, expected 1, 2, 4 or 8");
    part_ = (kElements + kMicroBatches - 1) / kMicroBatches * kMicroBatches / world();
    MPI_Comm_dup(MPI_COMM_WORLD, &data_ranks_);
    const int device = make_context(options.gpu);
    work_ = options.gpu ? make_gpu_work(stream_, data_ranks_, device)
                        : make_sim_work(context_, stream_, data_ranks_);
    make_buffers();
    make_optimizer();
  }
  ~Trainer() {
    MUST(offload_stream_synchronize(context_, stream_, -1));
    MUST(offload_optimizer_destroy(optimizer_));
    if (offload_mpi_destroy(&comm_) != OFFLOAD_OK) fail(offload_mpi_last_error());
    work_.reset();
    MUST(offload_stream_destroy(context_, stream_));
    MUST(offload_context_destroy(context_));  // and its memory
    MPI_Comm_free(&data_ranks_);
  }
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  int rank() const { return rank_; }

  void queue_step(uint64_t step) {
    const uint64_t mine = kMicroBatches / world(), first = step * kMicroBatches + rank_ * mine;
    // grads_[0], grads_[1], ... are sums of fewer and fewer micro-batches.
    size_t sums = 0;
    for (uint64_t i = 0; i < mine; ++i) {
      work_->queue({params_, hidden_, errors_, grads_[sums++], first + i});
      for (uint64_t done = i + 1; done % 2 == 0; done /= 2, --sums)
        work_->add(grads_[sums - 2], grads_[sums - 1], kElements);
    }
    work_->exchange(grads_[0], pieces_, part_);
    for (uint64_t distance = 1; distance < world(); distance *= 2)
      for (uint64_t piece = 0; piece < world(); piece += 2 * distance)
        work_->add(pieces_ + piece * part_, pieces_ + (piece + distance) * part_, part_);

    auto options = offload_init<offload_step_options_t>();
    options.grad_scale = kMicroBatches;  // of a sum of means
    options.stream = stream_;
    const offload_ticket_t before = ticket_;
    MUST(offload_optimizer_step(optimizer_, &options, &ticket_));
    MUST(offload_optimizer_stream_wait(optimizer_, ticket_, stream_, nullptr, 0));
    work_->gather(params_, part_);
    // The host is one step ahead of the device, and not more.
    if (before != 0) MUST(offload_optimizer_wait(optimizer_, before, -1));
  }

  void save(const std::string& path) {
    auto options = offload_init<offload_save_options_t>();
    options.path = path.c_str();
    MUST(offload_optimizer_save(optimizer_, &options, nullptr));
    MUST(offload_optimizer_wait(optimizer_, 0, -1));
  }

  // Gives the step that the checkpoint was saved after.
  uint64_t load(const std::string& path) {
    auto info = offload_init<offload_checkpoint_info_t>();
    MUST(offload_checkpoint_inspect(path.c_str(), &info, nullptr, nullptr));
    auto options = offload_init<offload_load_options_t>();
    options.path = path.c_str();
    options.stream = stream_;
    offload_ticket_t ticket = 0;
    MUST(offload_optimizer_load(optimizer_, &options, &ticket));
    MUST(offload_optimizer_stream_wait(optimizer_, ticket, stream_, nullptr, 0));
    work_->gather(params_, part_);
    return info.step;
  }

  std::vector<uint16_t> params() {
    std::vector<uint16_t> all(kElements);
    MUST(offload_device_download(context_, all.data(), params_, 2 * kElements, stream_));
    return all;
  }

  // All ranks' masters, on rank 0.
  std::vector<float> masters() {
    MUST(offload_optimizer_wait(optimizer_, 0, -1));
    std::vector<float> mine;
    for (const Shard& shard : shards_) {
      mine.resize(mine.size() + shard.count);
      MUST(offload_optimizer_read_state(optimizer_, shard.id, OFFLOAD_STATE_MASTER, 0, shard.count,
                                        mine.data() + mine.size() - shard.count));
    }
    std::vector<int> counts(world()), begins(world());
    for (int rank = 0; rank < world_; ++rank) {
      begins[rank] = static_cast<int>(begin_of(rank));
      counts[rank] = static_cast<int>(begin_of(rank + 1) - begin_of(rank));
    }
    std::vector<float> all(kElements);
    MPI_Gatherv(mine.data(), static_cast<int>(mine.size()), MPI_FLOAT, all.data(), counts.data(),
                begins.data(), MPI_FLOAT, 0, MPI_COMM_WORLD);
    return all;
  }

  void show() const {
    auto plan = offload_init<offload_plan_t>();
    MUST(offload_optimizer_plan(optimizer_, &plan));
    printf(
        "%d ranks: %llu params on each, state for %llu of them on rank 0: %llu on the device, "
        "%llu on the host\n",
        world_, static_cast<unsigned long long>(kElements),
        static_cast<unsigned long long>(plan.element_count),
        static_cast<unsigned long long>(plan.elements[OFFLOAD_TIER_DEVICE]),
        static_cast<unsigned long long>(plan.elements[OFFLOAD_TIER_HOST]));
  }

 private:
  struct Shard {
    uint32_t id;
    uint64_t count;
  };

  uint64_t world() const { return static_cast<uint64_t>(world_); }
  // The last part is shorter than the others.
  uint64_t begin_of(int rank) const {
    return std::min(static_cast<uint64_t>(rank) * part_, kElements);
  }

  // Returns the device of this rank.
  int make_context(bool gpu) {
    MPI_Comm host = MPI_COMM_NULL;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &host);
    int local_rank = 0, local_world = 1;
    MPI_Comm_rank(host, &local_rank);
    MPI_Comm_size(host, &local_world);
    MPI_Comm_free(&host);
    auto options = offload_init<offload_context_options_t>();
    options.device_kind = gpu ? OFFLOAD_DEVICE_CUDA : OFFLOAD_DEVICE_SIM;
    options.device_index = gpu ? local_rank : 0;
    options.local_rank = static_cast<uint32_t>(local_rank);  // ranks of one host share its CPUs
    options.local_world = static_cast<uint32_t>(local_world);
    MUST(offload_context_create(&options, &context_));
    MUST(offload_stream_create(context_, &stream_));
    return options.device_index;
  }

  template <typename T>
  T* allocate(uint64_t count) {
    void* data = nullptr;
    MUST(offload_device_alloc(context_, count * sizeof(T), &data));
    return static_cast<T*>(data);
  }

  void make_buffers() {
    const uint64_t padded = part_ * world();
    std::vector<uint16_t> params(padded, 0);
    Random random{1};
    const float scale = 1 / sqrtf(static_cast<float>(kInputs));
    for (uint64_t i = 0; i < kElements; ++i)
      params[i] = narrow(scale * static_cast<float>(random.normal()));
    const std::vector<float> zeros(padded, 0);
    params_ = allocate<uint16_t>(padded);
    MUST(offload_device_upload(context_, params_, params.data(), 2 * padded, stream_));
    hidden_ = allocate<float>(kSamples * kHidden);
    errors_ = allocate<float>(kSamples);
    pieces_ = allocate<float>(padded);
    for (int share = kMicroBatches / world_; share > 0; share /= 2) {
      grads_.push_back(allocate<float>(padded));
      MUST(offload_device_upload(context_, grads_.back(), zeros.data(), 4 * padded, stream_));
    }
  }

  void make_optimizer() {
    if (offload_mpi_create(MPI_COMM_WORLD, &comm_) != OFFLOAD_OK) fail(offload_mpi_last_error());
    auto options = offload_init<offload_optimizer_options_t>();
    options.algorithm = OFFLOAD_ADAMW;
    options.device_fraction = 0.25;
    options.comm = &comm_;
    MUST(offload_optimizer_create(context_, &options, &optimizer_));
    auto group = offload_init<offload_group_t>();
    group.lr = 1e-2;
    group.beta1 = 0.9;
    group.beta2 = 0.99;
    group.eps = 1e-8;
    uint32_t group_id = 0;
    MUST(offload_optimizer_add_group(optimizer_, &group, &group_id));
    uint64_t tensor_begin = 0;
    for (const Tensor& tensor : kTensors) {
      add_shard(tensor, tensor_begin, group_id);
      tensor_begin += static_cast<uint64_t>(tensor.rows * tensor.columns);
    }
    MUST(offload_optimizer_commit(optimizer_, nullptr));
  }

  // The part of the tensor that this rank has, which may be empty. The shard says where it lies in
  // the tensor, so that checkpoints fit any number of ranks.
  void add_shard(const Tensor& tensor, uint64_t tensor_begin, uint32_t group) {
    const int64_t shape[] = {tensor.rows, tensor.columns}, offsets[] = {0, 0};
    const uint64_t tensor_end = tensor_begin + static_cast<uint64_t>(shape[0] * shape[1]);
    const uint64_t begin = std::clamp(begin_of(rank_), tensor_begin, tensor_end);
    const uint64_t end = std::clamp(begin_of(rank_ + 1), tensor_begin, tensor_end);
    auto shard = offload_init<offload_shard_t>();
    shard.dimensions = 2;
    shard.box_count = 1;
    shard.global_shape = shard.box_extents = shape;
    shard.box_offsets = offsets;
    shard.flags = OFFLOAD_SHARD_RANGE;
    shard.range_begin = begin - tensor_begin;
    shard.range_count = end - begin;
    auto param = offload_init<offload_param_t>();
    param.group = group;
    param.name = tensor.name;
    param.dtype = OFFLOAD_BF16;
    param.grad_dtype = OFFLOAD_FP32;
    param.count = end - begin;
    if (param.count > 0) {
      param.data = params_ + begin;
      param.grad = pieces_ + (begin - begin_of(rank_));
    }
    param.shard = &shard;
    uint32_t id = 0;
    MUST(offload_optimizer_add_params(optimizer_, &param, 1, &id));
    shards_.push_back({id, param.count});
  }

  int rank_ = 0, world_ = 1;
  uint64_t part_ = 0;  // elements of each rank's part
  MPI_Comm data_ranks_ = MPI_COMM_NULL;
  offload_comm_t comm_{};
  offload_context_t context_ = nullptr;
  offload_stream_t stream_ = nullptr;
  offload_optimizer_t optimizer_ = nullptr;
  offload_ticket_t ticket_ = 0;  // of the last step
  std::unique_ptr<DeviceWork> work_;
  uint16_t* params_ = nullptr;
  float *hidden_ = nullptr, *errors_ = nullptr, *pieces_ = nullptr;
  std::vector<float*> grads_;
  std::vector<Shard> shards_;
};

// The mean squared error on samples that no rank trains on.
float held_out_loss(const std::vector<uint16_t>& params) {
  std::vector<float> hidden(kSamples * kHidden), errors(kSamples);
  const MicroBatch m{params.data(), hidden.data(), errors.data(), nullptr, UINT64_C(1) << 40};
  for (uint64_t i = 0; i < hidden.size(); ++i) HiddenPass{m}(i);
  float loss = 0;
  for (uint64_t sample = 0; sample < kSamples; ++sample) {
    ErrorPass{m}(sample);
    loss += errors[sample] * errors[sample] / kSamples;
  }
  return loss;
}

// Refuses a place for the checkpoint before the training, not behind it.
void check_new(const std::string& flag, const std::filesystem::path& directory) {
  std::filesystem::path plain = directory.lexically_normal();
  if (!plain.has_filename()) plain = plain.parent_path();  // of "run/"
  const std::filesystem::path parent = plain.has_parent_path() ? plain.parent_path() : ".";
  std::error_code ignored;
  if (directory.empty()) fail(flag + ": got '', expected a directory to make");
  if (std::filesystem::symlink_status(plain, ignored).type() !=
      std::filesystem::file_type::not_found)
    fail(flag + ": '" + plain.string() + "' exists, expected a directory to make");
  if (access(parent.c_str(), W_OK | X_OK) != 0)
    fail(flag + ": '" + plain.string() + "' cannot be made in '" + parent.string() +
         "': " + strerror(errno));
}

Options parse_options(int count, char** arguments) {
  Options options;
  for (int i = 1; i < count; ++i) {
    const std::string flag = arguments[i];
    const char* value = i + 1 < count ? arguments[i + 1] : nullptr;
    if (flag == "--gpu") {
      options.gpu = true;
      continue;
    }
    if (flag == "--steps") {
      options.steps = static_cast<uint64_t>(number(flag, value, 1, 1e6));
    } else if (flag == "--save" || flag == "--load") {
      if (value == nullptr) fail(flag + ": got nothing, expected a directory");
      (flag == "--save" ? options.save : options.load) = value;
      if (flag == "--save") check_new(flag, value);
    } else {
      fail(flag + ": no such flag, expected --steps N, --gpu, --save DIR or --load DIR");
    }
    ++i;
  }
  return options;
}

void train(const Options& options) {
  Trainer trainer(options);
  if (trainer.rank() == 0) trainer.show();
  uint64_t step = options.load.empty() ? 0 : trainer.load(options.load);
  for (; step < options.steps; ++step) {
    trainer.queue_step(step);
    if ((step + 1) % 10 != 0) continue;
    const float loss = held_out_loss(trainer.params());
    if (trainer.rank() == 0)
      printf("step %3llu  loss %.6f\n", static_cast<unsigned long long>(step + 1), loss);
  }
  if (!options.save.empty()) trainer.save(options.save);
  const std::vector<uint16_t> params = trainer.params();
  const std::vector<float> masters = trainer.masters();
  if (trainer.rank() != 0) return;
  printf(
      "params %016llx  masters %016llx\n",
      static_cast<unsigned long long>(hash_bytes(kHashStart, params.data(), 2 * params.size())),
      static_cast<unsigned long long>(hash_bytes(kHashStart, masters.data(), 4 * masters.size())));
}

}  // namespace

int main(int count, char** arguments) {
  const Options options = parse_options(count, arguments);
  int provided = MPI_THREAD_SINGLE;
  MPI_Init_thread(&count, &arguments, MPI_THREAD_MULTIPLE, &provided);
  if (provided != MPI_THREAD_MULTIPLE) fail("this MPI does not give MPI_THREAD_MULTIPLE");
  train(options);
  MPI_Finalize();
  return 0;
}
