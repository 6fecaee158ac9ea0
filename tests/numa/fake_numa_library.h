// The libraries that replace libnuma (tests/numa/fake_numa.c), for tests in C++. When a test is
// built, FAKE_NUMA names the folder with these libraries.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

#include "fake_numa.h"
#include "memory/numa.h"

namespace hybridopt {

inline std::string FakeNumaPath(const std::string& which) {
  return FAKE_NUMA "/" + which + "/libnuma.so.1";
}

// The library without faults, on a machine that the test describes. One object at a time.
class FakeNuma {
 public:
  explicit FakeNuma(unsigned long memory_nodes)
      : library_(dlopen(FakeNumaPath("good").c_str(), RTLD_NOW | RTLD_LOCAL)),
        numa_(Numa::Open(FakeNumaPath("good").c_str())) {
    EXPECT_TRUE(numa_.ok()) << numa_.status().message();
    machine() = fake_numa_t{};
    machine().memory_nodes = memory_nodes;
  }

  fake_numa_t& machine() const { return *static_cast<fake_numa_t*>(dlsym(library_, "fake_numa")); }
  // The latest policy of the range that holds `data`; NULL: none.
  const fake_numa_range_t* RangeOf(const void* data) const {
    return reinterpret_cast<fake_numa_range_of_t>(dlsym(library_, "fake_numa_range_of"))(data);
  }
  const Result<Numa>& result() const { return numa_; }
  const Numa& numa() const { return numa_.value(); }

 private:
  void* const library_;
  const Result<Numa> numa_;
};

}  // namespace hybridopt
