// The extern "C" bodies of offload.h: bring structs to this release's size, find the handle, call
// the optimizer, translate the result. This file makes no decisions.
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/files.h"
#include "base/function_ref.h"
#include "checkpoint/format/checkpoint_info.h"
#include "checkpoint/reader.h"
#include "exchange/exchange.h"
#include "kernels/changes/content_hash.h"
#include "machine/context.h"
#include "memory/address_pool.h"
#include "optimizer/handle_table.h"
#include "optimizer/optimizer.h"
#include "runtime/thread_text.h"
#include "runtime/thread_value.h"
#include "stash/stash.h"

namespace {

using namespace hybridopt;  // NOLINT: this file is the library's outermost layer

// Find refuses handles that have been destroyed, or were made before a fork, so no body below runs
// on these.
using Contexts = HandleTable<Context, HandleKind::kContext>;
using Optimizers = HandleTable<Optimizer, HandleKind::kOptimizer>;
using Stashes = HandleTable<Stash, HandleKind::kStash>;
using Exchanges = HandleTable<Exchange, HandleKind::kExchange>;
using Pools = HandleTable<AddressPool, HandleKind::kPool>;

ThreadValue entered_pool;  // an offload_pool_t

constexpr uint32_t kAbiVersion = 0 * 1000 + 1;
constexpr uint32_t kMaxStructBytes = 1 << 16;

ThreadText last_errors;  // of each thread's last failure

int32_t Report(const Status& failure) {
  last_errors.Set(failure.message().c_str());
  return failure.code();
}

// Defers a pthread_cancel of the calling thread until the call has returned, so that the call is
// not ended half way.
class NoCancellation {
 public:
  NoCancellation() { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before_); }
  ~NoCancellation() { pthread_setcancelstate(before_, nullptr); }
  NoCancellation(const NoCancellation&) = delete;
  NoCancellation& operator=(const NoCancellation&) = delete;

 private:
  int before_ = PTHREAD_CANCEL_ENABLE;
};

// Runs the body of an ABI function: catches every exception, and keeps the text of a failure for
// offload_last_error.
template <typename Body>
int32_t Guard(Body&& body) noexcept {
  const NoCancellation no_cancellation;
  const Status status = CatchExceptions("this call", body);
  return status.ok() ? OFFLOAD_OK : Report(status);
}

Status CheckStructSize(uint32_t got, size_t expected, const char* name) {
  if (got >= sizeof(uint32_t) && got <= kMaxStructBytes) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "%s.struct_size is %u, expected sizeof the struct (%zu here)", name, got,
                       expected);
}

// Reads a struct of any release: fields that the caller's struct does not have become zero; fields
// that this release does not have must be zero.
template <typename Struct>
Result<Struct> Read(const Struct* source, const char* name) {
  if (source == nullptr)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "%s is NULL, expected a struct", name);
  uint32_t size = 0;
  std::memcpy(&size, source, sizeof(size));
  HYBRIDOPT_TRY(CheckStructSize(size, sizeof(Struct), name));
  const auto* bytes = reinterpret_cast<const unsigned char*>(source);
  for (size_t i = sizeof(Struct); i < size; ++i)
    if (bytes[i] != 0)
      return Status::Error(OFFLOAD_UNSUPPORTED,
                           "%s.struct_size is %u and byte %zu is not zero, but this library knows "
                           "%zu bytes; it is older than the caller's header, leave the newer "
                           "fields 0",
                           name, size, i, sizeof(Struct));
  Struct result{};
  std::memcpy(static_cast<void*>(&result), source, size < sizeof(Struct) ? size : sizeof(Struct));
  return result;
}

// Element i of an array of structs; the struct_size of the first one is the distance between two of
// them.
template <typename Struct>
Result<Struct> ReadElement(const Struct* array, uint32_t i, const char* name) {
  uint32_t stride = 0;
  std::memcpy(&stride, array, sizeof(stride));
  const auto* bytes = reinterpret_cast<const unsigned char*>(array) + uint64_t{stride} * i;
  const auto* element = reinterpret_cast<const Struct*>(bytes);
  Result<Struct> value = Read(element, name);
  if (!value.ok()) {
    char indexed[32];  // written only now, for an error: bind may be called before every step
    std::snprintf(indexed, sizeof(indexed), "%s[%u]", name, i);
    return Read(element, indexed).status();
  }
  if (value.value().struct_size != stride)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "%s[%u].struct_size is %u, but the array's first element says %u; all "
                         "must be equal",
                         name, i, value.value().struct_size, stride);
  return value;
}

// Whether an output struct can be written.
template <typename Struct>
Status CheckOutput(const Struct* target, const char* name) {
  if (target == nullptr)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "%s is NULL, expected a struct", name);
  uint32_t size = 0;
  std::memcpy(&size, target, sizeof(size));
  return CheckStructSize(size, sizeof(Struct), name);
}

// Writes as many bytes as the smaller of both structs has, and does not change the caller's
// struct_size.
template <typename Struct>
void Write(Struct* target, Struct value) {
  std::memcpy(&value.struct_size, target, sizeof(uint32_t));
  const size_t size = value.struct_size < sizeof(Struct) ? value.struct_size : sizeof(Struct);
  std::memcpy(static_cast<void*>(target), &value, size);
}

