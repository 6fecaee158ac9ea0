// Checkpoints made by hand, element by element, without the library's own saving. Tests compare
// what the library reads from them with Element().
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "checkpoint/format/format.h"
#include "checkpoint/format/hash.h"
#include "kernels/convert.h"
#include "kernels/dtypes.h"

namespace hybridopt::checkpoint {

// The value of an element. It shows the element's param, kind and index, and has few digits.
inline float Element(size_t param, int32_t kind, uint64_t global_index) {
  return static_cast<float>(4 * (param + 1)) + static_cast<float>(kind) / 2 +
         static_cast<float>(global_index) / 4096;
}

class HandMade {
 public:
  HandMade(int32_t algorithm, uint32_t world) {
    manifest.writer = "tests/sample_checkpoint.h";
    manifest.step = 42;
    manifest.algorithm = algorithm;
    manifest.layout = "fp32";
    manifest.world = world;
    manifest.block_bytes = kBlockBytesMin;
    for (uint32_t rank = 0; rank < world; ++rank)
      manifest.files.push_back({ShardFileName(rank, world), rank, 0, 0, 0});
  }

  // Lays the files out and fills them, after a change to the manifest.
  void Fill() {
    Result<std::vector<std::string>> heads = LayOutFiles(&manifest);
    ASSERT_TRUE(heads.ok()) << heads.status().message();
    files = std::move(heads.value());
    for (size_t f = 0; f < files.size(); ++f) files[f].resize(manifest.files[f].bytes);
    for (size_t p = 0; p < manifest.params.size(); ++p) {
      for (StoredShard& shard : manifest.params[p].shards) {
        for (StoredTensor& tensor : shard.tensors) {
          char* const data = files[tensor.file].data() + tensor.offset;
          for (uint64_t i = 0; i < shard.shard.range_count; ++i) {
            const float value = Element(p, tensor.kind, shard.shard.GlobalIndex(i));
            const uint16_t half =
                tensor.dtype == OFFLOAD_FP16 ? Fp32ToFp16(value) : Fp32ToBf16(value);
            if (tensor.dtype == OFFLOAD_FP32)
              std::memcpy(data + i * sizeof(value), &value, sizeof(value));
            else
              std::memcpy(data + i * sizeof(half), &half, sizeof(half));
          }
          BlockHasher hasher(manifest.block_bytes);
          hasher.Reset(tensor.bytes);
          hasher.Add(data, tensor.bytes);
          tensor.hashes = hasher.Take();
        }
      }
    }
    Result<std::string> encoded = EncodeManifest(manifest);
    ASSERT_TRUE(encoded.ok()) << encoded.status().message();
    text = std::move(encoded.value());
  }

  void Write(const std::filesystem::path& directory) const {
    std::filesystem::create_directories(directory);
    WriteFile(directory / kManifestFile, text);
    for (size_t f = 0; f < files.size(); ++f)
      WriteFile(directory / manifest.files[f].name, files[f]);
  }

  static void WriteFile(const std::filesystem::path& path, const std::string& bytes) {
    std::ofstream out(path, std::ios::binary | std::ios::trunc);
    out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    ASSERT_TRUE(out.flush()) << path;
  }

  // Stores one kind of the last param's last shard in another dtype.
  void Store(int32_t kind, int32_t dtype) {
    StoredShard& shard = manifest.params.back().shards.back();
    for (StoredTensor& tensor : shard.tensors) {
      if (tensor.kind != kind) continue;
      tensor.dtype = dtype;
      tensor.bytes = shard.shard.range_count * DtypeBytes(dtype);
    }
  }

  void AddParam(const std::string& name, int32_t dtype, const std::vector<int64_t>& shape) {
    manifest.params.push_back({name, dtype, shape, {}});
  }

  // Adds a shard to the last param; without a range it has all elements of the boxes.
  void AddShard(uint32_t rank, uint32_t group, const std::vector<Box>& boxes, uint64_t begin = 0,
                uint64_t count = UINT64_MAX) {
    StoredParam& param = manifest.params.back();
    StoredShard stored{rank, group, 40 + manifest.params.size(), {}, {}};
    stored.shard.dimensions = static_cast<uint32_t>(param.shape.size());
    std::copy(param.shape.begin(), param.shape.end(), stored.shard.global_shape.begin());
    stored.shard.boxes = boxes;
    stored.shard.range_begin = begin;
    stored.shard.range_count = count;
    if (count == UINT64_MAX) {
      stored.shard.range_count = 0;
      for (const Box& box : boxes) {
        uint64_t elements = 1;
        for (size_t d = 0; d < param.shape.size(); ++d)
          elements *= static_cast<uint64_t>(box.size[d]);
        stored.shard.range_count += elements;
      }
    }
    if (stored.shard.range_count == 0) manifest.version = kVersionOfEmptyShards;
    for (int32_t kind : stored.shard.range_count > 0 ? kinds : std::vector<int32_t>())
      stored.tensors.push_back(
          {kind, OFFLOAD_FP32, rank, 0, stored.shard.range_count * sizeof(float), {}});
    param.shards.push_back(std::move(stored));
  }

  std::vector<int32_t> kinds = {OFFLOAD_STATE_MASTER, OFFLOAD_STATE_EXP_AVG,
                                OFFLOAD_STATE_EXP_AVG_SQ};  // the kinds of shards that are added
  Manifest manifest{};
  std::string text;                // of the manifest
  std::vector<std::string> files;  // whole, as manifest.files
};

inline offload_group_t AdamGroup(double lr, double weight_decay) {
  offload_group_t group{};
  group.struct_size = sizeof(group);
  group.lr = lr;
  group.beta1 = 0.9;
  group.beta2 = 0.999;
  group.eps = 1e-8;
  group.weight_decay = weight_decay;
  return group;
}

// Two ranks, boxes, ranges, uneven and missing shards, one param of several blocks.
class Sample : public HandMade {
 public:
  Sample() : HandMade(OFFLOAD_ADAMW, 2) {
    manifest.groups = {AdamGroup(0.001, 0.1), AdamGroup(0.002, 0)};
    // Columns, as tensor parallelism has it.
    AddParam("embed.weight", OFFLOAD_BF16, {6, 5});
    AddShard(0, 0, {{{0, 0}, {6, 2}}});
    AddShard(1, 0, {{{0, 2}, {6, 3}}});
    // Uneven ranges of the whole, as ZeRO has it.
    AddParam("blocks.0.\"qkv\"", OFFLOAD_BF16, {4, 8});
    AddShard(0, 0, {{{0, 0}, {4, 8}}}, 0, 13);
    AddShard(1, 0, {{{0, 0}, {4, 8}}}, 13, 19);
    // On one rank alone, in several blocks.
    AddParam("head.weight", OFFLOAD_FP32, {1100});
    AddShard(1, 1, {{{0}, {1100}}});
    // No rank has an element of this param, so nothing is stored.
    AddParam("n\xc3\xa4me", OFFLOAD_FP16, {0, 7});
    Fill();
  }
};

}  // namespace hybridopt::checkpoint
