// The tables of docs/LIFECYCLE.md, one test for each cell: the decisions of class Lifecycle, and
// what a caller of the ABI sees on the simulated device.
#include "state/lifecycle.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "device/device.h"
#include "offload.h"
#include "state/param_table.h"

namespace hybridopt {
namespace {

constexpr uint32_t kMoveAll = OFFLOAD_MOVABLE_PARAMS | OFFLOAD_MOVABLE_GRADS |
                              OFFLOAD_MOVABLE_STATES | OFFLOAD_MOVABLE_ACCUMULATE;

// Where the data, gradient and states of one param are.
struct Place {
  bool params_on_host = false;
  bool data_bound = true;
  HostGrad held = HostGrad::kNone;
  bool grad_bound = false;
  bool states_on_host = false;
  bool operator==(const Place&) const = default;
};

void PrintTo(const Place& place, std::ostream* out) {
  const char* const held[] = {"none", "stored", "accumulated"};
  *out << (place.params_on_host ? "params on host" : "params on device")
       << (place.data_bound ? ", bound; gradient " : ", no address; gradient ")
       << held[static_cast<int>(place.held)] << (place.grad_bound ? ", bound" : "")
       << (place.states_on_host ? "; states on host" : "; states on device");
}

// The calls of enum Move come first, with the same values.
enum class Call {
  kOffloadParams,
  kReloadParams,
  kOffloadGrads,
  kAccumulateGrads,
  kDropGrads,
  kReloadGrads,
  kOffloadStates,
  kReloadStates,
  kRefreshMasters,
  kBindData,
  kBindGrad,
  kBindNull,  // data and grad NULL
  kStep,
  kView
};
bool IsMove(Call call) { return call <= Call::kRefreshMasters; }
static_assert(static_cast<Move>(Call::kRefreshMasters) == Move::kRefreshMasters);

enum class Outcome {
  kDone,     // allowed; the place changes, or content does
  kNothing,  // allowed, and nothing happens
  kRefused   // INVALID_STATE
};

struct Cell {
  const char* name;
  Place from;
  Call call;
  Outcome outcome;
  Place to;
  const char* words = "";  // of the error: what to do
  int32_t grad_dtype = OFFLOAD_BF16;
};

void PrintTo(const Cell& cell, std::ostream* out) { *out << cell.name; }

// ------------------------------------------------------------------------------------- the tables

constexpr Place kHome = {};
constexpr Place kAway = {.params_on_host = true, .data_bound = false};
constexpr Place kAwayBound = {.params_on_host = true, .data_bound = true};

constexpr Place WithGrad(Place place, HostGrad held, bool bound) {
  place.held = held;
  place.grad_bound = bound;
  return place;
}
constexpr Place kBound = WithGrad(kHome, HostGrad::kNone, true);
constexpr Place kStored = WithGrad(kHome, HostGrad::kStored, false);
constexpr Place kStoredBound = WithGrad(kHome, HostGrad::kStored, true);
constexpr Place kSummed = WithGrad(kHome, HostGrad::kAccumulated, false);
constexpr Place kSummedBound = WithGrad(kHome, HostGrad::kAccumulated, true);
constexpr Place kAwayWithGrad = WithGrad(kAway, HostGrad::kNone, true);
constexpr Place kAwayBoundWithGrad = WithGrad(kAwayBound, HostGrad::kNone, true);
constexpr Place kAwayStored = WithGrad(kAway, HostGrad::kStored, false);
constexpr Place kStatesAway = {.states_on_host = true};
constexpr Place kStatesAwayWithGrad = {.grad_bound = true, .states_on_host = true};

constexpr auto kDone = Outcome::kDone;
constexpr auto kNothing = Outcome::kNothing;
constexpr auto kRefused = Outcome::kRefused;

const Cell kParams[] = {
    {"OffloadOnDevice", kHome, Call::kOffloadParams, kDone, kAway},
    {"OffloadOnHost", kAway, Call::kOffloadParams, kNothing, kAway},
    {"OffloadOnHostBound", kAwayBound, Call::kOffloadParams, kNothing, kAwayBound},
    {"ReloadOnDevice", kHome, Call::kReloadParams, kNothing, kHome},
    {"ReloadOnHost", kAway, Call::kReloadParams, kRefused, kAway,
     "given up by offload_params; tell the new one with offload_optimizer_bind, then reload"},
    {"ReloadOnHostBound", kAwayBound, Call::kReloadParams, kDone, kHome},
    {"BindOnDevice", kHome, Call::kBindData, kDone, kHome},
    {"BindOnHost", kAway, Call::kBindData, kDone, kAwayBound},
    {"BindOnHostBound", kAwayBound, Call::kBindData, kDone, kAwayBound},
    {"BindNullOnDevice", kHome, Call::kBindNull, kNothing, kHome},
    {"BindNullOnHost", kAway, Call::kBindNull, kNothing, kAway},
    {"BindNullOnHostBound", kAwayBound, Call::kBindNull, kNothing, kAwayBound},
    {"RefreshOnDevice", kHome, Call::kRefreshMasters, kDone, kHome},
    {"RefreshOnHost", kAway, Call::kRefreshMasters, kRefused, kAway,
     "nobody can have loaded weights into them; bind and reload_params first"},
    {"RefreshOnHostBound", kAwayBound, Call::kRefreshMasters, kRefused, kAwayBound,
     "bind and reload_params first"},
    {"StepOnDevice", kBound, Call::kStep, kDone, kBound},
    {"StepOnHost", kAwayWithGrad, Call::kStep, kRefused, kAwayWithGrad,
     "it has a gradient, but its params are on the host; bind and reload_params first"},
    {"StepOnHostStoredGradient", kAwayStored, Call::kStep, kRefused, kAwayStored,
     "bind and reload_params first"},
    {"StepOnHostBound", kAwayBoundWithGrad, Call::kStep, kRefused, kAwayBoundWithGrad,
     "bind and reload_params first"},
    {"StepWithoutGradientOnDevice", kHome, Call::kStep, kDone, kHome},
    {"StepWithoutGradientOnHost", kAway, Call::kStep, kDone, kAway},
    {"StepWithoutGradientOnHostBound", kAwayBound, Call::kStep, kDone, kAwayBound},
};

constexpr const char* kUnbound =
    "given up by offload_grads; tell the new one with "
    "offload_optimizer_bind, then reload";
constexpr const char* kTwo =
    "it has a gradient on the host and another one was bound since; reload_grads over that one, "
    "give "
    "both up with OFFLOAD_MOVE_DROP, or bind NULL";
constexpr const char* kTwoWithSum =
    "it has a sum of gradients on the host and another gradient was bound since; add it with "
    "OFFLOAD_MOVE_ACCUMULATE, give both up with OFFLOAD_MOVE_DROP, or bind NULL";

const Cell kGrads[] = {
    {"BindNone", kHome, Call::kBindGrad, kDone, kBound},
    {"BindBound", kBound, Call::kBindGrad, kDone, kBound},
    {"BindStored", kStored, Call::kBindGrad, kDone, kStoredBound},
    {"BindStoredBound", kStoredBound, Call::kBindGrad, kDone, kStoredBound},
    {"BindAccumulated", kSummed, Call::kBindGrad, kDone, kSummedBound},
    {"BindAccumulatedBound", kSummedBound, Call::kBindGrad, kDone, kSummedBound},
    {"BindNullNone", kHome, Call::kBindNull, kNothing, kHome},
    {"BindNullBound", kBound, Call::kBindNull, kDone, kHome},
    {"BindNullStored", kStored, Call::kBindNull, kNothing, kStored},
    {"BindNullStoredBound", kStoredBound, Call::kBindNull, kDone, kStored},
    {"BindNullAccumulated", kSummed, Call::kBindNull, kNothing, kSummed},
    {"BindNullAccumulatedBound", kSummedBound, Call::kBindNull, kDone, kSummed},
    {"OffloadNone", kHome, Call::kOffloadGrads, kNothing, kHome},
    {"OffloadBound", kBound, Call::kOffloadGrads, kDone, kStored},
    {"OffloadStored", kStored, Call::kOffloadGrads, kNothing, kStored},
    {"OffloadStoredBound", kStoredBound, Call::kOffloadGrads, kRefused, kStoredBound,
     "a gradient of it that no step has used; reload_grads over this one, give both up with "
     "OFFLOAD_MOVE_DROP, or bind NULL and step"},
    {"OffloadAccumulated", kSummed, Call::kOffloadGrads, kNothing, kSummed},
    {"OffloadAccumulatedBound", kSummedBound, Call::kOffloadGrads, kRefused, kSummedBound,
     "an accumulation is under way on the host, which a plain offload_grads would overwrite; add "
     "with OFFLOAD_MOVE_ACCUMULATE, or give it up with OFFLOAD_MOVE_DROP"},
    {"AccumulateNone", kHome, Call::kAccumulateGrads, kNothing, kHome},
    {"AccumulateBound", kBound, Call::kAccumulateGrads, kDone, kSummed},
    {"AccumulateStored", kStored, Call::kAccumulateGrads, kNothing, kStored},
    {"AccumulateStoredBound", kStoredBound, Call::kAccumulateGrads, kRefused, kStoredBound,
     "offloaded without OFFLOAD_MOVE_ACCUMULATE; use the flag from the first micro-batch on"},
    {"AccumulateAccumulated", kSummed, Call::kAccumulateGrads, kNothing, kSummed},
    {"AccumulateAccumulatedBound", kSummedBound, Call::kAccumulateGrads, kDone, kSummed},
    {"DropNone", kHome, Call::kDropGrads, kNothing, kHome},
    {"DropBound", kBound, Call::kDropGrads, kDone, kHome},
    {"DropStored", kStored, Call::kDropGrads, kDone, kHome},
    {"DropStoredBound", kStoredBound, Call::kDropGrads, kDone, kHome},
    {"DropAccumulated", kSummed, Call::kDropGrads, kDone, kHome},
    {"DropAccumulatedBound", kSummedBound, Call::kDropGrads, kDone, kHome},
    {"ReloadNone", kHome, Call::kReloadGrads, kNothing, kHome},
    {"ReloadBound", kBound, Call::kReloadGrads, kNothing, kBound},
    {"ReloadStored", kStored, Call::kReloadGrads, kRefused, kStored, kUnbound},
    {"ReloadStoredBound", kStoredBound, Call::kReloadGrads, kDone, kBound},
    {"ReloadAccumulated", kSummed, Call::kReloadGrads, kRefused, kSummed, kUnbound},
    {"ReloadAccumulatedBound", kSummedBound, Call::kReloadGrads, kRefused, kSummedBound,
     "accumulated in fp32, which its own dtype cannot hold; let the step read it on the host"},
    {"ReloadAccumulatedBoundFp16", kSummedBound, Call::kReloadGrads, kRefused, kSummedBound,
     "let the step read it on the host", OFFLOAD_FP16},
    {"ReloadAccumulatedBoundFp32", kSummedBound, Call::kReloadGrads, kDone, kBound, "",
     OFFLOAD_FP32},
    {"StepNone", kHome, Call::kStep, kDone, kHome},
    {"StepBound", kBound, Call::kStep, kDone, kBound},
    {"StepStored", kStored, Call::kStep, kDone, kHome},
    {"StepStoredBound", kStoredBound, Call::kStep, kRefused, kStoredBound, kTwo},
    {"StepAccumulated", kSummed, Call::kStep, kDone, kHome},
    {"StepAccumulatedBound", kSummedBound, Call::kStep, kRefused, kSummedBound, kTwoWithSum},
};

const Cell kStates[] = {
    {"OffloadOnDevice", kHome, Call::kOffloadStates, kDone, kStatesAway},
    {"OffloadOnHost", kStatesAway, Call::kOffloadStates, kNothing, kStatesAway},
    {"ReloadOnDevice", kHome, Call::kReloadStates, kNothing, kHome},
    {"ReloadOnHost", kStatesAway, Call::kReloadStates, kDone, kHome},
    {"StepOnDevice", kBound, Call::kStep, kDone, kBound},
    {"StepOnHost", kStatesAwayWithGrad, Call::kStep, kRefused, kStatesAwayWithGrad,
     "states of 1 params were given up by offload_states; call offload_optimizer_reload_states "
     "first"},
    {"StepWithoutGradientOnHost", kStatesAway, Call::kStep, kRefused, kStatesAway,
     "call offload_optimizer_reload_states first"},
    {"RefreshOnDevice", kHome, Call::kRefreshMasters, kDone, kHome},
    {"RefreshOnHost", kStatesAway, Call::kRefreshMasters, kRefused, kStatesAway,
     "its states are on the host; reload_states first"},
    {"ViewOnDevice", kHome, Call::kView, kNothing, kHome},
    {"ViewOnHost", kStatesAway, Call::kView, kRefused, kStatesAway,
     "are on the host; call offload_optimizer_reload_states first"},
};

std::string NameOf(const testing::TestParamInfo<Cell>& info) { return info.param.name; }

constexpr uint64_t kCounts[] = {600, 500};  // the cell's param, and a bystander

offload_group_t AdamGroup() {
  offload_group_t group{};
  group.struct_size = sizeof(group);
  group.lr = 0.01;
  group.beta1 = 0.9;
  group.beta2 = 0.99;
  group.eps = 1e-8;
  return group;
}

offload_param_t ParamOf(uint32_t id, int32_t grad_dtype, void* data) {
  offload_param_t param{};
  param.struct_size = sizeof(param);
  param.name = id == 0 ? "weight" : "bystander";
  param.dtype = OFFLOAD_BF16;
  param.grad_dtype = id == 0 ? grad_dtype : OFFLOAD_FP32;
  param.data = data;
  param.count = kCounts[id];
  return param;
}

// --------------------------------------------------------------------------------- class Lifecycle

void ExpectOk(const Status& status) { EXPECT_TRUE(status.ok()) << status.message(); }

// The param table and its lifecycle, as class Optimizer uses them.
class Decisions {
 public:
  explicit Decisions(int32_t grad_dtype, uint32_t movable = kMoveAll)
      : device_(CreateHostDevice()), table_(OFFLOAD_ADAMW, *device_) {
    EXPECT_TRUE(table_.AddGroup(AdamGroup()).ok());
    std::vector<ParamInput> inputs;
    for (uint32_t id : {0u, 1u}) inputs.push_back({ParamOf(id, grad_dtype, data_[id]), {}});
    EXPECT_TRUE(table_.AddParams(inputs).ok());
    lifecycle_ = std::make_unique<Lifecycle>(table_, movable, std::vector<uint64_t>{6000, 5000});
  }

