// A model of whole tensors, divided among ranks. Each rank is a Rig with its shards; one Model of
// the whole tells what every byte of every rank must be.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "../layouts.h"
#include "rig.h"

namespace hybridopt {

// Gradients whose squares are summed exactly in double, in any order: small multiples of 2^-10.
inline Bytes ExactGrads(int32_t dtype, uint64_t count, Random& random) {
  Bytes array(count * DtypeBytes(dtype));
  for (uint64_t i = 0; i < count; ++i) {
    const auto units = static_cast<float>(static_cast<int64_t>(random.Below(511)) - 255);
    PutElement(array, dtype, i, BitsOf(dtype, units * 0x1p-10f));
  }
  return array;
}

// Some elements of an array.
template <typename T>
std::vector<T> Select(const std::vector<T>& whole, const std::vector<uint64_t>& elements,
                      uint64_t units) {
  std::vector<T> part;
  part.reserve(elements.size() * units);
  for (uint64_t element : elements) {
    const auto begin = whole.begin() + static_cast<ptrdiff_t>(element * units);
    part.insert(part.end(), begin, begin + static_cast<ptrdiff_t>(units));
  }
  return part;
}

class Sharded {
 public:
  // Params of the problem become tensors of the shapes; pieces[id] are its ranks' parts.
  Sharded(Problem problem, std::vector<std::vector<Piece>> pieces)
      : whole(std::move(problem)), pieces_(std::move(pieces)) {
    for (const std::vector<Piece>& tensor : pieces_) {
      elements_.emplace_back();
      for (const Piece& piece : tensor) elements_.back().push_back(GlobalIndices(piece));
    }
    for (uint32_t rank = 0; rank < world(); ++rank) locals_.push_back(LocalProblem(rank));
    trace = TraceOf(whole);
  }
  Sharded(const Sharded&) = delete;
  Sharded& operator=(const Sharded&) = delete;

  uint32_t world() const { return static_cast<uint32_t>(pieces_[0].size()); }
  const Problem& local(uint32_t rank) const { return locals_[rank]; }
  const Piece& piece(size_t id, uint32_t rank) const { return pieces_[id][rank]; }

  // The values that the rank must have after `steps` steps.
  Model Expected(uint32_t rank, size_t steps) const {
    Model model = trace[steps];
    // The norm that a skipped step reports depends on whether other ranks were asked.
    if (model.verdict.skip != 0)
      model.verdict = Decide(std::numeric_limits<double>::quiet_NaN(), 1, 0);
    for (size_t id = 0; id < whole.params.size(); ++id) {
      const std::vector<uint64_t>& elements = elements_[id][rank];
      Model::Param& param = model.params[id];
      param.data = Select(param.data, elements, DtypeBytes(whole.params[id].dtype));
      param.master = Select(param.master, elements, 1);
      param.moment0 = Select(param.moment0, elements, 1);
      param.moment1 = Select(param.moment1, elements, 1);
      if (elements.empty()) param.step_count = 0;
    }
    return model;
  }

  Problem whole;
  std::vector<Model> trace;

 private:
  Problem LocalProblem(uint32_t rank) const {
    Problem local = whole;
    for (size_t id = 0; id < whole.params.size(); ++id) {
      const std::vector<uint64_t>& elements = elements_[id][rank];
      local.params[id].count = elements.size();
      local.initial[id] = Select(whole.initial[id], elements, DtypeBytes(whole.params[id].dtype));
      for (StepInput& step : local.steps)
        if (step.grads[id].has_value())
          step.grads[id] =
              Select(*step.grads[id], elements, DtypeBytes(whole.params[id].grad_dtype));
    }
    return local;
  }

