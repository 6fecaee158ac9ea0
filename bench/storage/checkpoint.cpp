#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "library.h"
#include "pages.h"
#include "storage/raw_file.h"
#include "suites.h"

namespace bench {
namespace {

constexpr uint64_t kBlockBytes = uint64_t{8} << 20;
constexpr uint32_t kDepth = 4;  // blocks in flight, for all contenders
constexpr uint32_t kRoundsMax = 9;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The number of one line of /proc/self/status, in kibibytes.
double StatusKiB(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.compare(0, key.size(), key) == 0) return std::stod(line.substr(key.size() + 1));
  return 0;
}

int Open(const std::string& path, int flags) {
  int file = open(path.c_str(), flags | O_DIRECT, 0666);
  if (file < 0) file = open(path.c_str(), flags, 0666);  // a file system without direct access
  if (file < 0) Fail(path);
  return file;
}

// Reads or writes a file of `bytes` with as many threads as the library has, and does nothing else.
void EachBlock(int file, uint64_t bytes, std::byte* memory, bool writing) {
  std::atomic<uint64_t> next = 0;
  OnThreads(kDepth, [&](uint32_t thread) {
    std::byte* const block = memory + thread * kBlockBytes;
    for (uint64_t at; (at = next.fetch_add(kBlockBytes)) < bytes;)
      (writing ? WriteBlock : ReadBlock)(file, block, std::min(kBlockBytes, bytes - at), at);
  });
}

void WriteRaw(const std::string& path, uint64_t bytes, std::byte* memory) {
  const int file = Open(path, O_WRONLY | O_CREAT | O_TRUNC);
  (void)!fallocate(file, 0, 0, static_cast<off_t>(bytes));
  EachBlock(file, bytes, memory, true);
  if (fsync(file) != 0) Fail("fsync of " + path);
  close(file);
}

void ReadRaw(const std::string& path, uint64_t bytes, std::byte* memory) {
  const int file = Open(path, O_RDONLY);
  EachBlock(file, bytes, memory, false);
  close(file);
}

// Writes as torch.save does, with one thread and through the page cache, then syncs the file.
void WriteBuffered(const std::string& path, uint64_t bytes, const std::byte* memory) {
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  for (uint64_t at = 0; at < bytes;) {
    const ssize_t wrote = write(file, memory, std::min(kBlockBytes, bytes - at));
    if (wrote <= 0) Fail(path);
    at += static_cast<uint64_t>(wrote);
  }
  if (fsync(file) != 0) Fail("fsync of " + path);
  close(file);
}

void Save(const Optimizer& optimizer, const std::string& path) {
  auto options = Zeroed<offload_save_options_t>();
  options.path = path.c_str();
  options.io_depth = kDepth;
  Require(offload_optimizer_save(optimizer.get(), &options, nullptr), "offload_optimizer_save");
}

void Load(const Optimizer& optimizer, const std::string& path, uint32_t flags) {
  auto options = Zeroed<offload_load_options_t>();
  options.path = path.c_str();
  options.io_depth = kDepth;
  options.flags = flags;
  Require(offload_optimizer_load(optimizer.get(), &options, nullptr), "offload_optimizer_load");
  Require(offload_optimizer_wait(optimizer.get(), 0, -1), "offload_optimizer_wait");
}

// The difference between the largest memory of the process during `work` and its memory before.
double ExtraMiB(const std::function<void()>& work) {
  std::ofstream("/proc/self/clear_refs") << "5";  // resets the high-water mark
  const double before = StatusKiB("VmRSS:");
  work();
  return std::max(0.0, StatusKiB("VmHWM:") - before) / 1024;
}

// The contenders of each round.
enum Contender : size_t {
  kWriteRaw,
  kSave,
  kWriteBuffered,
  kReadRaw,
  kLoadUnverified,
  kReadRawTwice,
  kLoad,
  kContenders
};

// One optimizer, its checkpoint, and plain files of the same size.
class CheckpointBench {
 public:
  explicit CheckpointBench(const Settings& settings)
      // A multiple of the unit of direct access.
      : elements_((settings.checkpoint_mib << 20) / (3 * sizeof(float)) / 1024 * 1024),
        rounds_(std::min(settings.rounds, kRoundsMax)),
        directory_(settings.checkpoint_dir + "/hybridopt_bench-XXXXXX"),
        context_(OFFLOAD_DEVICE_HOST, settings.threads),
        arrays_(2 * elements_ * sizeof(uint16_t)) {
    if (mkdtemp(directory_.data()) == nullptr) Fail(directory_);
    auto* const params = arrays_.at<uint16_t>();
    auto* const grads = params + elements_;
    std::fill_n(params, elements_, uint16_t{0x3f80});  // 1.0
    std::fill_n(grads, elements_, uint16_t{0x3c00});   // 0.0078
    optimizer_.emplace(context_, params, grads, Optimizer::Shape{1, elements_, elements_});
    std::memset(blocks_.at<std::byte>(), 0x5a, kDepth * kBlockBytes);
  }
  ~CheckpointBench() { std::filesystem::remove_all(directory_); }
  CheckpointBench(const CheckpointBench&) = delete;
  CheckpointBench& operator=(const CheckpointBench&) = delete;