  Lifecycle& lifecycle() { return *lifecycle_; }

  void Bind(void* data, const void* grad) {
    offload_binding_t binding{};
    binding.data = data;
    binding.grad = grad;
    EXPECT_TRUE(table_.Bind({&binding, 1}).ok());
  }

  // The move over param 0, with the addresses given up as the optimizer does it.
  Status Apply(Move move) {
    const uint32_t ids[] = {0};
    HYBRIDOPT_ASSIGN(const std::vector<uint32_t> moving, lifecycle_->Check(move, ids));
    moved_ = !moving.empty();
    lifecycle_->Apply(move, moving);
    for (uint32_t id : moving) {
      if (move == Move::kOffloadParams) table_.ReleaseData(id);
      if (move == Move::kOffloadGrads || move == Move::kAccumulateGrads || move == Move::kDropGrads)
        table_.ReleaseGrad(id);
    }
    return {};
  }
  bool moved() const { return moved_; }  // the last move had something to do

  void Enter(const Place& place) {
    if (place.params_on_host) ExpectOk(Apply(Move::kOffloadParams));
    if (place.held != HostGrad::kNone) {
      Bind(nullptr, grad_[0]);
      const bool stored = place.held == HostGrad::kStored;
      ExpectOk(Apply(stored ? Move::kOffloadGrads : Move::kAccumulateGrads));
    }
    Bind(place.params_on_host && place.data_bound ? data_[2] : nullptr,
         place.grad_bound ? grad_[1] : nullptr);
    if (place.states_on_host) ExpectOk(Apply(Move::kOffloadStates));
  }

