// The format of checkpoints: the manifest in memory and as text, and the heads of the shard files.
// Pure. docs/CHECKPOINT_FORMAT.md specifies both for other readers.
//
//   step-001000/                            a checkpoint is a directory
//     manifest.json                         everything but the elements
//     shard-00000-of-00002.safetensors      what rank 0 stored: its arrays, end to end
//     shard-00001-of-00002.safetensors
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/shard.h"
#include "base/status.h"
#include "checkpoint/format/safetensors.h"

namespace hybridopt::checkpoint {

// A checkpoint gets the lowest version that can represent it, so that older releases can read it
// where possible.
inline constexpr uint32_t kFormatVersion = 3;  // the highest of this release
inline constexpr uint32_t kVersionOfEmptyShards = 2;
inline constexpr uint32_t kVersionOfGroupAlgorithms = 3;
inline constexpr char kManifestFile[] = "manifest.json";
inline constexpr uint64_t kManifestBytesMax = uint64_t{1} << 30;
inline constexpr uint64_t kBlockBytes = uint64_t{8} << 20;  // what this release writes
inline constexpr uint64_t kBlockBytesMin = 4096;
inline constexpr uint64_t kBlockBytesMax = uint64_t{1} << 30;
inline constexpr uint32_t kWorldMax = 1 << 20;
inline constexpr uint64_t kStepsMax = uint64_t{1} << 53;  // what a double can count
inline constexpr uint32_t kNameBytesMax = 1023;           // of a param's name, the limit of the ABI

// One array in one shard file: one kind of state of one shard. Its elements are those of the shard,
// in the shard's order.
struct StoredTensor {
  int32_t kind;     // enum offload_state_kind
  int32_t dtype;    // enum offload_dtype
  uint32_t file;    // index into Manifest::files
  uint64_t offset;  // bytes from the start of the file
  uint64_t bytes;
  std::vector<uint64_t> hashes;  // XXH3 of each block, counted from the array's start
};

// What one rank stored of a param. A shard without elements is stored only if the whole param has
// no elements; such a shard has no tensors and only carries the step count.
struct StoredShard {
  uint32_t rank;
  uint32_t group;  // index into Manifest::groups
  uint64_t step_count;
  Shard shard;  // in the global tensor
  std::vector<StoredTensor> tensors;
};

struct StoredParam {
  std::string name;
  int32_t dtype;  // of the param itself: enum offload_dtype
  std::vector<int64_t> shape;
  std::vector<StoredShard> shards;
};

struct StoredFile {
  std::string name;  // in the checkpoint's directory
  uint32_t rank;
  uint64_t bytes;
  uint64_t data_begin;  // the bytes before it are the safetensors head
  uint64_t head_hash;   // XXH3 of the head
};

struct Manifest {
  uint32_t version = 1;
  std::string writer;  // name of the program that wrote it, for people
  uint64_t step;       // steps applied
  int32_t algorithm;   // enum offload_algorithm, of groups that name none
  bool masters_only;   // moments were left out
  std::string layout;  // formats of masters and moments: "fp32" for all in fp32
  // What multiplied matrices, if their bits depend on it (Device::matrix_products); else "".
  std::string matrix_products;
  uint32_t world;  // ranks that saved
  uint64_t block_bytes;
  // struct_size is this release's; algorithm is 0 where it is that of the manifest.
  std::vector<offload_group_t> groups;
  std::vector<StoredFile> files;
  std::vector<StoredParam> params;

  int32_t AlgorithmOf(const StoredShard& shard) const {
    const int32_t own = groups[shard.group].algorithm;
    return own != 0 ? own : algorithm;
  }
};

// "exp_avg" for OFFLOAD_STATE_EXP_AVG; NULL if `kind` is none of enum offload_state_kind.
const char* KindName(int32_t kind);
bool FindKind(std::string_view name, int32_t* kind);
// The array of a kind; NULL where the shard has none.
const StoredTensor* FindTensor(const StoredShard& shard, int32_t kind);
// Whether the whole tensor has elements.
bool HasElements(const StoredParam& param);
// The same as FindStoredDtype, but for the dtypes of params.
bool FindParamDtype(std::string_view name, int32_t* dtype);
// Finds the algorithm by its name in kernels/algorithms.h.
bool FindAlgorithm(std::string_view name, int32_t* algorithm);

// "shard-00000-of-00002.safetensors"
std::string ShardFileName(uint32_t rank, uint32_t world);

// The array's name in its file: "<param>.<kind>".
std::string TensorName(const StoredParam& param, const StoredTensor& tensor);

// The array's shape in its file: that of the box if the shard is one whole box, else one dimension.
std::vector<int64_t> StoredShape(const Shard& shard);

// Sets the offsets of the arrays in their files. Arrays with wider elements come first, so that
// each array is aligned to its elements; otherwise the order is that of the manifest. Sets bytes,
// data_begin and head_hash of the files, and returns the heads as bytes. All other fields except
// hashes must be set before.
Result<std::vector<std::string>> LayOutFiles(Manifest* manifest);

// The heads that the files of this manifest must have.
std::vector<Head> HeadsOf(const Manifest& manifest);

// The manifest as text, with the hash of the text at its end. UNSUPPORTED for names that are not
// UTF-8, or too much text.
Result<std::string> EncodeManifest(const Manifest& manifest);

// The last bytes of a manifest contain the hash of all bytes before them.
inline constexpr uint64_t kManifestTailBytes = 28;
// CHECKPOINT_CORRUPT if `tail` is not the end of a manifest, or if it contains a hash other than
// `hash` (unless that is empty).
Status CheckManifestTail(std::string_view tail, std::optional<uint64_t> hash);

// Reads and checks everything that can be checked without the shard files. Errors do not name the
// file: CHECKPOINT_CORRUPT, or UNSUPPORTED for the version of a newer release.
Result<Manifest> ParseManifest(std::string_view text);

// Merges the manifests of all ranks into one; each of them lists its rank's files and shards.
// Params are in the order in which they first occur. CHECKPOINT_MISMATCH if ranks disagree.
Result<Manifest> MergeManifests(std::vector<Manifest> parts);

}  // namespace hybridopt::checkpoint
