#include "step/host_share.h"

#include <utility>

namespace hybridopt {

HostShare::HostShare(const ParamTable& table, const Placement& placement, const StateMemory& memory,
                     const KernelTable& kernels)
    : kernels_(kernels), placement_(placement) {
  targets_.reserve(table.size());
  for (uint32_t id = 0; id < table.size(); ++id) {
    const Param& param = table.param(id);
    const ParamPlace& place = placement.params[id];
    targets_.push_back({place.rule,
                        place.host_layout,
                        param.dtype,
                        kernels.ToFp32(param.dtype),
                        {memory.Host(id, kMaster), memory.Host(id, kMoment0),
                         memory.Host(id, kMoment1), memory.Host(id, kMasterLow)},
                        place.state_dtype,
                        table.groups()[param.group].initial_accumulator_value,
                        place.device_count,
                        static_cast<uint32_t>(DtypeBytes(param.dtype))});
  }
}

void ActiveElements::Count(std::span<const StepParam> params) {
  for (size_t c = 0; c < placement_.chunks.size(); ++c) {
    const Chunk& chunk = placement_.chunks[c];
    uint64_t active = 0;
    for (uint32_t f = chunk.first_fragment; f < chunk.first_fragment + chunk.fragment_count; ++f) {
      const Fragment& fragment = placement_.fragments[f];
      before_[f] = active;
      if (params[fragment.param].active) active += fragment.count;
    }
    in_chunk_[c] = active;
  }
}

template <typename Visit>
void HostShare::ForEachActiveStretch(const HostStep& step, uint32_t chunk, const WorkRange& range,
                                     Visit&& visit) const {
  ForEachStretch(
      FragmentsOf(placement_, placement_.chunks[chunk]), step.active.in_chunk(chunk),
      [&](const Fragment& fragment) { return step.active.before(fragment); }, range,
      std::forward<Visit>(visit));
}

void HostShare::AwaitCapture(const HostStep& step, uint32_t chunk, const WorkRange& range) const {
  if (step.capture == nullptr) return;
  ForEachActiveStretch(step, chunk, range,
                       [&](const Fragment& fragment, uint64_t first, uint64_t count) {
                         step.capture->Await(fragment.param, fragment.begin + first + count);
                       });
}

void HostShare::Update(const HostStep& step, uint32_t chunk, const ChunkBuffers& buffers,
                       WorkPieces& pieces, uint32_t worker) const {
  pieces.Take(worker, [&](const WorkRange& piece) { UpdatePiece(step, chunk, buffers, piece); });
  kernels_.publish();
}

void HostShare::UpdatePiece(const HostStep& step, uint32_t chunk, const ChunkBuffers& buffers,
                            const WorkRange& piece) const {
  ForEachActiveStretch(
      step, chunk, piece, [&](const Fragment& fragment, uint64_t first, uint64_t count) {
        const StepParam& param = step.params[fragment.param];
        const Target& target = targets_[fragment.param];
        const uint64_t element = HostElement(target, fragment, first);
        UpdateSpan span{};
        span.grad = GradAt(param, fragment, buffers, first);
        span.param = ParamAt(target, fragment, buffers, param.addresses.data, first);
        span.master = MasterAt(target, element, span.param);
        span.moment0 = StateAt(target, kMoment0, element);
        span.moment1 = StateAt(target, kMoment1, element);
        span.rounding = param.rounding;
        const SpanTypes types{param.grad_dtype, target.param_dtype, target.layout};
        const UpdateFunction update = kernels_.Update(target.rule, types);
        ForEachStripe(placement_, placement_.params[fragment.param], fragment.begin + first, count,
                      [&](uint64_t offset, uint64_t part_count, ElementOrder order) {
                        UpdateSpan part = Advanced(span, types, offset);
                        part.count = part_count;
                        part.order = order;
                        update(step.coefficients[param.coefficients], part);
                      });
      });
}

void HostShare::Fill(const Chunk& chunk, const ChunkBuffers& buffers,
                     std::span<const Addresses> addresses, const FirstState& first_state,
                     uint32_t worker, uint32_t workers) const {
  ForEachStretch(
      FragmentsOf(placement_, chunk), chunk.element_count,
      [](const Fragment& fragment) { return fragment.first_element; },
      RangeOfWorker(chunk.element_count, kWorkGrainElements, worker, workers),
      [&](const Fragment& fragment, uint64_t first, uint64_t count) {
        void* const data = addresses[fragment.param].data;
        if (data == nullptr) return;
        const Target& target = targets_[fragment.param];
        const uint64_t element = HostElement(target, fragment, first);
        if (std::byte* master = StateAt(target, kMaster, element); master != nullptr)
          target.widen(ParamAt(target, fragment, buffers, data, first), count,
                       reinterpret_cast<float*>(master));
        FillArray(StateAt(target, kMasterLow, element), OFFLOAD_U16, count, 0.0f);
        if (!first_state.moments) return;
        FillArray(StateAt(target, kMoment0, element), target.state_dtype[kMoment0], count,
                  static_cast<float>(target.initial_moment0));
        FillArray(StateAt(target, kMoment1, element), target.state_dtype[kMoment1], count, 0.0f);
      });
}

}  // namespace hybridopt
