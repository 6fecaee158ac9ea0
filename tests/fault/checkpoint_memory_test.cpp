// The memory of a save or load beside the model: its blocks and less than 1 MiB, for a model of any
// size. Every allocation and every mapping of this program is counted while a save or load runs.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "../malloc_hooks.h"
#include "../temporary_directory.h"
#include "trainer.h"

namespace {

// The allocated bytes, and their maximum since the count began.
std::atomic<int64_t> held = 0;
std::atomic<int64_t> most = 0;

void Look(int64_t now) {
  for (int64_t before = most; now > before && !most.compare_exchange_weak(before, now);) {
  }
}

void Add(int64_t bytes) { Look(held.fetch_add(bytes) + bytes); }

}  // namespace

bool malloc_hooks::Fails() { return false; }
void malloc_hooks::Allocated(void* data) {
  if (data != nullptr) Add(static_cast<int64_t>(malloc_usable_size(data)));
}
void malloc_hooks::Freeing(void* data) { Add(-static_cast<int64_t>(malloc_usable_size(data))); }

#if HYBRIDOPT_SEES_MALLOC
extern "C" {
// The ends of a mapping for huge pages are unmapped before a thread touches them; then the library
// tells the system which pages it wants. That is the moment to look.
void* mmap(void* address, size_t bytes, int protection, int flags, int file, off_t offset) {
  const long mapped = syscall(SYS_mmap, address, bytes, protection, flags, file, offset);
  if (mapped != -1) held += static_cast<int64_t>(bytes);
  return reinterpret_cast<void*>(mapped);
}
int munmap(void* address, size_t bytes) {
  const int error = static_cast<int>(syscall(SYS_munmap, address, bytes));
  if (error == 0) held -= static_cast<int64_t>(bytes);
  return error;
}
int madvise(void* address, size_t bytes, int advice) {
  Look(held);
  return static_cast<int>(syscall(SYS_madvise, address, bytes, advice));
}
}
#endif

namespace hybridopt::fault {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;
constexpr uint32_t kDepth = 2;  // blocks of 8 MiB

struct Layout {
  int32_t master_layout = OFFLOAD_MASTER_FP32;
  int32_t moment_dtype = OFFLOAD_FP32;
};

struct Case {
  const char* name;
  int32_t device_kind;
  double device_fraction;
  Layout saved, loaded;
};

// A model of two bf16 params without training, because the values of the state make no difference.
class Model {
 public:
  Model(const Case& one, const Layout& layout, uint64_t elements) {
    auto context_options = Make<offload_context_options_t>();
    context_options.device_kind = one.device_kind;
    context_options.threads = 2;
    context_options.log = DropLog;
    if (one.device_kind == OFFLOAD_DEVICE_SIM) context_options.sim_memory_bytes = 32 * elements;
    EXPECT_OFFLOAD_OK(offload_context_create(&context_options, &context_));
    auto options = Make<offload_optimizer_options_t>();
    options.algorithm = OFFLOAD_ADAMW;
    options.device_fraction = one.device_fraction;
    options.master_layout = layout.master_layout;
    options.moment_dtype = layout.moment_dtype;
    EXPECT_OFFLOAD_OK(offload_optimizer_create(context_, &options, &optimizer_));
    auto group = Make<offload_group_t>();
    group.lr = 0.01;
    group.beta1 = 0.9;
    group.beta2 = 0.999;
    group.eps = 1e-8;
    uint32_t id = 0;
    EXPECT_OFFLOAD_OK(offload_optimizer_add_group(optimizer_, &group, &id));
    for (const char* name : {"a", "b"}) {
      auto param = Make<offload_param_t>();
      param.dtype = OFFLOAD_BF16;
      param.grad_dtype = OFFLOAD_BF16;
      param.name = name;
      param.count = elements / 2;
      EXPECT_OFFLOAD_OK(offload_device_alloc(context_, elements, &param.data));
      data_.push_back(param.data);
      EXPECT_OFFLOAD_OK(offload_optimizer_add_params(optimizer_, &param, 1, nullptr));
    }
    EXPECT_OFFLOAD_OK(offload_optimizer_commit(optimizer_, nullptr));
  }
  ~Model() {
    EXPECT_OFFLOAD_OK(offload_optimizer_destroy(optimizer_));
    for (void* data : data_) EXPECT_OFFLOAD_OK(offload_device_free(context_, data));
    EXPECT_OFFLOAD_OK(offload_context_destroy(context_));
  }

