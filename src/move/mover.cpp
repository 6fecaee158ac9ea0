#include "move/mover.h"

#include <algorithm>
#include <optional>

#include "runtime/parallel_copy.h"

namespace hybridopt {
namespace {

// Copies are cut into pieces that alternate between two streams: while one stream copies, the other
// one begins its next copy.
constexpr uint64_t kCopyPieceBytes = uint64_t{4} << 20;

// While the context has a stash, a move to the device pauses after each kPiecesTogether pieces
// until the device has copied the kPiecesTogether pieces before them. So at most 2 *
// kPiecesTogether pieces are queued, and a prefetch that the stash queues meanwhile waits for at
// most these.
constexpr uint32_t kPiecesTogether = 8;

constexpr char kMoved[] = "params, gradients or states being moved";  // in errors

}  // namespace

// A range of one gradient. `item` is null where no gradient is left.
struct Mover::GradPiece {
  const MoveItem* item = nullptr;
  uint64_t begin = 0;  // elements
  uint64_t end = 0;
};

// Cuts gradients into pieces of at most `most_elements` and returns these in order.
class Mover::GradPieces {
 public:
  GradPieces(const ParamTable& table, std::span<const MoveItem> items, uint64_t most_elements)
      : table_(table), items_(items), most_elements_(most_elements) {}

  GradPiece Next() {
    while (!items_.empty() && begin_ == table_.param(items_.front().param).count) {
      items_ = items_.subspan(1);
      begin_ = 0;
    }
    if (items_.empty()) return {};
    const uint64_t count = table_.param(items_.front().param).count;
    const GradPiece piece{&items_.front(), begin_, std::min(begin_ + most_elements_, count)};
    begin_ = piece.end;
    return piece;
  }

