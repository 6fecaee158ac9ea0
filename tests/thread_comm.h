// ThreadComm: ranks that are threads of this process, behind the comm table of offload.h. A call
// ends when all ranks have made it; values are combined in rank order. An exchange ends when its
// messages have been copied, in host memory, or between simulated devices. A rank can be made to
// die, to hang or to fail in a call, and a call can be lost or come late.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <list>
#include <mutex>
#include <vector>

#include "offload.h"

namespace hybridopt {

class ThreadComm {
 public:
  enum class Fault {
    kNone,
    kDie,   // from this call on the rank is gone, and the others get an error at once
    kHang,  // this call returns only after Release(), and the others hear nothing
    kFail,  // this call and later ones give the rank a status, and the others hear nothing
    kLose,  // this call times out, and the others hear nothing of it
    kDelay  // this call begins after half of its timeout
  };

  explicit ThreadComm(int32_t world) {
    for (int32_t rank = 0; rank < world; ++rank) {
      members_.emplace_back();
      members_.back().comm = this;
      members_.back().rank = rank;
    }
  }
  ThreadComm(const ThreadComm&) = delete;
  ThreadComm& operator=(const ThreadComm&) = delete;

  offload_comm_t Table(int32_t rank) {
    offload_comm_t table{};
    table.struct_size = sizeof(table);
    table.rank = rank;
    table.world = static_cast<int32_t>(members_.size());
    table.user = &members_[static_cast<size_t>(rank)];
    table.sum = [](void* user, double* values, uint32_t count, int64_t timeout_ns) {
      return Meet(user, 's', values, count, timeout_ns);
    };
    table.max = [](void* user, int32_t* values, uint32_t count, int64_t timeout_ns) {
      return Meet(user, 'm', values, count, timeout_ns);
    };
    table.barrier = [](void* user, int64_t timeout_ns) {
      return Meet(user, 'b', static_cast<double*>(nullptr), 0, timeout_ns);
    };
    table.exchange = Exchange;
    table.exchange_on_host = members_[static_cast<size_t>(rank)].device == nullptr ? 1 : 0;
    return table;
  }

  // The messages of the rank's exchanges are in memory of this context's simulated device. To be
  // called before Table.
  void ExchangeOnDevice(int32_t rank, offload_context_t device) {
    members_[static_cast<size_t>(rank)].device = device;
  }

  // Concerns calls that have not begun. `call` counts the rank's calls from 0.
  void Inject(int32_t rank, uint64_t call, Fault fault, int32_t status = OFFLOAD_COMM_FAILED) {
    std::lock_guard lock(mutex_);
    Member& member = members_[static_cast<size_t>(rank)];
    member.fault = fault;
    member.fault_call = call;
    member.fault_status = status;
  }

  // Lets the calls that hang return, with this status.
  void Release(int32_t status = OFFLOAD_TIMED_OUT) {
    std::lock_guard lock(mutex_);
    released_ = true;
    released_status_ = status;
    changed_.notify_all();
  }
  // A call that hangs returns by itself after this time. To be called while no call runs.
  void ReleaseAfter(std::chrono::nanoseconds time) { hang_ = time; }

  uint64_t calls(int32_t rank) const {
    std::lock_guard lock(mutex_);
    return members_[static_cast<size_t>(rank)].calls;
  }

  // The values of all ranks in the last sum, in rank order.
  std::vector<double> summands() const {
    std::lock_guard lock(mutex_);
    std::vector<double> summands;
    for (const Member& member : members_) summands.push_back(member.summand);
    return summands;
  }

 private:
  struct Member {
    ThreadComm* comm = nullptr;
    int32_t rank = 0;
    offload_context_t device = nullptr;
    uint64_t calls = 0;
    Fault fault = Fault::kNone;
    uint64_t fault_call = 0;
    int32_t fault_status = 0;
    std::vector<double> values;  // an int32_t fits a double
    double summand = 0;
  };

