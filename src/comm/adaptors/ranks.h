// Ranks: what the comm tables over MPI and over NCCL share. An adaptor gathers the bytes of all
// ranks. Then each rank combines all values, in rank order, so that all ranks get the same bits. An
// adaptor also carries messages from rank to rank.
//
// Each adaptor is a library of its own and has its own copy of this code.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

#include "offload.h"

namespace hybridopt::adaptor {

// Stores the text for LastError() and returns the code.
[[gnu::format(printf, 2, 3)]] int32_t Fail(int32_t code, const char* format, ...);
// The text of this library's last Fail(), on any thread; "" if there was none. Valid until this
// thread calls LastError() again.
const char* LastError();

using Clock = std::chrono::steady_clock;
Clock::time_point DeadlineAfter(int64_t timeout_ns);

// The pauses of a polling loop.
class Poll {
 public:
  explicit Poll(Clock::time_point deadline) : deadline_(deadline) {}

  // False once the deadline has passed; otherwise true, after a pause.
  bool Again();

 private:
  const Clock::time_point deadline_;
  uint32_t pauses_ = 0;
};

// One thread at a time calls these, but not always the same one.
class Ranks {
 public:
  // Where messages are.
  enum class Memory { kHost, kDevice };

  Ranks(int32_t rank, int32_t world, Memory messages)
      : rank_(rank), world_(world), messages_(messages) {}
  virtual ~Ranks() = default;
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  // A table whose functions call this object.
  offload_comm_t Table();
  // The object behind a table of this library, or NULL after Fail(INVALID_ARGUMENT); `create` is
  // the function that makes such tables.
  static Ranks* Of(const offload_comm_t* table, const char* create);

  int32_t rank() const { return rank_; }
  int32_t world() const { return world_; }
  // A call has failed: the ranks are not synchronous any more, and all later calls fail at once.
  bool failed() const { return failed_; }

 protected:
  // How many values of each rank one gather has. Fixed, so that no call allocates.
  static constexpr uint32_t kValuesAtOnce = 64;
  static constexpr size_t kOwnBytes = kValuesAtOnce * sizeof(double);
  // The buffer has this rank's own bytes, and then, from AllOf() on, those of all ranks.
  size_t BufferBytes() const { return kOwnBytes * (1 + static_cast<size_t>(world_)); }
  static std::byte* AllOf(std::byte* buffer) { return buffer + kOwnBytes; }

  // A buffer in host memory of BufferBytes(), aligned for double.
  virtual std::byte* buffer() = 0;
  // Copies the first `bytes` of every rank's own part to AllOf(buffer()), in rank order.
  virtual int32_t Gather(size_t bytes, Clock::time_point deadline) = 0;
  // Sends and receives all messages; they are struct_size bytes apart (MessageAt).
  virtual int32_t Carry(const offload_message_t* messages, uint32_t count, void* stream,
                        Clock::time_point deadline) = 0;
  static const offload_message_t& MessageAt(const offload_message_t* messages, uint32_t i);

  int32_t TimedOut(const char* call) const;

 private:
  template <typename T, typename Combine>
  int32_t Reduce(T* values, uint32_t count, int64_t timeout_ns, Combine combine);

  static int32_t OutOfStep();
  static int32_t Sum(void* user, double* values, uint32_t count, int64_t timeout_ns);
  static int32_t Max(void* user, int32_t* values, uint32_t count, int64_t timeout_ns);
  static int32_t Barrier(void* user, int64_t timeout_ns);
  static int32_t Exchange(void* user, const offload_message_t* messages, uint32_t count,
                          void* stream, int64_t timeout_ns);

  const int32_t rank_;
  const int32_t world_;
  const Memory messages_;
  bool failed_ = false;
};

}  // namespace hybridopt::adaptor
