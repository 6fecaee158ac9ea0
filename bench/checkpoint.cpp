#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "library.h"
#include "pages.h"
#include "suites.h"

namespace bench {
namespace {

constexpr uint64_t kBlockBytes = uint64_t{8} << 20;
constexpr uint32_t kDepth = 4;  // blocks under way at once, for all contenders
constexpr uint32_t kRoundsMax = 9;

[[noreturn]] void Fail(const std::string& what) {
  std::perror(("hybridopt_bench: " + what).c_str());
  std::exit(1);
}

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Kibibytes of one line of /proc/self/status.
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

// A file of so many bytes, by as many threads as the library has, and nothing else done.
void EachBlock(int file, uint64_t bytes, std::byte* memory, bool writing) {
  std::atomic<uint64_t> next = 0;
  std::vector<std::thread> threads;
  for (uint32_t i = 0; i < kDepth; ++i)
    threads.emplace_back([&, i] {
      for (uint64_t at; (at = next.fetch_add(kBlockBytes)) < bytes;) {
        std::byte* const block = memory + i * kBlockBytes;
        const uint64_t now = std::min(kBlockBytes, bytes - at);
        for (uint64_t done = 0; done < now;) {
          const auto offset = static_cast<off_t>(at + done);
          const ssize_t moved = writing ? pwrite(file, block + done, now - done, offset)
                                        : pread(file, block + done, now - done, offset);
          if (moved <= 0) Fail("raw file");
          done += static_cast<uint64_t>(moved);
        }
      }
    });
  for (std::thread& thread : threads) thread.join();
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

// As torch.save does it, and then made safe: one thread, through the page cache.
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

// How much more memory the process holds at the worst moment of `work`.
double ExtraMiB(const std::function<void()>& work) {
  std::ofstream("/proc/self/clear_refs") << "5";  // the high-water mark begins anew
  const double before = StatusKiB("VmRSS:");
  work();
  return std::max(0.0, StatusKiB("VmHWM:") - before) / 1024;
}

}  // namespace

void MeasureCheckpoint(const Settings& settings, Report& report) {
  if (settings.checkpoint_mib == 0) return;
  // Whole units of direct access.
  const uint64_t elements = (settings.checkpoint_mib << 20) / (3 * sizeof(float)) / 1024 * 1024;
  const uint64_t bytes = elements * 3 * sizeof(float);
  const uint32_t rounds = std::min(settings.rounds, kRoundsMax);
  std::string directory = settings.checkpoint_dir + "/hybridopt_bench-XXXXXX";
  if (mkdtemp(directory.data()) == nullptr) Fail(directory);
  const std::string raw = directory + "/raw", buffered = directory + "/buffered",
                    saved = directory + "/saved";

  const Context context(OFFLOAD_DEVICE_HOST, settings.threads);
  const Pages arrays(2 * elements * sizeof(uint16_t));
  auto* const params = arrays.at<uint16_t>();
  auto* const grads = params + elements;
  std::fill_n(params, elements, uint16_t{0x3f80});  // 1.0
  std::fill_n(grads, elements, uint16_t{0x3c00});   // 0.0078
  Optimizer optimizer(context, params, grads, {1, elements, elements});
  const Pages blocks(kDepth * kBlockBytes);
  std::memset(blocks.at<std::byte>(), 0x5a, kDepth * kBlockBytes);

  std::vector<Times> times(7);
  const auto timed = [&](size_t contender, const std::function<void()>& work) {
    const double begin = Now();
    work();
    times[contender].push_back(Now() - begin);
  };
  Times extra_mib;
  const auto save = [&] {
    std::filesystem::remove_all(saved);
    extra_mib.push_back(ExtraMiB([&] {
      timed(1, [&] {
        Save(optimizer, saved);
        Require(offload_optimizer_wait(optimizer.get(), 0, -1), "offload_optimizer_wait");
      });
    }));
  };
  const auto write_raw = [&] {
    std::filesystem::remove(raw);
    timed(0, [&] { WriteRaw(raw, bytes, blocks.at<std::byte>()); });
  };
  save();  // something to read in the first round
  write_raw();
  TimeRounds("checkpoint", rounds,
             {write_raw, save,
              [&] {
                timed(2, [&] { WriteBuffered(buffered, bytes, blocks.at<std::byte>()); });
                std::filesystem::remove(buffered);
              },
              [&] { timed(3, [&] { ReadRaw(raw, bytes, blocks.at<std::byte>()); }); },
              [&] { timed(4, [&] { Load(optimizer, saved, OFFLOAD_LOAD_NO_VERIFY); }); },
              [&] {
                timed(5, [&] {
                  ReadRaw(raw, bytes, blocks.at<std::byte>());
                  ReadRaw(raw, bytes, blocks.at<std::byte>());
                });
              },
              [&] { timed(6, [&] { Load(optimizer, saved, 0); }); }});
  for (Times& all : times) all.erase(all.begin(), all.end() - rounds);  // the warm-up

  Times alone, behind;
  for (uint32_t round = 0; round < rounds; ++round) {
    optimizer.Step(OFFLOAD_STEP_ASSUME_FINITE);
    alone.push_back(optimizer.LastResult().total_seconds);
    std::filesystem::remove_all(saved);
    Save(optimizer, saved);
    optimizer.Step(OFFLOAD_STEP_ASSUME_FINITE);
    behind.push_back(optimizer.LastResult().total_seconds);
  }
  std::filesystem::remove_all(directory);

  const char* names[] = {"checkpoint, raw direct writer",
                         "checkpoint, save",
                         "checkpoint, buffered, 1 thread",
                         "checkpoint, raw direct reader",
                         "checkpoint, load, hashes not compared",
                         "checkpoint, raw direct reader, twice",
                         "checkpoint, load"};
  const size_t against[] = {0, 0, 0, 3, 3, 5, 5};
  for (size_t i = 0; i < times.size(); ++i) {
    report.rows.push_back({names[i], kDepth, elements, 3 * sizeof(float), SpreadOf(times[i]),
                           SpreadOf(Ratios(times[against[i]], times[i]))});
  }
  const auto rate = [&](const Times& seconds) {
    Times rates;
    for (double each : seconds) rates.push_back(static_cast<double>(bytes) / each * 1e-9);
    return SpreadOf(rates);
  };
  report.figures.push_back({"save_gb_per_s", rate(times[1]), "GB/s", ""});
  report.figures.push_back(
      {"save_vs_raw", SpreadOf(Ratios(times[0], times[1])), "", "at least 0.85"});
  report.figures.push_back({"save_vs_buffered", SpreadOf(Ratios(times[2], times[1])), "", ""});
  // A load reads everything twice, once to compare all hashes before anything is replaced and once
  // to replace. It is held against a reader that does the same, and without its first pass against
  // one that reads once.
  report.figures.push_back({"load_unverified_gb_per_s", rate(times[4]), "GB/s", ""});
  report.figures.push_back(
      {"load_vs_raw", SpreadOf(Ratios(times[3], times[4])), "", "at least 0.85"});
  report.figures.push_back({"load_verified_gb_per_s", rate(times[6]), "GB/s", ""});
  report.figures.push_back(
      {"load_verified_vs_raw_twice", SpreadOf(Ratios(times[5], times[6])), "", "at least 0.85"});
  report.figures.push_back(
      {"load_verified_vs_raw_once", SpreadOf(Ratios(times[3], times[6])), "", ""});
  report.figures.push_back({"save_extra_rss_mib", SpreadOf(extra_mib), "MiB", "at most 33"});
  report.figures.push_back({"step_behind_save_vs_alone", SpreadOf(Ratios(behind, alone)), "", ""});
}

}  // namespace bench
