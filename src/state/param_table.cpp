#include "state/param_table.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "kernels/algorithms.h"
#include "state/group.h"

namespace hybridopt {
namespace {

constexpr size_t kMaxNameBytes = 1023;
constexpr uint64_t kMaxParamElements = uint64_t{1} << 44;

// FNV-1a.
uint64_t HashOf(const std::string& name) {
  uint64_t hash = 0xCBF29CE484222325;
  for (const char c : name) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  return hash;
}

// The shape of the matrices of a shard that Muon updates. A matrix is updated as a whole, so the
// shard must have only whole ones.
Result<MatrixShape> MatrixOf(const Shard& shard) {
  const uint32_t dimensions = shard.dimensions;
  if (dimensions != 2 && dimensions != 3)
    return Status::Error(
        OFFLOAD_INVALID_ARGUMENT,
        "the tensor has %u dimensions, but its group's algorithm is Muon, expected "
        "2 (a matrix) or 3 (a stack of matrices) in shard.global_shape; put other "
        "params into a group of another algorithm",
        dimensions);
  const MatrixShape matrix{static_cast<uint64_t>(shard.global_shape[dimensions - 2]),
                           static_cast<uint64_t>(shard.global_shape[dimensions - 1])};
  bool is_whole = true;
  for (const Box& box : shard.boxes)
    for (uint32_t i = dimensions - 2; i < dimensions; ++i)
      is_whole = is_whole && box.size[i] == shard.global_shape[i];
  const uint64_t count = matrix.count();
  if (count > 0)
    is_whole = is_whole && shard.range_begin % count == 0 && shard.range_count % count == 0;
  if (is_whole || shard.range_count == 0) return matrix;
  return Status::Error(
      OFFLOAD_UNSUPPORTED,
      "the shard cuts matrices of %llu x %llu, but its group's algorithm is Muon, "
      "which needs whole ones; give each matrix to one rank, to which "
      "offload_exchange_create lets you bring the parts, or use a group of another "
      "algorithm",
      static_cast<unsigned long long>(matrix.rows), static_cast<unsigned long long>(matrix.cols));
}

// The parts of a matrix by the list of the caller, which is repeated until it has all rows.
Result<std::vector<MatrixPart>> PartsOf(const MatrixShape& matrix, const uint64_t* split_rows,
                                        uint32_t count) {
  if (count == 0) return std::vector<MatrixPart>{{0, matrix, {}}};
  if (split_rows == nullptr)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "split_rows is NULL, but split_count is %u; give the rows of each part",
                         count);
  uint64_t sum = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const auto rows = static_cast<unsigned long long>(split_rows[i]);
    if (rows == 0 || rows > kMaxParamElements)
      return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                           "split_rows[%u] is %llu, expected a number of rows, 1 to 2^44", i, rows);
    sum += split_rows[i];
  }
  if (matrix.rows % sum != 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "split_rows add up to %llu, but the matrix has %llu rows, expected a "
                         "multiple of the sum",
                         static_cast<unsigned long long>(sum),
                         static_cast<unsigned long long>(matrix.rows));
  const uint64_t repetitions = matrix.rows / sum;
  std::vector<MatrixPart> parts;
  uint64_t first_row = 0;
  for (const uint64_t rows : std::span(split_rows, count)) {
    const RowRuns runs = repetitions == 1 || sum == rows ? RowRuns{} : RowRuns{rows, sum};
    parts.push_back({first_row, {rows * repetitions, matrix.cols}, runs});
    first_row += rows;
  }
  return parts;
}

// Puts "what[index] 'name': " before an error's text.
Status InContext(const Status& status, const char* what, size_t index, const char* name) {
  return Status::Error(status.code(), "%s[%zu] '%.200s': %s", what, index, name,
                       status.message().c_str());
}

}  // namespace

Result<offload_group_t> ParamTable::Checked(const offload_group_t& group) const {
  if (group.algorithm != 0 && AlgorithmOf(group.algorithm) == nullptr)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "group.algorithm is %d, expected a value of enum offload_algorithm, or 0 "
                         "for that of the options",
                         group.algorithm);
  offload_group_t checked = group;
  if (checked.algorithm == 0) checked.algorithm = algorithm_;
  HYBRIDOPT_TRY(ValidateGroup(checked.algorithm, checked));
  if (IsOfMatrices(checked.algorithm)) HYBRIDOPT_TRY(device_.CheckMatrices());
  return checked;
}

