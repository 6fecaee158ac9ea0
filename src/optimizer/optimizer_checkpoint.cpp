// Optimizer's saves and loads: this file checks and queues them, checkpoints.cpp runs them.
#include <utility>

#include "base/utf8.h"
#include "checkpoint/paths.h"
#include "checkpoint/pending_directory.h"
#include "optimizer/optimizer.h"

namespace hybridopt {
namespace {

// Checks io_depth and replaces 0 by the default.
Result<uint32_t> IoDepth(uint32_t asked) {
  constexpr uint32_t kDefault = 4;
  constexpr uint32_t kMost = 64;
  if (asked <= kMost) return asked != 0 ? asked : kDefault;
  return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                       "options.io_depth is %u, expected at most %u (0 = %u)", asked, kMost,
                       kDefault);
}

// Checks the options that both calls have.
template <typename Options>
Status CheckOptions(const Options& options, uint32_t known_flags) {
  if ((options.flags & ~known_flags) != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "options.flags is 0x%x, known to this call is 0x%x",
                         options.flags, known_flags);
  HYBRIDOPT_TRY(IoDepth(options.io_depth).status());
  if (options.reserved != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "options.reserved is %u, expected 0",
                         options.reserved);
  if (options.path == nullptr || options.path[0] == '\0')
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.path is %s, expected the directory of a checkpoint",
                         options.path == nullptr ? "NULL" : "empty");
  return {};
}

// Fills in the request. The path is made absolute now, because the process may change its directory
// while the work is queued.
template <typename Request, typename Options>
void FillCommon(const Options& options, std::string path, Request& request) {
  request.path = std::move(path);
  request.flags = options.flags;
  request.io_depth = IoDepth(options.io_depth).value();
  request.progress = options.progress;
  request.progress_user = options.progress_user;
}

// Checks that all names are UTF-8: a checkpoint's files are JSON, which allows no other text.
Status CheckNames(const ParamTable& table) {
  for (uint32_t id = 0; id < table.size(); ++id)
    if (!IsUtf8(table.param(id).name))
      return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                           "params.name of param %u is not UTF-8, which a checkpoint's files need; "
                           "register it by another name",
                           id);
  return {};
}

}  // namespace

ParamLocation Optimizer::LocationOf(uint32_t param) const {
  return {table_.addresses()[param].data, committed_->lifecycle->params_on_host(param),
          committed_->lifecycle->states_on_host(param)};
}

std::vector<ParamLocation> Optimizer::LocationsNow() const {
  std::vector<ParamLocation> locations;
  for (uint32_t id = 0; id < table_.size(); ++id) locations.push_back(LocationOf(id));
  return locations;
}

Result<offload_ticket_t> Optimizer::Save(const offload_save_options_t& options) {
  HYBRIDOPT_TRY(CheckCommitted());
  const TraceSpan span(trace(), TraceRow::kCallers, "call save");
  HYBRIDOPT_ASSIGN(const uint32_t slot, NextSlot());
  HYBRIDOPT_TRY(CheckOptions(options, OFFLOAD_SAVE_MASTERS_ONLY));
  HYBRIDOPT_ASSIGN(std::string path, checkpoint::AbsolutePath(context_->files(), options.path));
  HYBRIDOPT_TRY(checkpoint::PendingDirectory::CheckTarget(context_->files(), path));
  HYBRIDOPT_TRY(CheckNames(table_));
  HYBRIDOPT_TRY(context_->device().CheckStream(options.stream));
  SaveRequest& request = committed_->requests[slot].emplace<SaveRequest>();
  FillCommon(options, std::move(path), request);
  request.locations = LocationsNow();
  request.groups.assign(table_.groups().begin(), table_.groups().end());
  HYBRIDOPT_TRY(RecordProducers(slot, {&options.stream, 1}));
  HYBRIDOPT_ASSIGN(const uint64_t sequence, committed_->timeline->Submit());
  return TicketOf(sequence);
}

Result<offload_ticket_t> Optimizer::Load(const offload_load_options_t& options) {
  HYBRIDOPT_TRY(CheckCommitted());
  const TraceSpan span(trace(), TraceRow::kCallers, "call load");
  HYBRIDOPT_ASSIGN(const uint32_t slot, NextSlot());
  constexpr uint32_t kFlags =
      OFFLOAD_LOAD_FRESH_MOMENTS | OFFLOAD_LOAD_KEEP_STEPS | OFFLOAD_LOAD_NO_VERIFY;
  HYBRIDOPT_TRY(CheckOptions(options, kFlags));
  if ((options.flags & OFFLOAD_LOAD_KEEP_STEPS) != 0 &&
      (options.flags & OFFLOAD_LOAD_FRESH_MOMENTS) == 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.flags is 0x%x: OFFLOAD_LOAD_KEEP_STEPS says what to do beside "
                         "OFFLOAD_LOAD_FRESH_MOMENTS; a full load always brings the step counts",
                         options.flags);
  HYBRIDOPT_ASSIGN(std::string path, checkpoint::AbsolutePath(context_->files(), options.path));
  HYBRIDOPT_TRY(checkpoint::CheckSource(context_->files(), path));
  HYBRIDOPT_TRY(context_->device().CheckStream(options.stream));
  HYBRIDOPT_TRY(committed_->lifecycle->CheckLoad());
  LoadRequest& request = committed_->requests[slot].emplace<LoadRequest>();
  FillCommon(options, std::move(path), request);
  request.locations = LocationsNow();
  for (const offload_group_t& group : table_.groups())
    request.first_moments.push_back(InitialMoment0(group.algorithm, group));
  for (uint32_t id : committed_->all_ids) committed_->changes->MarkWhole(id);
  HYBRIDOPT_TRY(RecordProducers(slot, {&options.stream, 1}));
  HYBRIDOPT_ASSIGN(const uint64_t sequence, committed_->timeline->Submit());
  return TicketOf(sequence);
}

}  // namespace hybridopt
