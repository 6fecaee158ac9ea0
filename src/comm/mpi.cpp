// The comm table over MPI, a small library of its own: nothing else of the project knows MPI.
//
// Every call is a non-blocking gather that is looked at until the timeout, for MPI's blocking calls
// have none; then each rank combines all values by itself, in rank order.
#include <offload_mpi.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace hybridopt {
namespace {

// -------------------------------------------------------------------------------------- errors --

constexpr size_t kTextBytes = 512;
std::mutex last_error_mutex;
char last_error[kTextBytes];  // guarded by last_error_mutex

[[gnu::format(printf, 2, 3)]] int32_t Fail(int32_t code, const char* format, ...) {
  std::lock_guard lock(last_error_mutex);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, kTextBytes, format, arguments);
  va_end(arguments);
  return code;
}

int32_t FailMpi(const char* call, int error) {
  char text[MPI_MAX_ERROR_STRING] = "unknown error";
  int length = 0;
  (void)MPI_Error_string(error, text, &length);
  return Fail(OFFLOAD_COMM_FAILED, "%s: %s", call, text);
}

// --------------------------------------------------------------------------------------- ranks --

// Calls come from one thread at a time: the library's thread of the optimizer.
class MpiRanks {
 public:
  // On an error there is nothing to free.
  int32_t Initialize(MPI_Comm communicator) {
    (void)MPI_Comm_rank(communicator, &rank_);
    (void)MPI_Comm_size(communicator, &world_);
    own_.resize(kValuesAtOnce * sizeof(double));
    all_.resize(own_.size() * static_cast<size_t>(world_));
    if (int error = MPI_Comm_dup(communicator, &communicator_); error != MPI_SUCCESS)
      return FailMpi("MPI_Comm_dup", error);
    (void)MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
    return OFFLOAD_OK;
  }

  int32_t Free() {
    const int error = MPI_Comm_free(&communicator_);
    return error == MPI_SUCCESS ? int32_t{OFFLOAD_OK} : FailMpi("MPI_Comm_free", error);
  }

  int32_t rank() const { return rank_; }
  int32_t world() const { return world_; }
  bool failed() const { return failed_; }

  // Combines each of the values over all ranks, in place, in rank order.
  template <typename T, typename Combine>
  int32_t Reduce(T* values, uint32_t count, int64_t timeout_ns, Combine combine) {
    // A gather that never ended may still be sending own_.
    if (failed_)
      return Fail(OFFLOAD_COMM_FAILED,
                  "an earlier call failed; its ranks are out of step for good");
    const auto deadline = DeadlineAfter(timeout_ns);
    for (uint32_t begin = 0; begin < count; begin += kValuesAtOnce) {
      const uint32_t portion = std::min(count - begin, kValuesAtOnce);
      std::copy_n(values + begin, portion, reinterpret_cast<T*>(own_.data()));
      if (int32_t status = Gather(portion * sizeof(T), deadline); status != OFFLOAD_OK)
        return status;
      const T* const all = reinterpret_cast<const T*>(all_.data());
      for (uint32_t i = 0; i < portion; ++i) {
        values[begin + i] = all[i];
        for (int rank = 1; rank < world_; ++rank)
          values[begin + i] =
              combine(values[begin + i], all[static_cast<uint32_t>(rank) * portion + i]);
      }
    }
    return OFFLOAD_OK;
  }

  int32_t Barrier(int64_t timeout_ns) {
    int32_t nothing = 0;
    return Reduce(&nothing, 1, timeout_ns, [](int32_t a, int32_t) { return a; });
  }

 private:
  using Clock = std::chrono::steady_clock;
  // What one gather carries of each rank. Fixed, so that no call allocates.
  static constexpr uint32_t kValuesAtOnce = 64;

  static Clock::time_point DeadlineAfter(int64_t timeout_ns) {
    constexpr int64_t kYearsNs = int64_t{1} << 59;  // far, but the clock can still count there
    return Clock::now() + std::chrono::nanoseconds(std::clamp<int64_t>(timeout_ns, 0, kYearsNs));
  }

  // Every rank's first `bytes` of own_ to all_.
  int32_t Gather(size_t bytes, Clock::time_point deadline) {
    failed_ = true;  // until it has succeeded
    MPI_Request request = MPI_REQUEST_NULL;
    int error = MPI_Iallgather(own_.data(), static_cast<int>(bytes), MPI_BYTE, all_.data(),
                               static_cast<int>(bytes), MPI_BYTE, communicator_, &request);
    if (error != MPI_SUCCESS) return FailMpi("MPI_Iallgather", error);
    for (uint32_t looks = 0;; ++looks) {
      int done = 0;
      error = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (error != MPI_SUCCESS) return FailMpi("MPI_Test", error);
      if (done != 0) break;
      if (Clock::now() >= deadline)
        return Fail(OFFLOAD_TIMED_OUT, "rank %d of %d: not all ranks came in time", rank_, world_);
      Pause(looks);
    }
    failed_ = false;
    return OFFLOAD_OK;
  }

