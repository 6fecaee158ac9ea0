#include "optimizer/optimizer_options.h"

#include <string>
#include <vector>

#include "comm/comm.h"
#include "kernels/algorithms.h"
#include "kernels/formats/format.h"
#include "place/disk_memory.h"
#include "runtime/worker_pool.h"
#include "state/move_table.h"

namespace hybridopt {
namespace {

constexpr uint64_t kMinChunkElements = 1024;
constexpr uint64_t kMaxChunkElements = uint64_t{1} << 28;
constexpr uint32_t kDefaultStagingSlots = 8;
constexpr uint32_t kMinStagingSlots = 2;
constexpr uint32_t kMaxStagingSlots = 64;
static_assert(kMaxStagingSlots < WorkerPool::kJobsMax);

constexpr uint32_t kMovable = OFFLOAD_MOVABLE_PARAMS | OFFLOAD_MOVABLE_GRADS |
                              OFFLOAD_MOVABLE_STATES | OFFLOAD_MOVABLE_ACCUMULATE;

// "OFFLOAD_ADAMW (1), _ADAM (2), ... or _ADAGRAD (5)": values of an enum, whose names begin with
// `prefix`.
class Choices {
 public:
  explicit Choices(const char* prefix) : prefix_(prefix) {}

  void Add(const char* name, int32_t value) {
    std::string word = (words_.empty() ? prefix_ : "") + '_';
    for (const char* c = name; *c != '\0'; ++c)
      word += static_cast<char>(*c >= 'a' && *c <= 'z' ? *c - 'a' + 'A' : *c);
    words_.push_back(word + " (" + std::to_string(value) + ")");
  }
  std::string Text() const {
    std::string text;
    for (size_t i = 0; i < words_.size(); ++i)
      text += (i == 0 ? "" : i + 1 == words_.size() ? " or " : ", ") + words_[i];
    return text;
  }

 private:
  const std::string prefix_;
  std::vector<std::string> words_;
};

std::string AlgorithmChoices() {
  Choices choices("OFFLOAD");
  for (const Algorithm& row : kAlgorithms) choices.Add(row.name, row.value);
  return choices.Text();
}

// The formats that masters or moments can have.
std::string FormatChoices(int32_t FormatRow::*option, const char* prefix, bool rounded) {
  Choices choices(prefix);
  for (const FormatRow& row : kFormats)
    if (row.*option != kNotOffered && (row.is_rounded || !rounded))
      choices.Add(row.name, row.*option);
  return choices.Text();
}

std::string MasterChoices(bool rounded) {
  return FormatChoices(&FormatRow::master_layout, "OFFLOAD_MASTER", rounded);
}
std::string MomentChoices(bool rounded) {
  return FormatChoices(&FormatRow::moment_dtype, "OFFLOAD", rounded);
}

// Lists the options with which a step rounds state.
std::string RoundedChoices() {
  const std::string masters = MasterChoices(true);
  return "moment_dtype to " + MomentChoices(true) +
         (masters.empty() ? "" : " or master_layout to " + masters);
}

// The state formats that the options ask for. They have been checked.
StateFormats FormatsOf(const offload_optimizer_options_t& options) {
  const int32_t dtype = options.moment_dtype != 0 ? options.moment_dtype : int32_t{OFFLOAD_FP32};
  const Format moment = FindMomentFormat(dtype)->format;
  return {FindMasterFormat(options.master_layout)->format, moment, moment};
}

bool RoundsState(const offload_optimizer_options_t& options) {
  const StateFormats formats = FormatsOf(options);
  return RowOf(formats.master).is_rounded || RowOf(formats.moment0).is_rounded;
}

Status CheckFormats(const offload_optimizer_options_t& options) {
  if (FindMasterFormat(options.master_layout) == nullptr)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "options.master_layout is %d, expected %s",
                         options.master_layout, MasterChoices(false).c_str());
  if (options.moment_dtype != 0 && FindMomentFormat(options.moment_dtype) == nullptr)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.moment_dtype is %d, expected %s (0 = OFFLOAD_FP32)",
                         options.moment_dtype, MomentChoices(false).c_str());
  if (options.moment_rounding != OFFLOAD_ROUND_STOCHASTIC &&
      options.moment_rounding != OFFLOAD_ROUND_NEAREST)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.moment_rounding is %d, expected OFFLOAD_ROUND_STOCHASTIC (0) or "
                         "_NEAREST (1)",
                         options.moment_rounding);
  const bool rounds = RoundsState(options);
  if (!rounds && options.moment_rounding != OFFLOAD_ROUND_STOCHASTIC)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.moment_rounding is OFFLOAD_ROUND_NEAREST, but a step rounds no "
                         "state; set %s, or leave it 0",
                         RoundedChoices().c_str());
  const bool stochastic = rounds && options.moment_rounding == OFFLOAD_ROUND_STOCHASTIC;
  if (!stochastic && options.rounding_seed != 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.rounding_seed is %llu, but a step rounds nothing at random; set "
                         "%s and moment_rounding to OFFLOAD_ROUND_STOCHASTIC, or leave it 0",
                         static_cast<unsigned long long>(options.rounding_seed),
                         RoundedChoices().c_str());
  if (options.reserved != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "options.reserved is %u, expected 0",
                         options.reserved);
  return {};
}

