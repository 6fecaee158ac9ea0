// The parts of a save that read the caller's memory, and the parts of a load that come from several
// ranks.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "../temporary_directory.h"
#include "../thread_comm.h"
#include "trainer.h"

namespace hybridopt::fault {
namespace {

// Holds a save in its second call of progress: two blocks of 8 MiB have been written, and with one
// block of memory no third one has been read.
struct SecondBlock {
  std::atomic<int> calls = 0;
  std::atomic<bool> open = false;

  static void Hold(void* self, uint64_t, uint64_t) {
    auto& block = *static_cast<SecondBlock*>(self);
    if (++block.calls != 2) return;
    while (!block.open) std::this_thread::yield();
  }
};

// An fp32 param on the host is its own master: the save reads the first third of its file from the
// caller's memory. A step that leaves the param alone waits for that at its end, since a caller
// that has waited for a step may write params. Here two thirds of the param have been read.
TEST(CheckpointPartsTest, AStepBehindASaveWaitsForAllThatIsBorrowed) {
  const TemporaryDirectory directory;
  const std::string path = directory / "saved";
  RunOptions run;
  run.device_kind = OFFLOAD_DEVICE_HOST;
  run.counts = {1, uint64_t{6} << 20};  // the second is fp32, and has 24 MiB
  Trainer trainer(run);
  trainer.AddParams();
  trainer.Commit();
  const std::vector<unsigned char> saved_bits = trainer.Bits();
  std::vector<offload_binding_t> no_grads;
  for (uint32_t i = 0; i < trainer.size(); ++i)
    no_grads.push_back({sizeof(offload_binding_t), i, trainer.data[i], nullptr});
  EXPECT_OFFLOAD_OK(offload_optimizer_bind(trainer.optimizer, no_grads.data(), trainer.size()));

  SecondBlock second;
  auto save = Make<offload_save_options_t>();
  save.path = path.c_str();
  save.io_depth = 1;
  save.progress = SecondBlock::Hold;
  save.progress_user = &second;
  offload_ticket_t saved = 0, stepped = 0;
  EXPECT_OFFLOAD_OK(offload_optimizer_save(trainer.optimizer, &save, &saved));
  EXPECT_OFFLOAD_OK(offload_optimizer_step(trainer.optimizer, nullptr, &stepped));
  while (second.calls < 2) std::this_thread::yield();
  EXPECT_EQ(offload_optimizer_wait(trainer.optimizer, stepped, 300'000'000), OFFLOAD_TIMED_OUT);
  second.open = true;
  EXPECT_OFFLOAD_OK(WaitOrAbort(trainer.optimizer, stepped));
  std::vector<unsigned char> other(run.counts[1] * sizeof(float), 0x3c);
  EXPECT_OFFLOAD_OK(
      offload_device_upload(trainer.context, trainer.data[1], other.data(), other.size(), nullptr));
  EXPECT_OFFLOAD_OK(WaitOrAbort(trainer.optimizer, saved));

  auto load = Make<offload_load_options_t>();
  load.path = path.c_str();
  EXPECT_OFFLOAD_OK(offload_optimizer_load(trainer.optimizer, &load, nullptr));
  EXPECT_OFFLOAD_OK(WaitOrAbort(trainer.optimizer, 0));
  EXPECT_TRUE(trainer.Bits() == saved_bits);
}

constexpr int64_t kHalf = 100;

// One half of a param on each of two ranks, or the whole of it on one.
class Part {
 public:
  Part(const offload_comm_t* comm, int64_t begin, int64_t count)
      : trainer_([&] {
          RunOptions run;
          run.device_kind = OFFLOAD_DEVICE_HOST;
          run.counts = {};
          run.comm = comm;
          return run;
        }()),
        values_(static_cast<size_t>(count), 1.0f) {
    const int64_t shape = 2 * kHalf;
    auto shard = Make<offload_shard_t>();
    shard.dimensions = 1;
    shard.box_count = 1;
    shard.global_shape = &shape;
    shard.box_offsets = &begin;
    shard.box_extents = &count;
    auto param = Make<offload_param_t>();
    param.name = "weight";
    param.dtype = param.grad_dtype = OFFLOAD_FP32;
    param.data = values_.data();
    param.count = static_cast<uint64_t>(count);
    param.shard = &shard;
    EXPECT_OFFLOAD_OK(offload_optimizer_add_params(trainer_.optimizer, &param, 1, nullptr));
    trainer_.Commit();
  }
  void SetCount(uint64_t count) {
    EXPECT_OFFLOAD_OK(offload_optimizer_set_step_count(trainer_.optimizer, 0, count));
  }
  void QueueSave(const std::string& path) {
    auto options = Make<offload_save_options_t>();
    options.path = path.c_str();
    EXPECT_OFFLOAD_OK(offload_optimizer_save(trainer_.optimizer, &options, nullptr));
  }
  int32_t Load(const std::string& path) {
    auto options = Make<offload_load_options_t>();
    options.path = path.c_str();
    EXPECT_OFFLOAD_OK(offload_optimizer_load(trainer_.optimizer, &options, nullptr));
    return Wait();
  }
  int32_t Wait() { return WaitOrAbort(trainer_.optimizer, 0); }

 private:
  Trainer trainer_;
  std::vector<float> values_;
};

// Bias corrections depend on a param's step count, and each shard has a count.
TEST(CheckpointPartsTest, PartsThatWereSteppedDifferentlyMakeNoWhole) {
  for (const uint64_t count : {7, 8}) {
    const TemporaryDirectory directory;
    ThreadComm comm(2);
    const offload_comm_t tables[] = {comm.Table(0), comm.Table(1)};
    Part first(&tables[0], 0, kHalf), second(&tables[1], kHalf, kHalf);
    first.SetCount(7);
    second.SetCount(count);
    first.QueueSave(directory / "saved");
    second.QueueSave(directory / "saved");
    EXPECT_OFFLOAD_OK(first.Wait());
    EXPECT_OFFLOAD_OK(second.Wait());
    Part whole(nullptr, 0, 2 * kHalf);
    if (count == 7) {
      EXPECT_OFFLOAD_OK(whole.Load(directory / "saved"));
    } else {
      ExpectError(whole.Load(directory / "saved"), OFFLOAD_CHECKPOINT_MISMATCH,
                  {"param 'weight' was stepped 7 times on rank 0 and 8 times on rank 1",
                   "this shard has parts of both"});
    }
  }
}

TEST(CheckpointPartsTest, ElementsThatNobodyHasSavedAreMissed) {
  const TemporaryDirectory directory;
  Part half(nullptr, 0, kHalf);
  half.QueueSave(directory / "saved");
  EXPECT_OFFLOAD_OK(half.Wait());
  Part whole(nullptr, 0, 2 * kHalf), other(nullptr, kHalf, kHalf);
  for (Part* part : {&whole, &other})
    ExpectError(
        part->Load(directory / "saved"), OFFLOAD_CHECKPOINT_MISMATCH,
        {"param 'weight' ", "element (100) of the tensor is in none of the 1 stored shards"});
  EXPECT_OFFLOAD_OK(half.Load(directory / "saved"));
}

}  // namespace
}  // namespace hybridopt::fault
