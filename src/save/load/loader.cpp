#include "save/load/loader.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kernels/algorithms.h"

namespace hybridopt {
namespace {

uint64_t Bytes(const std::vector<checkpoint::Extent>& extents) {
  uint64_t bytes = 0;
  for (const checkpoint::Extent& extent : extents) bytes += extent.bytes;
  return bytes;
}

}  // namespace

Status Loader::Open() {
  HYBRIDOPT_TRY(sources_.Open(context_.files(), request_.path));
  CompareProducts();
  return {};
}

Status Loader::TakeMemory() {
  blocks_ =
      static_cast<uint32_t>(std::clamp<uint64_t>(units_.extents().size(), 1, request_.io_depth));
  const uint64_t block_bytes = checkpoint::BlockReader::BlockBytes(units_.unit_bytes());
  HYBRIDOPT_ASSIGN(memory_, PinnedRoom::TakeAnyway(context_, blocks_ * block_bytes));
  files_.emplace(sources_.reader());
  HYBRIDOPT_ASSIGN(transfer_, Transfer::Create(context_, "a load"));
  return {};
}

checkpoint::BlockReader Loader::ReaderOf(const std::vector<checkpoint::Extent>& extents) {
  return checkpoint::BlockReader([this](uint32_t file) { return files_->Get(file); }, extents,
                                 memory_.data(), blocks_, units_.unit_bytes());
}

Status Loader::Verify() {
  HYBRIDOPT_TRY(units_.List());
  HYBRIDOPT_TRY(TakeMemory());
  bytes_total_ = Bytes(units_.extents());
  if (Has(OFFLOAD_LOAD_NO_VERIFY)) return {};
  verifier_.emplace(sources_, units_);
  bytes_total_ += Bytes(verifier_->extents());
  checkpoint::BlockReader reader = ReaderOf(verifier_->extents());
  HYBRIDOPT_TRY(reader.Start());
  return verifier_->Verify(reader, [this](uint64_t bytes) { Progress(bytes); });
}

Status Loader::Replace(EventHandle ready) {
  if (ready != nullptr) HYBRIDOPT_TRY(transfer_.Await(ready, "the stream given to it"));
  checkpoint::BlockReader reader = ReaderOf(units_.extents());
  HYBRIDOPT_TRY(reader.Start());
  const std::byte* data = nullptr;
  const auto begin_unit = [&](const LoadUnit& unit) -> Status {
    HYBRIDOPT_TRY(writer_.Await());  // copies that still run may read the memory of the unit before
    HYBRIDOPT_ASSIGN(data, reader.Next());
    if (verifier_.has_value()) HYBRIDOPT_TRY(verifier_->CheckUnchanged(unit, data));
    Progress(unit.extent.bytes);
    return {};
  };
  const auto write = [&](const LoadPiece& piece) {
    return writer_.Write(piece.elements, request_.locations[piece.elements.param], piece.dtype,
                         data + piece.into);
  };
  HYBRIDOPT_TRY(units_.ForEach(begin_unit, write));
  if (Has(OFFLOAD_LOAD_FRESH_MOMENTS)) HYBRIDOPT_TRY(FillMoments());
  return writer_.End();
}

// Fills the moments with their initial values, as commit does.
Status Loader::FillMoments() {
  for (uint32_t id = 0; id < table_.size(); ++id)
    for (StateSlot slot : {kMoment0, kMoment1}) {
      if (!locator_.Has(id, slot)) continue;
      const auto first = static_cast<float>(request_.first_moments[table_.param(id).group]);
      HYBRIDOPT_TRY(writer_.Reset(id, slot, request_.locations[id], first));
    }
  return {};
}

void Loader::Progress(uint64_t bytes) {
  bytes_done_ += bytes;
  if (request_.progress != nullptr)
    request_.progress(request_.progress_user, bytes_done_, bytes_total_);
}

// Warns if matrices were multiplied by other code before.
void Loader::CompareProducts() const {
  const auto is_of_matrices = [](const Param& param) { return IsOfMatrices(param.algorithm); };
  if (std::none_of(table_.params().begin(), table_.params().end(), is_of_matrices)) return;
  const std::string& before = sources_.reader().manifest().matrix_products;
  const std::string now = context_.device().matrix_products();
  if (before == now) return;
  const auto text = [](const std::string& products) {
    return products.empty() ? std::string("hybridopt on the CPU") : products.substr(0, 256);
  };
  const std::string note = "the matrices of a loaded checkpoint were multiplied by " +
                           text(before) + ", and are now by " + text(now) +
                           ", which rounds otherwise";
  context_.Note(note.c_str());
}

void Loader::SetCounts(StepCounts& step_counts) const {
  const bool fresh = Has(OFFLOAD_LOAD_FRESH_MOMENTS) && !Has(OFFLOAD_LOAD_KEEP_STEPS);
  step_counts.set_applied(fresh ? 0 : sources_.reader().manifest().step);
  for (uint32_t id = 0; id < table_.size(); ++id) {
    const Param& param = table_.param(id);
    if (param.count == 0 && param.shard.partial()) continue;  // another rank updates this param
    step_counts.set(id, fresh ? 0 : sources_.StoredCount(id));
  }
}

}  // namespace hybridopt
