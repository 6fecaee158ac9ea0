// The head of a safetensors file, as text and parsed. Pure. The parser enforces the format's rules:
// at most 100 MB that start with '{', every tensor's bytes match its shape, and the tensors fill
// the data to the end of the file without gaps and overlaps.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace hybridopt::checkpoint {

// For "%llu" in texts of errors.
inline unsigned long long Wide(uint64_t number) { return number; }

inline Status Corrupt(const std::string& text) {
  return Status::Error(OFFLOAD_CHECKPOINT_CORRUPT, "%s", text.c_str());
}

// Finds the dtype by its name in safetensors files, for example OFFLOAD_BF16 for "BF16".
bool FindStoredDtype(std::string_view name, int32_t* dtype);

struct HeadTensor {
  std::string name;
  int32_t dtype;  // enum offload_dtype
  std::vector<int64_t> shape;
  uint64_t begin;  // bytes from the start of the data
  uint64_t end;

  bool operator==(const HeadTensor&) const = default;
};

struct Head {
  std::map<std::string, std::string> metadata;
  std::vector<HeadTensor> tensors;  // in the order of their bytes

  bool operator==(const Head&) const = default;
};

inline constexpr uint64_t kHeadBytesMax = 100'000'000;  // of the JSON text, safetensors' limit
inline constexpr uint64_t kHeadLengthBytes = 8;
inline constexpr uint64_t kDataAlignment = 4096;

// The first bytes of a file, up to its data: the length, the JSON text, and spaces that bring the
// data to a multiple of 4096. UNSUPPORTED where names are not UTF-8 or the text is too long.
Result<std::string> EncodeHead(const Head& head);

// Returns the number of bytes before the data of a file with `file_bytes` bytes, read from the
// file's first 8 bytes. Errors are CHECKPOINT_CORRUPT and do not name the file.
Result<uint64_t> BytesBeforeData(std::string_view first_bytes, uint64_t file_bytes);

// Parses the bytes before the data; BytesBeforeData returns their number.
Result<Head> ParseHead(std::string_view bytes, uint64_t file_bytes);

// Computes the product of a shape. Returns false if it does not fit in 63 bits or if a size is
// negative.
bool CountElements(const std::vector<int64_t>& shape, uint64_t* count);

}  // namespace hybridopt::checkpoint
