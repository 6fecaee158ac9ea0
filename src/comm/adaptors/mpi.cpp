// The comm table over MPI, in a small library of its own: no other part of the project uses MPI.
//
// Every call is a non-blocking one that is polled until the timeout, because MPI's blocking calls
// have none.
#include <offload_mpi.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "comm/adaptors/ranks.h"

namespace hybridopt::adaptor {
namespace {

int32_t FailMpi(const char* call, int error) {
  char text[MPI_MAX_ERROR_STRING] = "unknown error";
  int length = 0;
  (void)MPI_Error_string(error, text, &length);
  return Fail(OFFLOAD_COMM_FAILED, "%s: %s", call, text);
}

class MpiRanks final : public Ranks {
 public:
  MpiRanks(int32_t rank, int32_t world)
      : Ranks(rank, world, Memory::kHost), buffer_(BufferBytes()) {}

  // On an error there is no communicator to free.
  int32_t Initialize(MPI_Comm communicator) {
    if (int error = MPI_Comm_dup(communicator, &communicator_); error != MPI_SUCCESS)
      return FailMpi("MPI_Comm_dup", error);
    (void)MPI_Comm_set_errhandler(communicator_, MPI_ERRORS_RETURN);
    return OFFLOAD_OK;
  }

  int32_t Free() {
    const int error = MPI_Comm_free(&communicator_);
    return error == MPI_SUCCESS ? int32_t{OFFLOAD_OK} : FailMpi("MPI_Comm_free", error);
  }

 private:
  std::byte* buffer() override { return buffer_.data(); }

  int32_t Gather(size_t bytes, Clock::time_point deadline) override {
    MPI_Request request = MPI_REQUEST_NULL;
    int error = MPI_Iallgather(buffer(), static_cast<int>(bytes), MPI_BYTE, AllOf(buffer()),
                               static_cast<int>(bytes), MPI_BYTE, communicator_, &request);
    if (error != MPI_SUCCESS) return FailMpi("MPI_Iallgather", error);
    Poll poll(deadline);
    for (;;) {
      int done = 0;
      error = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (error != MPI_SUCCESS) return FailMpi("MPI_Test", error);
      if (done != 0) return OFFLOAD_OK;
      if (!poll.Again()) return TimedOut("MPI_Iallgather");
    }
  }

  int32_t Carry(const offload_message_t* messages, uint32_t count, void*,
                Clock::time_point deadline) override {
    size_t bytes = 0;
    for (uint32_t i = 0; i < count; ++i) bytes += MessageAt(messages, i).bytes;
    if (carried_.size() < bytes) carried_ = std::vector<std::byte>(bytes);
    requests_.clear();
    expected_.clear();
    std::byte* next = carried_.data();
    for (uint32_t i = 0; i < count; ++i) {
      const offload_message_t& message = MessageAt(messages, i);
      if (message.sends != 0) std::memcpy(next, message.data, message.bytes);
      if (int32_t status = Start(message, next); status != OFFLOAD_OK) return status;
      next += message.bytes;
    }
    if (int32_t status = AwaitRequests(deadline); status != OFFLOAD_OK) return status;
    next = carried_.data();
    for (uint32_t i = 0; i < count; ++i) {
      const offload_message_t& message = MessageAt(messages, i);
      if (message.sends == 0) std::memcpy(message.data, next, message.bytes);
      next += message.bytes;
    }
    return OFFLOAD_OK;
  }

  // In pieces, because MPI counts bytes with an int. The messages of two ranks arrive in order.
  int32_t Start(const offload_message_t& message, std::byte* data) {
    constexpr uint64_t kPieceBytes = uint64_t{1} << 30;
    for (uint64_t begin = 0; begin < message.bytes; begin += kPieceBytes) {
      const int bytes = static_cast<int>(std::min(kPieceBytes, message.bytes - begin));
      MPI_Request request = MPI_REQUEST_NULL;
      const int error =
          message.sends != 0
              ? MPI_Isend(data + begin, bytes, MPI_BYTE, message.rank, 0, communicator_, &request)
              : MPI_Irecv(data + begin, bytes, MPI_BYTE, message.rank, 0, communicator_, &request);
      if (error != MPI_SUCCESS)
        return FailMpi(message.sends != 0 ? "MPI_Isend" : "MPI_Irecv", error);
      requests_.push_back(request);
      expected_.push_back(message.sends != 0 ? -1 : bytes);
    }
    return OFFLOAD_OK;
  }

