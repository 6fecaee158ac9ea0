#include "measure.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <filesystem>

#include "base/files.h"
#include "machine/stopwatch.h"
#include "own_folder.h"
#include "text.h"

namespace tool {
namespace {

using hybridopt::Arena;
using hybridopt::SecondsSince;
using hybridopt::system::NowNs;

constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr uint64_t kElementsUnit = uint64_t{1} << 20;
constexpr uint64_t kElementsMost = uint64_t{256} << 20;
constexpr uint64_t kMemoryMost = 4 * kGiB;      // unless an option says more
constexpr uint64_t kSimMemoryBytes = 8 * kGiB;  // pages are taken when something is stored
constexpr uint64_t kGrainBytes = 4096;
constexpr uint64_t kLineWords = 8;                       // a cache line
constexpr uint64_t kPassPieceBytes = uint64_t{1} << 20;  // what a thread takes at a time
constexpr uint64_t kPieceBytes = uint64_t{16} << 20;

// Calls body(begin, end) on each thread of the pool with that thread's part of `bytes`.
template <typename Body>
Status Split(hybridopt::WorkerPool& pool, uint64_t bytes, const Body& body) {
  return pool.Run([&](uint32_t index) {
    const hybridopt::WorkRange range =
        hybridopt::RangeOfWorker(bytes, kGrainBytes, index, pool.threads());
    if (range.begin < range.end) body(range.begin, range.end);
  });
}

// Vectors of 16 bytes are explicit, so that any compiler uses them at any level of optimization.
void AddOneToLine(uint64_t* words) {
  using Vector = uint64_t __attribute__((vector_size(16), may_alias));
  auto* const vectors = reinterpret_cast<Vector*>(words);
  vectors[0] += 1;
  vectors[1] += 1;
  vectors[2] += 1;
  vectors[3] += 1;
}

// Three streams side by side, as many as an update with fp32 state reads and writes. With a single
// one, threads reach less of the memory's rate. The count is a multiple of kLineWords.
void AddOne(uint64_t* words, uint64_t count) {
  const uint64_t each = count / 3 / kLineWords * kLineWords;
  for (uint64_t i = 0; i < each; i += kLineWords)
    for (uint64_t stream = 0; stream < 3; ++stream) AddOneToLine(words + stream * each + i);
  for (uint64_t i = 3 * each; i < count; i += kLineWords) AddOneToLine(words + i);
}

}  // namespace

Result<std::unique_ptr<Context>> MakeContext(int32_t device_kind, uint64_t sim_memory_bytes) {
  auto options = offload_init<offload_context_options_t>();
  options.device_kind = device_kind;
  options.sim_memory_bytes = sim_memory_bytes;
  options.log = [](void*, int32_t, const char*) {};
  auto context = std::make_unique<Context>();
  HYBRIDOPT_TRY(context->Create(options));
  return context;
}

Result<std::unique_ptr<Context>> OpenDevice(const std::string& device) {
  if (device == "sim") return MakeContext(OFFLOAD_DEVICE_SIM, kSimMemoryBytes);
  return MakeContext(OFFLOAD_DEVICE_CUDA);
}

Result<std::unique_ptr<Context>> OpenDeviceOrNone(const std::string& device) {
  if (device == "none") return std::unique_ptr<Context>();
  Result<std::unique_ptr<Context>> opened = OpenDevice(device);
  if (!opened.ok() && device.empty()) return std::unique_ptr<Context>();
  return opened;
}

Result<Sizes> SizesOf(uint64_t memory_bytes) {
  const uint64_t available = hybridopt::system::AvailableBytes();
  if (memory_bytes > available ||
      (memory_bytes != 0 && memory_bytes < kTrainingBytes * kElementsUnit))
    return Status::Error(OFFLOAD_INVALID_ARGUMENT,
                         "--memory is %" PRIu64 " bytes, expected %s to %s, which are available",
                         memory_bytes, SizeText(kTrainingBytes * kElementsUnit).c_str(),
                         SizeText(available).c_str());
  Sizes sizes;
  sizes.memory_bytes = memory_bytes != 0 ? memory_bytes : std::min(available / 8, kMemoryMost);
  sizes.elements = sizes.memory_bytes / kTrainingBytes / kElementsUnit * kElementsUnit;
  sizes.elements = std::clamp(sizes.elements, kElementsUnit, kElementsMost);
  sizes.pinned_bytes = memory_bytes != 0 ? memory_bytes : available / 2;
  return sizes;
}

Result<offload_context_info_t> InfoOf(const Context& context) {
  auto info = offload_init<offload_context_info_t>();
  HYBRIDOPT_TRY(StatusOf(offload_context_get_info(context.get(), &info)));
  return info;
}

double MedianOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// ------------------------------------------------------------------------------------- memory --

Result<std::unique_ptr<MemoryRate>> MemoryRate::Make(uint32_t threads, uint64_t bytes) {
  HYBRIDOPT_ASSIGN(Arena array, Arena::Map(hybridopt::system::RoundUp(bytes, kGrainBytes)));
  std::unique_ptr<MemoryRate> rate(new MemoryRate(threads, std::move(array)));
  HYBRIDOPT_TRY(rate->Measure().status());  // touches the pages first
  return rate;
}

Result<double> MemoryRate::Measure() {
  auto* const words = reinterpret_cast<uint64_t*>(array_.data());
  const int64_t begin_ns = NowNs();
  pieces_.Reset({0, array_.bytes()}, kGrainBytes, kPassPieceBytes);
  HYBRIDOPT_TRY(pool_.Run([&](uint32_t worker) {
    pieces_.Take(worker, [&](const hybridopt::WorkRange& piece) {
      AddOne(words + piece.begin / sizeof(*words), (piece.end - piece.begin) / sizeof(*words));
    });
  }));
  return 2 * static_cast<double>(array_.bytes()) / SecondsSince(begin_ns);
}

// ----------------------------------------------------------------------------------- training --

Status SmallTraining::TakeOnHost(uint32_t threads, uint64_t bytes) {
  HYBRIDOPT_ASSIGN(host_, Arena::Map(bytes));
  params_ = host_.data();
  // Each page is first touched by the thread that will update it.
  hybridopt::WorkerPool pool(threads);
  return Split(pool, bytes,
               [&](uint64_t begin, uint64_t end) { std::memset(params_ + begin, 0, end - begin); });
}

Status SmallTraining::TakeOnDevice(uint64_t bytes) {
  HYBRIDOPT_TRY(StatusOf(offload_device_alloc(context_.get(), bytes, &on_device_)));
  params_ = static_cast<std::byte*>(on_device_);
  const std::vector<std::byte> zeros(std::min(bytes, kPieceBytes));
  for (uint64_t done = 0; done < bytes; done += zeros.size())
    HYBRIDOPT_TRY(
        StatusOf(offload_device_upload(context_.get(), params_ + done, zeros.data(),
                                       std::min<uint64_t>(zeros.size(), bytes - done), nullptr)));
  return {};
}

Result<std::unique_ptr<SmallTraining>> SmallTraining::Make(const Context& context,
                                                           const Layout& layout,
                                                           const Executor& executor,
                                                           uint64_t elements) {
  std::unique_ptr<SmallTraining> training(new SmallTraining(context));
  const uint64_t param_bytes = elements * sizeof(uint16_t);
  HYBRIDOPT_ASSIGN(const offload_context_info_t info, InfoOf(context));
  HYBRIDOPT_TRY(executor.on_host ? training->TakeOnHost(info.threads, 2 * param_bytes)
                                 : training->TakeOnDevice(2 * param_bytes));
  auto options = offload_init<offload_optimizer_options_t>();
  options.algorithm = OFFLOAD_ADAMW;
  options.device_fraction = executor.device_fraction;
  options.host_executors = executor.host_executors;
  options.master_layout = layout.master_layout;
  options.moment_dtype = layout.moment_dtype;
  auto group = offload_init<offload_group_t>();
  group.lr = 1e-3;
  group.beta1 = 0.9;
  group.beta2 = 0.999;
  group.eps = 1e-8;
  auto param = offload_init<offload_param_t>();
  param.name = "all";
  param.dtype = param.grad_dtype = OFFLOAD_BF16;
  param.count = elements;
  param.data = training->params_;
  param.grad = training->params_ + param_bytes;
  training->optimizer_ = std::make_unique<Optimizer>();
  Optimizer& optimizer = *training->optimizer_;
  HYBRIDOPT_TRY(optimizer.Create(context, options));
  HYBRIDOPT_TRY(StatusOf(offload_optimizer_add_group(optimizer.get(), &group, &param.group)));
  HYBRIDOPT_TRY(StatusOf(offload_optimizer_add_params(optimizer.get(), &param, 1, nullptr)));
  HYBRIDOPT_TRY(StatusOf(offload_optimizer_commit(optimizer.get(), nullptr)));
  return training;
}

SmallTraining::~SmallTraining() {
  optimizer_.reset();  // before the params, whose addresses it holds
  if (on_device_ != nullptr) (void)offload_device_free(context_.get(), on_device_);
}

Result<double> SmallTraining::Step(uint32_t flags) {
  auto options = offload_init<offload_step_options_t>();
  options.flags = flags;
  offload_ticket_t ticket = 0;
  const int64_t begin_ns = NowNs();
  HYBRIDOPT_TRY(StatusOf(offload_optimizer_step(optimizer_->get(), &options, &ticket)));
  HYBRIDOPT_TRY(StatusOf(offload_optimizer_wait(optimizer_->get(), ticket, -1)));
  return SecondsSince(begin_ns);
}

Result<double> SmallTraining::MedianStep() {
  constexpr double kSeconds = 0.7;
  constexpr size_t kStepsMost = 15;
  HYBRIDOPT_TRY(Step(0).status());  // touches the memory and starts the threads
  std::vector<double> seconds;
  const int64_t begin_ns = NowNs();
  while (seconds.size() < 3 || (seconds.size() < kStepsMost && SecondsSince(begin_ns) < kSeconds)) {
    HYBRIDOPT_ASSIGN(const double step, Step(0));
    seconds.push_back(step);
  }
  return MedianOf(std::move(seconds));
}

Result<offload_step_result_t> SmallTraining::LastResult() const {
  auto result = offload_init<offload_step_result_t>();
  HYBRIDOPT_TRY(StatusOf(offload_optimizer_step_result(optimizer_->get(), 0, &result)));
  return result;
}

Status SmallTraining::Save(const std::string& path) {
  auto options = offload_init<offload_save_options_t>();
  options.path = path.c_str();
  offload_ticket_t ticket = 0;
  HYBRIDOPT_TRY(StatusOf(offload_optimizer_save(optimizer_->get(), &options, &ticket)));
  return StatusOf(offload_optimizer_wait(optimizer_->get(), ticket, -1));
}

Status SmallTraining::StartTrace() {
  return StatusOf(offload_optimizer_trace_start(optimizer_->get(), 0));
}

Status SmallTraining::StopTrace(const std::string& path) {
  return StatusOf(offload_optimizer_trace_stop(optimizer_->get(), path.c_str(), nullptr));
}

// --------------------------------------------------------------------------------------- link --

namespace {

// Pushes pieces to a stash and fetches them. All pushes read one piece of the device's memory, and
// all fetches write another one.
class Copies {
 public:
  static Result<std::unique_ptr<Copies>> Make(const Context& context, uint64_t pieces) {
    std::unique_ptr<Copies> copies(new Copies(context, pieces));
    HYBRIDOPT_TRY(StatusOf(offload_device_alloc(context.get(), 2 * kPieceBytes, &copies->memory_)));
    HYBRIDOPT_TRY(StatusOf(offload_stream_create(context.get(), &copies->stream_)));
    auto options = offload_init<offload_stash_options_t>();
    options.budget_bytes = 2 * pieces * kPieceBytes;
    options.slab_bytes = kPieceBytes;
    HYBRIDOPT_TRY(copies->stash_.Create(context, options));
    return copies;
  }
  ~Copies() {
    stash_.Destroy();
    (void)offload_stream_destroy(context_.get(), stream_);
    if (memory_ != nullptr) (void)offload_device_free(context_.get(), memory_);
  }