Result<uint32_t> ParamTable::AddGroup(const offload_group_t& group) {
  HYBRIDOPT_ASSIGN(const offload_group_t checked, Checked(group));
  groups_.push_back(checked);
  groups_now_ = nullptr;
  return static_cast<uint32_t>(groups_.size() - 1);
}

Status ParamTable::SetGroup(uint32_t id, const offload_group_t& group, bool committed) {
  if (id >= groups_.size())
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "group_id is %u, but only %zu groups have been added", id, groups_.size());
  HYBRIDOPT_ASSIGN(const offload_group_t checked, Checked(group));
  if (checked.algorithm != groups_[id].algorithm)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "group.algorithm is %d (%s), but group %u was added with %d (%s), which "
                         "stays; make a new optimizer to change it",
                         group.algorithm, AlgorithmOf(checked.algorithm)->name, id,
                         groups_[id].algorithm, AlgorithmOf(groups_[id].algorithm)->name);
  groups_now_ = nullptr;
  const double at_commit = groups_[id].initial_accumulator_value;
  groups_[id] = checked;
  if (committed) groups_[id].initial_accumulator_value = at_commit;
  return {};
}

std::shared_ptr<const std::vector<offload_group_t>> ParamTable::GroupsNow() {
  if (groups_now_ == nullptr)
    groups_now_ = std::make_shared<const std::vector<offload_group_t>>(groups_);
  return groups_now_;
}

// Removes the params that were added in its lifetime, unless Keep is called.
class ParamTable::Addition {
 public:
  explicit Addition(ParamTable& table) : table_(table), first_id_(table.size()) {}
  ~Addition() {
    if (kept_) return;
    while (table_.size() > first_id_) table_.RemoveLast();
    table_.addresses_.resize(first_id_);
  }
  Addition(const Addition&) = delete;
  Addition& operator=(const Addition&) = delete;
  uint32_t Keep() {
    kept_ = true;
    return first_id_;
  }

 private:
  ParamTable& table_;
  const uint32_t first_id_;
  bool kept_ = false;
};

Result<uint32_t> ParamTable::AddParams(std::span<const ParamInput> inputs) {
  Addition addition(*this);
  for (size_t i = 0; i < inputs.size(); ++i) {
    const Status status = AddOne(inputs[i]);
    if (status.ok()) continue;
    const char* name = inputs[i].param.name;
    return InContext(status, "params", i, name == nullptr ? "(no name)" : name);
  }
  return addition.Keep();
}

// If this fails, also by std::bad_alloc, the param may be half added: Addition removes it.
Status ParamTable::AddOne(const ParamInput& input) {
  const offload_param_t& source = input.param;
  HYBRIDOPT_TRY(CheckParam(source));
  Param param{};
  param.name = source.name;
  param.name_hash = HashOf(param.name);
  param.group = source.group;
  param.algorithm = groups_[source.group].algorithm;
  param.dtype = source.dtype;
  param.grad_dtype = source.grad_dtype;
  param.placement = source.placement;
  param.chunk_order = source.chunk_order;
  param.flags = source.flags;
  param.count = source.count;
  if (input.shard.has_value()) {
    HYBRIDOPT_ASSIGN(param.shard, ValidateShard(*input.shard, source.count));
  } else {
    param.shard = WholeTensor(source.count);
  }
  if (IsOfMatrices(param.algorithm)) {
    HYBRIDOPT_ASSIGN(param.matrix, MatrixOf(param.shard));
    HYBRIDOPT_ASSIGN(param.parts, PartsOf(param.matrix, source.split_rows, source.split_count));
  } else if (source.split_count != 0) {
    return Status::Error(
        OFFLOAD_INVALID_ARGUMENT,
        "split_count is %u, but the algorithm of its group is %s, which updates no "
        "matrices; leave it 0",
        source.split_count, AlgorithmOf(param.algorithm)->name);
  }
  const uint32_t id = size();
  addresses_.push_back({nullptr, nullptr});
  params_.push_back(std::move(param));
  ids_by_name_.emplace(params_.back().name, id);
  SpareNodes spare = MakeSpareNodes(1);
  HYBRIDOPT_TRY(Occupy(id, source.data, spare));
  SetData(id, source.data);
  SetGrad(id, source.grad);
  return {};
}