template <typename Pointer>
Status CheckPointer(Pointer pointer, const char* name) {
  if (pointer != nullptr) return {};
  return Status::Error(OFFLOAD_INVALID_ARGUMENT, "%s is NULL, expected an address", name);
}

// Waits for a copy that a convenience function has queued.
Status FinishCopy(Context& context, StreamHandle stream) {
  Status status = context.device().Synchronize(stream, context.device_timeout_ns());
  if (status.code() != OFFLOAD_TIMED_OUT) return status;
  return NoProgress("the stream", context.device_timeout_ns(),
                    "; the copy is still queued on it: keep host_data until the stream is done");
}

Status VerifyCheckpoint(const std::string& path, const offload_verify_options_t& options) {
  HYBRIDOPT_ASSIGN(const checkpoint::Reader reader,
                   checkpoint::Reader::Open(system::SystemFiles(), path));
  HYBRIDOPT_ASSIGN(const checkpoint::VerifyResult result,
                   reader.Verify(options.io_depth, [&](uint64_t done, uint64_t total) {
                     if (options.progress != nullptr)
                       options.progress(options.progress_user, done, total);
                   }));
  return result.status();
}

Result<std::vector<ParamInput>> ReadParams(const offload_param_t* params, uint32_t count) {
  std::vector<ParamInput> inputs;
  inputs.reserve(count);
  for (uint32_t i = 0; i < count; ++i) {
    ParamInput input{};
    HYBRIDOPT_ASSIGN(input.param, ReadElement(params, i, "params"));
    if (input.param.shard != nullptr) {
      const std::string name = "params[" + std::to_string(i) + "].shard";
      HYBRIDOPT_ASSIGN(input.shard, Read(input.param.shard, name.c_str()));
    }
    inputs.push_back(input);
  }
  return inputs;
}

// Reads the options of an exchange; `input` must live as long as the result is used.
Status ReadExchange(const offload_exchange_options_t* options, ExchangeInput* input) {
  HYBRIDOPT_ASSIGN(input->options, Read(options, "options"));
  if (input->options.comm != nullptr) {
    HYBRIDOPT_ASSIGN(input->comm, Read(input->options.comm, "options.comm"));
    input->options.comm = &input->comm;
  }
  if (input->options.matrices == nullptr) return {};
  for (uint32_t i = 0; i < input->options.matrix_count; ++i) {
    MatrixInput matrix{};
    HYBRIDOPT_ASSIGN(matrix.matrix, ReadElement(input->options.matrices, i, "matrices"));
    if (matrix.matrix.shard != nullptr) {
      const std::string name = "matrices[" + std::to_string(i) + "].shard";
      HYBRIDOPT_ASSIGN(matrix.shard, Read(matrix.matrix.shard, name.c_str()));
    }
    input->matrices.push_back(matrix);
  }
  return {};
}

// The body of all calls that queue work of an optimizer. `queue` gets the optimizer and returns the
// ticket. The caller's pointer for the ticket may be NULL.
template <typename Queue>
int32_t QueueWork(offload_optimizer_t optimizer, offload_ticket_t* ticket, Queue&& queue) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    HYBRIDOPT_ASSIGN(const offload_ticket_t given, queue(*found));
    if (ticket != nullptr) *ticket = given;
    return {};
  });
}

// The body of all moves. `known` contains all flags that the call accepts; `move_of` converts flags
// into a move.
int32_t QueueMove(offload_optimizer_t optimizer, const offload_move_options_t* options,
                  offload_ticket_t* ticket, FunctionRef<Move(uint32_t flags)> move_of,
                  uint32_t known) {
  return QueueWork(optimizer, ticket, [&](Optimizer& found) -> Result<offload_ticket_t> {
    offload_move_options_t read{};
    if (options != nullptr) {
      HYBRIDOPT_ASSIGN(read, Read(options, "options"));
    }
    if ((read.flags & ~known) != 0)
      return Status::Error(OFFLOAD_UNSUPPORTED, "options.flags is 0x%x, known to this call is 0x%x",
                           read.flags, known);
    if (read.flags == (OFFLOAD_MOVE_ACCUMULATE | OFFLOAD_MOVE_DROP))
      return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                           "options.flags asks for OFFLOAD_MOVE_ACCUMULATE and OFFLOAD_MOVE_DROP; "
                           "expected one of them");
    if (read.stream_count > Lanes::kMaxProducers)
      return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                           "options.stream_count is %u, expected at most %u", read.stream_count,
                           Lanes::kMaxProducers);
    if (read.stream_count > 0) HYBRIDOPT_TRY(CheckPointer(read.streams, "options.streams"));
    if (read.param_count > 0) HYBRIDOPT_TRY(CheckPointer(read.params, "options.params"));
    const offload_stream_t null_stream = nullptr;
    const std::span<const offload_stream_t> streams =
        read.stream_count > 0 ? std::span(read.streams, read.stream_count)
                              : std::span(&null_stream, 1);
    return found.MoveResource(move_of(read.flags), {read.params, read.param_count}, streams);
  });
}

// A move that takes no flags.
int32_t QueueMove(offload_optimizer_t optimizer, const offload_move_options_t* options,
                  offload_ticket_t* ticket, Move move) {
  return QueueMove(
      optimizer, options, ticket, [move](uint32_t) { return move; }, 0);
}

}  // namespace

