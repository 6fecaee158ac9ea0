// Bytes as calls of the ABI: every two bytes decide about the next call, or about one of its
// arguments. The model of fault/random_calls knows which results are allowed.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>

#include "../fault/random_calls/world.h"
#include "base/check.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using hybridopt::fault::random_calls::World;
  World world(hybridopt::Random(data, size));
  while (world.random.has_bytes() && !testing::Test::HasFailure()) world.MakeCall();
  world.DestroyAll();
  HYBRIDOPT_CHECK(!testing::Test::HasFailure());
  return 0;
}