  void TimeFiles() {
    SaveOnce();  // the first round of loads reads this
    WriteRawOnce();
    TimeRounds("checkpoint", rounds_,
               {[&] { WriteRawOnce(); }, [&] { SaveOnce(); }, [&] { WriteBufferedOnce(); },
                [&] { Time(kReadRaw, [&] { ReadRawOnce(); }); },
                [&] { Time(kLoadUnverified, [&] { LoadOnce(OFFLOAD_LOAD_NO_VERIFY); }); },
                [&] {
                  Time(kReadRawTwice, [&] {
                    ReadRawOnce();
                    ReadRawOnce();
                  });
                },
                [&] { Time(kLoad, [&] { LoadOnce(0); }); }});
    for (Times& all : times_) all.erase(all.begin(), all.end() - rounds_);  // the warm-up
  }

  void AddRows(Report& report) const {
    constexpr const char* kNames[] = {"checkpoint, raw direct writer",
                                      "checkpoint, save",
                                      "checkpoint, buffered, 1 thread",
                                      "checkpoint, raw direct reader",
                                      "checkpoint, load, hashes not compared",
                                      "checkpoint, raw direct reader, twice",
                                      "checkpoint, load"};
    constexpr Contender kAgainst[] = {kWriteRaw, kWriteRaw,     kWriteRaw,    kReadRaw,
                                      kReadRaw,  kReadRawTwice, kReadRawTwice};
    for (size_t i = 0; i < kContenders; ++i) {
      report.rows.push_back({kNames[i], kDepth, elements_, 3 * sizeof(float), SpreadOf(times_[i]),
                             SpreadOf(Ratios(times_[kAgainst[i]], times_[i]))});
    }
  }

  void AddFigures(Report& report) const {
    const auto add = [&](const char* name, const Times& values, const char* unit,
                         const char* goal) {
      report.figures.push_back({name, SpreadOf(values), unit, goal});
    };
    const auto ratios = [&](Contender a, Contender b) { return Ratios(times_[a], times_[b]); };
    add("save_gb_per_s", Rates(kSave), "GB/s", "");
    add("save_vs_raw", ratios(kWriteRaw, kSave), "", "at least 0.85");
    add("save_vs_buffered", ratios(kWriteBuffered, kSave), "", "");
    // A load reads everything twice: first to compare all hashes, then to replace the state. Its
    // time is compared with that of a reader that reads twice. The time of a load without the first
    // pass is compared with that of a reader that reads once.
    add("load_unverified_gb_per_s", Rates(kLoadUnverified), "GB/s", "");
    add("load_vs_raw", ratios(kReadRaw, kLoadUnverified), "", "at least 0.85");
    add("load_verified_gb_per_s", Rates(kLoad), "GB/s", "");
    add("load_verified_vs_raw_twice", ratios(kReadRawTwice, kLoad), "", "at least 0.85");
    add("load_verified_vs_raw_once", ratios(kReadRaw, kLoad), "", "");
    add("save_extra_rss_mib", extra_mib_, "MiB", "at most 33");
  }

