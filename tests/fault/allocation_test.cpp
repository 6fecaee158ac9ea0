// After commit nothing is allocated: every allocation of every thread of this program is counted
// while steps are bound, queued, run, waited for and asked about.
#include <gtest/gtest.h>

#include <atomic>
#include <cmath>

#include "../malloc_hooks.h"
#include "../temporary_directory.h"
#include "trainer.h"

namespace {

std::atomic<bool> counting = false;
std::atomic<uint64_t> allocations = 0;

}  // namespace

bool malloc_hooks::Fails() { return false; }
void malloc_hooks::Allocated(void*) {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1);
}
void malloc_hooks::Freeing(void*) {}

namespace hybridopt::fault {
namespace {

constexpr uint32_t kSteps = 20;

struct Case {
  int32_t device_kind;
  double device_fraction;
  int32_t algorithm;
  double disk_fraction = 0;
};

// All calls of a training loop, without allocations of its own.
class Loop {
 public:
  explicit Loop(Trainer& trainer) : trainer_(trainer), bindings_(trainer.size()) {
    for (uint32_t i = 0; i < trainer.size(); ++i) {
      bindings_[i] = Make<offload_binding_t>();
      bindings_[i].param = i;
      bindings_[i].grad = trainer.grads[i];
    }
  }

  void Step(bool clip) {
    auto options = Make<offload_step_options_t>();
    options.grad_norm_max = clip ? 0.5 : 0;
    options.flags = clip ? 0 : OFFLOAD_STEP_ASSUME_FINITE;
    auto result = Make<offload_step_result_t>();
    auto stats = Make<offload_stats_t>();
    auto view = Make<offload_state_view_t>();
    const uint32_t param = 1;
    offload_ticket_t ticket = 0;
    failed_ |= offload_optimizer_bind(trainer_.optimizer, bindings_.data(), trainer_.size());
    failed_ |= offload_optimizer_set_group(trainer_.optimizer, 0, &trainer_.group);
    failed_ |= offload_optimizer_step(trainer_.optimizer, &options, &ticket);
    failed_ |= offload_optimizer_stream_wait(trainer_.optimizer, ticket, nullptr, &param, 1);
    failed_ |= offload_optimizer_step(trainer_.optimizer, nullptr, nullptr);  // one behind another
    failed_ |= offload_optimizer_wait(trainer_.optimizer, 0, -1);
    failed_ |= offload_optimizer_step_result(trainer_.optimizer, ticket, &result);
    failed_ |= offload_optimizer_get_stats(trainer_.optimizer, &stats);
    failed_ |= offload_optimizer_state(trainer_.optimizer, 0, OFFLOAD_STATE_MASTER, &view);
    skipped_ = result.skipped;
  }

  int32_t failed() const { return failed_; }
  bool skipped() const { return skipped_ != 0; }

