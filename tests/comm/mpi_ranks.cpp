// The program that mpi_test.sh runs under mpirun, one mode in each run: the table itself, whole
// steps over it, matrices that ranks cut, refused calls, and ranks that exit or hang. Its exit
// status is 0 if all results are right.
#include <offload_mpi.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "../differential/cut_matrices.h"
#include "ranks.h"

namespace hybridopt {
namespace {

void Init() {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
  EXPECT(provided == MPI_THREAD_MULTIPLE);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &world);
}

int* NewSharedCounter(MPI_Win* window) {
  int* counter = nullptr;
  MPI_Win_allocate_shared(rank == 0 ? sizeof(int) : 0, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &counter,
                          window);
  MPI_Aint bytes = 0;
  int unit = 0;
  MPI_Win_shared_query(*window, 0, &bytes, &unit, &counter);
  if (rank == 0) *counter = 0;
  MPI_Barrier(MPI_COMM_WORLD);
  return counter;
}

offload_comm_t MakeTable() {
  offload_comm_t table{};
  EXPECT(offload_mpi_create(MPI_COMM_WORLD, &table) == OFFLOAD_OK);
  EXPECT(table.rank == rank && table.world == world && table.struct_size == sizeof(table));
  return table;
}

// --------------------------------------------------------------------------------------- table --

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
  CheckReductions(table);
  EXPECT(table.exchange_on_host == 1);
  for (int round = 0; round < 3; ++round) CheckExchange(table, HostMemory());
  MPI_Win window;
  CheckBarrier(table, NewSharedCounter(&window));
  MPI_Win_free(&window);
  // Two threads use two tables at the same time: messages of one never reach the other.
  offload_comm_t other = MakeTable();
  std::thread thread([&] {
    for (uint64_t seed = 0; seed < 50; ++seed) CheckSums(other, 5, seed);
  });
  for (uint64_t seed = 50; seed < 100; ++seed) CheckSums(table, 5, seed);
  thread.join();
  EXPECT(offload_mpi_destroy(&other) == OFFLOAD_OK);
  EXPECT(offload_mpi_destroy(&other) == OFFLOAD_INVALID_ARGUMENT);  // it has been destroyed
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

std::vector<Setting> Settings() {
  Setting host, sim;
  host.context.threads = sim.context.threads = 1;
  sim.context.device_kind = OFFLOAD_DEVICE_SIM;
  sim.optimizer = {0.4, 1024, 2};
  return {host, sim};
}

int Step() {
  Init();
  for (uint64_t seed = 1; seed <= kAlgorithmValues.size(); ++seed) {
    const auto sharded =
        RandomSharded(AlgorithmOfSeed(seed), static_cast<uint32_t>(world), kSteps, seed);
    for (const Setting& setting : Settings()) {
      offload_comm_t table = MakeTable();
      const uint64_t hash = TakeSteps(*sharded, setting, table);
      EXPECT(offload_mpi_destroy(&table) == OFFLOAD_OK);
      std::vector<uint64_t> hashes(static_cast<size_t>(world));
      MPI_Gather(&hash, 1, MPI_UINT64_T, hashes.data(), 1, MPI_UINT64_T, 0, MPI_COMM_WORLD);
      if (rank != 0) continue;
      CheckHashes(*sharded, setting, seed, hashes);
    }
  }
  if (rank == 0) std::printf("%d processes and %d threads: the same hashes\n", world, world);
  MPI_Finalize();
  return 0;
}

// ------------------------------------------------------------------------------------ exchange --

// A message that is shorter, or longer, than its receiver expects.
void CheckLengths() {
  for (const uint64_t sent : {uint64_t{4}, uint64_t{12}}) {
    offload_comm_t table = MakeTable();
    char data[12] = {};
    auto message = Make<offload_message_t>();
    message.rank = 1 - rank;
    message.sends = rank == 0 ? 1 : 0;
    message.data = data;
    message.bytes = rank == 0 ? sent : 8;
    if (rank < 2) {
      const int32_t status = table.exchange(table.user, &message, 1, nullptr, kLongNs);
      EXPECT(status == (rank == 0 ? OFFLOAD_OK : OFFLOAD_COMM_FAILED));
      if (rank == 1 && sent == 4)
        EXPECT(
            Says(offload_mpi_last_error(), "rank 0 has sent 4 bytes to rank 1, which expects 8"));
    }
    // Rank 1 cannot free its table together with the others, so the process keeps all of them.
    MPI_Barrier(MPI_COMM_WORLD);
  }
}

// Matrices cut by rows, trained over two tables: the bits of a run with the whole ones.
int Exchange() {
  Init();
  CutProblem problem;
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{40, 24}, {16, 50}, {5, 9, 14}}) {
    CutTensor tensor{
        "matrix " + std::to_string(problem.tensors.size()), shape, OFFLOAD_BF16, OFFLOAD_FP32, {}};
    for (int64_t of = 0; of < world; ++of) {
      Piece piece;
      piece.shape = piece.extents = shape;
      piece.offsets.resize(shape.size());
      piece.offsets[0] = shape[0] * of / world;
      piece.extents[0] = shape[0] * (of + 1) / world - piece.offsets[0];
      piece.box_count = 1;
      piece.count = ElementsOf(piece.extents);
      tensor.pieces.push_back(piece);
    }
    problem.tensors.push_back(tensor);
  }
  const auto expected = TrainWhole(problem, kSteps, {});
  for (const Setting& setting : Settings()) {
    offload_comm_t exchanges = MakeTable(), steps = MakeTable();
    {
      CutRank own(problem, rank, setting.context);
      own.Open(exchanges, steps);
      for (size_t step = 0; step < kSteps; ++step) {
        own.Step(step);
        const std::string difference = own.Difference(expected[step + 1]);
        if (!difference.empty()) std::fprintf(stderr, "%s\n", difference.c_str());
        EXPECT(difference.empty());
      }
    }
    EXPECT(offload_mpi_destroy(&exchanges) == OFFLOAD_OK);
    EXPECT(offload_mpi_destroy(&steps) == OFFLOAD_OK);
  }
  if (world > 1) CheckLengths();
  MPI_Finalize();
  return 0;
}

