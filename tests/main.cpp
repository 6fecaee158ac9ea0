// The main function of the test programs.
#include <gtest/gtest.h>

#include <cinttypes>
#include <cstdio>

#include "random.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  // Printed at the start, so that it can be read even after a crash.
  std::printf("What is drawn at random comes from HYBRIDOPT_TEST_SEED=%" PRIu64 "\n",
              hybridopt::TestSeed());
  std::fflush(stdout);
  return RUN_ALL_TESTS();
}