 private:
  const ParamTable& table_;
  std::span<const MoveItem> items_;
  const uint64_t most_elements_;
  uint64_t begin_ = 0;  // of the next piece in the first item
};

Mover::Mover(Context& context, const ParamTable& table, const StateShape& shape,
             const Residence& residence, StateMemory& memory, Lanes& lanes, const SwapMemory& swap,
             HostNormSums& host_norm_sums, MasterFill& master_fill, ChangeLog& changes)
    : context_(context),
      device_(context.device()),
      table_(table),
      shape_(shape),
      residence_(residence),
      memory_(memory),
      lanes_(lanes),
      swap_(swap),
      host_norm_sums_(host_norm_sums),
      master_fill_(master_fill),
      changes_(changes) {
  copies_.reserve(kStateSlots * table.size());
  norm_inputs_.reserve(table.size());
}

Status Mover::Run(MoveRequest& request, uint64_t* bytes) {
  lanes_.trace().SetAnchor(lanes_.compute);
  const uint64_t before_bytes = *bytes;
  TraceRange range(lanes_.trace(), TraceRow::kSteps, RowOf(request.move).name);
  const Status status = RunMove(request, bytes);
  range.SetBytes(*bytes - before_bytes);
  lanes_.trace().Collect();
  return status;
}

Status Mover::RunMove(MoveRequest& request, uint64_t* bytes) {
  HYBRIDOPT_TRY(UseDeviceMemory(request));
  copies_.clear();
  switch (request.move) {
    case Move::kOffloadGrads:
      return OffloadGrads(request, bytes);
    case Move::kAccumulateGrads:
      HYBRIDOPT_TRY(Accumulate(request, bytes));
      return BlockSumsOnHost(request, OFFLOAD_FP32);
    case Move::kDropGrads:
      return {};
    case Move::kRefreshMasters:
      return master_fill_.Refresh(request.items);
    default:
      HYBRIDOPT_TRY(CopyResource(request, bytes));
  }
  if (request.frees_device_memory) {  // no work uses it: steps and moves wait for their own work
    memory_.FreeDevice();
    LaneScratch old;  // UseScratch swaps, so this gets the lanes' scratch memory and frees it
    return changes_.UseScratch(old);
  }
  return {};
}

// Copies the resource that the move names in the move's direction, without converting it.
Status Mover::CopyResource(const MoveRequest& request, uint64_t* bytes) {
  const MoveRow& row = RowOf(request.move);
  if (row.resource == Resource::kParams) ListParams(request);
  if (row.resource == Resource::kGrads) ListGrads(request);
  if (row.resource == Resource::kStates) ListStates(request);
  return CopyListed(row.direction, bytes);
}

// Waits on the host for the producers, which are the streams of the caller whose work writes what
// is moved. The streams of the lanes do not wait for them, for two reasons: a move may queue more
// copies than a launch queue holds, and its ticket must not complete before the producers' work
// has completed, not even if the move copies nothing.
Status Mover::AwaitProducers(const MoveRequest& request, std::span<const EventHandle> ready,
                             FunctionRef<Result<bool>()> await_borrowed) {
  if (device_.unified()) return {};
  for (EventHandle event : ready.first(request.producer_count))
    HYBRIDOPT_TRY(lanes_.WaitForCaller(event, "the streams given to a move", await_borrowed));
  return {};
}

void Mover::ListParams(const MoveRequest& request) {
  for (const MoveItem& item : request.items) {
    const Param& param = table_.param(item.param);
    copies_.push_back({static_cast<std::byte*>(item.address), swap_.Params(item.param),
                       param.count * DtypeBytes(param.dtype)});
  }
}

void Mover::ListGrads(const MoveRequest& request) {
  for (const MoveItem& item : request.items) {
    const Param& param = table_.param(item.param);
    copies_.push_back({static_cast<std::byte*>(item.address), swap_.Grads(item.param),
                       param.count * DtypeBytes(param.grad_dtype)});
  }
}

void Mover::ListStates(const MoveRequest& request) {
  for (const MoveItem& item : request.items) {
    const uint64_t count = residence_.range(item.param, Tier::kDevice).count;
    const ParamShape& shaped = shape_.params[item.param];
    for (uint32_t index = 0; index < kStateSlots && count > 0; ++index) {
      const StateSlot slot{index};
      if (!shaped.Keeps(Tier::kDevice, slot)) continue;
      copies_.push_back({memory_.At(Tier::kDevice, item.param, slot),
                         swap_.State(item.param, slot, 0), shaped.Bytes(slot, 0, count)});
    }
  }
}

// Gives the device memory of the request to StateMemory and to Lanes, which own it afterwards.
Status Mover::UseDeviceMemory(MoveRequest& request) {
  if (!request.brings_device_memory) return {};
  HYBRIDOPT_TRY(memory_.GrowDevice(request.pages));
  return changes_.UseScratch(request.scratch);
}

Status Mover::CopyListed(Direction direction, uint64_t* bytes) {
  uint64_t total_bytes = 0;
  for (const Copy& copy : copies_) total_bytes += copy.bytes;
  *bytes += total_bytes;
  if (total_bytes == 0) return {};
  if (device_.unified()) return CopyByWorkers(direction);
  const StreamHandle streams[2] = {direction == Direction::kDown ? lanes_.down : lanes_.up,
                                   lanes_.compute};
  const char* const name = direction == Direction::kDown ? "move down" : "move up";
  const TraceRow row = direction == Direction::kDown ? TraceRow::kCopiesDown : TraceRow::kCopiesUp;
  std::optional<TraceWork> works[2];
  works[0].emplace(lanes_.trace(), row, streams[0], name);
  works[1].emplace(lanes_.trace(), TraceRow::kDeviceUpdate, streams[1], name);
  uint32_t pieces = 0;
  for (const Copy& copy : copies_) {
    for (uint64_t begin = 0; begin < copy.bytes; begin += kCopyPieceBytes, ++pieces) {
      const uint64_t piece = std::min(kCopyPieceBytes, copy.bytes - begin);
      const StreamHandle stream = streams[pieces % 2];
      works[pieces % 2]->AddBytes(piece);
      if (direction == Direction::kDown) {
        HYBRIDOPT_TRY(device_.CopyToHost(stream, copy.host + begin, copy.device + begin, piece));
      } else {
        HYBRIDOPT_TRY(AwaitPieces(pieces));
        lanes_.link().GiveWay(piece);
        HYBRIDOPT_TRY(device_.CopyToDevice(stream, copy.device + begin, copy.host + begin, piece));
        lanes_.link().QueuedUp(piece);
      }
    }
  }
  for (std::optional<TraceWork>& work : works) work.reset();
  for (uint32_t i : {0, 1}) HYBRIDOPT_TRY(device_.Record(lanes_.moved[i], streams[i]));
  for (EventHandle event : lanes_.moved) HYBRIDOPT_TRY(lanes_.Wait(event, kMoved));
  if (direction == Direction::kUp) lanes_.link().ArrivedUpTo(lanes_.link().queued_up_bytes());
  return {};
}

// To be called before each piece of a move to the device. `pieces` is the number of pieces queued
// so far. Every second piece is on lanes_.up, so an event on that stream alone tells with
// sufficient precision how far the device has come.
Status Mover::AwaitPieces(uint32_t pieces) {
  if (!context_.link().has_prefetches() || pieces == 0 || pieces % kPiecesTogether != 0) return {};
  if (pieces > kPiecesTogether) HYBRIDOPT_TRY(lanes_.Wait(lanes_.moved[0], kMoved));
  return device_.Record(lanes_.moved[0], lanes_.up);
}

// Where device and host share one memory, the workers copy.
Status Mover::CopyByWorkers(Direction direction) {
  std::vector<HostCopy> copies;
  for (const Copy& copy : copies_)
    copies.push_back(direction == Direction::kDown ? HostCopy{copy.device, copy.host, copy.bytes}
                                                   : HostCopy{copy.host, copy.device, copy.bytes});
  return CopyInParallel(context_.workers(), copies);
}

// --------------------------------------------------------------- gradients that are offloaded --

// The producers' work is done when this begins. Usually the device computes the block sums. The
// workers compute them from the copies on the host where device and host share one memory, and
// where the device has no scratch memory because its states are offloaded.
Status Mover::OffloadGrads(const MoveRequest& request, uint64_t* bytes) {
  ListGrads(request);
  if (device_.unified() || !lanes_.has_scratch()) {
    HYBRIDOPT_TRY(CopyListed(Direction::kDown, bytes));
    return BlockSumsOnHost(request, 0);
  }
  HYBRIDOPT_TRY(QueueBlockSums(request));
  // One stream copies whole gradients, one directly after the other: the host does nothing between
  // two copies.
  {
    TraceWork work(lanes_.trace(), TraceRow::kCopiesDown, lanes_.down, "move down");
    for (const Copy& copy : copies_) {
      *bytes += copy.bytes;
      work.AddBytes(copy.bytes);
      if (copy.bytes > 0)
        HYBRIDOPT_TRY(device_.CopyToHost(lanes_.down, copy.host, copy.device, copy.bytes));
    }
  }
  HYBRIDOPT_TRY(device_.Record(lanes_.moved[0], lanes_.down));
  HYBRIDOPT_TRY(lanes_.Wait(lanes_.grads_summed, "the norms of gradients being moved"));
  KeepBlockSums(request);
  return lanes_.Wait(lanes_.moved[0], "gradients being moved");
}

// Has the device compute the block sums of all gradients of the request. In lanes_.block_sums they
// lie in the order of the request's items, without gaps.
Status Mover::QueueBlockSums(const MoveRequest& request) {
  norm_inputs_.clear();
  uint64_t blocks = 0;
  for (const MoveItem& item : request.items) {
    const Param& param = table_.param(item.param);
    if (param.count == 0) continue;
    norm_inputs_.push_back({item.address, param.count, param.grad_dtype, blocks});
    blocks += NormBlocksOf(param.count);
  }
  if (blocks > 0) {
    NormLaunch launch{};
    launch.inputs = norm_inputs_;
    launch.block_sums = lanes_.block_sums;
    const TraceWork work(lanes_.trace(), TraceRow::kDeviceUpdate, lanes_.compute, "norm");
    HYBRIDOPT_TRY(device_.Norm(lanes_.compute, launch));
    HYBRIDOPT_TRY(device_.CopyToHost(lanes_.compute, lanes_.host_block_sums, lanes_.block_sums,
                                     blocks * sizeof(double)));
  }
  return device_.Record(lanes_.grads_summed, lanes_.compute);
}

// Copies the block sums that the device has computed to each param's place in host_norm_sums_.
void Mover::KeepBlockSums(const MoveRequest& request) {
  const double* sums = lanes_.host_block_sums;
  for (const MoveItem& item : request.items) {
    const uint64_t blocks = NormBlocksOf(table_.param(item.param).count);
    host_norm_sums_.Set(shape_.params[item.param].first_norm_block, {sums, blocks});
    sums += blocks;
  }
}

// The workers compute the block sums of the gradients that this move has just brought to the host,
// because these gradients are still in the CPU's caches; then the step need not read them again.
// `dtype` is the dtype in which the host holds these gradients; 0 means each gradient's own.
Status Mover::BlockSumsOnHost(const MoveRequest& request, int32_t dtype) {
  norm_inputs_.clear();
  for (const MoveItem& item : request.items) {
    const Param& param = table_.param(item.param);
    if (param.count == 0) continue;
    norm_inputs_.push_back({swap_.Grads(item.param), param.count,
                            dtype != 0 ? dtype : param.grad_dtype,
                            shape_.params[item.param].first_norm_block});
  }
  // The caller may name params in any order; HostNormSums needs them in registration order.
  std::sort(norm_inputs_.begin(), norm_inputs_.end(),
            [](const NormInput& a, const NormInput& b) { return a.first_block < b.first_block; });
  return host_norm_sums_.Sum(context_, norm_inputs_);
}

// --------------------------------------------------------------- gradients that are added up --

Status Mover::Accumulate(const MoveRequest& request, uint64_t* bytes) {
  for (const MoveItem& item : request.items) {
    const Param& param = table_.param(item.param);
    *bytes += param.count * DtypeBytes(param.grad_dtype);
  }
  return device_.unified() ? AddInPlace(request.items) : AddStaged(request.items);
}

// Each worker adds its part of the elements of all params, in one pass.
Status Mover::AddInPlace(std::span<const MoveItem> items) {
  uint64_t total = 0;
  for (const MoveItem& item : items) total += table_.param(item.param).count;
  const uint32_t workers = context_.workers().threads();
  return context_.workers().Run([&](uint32_t worker) {
    const TraceSpan span(lanes_.trace(), WorkerRow(worker), "add gradients");
    const WorkRange mine = RangeOfWorker(total, kWorkGrainElements, worker, workers);
    uint64_t first = 0;  // the number of elements of the params before this one
    for (const MoveItem& item : items) {
      const uint64_t end = first + table_.param(item.param).count;
      const uint64_t from = std::max(mine.begin, first), to = std::min(mine.end, end);
      if (from < to) Add({&item, from - first, to - first}, GradAddress(item, from - first));
      first = end;
    }
  });
}

// The down stream copies gradients piece by piece into the slots of the ring, ahead of the workers
// by as many pieces as the ring has slots. The workers add each piece.
Status Mover::AddStaged(std::span<const MoveItem> items) {
  StagingRing& ring = lanes_.ring();
  const uint64_t most_elements = ring.grad_bytes() / sizeof(float);
  GradPieces coming(table_, items, most_elements), adding(table_, items, most_elements);
  uint64_t brought = 0;
  const auto bring_down = [&]() -> Status {
    const GradPiece piece = coming.Next();
    if (piece.item == nullptr) return {};
    const uint32_t slot = static_cast<uint32_t>(brought++ % ring.slots());
    const uint64_t piece_bytes =
        (piece.end - piece.begin) * DtypeBytes(table_.param(piece.item->param).grad_dtype);
    TraceWork work(lanes_.trace(), TraceRow::kCopiesDown, lanes_.down, "move down");
    work.AddBytes(piece_bytes);
    HYBRIDOPT_TRY(device_.CopyToHost(lanes_.down, ring.grads(slot),
                                     GradAddress(*piece.item, piece.begin), piece_bytes));
    work.End();
    return device_.Record(lanes_.landed(slot).end, lanes_.down);
  };
  for (uint32_t slot = 0; slot < ring.slots(); ++slot) HYBRIDOPT_TRY(bring_down());
  uint64_t added = 0;
  for (GradPiece piece = adding.Next(); piece.item != nullptr; piece = adding.Next(), ++added) {
    const uint32_t slot = static_cast<uint32_t>(added % ring.slots());
    HYBRIDOPT_TRY(lanes_.Wait(lanes_.landed(slot).end, "gradients coming down"));
    HYBRIDOPT_TRY(AddByWorkers(piece, ring.grads(slot)));
    ring.ReleaseGrads(slot);
    HYBRIDOPT_TRY(bring_down());
  }
  return {};
}

Status Mover::AddByWorkers(const GradPiece& piece, const std::byte* grad) {
  const uint32_t workers = context_.workers().threads();
  const uint64_t element_bytes = DtypeBytes(table_.param(piece.item->param).grad_dtype);
  return context_.workers().Run([&](uint32_t worker) {
    const TraceSpan span(lanes_.trace(), WorkerRow(worker), "add gradients");
    const WorkRange range =
        RangeOfWorker(piece.end - piece.begin, kWorkGrainElements, worker, workers);
    Add({piece.item, piece.begin + range.begin, piece.begin + range.end},
        grad + range.begin * element_bytes);
  });
}

const std::byte* Mover::GradAddress(const MoveItem& item, uint64_t element) const {
  return static_cast<const std::byte*>(item.address) +
         element * DtypeBytes(table_.param(item.param).grad_dtype);
}

// `grad` is the address at which the piece begins. The first gradient is converted and stored;
// adding it to zero would lose the sign of -0.
void Mover::Add(const GradPiece& piece, const std::byte* grad) const {
  const int32_t dtype = table_.param(piece.item->param).grad_dtype;
  const KernelTable& kernels = context_.kernels();
  const auto add = piece.item->first ? kernels.ToFp32(dtype) : kernels.Accumulate(dtype);
  auto* const sum = reinterpret_cast<float*>(swap_.Grads(piece.item->param));
  add(grad, piece.end - piece.begin, sum + piece.begin);
}

}  // namespace hybridopt