  Place Now() const {
    const Addresses& addresses = table_.addresses()[0];
    return {lifecycle_->params_on_host(0), addresses.data != nullptr, lifecycle_->host_grad(0),
            addresses.grad != nullptr, lifecycle_->states_on_host(0)};
  }

  Status Make(Call call) {
    const void* const grad = table_.addresses()[0].grad;
    switch (call) {
      case Call::kBindData:
        Bind(data_[3], grad);
        return {};
      case Call::kBindGrad:
        Bind(nullptr, grad_[2]);
        return {};
      case Call::kBindNull:
        Bind(nullptr, nullptr);
        return {};
      case Call::kStep:
        HYBRIDOPT_TRY(lifecycle_->CheckStep());
        lifecycle_->ApplyStep();
        return {};
      case Call::kView:  // decided by the optimizer, over states_on_host()
        return lifecycle_->states_on_host(0) ? Status::Error(OFFLOAD_INVALID_STATE, "away")
                                             : Status();
      default:
        return Apply(static_cast<Move>(call));
    }
  }

 private:
  alignas(256) std::byte data_[4][4096];
  alignas(256) std::byte grad_[3][4096];
  std::unique_ptr<Device> device_;
  ParamTable table_;
  std::unique_ptr<Lifecycle> lifecycle_;
  bool moved_ = false;
};

class DecisionTest : public testing::TestWithParam<Cell> {};

TEST_P(DecisionTest, Cell) {
  const Cell& cell = GetParam();
  Decisions decisions(cell.grad_dtype);
  decisions.Enter(cell.from);
  ASSERT_EQ(decisions.Now(), cell.from);
  const Status status = decisions.Make(cell.call);
  EXPECT_EQ(decisions.Now(), cell.to);
  if (cell.outcome != kRefused) {
    EXPECT_TRUE(status.ok()) << status.message();
    EXPECT_TRUE(!IsMove(cell.call) || decisions.moved() == (cell.outcome == kDone));
    return;
  }
  EXPECT_EQ(status.code(), OFFLOAD_INVALID_STATE);
  if (cell.call == Call::kView) return;
  EXPECT_NE(status.message().find(cell.words), std::string::npos) << status.message();
}

INSTANTIATE_TEST_SUITE_P(Params, DecisionTest, testing::ValuesIn(kParams), NameOf);
INSTANTIATE_TEST_SUITE_P(Grads, DecisionTest, testing::ValuesIn(kGrads), NameOf);
INSTANTIATE_TEST_SUITE_P(States, DecisionTest, testing::ValuesIn(kStates), NameOf);

TEST(Decision, EachMoveNeedsItsRoom) {
  struct Need {
    Move move;
    uint32_t enough;  // any bit of it
    const char* name;
  };
  constexpr uint32_t kGradBits = OFFLOAD_MOVABLE_GRADS | OFFLOAD_MOVABLE_ACCUMULATE;
  const Need needs[] = {
      {Move::kOffloadParams, OFFLOAD_MOVABLE_PARAMS, "OFFLOAD_MOVABLE_PARAMS"},
      {Move::kReloadParams, OFFLOAD_MOVABLE_PARAMS, "OFFLOAD_MOVABLE_PARAMS"},
      {Move::kOffloadGrads, kGradBits, "OFFLOAD_MOVABLE_GRADS"},
      {Move::kReloadGrads, kGradBits, "OFFLOAD_MOVABLE_GRADS"},
      {Move::kAccumulateGrads, OFFLOAD_MOVABLE_ACCUMULATE, "OFFLOAD_MOVABLE_ACCUMULATE"},
      {Move::kOffloadStates, OFFLOAD_MOVABLE_STATES, "OFFLOAD_MOVABLE_STATES"},
      {Move::kReloadStates, OFFLOAD_MOVABLE_STATES, "OFFLOAD_MOVABLE_STATES"},
      {Move::kDropGrads, UINT32_MAX, ""},
      {Move::kRefreshMasters, UINT32_MAX, ""},
  };
  const uint32_t ids[] = {0};
  for (const Need& need : needs) {
    for (uint32_t movable = 0; movable <= kMoveAll; ++movable) {
      Decisions decisions(OFFLOAD_BF16, movable);
      const Status status = decisions.lifecycle().Check(need.move, ids).status();
      const bool enough = need.enough == UINT32_MAX || (need.enough & movable) != 0;
      EXPECT_EQ(status.ok(), enough) << need.name << " of " << movable;
      if (enough) continue;
      EXPECT_EQ(status.code(), OFFLOAD_INVALID_STATE);
      char words[32];
      std::snprintf(words, sizeof(words), "options.movable is 0x%x", movable);
      EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
      EXPECT_NE(status.message().find(std::string("needs ") + need.name + "; say so at create"),
                std::string::npos)
          << status.message();
    }
  }
}

TEST(Decision, AParamNamedTwiceMovesOnce) {
  Decisions decisions(OFFLOAD_BF16);
  const uint32_t ids[] = {1, 0, 1, 1, 0};
  EXPECT_EQ(decisions.lifecycle().Check(Move::kOffloadParams, ids).value(),
            (std::vector<uint32_t>{1, 0}));
}

TEST(Decision, BytesCountWhatIsOnTheHost) {
  Decisions decisions(OFFLOAD_BF16);
  Lifecycle& lifecycle = decisions.lifecycle();
  decisions.Enter({.params_on_host = true,
                   .data_bound = false,
                   .held = HostGrad::kStored,
                   .grad_bound = false,
                   .states_on_host = true});
  EXPECT_EQ(lifecycle.params_on_host_bytes(), 2 * kCounts[0]);
  EXPECT_EQ(lifecycle.grads_on_host_bytes(), 2 * kCounts[0]);
  EXPECT_EQ(lifecycle.states_on_host_bytes(), 6000u);
  EXPECT_EQ(lifecycle.states_on_host_count(), 1u);
  EXPECT_TRUE(decisions.Make(Call::kDropGrads).ok());
  EXPECT_EQ(lifecycle.grads_on_host_bytes(), 0u);
  Decisions summed(OFFLOAD_BF16);
  summed.Enter(kSummed);
  EXPECT_EQ(summed.lifecycle().grads_on_host_bytes(), 4 * kCounts[0]);
  summed.lifecycle().ApplyStep();
  EXPECT_EQ(summed.lifecycle().grads_on_host_bytes(), 0u);
}

// ----------------------------------------------------------------------------------------- the ABI

template <typename Struct>
Struct Make() {
  Struct value{};
  value.struct_size = sizeof(value);
  return value;
}

void ExpectDone(int32_t status) { EXPECT_EQ(status, OFFLOAD_OK) << offload_last_error(); }

using MoveFunction = int32_t (*)(offload_optimizer_t, const offload_move_options_t*,
                                 offload_ticket_t*);

// In the order of enum Move, each with its flags.
constexpr std::pair<MoveFunction, uint32_t> kMoveFunctions[] = {
    {offload_optimizer_offload_params, 0},
    {offload_optimizer_reload_params, 0},
    {offload_optimizer_offload_grads, 0},
    {offload_optimizer_offload_grads, OFFLOAD_MOVE_ACCUMULATE},
    {offload_optimizer_offload_grads, OFFLOAD_MOVE_DROP},
    {offload_optimizer_reload_grads, 0},
    {offload_optimizer_offload_states, 0},
    {offload_optimizer_reload_states, 0},
    {offload_optimizer_refresh_masters, 0},
};

// Two params on the simulated device, the first of which has a device and a host share.
class Machine {
 public:
  explicit Machine(int32_t grad_dtype, uint32_t movable = kMoveAll) : grad_dtype_(grad_dtype) {
    auto context_options = Make<offload_context_options_t>();
    context_options.device_kind = OFFLOAD_DEVICE_SIM;
    context_options.threads = 1;
    context_options.sim_memory_bytes = 1 << 20;
    ExpectDone(offload_context_create(&context_options, &context_));
    auto options = Make<offload_optimizer_options_t>();
    options.algorithm = OFFLOAD_ADAMW;
    options.device_fraction = 0.25;
    options.movable = movable;
    ExpectDone(offload_optimizer_create(context_, &options, &optimizer_));
    const offload_group_t group = AdamGroup();
    uint32_t group_id = 0;
    ExpectDone(offload_optimizer_add_group(optimizer_, &group, &group_id));
    for (uint32_t id : {0u, 1u}) {
      data_[id] = NewArray(40 + id);
      grad_[id] = id == 1 ? NewArray(50) : nullptr;
      offload_param_t param = ParamOf(id, grad_dtype, data_[id]);
      param.grad = grad_[id];
      ExpectDone(offload_optimizer_add_params(optimizer_, &param, 1, nullptr));
    }
    ExpectDone(offload_optimizer_commit(optimizer_, nullptr));
  }
  ~Machine() {
    ExpectDone(offload_optimizer_destroy(optimizer_));
    ExpectDone(offload_context_destroy(context_));
  }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  offload_optimizer_t optimizer() const { return optimizer_; }