extern "C" {

// -------------------------------------------------------------------------------------- library --

uint32_t offload_abi_version(void) { return kAbiVersion; }

const char* offload_build_info(void) {
#if defined(__clang__)
#define HYBRIDOPT_COMPILER __VERSION__  // __VERSION__ includes the compiler's name
#else
#define HYBRIDOPT_COMPILER "gcc " __VERSION__
#endif
#if defined(HYBRIDOPT_HAS_CUDA)
#define HYBRIDOPT_CUDA " cuda"
#else
#define HYBRIDOPT_CUDA ""
#endif
  return "hybridopt " HYBRIDOPT_VERSION ", " HYBRIDOPT_COMPILER ", devices host sim" HYBRIDOPT_CUDA;
}

const char* offload_status_name(int32_t status) {
  switch (status) {
    case OFFLOAD_OK:
      return "OK";
    case OFFLOAD_INVALID_ARGUMENT:
      return "INVALID_ARGUMENT";
    case OFFLOAD_INVALID_STATE:
      return "INVALID_STATE";
    case OFFLOAD_UNSUPPORTED:
      return "UNSUPPORTED";
    case OFFLOAD_OUT_OF_HOST_MEMORY:
      return "OUT_OF_HOST_MEMORY";
    case OFFLOAD_OUT_OF_DEVICE_MEMORY:
      return "OUT_OF_DEVICE_MEMORY";
    case OFFLOAD_DEVICE_FAILED:
      return "DEVICE_FAILED";
    case OFFLOAD_COMM_FAILED:
      return "COMM_FAILED";
    case OFFLOAD_IO_FAILED:
      return "IO_FAILED";
    case OFFLOAD_CHECKPOINT_CORRUPT:
      return "CHECKPOINT_CORRUPT";
    case OFFLOAD_CHECKPOINT_MISMATCH:
      return "CHECKPOINT_MISMATCH";
    case OFFLOAD_TIMED_OUT:
      return "TIMED_OUT";
    case OFFLOAD_POISONED:
      return "POISONED";
    case OFFLOAD_INTERNAL:
      return "INTERNAL";
    default:
      return "UNKNOWN";
  }
}

const char* offload_last_error(void) { return last_errors.text(); }

// -------------------------------------------------------------------------------------- context --

int32_t offload_context_create(const offload_context_options_t* options,
                               offload_context_t* context) {
  return Guard([&]() -> Status {
    HYBRIDOPT_TRY(CheckPointer(context, "context"));
    HYBRIDOPT_ASSIGN(const offload_context_options_t read, Read(options, "options"));
    HYBRIDOPT_ASSIGN(std::shared_ptr<Context> created, Context::Create(read));
    HYBRIDOPT_ASSIGN(void* const handle, Contexts::Instance().Insert(std::move(created)));
    *context = static_cast<offload_context_t>(handle);
    return {};
  });
}

int32_t offload_context_destroy(offload_context_t context) {
  return Guard([&]() -> Status {
    const auto check_unused = [](const Context& candidate) -> Status {
      if (candidate.optimizers() + candidate.stashes() + candidate.exchanges() == 0) return {};
      return Status::Error(
          OFFLOAD_INVALID_STATE,
          "context still has %u optimizers, %u stashes and %u exchanges; destroy them first",
          candidate.optimizers(), candidate.stashes(), candidate.exchanges());
    };
    return Contexts::Instance().Destroy(context, "context", check_unused,
                                        [](Context&) { return Status(); });
  });
}

int32_t offload_context_get_info(offload_context_t context, offload_context_info_t* info) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Contexts::Instance().Find(context, "context"));
    HYBRIDOPT_TRY(CheckOutput(info, "info"));
    HYBRIDOPT_ASSIGN(const offload_context_info_t value, found->Info());
    Write(info, value);
    return {};
  });
}

// ---------------------------------------------------------------------------------- registering --

int32_t offload_optimizer_create(offload_context_t context,
                                 const offload_optimizer_options_t* options,
                                 offload_optimizer_t* optimizer) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Contexts::Instance().Find(context, "context"));
    HYBRIDOPT_TRY(CheckPointer(optimizer, "optimizer"));
    HYBRIDOPT_ASSIGN(offload_optimizer_options_t read, Read(options, "options"));
    offload_comm_t comm{};
    if (read.comm != nullptr) {
      HYBRIDOPT_ASSIGN(comm, Read(read.comm, "options.comm"));
      read.comm = &comm;
    }
    HYBRIDOPT_ASSIGN(std::shared_ptr<Optimizer> created, Optimizer::Create(found.shared(), read));
    HYBRIDOPT_ASSIGN(void* const handle, Optimizers::Instance().Insert(std::move(created)));
    *optimizer = static_cast<offload_optimizer_t>(handle);
    return {};
  });
}

int32_t offload_optimizer_destroy(offload_optimizer_t optimizer) {
  return Guard([&]() -> Status {
    return Optimizers::Instance().Destroy(
        optimizer, "optimizer", [](const Optimizer&) { return Status(); },
        [](Optimizer& closing) { return closing.Close(); });
  });
}

int32_t offload_optimizer_add_group(offload_optimizer_t optimizer, const offload_group_t* group,
                                    uint32_t* group_id) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    HYBRIDOPT_TRY(CheckPointer(group_id, "group_id"));
    HYBRIDOPT_ASSIGN(const offload_group_t read, Read(group, "group"));
    HYBRIDOPT_ASSIGN(*group_id, found->AddGroup(read));
    return {};
  });
}