  Status Push() {
    for (uint64_t piece = 0; piece < pieces_; ++piece) {
      offload_stash_ticket_t ticket = 0;
      HYBRIDOPT_TRY(
          StatusOf(offload_stash_push(stash_.get(), 0, memory_, kPieceBytes, stream_, &ticket)));
      if (ticket == 0)
        return Status::Error(OFFLOAD_OUT_OF_HOST_MEMORY,
                             "the system does not pin %llu bytes, which copies need",
                             static_cast<unsigned long long>(2 * pieces_ * kPieceBytes));
      tickets_.push_back(ticket);
    }
    return {};
  }
  // Fetches the `pieces_` pieces that were pushed first.
  Status Fetch() {
    auto* const destination = static_cast<std::byte*>(memory_) + kPieceBytes;
    for (uint64_t piece = 0; piece < pieces_; ++piece)
      HYBRIDOPT_TRY(StatusOf(offload_stash_prefetch(stash_.get(), tickets_[piece], destination,
                                                    kPieceBytes, stream_)));
    return {};
  }
  Status Await() { return StatusOf(offload_stash_wait(stash_.get(), 0, -1)); }
  Status End() {
    for (uint64_t piece = 0; piece < pieces_; ++piece)
      HYBRIDOPT_TRY(StatusOf(offload_stash_pop(stash_.get(), tickets_[piece], stream_, 0)));
    tickets_.erase(tickets_.begin(), tickets_.begin() + static_cast<std::ptrdiff_t>(pieces_));
    return {};
  }

