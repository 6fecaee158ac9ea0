#include "checkpoint/format/checkpoint_info.h"

namespace hybridopt::checkpoint {
offload_checkpoint_info_t InfoOf(const Manifest& manifest) {
  offload_checkpoint_info_t info{};
  info.struct_size = sizeof(info);
  info.format_version = manifest.version;
  info.algorithm = manifest.algorithm;
  info.save_flags = manifest.masters_only ? OFFLOAD_SAVE_MASTERS_ONLY : 0;
  info.world = manifest.world;
  info.group_count = static_cast<uint32_t>(manifest.groups.size());
  info.step = manifest.step;
  info.param_count = manifest.params.size();
  info.file_count = manifest.files.size();
  ForEachTensor(manifest, [&](const offload_checkpoint_tensor_t& tensor) {
    info.tensor_count += 1;
    info.bytes += tensor.bytes;
  });
  return info;
}

void ForEachTensor(const Manifest& manifest,
                   FunctionRef<void(const offload_checkpoint_tensor_t&)> visit) {
  std::vector<int64_t> offsets, extents;
  for (const StoredParam& param : manifest.params) {
    for (const StoredShard& stored : param.shards) {
      offsets.clear();
      extents.clear();
      for (const Box& box : stored.shard.boxes) {
        offsets.insert(offsets.end(), box.offset.begin(), box.offset.begin() + param.shape.size());
        extents.insert(extents.end(), box.size.begin(), box.size.begin() + param.shape.size());
      }
      offload_checkpoint_tensor_t tensor{};
      tensor.struct_size = sizeof(tensor);
      tensor.rank = stored.rank;
      tensor.dimensions = static_cast<uint32_t>(param.shape.size());
      tensor.box_count = static_cast<uint32_t>(stored.shard.boxes.size());
      tensor.global_shape = param.shape.data();
      tensor.box_offsets = offsets.data();
      tensor.box_extents = extents.data();
      tensor.range_begin = stored.shard.range_begin;
      tensor.range_count = stored.shard.range_count;
      tensor.name = param.name.c_str();
      tensor.step_count = stored.step_count;
      for (const StoredTensor& array : stored.tensors) {
        tensor.kind = array.kind;
        tensor.dtype = array.dtype;
        tensor.file = manifest.files[array.file].name.c_str();
        tensor.file_offset = array.offset;
        tensor.bytes = array.bytes;
        visit(tensor);
      }
    }
  }
}

}  // namespace hybridopt::checkpoint