int32_t offload_optimizer_set_group(offload_optimizer_t optimizer, uint32_t group_id,
                                    const offload_group_t* group) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    HYBRIDOPT_ASSIGN(const offload_group_t read, Read(group, "group"));
    return found->SetGroup(group_id, read);
  });
}

int32_t offload_optimizer_add_params(offload_optimizer_t optimizer, const offload_param_t* params,
                                     uint32_t param_count, uint32_t* first_id) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    if (param_count > 0) HYBRIDOPT_TRY(CheckPointer(params, "params"));
    HYBRIDOPT_ASSIGN(const std::vector<ParamInput> inputs, ReadParams(params, param_count));
    HYBRIDOPT_ASSIGN(const uint32_t first, found->AddParams(inputs));
    if (first_id != nullptr) *first_id = first;
    return {};
  });
}

int32_t offload_optimizer_bind(offload_optimizer_t optimizer, const offload_binding_t* bindings,
                               uint32_t binding_count) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    if (binding_count > 0) HYBRIDOPT_TRY(CheckPointer(bindings, "bindings"));
    std::vector<offload_binding_t>& read = found->ClearedBindings();
    read.reserve(binding_count);
    for (uint32_t i = 0; i < binding_count; ++i) {
      HYBRIDOPT_ASSIGN(const offload_binding_t binding, ReadElement(bindings, i, "bindings"));
      read.push_back(binding);
    }
    return found->Bind(read);
  });
}

int32_t offload_optimizer_plan(offload_optimizer_t optimizer, offload_plan_t* plan) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    HYBRIDOPT_TRY(CheckOutput(plan, "plan"));
    HYBRIDOPT_ASSIGN(const offload_plan_t value, found->Plan());
    Write(plan, value);
    return {};
  });
}

int32_t offload_optimizer_commit(offload_optimizer_t optimizer, offload_stream_t stream) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    return found->Commit(stream);
  });
}

// ------------------------------------------------------------------------------------- stepping --

int32_t offload_optimizer_step(offload_optimizer_t optimizer, const offload_step_options_t* options,
                               offload_ticket_t* ticket) {
  return QueueWork(optimizer, ticket, [&](Optimizer& found) -> Result<offload_ticket_t> {
    offload_step_options_t read{};
    if (options != nullptr) {
      HYBRIDOPT_ASSIGN(read, Read(options, "options"));
    }
    return found.Step(read);
  });
}

int32_t offload_optimizer_step_result(offload_optimizer_t optimizer, offload_ticket_t ticket,
                                      offload_step_result_t* result) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    HYBRIDOPT_TRY(CheckOutput(result, "result"));
    HYBRIDOPT_ASSIGN(const offload_step_result_t value, found->StepResult(ticket));
    Write(result, value);
    return {};
  });
}

int32_t offload_optimizer_wait(offload_optimizer_t optimizer, offload_ticket_t ticket,
                               int64_t timeout_ns) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    return found->Wait(ticket, timeout_ns);
  });
}

int32_t offload_optimizer_stream_wait(offload_optimizer_t optimizer, offload_ticket_t ticket,
                                      offload_stream_t stream, const uint32_t* params,
                                      uint32_t param_count) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    if (params == nullptr) param_count = 0;
    return found->StreamWait(ticket, stream, {params, param_count});
  });
}

// ------------------------------------------------------------------------------------ lifecycle --

int32_t offload_optimizer_offload_params(offload_optimizer_t optimizer,
                                         const offload_move_options_t* options,
                                         offload_ticket_t* ticket) {
  return QueueMove(optimizer, options, ticket, Move::kOffloadParams);
}

int32_t offload_optimizer_reload_params(offload_optimizer_t optimizer,
                                        const offload_move_options_t* options,
                                        offload_ticket_t* ticket) {
  return QueueMove(optimizer, options, ticket, Move::kReloadParams);
}

int32_t offload_optimizer_offload_grads(offload_optimizer_t optimizer,
                                        const offload_move_options_t* options,
                                        offload_ticket_t* ticket) {
  constexpr uint32_t kFlags = OFFLOAD_MOVE_ACCUMULATE | OFFLOAD_MOVE_DROP;
  const auto move_of = [](uint32_t flags) {
    if ((flags & OFFLOAD_MOVE_DROP) != 0) return Move::kDropGrads;
    return flags == OFFLOAD_MOVE_ACCUMULATE ? Move::kAccumulateGrads : Move::kOffloadGrads;
  };
  return QueueMove(optimizer, options, ticket, move_of, kFlags);
}

int32_t offload_optimizer_reload_grads(offload_optimizer_t optimizer,
                                       const offload_move_options_t* options,
                                       offload_ticket_t* ticket) {
  return QueueMove(optimizer, options, ticket, Move::kReloadGrads);
}

int32_t offload_optimizer_offload_states(offload_optimizer_t optimizer,
                                         const offload_move_options_t* options,
                                         offload_ticket_t* ticket) {
  return QueueMove(optimizer, options, ticket, Move::kOffloadStates);
}

int32_t offload_optimizer_reload_states(offload_optimizer_t optimizer,
                                        const offload_move_options_t* options,
                                        offload_ticket_t* ticket) {
  return QueueMove(optimizer, options, ticket, Move::kReloadStates);
}

