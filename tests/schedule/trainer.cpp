#include "trainer.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <utility>

#include "scheduler.h"

namespace hybridopt::schedule {
namespace {

constexpr uint64_t kQueuedStepsMax = 8;

// Times to wait for: some end before the work does.
int64_t TimeoutNs(uint64_t number) { return int64_t{1000} << number % 16; }

bool IsFailure(int32_t status) {
  return status == OFFLOAD_DEVICE_FAILED || status == OFFLOAD_COMM_FAILED ||
         status == OFFLOAD_POISONED;
}

std::string StatusText(const char* call, int32_t status) {
  return std::string(call) + " returns " + offload_status_name(status) +
         (status == OFFLOAD_OK ? "" : std::string(" (") + offload_last_error() + ")");
}

std::string FirstDifference(const Bytes& got, const Bytes& expected, uint64_t unit) {
  uint64_t first = expected.size(), last = 0, count = 0;
  for (uint64_t i = 0; i < expected.size(); i += unit) {
    if (std::memcmp(&got[i], &expected[i], unit) == 0) continue;
    first = std::min(first, i / unit);
    last = i / unit;
    ++count;
  }
  return ": " + std::to_string(count) + " elements from " + std::to_string(first) + " to " +
         std::to_string(last);
}

// A function on a stream that compares params there.
struct Comparison {
  const void* mapped[kParams];
  const Expected* expected;
  std::string text;

