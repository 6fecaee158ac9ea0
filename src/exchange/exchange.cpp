#include "exchange/exchange.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace hybridopt {
namespace {

constexpr uint64_t kDefaultCommTimeoutNs = 600'000'000'000;

Status CheckOptions(const Context& context, const ExchangeInput& input) {
  const offload_exchange_options_t& options = input.options;
  if (options.matrices == nullptr || options.matrix_count == 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.matrices is %p and options.matrix_count %u, expected an array of "
                         "at least 1",
                         static_cast<const void*>(options.matrices), options.matrix_count);
  if (options.comm_timeout_ns > INT64_MAX)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.comm_timeout_ns is %llu, expected at most 2^63 - 1",
                         static_cast<unsigned long long>(options.comm_timeout_ns));
  if (options.comm == nullptr)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.comm is NULL, expected a table with all ranks");
  HYBRIDOPT_TRY(Comm::CheckExchange(input.comm));
  if (context.device().unified() && input.comm.exchange_on_host == 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "comm.exchange_on_host is 0, expected 1: the host device has no memory of "
                         "its own; give a table that works on host memory, as those of "
                         "offload_mpi.h do");
  return {};
}

// The bytes of a call's messages: on a home those of all ranks, elsewhere those of this rank.
uint64_t MessageBytes(const CutMatrix& matrix, int32_t rank, int32_t world) {
  const Shard& part = matrix.of(rank);
  const uint64_t elements = matrix.home == rank ? part.global_count() : part.range_count;
  return world == 1 ? 0 : elements * matrix.element_bytes_max();
}

offload_exchange_plan_t PlanOf(const Context& context, const ExchangeInput& input,
                               const std::vector<CutMatrix>& matrices) {
  const int32_t rank = input.comm.rank;
  offload_exchange_plan_t plan{};
  uint64_t on_home = 0, elsewhere = 0;
  for (const CutMatrix& matrix : matrices) {
    const bool home = matrix.home == rank;
    uint64_t& most = home ? on_home : elsewhere;
    most = std::max(most, MessageBytes(matrix, rank, input.comm.world));
    plan.home_count += home ? 1 : 0;
    plan.home_elements += home ? matrix.of(rank).global_count() : 0;
  }
  if (context.device().unified()) {
    plan.host_bytes = on_home;
    return plan;
  }
  plan.device_bytes = on_home;
  if (input.comm.exchange_on_host != 0) plan.host_bytes = std::max(on_home, elsewhere);
  return plan;
}

bool Overlap(const std::byte* a, uint64_t a_bytes, const std::byte* b, uint64_t b_bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(a), other = reinterpret_cast<uintptr_t>(b);
  return a_bytes > 0 && b_bytes > 0 && begin < other + b_bytes && other < begin + a_bytes;
}

Status InContext(const Status& status, const char* what) {
  if (status.ok()) return status;
  return Status::Error(status.code(), "%s: %s", what, status.message().c_str());
}

}  // namespace

// ---------------------------------------------------------------------------- making and ending --

Result<offload_exchange_plan_t> Exchange::Plan(const Context& context, const ExchangeInput& input) {
  HYBRIDOPT_TRY(CheckOptions(context, input));
  HYBRIDOPT_ASSIGN(const std::vector<CutMatrix> matrices,
                   ReadMatrices(input.matrices, input.comm.rank, input.comm.world));
  return PlanOf(context, input, matrices);
}

Result<std::shared_ptr<Exchange>> Exchange::Create(std::shared_ptr<Context> context,
                                                   const ExchangeInput& input) {
  HYBRIDOPT_TRY(CheckOptions(*context, input));
  std::shared_ptr<Exchange> exchange(new Exchange(std::move(context), input));
  HYBRIDOPT_TRY(
      exchange->TellParts(CatchExceptions("this call", [&] { return exchange->Prepare(input); })));
  return exchange;
}