 private:
  uint64_t bytes() const { return elements_ * 3 * sizeof(float); }
  std::string raw() const { return directory_ + "/raw"; }
  std::string saved() const { return directory_ + "/saved"; }

  void Time(Contender contender, const std::function<void()>& work) {
    const double begin = Now();
    work();
    times_[contender].push_back(Now() - begin);
  }
  void WriteRawOnce() {
    std::filesystem::remove(raw());
    Time(kWriteRaw, [&] { WriteRaw(raw(), bytes(), blocks_.at<std::byte>()); });
  }
  void SaveOnce() {
    std::filesystem::remove_all(saved());
    extra_mib_.push_back(ExtraMiB([&] {
      Time(kSave, [&] {
        Save(*optimizer_, saved());
        Require(offload_optimizer_wait(optimizer_->get(), 0, -1), "offload_optimizer_wait");
      });
    }));
  }
  void WriteBufferedOnce() {
    const std::string buffered = directory_ + "/buffered";
    Time(kWriteBuffered, [&] { WriteBuffered(buffered, bytes(), blocks_.at<std::byte>()); });
    std::filesystem::remove(buffered);
  }
  void ReadRawOnce() { ReadRaw(raw(), bytes(), blocks_.at<std::byte>()); }
  void LoadOnce(uint32_t flags) { Load(*optimizer_, saved(), flags); }

  Times Rates(Contender contender) const {
    Times rates;
    for (double seconds : times_[contender])
      rates.push_back(static_cast<double>(bytes()) / seconds * 1e-9);
    return rates;
  }

  const uint64_t elements_;
  const uint32_t rounds_;
  std::string directory_;
  const Context context_;
  const Pages arrays_;
  const Pages blocks_{kDepth * kBlockBytes};
  std::optional<Optimizer> optimizer_;
  std::array<Times, kContenders> times_;
  Times extra_mib_;
};

// --------------------------------------------------------------------------------- steps behind --

constexpr uint32_t kParams = 16;
constexpr size_t kStepsBehind = 4;
constexpr double kStateBytes = 3 * sizeof(float);  // of an element
// The part of all state for which each buffer has room.
constexpr std::array<double, 3> kRooms = {0, 0.25, 1};
enum Room : size_t { kNone, kQuarter, kAll };

// What one optimizer took, a round each.
struct Taken {
  Times alone, behind, later, save;
};

// Optimizers that differ only in their buffers, side by side. They share params and gradients.
class SavesBench {
 public:
  explicit SavesBench(const Settings& settings)
      : elements_(settings.elements / kParams / 1024 * 1024),
        rounds_(settings.rounds),
        directory_(settings.checkpoint_dir + "/hybridopt_bench-XXXXXX"),
        context_(OFFLOAD_DEVICE_HOST, settings.threads),
        arrays_(2 * kParams * elements_ * sizeof(uint16_t)) {
    if (mkdtemp(directory_.data()) == nullptr) Fail(directory_);
    auto* const params = arrays_.at<uint16_t>();
    auto* const grads = params + kParams * elements_;
    std::fill_n(params, kParams * elements_, uint16_t{0x3f80});  // 1.0
    std::fill_n(grads, kParams * elements_, uint16_t{0x3c00});   // 0.0078
    for (const double room : kRooms) {
      Optimizer::Lifecycle lifecycle;
      const double state_bytes = kStateBytes * static_cast<double>(kParams * elements_);
      // Room for all is a little more than the bytes of the state; the library takes no more.
      lifecycle.save_buffer_bytes =
          room == 1 ? UINT64_MAX : static_cast<uint64_t>(room * state_bytes);
      optimizers_.push_back(std::make_unique<Optimizer>(
          context_, params, grads, Optimizer::Shape{kParams, elements_, elements_}, lifecycle));
    }
  }
  ~SavesBench() { std::filesystem::remove_all(directory_); }
  SavesBench(const SavesBench&) = delete;
  SavesBench& operator=(const SavesBench&) = delete;