void ParamTable::RemoveLast() {
  Vacate(size() - 1);
  SetData(size() - 1, nullptr);
  SetGrad(size() - 1, nullptr);
  ids_by_name_.erase(params_.back().name);
  params_.pop_back();
  addresses_.resize(size());
}

Status ParamTable::CheckParam(const offload_param_t& param) const {
  if (param.name == nullptr || param.name[0] == '\0')
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "name is %s, expected a unique name; checkpoints are keyed by it",
                         param.name == nullptr ? "NULL" : "empty");
  if (strnlen(param.name, kMaxNameBytes + 1) > kMaxNameBytes)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "name is longer than %zu bytes", kMaxNameBytes);
  if (auto it = ids_by_name_.find(param.name); it != ids_by_name_.end())
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "name is taken by param %u; names must be unique", it->second);
  if (param.group >= groups_.size())
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "group is %u, but %zu groups have been added; call "
                         "offload_optimizer_add_group first",
                         param.group, groups_.size());
  if (!IsParamDtype(param.dtype) || !IsParamDtype(param.grad_dtype))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "dtype is %d and grad_dtype is %d, expected OFFLOAD_FP32 (1), "
                         "OFFLOAD_BF16 (2) or OFFLOAD_FP16 (3)",
                         param.dtype, param.grad_dtype);
  if (param.placement < OFFLOAD_PLACE_AUTO || param.placement > OFFLOAD_PLACE_DISK)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "placement is %d, expected OFFLOAD_PLACE_AUTO (0), _HOST (1), _DEVICE (2) "
                         "or _DISK (3)",
                         param.placement);
  if ((param.flags & ~uint32_t{OFFLOAD_PARAM_REPLICA}) != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "flags is 0x%x, known is 0x%x", param.flags,
                         OFFLOAD_PARAM_REPLICA);
  if (param.count > kMaxParamElements)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "count is %llu, expected at most 2^44",
                         static_cast<unsigned long long>(param.count));
  if (param.data == nullptr && param.count > 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "data is NULL, expected the address of %llu elements",
                         static_cast<unsigned long long>(param.count));
  if (Status status = CheckAddress(param.data, param.count, param.dtype); !status.ok())
    return Status::Error(status.code(), "data: %s", status.message().c_str());
  if (Status status = CheckAddress(param.grad, param.count, param.grad_dtype); !status.ok())
    return Status::Error(status.code(), "grad: %s", status.message().c_str());
  return {};
}

Status ParamTable::CheckAddress(const void* address, uint64_t count, int32_t dtype) const {
  if (address == nullptr || count == 0) return {};
  const uint64_t element_bytes = DtypeBytes(dtype);
  if (reinterpret_cast<uintptr_t>(address) % element_bytes != 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "address %p is not aligned to its %llu-byte elements (%s)", address,
                         static_cast<unsigned long long>(element_bytes), DtypeName(dtype));
  return device_.CheckRange(address, count * element_bytes);
}

ParamTable::SpareNodes ParamTable::MakeSpareNodes(size_t count) {
  SpareNodes spare;
  spare.reserve(count);
  for (IdsByAddress one; spare.size() < count;)
    spare.push_back(one.extract(one.emplace(0, 0).first));
  return spare;
}

Status ParamTable::Occupy(uint32_t id, const void* data, SpareNodes& spare) {
  const uint64_t bytes = params_[id].count * DtypeBytes(params_[id].dtype);
  if (data == nullptr || bytes == 0) return {};
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data);
  const auto after = ids_by_address_.lower_bound(begin);
  std::optional<uint32_t> other;
  if (after != ids_by_address_.end() && after->first < begin + bytes) other = after->second;
  if (after != ids_by_address_.begin()) {
    const auto before = std::prev(after);
    const Param& param = params_[before->second];
    if (before->first + param.count * DtypeBytes(param.dtype) > begin) other = before->second;
  }
  if (other.has_value())
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "data %p overlaps the data of param %u '%.200s'; register tied weights "
                         "once",
                         data, *other, params_[*other].name.c_str());
  IdsByAddress::node_type node = std::move(spare.back());
  spare.pop_back();
  node.key() = begin;
  node.mapped() = id;
  ids_by_address_.insert(std::move(node));
  return {};
}