int32_t offload_optimizer_refresh_masters(offload_optimizer_t optimizer,
                                          const offload_move_options_t* options,
                                          offload_ticket_t* ticket) {
  return QueueMove(optimizer, options, ticket, Move::kRefreshMasters);
}

int32_t offload_optimizer_set_device_fraction(offload_optimizer_t optimizer, double device_fraction,
                                              offload_ticket_t* ticket) {
  return QueueWork(optimizer, ticket,
                   [&](Optimizer& found) { return found.SetDeviceFraction(device_fraction); });
}

int32_t offload_optimizer_set_fractions(offload_optimizer_t optimizer, double device_fraction,
                                        double disk_fraction, offload_ticket_t* ticket) {
  return QueueWork(optimizer, ticket, [&](Optimizer& found) {
    return found.SetFractions(device_fraction, disk_fraction);
  });
}

int32_t offload_optimizer_undo_early_updates(offload_optimizer_t optimizer,
                                             offload_ticket_t* ticket) {
  return QueueWork(optimizer, ticket, [&](Optimizer& found) { return found.QueueNothing(); });
}

int32_t offload_optimizer_state(offload_optimizer_t optimizer, uint32_t param, int32_t kind,
                                offload_state_view_t* view) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    HYBRIDOPT_TRY(CheckOutput(view, "view"));
    HYBRIDOPT_ASSIGN(const offload_state_view_t value, found->State(param, kind));
    Write(view, value);
    return {};
  });
}

int32_t offload_optimizer_read_state(offload_optimizer_t optimizer, uint32_t param, int32_t kind,
                                     uint64_t first, uint64_t count, float* values) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    return found->ReadState({param, kind, first, count}, values);
  });
}

int32_t offload_optimizer_write_state(offload_optimizer_t optimizer, uint32_t param, int32_t kind,
                                      uint64_t first, uint64_t count, const float* values) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    return found->WriteState({param, kind, first, count}, values);
  });
}

int32_t offload_optimizer_set_step_count(offload_optimizer_t optimizer, uint32_t param,
                                         uint64_t step_count) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    return found->SetStepCount(param, step_count);
  });
}

int32_t offload_optimizer_grads_to_keep(offload_optimizer_t optimizer, uint8_t* keep,
                                        uint32_t count) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    if (keep == nullptr) return Status::Error(OFFLOAD_INVALID_ARGUMENT, "keep is NULL");
    return found->GradsToKeep({keep, count});
  });
}

int32_t offload_optimizer_changes(offload_optimizer_t optimizer, const uint32_t* params,
                                  uint32_t param_count, const offload_changes_options_t* options,
                                  offload_changes_t* out) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    HYBRIDOPT_TRY(CheckOutput(out, "out"));
    HYBRIDOPT_ASSIGN(const offload_changes_options_t read, Read(options, "options"));
    if (param_count > 0) HYBRIDOPT_TRY(CheckPointer(params, "params"));
    offload_changes_t changes{};
    const Status status = found->Changes({params, param_count}, read, changes);
    if (status.ok() || changes.bytes > read.buffer_bytes) Write(out, changes);
    return status;
  });
}

int32_t offload_optimizer_acknowledge_changes(offload_optimizer_t optimizer, uint64_t take) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    return found->AcknowledgeChanges(take);
  });
}

int32_t offload_optimizer_mark_changed(offload_optimizer_t optimizer, const uint32_t* params,
                                       uint32_t param_count) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    if (param_count > 0) HYBRIDOPT_TRY(CheckPointer(params, "params"));
    return found->MarkChanged({params, param_count});
  });
}

int32_t offload_content_hash(const void* data, uint64_t bytes, uint64_t* hash) {
  return Guard([&]() -> Status {
    HYBRIDOPT_TRY(CheckPointer(hash, "hash"));
    if (bytes > 0) HYBRIDOPT_TRY(CheckPointer(data, "data"));
    *hash = HashOfParts(HashOfPart(data, bytes, 0), bytes);
    return {};
  });
}

int32_t offload_optimizer_get_stats(offload_optimizer_t optimizer, offload_stats_t* stats) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    HYBRIDOPT_TRY(CheckOutput(stats, "stats"));
    Write(stats, found->Stats());
    return {};
  });
}

// --------------------------------------------------------------------------------------- traces --

int32_t offload_optimizer_trace_start(offload_optimizer_t optimizer, uint64_t ring_bytes) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    return found->StartTrace(ring_bytes);
  });
}

int32_t offload_optimizer_trace_stop(offload_optimizer_t optimizer, const char* path,
                                     uint64_t* dropped) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Optimizers::Instance().Find(optimizer, "optimizer"));
    return found->StopTrace(path, dropped);
  });
}

// ---------------------------------------------------------------------------------- checkpoints --

int32_t offload_optimizer_save(offload_optimizer_t optimizer, const offload_save_options_t* options,
                               offload_ticket_t* ticket) {
  return QueueWork(optimizer, ticket, [&](Optimizer& found) -> Result<offload_ticket_t> {
    HYBRIDOPT_ASSIGN(const offload_save_options_t read, Read(options, "options"));
    return found.Save(read);
  });
}

