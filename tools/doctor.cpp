#include <sys/resource.h>

#include <algorithm>
#include <sstream>

#include "base/system.h"
#include "base/utf8.h"
#include "bench/machine.h"
#include "commands.h"
#include "given_paths.h"
#include "machine/stopwatch.h"
#include "measure.h"
#include "text.h"

namespace tool {
namespace {

// A link below this rate counts as slow; most machines that train models have a faster one.
constexpr double kSlowLink = 10e9;
constexpr double kSlowDisk = 0.5e9;

// One line of the output. `mend` is a command to type or a setting to change; empty: all is well.
struct Check {
  std::string name;
  std::string text;
  std::string mend;
};

// The results of doctor so far.
struct Findings {
  std::vector<Check> checks;
  Json machine = Json::object(), device = nullptr;
  Json measured = Json::object();

  void Good(const char* name, const std::string& text) { checks.push_back({name, text, ""}); }
  void Mend(const char* name, const std::string& text, const std::string& mend) {
    checks.push_back({name, text, mend});
  }
  // Adds a line; `mend` is shown if it is not `good`.
  void Add(const char* name, const std::string& text, bool good, const std::string& mend) {
    checks.push_back({name, text, good ? "" : mend});
  }
};

std::string GigabytesText(double bytes_per_second) {
  return NumberText(bytes_per_second * 1e-9) + " GB/s";
}

// ---------------------------------------------------------------------------- what there is --

void LookAtCpus(const bench::Machine& machine, const offload_context_info_t& info,
                Findings& findings) {
  const uint32_t granted = hybridopt::system::CgroupCpuLimit();
  const std::string isa = info.isa;
  std::string text = machine.cpu + ", " + Counted(info.cpus_allowed, "CPU") + " on " +
                     Counted(info.nodes, "NUMA node") + ", " + isa + ", " +
                     Counted(info.threads, "update thread");
  const bool limited = granted != 0 && granted < info.cpus_allowed;
  if (limited) text += "; the cgroup grants the time of " + Counted(granted, "CPU");
  if (isa == "reference")
    findings.Mend("CPU", text + "; the reference kernels are slow", "unset HYBRIDOPT_ISA");
  else
    findings.Add("CPU", text, !limited,
                 "docker run --cpus=" + std::to_string(info.cpus_allowed) +
                     " ... (in Kubernetes: resources.limits.cpu)");
  findings.machine = {{"cpu", machine.cpu},
                      {"cpus", info.cpus_allowed},
                      {"cgroup_cpus", granted == 0 ? Json(nullptr) : Json(granted)},
                      {"nodes", info.nodes},
                      {"isa", isa},
                      {"threads", info.threads}};
}

// Called after the library has started its threads, because only then does it know where it can
// place memory.
void LookAtNuma(const offload_context_info_t& info, Findings& findings) {
  const char* const rungs[] = {"the system decides where memory lies",
                               "memory lies where threads touch it first",
                               "memory is placed near the threads"};
  const char* const rung = rungs[std::clamp(info.numa_rung, 0, 2)];
  const bool placed = info.nodes == 1 || info.numa_rung == OFFLOAD_NUMA_PLACED;
  findings.Add("NUMA", Counted(info.nodes, "node") + ", " + rung, placed,
               "apt-get install libnuma1; in a container: docker run --cap-add=SYS_NICE ...");
  findings.machine["numa_rung"] = info.numa_rung;
  findings.machine["notes"] = info.notes;
}

void LookAtMemory(const bench::Machine& machine, Findings& findings) {
  const uint64_t available = hybridopt::system::AvailableBytes();
  // The kernel's estimate changes from moment to moment.
  const bool limited = available < machine.memory_available_bytes / 10 * 9;
  std::string text = SizeText(machine.memory_bytes) + ", of it " + SizeText(available) +
                     " available to this process";
  if (limited) text += ", " + SizeText(machine.memory_available_bytes) + " to the machine";
  findings.Add("memory", text, !limited,
               "docker run --memory=... (in Kubernetes: resources.limits.memory); "
               "numactl --membind leaves nodes out too");
  findings.machine["memory_bytes"] = machine.memory_bytes;
  findings.machine["memory_available_bytes"] = available;
}

constexpr char kMendMemlock[] =
    "ulimit -l unlimited; in a container: docker run --ulimit memlock=-1 ...";

void LookAtMemlock(bool has_gpu, Findings& findings) {
  rlimit limit{};
  const bool known = getrlimit(RLIMIT_MEMLOCK, &limit) == 0;
  const bool unlimited = known && limit.rlim_cur == RLIM_INFINITY;
  findings.Add("memlock",
               unlimited ? "unlimited"
                         : SizeText(limit.rlim_cur) + " may be locked" +
                               (has_gpu ? ", which some drivers take as the limit of what they pin"
                                        : "; without a GPU nothing is locked"),
               unlimited || !has_gpu, kMendMemlock);
  findings.machine["memlock_bytes"] = unlimited ? Json(nullptr) : Json(limit.rlim_cur);
}

void LookAtHugePages(Findings& findings) {
  const bool has = hybridopt::system::HugePagesAvailable();
  findings.Add("huge pages", has ? "on" : "transparent_hugepage is off: updates are slower", has,
               "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled");
  findings.machine["huge_pages"] = has;
}

// ---------------------------------------------------------------------------- what is measured --

constexpr char kTakeLess[] = "hybridopt doctor --memory 256MiB takes less";

// A measurement that failed is a line of the output too.
template <typename T>
const T* Took(const Result<T>& result, const char* name, const char* mend, Findings& findings) {
  if (result.ok()) return &result.value();
  findings.Mend(name, "not measured: " + result.status().message(), mend);
  return nullptr;
}

Result<double> BestMemoryRate(uint32_t threads, uint64_t bytes) {
  HYBRIDOPT_ASSIGN(const auto memory, MemoryRate::Make(threads, bytes));
  double best = 0;
  for (int pass = 0; pass < 5; ++pass) {
    HYBRIDOPT_ASSIGN(const double rate, memory->Measure());
    best = std::max(best, rate);
  }
  return best;
}

void MeasureMemory(uint32_t threads, uint64_t bytes, Findings& findings) {
  const Result<double> rate = BestMemoryRate(threads, bytes);
  const double* const best = Took(rate, "memory rate", kTakeLess, findings);
  findings.measured["memory_bytes_per_s"] = best == nullptr ? Json(nullptr) : Json(*best);
  if (best != nullptr)
    findings.Good("memory rate",
                  GigabytesText(*best) + " read and written by " + Counted(threads, "thread"));
}

void AddUpdates(const Context& context, const std::vector<const Executor*>& executors,
                const char* name, uint64_t elements, Findings& findings) {
  for (const Layout& layout : kLayouts) {
    std::string text;
    for (const Executor* const executor : executors) {
      const auto measure = [&]() -> Result<double> {
        HYBRIDOPT_ASSIGN(const auto training,
                         SmallTraining::Make(context, layout, *executor, elements));
        return training->MedianStep();
      };
      const Result<double> result = measure();
      const double* const seconds = Took(result, name, kTakeLess, findings);
      if (seconds == nullptr) continue;
      const double rate = static_cast<double>(elements) / *seconds;
      findings.measured["updates"].push_back(
          {{"layout", layout.name}, {"executor", executor->name}, {"params_per_s", rate}});
      text += (text.empty() ? "" : ", ") + NumberText(rate * 1e-9) + executor->text;
    }
    if (!text.empty()) findings.Good(name, text + " G params/s with " + layout.text);
  }
}

void MeasurePinned(const Context& context, uint64_t bytes_max, Findings& findings) {
  const auto result = ClimbPinned(context, bytes_max);
  const auto* const rungs = Took(result, "pinned", kMendMemlock, findings);
  findings.measured["pinned"] = Json::array();
  if (rungs == nullptr) return;
  std::string text;
  for (const PinnedRung& rung : *rungs) {
    findings.measured["pinned"].push_back(
        {{"bytes", rung.bytes}, {"pinned_bytes", rung.pinned_bytes}, {"seconds", rung.seconds}});
    text += (text.empty() ? "" : ", ") + SizeText(rung.pinned_bytes) + " in " +
            NumberText(rung.seconds) + " s";
  }
  const PinnedRung& last = rungs->back();
  const bool all = last.pinned_bytes == last.bytes;
  if (!all) text += "; " + SizeText(last.bytes) + " were asked for";
  findings.Add("pinned", text, all, kMendMemlock);
}

void MeasureLinkTo(const Context& context, uint64_t bytes, bool is_gpu, Findings& findings) {
  const Result<LinkRates> result = MeasureLink(context, bytes);
  const LinkRates* const rates = Took(result, "link", kMendMemlock, findings);
  findings.measured["link"] = nullptr;
  if (rates == nullptr) return;
  findings.measured["link"] = {{"down_bytes_per_s", rates->down},
                               {"up_bytes_per_s", rates->up},
                               {"both_bytes_per_s", rates->both}};
  const bool fast = !is_gpu || std::min(rates->down, rates->up) >= kSlowLink;
  findings.Add(
      "link",
      "to the host " + GigabytesText(rates->down) + ", to the device " + GigabytesText(rates->up) +
          ", both at once " + GigabytesText(rates->both),
      fast, "nvidia-smi -q -d PERFORMANCE,CLOCK; nvidia-smi topo -m (width and node of the link)");
}

void MeasureDiskAt(const Context& host, const DoctorOptions& options, uint64_t elements,
                   Findings& findings) {
  findings.measured["disk"] = nullptr;
  if (options.directory.empty()) return;
  const Result<DiskRates> result = MeasureDisk(host, options.directory, elements);
  const DiskRates* const rates = Took(result, "disk", "choose another directory", findings);
  if (rates == nullptr) return;
  findings.measured["disk"] = {{"directory", options.directory},
                               {"bytes", rates->bytes},
                               {"write_bytes_per_s", rates->write},
                               {"read_bytes_per_s", rates->read}};
  findings.Add("disk",
               options.directory + ": a checkpoint is written at " + GigabytesText(rates->write) +
                   ", read at " + GigabytesText(rates->read),
               rates->write >= kSlowDisk,
               "save to a local NVMe disk first: a slow one holds up the next save, not the steps");
}

// ------------------------------------------------------------------------------------- devices --

void LookAtDevice(const bench::Machine& machine, const offload_context_info_t& info,
                  Findings& findings) {
  const bool is_gpu = info.device_kind == OFFLOAD_DEVICE_CUDA;
  findings.Good(is_gpu ? "GPU" : "device", std::string(info.device_name) + ", " +
                                               SizeText(info.device_memory_bytes) + ", of it " +
                                               SizeText(info.device_memory_free_bytes) + " free");
  if (is_gpu)
    findings.Add("driver", machine.driver.empty() ? "not known" : machine.driver,
                 !machine.driver.empty(), "cat /proc/driver/nvidia/version");
  findings.device = {{"kind", is_gpu ? "cuda" : "sim"},
                     {"name", info.device_name},
                     {"driver", machine.driver},
                     {"memory_bytes", info.device_memory_bytes},
                     {"memory_free_bytes", info.device_memory_free_bytes}};
}

// What to do where no GPU can be used. A build without CUDA cannot know whether there is one.
const char* MendNoGpu() {
  const bool has_cuda = std::string(offload_build_info()).ends_with(" cuda");
  return has_cuda
             ? "nothing if there is no GPU; else nvidia-smi must list it; in a container: "
               "docker run --gpus all ..."
             : "nothing if there is no GPU; else, where nvcc is: cmake -DHYBRIDOPT_CUDA=ON ..., or "
               "pip install -C cmake.define.HYBRIDOPT_CUDA=ON ./bindings/python";
}

// All measurements that need the device. A missing GPU is a line of the output too.
Status MeasureDevice(const DoctorOptions& options, const bench::Machine& machine,
                     const Sizes& sizes, StageLine& stage, Findings& findings) {
  if (options.device == "none") return {};
  const Result<std::unique_ptr<Context>> opened = OpenDevice(options.device);
  if (!opened.ok()) {
    if (!options.device.empty()) return opened.status();
    findings.Mend("GPU", "none: " + opened.status().message(), MendNoGpu());
    return {};
  }
  const Context& context = *opened.value();
  HYBRIDOPT_ASSIGN(const offload_context_info_t info, InfoOf(context));
  const bool is_gpu = info.device_kind == OFFLOAD_DEVICE_CUDA;
  LookAtDevice(machine, info, findings);
  stage.Show("pinning memory");
  MeasurePinned(context, sizes.pinned_bytes, findings);
  stage.Show("measuring the link");
  MeasureLinkTo(context, sizes.memory_bytes, is_gpu, findings);
  stage.Show("measuring steps with the device");
  std::vector<const Executor*> executors;
  for (const Executor& executor : kExecutors)
    if (!executor.on_host) executors.push_back(&executor);
  const uint64_t most = info.device_memory_free_bytes / (2 * kTrainingBytes);
  AddUpdates(context, executors, "step", std::min(sizes.elements, most), findings);
  return {};
}

std::string TextOf(const Findings& findings, const bench::Machine& machine, double seconds) {
  size_t width = 0;
  for (const Check& check : findings.checks) width = std::max(width, check.name.size());
  std::ostringstream out;
  out << offload_build_info() << "\n" << machine.date << ", in " << NumberText(seconds) << " s\n\n";
  for (const Check& check : findings.checks) {
    const std::string name = check.name + std::string(width - check.name.size(), ' ');
    out << (check.mend.empty() ? Green("ok  ") : Yellow("mend")) << "  " << name << "  "
        << hybridopt::Printable(check.text) << "\n";
    if (!check.mend.empty())
      out << std::string(width + 8, ' ') << Yellow("-> ") << hybridopt::Printable(check.mend)
          << "\n";
  }
  return out.str();
}

Json JsonOf(const Findings& findings, const bench::Machine& machine, const Sizes& sizes) {
  Json checks = Json::array();
  for (const Check& check : findings.checks)
    checks.push_back({{"name", check.name},
                      {"good", check.mend.empty()},
                      {"text", check.text},
                      {"mend", check.mend.empty() ? Json(nullptr) : Json(check.mend)}});
  return {{"status", offload_status_name(OFFLOAD_OK)},
          {"doctor", kDoctorVersion},
          {"build", offload_build_info()},
          {"date", machine.date},
          {"machine", findings.machine},
          {"device", findings.device},
          {"elements", sizes.elements},
          {"measured", findings.measured},
          {"checks", checks}};
}

}  // namespace

Result<Report> Doctor(const DoctorOptions& options) {
  const int64_t begin_ns = hybridopt::system::NowNs();
  if (!options.directory.empty()) HYBRIDOPT_TRY(CheckDirectory("DIR", options.directory));
  HYBRIDOPT_ASSIGN(const Sizes sizes, SizesOf(options.memory_bytes));
  const bench::Machine machine = bench::DescribeMachine();
  HYBRIDOPT_ASSIGN(const auto host, MakeContext(OFFLOAD_DEVICE_HOST));
  HYBRIDOPT_ASSIGN(const offload_context_info_t info, InfoOf(*host));
  Findings findings;
  findings.measured["updates"] = Json::array();
  StageLine stage;
  const bench::Neighbours neighbours;
  LookAtCpus(machine, info, findings);
  LookAtMemory(machine, findings);
  LookAtHugePages(findings);
  stage.Show("measuring memory");
  MeasureMemory(info.threads, sizes.memory_bytes, findings);
  stage.Show("measuring steps on the host");
  AddUpdates(*host, {&kExecutors[0]}, "update", sizes.elements, findings);
  HYBRIDOPT_ASSIGN(const offload_context_info_t started, InfoOf(*host));
  LookAtNuma(started, findings);
  HYBRIDOPT_TRY(MeasureDevice(options, machine, sizes, stage, findings));
  LookAtMemlock(!findings.device.is_null() && findings.device["kind"] == "cuda", findings);
  stage.Show("measuring the disk");
  MeasureDiskAt(*host, options, sizes.elements, findings);
  const double busy = neighbours.CpusBusy();
  findings.measured["cpus_of_others"] = busy;
  findings.Add("neighbours", "other processes kept " + NumberText(busy) + " CPUs busy meanwhile",
               busy <= kNoisyCpus * info.cpus_allowed,
               "run it again while the machine is quiet: these figures are too low");
  return Report{TextOf(findings, machine, hybridopt::SecondsSince(begin_ns)),
                JsonOf(findings, machine, sizes),
                {}};
}

}  // namespace tool
