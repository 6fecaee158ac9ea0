#include "core/host_share.h"

namespace hybridopt {

HostShare::HostShare(const ParamTable& table, const Placement& placement, const StateMemory& memory,
                     const KernelTable& kernels)
    : kernels_(kernels), placement_(placement) {
  targets_.reserve(table.size());
  for (uint32_t id = 0; id < table.size(); ++id) {
    const Param& param = table.param(id);
    const ParamPlace& place = placement.params[id];
    targets_.push_back({place.rule, param.dtype, kernels.ToFp32(param.dtype),
                        memory.Host(id, kMaster), memory.Host(id, kMoment0),
                        memory.Host(id, kMoment1),
                        table.groups()[param.group].initial_accumulator_value, place.device_count,
                        static_cast<uint32_t>(DtypeBytes(param.dtype))});
  }
}

void HostShare::Update(const Chunk& chunk, const ChunkBuffers& buffers,
                       std::span<const StepParam> params,
                       std::span<const Coefficients> coefficients, uint32_t worker,
                       uint32_t workers) const {
  ForEachStretch(placement_, chunk, worker, workers,
                 [&](const Fragment& fragment, uint64_t first, uint64_t count) {
                   const StepParam& param = params[fragment.param];
                   if (!param.active) return;
                   const Target& target = targets_[fragment.param];
                   const uint64_t element = HostElement(target, fragment, first);
                   UpdateSpan span{};
                   span.grad = GradAt(param, fragment, buffers, first);
                   span.param = ParamAt(target, fragment, buffers, param.addresses.data, first);
                   span.master = target.master != nullptr ? target.master + element
                                                          : static_cast<float*>(span.param);
                   span.moment0 = target.moment0 != nullptr ? target.moment0 + element : nullptr;
                   span.moment1 = target.moment1 != nullptr ? target.moment1 + element : nullptr;
                   span.count = count;
                   kernels_.Update(target.rule, param.grad_dtype, target.param_dtype)(
                       coefficients[param.coefficients], span);
                 });
}

void HostShare::Fill(const Chunk& chunk, const ChunkBuffers& buffers,
                     std::span<const Addresses> addresses, const FirstState& first_state,
                     uint32_t worker, uint32_t workers) const {
  ForEachStretch(placement_, chunk, worker, workers,
                 [&](const Fragment& fragment, uint64_t first, uint64_t count) {
                   void* const data = addresses[fragment.param].data;
                   if (data == nullptr) return;
                   const Target& target = targets_[fragment.param];
                   const uint64_t element = HostElement(target, fragment, first);
                   if (target.master != nullptr)
                     target.widen(ParamAt(target, fragment, buffers, data, first), count,
                                  target.master + element);
                   if (!first_state.moments) return;
                   if (target.moment0 != nullptr)
                     std::fill_n(target.moment0 + element, count,
                                 static_cast<float>(target.initial_moment0));
                   if (target.moment1 != nullptr)
                     std::fill_n(target.moment1 + element, count, 0.0f);
                 });
}

}  // namespace hybridopt
