// After commit nothing is allocated: every allocation of every thread of this program is counted
// while steps are bound, queued, run, waited for and asked about.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <cmath>

#include "trainer.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define HYBRIDOPT_COUNTS 0  // a sanitizer has an allocator of its own
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define HYBRIDOPT_COUNTS 0
#endif
#endif
#ifndef HYBRIDOPT_COUNTS
#define HYBRIDOPT_COUNTS 1
#endif

namespace {

std::atomic<bool> counting = false;
std::atomic<uint64_t> allocations = 0;

[[maybe_unused]] void Count() {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1);
}

}  // namespace

// glibc lets a program bring these; operator new of libstdc++ ends in malloc.
#if HYBRIDOPT_COUNTS
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* data, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

void* malloc(size_t bytes) {
  Count();
  return __libc_malloc(bytes);
}
void* calloc(size_t count, size_t bytes) {
  Count();
  return __libc_calloc(count, bytes);
}
void* realloc(void* data, size_t bytes) {
  Count();
  return __libc_realloc(data, bytes);
}
void* aligned_alloc(size_t alignment, size_t bytes) {
  Count();
  return __libc_memalign(alignment, bytes);
}
void* memalign(size_t alignment, size_t bytes) {
  Count();
  return __libc_memalign(alignment, bytes);
}
int posix_memalign(void** data, size_t alignment, size_t bytes) {
  Count();
  *data = __libc_memalign(alignment, bytes);
  return *data != nullptr ? 0 : ENOMEM;
}
}
#endif

namespace hybridopt::fault {
namespace {

constexpr uint32_t kSteps = 20;

struct Case {
  int32_t device_kind;
  double device_fraction;
  int32_t algorithm;
};

// All that a training loop calls, allocating nothing itself.
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
  if (!HYBRIDOPT_COUNTS) GTEST_SKIP() << "the sanitizer's allocator is in force";
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
  if (!HYBRIDOPT_COUNTS) GTEST_SKIP() << "the sanitizer's allocator is in force";
  for (const int32_t algorithm : {OFFLOAD_ADAMW, OFFLOAD_SGD, OFFLOAD_LION, OFFLOAD_ADAGRAD})
    for (const Case& one :
         {Case{OFFLOAD_DEVICE_HOST, 0, algorithm}, Case{OFFLOAD_DEVICE_SIM, 0, algorithm},
          Case{OFFLOAD_DEVICE_SIM, 0.4, algorithm}, Case{OFFLOAD_DEVICE_SIM, 1, algorithm}}) {
      SCOPED_TRACE("device " + std::to_string(one.device_kind) + ", fraction " +
                   std::to_string(one.device_fraction) + ", algorithm " +
                   std::to_string(algorithm));
      CountAllocationsOfSteps(one);
    }
}

}  // namespace
}  // namespace hybridopt::fault