  int32_t MoveFirst(MoveFunction move, uint32_t flags = 0) {
    const uint32_t id = 0;
    auto options = Make<offload_move_options_t>();
    options.params = &id;
    options.param_count = 1;
    options.flags = flags;
    return move(optimizer_, &options, nullptr);
  }

  int32_t Bind(void* data, void* grad) {
    auto binding = Make<offload_binding_t>();
    binding.data = data;
    binding.grad = grad;
    const int32_t status = offload_optimizer_bind(optimizer_, &binding, 1);
    if (data != nullptr) data_[0] = data;
    grad_[0] = grad;
    return status;
  }

  void Enter(const Place& place) {
    if (place.params_on_host) ExpectDone(MoveFirst(offload_optimizer_offload_params));
    if (place.held != HostGrad::kNone) {
      ExpectDone(Bind(nullptr, NewArray(60)));
      ExpectDone(MoveFirst(offload_optimizer_offload_grads,
                           place.held == HostGrad::kStored ? 0 : OFFLOAD_MOVE_ACCUMULATE));
    }
    ExpectDone(Bind(place.params_on_host && place.data_bound ? NewArray(61) : nullptr,
                    place.grad_bound ? NewArray(62) : nullptr));
    if (place.states_on_host) ExpectDone(MoveFirst(offload_optimizer_offload_states));
    ExpectDone(offload_optimizer_wait(optimizer_, 0, -1));
  }

