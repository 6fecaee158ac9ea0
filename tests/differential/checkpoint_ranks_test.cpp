// Several ranks save one checkpoint, and any number of ranks with any sharding load it: the bits
// are those of the whole model, trained by one rank without an interruption.
#include <gtest/gtest.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "../held_files.h"
#include "../temporary_directory.h"
#include "base/system.h"
#include "machine/context.h"
#include "optimizer/handle_table.h"
#include "ranks_rig.h"

namespace hybridopt {
namespace {

constexpr size_t kSteps = 4;

RanksSetting RandomSetting(Random& random) {
  RanksSetting setting;
  setting.context.device_kind = random.OneIn(3) ? OFFLOAD_DEVICE_HOST : AcceleratorUnderTest();
  setting.context.threads = 1;
  setting.context.delay_ns_max =
      setting.context.device_kind != OFFLOAD_DEVICE_HOST && random.OneIn(2) ? 20'000 : 0;
  constexpr double kFractions[] = {0, 0.3, 1};
  setting.optimizer = {kFractions[random.Below(3)], 1024, 2};
  if (random.OneIn(2)) setting.optimizer.save_buffer_bytes = random.Below(uint64_t{256} << 10);
  return setting;
}

// Ranks that save and load together.
class SavingRanks : public Ranks {
 public:
  SavingRanks(const Sharded& sharded, const RanksSetting& setting,
              uint64_t comm_timeout_ns = kRankTimeoutNs)
      : Ranks(sharded, setting, 0, comm_timeout_ns) {}

  // Uses blocks of its own, so that the gradients of a queued step stay unchanged.
  std::vector<offload_ticket_t> QueueApart(size_t step) {
    return OnEach([&](uint32_t index, offload_ticket_t* ticket) {
      ShardedRank& rank = (*this)[index];
      *ticket = rank.Queue(rank.local().steps[step], rank.rig().AddBlock(100 + step));
    });
  }
  std::vector<offload_ticket_t> Save(const std::string& path) { return SaveEach(ToAll(path)); }
  std::vector<offload_ticket_t> Load(const std::string& path, uint32_t flags = 0) {
    return LoadEach(ToAll(path), flags);
  }
  // Each rank with a path of its own.
  std::vector<offload_ticket_t> SaveEach(const std::vector<std::string>& paths) {
    return OnEach([&](uint32_t rank, offload_ticket_t* ticket) {
      auto options = Make<offload_save_options_t>();
      options.path = paths[rank].c_str();
      MUST(offload_optimizer_save(handle(rank), &options, ticket));
    });
  }
  std::vector<offload_ticket_t> LoadEach(const std::vector<std::string>& paths,
                                         uint32_t flags = 0) {
    return OnEach([&](uint32_t rank, offload_ticket_t* ticket) {
      auto options = Make<offload_load_options_t>();
      options.path = paths[rank].c_str();
      options.flags = flags;
      MUST(offload_optimizer_load(handle(rank), &options, ticket));
    });
  }
  // Returns the outcome on each rank, and the texts of failures.
  std::vector<int32_t> Outcomes(const std::vector<offload_ticket_t>& tickets,
                                std::vector<std::string>* texts = nullptr) {
    std::vector<int32_t> outcomes;
    for (uint32_t rank = 0; rank < world(); ++rank) {
      outcomes.push_back(offload_optimizer_wait(handle(rank), tickets[rank], kHangNs));
      if (outcomes.back() == OFFLOAD_TIMED_OUT) MUST(outcomes.back());  // a destroy would hang too
      if (texts != nullptr)
        texts->push_back(outcomes.back() == OFFLOAD_OK ? "" : offload_last_error());
    }
    return outcomes;
  }

