// ParamTable: the registry of params. Ids, names, groups, shards and addresses are stored here and
// nowhere else.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/shard.h"
#include "base/status.h"
#include "device/device.h"
#include "kernels/matrix/matrix_update.h"

namespace hybridopt {

// The addresses that a step uses for a param; both may change between steps.
struct Addresses {
  void* data;
  const void* grad;
};

struct Param {
  std::string name;
  uint64_t name_hash;  // the key of its random bits: the same on all ranks and systems
  uint32_t group;
  int32_t algorithm;  // of the group. It never changes, while other threads may read it
  int32_t dtype;
  int32_t grad_dtype;
  int32_t placement;
  int32_t chunk_order;
  uint32_t flags;
  uint64_t count;
  Shard shard;
  MatrixShape matrix;  // of each of its matrices; 0 x 0 if its elements are updated one by one
  std::vector<MatrixPart> parts;  // of each matrix: what is updated as a matrix of its own
};

// An offload_param_t with the shard it points to, both brought to this release's size.
struct ParamInput {
  offload_param_t param;
  std::optional<offload_shard_t> shard;
};

class ParamTable {
 public:
  ParamTable(int32_t algorithm, const Device& device) : algorithm_(algorithm), device_(device) {}

  Result<uint32_t> AddGroup(const offload_group_t& group);
  // If `committed`, a value that only commit uses (initial_accumulator_value) is not changed.
  Status SetGroup(uint32_t id, const offload_group_t& group, bool committed);
  // Adds all params or none. Returns the id of the first.
  Result<uint32_t> AddParams(std::span<const ParamInput> inputs);
  // Binds all params or none.
  Status Bind(std::span<const offload_binding_t> bindings);

  // Removes an address that the caller takes back: the param has no data (or no gradient) until the
  // caller binds one.
  void ReleaseData(uint32_t id);
  void ReleaseGrad(uint32_t id) { SetGrad(id, nullptr); }
  // Bytes of params and gradients that have an address now. Any thread.
  uint64_t data_bytes() const { return data_bytes_; }
  uint64_t grad_bytes() const { return grad_bytes_; }

  // That of groups which name none; checkpoints name it too.
  int32_t algorithm() const { return algorithm_; }
  // That of a param's group.
  int32_t algorithm(uint32_t id) const { return params_[id].algorithm; }
  uint32_t size() const { return static_cast<uint32_t>(params_.size()); }
  const Param& param(uint32_t id) const { return params_[id]; }
  std::span<const Param> params() const { return params_; }
  std::span<const Addresses> addresses() const { return addresses_; }
  // Each with its algorithm, which is never 0 here.
  std::span<const offload_group_t> groups() const { return groups_; }
  // The present groups, for work that is queued. All calls return the same list until a group
  // changes.
  std::shared_ptr<const std::vector<offload_group_t>> GroupsNow();

 private:
  class Addition;
  // The group with its algorithm, once all its fields have been checked.
  Result<offload_group_t> Checked(const offload_group_t& group) const;
  using IdsByAddress = std::map<uintptr_t, uint32_t>;
  // Nodes of ids_by_address_, allocated before the first change, so that a change cannot fail half
  // way.
  using SpareNodes = std::vector<IdsByAddress::node_type>;

  Status AddOne(const ParamInput& input);
  void RemoveLast();
  Status CheckParam(const offload_param_t& param) const;
  Status CheckAddress(const void* address, uint64_t count, int32_t dtype) const;
  // Marks [data, data + bytes) as memory of this param; INVALID_ARGUMENT names the param that it
  // overlaps. Uses a spare node, so it allocates nothing.
  Status Occupy(uint32_t id, const void* data, SpareNodes& spare);
  static SpareNodes MakeSpareNodes(size_t count);
  void Vacate(uint32_t id);
  void SetData(uint32_t id, void* data);
  void SetGrad(uint32_t id, const void* grad);
  Status MoveData(std::span<const offload_binding_t> bindings);

  const int32_t algorithm_;
  const Device& device_;
  std::vector<offload_group_t> groups_;
  std::shared_ptr<const std::vector<offload_group_t>> groups_now_;  // NULL: a group has changed
  std::vector<Param> params_;
  std::vector<Addresses> addresses_;
  std::atomic<uint64_t> data_bytes_ = 0;
  std::atomic<uint64_t> grad_bytes_ = 0;
  std::unordered_map<std::string, uint32_t> ids_by_name_;
  IdsByAddress ids_by_address_;  // of params with data and elements
};

}  // namespace hybridopt
