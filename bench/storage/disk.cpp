#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "library.h"
#include "pages.h"
#include "storage/raw_file.h"
#include "suites.h"

namespace bench {
namespace {

constexpr uint64_t kStateBytes = 3 * sizeof(float);  // of an element
// As the library has them: an array of a chunk is one read, and one write.
constexpr uint64_t kChunkElements = uint64_t{1} << 20;
constexpr uint64_t kBlockBytes = kChunkElements * sizeof(float);
constexpr uint32_t kThreads = 4;

// A plain file without a name, for direct access.
class RawFile {
 public:
  RawFile(const std::string& directory, uint64_t bytes) : blocks_(bytes / kBlockBytes) {
    file_ = open(directory.c_str(), O_TMPFILE | O_RDWR | O_DIRECT, 0600);
    if (file_ < 0) Fail("a file for direct access in " + directory);
    if (fallocate(file_, 0, 0, static_cast<off_t>(bytes)) != 0) Fail("room in " + directory);
    std::memset(memory_.at<std::byte>(), 0x5a, kThreads * kBlockBytes);
  }
  ~RawFile() { close(file_); }
  RawFile(const RawFile&) = delete;
  RawFile& operator=(const RawFile&) = delete;

  // Each thread does the next block, until all are done.
  void Write() {
    Blocks next;
    OnThreads(kThreads, [&](uint32_t thread) { Each(next, thread, {&WriteBlock}); });
  }
  // Each thread reads the next block and writes it.
  void ReadAndWriteInTurns() {
    Blocks next;
    OnThreads(kThreads, [&](uint32_t thread) { Each(next, thread, {&ReadBlock, &WriteBlock}); });
  }
  // Half of the threads read all blocks, the others write all of them.
  void ReadAndWriteBeside() {
    Blocks to_read, to_write;
    OnThreads(kThreads, [&](uint32_t thread) {
      if (thread % 2 == 0)
        Each(to_read, thread, {&ReadBlock});
      else
        Each(to_write, thread, {&WriteBlock});
    });
  }

 private:
  using Blocks = std::atomic<uint64_t>;
  using Call = decltype(&ReadBlock);

  void Each(Blocks& next, uint32_t thread, const std::vector<Call>& calls) {
    std::byte* const memory = memory_.at<std::byte>() + thread * kBlockBytes;
    for (uint64_t block; (block = next.fetch_add(1)) < blocks_;)
      for (const Call call : calls) call(file_, memory, kBlockBytes, block * kBlockBytes);
  }

  const uint64_t blocks_;
  const Pages memory_{kThreads * kBlockBytes};
  int file_ = -1;
};

// An optimizer with all state on disk, one with all in memory, and a plain file of the state's
// size.
class DiskBench {
 public:
  explicit DiskBench(const Settings& settings)
      : elements_((settings.checkpoint_mib << 20) / kStateBytes / kChunkElements * kChunkElements),
        rounds_(settings.rounds),
        directory_(settings.checkpoint_dir),
        context_(OFFLOAD_DEVICE_HOST, settings.threads),
        arrays_(2 * elements_ * sizeof(uint16_t)),
        raw_(directory_, elements_ * kStateBytes) {
    auto* const params = arrays_.at<uint16_t>();
    auto* const grads = params + elements_;
    std::fill_n(params, elements_, uint16_t{0x3f80});  // 1.0
    std::fill_n(grads, elements_, uint16_t{0x3c00});   // 0.0078
    raw_.Write();  // a first write into reserved space takes longer
    Optimizer::Lifecycle lifecycle;
    lifecycle.chunk_elements = kChunkElements;
    lifecycle.disk_fraction = 1;
    lifecycle.disk_paths = directory_.c_str();
    optimizer_.emplace(context_, params, grads, Optimizer::Shape{1, elements_, elements_},
                       lifecycle);
  }

  void Run() {
    times_ = TimeRounds("disk", rounds_,
                        {[&] { raw_.ReadAndWriteInTurns(); }, [&] { raw_.ReadAndWriteBeside(); },
                         [&] { optimizer_->Step(OFFLOAD_STEP_ASSUME_FINITE); }});
  }

  void AddRows(Report& report) const {
    constexpr const char* kNames[] = {"disk, raw, each block read and written",
                                      "disk, raw, reader beside writer", "disk, step"};
    const Times best = Best();
    for (size_t i = 0; i < times_.size(); ++i)
      report.rows.push_back({kNames[i], kThreads, elements_, 2.0 * kStateBytes, SpreadOf(times_[i]),
                             SpreadOf(Ratios(best, times_[i]))});
    report.figures.push_back(
        {"disk_step_vs_raw", SpreadOf(Ratios(best, times_[kStep])), "", "at least 0.9"});
  }

 private:
  enum Contender : size_t { kInTurns, kBeside, kStep };

  // The quicker raw contender of each round.
  Times Best() const {
    return Paired(times_[kInTurns], times_[kBeside],
                  [](double a, double b) { return std::min(a, b); });
  }

  const uint64_t elements_;
  const uint32_t rounds_;
  const std::string directory_;
  const Context context_;
  const Pages arrays_;
  RawFile raw_;
  std::optional<Optimizer> optimizer_;
  std::vector<Times> times_;
};

}  // namespace

void MeasureDisk(const Settings& settings, Report& report) {
  DiskBench bench(settings);
  bench.Run();
  bench.AddRows(report);
}

}  // namespace bench
