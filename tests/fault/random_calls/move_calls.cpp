// Offloads, reloads and the other moves. The test knows beforehand whether each call must succeed
// or be refused, and with which status.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "calls.h"

namespace hybridopt::fault::random_calls {
namespace {

// Arguments of a call; `options` points into them.
struct MoveInput {
  offload_move_options_t options = Make<offload_move_options_t>();
  uint32_t params[4] = {};
  offload_stream_t streams[5] = {};
  std::set<int32_t> reasons;  // statuses with which it may be refused; none: it must be done
  bool certain = true;        // whether the streams are known to be good or bad
};
using MoveFunction = int32_t (*)(offload_optimizer_t, const offload_move_options_t*,
                                 offload_ticket_t*);

// -------------------------------------------------------------------------------- its arguments --

void FillFlags(Random& random, MoveInput& input, uint32_t known) {
  uint32_t& flags = input.options.flags;
  if (known != 0) flags = random.OneOf<uint32_t>({0, 0, 1, 1, 2});
  if (random.Chance(4)) flags = random.OneOf<uint32_t>({1, 2, 3, 3, 4, 1u << 31, UINT32_MAX});
  if ((flags & ~known) != 0) {
    input.reasons.insert(OFFLOAD_UNSUPPORTED);
  } else if (flags == (OFFLOAD_MOVE_ACCUMULATE | OFFLOAD_MOVE_DROP)) {
    input.reasons.insert(OFFLOAD_INVALID_ARGUMENT);
  }
}

void FillParams(World& world, MoveInput& input, size_t size) {
  Random& random = world.random;
  offload_move_options_t& options = input.options;
  options.params = random.Chance(97) ? input.params : nullptr;
  if (random.Chance(60))
    options.param_count = random.Chance(60) ? 1 : static_cast<uint32_t>(random.Below(5));
  if (options.param_count > 0 && options.params == nullptr)
    input.reasons.insert(OFFLOAD_INVALID_ARGUMENT);
  if (options.param_count == 0)  // all of them, or none, at an address that is not read
    options.params = random.Chance(90) ? nullptr : static_cast<uint32_t*>(world.Garbage());
  for (uint32_t i = 0; i < options.param_count; ++i) {
    const bool known = size > 0 && random.Chance(98);
    input.params[i] = known ? static_cast<uint32_t>(random.Below(size))
                            : random.OneOf({static_cast<uint32_t>(size), UINT32_MAX});
    if (input.params[i] >= size) input.reasons.insert(OFFLOAD_INVALID_ARGUMENT);
  }
}

// A stream that usually does not belong to the context: of another context, destroyed, or noise.
offload_stream_t ForeignStream(World& world, offload_context_t context) {
  Random& random = world.random;
  offload_stream_t stream = nullptr;
  const auto& other =
      std::next(world.contexts.begin(), static_cast<int64_t>(random.Below(world.contexts.size())))
          ->second;
  if (!other.streams.empty()) stream = other.streams[0];
  if (random.Chance(30)) stream = world.PickStream(context);
  return stream;
}

void FillStreams(World& world, MoveInput& input, offload_context_t context) {
  Random& random = world.random;
  offload_move_options_t& options = input.options;
  options.streams = random.Chance(97) ? input.streams : nullptr;
  if (random.Chance(50)) options.stream_count = static_cast<uint32_t>(random.Below(5));
  if (random.Chance(2)) options.stream_count = random.OneOf<uint32_t>({5, UINT32_MAX});
  if (options.stream_count > 4 || (options.stream_count > 0 && options.streams == nullptr)) {
    input.reasons.insert(OFFLOAD_INVALID_ARGUMENT);
    return;
  }
  const std::vector<offload_stream_t>& own = world.contexts.at(context).streams;
  const auto& dead = world.dead_streams;
  for (uint32_t i = 0; i < options.stream_count; ++i) {
    offload_stream_t& stream = input.streams[i];
    if (random.Chance(95)) {
      if (!own.empty() && random.Chance(70)) stream = own[random.Below(own.size())];
      continue;
    }
    stream = ForeignStream(world, context);
    if (stream == nullptr || std::count(own.begin(), own.end(), stream) > 0) continue;
    input.reasons.insert(OFFLOAD_INVALID_ARGUMENT);
    // A new stream, perhaps one of the library's, may have the place of a destroyed one.
    if (std::count(dead.begin(), dead.end(), stream) > 0) input.certain = false;
  }
}

void FillInput(World& world, MoveInput& input, const OptimizerModel& model, uint32_t known_flags) {
  FillFlags(world.random, input, known_flags);
  FillParams(world, input, model.params.size());
  FillStreams(world, input, model.context);
  input.options.struct_size = world.StructSize(sizeof(input.options));
  if (input.options.struct_size != sizeof(input.options))
    input.reasons.insert({OFFLOAD_INVALID_ARGUMENT, OFFLOAD_UNSUPPORTED});
}

// ------------------------------------------------------------------------------ what it must do --

// The params that the call names and that exist.
std::vector<ParamModel*> Named(OptimizerModel& model, const MoveInput& input) {
  std::set<ParamModel*> named;
  for (uint32_t i = 0; i < input.options.param_count; ++i)
    if (input.params[i] < model.params.size()) named.insert(&model.params[input.params[i]]);
  if (input.options.params == nullptr)
    for (ParamModel& param : model.params) named.insert(&param);
  return {named.begin(), named.end()};
}

// Whether two params would be reloaded to one address, which would be a race of the caller.
bool ReloadsOverlap(const std::vector<ParamModel*>& params) {
  uintptr_t end = 0;
  std::map<uintptr_t, uintptr_t> ranges;
  for (const ParamModel* param : params) {
    if (param->held == Held::kNone || param->grad == nullptr || param->count == 0) continue;
    const auto begin = reinterpret_cast<uintptr_t>(param->grad);
    if (!ranges.emplace(begin, begin + param->grad_bytes()).second) return true;
  }
  for (const auto& [begin, range_end] : ranges) {
    if (begin < end) return true;
    end = range_end;
  }
  return false;
}

Move MoveOf(Move move, uint32_t flags) {
  if (move != Move::kOffloadGrads) return move;
  if ((flags & OFFLOAD_MOVE_DROP) != 0) return Move::kDropGrads;
  return (flags & OFFLOAD_MOVE_ACCUMULATE) != 0 ? Move::kAccumulateGrads : move;
}

// The reasons of optimizer and params to refuse the move.
void AddReasons(Move move, const OptimizerModel& model, const std::vector<ParamModel*>& named,
                std::set<int32_t>& reasons) {
  const bool refused = std::any_of(named.begin(), named.end(), [&](const ParamModel* param) {
    return EffectOf(move, *param) == Effect::kRefused;
  });
  if (!model.committed || !MovableAllows(move, model.movable) || refused)
    reasons.insert(OFFLOAD_INVALID_STATE);
}

void JudgeMove(World& world, int32_t status, Move move, offload_optimizer_t optimizer,
               const MoveInput& input) {
  const bool done = world.Judge(status, optimizer);
  const OptimizerModel& model = world.optimizers.at(optimizer);
  const ContextModel& context = world.contexts.at(model.context);
  if (context.doomed || !input.certain) return;
  if (!input.reasons.empty()) {
    EXPECT_EQ(input.reasons.count(status), 1u)
        << world.call_name() << " gave " << offload_status_name(status) << ", expected "
        << offload_status_name(*input.reasons.begin());
    return;
  }
  if (done) return;
  const bool device_full = status == OFFLOAD_OUT_OF_DEVICE_MEMORY && move == Move::kReloadStates &&
                           context.kind == OFFLOAD_DEVICE_SIM && model.all_states_out();
  const bool queue_full = status == OFFLOAD_INVALID_STATE && model.calls_queued_max >= kQueuedCalls;
  EXPECT_TRUE(device_full || queue_full)
      << world.call_name() << " gave " << status << ": " << offload_last_error();
}

template <Move kMove, MoveFunction kFunction>
void MakeMove(World& world) {
  const offload_optimizer_t optimizer = world.PickOptimizer();
  OptimizerModel* model = world.Find(optimizer);
  if (model == nullptr) {
    world.Judge(kFunction(optimizer, nullptr, nullptr), optimizer);
    return;
  }
  if (kMove == Move::kReloadStates && world.IsDoomed(model->context)) return;
  MoveInput input;
  FillInput(world, input, *model, kMove == Move::kOffloadGrads ? 3 : 0);
  const bool given = world.random.Chance(85);
  if (!given) input = MoveInput();
  const std::vector<ParamModel*> named = Named(*model, input);
  const Move move = MoveOf(kMove, input.options.flags);
  if (move == Move::kReloadGrads) {
    if (ReloadsOverlap(named)) return;
    world.Settle(model->context);  // other optimizers may read gradients at the same address
  }
  AddReasons(move, *model, named, input.reasons);
  offload_ticket_t ticket = 0;
  const bool take_ticket = world.random.Chance(90);
  const int32_t status =
      kFunction(optimizer, given ? &input.options : nullptr, take_ticket ? &ticket : nullptr);
  JudgeMove(world, status, move, optimizer, input);
  EXPECT_EQ(ticket != 0, take_ticket && status == OFFLOAD_OK);
  if (status == OFFLOAD_OK) {
    for (ParamModel* param : named) {
      if (EffectOf(move, *param) == Effect::kDone) world.moved[static_cast<size_t>(move)] += 1;
      Apply(move, *param);
    }
    world.Queued(*model, take_ticket ? ticket : 0);
  }
  world.CompareStats(optimizer);
  if (move == Move::kReloadGrads) world.Settle(model->context);
}

constexpr Call kCalls[] = {
    {"offload_params", MakeMove<Move::kOffloadParams, offload_optimizer_offload_params>, 3},
    {"reload_params", MakeMove<Move::kReloadParams, offload_optimizer_reload_params>, 8},
    {"offload_grads", MakeMove<Move::kOffloadGrads, offload_optimizer_offload_grads>, 8},
    {"reload_grads", MakeMove<Move::kReloadGrads, offload_optimizer_reload_grads>, 15},
    {"offload_states", MakeMove<Move::kOffloadStates, offload_optimizer_offload_states>, 3},
    {"reload_states", MakeMove<Move::kReloadStates, offload_optimizer_reload_states>, 8},
    {"refresh_masters", MakeMove<Move::kRefreshMasters, offload_optimizer_refresh_masters>, 4},
};

}  // namespace

std::span<const Call> MoveCalls() { return kCalls; }

}  // namespace hybridopt::fault::random_calls
