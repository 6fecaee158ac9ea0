// Follower: a second copy of an optimizer's params, which is updated only from takes of changes.
// After a take it must equal the params bit for bit. Some takes are lost, some are applied and
// never acknowledged, and some are acknowledged late.
#pragma once

#include <algorithm>
#include <deque>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "rig.h"

namespace hybridopt {

class Follower {
 public:
  explicit Follower(size_t params) : copy_(params), base_hash_(params), last_take_(params) {}

  // Takes changes of these params and applies them; the result must equal `truth`. They are taken
  // into device memory of the context; NULL: into host memory. Returns what is wrong, or an empty
  // text.
  using Truth = std::function<Bytes(uint32_t id)>;
  std::string Take(offload_optimizer_t optimizer, const std::vector<uint32_t>& ids,
                   const Truth& truth, offload_context_t context, Random& random) {
    auto options = Make<offload_changes_options_t>();
    options.flags = random.OneIn(2) ? 0 : OFFLOAD_CHANGES_GAPS;
    if (context != nullptr) options.flags = OFFLOAD_CHANGES_ON_DEVICE;
    options.dense_above = random.OneIn(6) ? 0 : random.OneIn(6) ? random.Unit() : 1;
    auto changes = Make<offload_changes_t>();
    const auto take = [&] {
      return offload_optimizer_changes(optimizer, ids.data(), static_cast<uint32_t>(ids.size()),
                                       &options, &changes);
    };
    std::vector<uint64_t> buffer;
    if (take() == OFFLOAD_INVALID_ARGUMENT) {
      if (changes.take != 0 || changes.bytes == 0) return "a refused take tells no bytes";
      buffer.resize(changes.bytes / 8);
      options.buffer = buffer.data();
      options.buffer_bytes = changes.bytes;
      if (context != nullptr) MUST(offload_device_alloc(context, changes.bytes, &options.buffer));
      MUST(take());
      if (context != nullptr) {
        MUST(offload_device_download(context, buffer.data(), options.buffer, changes.bytes,
                                     nullptr));
        MUST(offload_device_free(context, options.buffer));
      }
    }
    for (uint32_t i = 0; i < changes.param_count; ++i)
      last_take_[changes.params[i].param] = changes.take;
    if (random.OneIn(6)) return "";  // the take is lost on its way
    Taken taken{changes.take, {}};
    for (uint32_t i = 0; i < changes.param_count; ++i) {
      const offload_change_t& change = changes.params[i];
      const std::string wrong = Apply(change, buffer, truth(change.param));
      if (!wrong.empty()) return wrong + " of param " + std::to_string(change.param);
      taken.hashes.push_back({change.param, change.hash});
    }
    takes_.push_back(std::move(taken));
    if (random.OneIn(6)) takes_.clear();  // the takes will never be acknowledged
    return "";
  }
  // Acknowledges the oldest unacknowledged take, if there is one.
  void Acknowledge(offload_optimizer_t optimizer) {
    if (takes_.empty()) return;
    const Taken taken = takes_.front();
    takes_.pop_front();
    MUST(offload_optimizer_acknowledge_changes(optimizer, taken.take));
    for (const auto& [id, hash] : taken.hashes)
      if (last_take_[id] == taken.take) base_hash_[id] = hash;
  }

  // How many elements have come as changes, and how many in whole params.
  uint64_t sparse_elements = 0;
  uint64_t dense_elements = 0;

 private:
  struct Taken {
    uint64_t take;
    std::vector<std::pair<uint32_t, uint64_t>> hashes;  // of each param
  };

  std::string Apply(const offload_change_t& change, const std::vector<uint64_t>& buffer,
                    const Bytes& truth) {
    Bytes& copy = copy_[change.param];
    if (change.dense != 0) {
      copy = truth;
      dense_elements += change.count;
    } else {
      const auto* const bytes = reinterpret_cast<const std::byte*>(buffer.data());
      const std::byte* index = bytes + change.indices_offset;
      const std::byte* value = bytes + change.values_offset;
      const uint64_t element_bytes = DtypeBytes(change.dtype);
      uint64_t element = 0;
      for (uint64_t i = 0; i < change.count; ++i) {
        uint64_t stored = 0;
        std::memcpy(&stored, index, change.index_bytes);
        element = change.gaps != 0 ? element + stored : stored;
        if ((element + 1) * element_bytes > copy.size()) return "an index is beyond the end";
        std::memcpy(copy.data() + element * element_bytes, value, element_bytes);
        index += change.index_bytes;
        value += element_bytes;
      }
      sparse_elements += change.count;
    }
    if (copy != truth) return "the copy is not the param";
    const bool base_is_right = change.has_base == base_hash_[change.param].has_value() &&
                               change.base_hash == base_hash_[change.param].value_or(0);
    if (!base_is_right) return "the hash of what was acknowledged";
    return change.hash == Hash(truth) ? "" : "the hash";
  }

  // As offload.h defines it.
  static uint64_t Hash(const Bytes& bytes) {
    const auto mix = [](uint64_t x) {
      x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
      x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
      return x ^ (x >> 31);
    };
    uint64_t sum = mix(bytes.size());
    for (uint64_t i = 0; i * 8 < bytes.size(); ++i) {
      uint64_t word = 0;
      std::memcpy(&word, bytes.data() + i * 8, std::min<size_t>(8, bytes.size() - i * 8));
      sum += mix(word + (i + 1) * 0x9E3779B97F4A7C15);
    }
    return sum;
  }

  std::vector<Bytes> copy_;
  std::vector<std::optional<uint64_t>> base_hash_;
  std::vector<uint64_t> last_take_;  // the last take that has named the param, even if it was lost
  std::deque<Taken> takes_;          // applied and not acknowledged
};

}  // namespace hybridopt
