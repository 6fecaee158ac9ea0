// The NCCL adaptor with processes as ranks, each on a GPU of its own, one mode in each run: the
// table itself, whole steps over it, and ranks that exit or hang. The exit status is 0 if all
// results are right, and 77 (skipped) if there are not two GPUs.
#include <cuda_runtime_api.h>
#include <offload_nccl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <new>

#include "ranks.h"

namespace hybridopt {
namespace {

constexpr int kRanksMax = 4;
constexpr size_t kTablesMax = 64;  // of one run

// The memory that all processes share.
struct Shared {
  offload_nccl_id_t ids[kTablesMax];
  std::atomic<size_t> ids_made;  // by rank 0
  int barrier_counter;
  std::array<uint64_t, kRanksMax> hashes;
};
Shared* shared = nullptr;
size_t tables_made = 0;  // by this process

offload_comm_t MakeTable() {
  const size_t index = tables_made++;
  EXPECT(index < kTablesMax);
  if (rank == 0) {
    EXPECT(offload_nccl_get_id(&shared->ids[index]) == OFFLOAD_OK);
    shared->ids_made = index + 1;
  }
  while (shared->ids_made <= index) usleep(100);
  offload_comm_t table{};
  EXPECT(offload_nccl_create(&shared->ids[index], rank, world, rank, kLongNs, &table) ==
         OFFLOAD_OK);
  EXPECT(table.rank == rank && table.world == world && table.struct_size == sizeof(table));
  return table;
}

// Of this rank's device.
MessageMemory DeviceMemory() {
  return {[](size_t bytes) {
            void* memory = nullptr;
            int before = 0;
            EXPECT(cudaGetDevice(&before) == cudaSuccess && cudaSetDevice(rank) == cudaSuccess);
            EXPECT(cudaMalloc(&memory, bytes) == cudaSuccess);
            EXPECT(cudaSetDevice(before) == cudaSuccess);
            return memory;
          },
          [](void* to, const void* from, size_t bytes) {
            EXPECT(cudaMemcpy(to, from, bytes, cudaMemcpyDefault) == cudaSuccess);
          },
          [](void* memory) { EXPECT(cudaFree(memory) == cudaSuccess); }};
}

void ExpectDevice(int expected) {
  int device = -1;
  EXPECT(cudaGetDevice(&device) == cudaSuccess && device == expected);
}

// In the calling thread a device other than the table's is current, and stays current.
int Table() {
  EXPECT(cudaSetDevice((rank + 1) % world) == cudaSuccess);
  offload_comm_t table = MakeTable();
  ExpectDevice((rank + 1) % world);
  CheckReductions(table);
  EXPECT(table.exchange_on_host == 0);
  CheckExchange(table, DeviceMemory());
  CheckBarrier(table, &shared->barrier_counter);
  ExpectDevice((rank + 1) % world);
  EXPECT(offload_nccl_destroy(&table) == OFFLOAD_OK);
  ExpectDevice((rank + 1) % world);
  return 0;
}

Setting OnDevice(int device, double fraction) {
  Setting setting;
  setting.context.device_kind = OFFLOAD_DEVICE_CUDA;
  setting.context.device_index = device;
  setting.optimizer = {fraction, 1024, 2};
  return setting;
}

// The hashes of all ranks.
std::vector<uint64_t> Gather(uint64_t hash, const offload_comm_t& table) {
  shared->hashes[static_cast<size_t>(rank)] = hash;
  EXPECT(table.barrier(table.user, kLongNs) == OFFLOAD_OK);
  return {shared->hashes.begin(), shared->hashes.begin() + world};
}

int Step() {
  EXPECT(cudaSetDevice((rank + 1) % world) == cudaSuccess);
  for (uint64_t seed = 1; seed <= kAlgorithmValues.size(); ++seed) {
    const auto sharded =
        RandomSharded(AlgorithmOfSeed(seed), static_cast<uint32_t>(world), kSteps, seed);
    for (double fraction : {0.0, 0.4, 1.0}) {
      const Setting setting = OnDevice(rank, fraction);
      offload_comm_t table = MakeTable();
      const std::vector<uint64_t> hashes = Gather(TakeSteps(*sharded, setting, table), table);
      if (rank == 0) CheckHashes(*sharded, setting, seed, hashes);
      EXPECT(table.barrier(table.user, kLongNs) == OFFLOAD_OK);  // hashes have been read
      EXPECT(offload_nccl_destroy(&table) == OFFLOAD_OK);
      ExpectDevice((rank + 1) % world);
    }
  }
  if (rank == 0) std::printf("%d GPUs, and %d threads on one: the same hashes\n", world, world);
  return 0;
}

void HangForEver() {
  for (;;) pause();
}

void ExitEarly() { _exit(0); }

int Lose(void (*vanish)()) {
  offload_comm_t table = MakeTable();
  LoseRank1(OnDevice(rank, 0.4), table, vanish, "");
  double value = 1;
  EXPECT(table.sum(table.user, &value, 1, kLongNs) == OFFLOAD_COMM_FAILED);  // at once
  EXPECT(Says(offload_nccl_last_error(), "out of step for good"));
  EXPECT(offload_nccl_destroy(&table) == OFFLOAD_OK);
  std::printf("rank %d has destroyed all\n", rank);
  return 0;
}

int RunRank(const std::string& mode) {
  if (mode == "table") return Table();
  if (mode == "step") return Step();
  if (mode == "hang") return Lose(HangForEver);
  if (mode == "exit") return Lose(ExitEarly);
  std::fprintf(stderr, "usage: nccl_ranks table|step|hang|exit\n");
  return 2;
}

// --------------------------------------------------------------------------------- processes --

template <typename Work>
pid_t Start(Work work) {
  const pid_t child = fork();
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // no rank outlives the program
  const int status = work();
  std::fflush(stdout);
  _exit(status);
}

int StatusOf(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

// Runs in a process of its own, because CUDA does not survive fork.
int CountGpus() {
  return StatusOf(Start([] {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
  }));
}

// The test ignores the exit status of the rank that vanishes.
int RunRanks(const std::string& mode) {
  std::vector<pid_t> ranks;
  for (int each = 0; each < world; ++each) {
    ranks.push_back(Start([&] {
      rank = each;
      return RunRank(mode);
    }));
  }
  const bool one_vanishes = mode == "hang" || mode == "exit";
  int worst = 0;
  for (size_t each = 0; each < ranks.size(); ++each)
    if (!one_vanishes || each != 1) worst = std::max(worst, StatusOf(ranks[each]));
  if (one_vanishes) {
    kill(ranks[1], SIGKILL);
    StatusOf(ranks[1]);
  }
  return worst;
}

int Main(const std::string& mode) {
  world = std::min(CountGpus(), kRanksMax);
  if (world < 2) {
    std::printf("skipped: %d GPUs, expected at least 2\n", world);
    return 77;
  }
  void* const memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 1;
  shared = new (memory) Shared{};
  adaptor_error = offload_nccl_last_error;
  end_all_ranks = [] { kill(0, SIGKILL); };  // the group: this program starts one
  setpgid(0, 0);
  alarm(200);
  const int status = RunRanks(mode);
  if (status == 0) std::printf("%s: %d ranks passed\n", mode.c_str(), world);
  return status;
}

}  // namespace
}  // namespace hybridopt

int main(int argc, char** argv) { return hybridopt::Main(argc == 2 ? argv[1] : ""); }
