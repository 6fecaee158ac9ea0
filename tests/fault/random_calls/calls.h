// The calls that random_calls_test.cpp makes: each draws its input, calls the library, and compares
// the outcome with the model.
#pragma once

#include <cstdint>
#include <span>

#include "world.h"

namespace hybridopt::fault::random_calls {

struct Call {
  const char* name;
  void (*make)(World&);
  uint64_t weight;  // how often it is drawn
};

// By noun, one file each.
std::span<const Call> ContextCalls();
std::span<const Call> RegistrationCalls();
std::span<const Call> StepCalls();
std::span<const Call> MoveCalls();
std::span<const Call> CheckpointCalls();
std::span<const Call> DeviceCalls();
std::span<const Call> StashCalls();

const std::vector<Call>& EveryCall();

}  // namespace hybridopt::fault::random_calls