Exchange::Exchange(std::shared_ptr<Context> context, const ExchangeInput& input)
    : context_(std::move(context)),
      comm_(input.comm,
            static_cast<int64_t>(input.options.comm_timeout_ns != 0 ? input.options.comm_timeout_ns
                                                                    : kDefaultCommTimeoutNs)),
      on_host_(input.comm.exchange_on_host != 0),
      through_host_(on_host_ && !context_->device().unified()) {
  context_->ExchangeCreated();
}

Exchange::~Exchange() {
  (void)device().Free(device_data_);
  context_->ExchangeDestroyed();
}

// All that needs no other rank.
Status Exchange::Prepare(const ExchangeInput& input) {
  HYBRIDOPT_ASSIGN(matrices_, ReadMatrices(input.matrices, own(), comm_.world()));
  const offload_exchange_plan_t plan = PlanOf(*context_, input, matrices_);
  const uint64_t bytes = device().unified() ? plan.host_bytes : plan.device_bytes;
  if (bytes > 0) {
    HYBRIDOPT_ASSIGN(void* const data, device().Allocate(bytes));
    device_data_ = static_cast<std::byte*>(data);
  }
  if (through_host_ && plan.host_bytes > 0) {
    HYBRIDOPT_ASSIGN(host_, PinnedRoom::Take(*context_, plan.host_bytes, "the largest matrix"));
  }
  return {};
}

// The ranks tell each other whether they are prepared, and then their parts: each one writes its
// own in a table, and the maximum over all ranks is the whole table.
Status Exchange::TellParts(const Status& prepared) {
  std::vector<int32_t> words;
  if (prepared.ok()) words = PartsAsWords(matrices_, own());
  // Of several ranks that have failed, the first is named.
  int32_t told[2] = {prepared.ok() ? 0 : comm_.world() - own(), static_cast<int32_t>(words.size())};
  const Status met = comm_.AgreeOnMax(told, 2);
  HYBRIDOPT_TRY(prepared);
  HYBRIDOPT_TRY(met);
  if (told[0] != 0)
    return Status::Error(
        OFFLOAD_COMM_FAILED,
        "rank %d of %d: offload_exchange_create has failed on rank %d, whose error "
        "says why",
        own(), comm_.world(), comm_.world() - told[0]);
  const auto width = static_cast<size_t>(told[1]);
  std::vector<int32_t> table(width * static_cast<size_t>(comm_.world()), INT32_MIN);
  std::copy(words.begin(), words.end(), table.begin() + static_cast<ptrdiff_t>(width) * own());
  HYBRIDOPT_TRY(comm_.AgreeOnMax(table.data(), static_cast<uint32_t>(table.size())));
  for (int32_t rank = 0; rank < comm_.world(); ++rank)
    if (rank != own())
      HYBRIDOPT_TRY(ReadParts(matrices_, own(), rank,
                              std::span(table).subspan(width * static_cast<size_t>(rank), width)));
  messages_.reserve(static_cast<size_t>(comm_.world()));
  return ChooseSenders(matrices_, own());
}

Result<int32_t> Exchange::Home(uint32_t matrix) const {
  if (matrix < matrices_.size()) return matrices_[matrix].home;
  return Status::Error(OFFLOAD_INVALID_ARGUMENT, "matrix is %u, expected less than %zu", matrix,
                       matrices_.size());
}

// ------------------------------------------------------------------------------------- messages --