Status CheckExecutors(const offload_optimizer_options_t& options, const Device& device) {
  if (options.host_executors < OFFLOAD_EXECUTORS_AUTO ||
      options.host_executors > OFFLOAD_EXECUTORS_STREAMED)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.host_executors is %d, expected OFFLOAD_EXECUTORS_AUTO (0), _CPU "
                         "(1) or _STREAMED (2)",
                         options.host_executors);
  if (options.host_executors == OFFLOAD_EXECUTORS_STREAMED && device.unified())
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.host_executors is OFFLOAD_EXECUTORS_STREAMED, but %s has no "
                         "memory of its own that state could go through; use "
                         "OFFLOAD_EXECUTORS_AUTO",
                         device.name());
  if (options.host_executors == OFFLOAD_EXECUTORS_CPU && options.stream_ring_bytes != 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.stream_ring_bytes is %llu, but host_executors is "
                         "OFFLOAD_EXECUTORS_CPU, which has no ring; leave it 0",
                         static_cast<unsigned long long>(options.stream_ring_bytes));
  if (options.reserved1 != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "options.reserved1 is %u, expected 0",
                         options.reserved1);
  return {};
}

// Early updates need CPU workers, movable gradients, and a device with memory of its own: where
// params are in host memory, an update would write the caller's params.
Status CheckEarlyUpdates(const offload_optimizer_options_t& options, const Device& device) {
  if (options.early_update_bytes == 0) return {};
  const auto bytes = static_cast<unsigned long long>(options.early_update_bytes);
  if (device.unified())
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.early_update_bytes is %llu, but the device is %s, where a step "
                         "writes params in place and nothing can be updated before it; leave it 0",
                         bytes, device.name());
  if (options.host_executors == OFFLOAD_EXECUTORS_STREAMED)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.early_update_bytes is %llu, but host_executors is "
                         "OFFLOAD_EXECUTORS_STREAMED, and only CPU threads update before a step; "
                         "use OFFLOAD_EXECUTORS_AUTO, or leave it 0",
                         bytes);
  if ((options.movable & kGradsMovable) == 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.early_update_bytes is %llu, but gradients are not movable, and "
                         "only those that have left the device are used before a step; add "
                         "OFFLOAD_MOVABLE_GRADS to options.movable, or leave it 0",
                         bytes);
  return {};
}

bool IsOnDisk(const offload_optimizer_options_t& options) {
  return !DiskPaths(options.disk_paths).empty();
}

Status CheckDisk(const offload_optimizer_options_t& options) {
  if (options.disk_paths != nullptr && !IsOnDisk(options))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.disk_paths is '%.300s', which names no directory; name one, or "
                         "several with ':' between them, or leave it NULL",
                         options.disk_paths);
  if (options.disk_ring_bytes != 0 && !IsOnDisk(options))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.disk_ring_bytes is %llu, but disk_paths is NULL, so that no "
                         "state is on disk; name a directory there, or leave disk_ring_bytes 0",
                         static_cast<unsigned long long>(options.disk_ring_bytes));
  return {};
}

// What state on disk does not go together with.
Status CheckBesideDisk(const offload_optimizer_options_t& options) {
  if (!IsOnDisk(options)) return {};
  if (options.save_buffer_bytes != 0 && options.save_buffer_bytes != UINT64_MAX)
    return Status::Error(OFFLOAD_UNSUPPORTED,
                         "options.disk_paths is '%.200s', but save_buffer_bytes is %llu: with "
                         "state on disk a step waits until a save has read all state; leave it 0, "
                         "or put no state on disk",
                         options.disk_paths,
                         static_cast<unsigned long long>(options.save_buffer_bytes));
  return {};
}

Status CheckTrackChanges(const offload_optimizer_options_t& options) {
  if (options.track_changes != 0 && options.track_changes != 1)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.track_changes is %d, expected 0 or 1 (steps note what they "
                         "change)",
                         options.track_changes);
  if (options.reserved2 != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "options.reserved2 is %u, expected 0",
                         options.reserved2);
  return {};
}

}  // namespace