  int32_t AwaitRequests(Clock::time_point deadline) {
    std::vector<MPI_Status> statuses(requests_.size());
    Poll poll(deadline);
    for (int done = 0; done == 0;) {
      const int error =
          MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, statuses.data());
      if (error != MPI_SUCCESS) return FailMpi("MPI_Testall", error);
      if (done == 0 && !poll.Again()) return TimedOut("MPI_Isend and MPI_Irecv");
    }
    return CheckBytes(statuses);
  }

  // MPI lets a message be shorter than the receiver expects.
  int32_t CheckBytes(const std::vector<MPI_Status>& statuses) {
    for (size_t i = 0; i < statuses.size(); ++i) {
      int bytes = 0;
      if (expected_[i] < 0) continue;
      (void)MPI_Get_count(&statuses[i], MPI_BYTE, &bytes);
      if (bytes != expected_[i])
        return Fail(OFFLOAD_COMM_FAILED,
                    "rank %d has sent %d bytes to rank %d, which expects %d; all ranks must gather "
                    "and scatter the same matrices, with the same dtypes, in the same order",
                    statuses[i].MPI_SOURCE, bytes, rank(), expected_[i]);
    }
    return OFFLOAD_OK;
  }

  MPI_Comm communicator_ = MPI_COMM_NULL;
  // MPI may use these until a call ends, which may be never.
  std::vector<std::byte> buffer_;
  std::vector<std::byte> carried_;  // copies of an exchange's messages
  std::vector<MPI_Request> requests_;
  std::vector<int> expected_;  // bytes of each request; -1: it sends
};

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
}  // namespace hybridopt::adaptor

using hybridopt::adaptor::Fail;
using hybridopt::adaptor::LastError;
using hybridopt::adaptor::MpiRanks;
using hybridopt::adaptor::Ranks;

int32_t offload_mpi_create(MPI_Comm communicator, offload_comm_t* table) try {
  if (table == nullptr)
    return Fail(OFFLOAD_INVALID_ARGUMENT, "table is NULL, expected where to write it");
  if (int32_t status = hybridopt::adaptor::CheckMpi(); status != OFFLOAD_OK) return status;
  if (int32_t status = hybridopt::adaptor::CheckCommunicator(communicator); status != OFFLOAD_OK)
    return status;
  int rank = 0, world = 1;
  (void)MPI_Comm_rank(communicator, &rank);
  (void)MPI_Comm_size(communicator, &world);
  auto ranks = std::make_unique<MpiRanks>(rank, world);
  if (int32_t status = ranks->Initialize(communicator); status != OFFLOAD_OK) return status;
  *table = ranks.release()->Table();
  return OFFLOAD_OK;
} catch (const std::bad_alloc&) {
  return Fail(OFFLOAD_OUT_OF_HOST_MEMORY, "no memory for the table's buffers");
}

int32_t offload_mpi_destroy(offload_comm_t* table) {
  auto* const ranks = static_cast<MpiRanks*>(Ranks::Of(table, "offload_mpi_create"));
  if (ranks == nullptr) return OFFLOAD_INVALID_ARGUMENT;
  *table = {};
  // A gather that has not ended may still write to the buffer, and MPI_Comm_free would wait for the
  // other ranks.
  if (ranks->failed()) return OFFLOAD_OK;
  const int32_t status = ranks->Free();
  delete ranks;
  return status;
}

const char* offload_mpi_last_error(void) { return LastError(); }
