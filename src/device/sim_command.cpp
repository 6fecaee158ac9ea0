#include "device/sim_command.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/check.h"
#include "base/system.h"
#include "device/sim_stream.h"
#include "kernels/matrix/newton_schulz.h"

namespace hybridopt {
namespace {

// Copies are cut into pieces of this size, between which other threads may run.
constexpr uint64_t kCopyPieceBytes = 64 << 10;
constexpr uint64_t kWorkspaceAlignment = 256;

constexpr int64_t kAbandonPollNs = 1'000'000;
constexpr auto kFlagPollInterval = std::chrono::microseconds(20);

void CopyInPieces(void* destination, const void* source, uint64_t bytes) {
  for (uint64_t offset = 0; offset < bytes; offset += kCopyPieceBytes) {
    if (offset > 0) std::this_thread::yield();
    std::memcpy(static_cast<char*>(destination) + offset, static_cast<const char*>(source) + offset,
                std::min(kCopyPieceBytes, bytes - offset));
  }
}

}  // namespace

const char* sim::NameOf(const Command& command) {
  return std::visit([](const auto& any) { return any.kName; }, command);
}

void SimFault::Fail(const char* command, const char* stream, const Status& cause) {
  {
    std::lock_guard lock(mutex_);
    if (cause_.ok())
      cause_ = Status::Error(OFFLOAD_DEVICE_FAILED,
                             "the simulated device failed: %s on stream \"%s\": %s. It stays "
                             "failed; destroy the context",
                             command, stream, cause.message().c_str());
  }
  Stop();
}

Status SimFault::status() const {
  if (!stopped()) return Status();
  std::lock_guard lock(mutex_);
  return cause_;
}

Result<void*> SimExecutor::Locate(const char* what, const void* device, uint64_t count,
                                  uint64_t element_bytes, uint64_t alignment) const {
  const uint64_t bytes = count > UINT64_MAX / element_bytes ? UINT64_MAX : count * element_bytes;
  Result<void*> located = memory_.Translate(device, bytes, alignment);
  if (located.ok()) return located;
  return Status::Error(OFFLOAD_DEVICE_FAILED, "%s: %s", what, located.status().message().c_str());
}

template <typename T>
Result<T*> SimExecutor::Locate(const char* what, T* device, uint64_t count) const {
  HYBRIDOPT_ASSIGN(void* located, Locate(what, device, count, sizeof(T), alignof(T)));
  return static_cast<T*>(located);
}

Result<void*> SimExecutor::LocateArray(const char* what, const void* device, int32_t dtype,
                                       uint64_t count) const {
  return Locate(what, device, count, DtypeBytes(dtype), DtypeBytes(dtype));
}

Result<UpdateSpan> SimExecutor::LocateSpan(const DeviceUpdate& update) const {
  UpdateSpan span = update.span;
  const uint64_t count = span.count;
  if (count == 0) return span;
  HYBRIDOPT_ASSIGN(span.grad, LocateArray("grad", span.grad, update.grad_dtype, count));
  HYBRIDOPT_ASSIGN(span.param, LocateArray("param", span.param, update.param_dtype, count));
  const auto locate = [&](const char* what, void* array, Format format) -> Result<void*> {
    const FormatRow& row = RowOf(format);
    return Locate(what, array, row.Bytes(count), 1, row.unit_bytes / row.unit_elements);
  };
  HYBRIDOPT_ASSIGN(span.master, locate("master", span.master, update.formats.master));
  if (span.moment0 != nullptr) {
    HYBRIDOPT_ASSIGN(span.moment0, locate("moment0", span.moment0, update.formats.moment0));
  }
  if (span.moment1 != nullptr) {
    HYBRIDOPT_ASSIGN(span.moment1, locate("moment1", span.moment1, update.formats.moment1));
  }
  return span;
}

Result<NotedBits> SimExecutor::LocateNoted(const DeviceUpdate& update) const {
  NotedBits noted = update.noted;
  if (noted.words == nullptr || update.span.count == 0) return NotedBits{};
  const uint64_t words = NotedWords(noted.first % 64 + update.span.count);
  HYBRIDOPT_ASSIGN(uint64_t* const located,
                   Locate("changes", noted.words + noted.first / 64, words));
  return NotedBits{located, noted.first % 64};
}

Status SimExecutor::Execute(const sim::Command& command, const std::atomic<bool>& abandoned) const {
  return std::visit(
      [&](const auto& one) {
        using One = std::decay_t<decltype(one)>;
        if constexpr (std::is_same_v<One, sim::WaitStream> || std::is_same_v<One, sim::WaitFlag>) {
          return Apply(one, abandoned);
        } else {
          return Apply(one);
        }
      },
      command);
}

Status SimExecutor::Apply(const sim::CopyToHost& copy) const {
  if (copy.bytes == 0) return Status();
  HYBRIDOPT_ASSIGN(const void* source, Locate("source", copy.device, copy.bytes, 1, 1));
  CopyInPieces(copy.host, source, copy.bytes);
  return Status();
}

Status SimExecutor::Apply(const sim::CopyToDevice& copy) const {
  if (copy.bytes == 0) return Status();
  HYBRIDOPT_ASSIGN(void* destination, Locate("destination", copy.device, copy.bytes, 1, 1));
  CopyInPieces(destination, copy.host, copy.bytes);
  return Status();
}

Status SimExecutor::Apply(const sim::CopyRows& rows) const {
  const RowsCopy& copy = rows.copy;
  if (copy.to_bytes() == 0) return Status();
  HYBRIDOPT_ASSIGN(std::byte * to,
                   Locate("destination", static_cast<std::byte*>(copy.to), copy.to_bytes()));
  HYBRIDOPT_ASSIGN(const std::byte* from,
                   Locate("source", static_cast<const std::byte*>(copy.from), copy.from_bytes()));
  for (uint64_t row = 0; row < copy.rows; ++row, to += copy.to_stride, from += copy.from_stride)
    std::memcpy(to, from, copy.row_bytes);
  return Status();
}

Status SimExecutor::Apply(const sim::Fill& fill) const {
  if (fill.count == 0) return Status();
  HYBRIDOPT_ASSIGN(void* destination, Locate("destination", fill.device, fill.count,
                                             fill.pattern.bytes, fill.pattern.bytes));
  FillArray(destination, fill.count, fill.pattern);
  return Status();
}

Status SimExecutor::Apply(const sim::FollowParams& follow) const {
  if (follow.count == 0) return Status();
  HYBRIDOPT_ASSIGN(const void* params,
                   LocateArray("params", follow.params, follow.dtype, follow.count));
  HYBRIDOPT_ASSIGN(float* masters, Locate("masters", follow.masters, follow.count));
  kernels_.FollowParams(follow.dtype)(params, follow.count, masters, nullptr);
  return Status();
}

Result<SimExecutor::NormBlocks> SimExecutor::LocateBlocks(const NormLaunch& launch,
                                                          const NormInput& input) const {
  if (input.count == 0) return NormBlocks{nullptr, nullptr, 0};
  const uint64_t count = (input.count - 1) / kNormBlockElements + 1;
  HYBRIDOPT_ASSIGN(const void* grad, LocateArray("grad", input.grad, input.dtype, input.count));
  HYBRIDOPT_ASSIGN(double* sums,
                   Locate("block_sums", launch.block_sums + input.first_block, count));
  return NormBlocks{grad, sums, count};
}

Status SimExecutor::Apply(const sim::Norm& norm) const {
  const NormLaunch& launch = norm.launch;
  Verdict* verdict = nullptr;
  if (launch.verdict != nullptr) {
    HYBRIDOPT_ASSIGN(verdict, Locate("verdict", launch.verdict, 1));
  }
  for (const NormInput& input : launch.inputs) {
    HYBRIDOPT_TRY(LocateBlocks(launch, input).status());
  }
  double total = 0;
  for (const NormInput& input : launch.inputs) {
    HYBRIDOPT_ASSIGN(const NormBlocks blocks, LocateBlocks(launch, input));
    if (blocks.count == 0) continue;
    kernels_.SumSquares(input.dtype)(blocks.grad, input.count, blocks.sums);
    double of_param = 0;
    for (uint64_t block = 0; block < blocks.count; ++block) of_param += blocks.sums[block];
    total += of_param;
  }
  if (verdict != nullptr) *verdict = Decide(total, launch.grad_scale, launch.grad_norm_max);
  return Status();
}

Status SimExecutor::Apply(const sim::SetVerdict& set) const {
  HYBRIDOPT_ASSIGN(Verdict * verdict, Locate("verdict", set.device, 1));
  *verdict = set.value;
  return Status();
}

Status SimExecutor::Apply(const sim::Update& update) const {
  const UpdateLaunch& launch = update.launch;
  HYBRIDOPT_ASSIGN(const Verdict* verdict, Locate("verdict", launch.verdict, 1));
  for (const DeviceUpdate& one : launch.updates) {
    HYBRIDOPT_CHECK(one.coefficients < launch.coefficients.size());
    HYBRIDOPT_TRY(LocateSpan(one).status());
    HYBRIDOPT_TRY(LocateNoted(one).status());
  }
  if (verdict->skip != 0) return Status();
  for (const DeviceUpdate& one : launch.updates) {
    HYBRIDOPT_ASSIGN(const UpdateSpan span, LocateSpan(one));
    HYBRIDOPT_ASSIGN(const NotedBits noted, LocateNoted(one));
    if (span.count == 0) continue;
    Coefficients coefficients = launch.coefficients[one.coefficients];
    coefficients.grad_factor *= verdict->grad_factor;
    UpdateAndNote(kernels_, launch.rule, one.types(), coefficients, span, noted);
  }
  kernels_.publish();
  return Status();
}

Result<void*> SimExecutor::LocateWorkspace(const UpdateLaunch& launch,
                                           const MatrixShape& shape) const {
  return Locate("workspace", launch.workspace, NewtonSchulzBytes(shape), 1, kWorkspaceAlignment);
}

Status SimExecutor::Apply(const sim::UpdateMatrices& update) const {
  const UpdateLaunch& launch = update.launch;
  HYBRIDOPT_ASSIGN(const Verdict* verdict, Locate("verdict", launch.verdict, 1));
  for (const DeviceUpdate& one : launch.updates) {
    HYBRIDOPT_CHECK(one.span.count > 0 &&
                    one.span.count == MatrixPart({0, one.matrix, one.runs}).extent());
    HYBRIDOPT_TRY(LocateSpan(one).status());
    HYBRIDOPT_TRY(LocateNoted(one).status());
    HYBRIDOPT_TRY(LocateWorkspace(launch, one.matrix).status());
  }
  if (verdict->skip != 0) return Status();
  for (const DeviceUpdate& one : launch.updates) {
    MatrixUpdate matrix = MatrixOf(launch, one);
    HYBRIDOPT_ASSIGN(matrix.span, LocateSpan(one));
    HYBRIDOPT_ASSIGN(matrix.noted, LocateNoted(one));
    HYBRIDOPT_ASSIGN(matrix.workspace, LocateWorkspace(launch, one.matrix));
    matrix.coefficients.grad_factor *= verdict->grad_factor;
    UpdateMatrix(kernels_, matrix);
  }
  return Status();
}

Result<ChangePart> SimExecutor::LocatePart(const ChangePart& part) const {
  ChangePart located = part;
  HYBRIDOPT_ASSIGN(located.elements, Locate("elements", part.elements, part.count,
                                            part.element_bytes, part.element_bytes));
  for (const uint64_t*& words : located.bits.words)
    if (words != nullptr) {
      HYBRIDOPT_ASSIGN(words, Locate("changes", words, NotedWords(part.count)));
    }
  return located;
}

Status SimExecutor::Apply(const sim::SurveyChanges& survey) const {
  ChangeTile* next = survey.launch.tiles;
  for (const ChangePart& part : survey.launch.parts) {
    HYBRIDOPT_ASSIGN(const ChangePart located, LocatePart(part));
    HYBRIDOPT_ASSIGN(ChangeTile* const tiles, Locate("tiles", next, part.tiles()));
    for (uint64_t tile = 0; tile < part.tiles(); ++tile) tiles[tile] = SurveyTile(located, tile);
    next += part.tiles();
  }
  return Status();
}

Status SimExecutor::Apply(const sim::CollectChanges& collect) const {
  const ChangeCollection& launch = collect.launch;
  const uint32_t* next = launch.starts;
  for (const ChangePart& part : launch.parts) {
    HYBRIDOPT_ASSIGN(const ChangePart located, LocatePart(part));
    HYBRIDOPT_ASSIGN(const uint32_t* const starts, Locate("starts", next, part.tiles()));
    for (uint64_t tile = 0; tile < part.tiles(); ++tile) {
      const uint64_t count = SurveyTile(located, tile).count;
      if (count == 0) continue;
      const uint64_t start = starts[tile];
      if (part.output.indices != nullptr) {
        HYBRIDOPT_TRY(WriteOutput(located, tile, count, start - starts[0]));
        continue;
      }
      HYBRIDOPT_ASSIGN(uint16_t* const offsets, Locate("offsets", launch.offsets + start, count));
      HYBRIDOPT_ASSIGN(void* const values,
                       Locate("values", launch.values + start * part.element_bytes, count,
                              part.element_bytes, part.element_bytes));
      (void)CollectTile(located, tile, offsets, static_cast<std::byte*>(values));
    }
    next += part.tiles();
  }
  return Status();
}

// `first` is the place of the tile's first changed element in the output.
Status SimExecutor::WriteOutput(const ChangePart& part, uint64_t tile, uint64_t count,
                                uint64_t first) const {
  const ChangeOutput& output = part.output;
  const uint32_t index_bytes = output.index_bytes;
  HYBRIDOPT_ASSIGN(void* const indices, Locate("indices", output.indices + first * index_bytes,
                                               count, index_bytes, index_bytes));
  HYBRIDOPT_ASSIGN(void* const values, Locate("values", output.values + first * part.element_bytes,
                                              count, part.element_bytes, part.element_bytes));
  std::array<uint16_t, kChangeTileElements> offsets;
  (void)CollectTile(part, tile, offsets.data(), static_cast<std::byte*>(values));
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t index = (part.first_tile + tile) * kChangeTileElements + offsets[i];
    std::memcpy(static_cast<std::byte*>(indices) + i * index_bytes, &index, index_bytes);
  }
  return Status();
}

Status SimExecutor::Apply(const sim::Run& run) const {
  run.function(run.user);
  return Status();
}

Status SimExecutor::Apply(const sim::Record& record) const {
  std::lock_guard lock(record.event->mutex);
  if (record.event->number == record.number) record.event->time_ns = system::NowNs();
  return Status();
}

Status SimExecutor::Apply(const sim::WaitStream& wait, const std::atomic<bool>& abandoned) const {
  // This loop ends: streams wait only for commands that were queued before, and a stopped device
  // drains its queues.
  while (!wait.stream->WaitUntil(wait.sequence, kAbandonPollNs) && !abandoned) {
  }
  return Status();
}

Status SimExecutor::Apply(const sim::WaitFlag& wait, const std::atomic<bool>& abandoned) const {
  while (wait.flag->load(std::memory_order_acquire) < wait.value) {
    if (fault_.stopped() || abandoned) break;
    std::this_thread::sleep_for(kFlagPollInterval);
  }
  return Status();
}

}  // namespace hybridopt