// --------------------------------------------------------------------------------- bad endings --

void HangForEver() {
  for (;;) pause();
}

void ExitEarly() { _exit(5); }

// Rank 1, which is lost, sends nothing.
void MissMessage(const offload_comm_t& table, bool it_hangs) {
  auto message = Make<offload_message_t>();
  message.rank = 1;
  message.data = &message.bytes;
  message.bytes = sizeof(message.bytes);
  const int32_t status = table.exchange(table.user, &message, 1, nullptr, 100'000'000);
  EXPECT(status == OFFLOAD_TIMED_OUT || (!it_hangs && status == OFFLOAD_COMM_FAILED));
  if (it_hangs) EXPECT(Says(offload_mpi_last_error(), "MPI_Isend and MPI_Irecv, rank "));
  EXPECT(table.exchange(table.user, &message, 1, nullptr, kLongNs) == OFFLOAD_COMM_FAILED);
  EXPECT(Says(offload_mpi_last_error(), "out of step for good"));
}

// Rank 1 makes one step with the others and then stops; `vanish` is the way in which it stops.
int Lose(void (*vanish)()) {
  Init();
  offload_comm_t messages = MakeTable();
  offload_comm_t table = MakeTable();
  // MPI itself may notice an exit, but not a rank that hangs.
  LoseRank1(Settings()[1], table, vanish,
            vanish == HangForEver ? "did not answer within 5.0 s (options.comm_timeout_ns)" : "");
  double value = 1;
  EXPECT(table.sum(table.user, &value, 1, kLongNs) == OFFLOAD_COMM_FAILED);  // at once
  EXPECT(Says(offload_mpi_last_error(), "an earlier call failed"));
  EXPECT(offload_mpi_destroy(&table) == OFFLOAD_OK);
  MissMessage(messages, vanish == HangForEver);
  EXPECT(offload_mpi_destroy(&messages) == OFFLOAD_OK);
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
  hybridopt::adaptor_error = offload_mpi_last_error;
  hybridopt::end_all_ranks = [] { MPI_Abort(MPI_COMM_WORLD, 1); };
  const std::string mode = argc == 2 ? argv[1] : "";
  if (mode == "table") return hybridopt::Table();
  if (mode == "state") return hybridopt::State();
  if (mode == "step") return hybridopt::Step();
  if (mode == "exchange") return hybridopt::Exchange();
  if (mode == "hang") return hybridopt::Lose(hybridopt::HangForEver);
  if (mode == "exit") return hybridopt::Lose(hybridopt::ExitEarly);
  std::fprintf(stderr, "usage: mpi_ranks table|state|step|exchange|hang|exit\n");
  return 2;
}