  void Run() {
    for (uint32_t round = 0; round <= rounds_; ++round) {
      std::fprintf(stderr, "\rsaves: round %u of %u", round, rounds_);
      for (size_t i = 0; i < kRooms.size(); ++i) {
        const size_t room = (i + round) % kRooms.size();
        TimeOne(*optimizers_[room], taken_[room]);
      }
      if (round > 0) continue;  // the first one does not count
      taken_ = {};
    }
    std::fprintf(stderr, "\n");
  }

  void AddFigures(Report& report) const {
    const auto add = [&](const char* name, const Times& values, const char* unit,
                         const char* goal) {
      report.figures.push_back({name, SpreadOf(values), unit, goal});
    };
    const auto& [none, quarter, all] = taken_;
    const auto stall = [](double behind, double alone) { return behind - alone; };
    const Times stall_none = Paired(none.behind, none.alone, stall);
    const Times stall_quarter = Paired(quarter.behind, quarter.alone, stall);
    add("save_step_alone_seconds", none.alone, "s", "");
    add("save_seconds", none.save, "s", "");
    add("save_step_behind_vs_alone", Ratios(none.behind, none.alone), "", "");
    add("save_step_behind_vs_alone_quarter", Ratios(quarter.behind, quarter.alone), "", "");
    add("save_step_behind_vs_alone_all", Ratios(all.behind, all.alone), "", "at most 2");
    add("save_step_later_vs_alone_all", Ratios(all.later, all.alone), "", "at most 1.25");
    add("save_stall_quarter_vs_none", Ratios(stall_quarter, stall_none), "", "at most 0.75");
    add("save_time_all_vs_none", Ratios(all.save, none.save), "", "at most 1.1");
    add("save_time_quarter_vs_none", Ratios(quarter.save, none.save), "", "at most 1.1");
  }

 private:
  static double Step(const Optimizer& optimizer) {
    offload_ticket_t ticket = 0;
    auto options = Zeroed<offload_step_options_t>();
    options.flags = OFFLOAD_STEP_ASSUME_FINITE;
    const double begin = Now();
    Require(offload_optimizer_step(optimizer.get(), &options, &ticket), "offload_optimizer_step");
    Require(offload_optimizer_wait(optimizer.get(), ticket, -1), "offload_optimizer_wait");
    return Now() - begin;
  }

  void TimeOne(const Optimizer& optimizer, Taken& taken) {
    Step(optimizer);
    taken.alone.push_back(Step(optimizer));
    const std::string path = directory_ + "/saved";
    std::filesystem::remove_all(path);
    offload_ticket_t ticket = 0;
    auto options = Zeroed<offload_save_options_t>();
    options.path = path.c_str();
    const double begin = Now();
    Require(offload_optimizer_save(optimizer.get(), &options, &ticket), "offload_optimizer_save");
    double ended = 0;
    std::thread save([&] {
      Require(offload_optimizer_wait(optimizer.get(), ticket, -1), "offload_optimizer_wait");
      ended = Now();
    });
    taken.behind.push_back(Step(optimizer));
    Times later;
    for (size_t step = 1; step < kStepsBehind; ++step) later.push_back(Step(optimizer));
    taken.later.push_back(SpreadOf(later).median);
    save.join();
    taken.save.push_back(ended - begin);
  }

  const uint64_t elements_;  // of each param
  const uint32_t rounds_;
  std::string directory_;
  const Context context_;
  const Pages arrays_;
  std::vector<std::unique_ptr<Optimizer>> optimizers_;
  std::array<Taken, kRooms.size()> taken_;
};

}  // namespace

void MeasureCheckpoint(const Settings& settings, Report& report) {
  if (settings.checkpoint_mib == 0) return;
  CheckpointBench bench(settings);
  bench.TimeFiles();
  bench.AddRows(report);
  bench.AddFigures(report);
}

void MeasureSaves(const Settings& settings, Report& report) {
  SavesBench bench(settings);
  bench.Run();
  bench.AddFigures(report);
}

}  // namespace bench