  static void Run(void* comparison) {
    const std::unique_ptr<Comparison> self(static_cast<Comparison*>(comparison));
    for (uint32_t id = 0; id < kParams; ++id)
      if (std::memcmp(self->mapped[id], self->expected->data[id].data(), DataBytes(id)) != 0)
        Fail(self->text + ": a stream that waits for a ticket reads other bits of param " +
             std::to_string(id));
  }
};

}  // namespace

// -------------------------------------------------------------------------------------- judging --

void Trainer::Wrong(const std::string& what) const {
  Fail("trainer " + std::to_string(number_) + ", " + std::to_string(steps_) + " steps: " + what);
}

bool Trainer::Queued(const char* call, int32_t status, bool allowed, offload_ticket_t ticket) {
  if (poisoned_ && status != OFFLOAD_POISONED)
    Wrong(StatusText(call, status) + " after a failure, expected POISONED");
  if (may_fail_ && IsFailure(status)) {
    CheckText(call, status);
    failed_ = true;
    return false;
  }
  if (!allowed) {
    if (status != OFFLOAD_INVALID_STATE)
      Wrong(StatusText(call, status) + ", expected INVALID_STATE");
    return false;
  }
  if (status != OFFLOAD_OK) Wrong(StatusText(call, status) + ", expected OK");
  tickets_.push_back(ticket);
  return true;
}

// The errors that a rank may get because of another rank, or of its own comm.
void Trainer::CheckText(const char* call, int32_t status) const {
  if (!program_.comm_may_fail()) return;
  using Fault = ThreadComm::Fault;
  const bool is_told =
      program_.comm_fault == Fault::kDie || (program_.comm_fault == Fault::kFail && rank_ == 1);
  const std::string expected =
      is_told ? "another rank has failed or is gone" : "another rank did not answer within 1.0 s";
  if (status == OFFLOAD_DEVICE_FAILED ||
      std::string(offload_last_error()).find(expected) == std::string::npos)
    Wrong(StatusText(call, status) + ", expected \"" + expected + '"');
}

bool Trainer::Waited(const char* call, int32_t status) {
  if (status == OFFLOAD_OK) return true;
  if (status == OFFLOAD_TIMED_OUT) return false;
  if (!may_fail_ || !IsFailure(status)) Wrong(StatusText(call, status));
  CheckText(call, status);
  failed_ = true;
  return false;
}

// The same for a wait for queued work. A thread that has already got the error of its failure finds
// the optimizer poisoned.
bool Trainer::WaitedForWork(const char* call, int32_t status) {
  if (Waited(call, status)) return true;
  poisoned_ = status != OFFLOAD_TIMED_OUT;
  if (poisoned_) Queued("step", offload_optimizer_step(optimizer_, nullptr, nullptr), true, 0);
  return false;
}

// Tickets of one optimizer grow. The caller's own work on its stream may still write an array, if
// no step has needed it.
void Trainer::Completed(offload_ticket_t ticket) {
  if (stream_ != nullptr)
    Waited("stream_synchronize", offload_stream_synchronize(context_, stream_, -1));
  const auto is_ours = [&](const Retired& retired) { return retired.ticket <= ticket; };
  retired_.erase(std::remove_if(retired_.begin(), retired_.end(), is_ours), retired_.end());
}

void Trainer::Lend() {
  for (const auto& array : data_)
    if (array != nullptr) array->Lend();
}

void Trainer::Retire(Arrays& arrays, offload_ticket_t ticket) {
  for (auto& array : arrays)
    if (array != nullptr) retired_.push_back({std::move(array), ticket});
}

offload_move_options_t Trainer::Streams() const {
  auto options = Make<offload_move_options_t>();
  options.streams = &stream_;
  options.stream_count = 1;
  return options;
}

// ----------------------------------------------------------------------------------- begin, end --

Trainer::Trainer(const Program& program, uint32_t number, offload_context_t context,
                 ThreadComm* comm, std::string directory)
    : program_(program),
      number_(number),
      rank_(program.world > 1 ? number : 0),
      context_(context),
      comm_(comm),
      table_(comm == nullptr ? offload_comm_t{} : comm->Table(static_cast<int32_t>(number))),
      directory_(std::move(directory)),
      may_fail_(program.may_fail()) {}

Trainer::~Trainer() = default;

void Trainer::Create() {
  offload_optimizer_options_t options = program_.options;
  if (comm_ != nullptr) options.comm = &table_;
  options.comm_timeout_ns = kCommTimeoutNs;
  Waited("create", offload_optimizer_create(context_, &options, &optimizer_));
  const offload_group_t group = Group();
  uint32_t group_id = 0;
  Waited("add_group", offload_optimizer_add_group(optimizer_, &group, &group_id));
  if (program_.sim) Waited("stream_create", offload_stream_create(context_, &stream_));
  AddParams();
  Waited("commit", offload_optimizer_commit(optimizer_, stream_));
}

void Trainer::AddParams() {
  for (uint32_t id = 0; id < kParams; ++id) {
    data_[id] = std::make_unique<Array>(context_, program_.sim, DataBytes(id));
    data_[id]->Lend();
    data_[id]->Write(InitialData(rank_, id), stream_);
    const std::string name = "r" + std::to_string(rank_) + "p" + std::to_string(id);
    auto param = Make<offload_param_t>();
    param.dtype = DtypeOf(id);
    param.grad_dtype = GradDtypeOf(id);
    param.name = name.c_str();
    param.data = data_[id]->data();
    param.count = kCounts[id];
    Waited("add_params", offload_optimizer_add_params(optimizer_, &param, 1, nullptr));
  }
}

void Trainer::Run(std::latch& committed) {
  Create();
  committed.arrive_and_wait();
  watched_.optimizer = optimizer_;
  watched_.optimizer.notify_all();
  try {
    for (const Call& call : program_.owners[number_].calls)
      if (!failed_) Do(call);
    if (program_.waits_at_end && !failed_) Compare();
  } catch (const DeviceFailed&) {
    if (!may_fail_) Wrong("the device has failed");
    WaitForAll();
  }
  Destroy();
}

// The library touches no memory of the caller any more; queued work has been done.
void Trainer::Destroy() {
  watched_.destroyed = true;
  const int32_t status = offload_optimizer_destroy(optimizer_);
  const bool hangs = program_.comm_fault == ThreadComm::Fault::kHang && rank_ == 1;
  left_behind_ = hangs && status == OFFLOAD_COMM_FAILED &&
                 std::strstr(offload_last_error(), "has not returned 1.0 s after its timeout");
  if (status != OFFLOAD_OK && !left_behind_) Wrong(StatusText("destroy", status));
  for (auto* arrays : {&data_, &grads_})
    for (const auto& array : *arrays)
      if (array != nullptr) array->TakeBack();
  retired_.clear();
  try {
    if (left_behind_) ReturnLate();
  } catch (const DeviceFailed&) {
    Wrong("the device has failed behind destroy");
  }
  if (stream_ != nullptr) (void)offload_stream_synchronize(context_, stream_, -1);
  if (!may_fail_ && !params_out_) CompareData();
  for (auto& array : grads_) array.reset();
  for (auto& array : data_) array.reset();
  if (stream_ != nullptr) (void)offload_stream_destroy(context_, stream_);
}

// The function of the comm returns after destroy. The library must then not touch memory of the
// caller.
void Trainer::ReturnLate() {
  LeaveThreads();
  Bytes before[kParams];
  for (uint32_t id = 0; id < kParams; ++id)
    if (program_.sim && data_[id] != nullptr) before[id] = data_[id]->Read();
  comm_->Release(OFFLOAD_OK);
  std::this_thread::sleep_for(std::chrono::seconds(1));
  for (uint32_t id = 0; id < kParams; ++id)
    if (program_.sim && data_[id] != nullptr && data_[id]->Read() != before[id])
      Wrong("param " + std::to_string(id) + " has changed behind destroy");
}

// ---------------------------------------------------------------------------------------- calls --

void Trainer::Do(const Call& call) {
  switch (call.kind) {
    case Kind::kStep:
    case Kind::kStepWithInf:
      return Step(call.kind == Kind::kStepWithInf);
    case Kind::kWait:
      return Wait(call.number, -1);
    case Kind::kWaitBriefly:
      return Wait(call.number, TimeoutNs(call.number));
    case Kind::kLook:
      return Wait(call.number, 0);
    case Kind::kStreamWait:
      return StreamWait();
    case Kind::kGetStats:
      return GetStats();
    case Kind::kCompare:
      return Compare();
    case Kind::kOffloadParams:
      return OffloadParams();
    case Kind::kReloadParams:
      return ReloadParams();
    case Kind::kOffloadGrads:
      return OffloadGrads();
    case Kind::kOffloadStates:
    case Kind::kReloadStates:
      return MoveStates(call.kind == Kind::kOffloadStates);
    case Kind::kSetFraction:
      return SetFraction(call.number);
    case Kind::kSave:
      return Save();
    case Kind::kLoad:
      return Load(call.number);
    case Kind::kFailDevice:
      return FailDevice();
    default:  // a user of a stash calls these
      break;
  }
}

// New arrays, so that those of steps that still run stay as they are.
void Trainer::MakeGrads(bool with_inf) {
  Arrays before;
  for (uint32_t id = 0; id < kParams; ++id) {
    auto array = std::make_unique<Array>(context_, program_.sim, GradBytes(id));
    before[id] = std::exchange(grads_[id], std::move(array));
    grads_[id]->Lend();
    Bytes bytes = Gradient(rank_, id, steps_);
    constexpr uint16_t kInfinity = 0x7f80;  // the upper half of it
    if (with_inf) std::memcpy(&bytes[BytesOf(GradDtypeOf(id)) - 2], &kInfinity, 2);
    grads_[id]->Write(bytes, stream_);
  }
  Bind(false);
  Retire(before, tickets_.empty() ? 0 : tickets_.back());
}

void Trainer::Bind(bool data_too) {
  offload_binding_t bindings[kParams];
  for (uint32_t id = 0; id < kParams; ++id) {
    bindings[id] = Make<offload_binding_t>();
    bindings[id].param = id;
    bindings[id].data = data_too ? data_[id]->data() : nullptr;
    bindings[id].grad = grads_[id] != nullptr ? grads_[id]->data() : nullptr;
  }
  const int32_t status = offload_optimizer_bind(optimizer_, bindings, kParams);
  if (status != OFFLOAD_OK && !(may_fail_ && IsFailure(status))) Wrong(StatusText("bind", status));
}

void Trainer::Step(bool with_inf) {
  if (steps_ == kStepsMax) return;
  if (queued_steps_ == kQueuedStepsMax && !WaitForAll()) return;
  if (grads_out_ && grads_steps_ != steps_) DropGrads();
  const bool is_skipped = with_inf && !grads_out_;
  if (!grads_out_) MakeGrads(with_inf);
  Lend();
  auto options = Make<offload_step_options_t>();
  options.grad_norm_max = NormMax(program_.variant);
  options.stream = stream_;
  offload_ticket_t ticket = 0;
  const int32_t status = offload_optimizer_step(optimizer_, &options, &ticket);
  if (!Queued("step", status, MayStep(), ticket)) return;
  ++queued_steps_;
  grads_out_ = false;
  (is_skipped ? skipped_ : applied_) += 1;
  steps_ += is_skipped ? 0 : 1;
}

void Trainer::DropGrads() {
  offload_move_options_t options = Streams();
  options.flags = OFFLOAD_MOVE_DROP;
  offload_ticket_t ticket = 0;
  const int32_t status = offload_optimizer_offload_grads(optimizer_, &options, &ticket);
  if (Queued("offload_grads with DROP", status, true, ticket)) grads_out_ = false;
}

void Trainer::OffloadGrads() {
  if (grads_out_ || steps_ == kStepsMax) return;
  MakeGrads(false);
  const offload_move_options_t options = Streams();
  offload_ticket_t ticket = 0;
  const int32_t status = offload_optimizer_offload_grads(optimizer_, &options, &ticket);
  if (!Queued("offload_grads", status, true, ticket)) return;
  grads_out_ = true;
  grads_steps_ = steps_;
  Retire(grads_, ticket);
}

void Trainer::OffloadParams() {
  Lend();
  const offload_move_options_t options = Streams();
  offload_ticket_t ticket = 0;
  const int32_t status = offload_optimizer_offload_params(optimizer_, &options, &ticket);
  if (!Queued("offload_params", status, true, ticket) || params_out_) return;
  params_out_ = true;
  Retire(data_, ticket);
}

void Trainer::ReloadParams() {
  if (!params_out_) return;
  for (uint32_t id = 0; id < kParams; ++id)
    data_[id] = std::make_unique<Array>(context_, program_.sim, DataBytes(id));
  Lend();
  Bind(true);
  const offload_move_options_t options = Streams();
  offload_ticket_t ticket = 0;
  const int32_t status = offload_optimizer_reload_params(optimizer_, &options, &ticket);
  if (Queued("reload_params", status, true, ticket)) params_out_ = false;
}

void Trainer::MoveStates(bool out) {
  Lend();
  const offload_move_options_t options = Streams();
  offload_ticket_t ticket = 0;
  const int32_t status = out ? offload_optimizer_offload_states(optimizer_, &options, &ticket)
                             : offload_optimizer_reload_states(optimizer_, &options, &ticket);
  if (Queued(out ? "offload_states" : "reload_states", status, true, ticket)) states_out_ = out;
}

void Trainer::SetFraction(uint64_t number) {
  Lend();
  offload_ticket_t ticket = 0;
  const int32_t status = offload_optimizer_set_device_fraction(
      optimizer_, static_cast<double>(number % 5) / 4, &ticket);
  Queued("set_device_fraction", status, true, ticket);
}

void Trainer::Save() {
  Lend();
  auto options = Make<offload_save_options_t>();
  const std::string path = directory_ + "/save" + std::to_string(saved_.size());
  options.path = path.c_str();
  options.stream = stream_;
  options.io_depth = 1;
  offload_ticket_t ticket = 0;
  const int32_t status = offload_optimizer_save(optimizer_, &options, &ticket);
  if (Queued("save", status, true, ticket)) saved_.push_back({path, steps_});
}

void Trainer::Load(uint64_t number) {
  if (saved_.empty()) return;
  const Saved& saved = saved_[number % saved_.size()];
  Lend();
  auto options = Make<offload_load_options_t>();
  options.path = saved.path.c_str();
  options.stream = stream_;
  options.io_depth = 1;
  offload_ticket_t ticket = 0;
  const int32_t status = offload_optimizer_load(optimizer_, &options, &ticket);
  if (Queued("load", status, MayStep(), ticket)) steps_ = saved.steps;
}

// A function that is queued after this wait finds the params of all queued steps. If ranks wait for
// each other, a stream could wait for a rank that never comes: programs with ranks have no streams.
void Trainer::StreamWait() {
  if (params_out_) return;
  Lend();
  const int32_t status = offload_optimizer_stream_wait(optimizer_, 0, stream_, nullptr, 0);
  if (may_fail_) return;
  if (status != OFFLOAD_OK) Wrong(StatusText("stream_wait", status));
  auto comparison = std::make_unique<Comparison>();
  comparison->text = "trainer " + std::to_string(number_);
  comparison->expected = &ExpectedAfter(program_.variant, program_.world, rank_, steps_);
  for (uint32_t id = 0; id < kParams; ++id) {
    void* mapped = data_[id]->data();
    if (program_.sim)
      Waited("device_map", offload_device_map(context_, mapped, DataBytes(id), &mapped));
    comparison->mapped[id] = mapped;
  }
  Waited("stream_run",
         offload_stream_run(context_, stream_, Comparison::Run, comparison.release()));
}

void Trainer::FailDevice() {
  (void)offload_stream_run(
      context_, stream_, [](void*) { throw std::runtime_error("the program fails the device"); },
      nullptr);
}

// ----------------------------------------------------------------------------- waiting, looking --

void Trainer::Wait(uint64_t number, int64_t timeout_ns) {
  if (tickets_.empty() || number % 2 == 0) {
    if (timeout_ns < 0)
      WaitForAll();
    else
      WaitedForWork("wait for all", offload_optimizer_wait(optimizer_, 0, timeout_ns));
    return;
  }
  const offload_ticket_t ticket = tickets_[number / 2 % tickets_.size()];
  if (WaitedForWork("wait", offload_optimizer_wait(optimizer_, ticket, timeout_ns)))
    Completed(ticket);
  else if (timeout_ns < 0 && !failed_)
    Wrong("wait without a limit returns TIMED_OUT");
}

// Afterwards the caller may use all arrays. Returns true if nothing has failed.
bool Trainer::WaitForAll() {
  if (!WaitedForWork("wait for all", offload_optimizer_wait(optimizer_, 0, -1))) return false;
  Completed(UINT64_MAX);
  queued_steps_ = 0;
  watched_.applied_min = applied_;
  for (auto* arrays : {&data_, &grads_})
    for (const auto& array : *arrays)
      if (array != nullptr) array->TakeBack();
  return true;
}

void Trainer::GetStats() {
  const bool all = WaitForAll();
  auto stats = Make<offload_stats_t>();
  const int32_t status = offload_optimizer_get_stats(optimizer_, &stats);
  if (status != OFFLOAD_OK) Wrong(StatusText("get_stats", status));
  if (!all) return;
  if (stats.steps_applied != applied_ || stats.steps_skipped != skipped_ || stats.queued != 0)
    Wrong("get_stats has " + std::to_string(stats.steps_applied) + " steps applied, " +
          std::to_string(stats.steps_skipped) + " skipped, " + std::to_string(stats.queued) +
          " calls queued; expected " + std::to_string(applied_) + ", " + std::to_string(skipped_) +
          ", 0");
}

void Trainer::Compare() {
  if (!WaitForAll()) return;
  if (!params_out_) CompareData();
  if (!params_out_ && !states_out_) CompareStates();
}

void Trainer::CompareData() {
  const Expected& expected = ExpectedAfter(program_.variant, program_.world, rank_, steps_);
  for (uint32_t id = 0; id < kParams; ++id) {
    data_[id]->Lend();
    const Bytes bytes = data_[id]->Read();
    if (bytes != expected.data[id])
      Wrong("param " + std::to_string(id) + " has other bits" +
            FirstDifference(bytes, expected.data[id], BytesOf(DtypeOf(id))));
    data_[id]->TakeBack();
  }
}

void Trainer::CompareStates() {
  const Expected& expected = ExpectedAfter(program_.variant, program_.world, rank_, steps_);
  Lend();
  const auto read = [&](const void* data, uint64_t bytes) {
    Bytes copy(bytes);
    if (!Waited("device_download",
                offload_device_download(context_, copy.data(), data, bytes, nullptr)))
      throw DeviceFailed();
    return copy;
  };
  for (uint32_t id = 0; id < kParams; ++id)
    if (StatesOf(optimizer_, id, read) != expected.states[id])
      Wrong("the states of param " + std::to_string(id) + " have other bits");
  for (const auto& array : data_) array->TakeBack();
}

// ------------------------------------------------------------------------------------ observers --

namespace {

// Checks the status of a call that any thread may make. False: the optimizer is gone.
bool Seen(const char* call, int32_t status, Watched& watched, bool may_fail) {
  if (status == OFFLOAD_OK || status == OFFLOAD_TIMED_OUT) return true;
  if (may_fail && IsFailure(status)) {
    watched.told = true;
    return true;
  }
  if (!watched.destroyed) Fail("an observer: " + StatusText(call, status));
  return false;
}

}  // namespace

void Observe(const Script& script, Watched& watched, bool may_fail) {
  watched.optimizer.wait(nullptr);
  const offload_optimizer_t optimizer = watched.optimizer;
  uint64_t applied = 0;
  for (const Call& call : script.calls) {
    const uint64_t applied_min = watched.applied_min;
    auto stats = Make<offload_stats_t>();
    int32_t status = OFFLOAD_OK;
    if (call.kind == Kind::kGetStats)
      status = offload_optimizer_get_stats(optimizer, &stats);
    else
      status = offload_optimizer_wait(optimizer, 0,
                                      call.kind == Kind::kWait   ? -1
                                      : call.kind == Kind::kLook ? 0
                                                                 : TimeoutNs(call.number));
    if (!Seen("wait or get_stats", status, watched, may_fail)) return;
    if (call.kind != Kind::kGetStats) continue;
    if (stats.steps_applied < std::max(applied, applied_min))
      Fail("an observer sees " + std::to_string(stats.steps_applied) + " steps after " +
           std::to_string(std::max(applied, applied_min)));
    applied = stats.steps_applied;
  }
}

}  // namespace hybridopt::schedule
