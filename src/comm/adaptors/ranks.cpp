#include "comm/adaptors/ranks.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <thread>

#include "runtime/thread_text.h"

namespace hybridopt::adaptor {
namespace {

constexpr size_t kTextBytes = 512;
std::mutex last_error_mutex;
char last_error[kTextBytes];  // guarded by last_error_mutex
ThreadText told;              // what LastError() returned to each thread

}  // namespace

int32_t Fail(int32_t code, const char* format, ...) {
  std::lock_guard lock(last_error_mutex);
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(last_error, kTextBytes, format, arguments);
  va_end(arguments);
  return code;
}

const char* LastError() {
  std::lock_guard lock(last_error_mutex);
  told.Set(last_error);
  return told.text();
}

Clock::time_point DeadlineAfter(int64_t timeout_ns) {
  constexpr int64_t kYearsNs = int64_t{1} << 59;  // the clock can still add this
  return Clock::now() + std::chrono::nanoseconds(std::clamp<int64_t>(timeout_ns, 0, kYearsNs));
}

// Usually all ranks arrive within microseconds, so the first polls follow each other closely. Later
// polls pause, to leave the core to a rank that still has work to do.
bool Poll::Again() {
  if (Clock::now() >= deadline_) return false;
  if (pauses_++ < 1000) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

offload_comm_t Ranks::Table() {
  offload_comm_t table{};
  table.struct_size = sizeof(table);
  table.rank = rank_;
  table.world = world_;
  table.user = this;
  table.sum = Sum;
  table.max = Max;
  table.barrier = Barrier;
  table.exchange = Exchange;
  table.exchange_on_host = messages_ == Memory::kHost ? 1 : 0;
  return table;
}

Ranks* Ranks::Of(const offload_comm_t* table, const char* create) {
  if (table != nullptr && table->sum == Sum && table->user != nullptr)
    return static_cast<Ranks*>(table->user);
  Fail(OFFLOAD_INVALID_ARGUMENT, "table is %s, expected one of %s that has not been destroyed",
       table == nullptr ? "NULL" : "not such a one", create);
  return nullptr;
}

int32_t Ranks::TimedOut(const char* call) const {
  return Fail(OFFLOAD_TIMED_OUT, "%s, rank %d of %d: not all ranks came in time", call, rank_,
              world_);
}

const offload_message_t& Ranks::MessageAt(const offload_message_t* messages, uint32_t i) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(messages);
  return *reinterpret_cast<const offload_message_t*>(bytes + size_t{messages->struct_size} * i);
}

// Combines each of the values over all ranks, in place, in rank order.
template <typename T, typename Combine>
int32_t Ranks::Reduce(T* values, uint32_t count, int64_t timeout_ns, Combine combine) {
  if (failed_) return OutOfStep();
  const Clock::time_point deadline = DeadlineAfter(timeout_ns);
  for (uint32_t begin = 0; begin < count; begin += kValuesAtOnce) {
    const uint32_t portion = std::min(count - begin, kValuesAtOnce);
    std::copy_n(values + begin, portion, reinterpret_cast<T*>(buffer()));
    const int32_t status = Gather(portion * sizeof(T), deadline);
    failed_ = status != OFFLOAD_OK;
    if (failed_) return status;
    const T* const all = reinterpret_cast<const T*>(AllOf(buffer()));
    for (uint32_t i = 0; i < portion; ++i) {
      values[begin + i] = all[i];
      for (int rank = 1; rank < world_; ++rank)
        values[begin + i] =
            combine(values[begin + i], all[static_cast<uint32_t>(rank) * portion + i]);
    }
  }
  return OFFLOAD_OK;
}

int32_t Ranks::OutOfStep() {
  return Fail(OFFLOAD_COMM_FAILED, "an earlier call failed; its ranks are out of step for good");
}

int32_t Ranks::Exchange(void* user, const offload_message_t* messages, uint32_t count, void* stream,
                        int64_t timeout_ns) {
  auto& ranks = *static_cast<Ranks*>(user);
  if (ranks.failed_) return OutOfStep();
  ranks.failed_ = true;  // also if Carry throws
  const int32_t status = ranks.Carry(messages, count, stream, DeadlineAfter(timeout_ns));
  ranks.failed_ = status != OFFLOAD_OK;
  return status;
}

int32_t Ranks::Sum(void* user, double* values, uint32_t count, int64_t timeout_ns) {
  return static_cast<Ranks*>(user)->Reduce(values, count, timeout_ns,
                                           [](double a, double b) { return a + b; });
}

int32_t Ranks::Max(void* user, int32_t* values, uint32_t count, int64_t timeout_ns) {
  return static_cast<Ranks*>(user)->Reduce(values, count, timeout_ns,
                                           [](int32_t a, int32_t b) { return std::max(a, b); });
}

int32_t Ranks::Barrier(void* user, int64_t timeout_ns) {
  int32_t nothing = 0;
  return static_cast<Ranks*>(user)->Reduce(&nothing, 1, timeout_ns,
                                           [](int32_t a, int32_t) { return a; });
}

}  // namespace hybridopt::adaptor
