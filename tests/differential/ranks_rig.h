// All ranks of a sharded model in one process, with a comm table of threads.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../thread_comm.h"
#include "sharded.h"

namespace hybridopt {

// Bounds for ranks that would wait for each other for ever. If one rank does not come, its comm
// timeout ends the test; if ranks meet again and again without end, a wait aborts.
constexpr uint64_t kRankTimeoutNs = 20'000'000'000;
constexpr int64_t kHangNs = 60'000'000'000;

struct RanksSetting {
  ContextSetting context;
  OptimizerSetting optimizer;
};

// Each rank steps on its optimizer's own thread, so that queueing on one after the other makes them
// run together.
class Ranks {
 public:
  Ranks(const Sharded& sharded, const RanksSetting& setting, uint32_t movable = 0,
        uint64_t comm_timeout_ns = kRankTimeoutNs)
      : comm_(static_cast<int32_t>(sharded.world())) {
    for (uint32_t rank = 0; rank < sharded.world(); ++rank) {
      RanksSetting own = setting;
      own.context.seed = rank;
      own.optimizer.save_buffer_bytes /= rank + 1;
      ranks_.push_back(
          std::make_unique<ShardedRank>(sharded, rank, comm_.Table(static_cast<int32_t>(rank)),
                                        own.context, own.optimizer, movable, comm_timeout_ns));
    }
  }

  ThreadComm& comm() { return comm_; }
  uint32_t world() const { return static_cast<uint32_t>(ranks_.size()); }
  ShardedRank& operator[](uint32_t rank) { return *ranks_[rank]; }
  offload_optimizer_t handle(uint32_t rank) { return ranks_[rank]->rig().handle(); }

  void Queue(size_t step) {
    for (auto& rank : ranks_) rank->Queue(step);
  }
  void Wait() {
    for (uint32_t rank = 0; rank < world(); ++rank)
      MUST(offload_optimizer_wait(handle(rank), 0, kHangNs));
  }
  void Step(size_t step) {
    Queue(step);
    Wait();
  }
  offload_step_result_t Result(uint32_t rank) {
    auto result = Make<offload_step_result_t>();
    MUST(offload_optimizer_step_result(handle(rank), 0, &result));
    return result;
  }
  // The difference of the first rank whose bits are not those of the whole model; empty if there is
  // none.
  std::string Difference(size_t steps) {
    std::string difference;
    for (auto& rank : ranks_)
      if (difference.empty()) difference = rank->Difference(steps);
    return difference;
  }

 private:
  ThreadComm comm_;
  std::vector<std::unique_ptr<ShardedRank>> ranks_;
};

}  // namespace hybridopt