 private:
  Trainer& trainer_;
  std::vector<offload_binding_t> bindings_;
  int32_t failed_ = OFFLOAD_OK;
  int32_t skipped_ = 0;
};

void CountAllocationsOfSteps(const Case& one) {
  RunOptions run;
  run.device_kind = one.device_kind;
  run.device_fraction = one.device_fraction;
  run.algorithm = one.algorithm;
  run.counts = {3000, 1, 2500, 0, 64, 5000};
  const TemporaryDirectory directory;
  run.disk_fraction = one.disk_fraction;
  if (run.disk_fraction > 0) run.disk_paths = directory.path().c_str();
  Trainer trainer(run);
  trainer.AddParams();
  trainer.Commit();
  trainer.UploadGrads(0);
  Loop loop(trainer);
  loop.Step(true);  // threads start with the first work
  for (const bool finite : {true, false}) {
    if (!finite) {
      const float infinity = INFINITY;
      ASSERT_OFFLOAD_OK(
          offload_device_upload(trainer.context, trainer.grads[2], &infinity, 4, nullptr));
    }
    allocations = 0;
    counting = true;
    for (uint32_t step = 0; step < kSteps; ++step) loop.Step(finite && step % 2 == 0);
    counting = false;
    EXPECT_EQ(allocations, 0u) << (finite ? "finite" : "skipped") << " steps";
  }
  EXPECT_EQ(loop.failed(), OFFLOAD_OK);
}

TEST(Allocation, IsSeenByTheCounter) {
  if (!HYBRIDOPT_SEES_MALLOC) GTEST_SKIP() << "the sanitizer's allocator is in force";
  allocations = 0;
  counting = true;
  std::vector<int> vector(100);
  void* volatile data = std::malloc(1);
  counting = false;
  std::free(data);
  EXPECT_EQ(vector.size(), 100u);
  EXPECT_EQ(allocations, 2u);
}

TEST(Allocation, DoesNotHappenInSteps) {
  if (!HYBRIDOPT_SEES_MALLOC) GTEST_SKIP() << "the sanitizer's allocator is in force";
  for (const int32_t algorithm :
       {OFFLOAD_ADAMW, OFFLOAD_SGD, OFFLOAD_LION, OFFLOAD_ADAGRAD, OFFLOAD_SIGNUM})
    for (const Case& one :
         {Case{OFFLOAD_DEVICE_HOST, 0, algorithm}, Case{OFFLOAD_DEVICE_SIM, 0, algorithm},
          Case{OFFLOAD_DEVICE_SIM, 0.4, algorithm}, Case{OFFLOAD_DEVICE_SIM, 1, algorithm}}) {
      SCOPED_TRACE("device " + std::to_string(one.device_kind) + ", fraction " +
                   std::to_string(one.device_fraction) + ", algorithm " +
                   std::to_string(algorithm));
      CountAllocationsOfSteps(one);
    }
}

TEST(Allocation, DoesNotHappenInStepsWithStateOnDisk) {
  if (!HYBRIDOPT_SEES_MALLOC) GTEST_SKIP() << "the sanitizer's allocator is in force";
  for (const int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    SCOPED_TRACE("device " + std::to_string(device_kind));
    CountAllocationsOfSteps({device_kind, 0.2, OFFLOAD_ADAMW, 0.6});
  }
}

// All calls of a stash in a training loop, including pushes for which there is no room.
void UseStash(offload_context_t context, offload_stash_t stash, char* data, int32_t* failed) {
  constexpr uint64_t kBytes = 9000;
  offload_stash_ticket_t tickets[4] = {};
  offload_stash_mark_t mark = 0;
  auto stats = Make<offload_stash_stats_t>();
  for (offload_stash_ticket_t& ticket : tickets) {
    *failed |= offload_stash_push(stash, 1, data, kBytes, nullptr, &ticket);
    if (ticket != 0) *failed |= offload_stash_release(stash, ticket, nullptr);
    if (&ticket == tickets) *failed |= offload_stash_mark(stash, 1, &mark);
  }
  *failed |= offload_stash_prefetch(stash, tickets[0], data, kBytes, nullptr);
  *failed |= offload_stash_pop(stash, tickets[0], nullptr, OFFLOAD_STASH_KEEP);
  *failed |= offload_stash_drop(stash, tickets[1], nullptr);
  *failed |= offload_stash_rollback(stash, mark, nullptr);
  *failed |= offload_stash_prefetch(stash, tickets[0], data, kBytes, nullptr);
  *failed |= offload_stash_pop(stash, tickets[0], nullptr, 0);
  *failed |= offload_stash_wait(stash, 0, -1);
  *failed |= offload_stash_get_stats(stash, &stats);
  *failed |= offload_stream_synchronize(context, nullptr, -1);
}

TEST(Allocation, DoesNotHappenInAStash) {
  if (!HYBRIDOPT_SEES_MALLOC) GTEST_SKIP() << "the sanitizer's allocator is in force";
  for (const int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    RunOptions run;
    run.device_kind = device_kind;
    run.counts = {5000};
    Trainer trainer(run);
    auto options = Make<offload_stash_options_t>();
    options.budget_bytes = 9 * 4096;  // of three pushes
    options.slab_bytes = 4096;
    options.min_bytes = 1;
    options.lanes = 2;
    offload_stash_t stash = nullptr;
    ASSERT_OFFLOAD_OK(offload_stash_create(trainer.context, &options, &stash));
    int32_t failed = OFFLOAD_OK;
    auto* const data = static_cast<char*>(trainer.data[0]);
    UseStash(trainer.context, stash, data, &failed);  // starts the thread of the caller's stream
    allocations = 0;
    counting = true;
    for (int i = 0; i < 20; ++i) UseStash(trainer.context, stash, data, &failed);
    counting = false;
    EXPECT_EQ(allocations, 0u) << "device " << device_kind;
    EXPECT_EQ(failed, OFFLOAD_OK) << offload_last_error();
    auto stats = Make<offload_stash_stats_t>();
    ASSERT_OFFLOAD_OK(offload_stash_get_stats(stash, &stats));
    EXPECT_EQ(stats.refused_pushes, 21u);
    EXPECT_EQ(stats.tickets, 0u);
    ASSERT_OFFLOAD_OK(offload_stash_destroy(stash));
  }
}

// The table of rank 0 of two ranks, of which the other one tells the same as this one, and takes
// every message.
offload_comm_t CommOfTwins() {
  auto comm = Make<offload_comm_t>();
  comm.world = 2;
  comm.sum = [](void*, double*, uint32_t, int64_t) -> int32_t { return OFFLOAD_OK; };
  comm.max = [](void*, int32_t* values, uint32_t count, int64_t) -> int32_t {
    if (count > 2) std::copy_n(values, count / 2, values + count / 2);
    return OFFLOAD_OK;
  };
  comm.barrier = [](void*, int64_t) -> int32_t { return OFFLOAD_OK; };
  comm.exchange = [](void*, const offload_message_t*, uint32_t, offload_stream_t,
                     int64_t) -> int32_t { return OFFLOAD_OK; };
  comm.exchange_on_host = 1;
  return comm;
}

TEST(Allocation, DoesNotHappenInAnExchange) {
  if (!HYBRIDOPT_SEES_MALLOC) GTEST_SKIP() << "the sanitizer's allocator is in force";
  for (const int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM}) {
    RunOptions run;
    run.device_kind = device_kind;
    run.counts = {5000};
    Trainer trainer(run);
    const offload_comm_t comm = CommOfTwins();
    const int64_t shape[] = {50, 100}, offsets[] = {0, 0, 0, 40};
    const int64_t extents[] = {50, 40, 50, 60};
    auto shard = Make<offload_shard_t>();
    shard.dimensions = 2;
    shard.box_count = 2;
    shard.global_shape = shape;
    shard.box_offsets = offsets;
    shard.box_extents = extents;
    auto matrix = Make<offload_exchange_matrix_t>();
    matrix.dtype = matrix.grad_dtype = OFFLOAD_FP32;
    matrix.name = "weight";
    matrix.shard = &shard;
    auto options = Make<offload_exchange_options_t>();
    options.matrix_count = 1;
    options.matrices = &matrix;
    options.comm = &comm;
    offload_exchange_t exchange = nullptr;
    ASSERT_OFFLOAD_OK(offload_exchange_create(trainer.context, &options, &exchange));
    void *part = nullptr, *whole = nullptr;
    EXPECT_OFFLOAD_OK(offload_device_alloc(trainer.context, 20'000, &part));
    EXPECT_OFFLOAD_OK(offload_device_alloc(trainer.context, 20'000, &whole));
    int32_t failed = OFFLOAD_OK;
    allocations = 0;
    for (int round = 0; round < 3; ++round) {
      counting = round > 0;
      failed |= offload_exchange_gather(exchange, 0, OFFLOAD_FP32, part, whole, nullptr);
      failed |= offload_exchange_scatter(exchange, 0, OFFLOAD_FP32, whole, part, nullptr);
    }
    counting = false;
    EXPECT_EQ(failed, OFFLOAD_OK) << offload_last_error();
    EXPECT_EQ(allocations, 0u) << "device " << device_kind;
    EXPECT_OFFLOAD_OK(offload_exchange_destroy(exchange));
  }
}

}  // namespace
}  // namespace hybridopt::fault
