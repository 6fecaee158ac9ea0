#include "rounds.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>

namespace bench {
namespace {

double Time(const std::function<void()>& body) {
  const double begin = Seconds();
  body();
  return Seconds() - begin;
}

void ShowProgress(const std::string& title, uint32_t round, uint32_t rounds) {
  if (isatty(STDERR_FILENO) == 0) return;
  std::fprintf(stderr, "\r\033[K%s: round %u of %u", title.c_str(), round, rounds);
  if (round == rounds) std::fputs("\r\033[K", stderr);
}

}  // namespace

double Seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::vector<Times> TimeRounds(const std::string& title, uint32_t rounds,
                              const std::vector<std::function<void()>>& contenders) {
  for (const auto& contender : contenders) contender();
  std::vector<Times> times(contenders.size());
  for (uint32_t round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      const size_t contender = (round + i) % contenders.size();
      times[contender].push_back(Time(contenders[contender]));
    }
    ShowProgress(title, round + 1, rounds);
  }
  return times;
}

Times Paired(const Times& a, const Times& b, const std::function<double(double, double)>& combine) {
  Times combined;
  for (size_t round = 0; round < a.size(); ++round) combined.push_back(combine(a[round], b[round]));
  return combined;
}

Times Ratios(const Times& a, const Times& b) {
  return Paired(a, b, [](double x, double y) { return x / y; });
}

Spread SpreadOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto quantile = [&](double fraction) {
    const double at = fraction * static_cast<double>(values.size() - 1);
    const size_t below = static_cast<size_t>(at);
    const size_t above = std::min(below + 1, values.size() - 1);
    return std::lerp(values[below], values[above], at - static_cast<double>(below));
  };
  return {quantile(0.25), quantile(0.5), quantile(0.75)};
}

}  // namespace bench
