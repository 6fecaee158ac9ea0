// Runs the example of docs/RANKS.md on one rank and on two ranks that are threads: the params have
// the same bits.
#include "exchange_example.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "../thread_comm.h"

namespace {

constexpr int64_t kRows = 10, kCols = 6;
constexpr int kSteps = 3;

using Params = std::vector<uint16_t>;

thread_local int64_t first_row = 0, row_count = 0;  // of this rank

// The bf16 param of a rank's rows after the steps.
void TrainRank(const offload_comm_t& parts, const offload_comm_t& steps, int64_t begin, int64_t end,
               Params& params) {
  first_row = begin;
  row_count = end - begin;
  offload_context_options_t options{};
  options.struct_size = sizeof(options);
  options.threads = 1;
  offload_context_t context = nullptr;
  check(offload_context_create(&options, &context));
  const int64_t shape[] = {kRows, kCols}, offsets[] = {begin, 0}, extents[] = {end - begin, kCols};
  offload_shard_t shard{};
  shard.struct_size = sizeof(shard);
  shard.dimensions = 2;
  shard.box_count = 1;
  shard.global_shape = shape;
  shard.box_offsets = offsets;
  shard.box_extents = extents;
  std::vector<float> grad(params.size());
  train(context, &parts, &steps, &shard, params.data(), grad.data(), kSteps);
  check(offload_context_destroy(context));
}

Params TrainWorld(int32_t world) {
  hybridopt::ThreadComm parts(world), steps(world);
  std::vector<Params> of_rank(static_cast<size_t>(world));
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < world; ++rank) {
    const int64_t begin = kRows * rank / world, end = kRows * (rank + 1) / world;
    Params& params = of_rank[static_cast<size_t>(rank)];
    for (int64_t i = begin * kCols; i < end * kCols; ++i)
      params.push_back(static_cast<uint16_t>(0x3f80 + i % 19));
    threads.emplace_back([&, rank, begin, end] {
      TrainRank(parts.Table(rank), steps.Table(rank), begin, end, params);
    });
  }
  for (std::thread& thread : threads) thread.join();
  Params all;
  for (const Params& each : of_rank) all.insert(all.end(), each.begin(), each.end());
  return all;
}

}  // namespace

void check(int32_t status) {
  if (status == OFFLOAD_OK) return;
  std::fprintf(stderr, "FAILED: %s: %s\n", offload_status_name(status), offload_last_error());
  std::exit(1);
}

void backward(int step, const void*, void* grad) {
  for (int64_t i = 0; i < row_count * kCols; ++i)
    static_cast<float*>(grad)[i] =
        static_cast<float>(((first_row * kCols + i) * 37 + step * 11) % 23 - 11);
}

offload_optimizer_t make_optimizer(offload_context_t context, const offload_comm_t* steps,
                                   const offload_shard_t* rows, void* whole,
                                   const void* whole_grad) {
  offload_optimizer_options_t options{};
  options.struct_size = sizeof(options);
  options.algorithm = OFFLOAD_MUON;
  options.comm = steps;
  offload_optimizer_t optimizer = nullptr;
  check(offload_optimizer_create(context, &options, &optimizer));
  offload_group_t group{};
  group.struct_size = sizeof(group);
  group.lr = 0.02;
  group.momentum = 0.95;
  group.eps = 1e-7;
  offload_param_t param{};
  param.struct_size = sizeof(param);
  param.dtype = OFFLOAD_BF16;
  param.grad_dtype = OFFLOAD_FP32;
  param.name = "up";
  param.data = whole;
  param.grad = whole_grad;
  param.count = static_cast<uint64_t>(rows->box_extents[0] * rows->box_extents[1]);
  param.shard = rows;
  check(offload_optimizer_add_group(optimizer, &group, &param.group));
  check(offload_optimizer_add_params(optimizer, &param, 1, nullptr));
  check(offload_optimizer_commit(optimizer, nullptr));
  return optimizer;
}

int main() {
  const Params whole = TrainWorld(1), cut = TrainWorld(2);
  if (whole.size() != kRows * kCols || whole[0] == 0x3f80 || cut != whole) {
    std::printf("FAILED: two ranks have other params than one\n");
    return 1;
  }
  std::printf("one rank and two ranks: the same params\n");
}
