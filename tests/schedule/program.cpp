#include "program.h"

#include <algorithm>
#include <cstdio>

#include "problem.h"

namespace hybridopt::schedule {
namespace {

constexpr const char* kNames[] = {"step",
                                  "step with Inf",
                                  "wait",
                                  "wait briefly",
                                  "look",
                                  "stream_wait",
                                  "get_stats",
                                  "compare",
                                  "offload_params",
                                  "reload_params",
                                  "offload_grads",
                                  "offload_states",
                                  "reload_states",
                                  "set_device_fraction",
                                  "save",
                                  "load",
                                  "fail the device",
                                  "push",
                                  "release",
                                  "prefetch",
                                  "pop",
                                  "drop",
                                  "rollback",
                                  "wait for the stash",
                                  "synchronize"};
static_assert(std::size(kNames) == static_cast<size_t>(Kind::kKinds));

// In the order of ThreadComm::Fault.
constexpr const char* kFaultNames[] = {"is well", "dies",           "hangs",
                                       "fails",   "loses its call", "is late"};

// How often each kind is drawn.
constexpr uint64_t kWeights[] = {12, 1, 4, 3, 2, 3, 2, 2, 2, 3, 3, 2, 3,
                                 2,  2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0};
static_assert(std::size(kWeights) == static_cast<size_t>(Kind::kKinds));

Kind DrawKind(Random& random) {
  uint64_t sum = 0;
  for (uint64_t weight : kWeights) sum += weight;
  uint64_t at = random.Below(sum);
  size_t kind = 0;
  while (at >= kWeights[kind]) at -= kWeights[kind++];
  return static_cast<Kind>(kind);
}

Script DrawOwner(uint32_t trainer, Random& random) {
  Script script{trainer, {}};
  for (uint64_t count = 2 + random.Below(8); count > 0; --count)
    script.calls.push_back({DrawKind(random), random.Below(1000)});
  return script;
}

Script DrawObserver(uint32_t trainers, Random& random) {
  Script script{static_cast<uint32_t>(random.Below(trainers)), {}};
  for (uint64_t count = 1 + random.Below(4); count > 0; --count)
    script.calls.push_back(
        {random.OneOf({Kind::kWait, Kind::kWaitBriefly, Kind::kLook, Kind::kGetStats}),
         random.Below(1000)});
  return script;
}

Script DrawStashUser(uint32_t user, Random& random) {
  Script script{user, {}};
  for (uint64_t count = 4 + random.Below(16); count > 0; --count)
    script.calls.push_back(
        {random.OneOf({Kind::kPush, Kind::kPush, Kind::kPush, Kind::kRelease, Kind::kPrefetch,
                       Kind::kPrefetch, Kind::kPop, Kind::kPop, Kind::kDrop, Kind::kRollback,
                       Kind::kWaitForStash, Kind::kSynchronize}),
         random.Below(1000)});
  return script;
}

constexpr uint64_t kStreams = uint64_t{1} << 40;  // of random numbers, beside those of schedules

}  // namespace

Program::Program(Family drawn_family, uint64_t drawn_number)
    : family(drawn_family), number(drawn_number) {
  Random random(kStreams * (1 + static_cast<uint64_t>(family)) + number);
  sim = family == Family::kSim || (family == Family::kRanks && random.OneIn(2));
  if (family == Family::kRanks)
    world = trainers = static_cast<uint32_t>(2 + random.Below(2));
  else
    trainers = random.OneIn(3) ? static_cast<uint32_t>(2 + random.Below(2)) : 1;
  threads = static_cast<uint32_t>(1 + random.Below(3));
  variant = static_cast<uint32_t>(random.Below(2));
  options = OptimizerOptions(variant);
  options.movable = OFFLOAD_MOVABLE_PARAMS | OFFLOAD_MOVABLE_GRADS | OFFLOAD_MOVABLE_STATES;
  const int32_t executors =
      random.OneOf({OFFLOAD_EXECUTORS_AUTO, OFFLOAD_EXECUTORS_CPU, OFFLOAD_EXECUTORS_STREAMED});
  if (sim) options.host_executors = executors;
  options.device_fraction = random.OneOf({0.0, 0.3, 0.5, 1.0});
  options.staging_slots = static_cast<uint32_t>(2 + random.Below(2));
  if (sim && random.OneIn(2)) sim_delay_ns_max = uint64_t{1000} << random.Below(8);
  waits_at_end = random.OneIn(2);
  for (uint32_t trainer = 0; trainer < trainers; ++trainer)
    owners.push_back(world > 1 && trainer > 0 ? Script{trainer, owners[0].calls}
                                              : DrawOwner(trainer, random));
  for (uint64_t count = random.Below(3); count > 0; --count)
    observers.push_back(DrawObserver(trainers, random));
  if (world > 1 && random.OneIn(3)) {
    using Fault = ThreadComm::Fault;
    comm_fault =
        random.OneOf({Fault::kDie, Fault::kFail, Fault::kHang, Fault::kLose, Fault::kDelay});
    comm_fault_call = random.Below(8);
    // Only in this case destroy may come while the call hangs.
    if (comm_fault == Fault::kHang && random.OneIn(2)) waits_at_end = false;
  } else if (sim && world == 1 && random.OneIn(8)) {
    std::vector<Call>& calls = owners[0].calls;
    calls.insert(calls.begin() + static_cast<ptrdiff_t>(random.Below(calls.size() + 1)),
                 {Kind::kFailDevice, 0});
  }
  if (family == Family::kSim && random.OneIn(2))
    for (uint32_t users = static_cast<uint32_t>(1 + random.Below(2)), user = 0; user < users;
         ++user)
      stash_users.push_back(DrawStashUser(user, random));
  if (random.OneIn(2)) variant += 2;
  if (random.OneIn(2) && sim && options.host_executors != OFFLOAD_EXECUTORS_STREAMED)
    options.early_update_bytes = uint64_t{1} << (13 + random.Below(4));
  // In slots, which have as many bytes as a chunk has of a master.
  if (random.OneIn(2))
    options.save_buffer_bytes = options.chunk_elements * sizeof(float) * (1 + random.Below(20));
}

// Ranks make the same calls, so theirs are counted once.
void Program::Remove(const std::vector<uint32_t>& removed) {
  uint32_t next = 0;
  for (auto* scripts : {&owners, &observers, &stash_users})
    for (Script& script : *scripts) {
      if (world > 1 && scripts == &owners && script.trainer > 0) {
        script.calls = owners[0].calls;
        continue;
      }
      std::vector<Call> kept;
      for (const Call& call : script.calls)
        if (std::find(removed.begin(), removed.end(), next++) == removed.end())
          kept.push_back(call);
      script.calls = kept;
    }
}

uint32_t Program::call_count() const {
  size_t count = 0;  // as Remove numbers them
  for (const Script& script : owners)
    if (world == 1 || script.trainer == 0) count += script.calls.size();
  for (const auto* scripts : {&observers, &stash_users})
    for (const Script& script : *scripts) count += script.calls.size();
  return static_cast<uint32_t>(count);
}

bool Program::may_fail() const {
  const auto fails = [](const Call& call) { return call.kind == Kind::kFailDevice; };
  return comm_may_fail() || std::any_of(owners.begin(), owners.end(), [&](const Script& script) {
           return std::any_of(script.calls.begin(), script.calls.end(), fails);
         });
}

std::string Program::Text() const {
  char text[400];
  std::snprintf(text, sizeof(text),
                "%s, %u %s, %u update threads, variant %u, executors %d, fraction %.1f, %u staging "
                "slots, %llu bytes for early updates, %llu for saves, delays up to %llu ns, %s "
                "before destroy, rank 1 %s at "
                "call %llu\n",
                sim ? "sim" : "host", trainers, world > 1 ? "ranks" : "optimizers", threads,
                variant, options.host_executors, options.device_fraction, options.staging_slots,
                static_cast<unsigned long long>(options.early_update_bytes),
                static_cast<unsigned long long>(options.save_buffer_bytes),
                static_cast<unsigned long long>(sim_delay_ns_max),
                waits_at_end ? "waits" : "does not wait",
                kFaultNames[static_cast<size_t>(comm_fault)],
                static_cast<unsigned long long>(comm_fault_call));
  std::string all = text;
  for (const auto* scripts : {&owners, &observers, &stash_users})
    for (const Script& script : *scripts) {
      all += std::string(scripts == &owners      ? "  trainer "
                         : scripts == &observers ? "  observer of "
                                                 : "  user of the stash ") +
             std::to_string(script.trainer) + ":";
      for (const Call& call : script.calls)
        all += std::string(" ") + kNames[static_cast<size_t>(call.kind)] + "(" +
               std::to_string(call.number) + ")";
      all += "\n";
    }
  return all;
}

}  // namespace hybridopt::schedule
