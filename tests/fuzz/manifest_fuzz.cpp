// Arbitrary bytes as a manifest. A manifest that can be read must be written and read again with
// the same result.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

#include "base/check.h"
#include "checkpoint/format/format.h"
#include "checkpoint/format/hash.h"
#include "checkpoint/format/reshard.h"

namespace hybridopt::checkpoint {
namespace {

constexpr uint64_t kElementsMax = 10'000;  // of a tensor whose shards are looked at one by one

// The text with its correct end: random bytes never have the right hash.
std::string Ended(const std::string& text) {
  char end[32];
  std::snprintf(end, sizeof(end), ",\"xxh3\":\"%016llx\"}\n",
                static_cast<unsigned long long>(Xxh3(text)));
  return text + end;
}

Shard WholeShard(const std::vector<int64_t>& shape, uint64_t elements) {
  Shard shard{};
  shard.dimensions = static_cast<uint32_t>(shape.size());
  shard.boxes.resize(1);
  shard.range_count = elements;
  for (size_t d = 0; d < shape.size(); ++d)
    shard.global_shape[d] = shard.boxes[0].size[d] = shape[d];
  return shard;
}

// Checks a param of any shards: no call may crash on it.
void LookThrough(const StoredParam& param) {
  uint64_t elements = 0;
  HYBRIDOPT_CHECK(CountElements(param.shape, &elements));
  if (elements > kElementsMax) return;
  std::vector<const Shard*> shards;
  for (const StoredShard& stored : param.shards) shards.push_back(&stored.shard);
  const bool covered = CheckCoverage(shards, WholeShard(param.shape, elements)).ok();
  uint64_t stored = 0;
  for (const Shard* shard : shards) stored += shard->range_count;
  HYBRIDOPT_CHECK(!covered || stored == elements);
}

void Try(const std::string& text) {
  const Result<Manifest> manifest = ParseManifest(text);
  if (!manifest.ok()) {
    HYBRIDOPT_CHECK(!manifest.status().message().empty());
    return;
  }
  const Result<std::string> written = EncodeManifest(manifest.value());
  HYBRIDOPT_CHECK(written.ok());
  const Result<Manifest> read = ParseManifest(written.value());
  HYBRIDOPT_CHECK(read.ok());
  HYBRIDOPT_CHECK(EncodeManifest(read.value()).value() == written.value());
  HYBRIDOPT_CHECK(HeadsOf(manifest.value()) == HeadsOf(read.value()));
  for (const StoredParam& param : manifest.value().params) LookThrough(param);
}

}  // namespace
}  // namespace hybridopt::checkpoint

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  hybridopt::checkpoint::Try(text);
  hybridopt::checkpoint::Try(hybridopt::checkpoint::Ended(text));
  return 0;
}