  int32_t Do(Call call) {
    auto view = Make<offload_state_view_t>();
    if (IsMove(call)) {
      const auto& [move, flags] = kMoveFunctions[static_cast<size_t>(call)];
      return MoveFirst(move, flags);
    }
    switch (call) {
      case Call::kBindData:  // of params that are on the device: the caller has moved them
        return Bind(CopyOf(Now().params_on_host ? nullptr : data_[0]), grad_[0]);
      case Call::kBindGrad:
        return Bind(nullptr, NewArray(63));
      case Call::kBindNull:
        return Bind(nullptr, nullptr);
      case Call::kStep:
        return offload_optimizer_step(optimizer_, nullptr, nullptr);
      default:
        return offload_optimizer_state(optimizer_, 0, OFFLOAD_STATE_EXP_AVG, &view);
    }
  }

  offload_stats_t Stats() const {
    auto stats = Make<offload_stats_t>();
    ExpectDone(offload_optimizer_get_stats(optimizer_, &stats));
    return stats;
  }

  // Where the first param's data, gradient and states are, by the bytes in the statistics: every
  // place has a number of its own.
  Place Now() const {
    const offload_stats_t stats = Stats();
    const uint64_t grad_bytes = kCounts[0] * (grad_dtype_ == OFFLOAD_FP32 ? 4 : 2);
    Place place;
    place.params_on_host = stats.params_bytes[OFFLOAD_TIER_HOST] == 2 * kCounts[0];
    place.data_bound = stats.params_bytes[OFFLOAD_TIER_DEVICE] == 2 * (kCounts[0] + kCounts[1]);
    place.grad_bound = stats.grads_bytes[OFFLOAD_TIER_DEVICE] > 4 * kCounts[1];
    place.states_on_host = stats.state_bytes[OFFLOAD_TIER_DEVICE] == 0;
    if (stats.grads_bytes[OFFLOAD_TIER_HOST] == grad_bytes) place.held = HostGrad::kStored;
    // An fp32 gradient takes the same room when it is added up and when it is stored, so the
    // entered kind counts.
    if (stats.grads_bytes[OFFLOAD_TIER_HOST] == 4 * kCounts[0]) place.held = HostGrad::kAccumulated;
    EXPECT_TRUE(place.params_on_host || stats.params_bytes[OFFLOAD_TIER_HOST] == 0);
    EXPECT_TRUE(place.data_bound || stats.params_bytes[OFFLOAD_TIER_DEVICE] == 2 * kCounts[1]);
    EXPECT_TRUE(place.held != HostGrad::kNone || stats.grads_bytes[OFFLOAD_TIER_HOST] == 0);
    return place;
  }