void ParamTable::Vacate(uint32_t id) {
  const auto it = ids_by_address_.find(reinterpret_cast<uintptr_t>(addresses_[id].data));
  if (it != ids_by_address_.end() && it->second == id) ids_by_address_.erase(it);
}

void ParamTable::ReleaseData(uint32_t id) {
  Vacate(id);
  SetData(id, nullptr);
}

void ParamTable::SetData(uint32_t id, void* data) {
  const uint64_t bytes = params_[id].count * DtypeBytes(params_[id].dtype);
  if (addresses_[id].data != nullptr) data_bytes_ -= bytes;
  if (data != nullptr) data_bytes_ += bytes;
  addresses_[id].data = data;
}

void ParamTable::SetGrad(uint32_t id, const void* grad) {
  const uint64_t bytes = params_[id].count * DtypeBytes(params_[id].grad_dtype);
  if (addresses_[id].grad != nullptr) grad_bytes_ -= bytes;
  if (grad != nullptr) grad_bytes_ += bytes;
  addresses_[id].grad = grad;
}

Status ParamTable::Bind(std::span<const offload_binding_t> bindings) {
  for (size_t i = 0; i < bindings.size(); ++i) {
    const offload_binding_t& binding = bindings[i];
    if (binding.param >= size())
      return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                           "bindings[%zu].param is %u, but only %u params have been added", i,
                           binding.param, size());
    const Param& param = params_[binding.param];
    if (Status status = CheckAddress(binding.data, param.count, param.dtype); !status.ok())
      return InContext(status, "bindings.data", i, param.name.c_str());
    if (Status status = CheckAddress(binding.grad, param.count, param.grad_dtype); !status.ok())
      return InContext(status, "bindings.grad", i, param.name.c_str());
  }
  HYBRIDOPT_TRY(MoveData(bindings));
  for (const offload_binding_t& binding : bindings) SetGrad(binding.param, binding.grad);
  return {};
}

// Frees the old addresses of all params before it takes the first new one, so that two params may
// exchange their addresses. Allocates all memory before it changes anything.
Status ParamTable::MoveData(std::span<const offload_binding_t> bindings) {
  const auto moves = [&](const offload_binding_t& binding) {
    return binding.data != nullptr && binding.data != addresses_[binding.param].data;
  };
  const auto count = std::count_if(bindings.begin(), bindings.end(), moves);
  if (count == 0) return {};
  std::vector<std::pair<uint32_t, void*>> moved;  // param and its old address
  moved.reserve(static_cast<size_t>(count));
  SpareNodes spare = MakeSpareNodes(bindings.size() + static_cast<size_t>(count));  // and back
  for (const offload_binding_t& binding : bindings) {
    if (!moves(binding)) continue;
    moved.emplace_back(binding.param, addresses_[binding.param].data);
    Vacate(binding.param);
  }
  Status status;
  for (size_t i = 0; status.ok() && i < bindings.size(); ++i) {
    const offload_binding_t& binding = bindings[i];
    if (!moves(binding)) continue;
    Vacate(binding.param);  // in case an earlier binding of this call named it too
    status = Occupy(binding.param, binding.data, spare);
    if (!status.ok()) {
      status = InContext(status, "bindings", i, params_[binding.param].name.c_str());
    } else {
      SetData(binding.param, binding.data);
    }
  }
  if (status.ok()) return {};
  for (const auto& [id, data] : moved) Vacate(id);
  for (auto it = moved.rbegin(); it != moved.rend(); ++it) {
    SetData(it->first, it->second);
  }
  for (const auto& [id, data] : moved) (void)Occupy(id, addresses_[id].data, spare);
  return status;
}

}  // namespace hybridopt