int32_t offload_optimizer_load(offload_optimizer_t optimizer, const offload_load_options_t* options,
                               offload_ticket_t* ticket) {
  return QueueWork(optimizer, ticket, [&](Optimizer& found) -> Result<offload_ticket_t> {
    HYBRIDOPT_ASSIGN(const offload_load_options_t read, Read(options, "options"));
    return found.Load(read);
  });
}

int32_t offload_checkpoint_inspect(const char* path, offload_checkpoint_info_t* info,
                                   offload_tensor_function_t visit, void* user) {
  return Guard([&]() -> Status {
    HYBRIDOPT_TRY(CheckPointer(path, "path"));
    if (info != nullptr) HYBRIDOPT_TRY(CheckOutput(info, "info"));
    HYBRIDOPT_ASSIGN(const checkpoint::Reader reader,
                     checkpoint::Reader::Open(system::SystemFiles(), path));
    if (info != nullptr) Write(info, checkpoint::InfoOf(reader.manifest()));
    if (visit == nullptr) return {};
    checkpoint::ForEachTensor(reader.manifest(), [&](const offload_checkpoint_tensor_t& tensor) {
      visit(user, &tensor);
    });
    return {};
  });
}

int32_t offload_checkpoint_verify(const char* path, const offload_verify_options_t* options) {
  return Guard([&]() -> Status {
    HYBRIDOPT_TRY(CheckPointer(path, "path"));
    offload_verify_options_t read{};
    if (options != nullptr) {
      HYBRIDOPT_ASSIGN(read, Read(options, "options"));
    }
    return VerifyCheckpoint(path, read);
  });
}

int32_t offload_checkpoint_newest(const char* directory, const offload_verify_options_t* verify,
                                  char* path, uint64_t path_bytes) {
  return Guard([&]() -> Status {
    HYBRIDOPT_TRY(CheckPointer(directory, "directory"));
    HYBRIDOPT_TRY(CheckPointer(path, "path"));
    offload_verify_options_t read{};
    if (verify != nullptr) {
      HYBRIDOPT_ASSIGN(read, Read(verify, "verify"));
    }
    const auto check = [&](const std::string& candidate) {
      return verify == nullptr ? Status() : VerifyCheckpoint(candidate, read);
    };
    HYBRIDOPT_ASSIGN(const std::string newest,
                     checkpoint::NewestCheckpoint(system::SystemFiles(), directory, check));
    if (newest.size() >= path_bytes)
      return Status::Error(OFFLOAD_INVALID_ARGUMENT, "path_bytes is %llu, '%.500s' needs %zu",
                           static_cast<unsigned long long>(path_bytes), newest.c_str(),
                           newest.size() + 1);
    std::memcpy(path, newest.c_str(), newest.size() + 1);
    return {};
  });
}

// -------------------------------------------------------------------------------------- stash --

int32_t offload_stash_plan(offload_context_t context, const offload_stash_options_t* options,
                           offload_stash_plan_t* plan) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Contexts::Instance().Find(context, "context"));
    HYBRIDOPT_TRY(CheckOutput(plan, "plan"));
    HYBRIDOPT_ASSIGN(const offload_stash_options_t read, Read(options, "options"));
    HYBRIDOPT_ASSIGN(const offload_stash_plan_t value, Stash::Plan(*found, read));
    Write(plan, value);
    return {};
  });
}

int32_t offload_stash_create(offload_context_t context, const offload_stash_options_t* options,
                             offload_stash_t* stash) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Contexts::Instance().Find(context, "context"));
    HYBRIDOPT_TRY(CheckPointer(stash, "stash"));
    HYBRIDOPT_ASSIGN(const offload_stash_options_t read, Read(options, "options"));
    HYBRIDOPT_ASSIGN(std::shared_ptr<Stash> created, Stash::Create(found.shared(), read));
    HYBRIDOPT_ASSIGN(void* const handle, Stashes::Instance().Insert(std::move(created)));
    *stash = static_cast<offload_stash_t>(handle);
    return {};
  });
}

int32_t offload_stash_destroy(offload_stash_t stash) {
  return Guard([&]() -> Status {
    return Stashes::Instance().Destroy(
        stash, "stash", [](const Stash&) { return Status(); },
        [](Stash& closing) { return closing.Close(); });
  });
}

int32_t offload_stash_push(offload_stash_t stash, uint32_t lane, const void* data, uint64_t bytes,
                           offload_stream_t stream, offload_stash_ticket_t* ticket) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Stashes::Instance().Find(stash, "stash"));
    HYBRIDOPT_TRY(CheckPointer(ticket, "ticket"));
    HYBRIDOPT_ASSIGN(*ticket, found->Push(lane, data, bytes, stream));
    return {};
  });
}

int32_t offload_stash_release(offload_stash_t stash, offload_stash_ticket_t ticket,
                              offload_stream_t stream) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Stashes::Instance().Find(stash, "stash"));
    return found->Release(ticket, stream);
  });
}

int32_t offload_stash_prefetch(offload_stash_t stash, offload_stash_ticket_t ticket,
                               void* destination, uint64_t destination_bytes,
                               offload_stream_t stream) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Stashes::Instance().Find(stash, "stash"));
    return found->Prefetch(ticket, destination, destination_bytes, stream);
  });
}

int32_t offload_stash_pop(offload_stash_t stash, offload_stash_ticket_t ticket,
                          offload_stream_t stream, uint32_t flags) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Stashes::Instance().Find(stash, "stash"));
    return found->Pop(ticket, stream, flags);
  });
}

