// What tests draw at random. All of it comes from one seed, HYBRIDOPT_TEST_SEED in the environment
// (0 if absent), which every test program prints when it starts.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <utility>
#include <vector>

namespace hybridopt {

inline uint64_t SeedOfEnvironment() {
  const char* text = std::getenv("HYBRIDOPT_TEST_SEED");
  if (text == nullptr) return 0;
  char* end = nullptr;
  const uint64_t number = std::strtoull(text, &end, 10);
  if (end == text || *end != '\0') {
    std::fprintf(stderr, "HYBRIDOPT_TEST_SEED must be a number, got \"%s\"\n", text);
    std::exit(2);
  }
  return number;
}

inline uint64_t& TestSeed() {
  static uint64_t seed = SeedOfEnvironment();
  return seed;
}

// While this object lives, the seed is 0 and the environment is ignored: for results that are
// recorded.
class PinnedSeed {
 public:
  PinnedSeed() : seed_(std::exchange(TestSeed(), 0)) {}
  ~PinnedSeed() { TestSeed() = seed_; }
  PinnedSeed(const PinnedSeed&) = delete;
  PinnedSeed& operator=(const PinnedSeed&) = delete;

 private:
  const uint64_t seed_;
};

// splitmix64: the same numbers with every standard library. Each `stream` has numbers of its own.
class Random {
 public:
  explicit Random(uint64_t stream) : state_(Mix(TestSeed()) + Mix(stream + kStep)) {}
  // Each number comes from two of the bytes, which live as long as this object. When they are used
  // up, all further numbers follow from the last one.
  Random(const uint8_t* bytes, uint64_t count) : bytes_(bytes), bytes_left_(count) {}
  bool has_bytes() const { return bytes_left_ >= 2; }

  uint64_t Next() {
    if (!has_bytes()) return Mix(state_ += kStep);
    state_ = uint64_t{bytes_[0]} | uint64_t{bytes_[1]} << 8;
    bytes_ += 2;
    bytes_left_ -= 2;
    return Mix(state_);
  }
  uint32_t Bits() { return static_cast<uint32_t>(Next() >> 32); }
  uint64_t Below(uint64_t bound) { return Next() % bound; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  bool Chance(uint64_t percent) { return Below(100) < percent; }
  // In [0, 1).
  double Unit() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  double Between(double low, double high) { return low + (high - low) * Unit(); }
  // In (-1, 1), never 0.
  float SignedUnit() { return (static_cast<float>(Bits() >> 9) - 4194303.5f) / 4194304.0f; }
  // About a normal distribution.
  double Noise() {
    const double first = SignedUnit(), second = SignedUnit(), third = SignedUnit();
    return first + second + third;
  }
  template <typename T>
  T OneOf(std::initializer_list<T> values) {
    return values.begin()[Below(values.size())];
  }
  template <typename T>
  void Shuffle(std::vector<T>& items) {
    for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[Below(i)]);
  }

 private:
  static constexpr uint64_t kStep = 0x9e3779b97f4a7c15;
  static uint64_t Mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }

  uint64_t state_ = 0;
  const uint8_t* bytes_ = nullptr;
  uint64_t bytes_left_ = 0;
};

}  // namespace hybridopt