  std::vector<std::vector<Piece>> pieces_;                    // [tensor][rank]
  std::vector<std::vector<std::vector<uint64_t>>> elements_;  // [tensor][rank]: global indices
  std::vector<Problem> locals_;                               // [rank]
};

// Tensors of random shapes and layouts, with random values and exact gradients.
inline std::unique_ptr<Sharded> RandomSharded(int32_t algorithm, uint32_t world, size_t steps,
                                              uint64_t seed) {
  Random random(seed);
  std::vector<std::vector<int64_t>> shapes;
  std::vector<ParamSpec> specs;
  for (int i = 0; i < 9; ++i) {
    shapes.push_back(i == 0 ? std::vector<int64_t>{67, 131} : RandomShape(3000, random));
    specs.push_back({kDtypes[i % 3], kDtypes[i / 3], OFFLOAD_PLACE_AUTO, 0, 0});
  }
  for (size_t i = 0; i < specs.size(); ++i) specs[i].count = ElementsOf(shapes[i]);
  Problem problem = RandomProblem(algorithm, specs, steps, seed);
  problem.state = StateChoices()[seed / kAlgorithmValues.size() % 6];
  std::vector<std::vector<Piece>> pieces;
  // RandomProblem has changed the order of the params, so any shape with the same number of
  // elements will do.
  for (const ParamSpec& spec : problem.params) {
    const auto shape = std::find_if(shapes.begin(), shapes.end(), [&](const auto& candidate) {
      return ElementsOf(candidate) == spec.count;
    });
    pieces.push_back(RandomLayout(*shape, world, random));
  }
  for (StepInput& input : problem.steps)
    for (size_t id = 0; id < specs.size(); ++id)
      if (input.grads[id].has_value())
        input.grads[id] =
            ExactGrads(problem.params[id].grad_dtype, problem.params[id].count, random);
  return std::make_unique<Sharded>(std::move(problem), std::move(pieces));
}

// One rank of it, with a context of its own.
class ShardedRank {
 public:
  ShardedRank(const Sharded& sharded, uint32_t rank, const offload_comm_t& comm,
              const ContextSetting& context, const OptimizerSetting& setting, uint32_t movable = 0,
              uint64_t comm_timeout_ns = 0)
      : sharded_(sharded), rank_(rank), comm_(comm), context_(context) {
    std::vector<offload_shard_t> shards;
    RankSetting rank_setting;
    rank_setting.comm = &comm_;
    rank_setting.comm_timeout_ns = comm_timeout_ns;
    rank_setting.movable = movable;
    for (size_t id = 0; id < sharded.whole.params.size(); ++id) {
      shards.push_back(sharded.piece(id, rank).Abi());
      rank_setting.flags.push_back(sharded.piece(id, rank).replica ? OFFLOAD_PARAM_REPLICA : 0);
    }
    for (const offload_shard_t& shard : shards) rank_setting.shards.push_back(&shard);
    rig_ = std::make_unique<Rig>(context_, local(), setting, rank_setting);
  }

  Rig& rig() { return *rig_; }
  offload_context_t context() const { return context_.handle(); }
  const Problem& local() const { return sharded_.local(rank_); }

  // Sets a step's inputs on the rank.
  void Put(const StepInput& input, size_t block = 0) {
    rig_->PutGrads(block, input);
    rig_->Bind(0, block, input);
    rig_->SetGroups(input.groups);
  }
  offload_ticket_t Queue(const StepInput& input, size_t block = 0) {
    Put(input, block);
    return rig_->Queue(input);
  }
  offload_ticket_t Queue(size_t step) { return Queue(local().steps[step]); }

  // Empty if every bit is that of the whole model after `steps`.
  std::string Difference(size_t steps) { return Difference(sharded_.Expected(rank_, steps)); }
  std::string Difference(const Model& expected) {
    const std::string difference = rig_->Difference(expected);
    return difference.empty() ? "" : "rank " + std::to_string(rank_) + ": " + difference;
  }

  // Params, states and step counts.
  Bytes Bits() const {
    Bytes bits;
    for (size_t id = 0; id < local().params.size(); ++id) {
      AppendDevice(bits, rig_->DataAddress(0, id), local().params[id].data_bytes());
      for (int32_t kind = OFFLOAD_STATE_MASTER; kind <= OFFLOAD_STATE_MASTER_LOW; ++kind) {
        auto view = Make<offload_state_view_t>();
        if (offload_optimizer_state(rig_->handle(), static_cast<uint32_t>(id), kind, &view) !=
            OFFLOAD_OK)
          continue;
        AppendDevice(bits, view.device_data, view.device_count * DtypeBytes(view.dtype));
        Append(bits, view.host_data, view.host_count * DtypeBytes(view.dtype));
        Append(bits, &view.step_count, sizeof(view.step_count));
      }
    }
    return bits;
  }

 private:
  static void Append(Bytes& bits, const void* data, uint64_t bytes) {
    const auto* begin = static_cast<const std::byte*>(data);
    bits.insert(bits.end(), begin, begin + bytes);
  }
  void AppendDevice(Bytes& bits, const void* data, uint64_t bytes) const {
    if (bytes == 0) return;
    Bytes copy(bytes);
    MUST(offload_device_download(context_.handle(), copy.data(), data, bytes, nullptr));
    Append(bits, copy.data(), bytes);
  }

  const Sharded& sharded_;
  const uint32_t rank_;
  const offload_comm_t comm_;
  const TestContext context_;
  std::unique_ptr<Rig> rig_;
};

}  // namespace hybridopt
