#include "move/master_fill.h"

#include <algorithm>

#include "kernels/algorithms.h"
#include "kernels/formats/format.h"
#include "runtime/work_pieces.h"

namespace hybridopt {

Status MasterFill::Initialize(std::span<const Addresses> addresses, StreamHandle stream) {
  if (!device_.unified()) {
    HYBRIDOPT_TRY(device_.Record(lanes_.moved[0], stream));
    HYBRIDOPT_TRY(lanes_.Wait(lanes_.moved[0], "the params given to commit"));
  }
  // A worker rounds the values to fp32, because the caller's thread may have any rounding mode.
  std::vector<float> first_moments0(table_.groups().size());
  HYBRIDOPT_TRY(context_.workers().Run([&](uint32_t worker) {
    for (size_t group = 0; worker == 0 && group < first_moments0.size(); ++group)
      first_moments0[group] =
          static_cast<float>(InitialMoment0(table_.algorithm(), table_.groups()[group]));
  }));
  for (uint32_t id = 0; id < table_.size(); ++id)
    HYBRIDOPT_TRY(
        FillOnDevice(id, addresses[id].data, true, first_moments0[table_.param(id).group]));
  for (const Chunk& chunk : chunks_.chunks) HYBRIDOPT_TRY(FillChunk(chunk, addresses, true));
  return AwaitDevice();
}

Status MasterFill::Refresh(std::span<const MoveItem> params) {
  std::fill(addresses_.begin(), addresses_.end(), Addresses{nullptr, nullptr});
  for (const MoveItem& item : params) {
    addresses_[item.param].data = item.address;
    HYBRIDOPT_TRY(FillOnDevice(item.param, item.address, false, 0.0f));
  }
  for (const Chunk& chunk : chunks_.chunks) HYBRIDOPT_TRY(FillChunk(chunk, addresses_, false));
  return AwaitDevice();
}

Status MasterFill::FillOnDevice(uint32_t id, void* data, bool moments, float first_moment0) {
  const ParamShape& shaped = shape_.params[id];
  const uint64_t count = residence_.range(id, Tier::kDevice).count;
  if (count == 0) return {};
  const Param& param = table_.param(id);
  if (std::byte* master = memory_.At(Tier::kDevice, id, kMaster); master != nullptr) {
    // A master of 0 follows every param: the one param that this is the master of is 0.
    if (moments)
      HYBRIDOPT_TRY(
          device_.Fill(lanes_.compute, master, count, PatternOf(shaped.format[kMaster], 0.0f)));
    HYBRIDOPT_TRY(device_.FollowParams(lanes_.compute, data, param.dtype, count,
                                       reinterpret_cast<float*>(master)));
  }
  if (std::byte* low = memory_.At(Tier::kDevice, id, kMasterLow); low != nullptr)
    HYBRIDOPT_TRY(
        device_.Fill(lanes_.compute, low, count, PatternOf(shaped.format[kMasterLow], 0.0f)));
  if (!moments) return {};
  if (std::byte* moment = memory_.At(Tier::kDevice, id, kMoment0); moment != nullptr)
    HYBRIDOPT_TRY(device_.Fill(lanes_.compute, moment, count,
                               PatternOf(shaped.format[kMoment0], first_moment0)));
  if (std::byte* moment = memory_.At(Tier::kDevice, id, kMoment1); moment != nullptr)
    HYBRIDOPT_TRY(
        device_.Fill(lanes_.compute, moment, count, PatternOf(shaped.format[kMoment1], 0.0f)));
  return {};
}

// Fills the masters of one chunk on the host from its params, and with `moments` the moments too.
// Leaves the state of params whose address is NULL as it is. Copies down only params that have a
// whole master on the host; any other param is its own master, or the upper half of it.
Status MasterFill::FillChunk(const Chunk& chunk, std::span<const Addresses> addresses,
                             bool moments) {
  std::byte* staged = nullptr;
  if (!device_.unified()) {
    staged = lanes_.ring().params(0);
    bool any = false;
    for (const Fragment& fragment : chunks_.FragmentsOf(chunk)) {
      const std::byte* data = static_cast<const std::byte*>(addresses[fragment.param].data);
      if (data == nullptr) continue;
      any = true;
      if (!shape_.params[fragment.param].Keeps(fragment.tier, kMaster)) continue;
      const uint64_t element_bytes = DtypeBytes(table_.param(fragment.param).dtype);
      HYBRIDOPT_TRY(device_.CopyToHost(lanes_.down, staged + fragment.param_offset,
                                       data + fragment.begin * element_bytes,
                                       fragment.count * element_bytes));
    }
    if (!any) return {};
    HYBRIDOPT_TRY(device_.Record(lanes_.landed(0).end, lanes_.down));
    HYBRIDOPT_TRY(lanes_.Wait(lanes_.landed(0).end, "params coming down"));
  }
  HYBRIDOPT_TRY(context_.workers().Run(
      [&](uint32_t worker) { FillOnHost(chunk, staged, addresses, moments, worker); }));
  if (!device_.unified()) lanes_.ring().ReleaseParams(0);
  return {};
}

// One worker's part of a chunk, whose params are in the slot or, if `staged` is NULL, at their
// addresses. At commit this is the first touch of the memory.
void MasterFill::FillOnHost(const Chunk& chunk, std::byte* staged,
                            std::span<const Addresses> addresses, bool moments,
                            uint32_t worker) const {
  const KernelTable& kernels = context_.kernels();
  ForEachRange(
      chunks_.FragmentsOf(chunk), chunk.element_count,
      [](const Fragment& fragment) { return fragment.first_element; },
      RangeOfWorker(chunk.element_count, kWorkGrainElements, worker, context_.workers().threads()),
      [&](const Fragment& fragment, uint64_t first, uint64_t count) {
        const uint32_t id = fragment.param;
        void* const data = addresses[id].data;
        if (data == nullptr) return;
        const Param& param = table_.param(id);
        const ParamShape& shaped = shape_.params[id];
        const uint64_t element = fragment.begin + first;
        const auto fill = moments ? kernels.ToFp32(param.dtype) : kernels.FollowParams(param.dtype);
        if (std::byte* master = memory_.At(fragment.tier, id, kMaster, element); master != nullptr)
          fill(ParamAt(fragment, first, DtypeBytes(param.dtype), staged, data), count,
               reinterpret_cast<float*>(master));
        FillArray(memory_.At(fragment.tier, id, kMasterLow, element), count,
                  PatternOf(shaped.format[kMasterLow], 0.0f));
        if (!moments) return;
        // A worker rounds this to fp32, because the caller's thread may have set another rounding
        // mode.
        const double first_moment =
            InitialMoment0(table_.algorithm(), table_.groups()[param.group]);
        FillArray(memory_.At(fragment.tier, id, kMoment0, element), count,
                  PatternOf(shaped.format[kMoment0], static_cast<float>(first_moment)));
        FillArray(memory_.At(fragment.tier, id, kMoment1, element), count,
                  PatternOf(shaped.format[kMoment1], 0.0f));
      });
}

Status MasterFill::AwaitDevice() {
  if (device_.unified()) return {};
  HYBRIDOPT_TRY(device_.Record(lanes_.moved[0], lanes_.compute));
  return lanes_.Wait(lanes_.moved[0], "masters on the device");
}

}  // namespace hybridopt
