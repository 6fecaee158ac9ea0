// What mpi_test.sh runs under mpirun, one mode a run: the table itself, whole steps over it, what
// it refuses, and ranks that exit or hang. Ends with 0 if all is as it must be.
#include <offload_mpi.h>
#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "../differential/sharded.h"
#include "../thread_comm.h"

namespace hybridopt {
namespace {

int world = 0;
int rank = -1;

// Aborts all ranks.
#define EXPECT(condition) Expect((condition), #condition, __LINE__)
void Expect(bool condition, const char* text, int line) {
  if (condition) return;
  std::fprintf(stderr, "FAILED: rank %d, line %d: %s\n  mpi: %s\n  offload: %s\n", rank, line, text,
               offload_mpi_last_error(), offload_last_error());
  MPI_Abort(MPI_COMM_WORLD, 1);
}

bool Says(const char* text, const char* part) {
  return std::string(text).find(part) != std::string::npos;
}

void Init() {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  EXPECT(provided == MPI_THREAD_MULTIPLE);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
}

offload_comm_t MakeTable() {
  offload_comm_t table{};
  EXPECT(offload_mpi_create(MPI_COMM_WORLD, &table) == OFFLOAD_OK);
  EXPECT(table.rank == rank && table.world == world && table.struct_size == sizeof(table));
  return table;
}

constexpr int64_t kLongNs = 300'000'000'000;

// --------------------------------------------------------------------------------------- table --

// Values of every magnitude: their sum depends on the order.
std::vector<double> Values(int of_rank, uint32_t count, uint64_t seed) {
  Random random(seed * 100 + static_cast<uint64_t>(of_rank));
  std::vector<double> values;
  for (uint32_t i = 0; i < count; ++i)
    values.push_back(std::exp2(random.Between(-60, 60)) * (random.OneIn(2) ? -1 : 1));
  return values;
}

// The sums in rank order, of all ranks' values as each of them can make.
void CheckSums(const offload_comm_t& table, uint32_t count, uint64_t seed) {
  std::vector<double> expected = Values(0, count, seed);
  for (int other = 1; other < world; ++other) {
    const std::vector<double> values = Values(other, count, seed);
    for (uint32_t i = 0; i < count; ++i) expected[i] += values[i];
  }
  std::vector<double> got = Values(rank, count, seed);
  EXPECT(table.sum(table.user, got.data(), count, kLongNs) == OFFLOAD_OK);
  EXPECT(count == 0 || std::memcmp(got.data(), expected.data(), count * sizeof(double)) == 0);
}

void CheckMaxima(const offload_comm_t& table, uint32_t count) {
  std::vector<int32_t> got(count);
  for (uint32_t i = 0; i < count; ++i) {
    const bool largest_here = static_cast<int>(i) % world == rank;
    got[i] = i % 2 == 0 ? largest_here : (largest_here ? INT32_MIN + 1 : INT32_MIN);
  }
  EXPECT(table.max(table.user, got.data(), count, kLongNs) == OFFLOAD_OK);
  for (uint32_t i = 0; i < count; ++i) EXPECT(got[i] == (i % 2 == 0 ? 1 : INT32_MIN + 1));
}

// Nobody leaves the barrier before all have come: a counter in shared memory tells.
void CheckBarrier(const offload_comm_t& table) {
  int* counter = nullptr;
  MPI_Win window;
  MPI_Win_allocate_shared(rank == 0 ? sizeof(int) : 0, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &counter,
                          &window);
  MPI_Aint bytes = 0;
  int unit = 0;
  MPI_Win_shared_query(window, 0, &bytes, &unit, &counter);
  if (rank == 0) *counter = 0;
  MPI_Barrier(MPI_COMM_WORLD);
  for (int round = 1; round <= 50; ++round) {
    if (round % world == rank) usleep(2000);
    __atomic_add_fetch(counter, 1, __ATOMIC_SEQ_CST);
    EXPECT(table.barrier(table.user, kLongNs) == OFFLOAD_OK);
    EXPECT(__atomic_load_n(counter, __ATOMIC_SEQ_CST) >= round * world);
  }
  MPI_Win_free(&window);
}

void CheckRefusals() {
  offload_comm_t untouched{};
  untouched.world = 77;
  EXPECT(offload_mpi_create(MPI_COMM_WORLD, nullptr) == OFFLOAD_INVALID_ARGUMENT);
  EXPECT(Says(offload_mpi_last_error(), "table is NULL"));
  EXPECT(offload_mpi_create(MPI_COMM_NULL, &untouched) == OFFLOAD_INVALID_ARGUMENT);
  EXPECT(Says(offload_mpi_last_error(), "communicator is MPI_COMM_NULL"));
  if (world > 1) {
    MPI_Comm half, inter;
    MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &half);
    MPI_Intercomm_create(half, 0, MPI_COMM_WORLD, rank % 2 == 0 ? 1 : 0, 9, &inter);
    EXPECT(offload_mpi_create(inter, &untouched) == OFFLOAD_INVALID_ARGUMENT);
    EXPECT(Says(offload_mpi_last_error(), "inter-communicator"));
    MPI_Comm_free(&inter);
    MPI_Comm_free(&half);
  }
  EXPECT(untouched.world == 77);
  EXPECT(offload_mpi_destroy(nullptr) == OFFLOAD_INVALID_ARGUMENT);
  EXPECT(Says(offload_mpi_last_error(), "table is NULL"));
  ThreadComm threads(1);
  offload_comm_t foreign = threads.Table(0);
  EXPECT(offload_mpi_destroy(&foreign) == OFFLOAD_INVALID_ARGUMENT);
  EXPECT(Says(offload_mpi_last_error(), "table is not such a one"));
}

int Table() {
  Init();
  EXPECT(std::string(offload_mpi_last_error()).empty());
  offload_comm_t table = MakeTable();
  for (uint32_t count : {0u, 1u, 2u, 63u, 64u, 65u, 1000u}) {
    CheckSums(table, count, count + 1);
    CheckMaxima(table, count);
  }
  CheckBarrier(table);
  // Two tables used by two threads at once do not hear each other.
  offload_comm_t other = MakeTable();
  std::thread thread([&] {
    for (uint64_t seed = 0; seed < 50; ++seed) CheckSums(other, 5, seed);
  });
  for (uint64_t seed = 50; seed < 100; ++seed) CheckSums(table, 5, seed);
  thread.join();
  EXPECT(offload_mpi_destroy(&other) == OFFLOAD_OK);
  EXPECT(offload_mpi_destroy(&other) == OFFLOAD_INVALID_ARGUMENT);  // it has been
  CheckRefusals();
  CheckSums(table, 3, 200);
  EXPECT(offload_mpi_destroy(&table) == OFFLOAD_OK);
  MPI_Finalize();
  return 0;
}

// Before MPI_Init, without MPI_THREAD_MULTIPLE, after MPI_Finalize.
int State() {
  offload_comm_t table{};
  EXPECT(offload_mpi_create(MPI_COMM_WORLD, &table) == OFFLOAD_INVALID_STATE);
  EXPECT(Says(offload_mpi_last_error(), "MPI is not initialised"));
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_SERIALIZED, &provided);
  EXPECT(provided == MPI_THREAD_SERIALIZED);
  EXPECT(offload_mpi_create(MPI_COMM_WORLD, &table) == OFFLOAD_INVALID_STATE);
  EXPECT(Says(offload_mpi_last_error(), "expected MPI_THREAD_MULTIPLE"));
  MPI_Finalize();
  EXPECT(offload_mpi_create(MPI_COMM_WORLD, &table) == OFFLOAD_INVALID_STATE);
  EXPECT(Says(offload_mpi_last_error(), "MPI is finalized"));
  EXPECT(table.user == nullptr);
  return 0;
}

