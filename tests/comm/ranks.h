// Checks for programs whose ranks are processes: the results that a comm table must return, and
// whole steps over a table, whose bits must be those of ranks that are threads.
#pragma once

#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "../differential/sharded.h"
#include "../thread_comm.h"

namespace hybridopt {

inline int world = 0;
inline int rank = -1;
inline std::function<const char*()> adaptor_error;  // the error text of the table's library
inline std::function<void()> end_all_ranks;

// Ends all ranks.
#define EXPECT(condition) Expect((condition), #condition, __LINE__)
inline void Expect(bool condition, const char* text, int line) {
  if (condition) return;
  std::fprintf(stderr, "FAILED: rank %d, line %d: %s\n  adaptor: %s\n  offload: %s\n", rank, line,
               text, adaptor_error(), offload_last_error());
  end_all_ranks();
  std::abort();
}

inline bool Says(const char* text, const char* part) {
  return std::string(text).find(part) != std::string::npos;
}

inline constexpr int64_t kLongNs = 300'000'000'000;

// --------------------------------------------------------------------------------------- table --

// Values of every magnitude: their sum depends on the order.
inline std::vector<double> Values(int of_rank, uint32_t count, uint64_t seed) {
  Random random(seed * 100 + static_cast<uint64_t>(of_rank));
  std::vector<double> values;
  for (uint32_t i = 0; i < count; ++i)
    values.push_back(std::exp2(random.Between(-60, 60)) * (random.OneIn(2) ? -1 : 1));
  return values;
}

// The expected sums, in rank order. Every rank can compute the values of all ranks.
inline void CheckSums(const offload_comm_t& table, uint32_t count, uint64_t seed) {
  std::vector<double> expected = Values(0, count, seed);
  for (int other = 1; other < world; ++other) {
    const std::vector<double> values = Values(other, count, seed);
    for (uint32_t i = 0; i < count; ++i) expected[i] += values[i];
  }
  std::vector<double> got = Values(rank, count, seed);
  EXPECT(table.sum(table.user, got.data(), count, kLongNs) == OFFLOAD_OK);
  EXPECT(count == 0 || std::memcmp(got.data(), expected.data(), count * sizeof(double)) == 0);
}

inline void CheckMaxima(const offload_comm_t& table, uint32_t count) {
  std::vector<int32_t> got(count);
  for (uint32_t i = 0; i < count; ++i) {
    const bool largest_here = static_cast<int>(i) % world == rank;
    got[i] = i % 2 == 0 ? largest_here : (largest_here ? INT32_MIN + 1 : INT32_MIN);
  }
  EXPECT(table.max(table.user, got.data(), count, kLongNs) == OFFLOAD_OK);
  for (uint32_t i = 0; i < count; ++i) EXPECT(got[i] == (i % 2 == 0 ? 1 : INT32_MIN + 1));
}

inline void CheckReductions(const offload_comm_t& table) {
  for (uint32_t count : {0u, 1u, 2u, 63u, 64u, 65u, 1000u}) {
    CheckSums(table, count, count + 1);
    CheckMaxima(table, count);
  }
}

// No rank leaves the barrier before all ranks have reached it: a counter shared by all processes, 0
// at first, shows that.
inline void CheckBarrier(const offload_comm_t& table, int* counter) {
  for (int round = 1; round <= 50; ++round) {
    if (round % world == rank) usleep(2000);
    __atomic_add_fetch(counter, 1, __ATOMIC_SEQ_CST);
    EXPECT(table.barrier(table.user, kLongNs) == OFFLOAD_OK);
    EXPECT(__atomic_load_n(counter, __ATOMIC_SEQ_CST) >= round * world);
  }
}

// The memory in which a table's messages are.
struct MessageMemory {
  std::function<void*(size_t bytes)> take;
  std::function<void(void* to, const void* from, size_t bytes)> copy;
  std::function<void(void*)> free;
};

inline MessageMemory HostMemory() {
  return {[](size_t bytes) { return std::malloc(bytes); },
          [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); },
          [](void* memory) { std::free(memory); }};
}

