// Rounds: every contender runs once in each round, so that the times of a round are measured under
// the same conditions. The speed of a machine changes from second to second; the ratios within a
// round change far less.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace bench {

using Times = std::vector<double>;  // seconds, one a round

double Seconds();  // of a monotonic clock

// Times each of `contenders` in `rounds` rounds, after one round that does not count. Each round
// starts with another contender, so that none always runs after the same one. `title` is for the
// progress line.
std::vector<Times> TimeRounds(const std::string& title, uint32_t rounds,
                              const std::vector<std::function<void()>>& contenders);

// Calls combine(a, b) on the two times of each round.
Times Paired(const Times& a, const Times& b, const std::function<double(double, double)>& combine);
Times Ratios(const Times& a, const Times& b);  // a / b

struct Spread {
  double q1;
  double median;
  double q3;
};
Spread SpreadOf(std::vector<double> values);

}  // namespace bench
