// Bad input through the public ABI, one row for each case. A row has the call, the status, and the
// words that the message must have: the field, what was got, what was expected. Afterwards a valid
// sequence must go on as if the call had not been made: same plan, and the same bits as a run
// without it.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "trainer.h"

namespace hybridopt::fault {

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();

inline void* Address(uint64_t bits) { return reinterpret_cast<void*>(bits); }
inline void* Behind(void* data, int64_t bytes) { return static_cast<char*>(data) + bytes; }

// When the call comes: with two of three params registered, or after commit and one step.
enum class Phase { kRegistering, kCommitted };

struct Row {
  const char* name;
  int32_t status;
  std::vector<std::string> words;
  std::function<int32_t(Trainer&)> call;
  int32_t algorithm = OFFLOAD_ADAMW;
};

inline std::string RowName(const testing::TestParamInfo<Row>& info) { return info.param.name; }
inline void PrintTo(const Row& row, std::ostream* out) { *out << row.name; }

// The outcome of a run: the bytes of its plan, and its bits.
struct Outcome {
  offload_plan_t plan;
  std::vector<unsigned char> bits;
};

inline Outcome Finish(Trainer& trainer, Phase phase) {
  if (phase == Phase::kRegistering) {
    trainer.AddParams(2, 3);
    trainer.Commit();
    trainer.Steps(0, 1);
  }
  // Binds the same gradients: a refused bind must leave no trace.
  std::vector<offload_binding_t> bindings;
  for (uint32_t i = 0; i < trainer.size(); ++i) {
    bindings.push_back(Make<offload_binding_t>());
    bindings.back().param = i;
    bindings.back().grad = trainer.grads[i];
  }
  EXPECT_OFFLOAD_OK(offload_optimizer_bind(trainer.optimizer, bindings.data(), trainer.size()));
  trainer.Steps(1, 3);
  Outcome outcome{Make<offload_plan_t>(), trainer.Bits()};
  EXPECT_OFFLOAD_OK(offload_optimizer_plan(trainer.optimizer, &outcome.plan));
  outcome.plan.host_available_bytes = 0;  // of the machine, not of this run
  return outcome;
}

inline void Begin(Trainer& trainer, Phase phase) {
  trainer.AddParams(0, 2);
  if (phase == Phase::kRegistering) return;
  trainer.AddParams(2, 3);
  trainer.Commit();
  trainer.Steps(0, 1);
}

inline void RunRow(const Row& row, int32_t device_kind, Phase phase) {
  RunOptions run;
  run.device_kind = device_kind;
  run.algorithm = row.algorithm;
  Trainer alone(run), trainer(run);
  Begin(alone, phase);
  Begin(trainer, phase);
  ExpectError(row.call(trainer), row.status, row.words);
  const Outcome expected = Finish(alone, phase), got = Finish(trainer, phase);
  EXPECT_EQ(std::memcmp(&expected.plan, &got.plan, sizeof(got.plan)), 0);
  EXPECT_EQ(expected.bits, got.bits);
}

class Registering : public testing::TestWithParam<Row> {};
class Committed : public testing::TestWithParam<Row> {};
class OnSim : public testing::TestWithParam<Row> {};
class Anytime : public testing::TestWithParam<Row> {};

TEST_P(Registering, IsRefusedAndChangesNothing) {
  RunRow(GetParam(), OFFLOAD_DEVICE_HOST, Phase::kRegistering);
  RunRow(GetParam(), OFFLOAD_DEVICE_SIM, Phase::kRegistering);
}
TEST_P(Committed, IsRefusedAndChangesNothing) {
  RunRow(GetParam(), OFFLOAD_DEVICE_HOST, Phase::kCommitted);
  RunRow(GetParam(), OFFLOAD_DEVICE_SIM, Phase::kCommitted);
}
TEST_P(OnSim, IsRefusedAndChangesNothing) {
  RunRow(GetParam(), OFFLOAD_DEVICE_SIM, Phase::kRegistering);
}
TEST_P(Anytime, IsRefusedAndChangesNothing) {
  for (int32_t device_kind : {OFFLOAD_DEVICE_HOST, OFFLOAD_DEVICE_SIM})
    for (Phase phase : {Phase::kRegistering, Phase::kCommitted})
      RunRow(GetParam(), device_kind, phase);
}

// Each program has rows for some of these.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Registering);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Committed);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OnSim);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Anytime);

// A struct followed by `extra` bytes, the last of which is not zero.
template <typename Struct>
struct WithTail {
  Struct value = Make<Struct>();
  unsigned char tail[8] = {};
  WithTail() {
    value.struct_size = sizeof(WithTail);
    tail[7] = 1;
  }
};

// The status of a call for a state view, which must stay unwritten.
inline int32_t StateOf(Trainer& t, uint32_t param, int32_t kind) {
  auto view = Make<offload_state_view_t>();
  view.host_count = 99;
  const int32_t status = offload_optimizer_state(t.optimizer, param, kind, &view);
  EXPECT_EQ(view.host_count, 99u);
  return status;
}

inline float host_array[64];

// The status of a read or write of state, which must change neither the state nor the array.
inline int32_t ReadOf(Trainer& t, uint32_t param, int32_t kind, uint64_t first, uint64_t count) {
  host_array[0] = 99;
  const int32_t status =
      offload_optimizer_read_state(t.optimizer, param, kind, first, count, host_array);
  EXPECT_EQ(host_array[0], 99);
  return status;
}
inline int32_t WriteOf(Trainer& t, uint32_t param, int32_t kind, uint64_t first, uint64_t count) {
  return offload_optimizer_write_state(t.optimizer, param, kind, first, count, host_array);
}
inline const offload_stream_t kUnknownStream = const_cast<char*>("no stream");

}  // namespace hybridopt::fault