inline Bytes MessageOf(int from, int to, size_t index) {
  constexpr size_t kBytes[] = {1, 70'000, 4099};
  Random random(static_cast<uint64_t>(from * 100 + to * 10) + index);
  Bytes bytes(kBytes[index] + static_cast<size_t>(from));
  for (std::byte& each : bytes) each = static_cast<std::byte>(random.Below(256));
  return bytes;
}

// Three messages from every rank to every other one, all at the same time.
inline void CheckExchange(const offload_comm_t& table, const MessageMemory& memory) {
  std::vector<offload_message_t> messages;
  for (size_t index = 0; index < 3; ++index) {
    for (int other = 0; other < world; ++other) {
      if (other == rank) continue;
      for (const bool sends : {false, true}) {
        const Bytes bytes = sends ? MessageOf(rank, other, index) : MessageOf(other, rank, index);
        auto message = Make<offload_message_t>();
        message.rank = other;
        message.sends = sends ? 1 : 0;
        message.data = memory.take(bytes.size());
        message.bytes = bytes.size();
        if (sends) memory.copy(message.data, bytes.data(), bytes.size());
        messages.push_back(message);
      }
    }
  }
  EXPECT(table.exchange(table.user, messages.data(), static_cast<uint32_t>(messages.size()),
                        nullptr, kLongNs) == OFFLOAD_OK);
  for (size_t i = 0; i < messages.size(); ++i) {
    const size_t index = i / (2 * static_cast<size_t>(world - 1));
    Bytes got(messages[i].bytes);
    memory.copy(got.data(), messages[i].data, got.size());
    if (messages[i].sends == 0) EXPECT(got == MessageOf(messages[i].rank, rank, index));
    memory.free(messages[i].data);
  }
}

// --------------------------------------------------------------------------------------- steps --

inline constexpr size_t kSteps = 6;

struct Setting {
  ContextSetting context;
  OptimizerSetting optimizer;
};

// FNV-1a over a rank's params, states and last norm.
inline uint64_t Hash(ShardedRank& rank_of) {
  Bytes bits = rank_of.Bits();
  auto result = Make<offload_step_result_t>();
  MUST(offload_optimizer_step_result(rank_of.rig().handle(), 0, &result));
  const auto* norm = reinterpret_cast<const std::byte*>(&result.grad_norm);
  bits.insert(bits.end(), norm, norm + sizeof(result.grad_norm));
  uint64_t hash = 0xcbf29ce484222325;
  for (std::byte byte : bits) hash = (hash ^ static_cast<uint64_t>(byte)) * 0x100000001b3;
  return hash;
}

// This process's rank of a sharded model: after every step its bits are those of the whole model.
// Returns its hash.
inline uint64_t TakeSteps(const Sharded& sharded, const Setting& setting,
                          const offload_comm_t& table) {
  ShardedRank own(sharded, static_cast<uint32_t>(rank), table, setting.context, setting.optimizer);
  for (size_t step = 0; step < kSteps; ++step) {
    own.Queue(step);
    MUST(offload_optimizer_wait(own.rig().handle(), 0, kLongNs));
    const std::string difference = own.Difference(step + 1);
    if (!difference.empty()) std::fprintf(stderr, "%s\n", difference.c_str());
    EXPECT(difference.empty());
  }
  return Hash(own);
}

// The same program, whose ranks are threads of this process.
inline std::vector<uint64_t> HashesOfThreads(const Sharded& sharded, const Setting& setting) {
  ThreadComm comm(world);
  std::vector<std::unique_ptr<ShardedRank>> ranks;
  for (int other = 0; other < world; ++other)
    ranks.push_back(std::make_unique<ShardedRank>(sharded, static_cast<uint32_t>(other),
                                                  comm.Table(other), setting.context,
                                                  setting.optimizer));
  for (size_t step = 0; step < kSteps; ++step) {
    for (auto& each : ranks) each->Queue(step);
    for (auto& each : ranks) MUST(offload_optimizer_wait(each->rig().handle(), 0, -1));
  }
  std::vector<uint64_t> hashes;
  for (auto& each : ranks) hashes.push_back(Hash(*each));
  return hashes;
}

// Rank 0 prints and checks the hashes with which the processes ended.
inline void CheckHashes(const Sharded& sharded, const Setting& setting, uint64_t seed,
                        const std::vector<uint64_t>& hashes) {
  EXPECT(hashes == HashesOfThreads(sharded, setting));
  std::printf("seed %" PRIu64 ", %s:", seed, Text(setting.context, setting.optimizer).c_str());
  for (uint64_t each : hashes) std::printf(" %016" PRIx64, each);
  std::printf("\n");
}

// --------------------------------------------------------------------------------- bad endings --

// Rank 1 makes one step with the others and then exits. The other ranks get an error, have changed
// nothing and refuse further calls.
inline void LoseRank1(const Setting& setting, const offload_comm_t& table,
                      const std::function<void()>& vanish, const char* words) {
  const auto sharded = RandomSharded(OFFLOAD_ADAMW, static_cast<uint32_t>(world), kSteps, 5);
  ShardedRank own(*sharded, static_cast<uint32_t>(rank), table, setting.context, setting.optimizer,
                  0, 5'000'000'000);
  const auto input = [&](size_t step) {
    StepInput asks = own.local().steps[step];
    asks.flags = 0;
    return asks;
  };
  own.Queue(input(0));
  MUST(offload_optimizer_wait(own.rig().handle(), 0, kLongNs));
  if (rank == 1) vanish();
  const Bytes before = own.Bits();
  own.Queue(input(1));
  EXPECT(offload_optimizer_wait(own.rig().handle(), 0, kLongNs) == OFFLOAD_COMM_FAILED);
  std::printf("rank %d got COMM_FAILED: %s\n", rank, offload_last_error());
  const std::string text = offload_last_error();
  const std::string who =
      "rank " + std::to_string(rank) + " of " + std::to_string(world) + ": comm.sum";
  EXPECT(Says(text.c_str(), who.c_str()));
  EXPECT(Says(text.c_str(), words));
  EXPECT(offload_optimizer_step(own.rig().handle(), nullptr, nullptr) == OFFLOAD_POISONED);
  EXPECT(own.Bits() == before);
}

}  // namespace hybridopt
