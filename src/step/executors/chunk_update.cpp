#include "step/executors/chunk_update.h"

#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/system.h"

namespace hybridopt {
namespace {

constexpr uint32_t kBeforeFirstPhase = UINT32_MAX;  // the next one is 0

const std::byte* GradAddress(const StepParam& param, const Fragment& fragment,
                             const ChunkBuffers& buffers, uint64_t first) {
  const uint64_t bytes = DtypeBytes(param.grad_dtype);
  if (param.host_grad != nullptr) return param.host_grad + (fragment.begin + first) * bytes;
  if (buffers.grads != nullptr) return buffers.grads + fragment.grad_offset + first * bytes;
  return static_cast<const std::byte*>(param.addresses.grad) + (fragment.begin + first) * bytes;
}

}  // namespace

std::byte* ChunkUpdater::MasterAt(Tier tier, uint32_t id, uint64_t element, void* param) const {
  std::byte* const master = memory_.At(tier, id, shape_.params[id].master_slot(), element);
  return master != nullptr ? master : static_cast<std::byte*>(param);
}

template <typename Visit>
void ChunkUpdater::ForEachActiveRange(const HostStep& step, uint32_t chunk, const WorkRange& range,
                                      Visit&& visit) const {
  ForEachRange(
      step.plan.fragments(chunk), step.plan.active_count(chunk),
      [&](const Fragment& fragment) { return step.plan.ActiveBefore(fragment); }, range,
      std::forward<Visit>(visit));
}

// Calls call(capture, ranges) for the range's elements, as the capture counts them.
template <typename Call>
void ChunkUpdater::CallCapture(const HostStep& step, uint32_t chunk, const WorkRange& range,
                               Call&& call) const {
  if (step.capture == nullptr) return;
  call(*step.capture, [&](Capture::Visit visit) {
    ForEachActiveRange(step, chunk, range,
                       [&](const Fragment& fragment, uint64_t first, uint64_t count) {
                         visit(fragment.param, fragment.begin + first, count);
                       });
  });
}

void ChunkUpdater::PutAside(const HostStep& step, uint32_t chunk, const WorkRange& range) const {
  CallCapture(step, chunk, range,
              [](Capture& capture, Capture::Ranges ranges) { capture.PutAside(ranges); });
}

void ChunkUpdater::Copied(const HostStep& step, uint32_t chunk, const WorkRange& range,
                          bool begun) const {
  CallCapture(step, chunk, range, [begun](Capture& capture, Capture::Ranges ranges) {
    begun ? capture.Copied(ranges) : capture.Withdraw(ranges);
  });
}

void ChunkUpdater::PutBorrowedAside(Capture& capture, uint32_t id, const void* params) const {
  const uint64_t param_bytes = DtypeBytes(table_.param(id).dtype);
  capture.ForEachSegment(id, [&](uint64_t begin, uint64_t count) {
    const auto ranges = [&](Capture::Visit visit) { visit(id, begin, count); };
    if (!capture.PutAside(ranges, Capture::Arrays::kBorrowed)) return;
    CopyAside(capture, id, Tier::kHost, {begin, begin + count},
              static_cast<const std::byte*>(params) + begin * param_bytes);
    kernels_.publish();
    capture.Copied(ranges, Capture::Arrays::kBorrowed);
  });
}

// Copies what the capture has given room to, of these elements of a param. `params` are those at
// the first of them.
void ChunkUpdater::CopyAside(const Capture& capture, uint32_t id, Tier tier, const WorkRange& range,
                             const std::byte* params) const {
  const ParamShape& shaped = shape_.params[id];
  const uint64_t param_bytes = DtypeBytes(table_.param(id).dtype);
  for (StateSlot slot : {kMaster, kMoment0, kMoment1}) {
    const StateSlot stored = slot == kMaster ? shaped.master_slot() : slot;
    capture.ForEachCopy(
        id, slot, range.begin, range.end - range.begin,
        [&](uint64_t first, uint64_t count, std::byte* copy, std::byte* params_copy) {
          const std::byte* const params_here = params + (first - range.begin) * param_bytes;
          const std::byte* state = memory_.At(tier, id, stored, first);
          if (state == nullptr) state = params_here;  // the param is its own master
          kernels_.copy_past_caches(copy, state, shaped.Bytes(stored, first, count));
          if (stored == kMasterLow)
            kernels_.copy_past_caches(params_copy, params_here, count * param_bytes);
        });
  }
}

std::byte* ChunkUpdater::AlignedIn(std::vector<std::byte>& room) {
  const auto address = reinterpret_cast<uintptr_t>(room.data());
  return room.data() + (system::RoundUp(address, kWorkspaceAlignment) - address);
}

void ChunkUpdater::Begin(const StepPlan& plan, uint32_t chunk, const WorkRange& range,
                         ChunkWork& work) const {
  work.pieces.Reset(range, kWorkGrainElements, kWorkPieceElements);
  work.range = range;
  work.fragment = work.first = work.part = 0;
  work.phases.Begin(FindMatrix(plan, chunk, work) ? 1 : 0);
}

void ChunkUpdater::Update(const HostStep& step, uint32_t chunk, const ChunkBuffers& buffers,
                          ChunkWork& work, uint32_t worker) const {
  work.pieces.Take(worker,
                   [&](const WorkRange& piece) { UpdatePiece(step, chunk, buffers, piece); });
  work.phases.Take(
      [&](uint64_t piece) {
        if (!work.newton_schulz.has_value()) return BeginMatrix(step, chunk, buffers, work);
        work.newton_schulz->RunPiece(work.phase, piece);
      },
      [&] { return NextPhase(step, chunk, work); });
  kernels_.publish();
}

// Finds the first part of a matrix in the range, from the place in `work` on. A matrix belongs to
// the range in which it ends, as in ForEachRange.
bool ChunkUpdater::FindMatrix(const StepPlan& plan, uint32_t chunk, ChunkWork& work) const {
  work.update.reset();
  work.newton_schulz.reset();
  if (shape_.matrices == 0) return false;
  const std::span<const Fragment> fragments = plan.fragments(chunk);
  for (; work.fragment < fragments.size(); ++work.fragment, work.first = 0) {
    const Fragment& fragment = fragments[work.fragment];
    const MatrixShape& matrix = shape_.params[fragment.param].matrix;
    if (matrix.count() == 0 || !plan.param(fragment.param).active) continue;
    for (; work.first < fragment.count; work.first += matrix.count()) {
      const uint64_t end = plan.ActiveBefore(fragment) + work.first + matrix.count();
      if (end > work.range.end) return false;
      if (end > work.range.begin) return true;
    }
  }
  return false;
}

void ChunkUpdater::BeginMatrix(const HostStep& step, uint32_t chunk, const ChunkBuffers& buffers,
                               ChunkWork& work) const {
  const Fragment& fragment = step.plan.fragments(chunk)[work.fragment];
  const StepParam& param = step.plan.param(fragment.param);
  const ParamShape& shaped = shape_.params[fragment.param];
  const uint64_t count = shaped.matrix.count();
  const Prepared prepared = Prepare(step, fragment, buffers, work.first, count);
  MatrixUpdate& matrix = work.matrix;
  matrix.span = prepared.span;
  ForEachStripe(shape_, shaped, fragment.begin + work.first, count,
                [&](uint64_t, uint64_t in_stripe, const ElementOrder& order) {
                  HYBRIDOPT_CHECK(in_stripe == count);
                  matrix.span.order = order;
                });
  matrix.types = prepared.types;
  matrix.steps = param.ns_steps;
  matrix.noted = prepared.noted;
  matrix.workspace = workspace_;
  BeginPart(step, chunk, work);
  kernels_.publish();
}

void ChunkUpdater::BeginPart(const HostStep& step, uint32_t chunk, ChunkWork& work) const {
  const uint32_t id = step.plan.fragments(chunk)[work.fragment].param;
  const MatrixPart& part = shape_.params[id].parts[work.part];
  MatrixUpdate& update = work.update.emplace(work.matrix);
  update.span = Advanced(update.span, update.types, part.begin());
  update.span.count = part.extent();
  update.noted = update.noted.From(part.begin());
  update.shape = part.shape;
  update.runs = part.runs;
  update.coefficients = step.coefficients[step.plan.param(id).coefficients + work.part];
  work.newton_schulz.emplace(kernels_, update);
  work.phase = kBeforeFirstPhase;
}

// Goes to the next phase of the matrix, to its next part, or to the next matrix, and returns the
// pieces.
uint64_t ChunkUpdater::NextPhase(const HostStep& step, uint32_t chunk, ChunkWork& work) const {
  const ParamShape& shaped = shape_.params[step.plan.fragments(chunk)[work.fragment].param];
  for (;;) {
    const NewtonSchulz& part = *work.newton_schulz;
    while (++work.phase < part.phases())
      if (const uint64_t pieces = part.pieces(work.phase); pieces > 0) return pieces;
    if (++work.part == shaped.parts.size()) break;
    BeginPart(step, chunk, work);
  }
  work.part = 0;
  work.first += shaped.matrix.count();
  return FindMatrix(step.plan, chunk, work) ? 1 : 0;
}

// Calls visit(state, old, bytes) for the elements' part of each array.
template <typename Visit>
void ChunkUpdater::ForEachArray(const Fragment& fragment, uint64_t first, uint64_t count,
                                const StateAreas& old, Visit&& visit) const {
  const ParamShape& shaped = shape_.params[fragment.param];
  for (uint32_t index = 0; index < kStateSlots; ++index) {
    const StateSlot slot{index};
    if (!shaped.Keeps(fragment.tier, slot)) continue;
    visit(memory_.At(fragment.tier, fragment.param, slot, fragment.begin + first),
          old[slot] + fragment.state_offset[slot] + shaped.Bytes(slot, fragment.begin, first),
          shaped.Bytes(slot, fragment.begin + first, count));
  }
}

void ChunkUpdater::Restore(std::span<const Fragment> fragments, uint64_t element_count,
                           const StateAreas& old, WorkPieces& pieces, uint32_t worker) const {
  pieces.Take(worker, [&](const WorkRange& piece) {
    ForEachRange(
        fragments, element_count, [](const Fragment& fragment) { return fragment.first_element; },
        piece,
        [&](const Fragment& fragment, uint64_t first, uint64_t count) {
          ForEachArray(fragment, first, count, old,
                       [](std::byte* state, const std::byte* aside, uint64_t bytes) {
                         std::memcpy(state, aside, bytes);
                       });
        });
  });
}

ChunkUpdater::Prepared ChunkUpdater::Prepare(const HostStep& step, const Fragment& fragment,
                                             const ChunkBuffers& buffers, uint64_t first,
                                             uint64_t count) const {
  const uint32_t id = fragment.param;
  const StepParam& param = step.plan.param(id);
  const int32_t dtype = table_.param(id).dtype;
  const uint64_t element = fragment.begin + first;
  // The copy brings the state into the caches, from which the update then reads it.
  if (buffers.old != nullptr)
    ForEachArray(fragment, first, count, *buffers.old,
                 [&](const std::byte* state, std::byte* aside, uint64_t bytes) {
                   kernels_.copy_past_caches(aside, state, bytes);
                 });
  Prepared prepared{{}, {param.grad_dtype, dtype, shape_.params[id].formats()}, {}};
  UpdateSpan& span = prepared.span;
  span.grad = GradAddress(param, fragment, buffers, first);
  span.param = ParamAt(fragment, first, DtypeBytes(dtype), buffers.params, param.addresses.data);
  if (step.capture != nullptr)
    CopyAside(*step.capture, id, fragment.tier, {element, element + count},
              static_cast<const std::byte*>(span.param));
  span.master = MasterAt(fragment.tier, id, element, span.param);
  span.moment0 = memory_.At(fragment.tier, id, kMoment0, element);
  span.moment1 = memory_.At(fragment.tier, id, kMoment1, element);
  span.count = count;
  span.rounding = param.rounding;
  prepared.noted = changes_.OnHost(id).From(element);
  if (step.follow_params && memory_.At(fragment.tier, id, kMaster, element) != nullptr)
    FollowAndNote(kernels_, dtype, span.param, count, static_cast<float*>(span.master),
                  prepared.noted);
  return prepared;
}

void ChunkUpdater::UpdatePiece(const HostStep& step, uint32_t chunk, const ChunkBuffers& buffers,
                               const WorkRange& piece) const {
  ForEachActiveRange(
      step, chunk, piece, [&](const Fragment& fragment, uint64_t first, uint64_t count) {
        const StepParam& param = step.plan.param(fragment.param);
        const ParamShape& shaped = shape_.params[fragment.param];
        if (shaped.is_of_matrices()) return;
        const Prepared prepared = Prepare(step, fragment, buffers, first, count);
        ForEachStripe(shape_, shaped, fragment.begin + first, count,
                      [&](uint64_t offset, uint64_t part_count, ElementOrder order) {
                        UpdateSpan part = Advanced(prepared.span, prepared.types, offset);
                        part.count = part_count;
                        part.order = order;
                        UpdateAndNote(kernels_, param.rule, prepared.types,
                                      step.coefficients[param.coefficients], part,
                                      prepared.noted.From(offset));
                      });
      });
}

}  // namespace hybridopt
