// Exchange: brings the parts of a matrix together on its home, and takes them back from there.
//
//   gather, on the home                       scatter, on the home
//     other ranks  -> messages                  whole    -> messages, rows by rows
//     messages     -> whole, rows by rows       messages -> other ranks
//     own part     -> whole                     whole    -> own part
//
// A part is contiguous, so only the home cuts and joins; the others send from their part and
// receive into it. If the comm's exchange works on host memory and the device has memory of its
// own, every message is copied through a second buffer, on the host.
//
// Every call returns when its work is done, so no call finds work of an earlier one. No call
// allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "base/function_ref.h"
#include "comm/comm.h"
#include "exchange/cut_matrix.h"
#include "machine/context.h"
#include "machine/pinned_room.h"

namespace hybridopt {

// The options, and what they point to.
struct ExchangeInput {
  offload_exchange_options_t options;
  offload_comm_t comm;
  std::vector<MatrixInput> matrices;
};

class Exchange {
 public:
  static Result<offload_exchange_plan_t> Plan(const Context& context, const ExchangeInput& input);
  static Result<std::shared_ptr<Exchange>> Create(std::shared_ptr<Context> context,
                                                  const ExchangeInput& input);
  ~Exchange();

  // See offload.h.
  Result<int32_t> Home(uint32_t matrix) const;
  Status Gather(uint32_t matrix, int32_t dtype, const void* part, void* whole, StreamHandle stream);
  Status Scatter(uint32_t matrix, int32_t dtype, const void* whole, void* part,
                 StreamHandle stream);

  // Fails if a stream may still use the messages' memory: it is then never freed.
  Status Close() { return stuck_; }

 private:
  // The arguments of one call.
  struct Call {
    const CutMatrix& matrix;
    uint64_t element_bytes;
    std::byte* part;
    std::byte* whole;
    StreamHandle stream;

    uint64_t part_bytes(int32_t rank) const { return matrix.of(rank).range_count * element_bytes; }
  };
  enum class Into { kWhole, kPart };
  enum class Direction { kSend, kReceive };

  Exchange(std::shared_ptr<Context> context, const ExchangeInput& input);
  Status Prepare(const ExchangeInput& input);
  Status TellParts(const Status& prepared);

  Result<Call> Check(uint32_t matrix, int32_t dtype, const void* part, const void* whole,
                     StreamHandle stream) const;
  Status ReceiveParts(const Call& call);
  Status SendParts(const Call& call);
  Status SendToHome(const Call& call);
  Status ReceiveFromHome(const Call& call);
  void AddMessage(int32_t rank, Direction direction, std::byte* data, uint64_t bytes);
  Status Transfer(StreamHandle stream);
  Status ForEachSender(const Call& call,
                       FunctionRef<Status(int32_t sender, uint64_t offset)> visit) const;
  Status CopyPart(const Call& call, int32_t rank, std::byte* part, Into into);
  Status Synchronize(StreamHandle stream);
  Status End(const Call& call, Status status);

  Device& device() const { return context_->device(); }
  int32_t own() const { return comm_.rank(); }
  // Where a home's messages are.
  std::byte* data() const { return through_host_ ? host_.data() : device_data_; }

  const std::shared_ptr<Context> context_;
  const Comm comm_;
  const bool on_host_;       // the comm's exchange works on host memory
  const bool through_host_;  // and the device has memory of its own
  std::vector<CutMatrix> matrices_;
  std::vector<offload_message_t> messages_;  // of the call that runs
  std::byte* device_data_ = nullptr;
  PinnedRoom host_;
  Status failure_;  // of a call: the ranks are out of step
  Status stuck_;
};

}  // namespace hybridopt
