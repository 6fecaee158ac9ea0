// The main function of the test programs.
#include <gtest/gtest.h>

#include <cinttypes>
#include <cstdio>

#include "random.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  // At the start, so that it can be read after a crash too.
  std::printf("What is drawn at random comes from HYBRIDOPT_TEST_SEED=%" PRIu64 "\n",
              hybridopt::TestSeed());
  std::fflush(stdout);
  return RUN_ALL_TESTS();
}