// --------------------------------------------------------------------------------------- steps --

constexpr size_t kSteps = 6;

struct Setting {
  ContextSetting context;
  OptimizerSetting optimizer;
};

std::vector<Setting> Settings() {
  Setting host, sim;
  host.context.threads = sim.context.threads = 1;
  sim.context.device_kind = OFFLOAD_DEVICE_SIM;
  sim.optimizer = {0.4, 1024, 2};
  return {host, sim};
}

// FNV-1a over a rank's params, states and last norm.
uint64_t Hash(ShardedRank& rank_of) {
  Bytes bits = rank_of.Bits();
  auto result = Make<offload_step_result_t>();
  MUST(offload_optimizer_step_result(rank_of.rig().handle(), 0, &result));
  const auto* norm = reinterpret_cast<const std::byte*>(&result.grad_norm);
  bits.insert(bits.end(), norm, norm + sizeof(result.grad_norm));
  uint64_t hash = 0xcbf29ce484222325;
  for (std::byte byte : bits) hash = (hash ^ static_cast<uint64_t>(byte)) * 0x100000001b3;
  return hash;
}

// The same program with this process's threads for ranks.
std::vector<uint64_t> HashesOfThreads(const Sharded& sharded, const Setting& setting) {
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

int Step() {
  Init();
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    const auto sharded =
        RandomSharded(kAlgorithms[seed % 5], static_cast<uint32_t>(world), kSteps, seed);
    for (const Setting& setting : Settings()) {
      offload_comm_t table = MakeTable();
      uint64_t hash = 0;
      {
        ShardedRank own(*sharded, static_cast<uint32_t>(rank), table, setting.context,
                        setting.optimizer);
        for (size_t step = 0; step < kSteps; ++step) {
          own.Queue(step);
          MUST(offload_optimizer_wait(own.rig().handle(), 0, kLongNs));
          const std::string difference = own.Difference(step + 1);
          if (!difference.empty()) std::fprintf(stderr, "%s\n", difference.c_str());
          EXPECT(difference.empty());
        }
        hash = Hash(own);
      }
      EXPECT(offload_mpi_destroy(&table) == OFFLOAD_OK);
      std::vector<uint64_t> hashes(static_cast<size_t>(world));
      MPI_Gather(&hash, 1, MPI_UINT64_T, hashes.data(), 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
      if (rank != 0) continue;
      EXPECT(hashes == HashesOfThreads(*sharded, setting));
      std::printf("seed %" PRIu64 ", %s:", seed, Text(setting.context, setting.optimizer).c_str());
      for (uint64_t each : hashes) std::printf(" %016" PRIx64, each);
      std::printf("\n");
    }
  }
  if (rank == 0) std::printf("%d processes and %d threads: the same hashes\n", world, world);
  MPI_Finalize();
  return 0;
}

// --------------------------------------------------------------------------------- bad endings --

void HangForEver() {
  for (;;) pause();
}

void ExitEarly() { _exit(5); }

// Rank 1 makes one step with the others and then none; `vanish` is how.
int Lose(void (*vanish)()) {
  Init();
  const auto sharded = RandomSharded(OFFLOAD_ADAMW, static_cast<uint32_t>(world), kSteps, 5);
  offload_comm_t table = MakeTable();
  {
    const Setting setting = Settings()[1];
    ShardedRank own(*sharded, static_cast<uint32_t>(rank), table, setting.context,
                    setting.optimizer, 0, 5'000'000'000);
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
    EXPECT(Says(text.c_str(), ("rank " + std::to_string(rank) + " of 4: comm.sum").c_str()));
    // MPI itself may notice an exit, but not a rank that hangs.
    if (vanish == HangForEver)
      EXPECT(Says(text.c_str(), "did not answer within 5.0 s (options.comm_timeout_ns)"));
    EXPECT(offload_optimizer_step(own.rig().handle(), nullptr, nullptr) == OFFLOAD_POISONED);
    EXPECT(own.Bits() == before);
  }
  double value = 1;
  EXPECT(table.sum(table.user, &value, 1, kLongNs) == OFFLOAD_COMM_FAILED);  // at once
  EXPECT(Says(offload_mpi_last_error(), "an earlier call failed"));
  EXPECT(offload_mpi_destroy(&table) == OFFLOAD_OK);
  std::printf("rank %d has destroyed all\n", rank);
  std::fflush(stdout);
  if (rank != 0) {
    MPI_Send(&rank, 1, MPI_INT, 0, 1, MPI_COMM_WORLD);
    for (;;) pause();
  }
  int from = 0;
  for (int other = 2; other < world; ++other)
    MPI_Recv(&from, 1, MPI_INT, other, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
  MPI_Abort(MPI_COMM_WORLD, 3);  // MPI_Finalize would wait for rank 1
  return 3;
}

}  // namespace
}  // namespace hybridopt

int main(int argc, char** argv) {
  const std::string mode = argc == 2 ? argv[1] : "";
  if (mode == "table") return hybridopt::Table();
  if (mode == "state") return hybridopt::State();
  if (mode == "step") return hybridopt::Step();
  if (mode == "hang") return hybridopt::Lose(hybridopt::HangForEver);
  if (mode == "exit") return hybridopt::Lose(hybridopt::ExitEarly);
  std::fprintf(stderr, "usage: mpi_ranks table|state|step|hang|exit\n");
  return 2;
}