int32_t offload_stash_drop(offload_stash_t stash, offload_stash_ticket_t ticket,
                           offload_stream_t stream) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Stashes::Instance().Find(stash, "stash"));
    return found->Drop(ticket, stream);
  });
}

int32_t offload_stash_mark(offload_stash_t stash, uint32_t lane, offload_stash_mark_t* mark) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Stashes::Instance().Find(stash, "stash"));
    HYBRIDOPT_TRY(CheckPointer(mark, "mark"));
    HYBRIDOPT_ASSIGN(*mark, found->Mark(lane));
    return {};
  });
}

int32_t offload_stash_rollback(offload_stash_t stash, offload_stash_mark_t mark,
                               offload_stream_t stream) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Stashes::Instance().Find(stash, "stash"));
    return found->Rollback(mark, stream);
  });
}

int32_t offload_stash_wait(offload_stash_t stash, offload_stash_ticket_t ticket,
                           int64_t timeout_ns) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Stashes::Instance().Find(stash, "stash"));
    return found->Wait(ticket, timeout_ns);
  });
}

int32_t offload_stash_get_stats(offload_stash_t stash, offload_stash_stats_t* stats) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Stashes::Instance().Find(stash, "stash"));
    HYBRIDOPT_TRY(CheckOutput(stats, "stats"));
    HYBRIDOPT_ASSIGN(const offload_stash_stats_t value, found->Stats());
    Write(stats, value);
    return {};
  });
}

// ------------------------------------------------------------------------------------ exchange --

int32_t offload_exchange_plan(offload_context_t context, const offload_exchange_options_t* options,
                              offload_exchange_plan_t* plan) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Contexts::Instance().Find(context, "context"));
    HYBRIDOPT_TRY(CheckOutput(plan, "plan"));
    ExchangeInput input{};
    HYBRIDOPT_TRY(ReadExchange(options, &input));
    HYBRIDOPT_ASSIGN(const offload_exchange_plan_t value, Exchange::Plan(*found, input));
    Write(plan, value);
    return {};
  });
}

int32_t offload_exchange_create(offload_context_t context,
                                const offload_exchange_options_t* options,
                                offload_exchange_t* exchange) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Contexts::Instance().Find(context, "context"));
    HYBRIDOPT_TRY(CheckPointer(exchange, "exchange"));
    ExchangeInput input{};
    HYBRIDOPT_TRY(ReadExchange(options, &input));
    HYBRIDOPT_ASSIGN(std::shared_ptr<Exchange> created, Exchange::Create(found.shared(), input));
    HYBRIDOPT_ASSIGN(void* const handle, Exchanges::Instance().Insert(std::move(created)));
    *exchange = static_cast<offload_exchange_t>(handle);
    return {};
  });
}

int32_t offload_exchange_destroy(offload_exchange_t exchange) {
  return Guard([&]() -> Status {
    return Exchanges::Instance().Destroy(
        exchange, "exchange", [](const Exchange&) { return Status(); },
        [](Exchange& closing) { return closing.Close(); });
  });
}

int32_t offload_exchange_home(offload_exchange_t exchange, uint32_t matrix, int32_t* rank) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Exchanges::Instance().Find(exchange, "exchange"));
    HYBRIDOPT_TRY(CheckPointer(rank, "rank"));
    HYBRIDOPT_ASSIGN(*rank, found->Home(matrix));
    return {};
  });
}

int32_t offload_exchange_gather(offload_exchange_t exchange, uint32_t matrix, int32_t dtype,
                                const void* part, void* whole, offload_stream_t stream) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Exchanges::Instance().Find(exchange, "exchange"));
    return found->Gather(matrix, dtype, part, whole, stream);
  });
}

int32_t offload_exchange_scatter(offload_exchange_t exchange, uint32_t matrix, int32_t dtype,
                                 const void* whole, void* part, offload_stream_t stream) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Exchanges::Instance().Find(exchange, "exchange"));
    return found->Scatter(matrix, dtype, whole, part, stream);
  });
}

// -------------------------------------------------------------------------- device conveniences --

int32_t offload_device_alloc(offload_context_t context, uint64_t bytes, void** data) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Contexts::Instance().Find(context, "context"));
    HYBRIDOPT_TRY(CheckPointer(data, "data"));
    if (bytes == 0)
      return Status::Error(OFFLOAD_INVALID_ARGUMENT, "bytes is 0, expected at least 1");
    HYBRIDOPT_ASSIGN(*data, found->AllocateForCaller(bytes));
    return {};
  });
}

int32_t offload_device_free(offload_context_t context, void* data) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Contexts::Instance().Find(context, "context"));
    return found->FreeForCaller(data);
  });
}

int32_t offload_device_upload(offload_context_t context, void* device_data, const void* host_data,
                              uint64_t bytes, offload_stream_t stream) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Contexts::Instance().Find(context, "context"));
    if (bytes == 0) return {};
    HYBRIDOPT_TRY(CheckPointer(host_data, "host_data"));
    HYBRIDOPT_TRY(CheckPointer(device_data, "device_data"));
    Device& device = found->device();
    HYBRIDOPT_TRY(device.CheckStream(stream));
    HYBRIDOPT_TRY(device.CheckRange(device_data, bytes));
    HYBRIDOPT_TRY(device.CopyToDevice(stream, device_data, host_data, bytes));
    return FinishCopy(*found, stream);
  });
}