Result<Exchange::Call> Exchange::Check(uint32_t matrix, int32_t dtype, const void* part,
                                       const void* whole, StreamHandle stream) const {
  if (!failure_.ok())
    return Status::Error(OFFLOAD_POISONED,
                         "an earlier call of this exchange failed, destroy it: %s",
                         failure_.message().c_str());
  HYBRIDOPT_TRY(Home(matrix).status());
  const CutMatrix& cut = matrices_[matrix];
  if (dtype != cut.dtype && dtype != cut.grad_dtype)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "dtype is %s (%d), expected %s of params or %s of gradients of matrix %u "
                         "(%s)",
                         DtypeName(dtype), dtype, DtypeName(cut.dtype), DtypeName(cut.grad_dtype),
                         matrix, cut.name.c_str());
  HYBRIDOPT_TRY(device().CheckStream(stream));
  const Call call{cut, DtypeBytes(dtype), static_cast<std::byte*>(const_cast<void*>(part)),
                  static_cast<std::byte*>(const_cast<void*>(whole)), stream};
  HYBRIDOPT_TRY(InContext(device().CheckRange(part, call.part_bytes(own())), "part"));
  if (cut.home != own()) return call;
  const uint64_t whole_bytes = cut.of(own()).global_count() * call.element_bytes;
  HYBRIDOPT_TRY(InContext(device().CheckRange(whole, whole_bytes), "whole"));
  if (Overlap(call.part, call.part_bytes(own()), call.whole, whole_bytes))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "part at %p (%llu bytes) overlaps whole at %p (%llu bytes), expected "
                         "memory of its own",
                         part, static_cast<unsigned long long>(call.part_bytes(own())), whole,
                         static_cast<unsigned long long>(whole_bytes));
  return call;
}

Status Exchange::Gather(uint32_t matrix, int32_t dtype, const void* part, void* whole,
                        StreamHandle stream) {
  HYBRIDOPT_ASSIGN(const Call call, Check(matrix, dtype, part, whole, stream));
  const bool is_home = call.matrix.home == own();
  return End(call, is_home ? ReceiveParts(call) : SendToHome(call));
}

Status Exchange::Scatter(uint32_t matrix, int32_t dtype, const void* whole, void* part,
                         StreamHandle stream) {
  HYBRIDOPT_ASSIGN(const Call call, Check(matrix, dtype, part, whole, stream));
  const bool is_home = call.matrix.home == own();
  return End(call, is_home ? SendParts(call) : ReceiveFromHome(call));
}

Status Exchange::ReceiveParts(const Call& call) {
  messages_.clear();
  HYBRIDOPT_TRY(ForEachSender(call, [&](int32_t sender, uint64_t offset) {
    if (sender != own())
      AddMessage(sender, Direction::kReceive, data() + offset, call.part_bytes(sender));
    return Status();
  }));
  HYBRIDOPT_TRY(Transfer(call.stream));
  return ForEachSender(call, [&](int32_t sender, uint64_t offset) -> Status {
    if (sender == own()) return CopyPart(call, sender, call.part, Into::kWhole);
    if (through_host_)
      HYBRIDOPT_TRY(device().CopyToDevice(call.stream, device_data_ + offset, host_.data() + offset,
                                          call.part_bytes(sender)));
    return CopyPart(call, sender, device_data_ + offset, Into::kWhole);
  });
}

Status Exchange::SendParts(const Call& call) {
  messages_.clear();
  HYBRIDOPT_TRY(ForEachSender(call, [&](int32_t sender, uint64_t offset) -> Status {
    const size_t before = messages_.size();
    for (int32_t rank = 0; rank < comm_.world(); ++rank)
      if (rank != own() && call.matrix.sender_for(rank) == sender)
        AddMessage(rank, Direction::kSend, data() + offset, call.part_bytes(rank));
    if (messages_.size() == before) return {};  // only this rank has these elements
    HYBRIDOPT_TRY(CopyPart(call, sender, device_data_ + offset, Into::kPart));
    if (!through_host_) return {};
    return device().CopyToHost(call.stream, host_.data() + offset, device_data_ + offset,
                               call.part_bytes(sender));
  }));
  HYBRIDOPT_TRY(CopyPart(call, own(), call.part, Into::kPart));
  return Transfer(call.stream);
}