  // Ranks come together within microseconds, or one has much left to do: then it gets the core.
  static void Pause(uint32_t looks) {
    if (looks < 1000) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
  }

  MPI_Comm communicator_ = MPI_COMM_NULL;
  int rank_ = 0;
  int world_ = 1;
  bool failed_ = false;
  std::vector<std::byte> own_;  // MPI may use these until a gather ends, and one may never end
  std::vector<std::byte> all_;
};

int32_t Sum(void* user, double* values, uint32_t count, int64_t timeout_ns) {
  return static_cast<MpiRanks*>(user)->Reduce(values, count, timeout_ns,
                                              [](double a, double b) { return a + b; });
}

int32_t Max(void* user, int32_t* values, uint32_t count, int64_t timeout_ns) {
  return static_cast<MpiRanks*>(user)->Reduce(values, count, timeout_ns,
                                              [](int32_t a, int32_t b) { return std::max(a, b); });
}

int32_t Barrier(void* user, int64_t timeout_ns) {
  return static_cast<MpiRanks*>(user)->Barrier(timeout_ns);
}

// -------------------------------------------------------------------------------------- checks --

int32_t CheckMpi() {
  int initialized = 0, finalized = 0, provided = MPI_THREAD_SINGLE;
  (void)MPI_Initialized(&initialized);
  (void)MPI_Finalized(&finalized);
  if (initialized == 0 || finalized != 0)
    return Fail(OFFLOAD_INVALID_STATE,
                "MPI is %s; call this between MPI_Init_thread and MPI_Finalize",
                finalized != 0 ? "finalized" : "not initialised");
  (void)MPI_Query_thread(&provided);
  if (provided != MPI_THREAD_MULTIPLE)
    return Fail(OFFLOAD_INVALID_STATE,
                "MPI gives thread level %d, expected MPI_THREAD_MULTIPLE (%d), for the library "
                "calls MPI from a thread of its own; ask MPI_Init_thread for it",
                provided, MPI_THREAD_MULTIPLE);
  return OFFLOAD_OK;
}

int32_t CheckCommunicator(MPI_Comm communicator) {
  if (communicator == MPI_COMM_NULL)
    return Fail(OFFLOAD_INVALID_ARGUMENT, "communicator is MPI_COMM_NULL, expected the ranks' own");
  int inter = 0;
  if (int error = MPI_Comm_test_inter(communicator, &inter); error != MPI_SUCCESS)
    return FailMpi("MPI_Comm_test_inter", error);
  if (inter != 0)
    return Fail(OFFLOAD_INVALID_ARGUMENT,
                "communicator is an inter-communicator; MPI_Intercomm_merge makes one that serves");
  return OFFLOAD_OK;
}

}  // namespace
}  // namespace hybridopt

using hybridopt::Fail;
using hybridopt::MpiRanks;

int32_t offload_mpi_create(MPI_Comm communicator, offload_comm_t* table) try {
  if (table == nullptr)
    return Fail(OFFLOAD_INVALID_ARGUMENT, "table is NULL, expected where to write it");
  if (int32_t status = hybridopt::CheckMpi(); status != OFFLOAD_OK) return status;
  if (int32_t status = hybridopt::CheckCommunicator(communicator); status != OFFLOAD_OK)
    return status;
  auto ranks = std::make_unique<MpiRanks>();
  if (int32_t status = ranks->Initialize(communicator); status != OFFLOAD_OK) return status;
  offload_comm_t made{};
  made.struct_size = sizeof(made);
  made.rank = ranks->rank();
  made.world = ranks->world();
  made.sum = hybridopt::Sum;
  made.max = hybridopt::Max;
  made.barrier = hybridopt::Barrier;
  made.user = ranks.release();
  *table = made;
  return OFFLOAD_OK;
} catch (const std::bad_alloc&) {
  return Fail(OFFLOAD_OUT_OF_HOST_MEMORY, "no memory for the table's buffers");
}

int32_t offload_mpi_destroy(offload_comm_t* table) {
  if (table == nullptr || table->sum != hybridopt::Sum || table->user == nullptr)
    return Fail(OFFLOAD_INVALID_ARGUMENT,
                "table is %s, expected one of offload_mpi_create that has not been destroyed",
                table == nullptr ? "NULL" : "not such a one");
  auto* const ranks = static_cast<MpiRanks*>(table->user);
  *table = {};
  // A gather that never ended may still write to the buffers, and freeing the communicator would
  // wait for its ranks.
  if (ranks->failed()) return OFFLOAD_OK;
  const int32_t status = ranks->Free();
  delete ranks;
  return status;
}

const char* offload_mpi_last_error(void) {
  thread_local char text[hybridopt::kTextBytes];
  std::lock_guard lock(hybridopt::last_error_mutex);
  std::copy_n(hybridopt::last_error, hybridopt::kTextBytes, text);
  return text;
}