 private:
  Copies(const Context& context, uint64_t pieces) : context_(context), pieces_(pieces) {}

  const Context& context_;
  const uint64_t pieces_;
  void* memory_ = nullptr;
  offload_stream_t stream_ = nullptr;
  Stash stash_;
  std::vector<offload_stash_ticket_t> tickets_;
};

}  // namespace

Result<LinkRates> MeasureLink(const Context& context, uint64_t bytes) {
  const uint64_t pieces = std::max<uint64_t>(bytes / kPieceBytes / 2, 1);
  HYBRIDOPT_ASSIGN(const auto copies, Copies::Make(context, pieces));
  const auto moved = static_cast<double>(pieces * kPieceBytes);
  std::vector<double> down, up, both;
  for (int round = 0; round < 4; ++round) {
    int64_t begin_ns = NowNs();
    HYBRIDOPT_TRY(copies->Push());
    HYBRIDOPT_TRY(copies->Await());
    down.push_back(moved / SecondsSince(begin_ns));
    begin_ns = NowNs();
    HYBRIDOPT_TRY(copies->Fetch());
    HYBRIDOPT_TRY(copies->Push());
    HYBRIDOPT_TRY(copies->Await());
    both.push_back(2 * moved / SecondsSince(begin_ns));
    HYBRIDOPT_TRY(copies->End());
    begin_ns = NowNs();
    HYBRIDOPT_TRY(copies->Fetch());
    HYBRIDOPT_TRY(copies->Await());
    up.push_back(moved / SecondsSince(begin_ns));
    HYBRIDOPT_TRY(copies->End());
  }
  return LinkRates{MedianOf(down), MedianOf(up), MedianOf(both)};
}

Result<std::vector<PinnedRung>> ClimbPinned(const Context& context, uint64_t bytes_max) {
  constexpr double kSecondsMost = 4;
  std::vector<PinnedRung> rungs;
  for (uint64_t bytes = std::min(bytes_max, 4 * kPieceBytes);;
       bytes = std::min(4 * bytes, bytes_max)) {
    auto options = offload_init<offload_stash_options_t>();
    options.budget_bytes = bytes;
    Stash stash;
    const int64_t begin_ns = NowNs();
    const Status status = stash.Create(context, options);
    PinnedRung rung{bytes, 0, SecondsSince(begin_ns)};
    if (status.ok()) {
      auto stats = offload_init<offload_stash_stats_t>();
      HYBRIDOPT_TRY(StatusOf(offload_stash_get_stats(stash.get(), &stats)));
      rung.pinned_bytes = std::min(stats.pinned_bytes, bytes);
    } else if (status.code() != OFFLOAD_OUT_OF_HOST_MEMORY) {
      return status;
    }
    rungs.push_back(rung);
    if (rung.pinned_bytes < bytes || rung.seconds > kSecondsMost || bytes >= bytes_max)
      return rungs;
  }
}

// --------------------------------------------------------------------------------------- disk --

Result<DiskRates> MeasureDisk(const Context& host, const std::string& directory,
                              uint64_t elements) {
  HYBRIDOPT_ASSIGN(const auto training,
                   SmallTraining::Make(host, kLayouts[0], kExecutors[0], elements));
  HYBRIDOPT_TRY(training->Step(0).status());
  char name[64];
  std::snprintf(name, sizeof(name), "/hybridopt-doctor-%016llx",
                static_cast<unsigned long long>(hybridopt::system::RandomBits()));
  const std::string folder = directory + name;
  const OwnFolder own(folder);
  std::error_code error;
  std::filesystem::create_directory(folder, error);
  if (error)
    return Status::Error(OFFLOAD_IO_FAILED, "could not make '%.500s': %s", folder.c_str(),
                         error.message().c_str());
  const std::string path = folder + "/checkpoint";
  int64_t begin_ns = NowNs();
  Status status = training->Save(path);
  DiskRates rates;
  rates.write = SecondsSince(begin_ns);
  auto info = offload_init<offload_checkpoint_info_t>();
  if (status.ok())
    status = StatusOf(offload_checkpoint_inspect(path.c_str(), &info, nullptr, nullptr));
  begin_ns = NowNs();
  if (status.ok()) status = StatusOf(offload_checkpoint_verify(path.c_str(), nullptr));
  rates.read = SecondsSince(begin_ns);
  std::filesystem::remove_all(folder, error);
  HYBRIDOPT_TRY(status);
  if (error)
    return Status::Error(OFFLOAD_IO_FAILED, "could not remove '%.500s': %s; remove it by hand",
                         folder.c_str(), error.message().c_str());
  rates.bytes = info.bytes;
  rates.write = static_cast<double>(rates.bytes) / rates.write;
  rates.read = static_cast<double>(rates.bytes) / rates.read;
  return rates;
}

}  // namespace tool