 private:
  std::vector<std::string> ToAll(const std::string& path) const {
    return std::vector<std::string>(world(), path);
  }
  template <typename Call>
  std::vector<offload_ticket_t> OnEach(Call&& call) {
    std::vector<offload_ticket_t> tickets(world());
    for (uint32_t rank = 0; rank < world(); ++rank) call(rank, &tickets[rank]);
    return tickets;
  }
};

void UseFiles(ShardedRank& rank, system::Files& files) {
  using Contexts = HandleTable<Context, HandleKind::kContext>;
  Contexts::Instance().Find(rank.context(), "context").value()->UseFiles(files);
}

uint64_t StepsApplied(offload_optimizer_t optimizer) {
  auto stats = Make<offload_stats_t>();
  MUST(offload_optimizer_get_stats(optimizer, &stats));
  return stats.steps_applied;
}

std::vector<int32_t> AllOf(uint32_t world, int32_t status) {
  return std::vector<int32_t>(world, status);
}

// The same tensors, divided among another world in another way.
std::unique_ptr<Sharded> Resharded(const Sharded& sharded, uint32_t world, uint64_t seed) {
  Random random(seed);
  std::vector<std::vector<Piece>> pieces;
  for (size_t id = 0; id < sharded.whole.params.size(); ++id)
    pieces.push_back(RandomLayout(sharded.piece(id, 0).shape, world, random));
  return std::make_unique<Sharded>(sharded.whole, std::move(pieces));
}

TEST(CheckpointRanks, AnyWorldLoadsWhatAnyOtherHasSaved) {
  uint64_t seed = 1000;
  const int rounds = Scaled(20);
  for (int round = 0; round < rounds; ++round) {
    ++seed;
    Random random(seed);
    const TemporaryDirectory directory;
    const std::string path = directory / "checkpoint";
    const auto world = static_cast<uint32_t>(1 + random.Below(4));
    const auto sharded = RandomSharded(AlgorithmOfSeed(seed), world, kSteps, seed);
    const size_t saved_after = random.Below(kSteps);
    {
      SavingRanks ranks(*sharded, RandomSetting(random));
      for (size_t step = 0; step < saved_after; ++step) ranks.Step(step);
      std::vector<std::string> texts;
      ASSERT_EQ(ranks.Outcomes(ranks.Save(path), &texts), AllOf(world, OFFLOAD_OK))
          << "seed " << seed << ": " << texts[0] << texts.back();
    }
    EXPECT_EQ(directory.Names(), std::vector<std::string>{"checkpoint"});
    EXPECT_EQ(offload_checkpoint_verify(path.c_str(), nullptr), OFFLOAD_OK);
    for (const std::string& name : TemporaryDirectory::NamesIn(path))
      EXPECT_EQ(name.find("part-"), std::string::npos) << name;
    for (int load = 0; load < 2; ++load) {
      const auto other_world = static_cast<uint32_t>(1 + random.Below(5));
      const auto other = Resharded(*sharded, other_world, seed * 10 + static_cast<uint64_t>(load));
      SavingRanks ranks(*other, RandomSetting(random));
      std::vector<std::string> texts;
      ASSERT_EQ(ranks.Outcomes(ranks.Load(path), &texts), AllOf(other_world, OFFLOAD_OK))
          << "seed " << seed << ": " << texts[0] << texts.back();
      for (size_t step = saved_after; step < kSteps; ++step) {
        ranks.Step(step);
        ASSERT_EQ(ranks.Difference(step + 1), "")
            << "seed " << seed << ", saved by " << world << " after " << saved_after
            << ", loaded by " << other_world;
      }
    }
  }
}

// Saves and steps are queued on one rank after the other, so that some ranks have written
// everything when others have not begun. The order of the calls is the same on all ranks in every
// schedule.
TEST(CheckpointRanks, StepsQueuedBehindASaveDoNotShowInIt) {
  uint64_t seed = 2000;
  for (int round = 0; round < Scaled(10); ++round) {
    ++seed;
    Random random(seed);
    const TemporaryDirectory directory;
    const auto sharded = RandomSharded(AlgorithmOfSeed(seed), 3, kSteps, seed);
    SavingRanks ranks(*sharded, RandomSetting(random));
    for (size_t step = 0; step < kSteps; ++step) {
      ranks.Save(directory / std::to_string(step));
      ranks.QueueApart(step);
    }
    ranks.Wait();
    ASSERT_EQ(ranks.Difference(kSteps), "") << "seed " << seed;
    for (size_t step = 0; step < kSteps; ++step) {
      const auto other = Resharded(*sharded, 2, seed + step);
      SavingRanks loaded(*other, RandomSetting(random));
      ASSERT_EQ(loaded.Outcomes(loaded.Load(directory / std::to_string(step))),
                AllOf(2, OFFLOAD_OK));
      loaded.Step(step);
      ASSERT_EQ(loaded.Difference(step + 1), "") << "seed " << seed << ", step " << step;
    }
  }
}

// A rank whose part cannot be written: here a directory already has the name of its file.
TEST(CheckpointRanks, ARankThatFailsFailsTheSaveOnAllAndNothingIsLeft) {
  const auto sharded = RandomSharded(OFFLOAD_ADAMW, 3, kSteps, 3000);
  const TemporaryDirectory directory;
  Random random(1);
  SavingRanks ranks(*sharded, RandomSetting(random));
  ranks.Step(0);
  for (uint32_t bad = 0; bad < 3; ++bad) {
    // This rank is told another parent, which has no such directory in it.
    std::filesystem::create_directory(directory / "other");
    std::vector<std::string> paths(3, directory / "new");
    paths[bad] = directory / "other/new";
    std::vector<std::string> texts;
    EXPECT_EQ(ranks.Outcomes(ranks.SaveEach(paths), &texts), AllOf(3, OFFLOAD_IO_FAILED))
        << "rank " << bad;
    const uint32_t blamed = bad == 0 ? 2 : bad;  // all but rank 0 then use the wrong path
    for (uint32_t rank = 0; rank < 3; ++rank) {
      const bool own = bad == 0 ? rank != 0 : rank == bad;
      const std::string expected =
          own ? "No such file" : "rank " + std::to_string(blamed) + " has failed";
      EXPECT_NE(texts[rank].find(expected), std::string::npos) << rank << ": " << texts[rank];
    }
    std::filesystem::remove_all(directory / "other");
    EXPECT_TRUE(directory.Names().empty());
  }
  ranks.Step(1);
  EXPECT_EQ(ranks.Difference(2), "");
}

TEST(CheckpointRanks, ARankThatRefusesALoadRefusesItForAll) {
  const auto sharded = RandomSharded(OFFLOAD_ADAMW, 2, kSteps, 3001);
  const TemporaryDirectory directory;
  Random random(2);
  SavingRanks ranks(*sharded, RandomSetting(random));
  ranks.Step(0);
  for (const char* name : {"one", "two"}) {
    ASSERT_EQ(ranks.Outcomes(ranks.Save(directory / name)), AllOf(2, OFFLOAD_OK));
    ranks.Step(name[0] == 'o' ? 1 : 2);
  }
  std::vector<std::string> texts;
  EXPECT_EQ(ranks.Outcomes(ranks.LoadEach({directory / "one", directory / "none"}), &texts),
            AllOf(2, OFFLOAD_IO_FAILED));
  EXPECT_NE(texts[0].find("rank 1 has failed"), std::string::npos) << texts[0];
  EXPECT_NE(texts[1].find("none/manifest.json"), std::string::npos) << texts[1];
  texts.clear();
  EXPECT_EQ(ranks.Outcomes(ranks.LoadEach({directory / "one", directory / "two"}), &texts),
            AllOf(2, OFFLOAD_CHECKPOINT_MISMATCH));
  EXPECT_NE(texts[0].find("different checkpoints"), std::string::npos) << texts[0];
  EXPECT_EQ(ranks.Difference(3), "");
}

// If several ranks fail, the others get one of these failures: its rank and its code.
TEST(CheckpointRanks, TheRankThatIsToldOfIsTheOneThatFailedSo) {
  const auto sharded = RandomSharded(OFFLOAD_ADAMW, 3, kSteps, 3005);
  const TemporaryDirectory directory;
  Random random(6);
  SavingRanks ranks(*sharded, RandomSetting(random));
  ranks.Step(0);
  ASSERT_EQ(ranks.Outcomes(ranks.Save(directory / "good")), AllOf(3, OFFLOAD_OK));
  std::filesystem::create_directory(directory / "damaged");
  std::ofstream(directory / "damaged/manifest.json") << "nonsense";
  const std::vector<std::string> paths = {directory / "damaged", directory / "good",
                                          directory / "none"};
  std::vector<std::string> texts;
  EXPECT_EQ(
      ranks.Outcomes(ranks.LoadEach(paths), &texts),
      (std::vector<int32_t>{OFFLOAD_CHECKPOINT_CORRUPT, OFFLOAD_IO_FAILED, OFFLOAD_IO_FAILED}));
  EXPECT_NE(texts[1].find("rank 2 has failed"), std::string::npos) << texts[1];
}

// Files whose shards cannot be read any more once their heads have been.
class FailingFiles : public system::Files {
 public:
  int OpenFile(const std::string& path, Open how) override {
    const int file = Files::OpenFile(path, how);
    std::lock_guard lock(mutex_);
    if (file >= 0 && path.ends_with(".safetensors")) shards_.insert(file);
    return file;
  }
  int Close(int file) override {
    std::lock_guard lock(mutex_);
    shards_.erase(file);
    return Files::Close(file);
  }
  int64_t Read(int file, void* data, uint64_t bytes, uint64_t offset) override {
    std::lock_guard lock(mutex_);
    if (failing && offset > 0 && shards_.count(file) > 0) return -EIO;
    return Files::Read(file, data, bytes, offset);
  }
  std::atomic<bool> failing = false;

