#include "optimizer/committed.h"

#include <numeric>
#include <utility>

#include "kernels/algorithms.h"

namespace hybridopt {

Result<std::unique_ptr<Committed>> Committed::Make(Context& context, const ParamTable& table,
                                                   const Comm& comm,
                                                   const offload_optimizer_options_t& options,
                                                   StateShape shape, Arrangement decided) {
  auto committed =
      std::make_unique<Committed>(context, table, std::move(shape), std::move(decided));
  HYBRIDOPT_TRY(committed->TakeMemory(DiskPaths(options.disk_paths)));
  committed->MakeParts(comm, options);
  committed->FillTables();
  return committed;
}

Committed::Committed(Context& context, const ParamTable& table, StateShape shape,
                     Arrangement decided)
    : context(context),
      table(table),
      shape(std::move(shape)),
      decided(std::move(decided)),
      residence(this->decided.residence),
      chunks(this->decided.chunks),
      step_counts(table.size()) {}

// First all work ends, that of the workers too: they use the lanes, which are destroyed early.
Committed::~Committed() {
  timeline.reset();
  if (pipeline != nullptr) pipeline->CloseEarly();
}

Status Committed::TakeMemory(const std::vector<std::string>& disk_paths) {
  HYBRIDOPT_ASSIGN(memory, StateMemory::Create(context, shape, residence));
  if (shape.options.on_disk) {
    HYBRIDOPT_ASSIGN(auto disk,
                     DiskMemory::Create(context, shape, chunks, disk_paths, memory->disk_totals()));
    memory->UseDisk(std::move(disk));
  }
  HYBRIDOPT_ASSIGN(lanes, Lanes::Create(context, decided.lanes));
  HYBRIDOPT_ASSIGN(swap, SwapMemory::Create(context, shape, residence));
  host_norm_sums = std::make_unique<HostNormSums>(shape.norm_blocks, context.workers().threads());
  return {};
}

void Committed::MakeParts(const Comm& comm, const offload_optimizer_options_t& options) {
  changes = std::make_unique<ChangeLog>(context, shape, *lanes);
  pipeline = std::make_unique<StepPipeline>(
      context,
      StepParts{table, shape, residence, chunks, *memory, *swap, *lanes, *host_norm_sums,
                step_counts, comm, *changes},
      options.rounding_seed);
  master_fill = std::make_unique<MasterFill>(context, table, shape, residence, chunks, *memory,
                                             *lanes, *changes);
  mover = std::make_unique<Mover>(context, table, shape, residence, *memory, *lanes, *swap,
                                  *host_norm_sums, *master_fill, *changes);
  residence_changer = std::make_unique<ResidenceChanger>(context, table, shape, residence, chunks,
                                                         *memory, *lanes, *swap, *changes);
  checkpoints = std::make_unique<Checkpoints>(
      context, Saver::Saved{table, shape, residence, chunks, Locator(), lanes->trace()},
      step_counts, comm);
  lifecycle = std::make_unique<Lifecycle>(table, options.movable,
                                          StateBytes(shape, decided.residence, Tier::kDevice));
}

void Committed::FillTables() {
  for (StepRequest& step : steps) {
    step.addresses.resize(table.size());
    step.host_grads.resize(table.size());
    step.groups.resize(table.groups().size());
  }
  for (const offload_group_t& group : table.groups())
    momentum_free.push_back(RuleOf(group.algorithm, group.momentum) !=
                            AlgorithmOf(group.algorithm)->rule);
  all_ids.resize(table.size());
  std::iota(all_ids.begin(), all_ids.end(), 0u);
  for (uint32_t id = 0; id < table.size() && !partial_param.has_value(); ++id)
    if (table.param(id).shard.partial()) partial_param = id;
  CountStateBytes();
}

void Committed::CountStateBytes() {
  for (Tier tier : kTiers) {
    const std::vector<uint64_t> bytes = StateBytes(shape, decided.residence, tier);
    state_bytes[tier] = std::accumulate(bytes.begin(), bytes.end(), uint64_t{0});
  }
}

Status Committed::PinForStreams() {
  const Status status = memory->PinHost(residence);
  pinned_state_bytes = status.ok() ? memory->pinned_bytes() : 0;
  if (IsUnpinnable(status))
    context.Note("state does not stream through the device: the system did not pin it");
  return status;
}

NodeBytes Committed::FoundNodeBytes() const {
  NodeBytes bytes;
  memory->AddNodeBytes(decided.residence, &bytes);
  lanes->AddNodeBytes(&bytes);
  swap->AddNodeBytes(&bytes);
  pipeline->AddNodeBytes(&bytes);
  checkpoints->AddNodeBytes(&bytes);
  return bytes;
}

}  // namespace hybridopt
