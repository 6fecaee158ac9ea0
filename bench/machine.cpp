#include "machine.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <fstream>
#include <sstream>

namespace bench {
namespace {

// The rest of the first line that starts with `key`, without the colon and the blanks after `key`.
std::string FindLine(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.compare(0, key.size(), key) != 0) continue;
    const size_t value = line.find_first_not_of(": \t", key.size());
    return value == std::string::npos ? "" : line.substr(value);
  }
  return "";
}

double FindKibibytes(const char* path, const std::string& key) {
  double kibibytes = 0;
  std::istringstream(FindLine(path, key)) >> kibibytes;
  return kibibytes;
}

std::string CpuName() {
  const std::string name = FindLine("/proc/cpuinfo", "model name");
  if (!name.empty()) return name;
  utsname system;
  return uname(&system) == 0 ? system.machine : "unknown CPU";
}

std::string DateNow() {
  const std::time_t now = std::time(nullptr);
  std::tm utc;
  gmtime_r(&now, &utc);
  char text[32];
  std::strftime(text, sizeof(text), "%Y-%m-%d %H:%M UTC", &utc);
  return text;
}

double WallSeconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double OwnCpuSeconds() {
  rusage usage;
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// CPU seconds of all processes since boot, with the time that other virtual machines took.
double AllCpuSeconds() {
  double user = 0, nice = 0, system = 0, idle = 0, iowait = 0, irq = 0, softirq = 0, steal = 0;
  std::istringstream(FindLine("/proc/stat", "cpu ")) >> user >> nice >> system >> idle >> iowait >>
      irq >> softirq >> steal;
  return (user + nice + system + irq + softirq + steal) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

}  // namespace

Machine DescribeMachine() {
  Machine machine{};
  machine.cpu = CpuName();
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) == 0)
    machine.cpus = static_cast<uint32_t>(CPU_COUNT(&allowed));
  machine.driver = FindLine("/proc/driver/nvidia/version", "NVRM version");
  const auto memory = [](const char* key) {
    return static_cast<uint64_t>(FindKibibytes("/proc/meminfo", key)) * 1024;
  };
  machine.memory_bytes = memory("MemTotal");
  machine.memory_available_bytes = memory("MemAvailable");
  machine.date = DateNow();
  return machine;
}

double HugePageShare() {
  const double all = FindKibibytes("/proc/self/smaps_rollup", "Anonymous");
  return all > 0 ? FindKibibytes("/proc/self/smaps_rollup", "AnonHugePages") / all : 0;
}

Neighbours::Neighbours() : wall_(WallSeconds()), others_(AllCpuSeconds() - OwnCpuSeconds()) {}

double Neighbours::CpusBusy() const {
  const double others = AllCpuSeconds() - OwnCpuSeconds() - others_;
  return std::max(0.0, others / (WallSeconds() - wall_));
}

}  // namespace bench