 private:
  std::mutex mutex_;
  std::set<int> shards_;
};

// If no rank has replaced anything, a load that fails late still counts as refused.
TEST(CheckpointRanks, StateIsAMixtureOnlyIfSomeRankHasReplacedSome) {
  const auto sharded = RandomSharded(OFFLOAD_ADAMW, 2, kSteps, 3006);
  const TemporaryDirectory directory;
  Random random(7);
  FailingFiles files[2];
  SavingRanks ranks(*sharded, RandomSetting(random));
  for (uint32_t rank = 0; rank < 2; ++rank) UseFiles(ranks[rank], files[rank]);
  ranks.Step(0);
  ASSERT_EQ(ranks.Outcomes(ranks.Save(directory / "new")), AllOf(2, OFFLOAD_OK));
  ranks.Step(1);
  const auto load = [&](bool first, bool second, std::vector<std::string>* texts) {
    files[0].failing = first;
    files[1].failing = second;
    return ranks.Outcomes(ranks.Load(directory / "new", OFFLOAD_LOAD_NO_VERIFY), texts);
  };
  std::vector<std::string> texts;
  EXPECT_EQ(load(true, true, &texts), AllOf(2, OFFLOAD_IO_FAILED));
  for (const std::string& text : texts) {
    EXPECT_EQ(text.find("mixture"), std::string::npos) << text;
    EXPECT_NE(text.find("shard-"), std::string::npos) << text;
  }
  EXPECT_EQ(ranks.Difference(2), "");
  ranks.Step(2);
  EXPECT_EQ(ranks.Difference(3), "");
  texts.clear();
  EXPECT_EQ(load(false, true, &texts), AllOf(2, OFFLOAD_IO_FAILED));
  for (uint32_t rank = 0; rank < 2; ++rank) {
    EXPECT_NE(texts[rank].find("is a mixture now"), std::string::npos) << texts[rank];
    EXPECT_EQ(offload_optimizer_step(ranks.handle(rank), nullptr, nullptr), OFFLOAD_POISONED);
  }
}

// A slow rank keeps answering, so a test need not wait for a timeout: the other ranks must have met
// it several times meanwhile. Otherwise they would be stuck in one call, and this returns false,
// after the timeout of that call.

bool AwaitMeetings(const ThreadComm& comm, int32_t rank) {
  const uint64_t before = comm.calls(rank);
  const int64_t given_up_ns = system::NowNs() + 3 * static_cast<int64_t>(kRankTimeoutNs) / 2;
  while (comm.calls(rank) < before + 3) {
    if (system::NowNs() > given_up_ns) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

TEST(CheckpointRanks, ARankWithASlowDiskIsWaitedForAndHoldsNoStepUp) {
  for (const bool before_reading : {false, true}) {
    const auto sharded = RandomSharded(OFFLOAD_ADAMW, 2, kSteps, 3003);
    const TemporaryDirectory directory;
    HeldFiles files;
    std::atomic<bool>& held = before_reading ? files.before_reading : files.before_end;
    held = true;
    Random random(4);
    SavingRanks ranks(*sharded, RandomSetting(random));
    UseFiles(ranks[1], files);
    ranks.Step(0);
    const std::vector<offload_ticket_t> tickets = ranks.Save(directory / "new");
    // Meanwhile rank 0 comes to the end of its part: it must still meet the other one.
    for (int32_t rank : {0, 1}) EXPECT_TRUE(AwaitMeetings(ranks.comm(), rank));
    ranks.QueueApart(1);
    const std::vector<offload_ticket_t> last = ranks.QueueApart(2);
    for (uint32_t rank = 0; rank < 2 && !before_reading; ++rank)
      EXPECT_EQ(offload_optimizer_wait(ranks.handle(rank), last[rank], -1), OFFLOAD_OK)
          << offload_last_error();
    for (int32_t rank : {0, 1}) EXPECT_TRUE(AwaitMeetings(ranks.comm(), rank));
    EXPECT_EQ(StepsApplied(ranks.handle(1)), before_reading ? 1u : 3u);
    for (uint32_t rank = 0; rank < 2; ++rank) {
      EXPECT_EQ(offload_optimizer_wait(ranks.handle(rank), tickets[rank], 0), OFFLOAD_TIMED_OUT)
          << offload_last_error();
    }
    held = false;
    std::vector<std::string> texts;
    ASSERT_EQ(ranks.Outcomes(tickets, &texts), AllOf(2, OFFLOAD_OK)) << texts[0] << texts[1];
    ranks.Wait();
    EXPECT_EQ(ranks.Difference(3), "");
    EXPECT_EQ(offload_checkpoint_verify((directory / "new").c_str(), nullptr), OFFLOAD_OK);
  }
}

// Delays all work on files except the save's own writing: what rank 0 does for all, and what each
// rank does for a load.
class SlowFiles : public system::Files {
 public:
  SlowFiles(const ThreadComm& comm, int32_t rank) : comm_(comm), rank_(rank) {}
  int List(const std::string& path, std::vector<std::string>* names) override {
    Take("list");
    return Files::List(path, names);
  }
  int RemoveIn(int directory, const std::string& name) override {
    Take("remove");
    return Files::RemoveIn(directory, name);
  }
  int RenameNoReplace(const std::string& from, const std::string& to) override {
    Take("rename");
    if (name_is_lost) std::filesystem::create_directory(to);
    return Files::RenameNoReplace(from, to);
  }
  int OpenFile(const std::string& path, Open how) override {
    if (path.ends_with("/manifest.json")) Take("open");
    return Files::OpenFile(path, how);
  }
  int64_t Read(int file, void* data, uint64_t bytes, uint64_t offset) override {
    Take("read");
    return Files::Read(file, data, bytes, offset);
  }

  std::atomic<bool> name_is_lost = false;  // another program takes it just before

  // Slow calls so far, by name. Only the first calls are slow, so that the test does not take too
  // long.
  std::map<std::string, int> taken() {
    std::lock_guard lock(mutex_);
    return taken_;
  }
  void Forget() {
    std::lock_guard lock(mutex_);
    taken_.clear();
  }

 private:
  void Take(const char* name) {
    {
      std::lock_guard lock(mutex_);
      if (++taken_[name] > kTaken || alone_) return;
    }
    alone_ = !AwaitMeetings(comm_, rank_);
  }
  static constexpr int kTaken = 8;
  const ThreadComm& comm_;
  const int32_t rank_;
  std::atomic<bool> alone_ = false;  // the other rank does not go on: one wait for it is enough
  std::mutex mutex_;
  std::map<std::string, int> taken_;
};

TEST(CheckpointRanks, NoWorkOnFilesOfOneRankCountsAgainstTheTimeoutOfAnother) {
  const auto sharded = RandomSharded(OFFLOAD_ADAMW, 2, kSteps, 3004);
  const TemporaryDirectory directory;
  Random random(5);
  SavingRanks ranks(*sharded, RandomSetting(random));
  SlowFiles first(ranks.comm(), 0), second(ranks.comm(), 1);
  UseFiles(ranks[0], first);
  UseFiles(ranks[1], second);
  ranks.Step(0);
  const std::string left = directory / ".new.saving-0000000000000001";
  std::filesystem::create_directory(left);
  std::ofstream(left + "/manifest.json") << "left";
  ASSERT_EQ(ranks.Outcomes(ranks.Save(directory / "new")), AllOf(2, OFFLOAD_OK));
  EXPECT_EQ(directory.Names(), std::vector<std::string>{"new"});
  for (const char* name : {"list", "remove", "rename"}) EXPECT_GT(first.taken()[name], 0) << name;
  // One that fails.
  first.Forget();
  first.name_is_lost = true;
  EXPECT_EQ(ranks.Outcomes(ranks.Save(directory / "taken")), AllOf(2, OFFLOAD_IO_FAILED));
  EXPECT_EQ(directory.Names(), (std::vector<std::string>{"new", "taken"}));
  EXPECT_GT(first.taken()["remove"], 0);
  // A load: the two ranks are the slower one in turn.
  ranks.Step(1);
  for (SlowFiles* slow : {&first, &second}) {
    UseFiles(ranks[0], slow == &first ? first : system::SystemFiles());
    UseFiles(ranks[1], slow == &first ? system::SystemFiles() : second);
    for (const uint32_t flags : {0u, uint32_t{OFFLOAD_LOAD_NO_VERIFY}}) {
      slow->Forget();
      ASSERT_EQ(ranks.Outcomes(ranks.Load(directory / "new", flags)), AllOf(2, OFFLOAD_OK));
      EXPECT_GT(slow->taken()["open"], 0);
      EXPECT_GT(slow->taken()["read"], 0);
      ranks.Step(1);
      EXPECT_EQ(ranks.Difference(2), "");
    }
  }
}

// A lost rank poisons the optimizer, unlike a failed save.
TEST(CheckpointRanks, ARankThatIsGonePoisonsAfterTheTimeout) {
  const auto sharded = RandomSharded(OFFLOAD_ADAMW, 2, kSteps, 3002);
  const TemporaryDirectory directory;
  Random random(3);
  SavingRanks ranks(*sharded, RandomSetting(random), 50'000'000);
  auto options = Make<offload_save_options_t>();
  const std::string path = directory / "new";
  options.path = path.c_str();
  offload_ticket_t ticket = 0;
  MUST(offload_optimizer_save(ranks.handle(0), &options, &ticket));
  EXPECT_EQ(offload_optimizer_wait(ranks.handle(0), ticket, -1), OFFLOAD_COMM_FAILED);
  EXPECT_EQ(offload_optimizer_save(ranks.handle(0), &options, nullptr), OFFLOAD_POISONED);
  EXPECT_TRUE(directory.Names().empty());
}

// Rank 1 dies when it has written its part and rank 0 still writes.
TEST(CheckpointRanks, ARankThatDiesDuringASaveLeavesNothing) {
  const auto sharded = RandomSharded(OFFLOAD_ADAMW, 2, kSteps, 3007);
  const TemporaryDirectory directory;
  HeldFiles files;
  files.before_end = true;
  Random random(8);
  SavingRanks ranks(*sharded, RandomSetting(random));
  UseFiles(ranks[0], files);
  ranks.Step(0);
  const std::vector<offload_ticket_t> tickets = ranks.Save(directory / "new");
  const auto has_part = [&] {
    for (const std::string& pending : directory.Names())
      for (const std::string& name : TemporaryDirectory::NamesIn(directory / pending))
        if (name.starts_with("part-00001")) return true;
    return false;
  };
  while (!has_part()) std::this_thread::yield();
  ranks.comm().Inject(1, 0, ThreadComm::Fault::kDie);
  files.before_end = false;
  EXPECT_EQ(ranks.Outcomes(tickets), AllOf(2, OFFLOAD_COMM_FAILED));
  EXPECT_TRUE(directory.Names().empty());
}

}  // namespace
}  // namespace hybridopt