  uint64_t StepCount(uint32_t id) const {
    auto view = Make<offload_state_view_t>();
    ExpectDone(offload_optimizer_state(optimizer_, id, OFFLOAD_STATE_EXP_AVG, &view));
    return view.step_count;
  }

  // Reloads everything, takes a step with the gradients that there are, and returns all bits of
  // params, states and the norm.
  std::vector<std::byte> Finish() {
    const Place place = Now();
    if (place.held != HostGrad::kNone || place.params_on_host)
      ExpectDone(Bind(place.params_on_host && !place.data_bound ? NewArray(64) : nullptr,
                      place.held != HostGrad::kNone ? nullptr : grad_[0]));
    ExpectDone(MoveFirst(offload_optimizer_reload_params));
    ExpectDone(MoveFirst(offload_optimizer_reload_states));
    ExpectDone(offload_optimizer_step(optimizer_, nullptr, nullptr));
    ExpectDone(offload_optimizer_wait(optimizer_, 0, -1));
    std::vector<std::byte> bits;
    auto result = Make<offload_step_result_t>();
    ExpectDone(offload_optimizer_step_result(optimizer_, 0, &result));
    Append(bits, &result.grad_norm, sizeof(result.grad_norm));
    for (uint32_t id : {0u, 1u}) {
      AppendDevice(bits, data_[id], 2 * kCounts[id]);
      for (int32_t kind : {OFFLOAD_STATE_MASTER, OFFLOAD_STATE_EXP_AVG, OFFLOAD_STATE_EXP_AVG_SQ}) {
        auto view = Make<offload_state_view_t>();
        ExpectDone(offload_optimizer_state(optimizer_, id, kind, &view));
        AppendDevice(bits, view.device_data, 4 * view.device_count);
        Append(bits, view.host_data, 4 * view.host_count);
        Append(bits, &view.step_count, sizeof(view.step_count));
      }
    }
    return bits;
  }

 private:
  // A device array of small numbers, in any dtype.
  void* NewArray(uint64_t seed) {
    std::vector<uint16_t> numbers(2048);
    for (uint16_t& number : numbers) {
      seed = seed * 6364136223846793005 + 1442695040888963407;
      number = static_cast<uint16_t>((seed >> 63) << 15 | (0x3400 + (seed >> 53) % 0x400));
    }
    void* array = nullptr;
    ExpectDone(offload_device_alloc(context_, 4096, &array));
    ExpectDone(offload_device_upload(context_, array, numbers.data(), 4096, nullptr));
    return array;
  }