Status Exchange::SendToHome(const Call& call) {
  if (call.matrix.sender_for(own()) != own()) return {};  // another rank sends these elements
  const uint64_t bytes = call.part_bytes(own());
  if (through_host_)
    HYBRIDOPT_TRY(device().CopyToHost(call.stream, host_.data(), call.part, bytes));
  messages_.clear();
  AddMessage(call.matrix.home, Direction::kSend, through_host_ ? host_.data() : call.part, bytes);
  return Transfer(call.stream);
}

Status Exchange::ReceiveFromHome(const Call& call) {
  if (!call.matrix.has_part(own())) return {};
  const uint64_t bytes = call.part_bytes(own());
  std::byte* const received = through_host_ ? host_.data() : call.part;
  messages_.clear();
  AddMessage(call.matrix.home, Direction::kReceive, received, bytes);
  HYBRIDOPT_TRY(Transfer(call.stream));
  if (!through_host_) return {};
  return device().CopyToDevice(call.stream, call.part, received, bytes);
}

void Exchange::AddMessage(int32_t rank, Direction direction, std::byte* data, uint64_t bytes) {
  HYBRIDOPT_CHECK(messages_.size() < messages_.capacity());  // no call allocates
  messages_.push_back(
      {sizeof(offload_message_t), rank, direction == Direction::kSend ? 1 : 0, 0, data, bytes});
}

// On host memory nothing waits for the stream, so this call does.
Status Exchange::Transfer(StreamHandle stream) {
  if (on_host_) HYBRIDOPT_TRY(Synchronize(stream));
  return comm_.Exchange(messages_, on_host_ ? nullptr : stream);
}

// Visits the ranks whose parts make up the whole; `offset` is where the part lies in the messages.
Status Exchange::ForEachSender(const Call& call,
                               FunctionRef<Status(int32_t sender, uint64_t offset)> visit) const {
  uint64_t offset = 0;
  for (int32_t rank = 0; rank < comm_.world(); ++rank) {
    if (call.matrix.sender_for(rank) != rank) continue;
    HYBRIDOPT_TRY(visit(rank, offset));
    offset += call.part_bytes(rank);
  }
  return {};
}

// Copies the elements of a rank between the whole and a contiguous part.
Status Exchange::CopyPart(const Call& call, int32_t rank, std::byte* part, Into into) {
  for (const Stripe& stripe : call.matrix.stripes[static_cast<size_t>(rank)]) {
    std::byte* const in_part = part + stripe.begin * call.element_bytes;
    std::byte* const in_whole = call.whole + stripe.first * call.element_bytes;
    const uint64_t row_bytes = stripe.row_length * call.element_bytes;
    const uint64_t stride = stripe.row_stride * call.element_bytes;
    const uint64_t rows = stripe.count / stripe.row_length;
    const RowsCopy copy = into == Into::kWhole
                              ? RowsCopy{in_whole, stride, in_part, row_bytes, row_bytes, rows}
                              : RowsCopy{in_part, row_bytes, in_whole, stride, row_bytes, rows};
    HYBRIDOPT_TRY(device().CopyRows(call.stream, copy));
  }
  return {};
}

Status Exchange::Synchronize(StreamHandle stream) {
  Status status = device().Synchronize(stream, context_->device_timeout_ns());
  if (status.code() != OFFLOAD_TIMED_OUT) return status;
  stuck_ = NoProgress("the stream", context_->device_timeout_ns(),
                      "; the exchange keeps its memory for messages for ever: keep part and whole "
                      "until the stream is done");
  return stuck_;
}

// The end of a call that has begun: also if it has failed, nothing uses its memory any more. Then
// the ranks are out of step.
Status Exchange::End(const Call& call, Status status) {
  const Status done = stuck_.ok() ? Synchronize(call.stream) : stuck_;
  if (status.ok()) status = done;
  if (!status.ok()) failure_ = status;
  return status;
}

}  // namespace hybridopt