  void Save(const std::string& path) {
    auto options = Make<offload_save_options_t>();
    options.path = path.c_str();
    options.io_depth = kDepth;
    EXPECT_OFFLOAD_OK(offload_optimizer_save(optimizer_, &options, nullptr));
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(optimizer_, 0, -1));
  }
  void Load(const std::string& path) {
    auto options = Make<offload_load_options_t>();
    options.path = path.c_str();
    options.io_depth = kDepth;
    EXPECT_OFFLOAD_OK(offload_optimizer_load(optimizer_, &options, nullptr));
    EXPECT_OFFLOAD_OK(offload_optimizer_wait(optimizer_, 0, -1));
  }

 private:
  offload_context_t context_ = nullptr;
  offload_optimizer_t optimizer_ = nullptr;
  std::vector<void*> data_;
};

// The most memory that `work` holds at one time in addition to the memory held before.
template <typename Work>
int64_t ExtraBytes(Work&& work) {
  const int64_t before = held;
  most = before;
  work();
  return most - before;
}

TEST(CheckpointMemory, IsSeenByTheCounter) {
  if (!HYBRIDOPT_SEES_MALLOC) GTEST_SKIP() << "the sanitizer's allocator is in force";
  EXPECT_GE(ExtraBytes([] { std::vector<char> vector(3 << 20); }), 3 * kMiB);
  EXPECT_LT(ExtraBytes([] { std::vector<char> vector(3 << 10); }), kMiB);
  const int64_t mapped = ExtraBytes([] {
    void* const data =
        mmap(nullptr, 5 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_EQ(madvise(data, 5 << 20, MADV_NOHUGEPAGE), 0);
    EXPECT_EQ(munmap(data, 5 << 20), 0);
  });
  EXPECT_EQ(mapped, 5 * kMiB);
}

TEST(CheckpointMemory, OfASaveOrLoadIsItsBlocksAndLessThanOneMiBForAnyModel) {
  if (!HYBRIDOPT_SEES_MALLOC) GTEST_SKIP() << "the sanitizer's allocator is in force";
  const Layout full, split{OFFLOAD_MASTER_SPLIT, OFFLOAD_FP32},
      split24{OFFLOAD_MASTER_SPLIT24, OFFLOAD_FP32}, narrow{OFFLOAD_MASTER_FP32, OFFLOAD_BF16};
  const Case cases[] = {{"host", OFFLOAD_DEVICE_HOST, 0, full, full},
                        {"host, into split masters", OFFLOAD_DEVICE_HOST, 0, full, split},
                        {"host, from split masters", OFFLOAD_DEVICE_HOST, 0, split, full},
                        {"host, into bf16 moments", OFFLOAD_DEVICE_HOST, 0, full, narrow},
                        {"host, from bf16 moments", OFFLOAD_DEVICE_HOST, 0, narrow, full},
                        {"half on a device", OFFLOAD_DEVICE_SIM, 0.5, full, full},
                        {"a device, into split masters", OFFLOAD_DEVICE_SIM, 1, full, split},
                        {"a device, of 24-bit masters", OFFLOAD_DEVICE_SIM, 1, split24, split24}};
  constexpr int64_t kBound = kDepth * 8 * kMiB + kMiB;
  for (const Case& one : cases) {
    for (const uint64_t elements : {uint64_t{3} << 20, uint64_t{9} << 20}) {  // 36 and 108 MiB
      SCOPED_TRACE(std::string(one.name) + ", " + std::to_string(elements) + " elements");
      const TemporaryDirectory directory;
      const std::string path = directory / "saved";
      {
        Model model(one, one.saved, elements);
        EXPECT_LT(ExtraBytes([&] { model.Save(path); }), kBound) << "of the save";
      }
      Model model(one, one.loaded, elements);
      EXPECT_LT(ExtraBytes([&] { model.Load(path); }), kBound) << "of the load";
    }
  }
}

}  // namespace
}  // namespace hybridopt::fault
