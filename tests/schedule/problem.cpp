#include "problem.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <thread>
#include <utility>

#include "../thread_comm.h"
#include "scheduler.h"

namespace hybridopt::schedule {
namespace {

void Must(int32_t status) {
  if (status == OFFLOAD_OK) return;
  std::fprintf(stderr, "what is expected cannot be found: %s\n", offload_last_error());
  std::exit(1);
}

// On the host device, where device addresses are host addresses.
Bytes Read(const void* data, uint64_t bytes) {
  const auto* begin = static_cast<const unsigned char*>(data);
  return {begin, begin + bytes};
}

// One rank, step by step.
void Train(uint32_t variant, uint32_t rank, const offload_comm_t* comm,
           std::vector<Expected>* expected) {
  offload_context_t context = nullptr;
  auto context_options = Make<offload_context_options_t>();
  context_options.threads = 1;
  Must(offload_context_create(&context_options, &context));
  offload_optimizer_t optimizer = nullptr;
  offload_optimizer_options_t options = OptimizerOptions(variant);
  options.comm = comm;
  Must(offload_optimizer_create(context, &options, &optimizer));
  const offload_group_t group = Group();
  uint32_t group_id = 0;
  Must(offload_optimizer_add_group(optimizer, &group, &group_id));
  Bytes data[kParams], grads[kParams];
  for (uint32_t id = 0; id < kParams; ++id) {
    data[id] = InitialData(rank, id);
    grads[id] = Gradient(rank, id, 0);
    const std::string name = "r" + std::to_string(rank) + "p" + std::to_string(id);
    auto param = Make<offload_param_t>();
    param.dtype = DtypeOf(id);
    param.grad_dtype = GradDtypeOf(id);
    param.name = name.c_str();
    param.data = data[id].data();
    param.grad = grads[id].data();
    param.count = kCounts[id];
    Must(offload_optimizer_add_params(optimizer, &param, 1, nullptr));
  }
  Must(offload_optimizer_commit(optimizer, nullptr));
  for (uint64_t steps = 0;; ++steps) {
    Expected& now = expected->emplace_back();
    for (uint32_t id = 0; id < kParams; ++id) {
      now.data[id] = data[id];
      now.states[id] = StatesOf(optimizer, id, Read);
    }
    if (steps == kStepsMax) break;
    for (uint32_t id = 0; id < kParams; ++id) {
      const Bytes gradient = Gradient(rank, id, steps);
      std::memcpy(grads[id].data(), gradient.data(), gradient.size());
    }
    auto step = Make<offload_step_options_t>();
    step.grad_norm_max = NormMax(variant);
    Must(offload_optimizer_step(optimizer, &step, nullptr));
    Must(offload_optimizer_wait(optimizer, 0, -1));
  }
  Must(offload_optimizer_destroy(optimizer));
  Must(offload_context_destroy(context));
}

// Under the scheduler too, so that the process is in the same state afterwards, every time.
using World = std::vector<std::vector<Expected>>;  // by rank, by steps

World TrainWorld(uint32_t variant, uint32_t world) {
  World ranks(world);
  ThreadComm comm(static_cast<int32_t>(world));
  std::vector<std::thread> threads;
  for (uint32_t rank = 0; rank < world; ++rank)
    threads.emplace_back([&, rank] {
      const offload_comm_t table = comm.Table(static_cast<int32_t>(rank));
      Train(variant, rank, world > 1 ? &table : nullptr, &ranks[rank]);
    });
  for (std::thread& thread : threads) thread.join();
  return ranks;
}

}  // namespace

const Expected& ExpectedAfter(uint32_t variant, uint32_t world, uint32_t rank, uint64_t steps) {
  static const std::map<std::pair<uint32_t, uint32_t>, World> all = [] {
    std::map<std::pair<uint32_t, uint32_t>, World> found;
    for (uint32_t v = 0; v < kVariants; ++v)
      for (uint32_t w = 1; w <= kWorldMax; ++w)
        RunSchedule(0, [&] { found[{v, w}] = TrainWorld(v, w); });
    return found;
  }();
  return all.at({variant, world})[rank][steps];
}

}  // namespace hybridopt::schedule
