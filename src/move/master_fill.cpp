#include "move/master_fill.h"

#include <algorithm>

#include "kernels/algorithms.h"
#include "runtime/work_pieces.h"
#include "state_io/initial_state.h"

namespace hybridopt {

Status MasterFill::Initialize(std::span<const Addresses> addresses, StreamHandle stream) {
  if (!device_.unified()) {
    HYBRIDOPT_TRY(device_.Record(lanes_.moved[0], stream));
    HYBRIDOPT_TRY(lanes_.Wait(lanes_.moved[0], "the params given to commit"));
  }
  // A worker rounds the values to fp32, because the caller's thread may have any rounding mode.
  first_moments_.resize(table_.groups().size());
  HYBRIDOPT_TRY(context_.workers().Run([&](uint32_t worker) {
    for (size_t i = 0; worker == 0 && i < first_moments_.size(); ++i) {
      const offload_group_t& group = table_.groups()[i];
      first_moments_[i] = static_cast<float>(InitialMoment0(group.algorithm, group));
    }
  }));
  for (uint32_t id = 0; id < table_.size(); ++id)
    HYBRIDOPT_TRY(FillOnDevice(id, addresses[id].data, true));
  HYBRIDOPT_TRY(FillChunks(addresses, true));
  return AwaitDevice();
}

Status MasterFill::Refresh(std::span<const MoveItem> params) {
  std::fill(addresses_.begin(), addresses_.end(), Addresses{nullptr, nullptr});
  for (const MoveItem& item : params) {
    addresses_[item.param].data = item.address;
    HYBRIDOPT_TRY(FillOnDevice(item.param, item.address, false));
  }
  HYBRIDOPT_TRY(FillChunks(addresses_, false));
  return AwaitDevice();
}

Status MasterFill::FillOnDevice(uint32_t id, void* data, bool moments) {
  const uint64_t count = residence_.range(id, Tier::kDevice).count;
  if (count == 0) return {};
  const Param& param = table_.param(id);
  for (StateSlot slot : {kMaster, kMasterLow, kMoment0, kMoment1}) {
    std::byte* const array = memory_.At(Tier::kDevice, id, slot);
    if (array == nullptr) continue;
    // At commit a master is first set to 0. FollowParams keeps a master if it rounds to its param;
    // a master of 0 does so only for a param of 0, so every master gets the right value.
    if (moments || slot == kMasterLow)
      HYBRIDOPT_TRY(
          device_.Fill(lanes_.compute, array, count,
                       InitialPattern(shape_.params[id], slot, first_moments_[param.group])));
    if (slot == kMaster)
      HYBRIDOPT_TRY(device_.FollowParams(lanes_.compute, data, param.dtype, count,
                                         reinterpret_cast<float*>(array)));
  }
  return {};
}

Status MasterFill::FillChunks(std::span<const Addresses> addresses, bool moments) {
  const auto is_named = [&](const Fragment& fragment) {
    return addresses[fragment.param].data != nullptr;
  };
  const auto wanted = [&](uint32_t number) {
    const std::span<const Fragment> fragments = chunks_.FragmentsOf(chunks_.chunks[number]);
    return moments || std::any_of(fragments.begin(), fragments.end(), is_named);
  };
  DiskMemory* const disk = memory_.disk();
  if (disk != nullptr)
    disk->Begin(wanted, moments ? DiskMemory::Content::kNew : DiskMemory::Content::kStored);
  for (uint32_t number = 0; number < chunks_.chunks.size(); ++number) {
    if (disk != nullptr) HYBRIDOPT_TRY(disk->Await(number));
    HYBRIDOPT_TRY(FillChunk(chunks_.chunks[number], addresses, moments));
    if (disk != nullptr) disk->Updated(number);
  }
  return disk != nullptr ? disk->End() : Status();
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

// One worker's part of a chunk. The params are in the staging slot or, if `staged` is NULL, at
// their own addresses. At commit this is the first touch of the state's memory.
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
        const uint64_t element = fragment.begin + first;
        const std::byte* const from =
            ParamAt(fragment, first, DtypeBytes(param.dtype), staged, data);
        auto* const master =
            reinterpret_cast<float*>(memory_.At(fragment.tier, id, kMaster, element));
        if (master != nullptr && moments) kernels.ToFp32(param.dtype)(from, count, master);
        if (master != nullptr && !moments)
          FollowAndNote(kernels, param.dtype, from, count, master,
                        changes_.OnHost(id).From(element));
        for (StateSlot slot : {kMasterLow, kMoment0, kMoment1})
          if (moments || slot == kMasterLow)
            FillArray(memory_.At(fragment.tier, id, slot, element), count,
                      InitialPattern(shape_.params[id], slot, first_moments_[param.group]));
      });
}

Status MasterFill::AwaitDevice() {
  if (device_.unified()) return {};
  HYBRIDOPT_TRY(device_.Record(lanes_.moved[0], lanes_.compute));
  return lanes_.Wait(lanes_.moved[0], "masters on the device");
}

}  // namespace hybridopt