int32_t offload_device_download(offload_context_t context, void* host_data, const void* device_data,
                                uint64_t bytes, offload_stream_t stream) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Contexts::Instance().Find(context, "context"));
    if (bytes == 0) return {};
    HYBRIDOPT_TRY(CheckPointer(host_data, "host_data"));
    HYBRIDOPT_TRY(CheckPointer(device_data, "device_data"));
    Device& device = found->device();
    HYBRIDOPT_TRY(device.CheckStream(stream));
    HYBRIDOPT_TRY(device.CheckRange(device_data, bytes));
    HYBRIDOPT_TRY(device.CopyToHost(stream, host_data, device_data, bytes));
    return FinishCopy(*found, stream);
  });
}

int32_t offload_device_map(offload_context_t context, void* device_data, uint64_t bytes,
                           void** mapped) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Contexts::Instance().Find(context, "context"));
    HYBRIDOPT_TRY(CheckPointer(mapped, "mapped"));
    HYBRIDOPT_ASSIGN(*mapped, found->device().Map(device_data, bytes));
    return {};
  });
}

int32_t offload_stream_create(offload_context_t context, offload_stream_t* stream) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Contexts::Instance().Find(context, "context"));
    HYBRIDOPT_TRY(CheckPointer(stream, "stream"));
    HYBRIDOPT_ASSIGN(*stream, found->CreateStreamForCaller());
    return {};
  });
}

int32_t offload_stream_destroy(offload_context_t context, offload_stream_t stream) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Contexts::Instance().Find(context, "context"));
    return found->DestroyStreamForCaller(stream);
  });
}

int32_t offload_stream_synchronize(offload_context_t context, offload_stream_t stream,
                                   int64_t timeout_ns) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Contexts::Instance().Find(context, "context"));
    return found->device().Synchronize(stream, timeout_ns);
  });
}

int32_t offload_stream_run(offload_context_t context, offload_stream_t stream,
                           offload_stream_function_t function, void* user) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Contexts::Instance().Find(context, "context"));
    HYBRIDOPT_TRY(CheckPointer(function, "function"));
    return found->device().Run(stream, function, user);
  });
}

// -------------------------------------------------------------------------------------- pools --

int32_t offload_pool_create(offload_context_t context, offload_pool_t* pool) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Contexts::Instance().Find(context, "context"));
    HYBRIDOPT_TRY(CheckPointer(pool, "pool"));
    // The device belongs to the context, so the pool keeps the context.
    std::shared_ptr<Device> device(found.shared(), &found->device());
    HYBRIDOPT_ASSIGN(std::shared_ptr<AddressPool> created, AddressPool::Create(std::move(device)));
    Result<void*> handle = Pools::Instance().Insert(created);
    if (!handle.ok()) {
      created->Retire();
      return handle.status();
    }
    *pool = static_cast<offload_pool_t>(handle.value());
    return {};
  });
}

int32_t offload_pool_destroy(offload_pool_t pool) {
  return Guard([&]() -> Status {
    return Pools::Instance().Destroy(
        pool, "pool", [](const AddressPool&) { return Status(); },
        [](AddressPool& closing) {
          closing.Retire();
          return Status();
        });
  });
}

int32_t offload_pool_alloc(offload_pool_t pool, uint64_t bytes, void** data) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Pools::Instance().Find(pool, "pool"));
    HYBRIDOPT_TRY(CheckPointer(data, "data"));
    HYBRIDOPT_ASSIGN(*data, found->Allocate(bytes));
    return {};
  });
}

int32_t offload_pool_free(void* data) {
  return Guard([&]() -> Status { return AddressPool::Free(data); });
}

int32_t offload_pool_release_memory(offload_pool_t pool) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Pools::Instance().Find(pool, "pool"));
    return found->ReleaseMemory();
  });
}

int32_t offload_pool_take_memory(offload_pool_t pool) {
  return Guard([&]() -> Status {
    HYBRIDOPT_ASSIGN(auto found, Pools::Instance().Find(pool, "pool"));
    return found->TakeMemory();
  });
}

int32_t offload_pool_enter(offload_pool_t pool) {
  return Guard([&]() -> Status {
    if (pool != nullptr) HYBRIDOPT_TRY(Pools::Instance().Find(pool, "pool").status());
    if (entered_pool.Set(pool)) return {};
    return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY,
                         "out of host memory: this thread cannot note which pool it has entered");
  });
}

void* offload_pool_torch_alloc(int64_t bytes, int32_t, offload_stream_t) {
  void* data = nullptr;
  Guard([&]() -> Status {
    if (entered_pool.get() == nullptr)
      return Status::Error(OFFLOAD_INVALID_STATE,
                           "this thread has entered no pool; call offload_pool_enter before");
    HYBRIDOPT_ASSIGN(auto found, Pools::Instance().Find(entered_pool.get(), "the pool entered"));
    HYBRIDOPT_ASSIGN(data, found->Allocate(bytes < 0 ? 0 : static_cast<uint64_t>(bytes)));
    return {};
  });
  return data;
}

void offload_pool_torch_free(void* data, int64_t, int32_t, offload_stream_t) {
  Guard([&]() -> Status { return AddressPool::Free(data); });
}

}  // extern "C"
