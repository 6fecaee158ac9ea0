// Arbitrary bytes as the head of a safetensors file. A head that can be read must be written and
// read again with the same result.
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/check.h"
#include "checkpoint/format/safetensors.h"

namespace hybridopt::checkpoint {
namespace {

// The head of a file that begins with `bytes` and has `file_bytes`.
Result<Head> ReadHead(const std::string& bytes, uint64_t file_bytes) {
  HYBRIDOPT_ASSIGN(const uint64_t before, BytesBeforeData(bytes.substr(0, 8), file_bytes));
  return ParseHead(std::string_view(bytes).substr(0, before), file_bytes);
}

void Try(const std::string& bytes, uint64_t file_bytes) {
  const Result<Head> head = ReadHead(bytes, file_bytes);
  if (!head.ok()) {
    HYBRIDOPT_CHECK(!head.status().message().empty());
    return;
  }
  const uint64_t data_bytes = head.value().tensors.empty() ? 0 : head.value().tensors.back().end;
  const Result<std::string> written = EncodeHead(head.value());
  HYBRIDOPT_CHECK(written.ok());
  const Result<Head> read = ReadHead(written.value(), written.value().size() + data_bytes);
  HYBRIDOPT_CHECK(read.ok());
  HYBRIDOPT_CHECK(read.value() == head.value());
}

}  // namespace
}  // namespace hybridopt::checkpoint

// The first two bytes say how much data follows the head, the rest is its text.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string input(reinterpret_cast<const char*>(data), size);
  hybridopt::checkpoint::Try(input, size);
  if (size < 2) return 0;
  const uint64_t data_bytes = data[0] | uint64_t{data[1]} << 8;
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>((size - 2) >> (8 * i) & 0xff));
  bytes += input.substr(2);
  hybridopt::checkpoint::Try(bytes, bytes.size() + data_bytes);
  return 0;
}
