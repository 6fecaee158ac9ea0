#include "core/host_share.h"

namespace hybridopt {

HostShare::HostShare(const ParamTable& table, const Placement& placement, const StateMemory& memory,
                     const KernelTable& kernels)
    : kernels_(kernels), placement_(placement) {
  targets_.reserve(table.size());
  for (uint32_t id = 0; id < table.size(); ++id) {
    const Param& param = table.param(id);
    const ParamPlace& place = placement.params[id];
    targets_.push_back(
        {place.rule,
         param.dtype,
         kernels.ToFp32(param.dtype),
         {memory.Host(id, kMaster), memory.Host(id, kMoment0), memory.Host(id, kMoment1)},
         place.state_dtype,
         table.groups()[param.group].initial_accumulator_value,
         place.device_count,
         static_cast<uint32_t>(DtypeBytes(param.dtype))});
  }
}

void HostShare::Update(const Chunk& chunk, const ChunkPart& part, const ChunkBuffers& buffers,
                       std::span<const StepParam> params,
                       std::span<const Coefficients> coefficients, uint32_t worker,
                       uint32_t workers) const {
  ForEachStretch(placement_, chunk, part, worker, workers,
                 [&](const Fragment& fragment, uint64_t first, uint64_t count) {
                   const StepParam& param = params[fragment.param];
                   if (!param.active) return;
                   const Target& target = targets_[fragment.param];
                   const uint64_t element = HostElement(target, fragment, first);
                   UpdateSpan span{};
                   span.grad = GradAt(param, fragment, buffers, first);
                   span.param = ParamAt(target, fragment, buffers, param.addresses.data, first);
                   span.master = StateAt(target, kMaster, element);
                   if (span.master == nullptr) span.master = span.param;
                   span.moment0 = StateAt(target, kMoment0, element);
                   span.moment1 = StateAt(target, kMoment1, element);
                   span.count = count;
                   kernels_.Update(target.rule, param.grad_dtype, target.param_dtype)(
                       coefficients[param.coefficients], span);
                 });
}

void HostShare::Fill(const Chunk& chunk, const ChunkBuffers& buffers,
                     std::span<const Addresses> addresses, const FirstState& first_state,
                     uint32_t worker, uint32_t workers) const {
  ForEachStretch(placement_, chunk, {0, chunk.element_count}, worker, workers,
                 [&](const Fragment& fragment, uint64_t first, uint64_t count) {
                   void* const data = addresses[fragment.param].data;
                   if (data == nullptr) return;
                   const Target& target = targets_[fragment.param];
                   const uint64_t element = HostElement(target, fragment, first);
                   if (std::byte* master = StateAt(target, kMaster, element); master != nullptr)
                     target.widen(ParamAt(target, fragment, buffers, data, first), count,
                                  reinterpret_cast<float*>(master));
                   if (!first_state.moments) return;
                   FillArray(StateAt(target, kMoment0, element), target.state_dtype[kMoment0],
                             count, static_cast<float>(target.initial_moment0));
                   FillArray(StateAt(target, kMoment1, element), target.state_dtype[kMoment1],
                             count, 0.0f);
                 });
}

}  // namespace hybridopt