  void* CopyOf(void* array) {
    void* const copy = NewArray(65);
    if (array == nullptr) return copy;
    std::byte bytes[4096];
    ExpectDone(offload_device_download(context_, bytes, array, 4096, nullptr));
    ExpectDone(offload_device_upload(context_, copy, bytes, 4096, nullptr));
    return copy;
  }

  static void Append(std::vector<std::byte>& bits, const void* from, uint64_t bytes) {
    const auto* begin = static_cast<const std::byte*>(from);
    if (bytes > 0) bits.insert(bits.end(), begin, begin + bytes);
  }
  void AppendDevice(std::vector<std::byte>& bits, const void* from, uint64_t bytes) {
    if (bytes == 0) return;
    std::vector<std::byte> copy(bytes);
    ExpectDone(offload_device_download(context_, copy.data(), from, bytes, nullptr));
    Append(bits, copy.data(), bytes);
  }

  const int32_t grad_dtype_;
  offload_context_t context_ = nullptr;
  offload_optimizer_t optimizer_ = nullptr;
  void* data_[2] = {};
  void* grad_[2] = {};
};

class AbiTest : public testing::TestWithParam<Cell> {};

// The place, as far as the statistics show it: see Now().
Place Told(Place place, int32_t grad_dtype) {
  if (grad_dtype == OFFLOAD_FP32 && place.held != HostGrad::kNone)
    place.held = HostGrad::kAccumulated;
  return place;
}

TEST_P(AbiTest, Cell) {
  const Cell& cell = GetParam();
  Machine machine(cell.grad_dtype);
  machine.Enter(cell.from);
  ASSERT_EQ(machine.Now(), Told(cell.from, cell.grad_dtype));
  const offload_stats_t before = machine.Stats();
  const int32_t status = machine.Do(cell.call);
  const std::string message = status == OFFLOAD_OK ? "" : offload_last_error();
  ExpectDone(offload_optimizer_wait(machine.optimizer(), 0, -1));
  EXPECT_EQ(machine.Now(), Told(cell.to, cell.grad_dtype));
  const offload_stats_t after = machine.Stats();

  if (cell.outcome == kRefused) {
    EXPECT_EQ(status, OFFLOAD_INVALID_STATE);
    EXPECT_NE(message.find(cell.words), std::string::npos) << message;
    const bool names_param = message.find("'weight'") != std::string::npos;
    EXPECT_TRUE(names_param || message.find("states of 1 params") == 0) << message;
  } else {
    EXPECT_EQ(status, OFFLOAD_OK) << message;
  }
  if (cell.call == Call::kStep) {
    const bool steps = cell.outcome == kDone;
    EXPECT_EQ(after.steps_applied, before.steps_applied + (steps ? 1 : 0));
    if (!cell.to.states_on_host) {
      const bool takes_part = cell.from.grad_bound || cell.from.held != HostGrad::kNone;
      EXPECT_EQ(machine.StepCount(0), steps && takes_part ? 1u : 0u);
      EXPECT_EQ(machine.StepCount(1), steps ? 1u : 0u);
    }
  }
  if (cell.outcome == kDone) return;
  // Nothing has moved, and later calls give the bits of a run without this call.
  EXPECT_EQ(std::memcmp(&before, &after, sizeof(before)), 0);
  Machine control(cell.grad_dtype);
  control.Enter(cell.from);
  EXPECT_TRUE(machine.Finish() == control.Finish());
}

INSTANTIATE_TEST_SUITE_P(Params, AbiTest, testing::ValuesIn(kParams), NameOf);
INSTANTIATE_TEST_SUITE_P(Grads, AbiTest, testing::ValuesIn(kGrads), NameOf);
INSTANTIATE_TEST_SUITE_P(States, AbiTest, testing::ValuesIn(kStates), NameOf);

// The second param would be refused: the first one is not moved either.
TEST(Abi, ACallIsRefusedAsAWhole) {
  Machine machine(OFFLOAD_BF16);
  machine.Enter(kStored);
  const offload_stats_t before = machine.Stats();
  const uint32_t ids[] = {1, 0};
  auto options = Make<offload_move_options_t>();
  options.params = ids;
  options.param_count = 2;
  ExpectDone(offload_optimizer_offload_grads(machine.optimizer(), &options, nullptr));
  EXPECT_EQ(offload_optimizer_reload_grads(machine.optimizer(), &options, nullptr),
            OFFLOAD_INVALID_STATE);
  EXPECT_NE(std::string(offload_last_error()).find("param 1 'bystander'"), std::string::npos);
  ExpectDone(offload_optimizer_wait(machine.optimizer(), 0, -1));
  EXPECT_EQ(machine.Stats().grads_bytes[OFFLOAD_TIER_HOST],
            before.grads_bytes[OFFLOAD_TIER_HOST] + 4 * kCounts[1]);
  EXPECT_EQ(machine.Stats().reloaded_bytes, 0u);
}

struct MoveCall {
  const char* name;
  MoveFunction move;
  uint32_t known_flags;
};
constexpr MoveCall kMoveCalls[] = {
    {"OffloadParams", offload_optimizer_offload_params, 0},
    {"ReloadParams", offload_optimizer_reload_params, 0},
    {"OffloadGrads", offload_optimizer_offload_grads, 3},
    {"ReloadGrads", offload_optimizer_reload_grads, 0},
    {"OffloadStates", offload_optimizer_offload_states, 0},
    {"ReloadStates", offload_optimizer_reload_states, 0},
    {"RefreshMasters", offload_optimizer_refresh_masters, 0},
};

class MoveCallTest : public testing::TestWithParam<MoveCall> {
 protected:
  // The text of the call with these options, which must change nothing.
  std::string Refused(int32_t status, const offload_move_options_t* options) {
    const offload_stats_t before = machine_.Stats();
    EXPECT_EQ(GetParam().move(machine_.optimizer(), options, nullptr), status);
    const offload_stats_t after = machine_.Stats();
    EXPECT_EQ(std::memcmp(&before, &after, sizeof(before)), 0);
    return offload_last_error();
  }
  void Expect(const std::string& message, const std::string& words) {
    EXPECT_NE(message.find(words), std::string::npos) << message;
  }
  Machine machine_{OFFLOAD_BF16};
};

TEST_P(MoveCallTest, UnknownParamIsNamed) {
  const uint32_t ids[] = {0, 7};
  auto options = Make<offload_move_options_t>();
  options.params = ids;
  options.param_count = 2;
  Expect(Refused(OFFLOAD_INVALID_ARGUMENT, &options),
         "options.params names id 7, but only 2 params have been added");
}

TEST_P(MoveCallTest, UnknownFlagIsUnsupported) {
  for (uint32_t flags : {1u, 2u, 3u, 4u, 0x80000000u}) {
    if ((flags & ~GetParam().known_flags) == 0) continue;
    auto options = Make<offload_move_options_t>();
    options.flags = flags;
    Expect(Refused(OFFLOAD_UNSUPPORTED, &options), "options.flags is 0x");
  }
}

TEST_P(MoveCallTest, WrongStreamsAreRefused) {
  int not_a_stream = 0;
  const offload_stream_t streams[] = {nullptr, &not_a_stream, nullptr, nullptr, nullptr};
  auto options = Make<offload_move_options_t>();
  options.streams = streams;
  options.stream_count = 5;
  Expect(Refused(OFFLOAD_INVALID_ARGUMENT, &options),
         "options.stream_count is 5, expected at most 4");
  options.stream_count = 2;
  Expect(Refused(OFFLOAD_INVALID_ARGUMENT, &options), "stream is ");
  options.streams = nullptr;
  Expect(Refused(OFFLOAD_INVALID_ARGUMENT, &options), "options.streams is NULL");
}

TEST_P(MoveCallTest, ParamCountWithoutParamsIsRefused) {
  auto options = Make<offload_move_options_t>();
  options.param_count = 1;
  Expect(Refused(OFFLOAD_INVALID_ARGUMENT, &options), "options.params is NULL");
}

TEST_P(MoveCallTest, NeedsCommit) {
  auto context_options = Make<offload_context_options_t>();
  offload_context_t context = nullptr;
  ExpectDone(offload_context_create(&context_options, &context));
  auto options = Make<offload_optimizer_options_t>();
  options.algorithm = OFFLOAD_ADAMW;
  options.movable = kMoveAll;
  offload_optimizer_t optimizer = nullptr;
  ExpectDone(offload_optimizer_create(context, &options, &optimizer));
  EXPECT_EQ(GetParam().move(optimizer, nullptr, nullptr), OFFLOAD_INVALID_STATE);
  Expect(offload_last_error(), "not committed; call offload_optimizer_commit first");
  ExpectDone(offload_optimizer_destroy(optimizer));
  EXPECT_EQ(GetParam().move(optimizer, nullptr, nullptr), OFFLOAD_INVALID_ARGUMENT);
  ExpectDone(offload_context_destroy(context));
}

TEST_P(MoveCallTest, NullOptionsMeanAll) {
  offload_ticket_t ticket = 0;
  ExpectDone(GetParam().move(machine_.optimizer(), nullptr, &ticket));
  EXPECT_NE(ticket, 0u);
  ExpectDone(offload_optimizer_wait(machine_.optimizer(), ticket, -1));
}

INSTANTIATE_TEST_SUITE_P(Moves, MoveCallTest, testing::ValuesIn(kMoveCalls),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(Abi, AccumulateAndDropExcludeEachOther) {
  Machine machine(OFFLOAD_BF16);
  EXPECT_EQ(machine.MoveFirst(offload_optimizer_offload_grads,
                              OFFLOAD_MOVE_ACCUMULATE | OFFLOAD_MOVE_DROP),
            OFFLOAD_INVALID_ARGUMENT);
  EXPECT_NE(std::string(offload_last_error()).find("expected one of them"), std::string::npos);
}

TEST(Abi, WithoutMovableOnlyDropAndRefreshWork) {
  Machine machine(OFFLOAD_BF16, 0);
  for (const MoveCall& call : kMoveCalls) {
    const bool refresh = call.move == offload_optimizer_refresh_masters;
    EXPECT_EQ(machine.MoveFirst(call.move), refresh ? OFFLOAD_OK : OFFLOAD_INVALID_STATE)
        << call.name;
    if (refresh) continue;
    EXPECT_NE(std::string(offload_last_error()).find("options.movable is 0x0"), std::string::npos);
  }
  ExpectDone(machine.MoveFirst(offload_optimizer_offload_grads, OFFLOAD_MOVE_DROP));
}

}  // namespace
}  // namespace hybridopt