  template <typename T>
  static int32_t Meet(void* user, char kind, T* values, uint32_t count, int64_t timeout_ns) {
    Member& member = *static_cast<Member*>(user);
    ThreadComm& comm = *member.comm;
    std::unique_lock lock(comm.mutex_);
    if (comm.IsFaulty(member)) {
      if (member.fault != Fault::kDelay) return comm.Misbehave(member, timeout_ns, lock);
      comm.changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns / 2), [] { return false; });
    }
    member.values.assign(values, values + count);
    if (kind == 's' && count > 0) member.summand = member.values[0];
    if (const int32_t status = comm.Gather(kind, timeout_ns, lock); status != OFFLOAD_OK)
      return status;
    // No later call can have overwritten it, because this rank has not made a later call yet.
    std::transform(comm.result_.begin(), comm.result_.end(), values,
                   [](double value) { return static_cast<T>(value); });
    return OFFLOAD_OK;
  }

  // One side of a message.
  struct Side {
    int32_t from, to;
    bool sends;
    void* data;
    uint64_t bytes;
    int32_t status = kWaits;

    bool Matches(const Side& other) const {
      return from == other.from && to == other.to && sends != other.sends && other.status == kWaits;
    }
  };
  static constexpr int32_t kWaits = -1;

  static int32_t Exchange(void* user, const offload_message_t* messages, uint32_t count,
                          offload_stream_t stream, int64_t timeout_ns) {
    Member& member = *static_cast<Member*>(user);
    std::list<Side> sides;
    for (uint32_t i = 0; i < count; ++i) {
      const offload_message_t& message = messages[i];
      const int32_t ends[] = {member.rank, message.rank};
      const bool sends = message.sends != 0;
      sides.push_back(
          {ends[sends ? 0 : 1], ends[sends ? 1 : 0], sends, message.data, message.bytes});
      if (member.device != nullptr && offload_device_map(member.device, message.data, message.bytes,
                                                         &sides.back().data) != OFFLOAD_OK)
        return OFFLOAD_INTERNAL;
    }
    if (member.device != nullptr)
      if (const int32_t status = offload_stream_synchronize(member.device, stream, timeout_ns);
          status != OFFLOAD_OK)
        return status;
    return member.comm->ExchangeSides(member, sides, timeout_ns);
  }

  int32_t ExchangeSides(Member& member, std::list<Side>& sides, int64_t timeout_ns) {
    std::unique_lock lock(mutex_);
    if (IsFaulty(member)) {
      if (member.fault != Fault::kDelay) return Misbehave(member, timeout_ns, lock);
      changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns / 2), [] { return false; });
    }
    for (Side& side : sides) Copy(side);
    const auto all_done = [&] {
      return std::none_of(sides.begin(), sides.end(),
                          [](const Side& side) { return side.status == kWaits; });
    };
    (void)changed_.wait_for(lock, std::chrono::nanoseconds(std::min(timeout_ns, kYearsNs)),
                            [&] { return all_done() || dead_; });
    for (Side& side : sides) waiting_.remove(&side);  // nobody touches their memory any more
    if (!all_done()) return dead_ ? OFFLOAD_COMM_FAILED : OFFLOAD_TIMED_OUT;
    int32_t status = OFFLOAD_OK;
    for (const Side& side : sides) status = std::max(status, side.status);
    return status;
  }

  // Copies the message if the other side is there; else leaves it for that.
  void Copy(Side& side) {
    const auto other = std::find_if(waiting_.begin(), waiting_.end(),
                                    [&](const Side* each) { return side.Matches(*each); });
    if (other == waiting_.end()) return waiting_.push_back(&side);
    const Side& from = side.sends ? side : **other;
    const Side& to = side.sends ? **other : side;
    const bool fits = from.bytes == to.bytes;
    if (fits) std::memcpy(to.data, from.data, to.bytes);
    side.status = (*other)->status = fits ? OFFLOAD_OK : OFFLOAD_INTERNAL;  // ranks out of step
    changed_.notify_all();
  }

  // Counts the call.
  static bool IsFaulty(Member& member) {
    const uint64_t call = member.calls++;
    if (member.fault == Fault::kNone || call < member.fault_call) return false;
    const bool once = member.fault == Fault::kLose || member.fault == Fault::kDelay;
    return !once || call == member.fault_call;
  }

  int32_t Misbehave(Member& member, int64_t timeout_ns, std::unique_lock<std::mutex>& lock) {
    if (member.fault == Fault::kHang) {
      changed_.wait_for(lock, hang_, [&] { return released_; });
      return released_status_;
    }
    if (member.fault == Fault::kLose) {
      changed_.wait_for(lock, std::chrono::nanoseconds(timeout_ns), [] { return false; });
      return OFFLOAD_TIMED_OUT;
    }
    if (member.fault == Fault::kDie) {
      dead_ = true;
      changed_.notify_all();
    }
    return member.fault_status;
  }

  int32_t Gather(char kind, int64_t timeout_ns, std::unique_lock<std::mutex>& lock) {
    const std::chrono::nanoseconds timeout(std::min(timeout_ns, kYearsNs));
    if (dead_) return OFFLOAD_COMM_FAILED;
    if (arrived_ > 0 && kind != kind_) return OFFLOAD_INTERNAL;  // ranks out of step
    kind_ = kind;
    const uint64_t meeting = meetings_;
    if (++arrived_ == members_.size()) {
      Combine();
      arrived_ = 0;
      meetings_ += 1;
      changed_.notify_all();
      return OFFLOAD_OK;
    }
    const bool told =
        changed_.wait_for(lock, timeout, [&] { return meetings_ != meeting || dead_; });
    if (meetings_ != meeting) return OFFLOAD_OK;
    arrived_ -= 1;  // a later call must not take these values for its own
    return told ? OFFLOAD_COMM_FAILED : OFFLOAD_TIMED_OUT;
  }

  void Combine() {
    result_ = members_[0].values;
    for (size_t rank = 1; rank < members_.size(); ++rank) {
      const std::vector<double>& values = members_[rank].values;
      for (size_t i = 0; i < result_.size(); ++i)
        result_[i] = kind_ == 's' ? result_[i] + values[i] : std::max(result_[i], values[i]);
    }
  }

  static constexpr int64_t kYearsNs = int64_t{1} << 59;  // the clock can still add this

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Member> members_;
  char kind_ = 0;
  size_t arrived_ = 0;
  uint64_t meetings_ = 0;
  std::vector<double> result_;
  std::list<Side*> waiting_;  // in the order of their calls
  bool dead_ = false;
  std::chrono::nanoseconds hang_{kYearsNs};
  bool released_ = false;
  int32_t released_status_ = OFFLOAD_TIMED_OUT;
};

}  // namespace hybridopt