Status CheckOptimizerOptions(const offload_optimizer_options_t& options, const Device& device) {
  if (AlgorithmOf(options.algorithm) == nullptr)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT, "options.algorithm is %d, expected %s",
                         options.algorithm, AlgorithmChoices().c_str());
  if (IsOfMatrices(options.algorithm)) HYBRIDOPT_TRY(device.CheckMatrices());
  HYBRIDOPT_TRY(CheckDisk(options));
  HYBRIDOPT_TRY(CheckFractions(FractionsOf(options), options, "options."));
  if (options.chunk_elements != 0 &&
      (options.chunk_elements < kMinChunkElements || options.chunk_elements > kMaxChunkElements))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.chunk_elements is %llu, expected 1024 to 2^28 (0 = 2^20, on "
                         "CUDA 2^22)",
                         static_cast<unsigned long long>(options.chunk_elements));
  if (options.staging_slots != 0 &&
      (options.staging_slots < kMinStagingSlots || options.staging_slots > kMaxStagingSlots))
    return Status::Error(
        OFFLOAD_INVALID_ARGUMENT, "options.staging_slots is %u, expected %u to %u (0 = %u)",
        options.staging_slots, kMinStagingSlots, kMaxStagingSlots, kDefaultStagingSlots);
  if ((options.movable & ~kMovable) != 0)
    return Status::Error(OFFLOAD_UNSUPPORTED, "options.movable is 0x%x, known is 0x%x",
                         options.movable, kMovable);
  HYBRIDOPT_TRY(CheckFormats(options));
  HYBRIDOPT_TRY(CheckExecutors(options, device));
  HYBRIDOPT_TRY(CheckEarlyUpdates(options, device));
  HYBRIDOPT_TRY(CheckTrackChanges(options));
  HYBRIDOPT_TRY(CheckBesideDisk(options));
  if (options.comm_timeout_ns > INT64_MAX)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.comm_timeout_ns is %llu, expected at most 2^63 - 1",
                         static_cast<unsigned long long>(options.comm_timeout_ns));
  return options.comm != nullptr ? Comm::Check(*options.comm) : Status();
}

ByTier<double> FractionsOf(const offload_optimizer_options_t& options) {
  ByTier<double> fractions;
  fractions[Tier::kDevice] = options.device_fraction;
  fractions[Tier::kDisk] = options.disk_fraction;
  return fractions;
}

Status CheckFractions(const ByTier<double>& fractions, const offload_optimizer_options_t& options,
                      const char* of) {
  const double device = fractions[Tier::kDevice], disk = fractions[Tier::kDisk];
  if (!(device >= 0 && device <= 1))  // written so that NaN fails
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "%sdevice_fraction is %g, expected 0 (all state on the host) to 1 (all on "
                         "the device)",
                         of, device);
  if (!(disk >= 0 && disk <= 1))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "%sdisk_fraction is %g, expected 0 (no state on disk) to 1 (all on disk)",
                         of, disk);
  if (device + disk > 1)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "%sdevice_fraction is %g and disk_fraction is %g, expected at most 1 "
                         "together; lower one of them",
                         of, device, disk);
  if (disk > 0 && !IsOnDisk(options))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "%sdisk_fraction is %g, but options.disk_paths is NULL; name a directory "
                         "there, or several with ':' between them",
                         of, disk);
  return {};
}

Status CheckNoCpuUpdates(const offload_optimizer_options_t& options, const Device& device) {
  if (options.host_executors == OFFLOAD_EXECUTORS_CPU)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.host_executors is OFFLOAD_EXECUTORS_CPU, but the optimizer has "
                         "matrices of OFFLOAD_MUON, which only %s updates, because CPU threads "
                         "would give other bits; use OFFLOAD_EXECUTORS_AUTO",
                         device.name());
  if (options.early_update_bytes != 0)
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "options.early_update_bytes is %llu, but the optimizer has matrices of "
                         "OFFLOAD_MUON, which only %s updates, and only CPU threads update before "
                         "a step; leave it 0",
                         static_cast<unsigned long long>(options.early_update_bytes),
                         device.name());
  return {};
}

StreamedOnly StreamedOnlyOf(const offload_optimizer_options_t& options) {
  if (options.host_executors == OFFLOAD_EXECUTORS_STREAMED)
    return {"options.host_executors is OFFLOAD_EXECUTORS_STREAMED", "use OFFLOAD_EXECUTORS_AUTO"};
  return {"only the device updates matrices of OFFLOAD_MUON", "raise device_fraction"};
}

ShapeOptions ShapeOptionsOf(const offload_optimizer_options_t& options, const Device& device) {
  ShapeOptions shape{};
  shape.unified = device.unified();
  shape.movable = options.movable;
  shape.formats = FormatsOf(options);
  shape.stochastic = options.moment_rounding == OFFLOAD_ROUND_STOCHASTIC;
  shape.chunk_elements =
      options.chunk_elements != 0 ? options.chunk_elements : device.default_chunk_elements();
  shape.cpu_updates = options.host_executors != OFFLOAD_EXECUTORS_STREAMED;
  shape.on_disk = IsOnDisk(options);
  shape.streams_state = !device.unified() && options.host_executors != OFFLOAD_EXECUTORS_CPU;
  if (shape.streams_state) shape.pin_piece_bytes = device.pin_piece_bytes();
  shape.stream_ring_bytes = options.stream_ring_bytes;
  shape.early_bytes = options.early_update_bytes;
  shape.tracks_changes = options.track_changes != 0;
  shape.save_buffer_bytes = options.save_buffer_bytes;
  shape.disk_ring_bytes =
      options.disk_ring_bytes != 0 ? options.disk_ring_bytes : DiskMemory::kDefaultRingBytes;
  shape.staging_slots = options.staging_slots != 0 ? options.staging_slots : kDefaultStagingSlots;
  return shape;
}

}  // namespace hybridopt
