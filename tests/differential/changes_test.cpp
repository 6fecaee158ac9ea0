// Takes of changes, call by call: which elements count as changed, what an acknowledgement clears,
// and what is refused. lifecycle_program_test.cpp has takes in random programs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "../layouts.h"
#include "../temporary_directory.h"
#include "lifecycle_rig.h"
#include "state_io/change_indices.h"

namespace hybridopt {
namespace {

constexpr uint64_t kCount = 3000;

// Two bf16 params, of which one never gets a gradient, and SGD, so that a gradient decides exactly
// which elements a step changes.
Problem TwoParams(int32_t master_layout = OFFLOAD_MASTER_FP32) {
  Problem problem;
  problem.algorithm = OFFLOAD_SGD;
  auto group = Make<offload_group_t>();
  group.lr = 1;
  problem.groups = {group};
  problem.state.master_layout = master_layout;
  for (int i = 0; i < 2; ++i) {
    problem.params.push_back({OFFLOAD_BF16, OFFLOAD_FP32, OFFLOAD_PLACE_AUTO, 0, kCount});
    problem.initial.emplace_back(kCount * 2);
    for (uint64_t element = 0; element < kCount; ++element)
      PutElement(problem.initial.back(), OFFLOAD_BF16, element, BitsOf(OFFLOAD_BF16, 1));
  }
  return problem;
}

struct Taken {
  int32_t status;
  uint64_t take;
  std::vector<offload_change_t> params;
  std::vector<std::vector<uint64_t>> indices;
  std::vector<Bytes> values;
};

class ChangesTest : public testing::TestWithParam<int32_t> {
 protected:
  ChangesTest() { setting_.device_kind = GetParam(); }

  LifecycleSetting Setting() {
    setting_.optimizer.device_fraction = GetParam() == OFFLOAD_DEVICE_HOST ? 0 : 0.3;
    setting_.track_changes = 1;
    return setting_;
  }

  // Makes a step in which these elements of param 0 have a gradient of 1, and all others 0.
  static void Step(LifecycleRig& rig, const std::vector<uint64_t>& elements, uint32_t flags = 0,
                   float grad = 1) {
    StepInput input;
    input.groups = rig.problem().groups;
    input.flags = flags;
    input.grads.resize(2);
    input.grads[0] = Bytes(kCount * 4);
    for (uint64_t element : elements)
      PutElement(*input.grads[0], OFFLOAD_FP32, element, BitsOf(OFFLOAD_FP32, grad));
    rig.StepOnce(input);
  }

  static Taken Take(const LifecycleRig& rig, std::vector<uint32_t> ids = {}, uint32_t flags = 0,
                    double dense_above = 0, uint64_t bytes_max = 1 << 20) {
    Bytes buffer(bytes_max);
    auto options = Make<offload_changes_options_t>();
    options.flags = flags;
    options.dense_above = dense_above;
    return TakeInto(rig, buffer.data(), bytes_max, ids, options, [&] { return buffer; });
  }
  // The same into device memory.
  static Taken TakeOnDevice(LifecycleRig& rig, std::vector<uint32_t> ids = {}, uint32_t flags = 0) {
    constexpr uint64_t kBytes = 1 << 17;
    void* buffer = rig.Allocate(kBytes);
    auto options = Make<offload_changes_options_t>();
    options.flags = OFFLOAD_CHANGES_ON_DEVICE | flags;
    const Taken taken =
        TakeInto(rig, buffer, kBytes, ids, options, [&] { return rig.Read(buffer, kBytes); });
    rig.Free(buffer);
    return taken;
  }
  template <typename Read>
  static Taken TakeInto(const LifecycleRig& rig, void* buffer, uint64_t buffer_bytes,
                        const std::vector<uint32_t>& ids, offload_changes_options_t options,
                        Read read) {
    options.buffer = buffer;
    options.buffer_bytes = buffer_bytes;
    auto changes = Make<offload_changes_t>();
    Taken taken{};
    taken.status = offload_optimizer_changes(rig.optimizer(), ids.empty() ? nullptr : ids.data(),
                                             static_cast<uint32_t>(ids.size()), &options, &changes);
    if (taken.status != OFFLOAD_OK) return taken;
    taken.take = changes.take;
    const Bytes content = read();
    const std::byte* const bytes = content.data();
    for (uint32_t i = 0; i < changes.param_count; ++i) {
      const offload_change_t& change = changes.params[i];
      taken.params.push_back(change);
      taken.indices.emplace_back();
      taken.values.emplace_back();
      if (change.dense != 0) continue;
      for (uint64_t k = 0; k < change.count; ++k) {
        uint64_t index = 0;
        std::memcpy(&index, bytes + change.indices_offset + k * change.index_bytes,
                    change.index_bytes);
        taken.indices.back().push_back(index);
      }
      taken.values.back().assign(bytes + change.values_offset,
                                 bytes + change.values_offset + 2 * change.count);
    }
    return taken;
  }
  static void Acknowledge(const LifecycleRig& rig, uint64_t take) {
    MUST(offload_optimizer_acknowledge_changes(rig.optimizer(), take));
  }
  static void TakeAndAcknowledge(const LifecycleRig& rig) { Acknowledge(rig, Take(rig).take); }
  // The elements of param 0 that a take returns now.
  static std::vector<uint64_t> Changed(const LifecycleRig& rig) { return Take(rig).indices[0]; }

  using Elements = std::vector<uint64_t>;

 private:
  LifecycleSetting setting_;
};

TEST_P(ChangesTest, TheFirstTakeIsDenseAndLaterOnesHaveWhatStepsHaveChanged) {
  const Problem problem = TwoParams();
  LifecycleRig rig(problem, Setting());
  const Taken first = Take(rig);
  ASSERT_EQ(first.params.size(), 2u);
  for (const offload_change_t& change : first.params) {
    EXPECT_EQ(change.dense, 1);
    EXPECT_EQ(change.count, kCount);
    EXPECT_EQ(change.has_base, 0);
  }
  Acknowledge(rig, first.take);
  // 1799 is the last element of the device share, which has 0.3 of 6000.
  Step(rig, {0, 63, 64, 1799, 1800, 2999});
  const Taken second = Take(rig);
  EXPECT_EQ(second.indices[0], (Elements{0, 63, 64, 1799, 1800, 2999}));
  for (uint64_t i = 0; i < 6; ++i) {
    uint16_t value = 1;
    std::memcpy(&value, second.values[0].data() + 2 * i, 2);
    EXPECT_EQ(value, 0);  // 1 - 1
  }
  EXPECT_EQ(second.params[0].index_bytes, 4u);
  EXPECT_EQ(second.params[0].base_hash, first.params[0].hash);
  EXPECT_NE(second.params[0].hash, first.params[0].hash);
  EXPECT_EQ(second.params[1].count, 0u);
  EXPECT_EQ(second.params[1].dense, 0);
  EXPECT_EQ(second.params[1].hash, first.params[1].hash);
}

TEST_P(ChangesTest, AnAcknowledgementClearsWhatItsTakeHadAndNoMore) {
  const Problem problem = TwoParams();
  LifecycleRig rig(problem, Setting());
  TakeAndAcknowledge(rig);
  Step(rig, {1});
  const Taken lost = Take(rig);
  Step(rig, {2});
  const Taken late = Take(rig);
  EXPECT_EQ(late.indices[0], (Elements{1, 2}));
  Acknowledge(rig, lost.take);  // a later take has named the param, so nothing is cleared
  EXPECT_EQ(Changed(rig), (Elements{1, 2}));
  const Taken last = Take(rig);
  Step(rig, {2, 5});
  Acknowledge(rig, last.take);
  Acknowledge(rig, last.take);
  EXPECT_EQ(Changed(rig), (Elements{2, 5}));
  const Taken before_mark = Take(rig);
  const uint32_t one = 1;
  MUST(offload_optimizer_mark_changed(rig.optimizer(), &one, 1));
  Acknowledge(rig, before_mark.take);
  const Taken behind_mark = Take(rig);
  EXPECT_EQ(behind_mark.indices[0], Elements{});
  EXPECT_EQ(behind_mark.params[0].dense, 0);
  EXPECT_EQ(behind_mark.params[1].dense, 1);
}

// A take that is refused gives nothing, so an acknowledgement of the take before it must not clear
// what it would have given.
TEST_P(ChangesTest, AnAcknowledgementDoesNotClearWhatARefusedTakeWouldHaveGiven) {
  const Problem problem = TwoParams();
  LifecycleRig rig(problem, Setting());
  TakeAndAcknowledge(rig);
  Step(rig, {1, 2000});
  const Taken first = Take(rig);
  Step(rig, {2, 2100});
  EXPECT_EQ(Take(rig, {}, 0, 0, 8).status, OFFLOAD_INVALID_ARGUMENT);
  Acknowledge(rig, first.take);
  EXPECT_EQ(Changed(rig), (Elements{2, 2100}));
}

TEST_P(ChangesTest, WideIndicesTakeEightBytesAndChangeNothingElse) {
  const Problem problem = TwoParams();
  LifecycleRig rig(problem, Setting());
  TakeAndAcknowledge(rig);
  Step(rig, {5, 261, 2999});
  const Taken narrow = Take(rig), wide = Take(rig, {}, OFFLOAD_CHANGES_WIDE);
  EXPECT_EQ(wide.params[0].index_bytes, 8u);
  EXPECT_EQ(wide.indices[0], narrow.indices[0]);
  EXPECT_EQ(wide.values[0], narrow.values[0]);
  const Taken gaps = Take(rig, {}, OFFLOAD_CHANGES_WIDE | OFFLOAD_CHANGES_GAPS);
  EXPECT_EQ(gaps.params[0].index_bytes, 8u);
  EXPECT_EQ(gaps.indices[0], (Elements{5, 256, 2738}));
}

// What was taken into device memory is pending until it is acknowledged, as after any take.
TEST_P(ChangesTest, ATakeIntoDeviceMemoryHasTheSame) {
  if (GetParam() == OFFLOAD_DEVICE_HOST) GTEST_SKIP() << "there is no device memory";
  const Problem problem = TwoParams();
  LifecycleRig rig(problem, Setting());
  TakeAndAcknowledge(rig);
  Step(rig, {0, 5, 261, 1799, 1800, 2999});
  const Taken narrow = TakeOnDevice(rig), wide = TakeOnDevice(rig, {}, OFFLOAD_CHANGES_WIDE);
  const Taken on_host = Take(rig);
  EXPECT_EQ(on_host.indices[0], (Elements{0, 5, 261, 1799, 1800, 2999}));
  for (const Taken* taken : {&narrow, &wide}) {
    EXPECT_EQ(taken->params[0].index_bytes, taken == &narrow ? 4u : 8u);
    EXPECT_EQ(taken->indices, on_host.indices);
    EXPECT_EQ(taken->values, on_host.values);
    EXPECT_EQ(taken->params[0].hash, on_host.params[0].hash);
  }
  const Taken last = TakeOnDevice(rig);
  Step(rig, {7});
  Acknowledge(rig, last.take);
  EXPECT_EQ(TakeOnDevice(rig).indices[0], Elements{7});
  const uint32_t one = 1;
  MUST(offload_optimizer_mark_changed(rig.optimizer(), &one, 1));
  EXPECT_EQ(TakeOnDevice(rig).params[1].dense, 1);
}

TEST_P(ChangesTest, ATakeIntoDeviceMemorySaysWhatItCannotDo) {
  const Problem problem = TwoParams();
  LifecycleRig rig(problem, Setting());
  if (GetParam() == OFFLOAD_DEVICE_HOST) {
    EXPECT_EQ(Take(rig, {}, OFFLOAD_CHANGES_ON_DEVICE).status, OFFLOAD_UNSUPPORTED);
    EXPECT_STREQ(offload_last_error(),
                 "options.flags has OFFLOAD_CHANGES_ON_DEVICE, but the device of this context is "
                 "the host; leave the flag out");
    return;
  }
  for (uint32_t flag : {OFFLOAD_CHANGES_IN_TENSOR, OFFLOAD_CHANGES_GAPS}) {
    EXPECT_EQ(TakeOnDevice(rig, {}, flag).status, OFFLOAD_UNSUPPORTED);
    EXPECT_EQ(std::string(offload_last_error()),
              std::string("options.flags is ") +
                  (flag == OFFLOAD_CHANGES_IN_TENSOR ? "0x9" : "0xa") +
                  ", but OFFLOAD_CHANGES_ON_DEVICE can only have OFFLOAD_CHANGES_WIDE beside it; "
                  "leave the others out, or take to host memory");
  }
  EXPECT_EQ(Take(rig, {}, OFFLOAD_CHANGES_ON_DEVICE).status, OFFLOAD_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(offload_last_error()).substr(0, 16), "options.buffer: ");
  rig.Move(offload_optimizer_offload_params, {{1}, 0, {}});
  rig.Wait();
  EXPECT_EQ(TakeOnDevice(rig).status, OFFLOAD_INVALID_STATE);
  EXPECT_STREQ(offload_last_error(),
               "param 'param1' is on the host, and options.flags has OFFLOAD_CHANGES_ON_DEVICE; "
               "call offload_optimizer_reload_params first, or take to host memory");
  EXPECT_EQ(TakeOnDevice(rig, {0}).status, OFFLOAD_OK);
}

TEST_P(ChangesTest, AStepThatIsSkippedAndElementsThatKeepTheirBitsAreNoChange) {
  const Problem problem = TwoParams();
  LifecycleRig rig(problem, Setting());
  TakeAndAcknowledge(rig);
  Step(rig, {3}, 0, INFINITY);
  Step(rig, {4, 2000}, 0, 1e-6f);  // the masters change, but not the rounded ones
  EXPECT_EQ(Changed(rig), Elements{});
}

TEST_P(ChangesTest, WhatTheLibraryIsToldOfIsDense) {
  for (int32_t layout : {OFFLOAD_MASTER_FP32, OFFLOAD_MASTER_SPLIT}) {
    const Problem problem = TwoParams(layout);
    LifecycleRig rig(problem, Setting());
    const TemporaryDirectory directory;
    const std::string path = directory / "checkpoint";
    rig.Save(path);
    rig.Wait();
    const auto expect_dense = [&](const std::string& what, Elements ids) {
      for (uint32_t id = 0; id < 2; ++id)
        EXPECT_EQ(Take(rig).params[id].dense, std::count(ids.begin(), ids.end(), id)) << what;
      TakeAndAcknowledge(rig);
    };
    expect_dense("commit", {0, 1});
    expect_dense("nothing", {});
    const uint32_t one = 1;
    MUST(offload_optimizer_mark_changed(rig.optimizer(), &one, 1));
    expect_dense("mark", {1});
    MUST(offload_optimizer_mark_changed(rig.optimizer(), nullptr, 0));
    expect_dense("mark all", {0, 1});
    rig.Move(offload_optimizer_refresh_masters, {{1}, 0, {}});
    rig.Wait();
    // In host memory the library sees that nobody has written the params.
    const bool sees = GetParam() == OFFLOAD_DEVICE_HOST && layout == OFFLOAD_MASTER_FP32;
    expect_dense("refresh", sees ? Elements{} : Elements{1});
    const float value = 3;
    MUST(offload_optimizer_write_state(rig.optimizer(), 0, OFFLOAD_STATE_MASTER, 7, 1, &value));
    expect_dense("write of a master", {0});
    MUST(rig.TryLoad(path));
    expect_dense("load", {0, 1});
    const Bytes content = rig.Read(rig.data[1], kCount * 2);
    rig.data[1] = rig.Allocate(kCount * 2);
    rig.Write(rig.data[1], content);
    rig.BindAll();
    expect_dense("bind", {1});
    rig.BindAll();
    expect_dense("the same addresses", {});
  }
}

TEST_P(ChangesTest, AParamWithMoreChangesThanTheCallerWantsIsDense) {
  const Problem problem = TwoParams();
  LifecycleRig rig(problem, Setting());
  TakeAndAcknowledge(rig);
  Elements elements;
  for (uint64_t i = 0; i < 300; ++i) elements.push_back(10 * i);
  Step(rig, elements);
  EXPECT_EQ(Take(rig, {}, 0, 0.09).params[0].dense, 1);
  EXPECT_EQ(Take(rig, {}, 0, 0.1).params[0].dense, 0);
  EXPECT_EQ(Take(rig).params[0].dense, 0);
  // An index and a value take 6 bytes, an element of the whole param 2: a third of the elements
  // takes as many bytes.
  for (uint64_t i = 0; i < 700; ++i) elements.push_back(10 * (i % 300) + 1 + i / 300);
  Step(rig, elements);
  EXPECT_EQ(Take(rig).params[0].dense, 1);
  EXPECT_EQ(Take(rig, {}, 0, 1).params[0].count, 1000u);
}

TEST_P(ChangesTest, GapsTakeAsFewBytesAsTheLargestOne) {
  const Problem problem = TwoParams();
  LifecycleRig rig(problem, Setting());
  TakeAndAcknowledge(rig);
  Step(rig, {5, 6, 261});
  Taken taken = Take(rig, {}, OFFLOAD_CHANGES_GAPS);
  EXPECT_EQ(taken.params[0].gaps, 1);
  EXPECT_EQ(taken.params[0].index_bytes, 1u);
  EXPECT_EQ(taken.indices[0], (Elements{5, 1, 255}));
  Step(rig, {2000});
  taken = Take(rig, {}, OFFLOAD_CHANGES_GAPS);
  EXPECT_EQ(taken.params[0].index_bytes, 2u);
  EXPECT_EQ(taken.indices[0], (Elements{5, 1, 255, 1739}));
}

TEST_P(ChangesTest, ABufferThatIsTooSmallIsRefusedWithTheBytesAndClearsNothing) {
  const Problem problem = TwoParams();
  LifecycleRig rig(problem, Setting());
  TakeAndAcknowledge(rig);
  Step(rig, {5, 2500});
  auto options = Make<offload_changes_options_t>();
  auto changes = Make<offload_changes_t>();
  EXPECT_EQ(offload_optimizer_changes(rig.optimizer(), nullptr, 0, &options, &changes),
            OFFLOAD_INVALID_ARGUMENT);
  EXPECT_STREQ(offload_last_error(),
               "options.buffer_bytes is 0, but the changes take 16 bytes; give a larger buffer, "
               "name fewer params, or set options.dense_above lower");
  EXPECT_EQ(changes.bytes, 16u);
  EXPECT_EQ(changes.take, 0u);
  EXPECT_EQ(Take(rig, {}, 0, 0, 16).indices[0], (Elements{5, 2500}));
}

TEST_P(ChangesTest, WrongCallsSayWhatIsWrong) {
  const Problem problem = TwoParams();
  LifecycleRig rig(problem, Setting());
  const auto error_of = [](int32_t status, int32_t expected) {
    EXPECT_EQ(status, expected);
    return std::string(offload_last_error());
  };
  EXPECT_EQ(error_of(Take(rig, {0, 2}).status, OFFLOAD_INVALID_ARGUMENT),
            "params names id 2, but only 2 params have been added");
  EXPECT_EQ(error_of(Take(rig, {1, 1}).status, OFFLOAD_INVALID_ARGUMENT),
            "params names id 1 ('param1') twice; name each param once");
  EXPECT_EQ(error_of(Take(rig, {}, 16).status, OFFLOAD_UNSUPPORTED),
            "options.flags is 0x10, known to this call is 0xf");
  EXPECT_EQ(error_of(Take(rig, {}, 0, 1.5).status, OFFLOAD_INVALID_ARGUMENT),
            "options.dense_above is 1.5, expected a fraction from 0 to 1 (0 = dense where indices "
            "and values would take as many bytes as the whole param)");
  auto options = Make<offload_changes_options_t>();
  options.buffer_bytes = 8;
  auto changes = Make<offload_changes_t>();
  const auto take = [&] {
    return offload_optimizer_changes(rig.optimizer(), nullptr, 0, &options, &changes);
  };
  EXPECT_EQ(error_of(take(), OFFLOAD_INVALID_ARGUMENT),
            "options.buffer is NULL, expected the address of 8 bytes (options.buffer_bytes)");
  options.buffer = reinterpret_cast<void*>(4);
  EXPECT_EQ(error_of(take(), OFFLOAD_INVALID_ARGUMENT),
            "options.buffer is 0x4, expected a multiple of 8");
  for (uint64_t number : {0, 1})
    EXPECT_EQ(error_of(offload_optimizer_acknowledge_changes(rig.optimizer(), number),
                       OFFLOAD_INVALID_ARGUMENT),
              "take is " + std::to_string(number) +
                  ", but this optimizer has given out 0 takes; use the number that "
                  "offload_optimizer_changes has given");
  const uint32_t unknown = 2;
  EXPECT_EQ(error_of(offload_optimizer_mark_changed(rig.optimizer(), &unknown, 1),
                     OFFLOAD_INVALID_ARGUMENT),
            "param is 2, but only 2 params have been added");
  EXPECT_EQ(error_of(offload_content_hash(nullptr, 1, &changes.take), OFFLOAD_INVALID_ARGUMENT),
            "data is NULL, expected an address");
}

TEST_P(ChangesTest, WithoutTrackingTheCallsAreRefused) {
  const Problem problem = TwoParams();
  LifecycleSetting setting = Setting();
  setting.track_changes = 0;
  LifecycleRig rig(problem, setting);
  const std::string text = "changes are not tracked; set options.track_changes to 1 at create";
  EXPECT_EQ(Take(rig).status, OFFLOAD_INVALID_STATE);
  EXPECT_EQ(offload_last_error(), text);
  EXPECT_EQ(offload_optimizer_acknowledge_changes(rig.optimizer(), 1), OFFLOAD_INVALID_STATE);
  EXPECT_EQ(offload_last_error(), text);
  EXPECT_EQ(offload_optimizer_mark_changed(rig.optimizer(), nullptr, 0), OFFLOAD_INVALID_STATE);
  EXPECT_EQ(offload_last_error(), text);
  EXPECT_EQ(rig.Plan().host_change_bytes + rig.Plan().device_change_bytes, 0u);
}

TEST_P(ChangesTest, ThePlanCountsTwoBitsWhereUpdatesAreMadeAndTwoOnTheHost) {
  const Problem problem = TwoParams();
  LifecycleSetting setting = Setting();
  LifecycleRig with(problem, setting);
  setting.track_changes = 0;
  LifecycleRig without(problem, setting);
  const offload_plan_t on = with.Plan(), off = without.Plan();
  const uint64_t bits = 2 * ((kCount + 63) / 64) * 8;
  EXPECT_GE(on.host_change_bytes, 2 * bits);
  EXPECT_LE(on.host_change_bytes, 2 * bits + 2 * (64 + 32));
  EXPECT_EQ(on.host_bytes - off.host_bytes, on.host_change_bytes);
  EXPECT_EQ(on.device_change_bytes, GetParam() == OFFLOAD_DEVICE_HOST ? 0 : 2 * bits);
  EXPECT_EQ(on.device_bytes - off.device_bytes, (on.device_change_bytes + 255) / 256 * 256);
}

TEST_P(ChangesTest, ATakeWhileWorkIsQueuedIsRefused) {
  if (GetParam() == OFFLOAD_DEVICE_HOST || TestsRunOnCuda()) GTEST_SKIP();
  const Problem problem = TwoParams();
  LifecycleRig rig(problem, Setting());
  offload_stream_t stream = nullptr;
  MUST(offload_stream_create(rig.context(), &stream));
  Gate gate;
  gate.Close(rig.context(), stream);
  rig.Move(offload_optimizer_refresh_masters, {{}, 0, {stream}});
  EXPECT_EQ(Take(rig).status, OFFLOAD_INVALID_STATE);
  EXPECT_STREQ(offload_last_error(),
               "1 calls are queued (a save counts until its ticket completes); call "
               "offload_optimizer_wait first");
  gate.Open();
  rig.Wait();
  EXPECT_EQ(Take(rig).status, OFFLOAD_OK);
  MUST(offload_stream_destroy(rig.context(), stream));
}

INSTANTIATE_TEST_SUITE_P(Devices, ChangesTest, testing::ValuesIn(DevicesUnderTest()),
                         [](const auto& info) { return std::string(DeviceText(info.param)); });

// If other code has written elements of params in host memory, a step that follows the params notes
// these elements, even if the step then stores the value that the follower has already.
TEST(ChangesOnTheHostTest, AStepThatFollowsParamsNotesWhatOtherCodeHasWritten) {
  const Problem problem = TwoParams();
  LifecycleSetting setting;
  setting.device_kind = OFFLOAD_DEVICE_HOST;
  setting.optimizer.device_fraction = 0;
  setting.track_changes = 1;
  LifecycleRig rig(problem, setting);
  auto options = Make<offload_changes_options_t>();
  std::vector<uint64_t> buffer(1000);
  options.buffer = buffer.data();
  options.buffer_bytes = 8000;
  auto changes = Make<offload_changes_t>();
  MUST(offload_optimizer_changes(rig.optimizer(), nullptr, 0, &options, &changes));
  MUST(offload_optimizer_acknowledge_changes(rig.optimizer(), changes.take));
  const uint16_t two = 0x4000;
  std::memcpy(static_cast<std::byte*>(rig.data[0]) + 2 * 77, &two, 2);
  StepInput input;
  input.groups = problem.groups;
  input.flags = OFFLOAD_STEP_FOLLOW_PARAMS;
  input.grads = {Bytes(kCount * 4), std::nullopt};
  PutElement(*input.grads[0], OFFLOAD_FP32, 77, BitsOf(OFFLOAD_FP32, 1));  // back to 1
  PutElement(*input.grads[0], OFFLOAD_FP32, 1500, BitsOf(OFFLOAD_FP32, 1));
  rig.StepOnce(input);
  MUST(offload_optimizer_changes(rig.optimizer(), nullptr, 0, &options, &changes));
  ASSERT_EQ(changes.params[0].count, 2u);
  uint32_t indices[2];
  std::memcpy(indices, buffer.data(), 8);
  EXPECT_EQ(indices[0], 77u);
  EXPECT_EQ(indices[1], 1500u);
}

// Params of many tiles, in more batches than there are slots, with elements of 2 and of 4 bytes,
// some of which all change: as many as a batch has room for, and more.
class LargeTakeTest : public testing::TestWithParam<int32_t> {
 protected:
  // Checks that the indices and values of a change are those of these elements of `now`.
  static void ExpectElements(const offload_change_t& change, const std::byte* buffer,
                             const std::vector<uint64_t>& elements, const Bytes& now) {
    const uint64_t element_bytes = DtypeBytes(change.dtype);
    ASSERT_EQ(change.count, elements.size());
    uint64_t index = 0;
    for (uint64_t k = 0; k < change.count; ++k) {
      uint64_t stored = 0;
      std::memcpy(&stored, buffer + change.indices_offset + k * change.index_bytes,
                  change.index_bytes);
      index = change.gaps == 0 ? stored : index + stored;
      ASSERT_EQ(index, elements[k]);
      ASSERT_EQ(std::memcmp(buffer + change.values_offset + k * element_bytes,
                            now.data() + index * element_bytes, element_bytes),
                0);
    }
  }
};

TEST_P(LargeTakeTest, EveryChangedElementComesWithItsValue) {
  constexpr uint64_t kCounts[] = {600'003, 20'000, 1, 8192, 100'001, 0};
  Problem problem;
  problem.algorithm = OFFLOAD_SGD;
  auto group = Make<offload_group_t>();
  group.lr = 1;
  problem.groups = {group};
  Random random(7);
  StepInput input;
  input.groups = problem.groups;
  std::vector<std::vector<uint64_t>> changed;
  for (uint64_t count : kCounts) {
    const int32_t dtype = count == 20'000 || count == 1 ? OFFLOAD_FP32 : OFFLOAD_BF16;
    problem.params.push_back({dtype, OFFLOAD_FP32, OFFLOAD_PLACE_AUTO, 0, count});
    problem.initial.emplace_back(count * DtypeBytes(dtype));
    input.grads.push_back(Bytes(count * 4));
    changed.emplace_back();
    for (uint64_t element = 0; element < count; ++element) {
      PutElement(problem.initial.back(), dtype, element, BitsOf(dtype, 1));
      // In the first param nearly all elements change, and a part of 20,000 does not.
      const bool changes = count > 500'000 ? element / 20'000 != 3 && element % 100 != 0
                                           : random.OneIn(50) || element == count - 1;
      if (!changes) continue;
      const auto grad = static_cast<float>(1 + random.Next() % 50);
      PutElement(*input.grads.back(), OFFLOAD_FP32, element, BitsOf(OFFLOAD_FP32, grad));
      changed.back().push_back(element);
    }
  }
  LifecycleSetting setting;
  setting.device_kind = GetParam();
  setting.optimizer.device_fraction = GetParam() == OFFLOAD_DEVICE_HOST ? 0 : 0.6;
  setting.track_changes = 1;
  LifecycleRig rig(problem, setting);
  auto options = Make<offload_changes_options_t>();
  std::vector<uint64_t> buffer(500'000);
  options.buffer = buffer.data();
  options.buffer_bytes = buffer.size() * 8;
  options.dense_above = 1;
  auto changes = Make<offload_changes_t>();
  const auto take = [&](uint32_t flags) {
    options.flags = flags;
    MUST(offload_optimizer_changes(rig.optimizer(), nullptr, 0, &options, &changes));
  };
  take(0);
  MUST(offload_optimizer_acknowledge_changes(rig.optimizer(), changes.take));
  rig.StepOnce(input);
  // The second take gives again what the first has given; gaps of 20,000 need 2 bytes.
  for (uint32_t flags : {0u, uint32_t{OFFLOAD_CHANGES_GAPS}}) {
    take(flags);
    EXPECT_EQ(changes.params[0].index_bytes, flags == 0 ? 4u : 2u);
    for (uint32_t i = 0; i < changes.param_count; ++i) {
      SCOPED_TRACE(i);
      const offload_change_t& change = changes.params[i];
      const Bytes now = rig.Read(rig.data[i], kCounts[i] * DtypeBytes(change.dtype));
      uint64_t hash = 0;
      MUST(offload_content_hash(now.data(), now.size(), &hash));
      EXPECT_EQ(change.hash, hash);
      EXPECT_EQ(change.gaps, flags == OFFLOAD_CHANGES_GAPS ? 1 : 0);
      ExpectElements(change, reinterpret_cast<const std::byte*>(buffer.data()), changed[i], now);
    }
  }
}

// An acknowledgement leaves bits in memory, in tiles that the next takes write and in others. None
// of them may come again, also not in a take that repeats an earlier one or follows a dense one.
TEST_P(LargeTakeTest, ElementsThatWereAcknowledgedDoNotComeAgain) {
  constexpr uint64_t kElements = 100'001;
  Problem problem;
  problem.algorithm = OFFLOAD_SGD;
  auto group = Make<offload_group_t>();
  group.lr = 1;
  problem.groups = {group};
  problem.params = {{OFFLOAD_BF16, OFFLOAD_FP32, OFFLOAD_PLACE_AUTO, 0, kElements}};
  problem.initial = {Bytes(kElements * 2)};
  LifecycleSetting setting;
  setting.device_kind = GetParam();
  setting.optimizer.device_fraction = GetParam() == OFFLOAD_DEVICE_HOST ? 0 : 0.6;
  setting.track_changes = 1;
  LifecycleRig rig(problem, setting);
  const auto step = [&](const std::vector<uint64_t>& elements) {
    StepInput input;
    input.groups = problem.groups;
    input.grads = {Bytes(kElements * 4)};
    for (uint64_t element : elements)
      PutElement(*input.grads[0], OFFLOAD_FP32, element, BitsOf(OFFLOAD_FP32, 1));
    rig.StepOnce(input);
  };
  std::vector<uint64_t> buffer(kElements);
  auto changes = Make<offload_changes_t>();
  const auto take = [&](const std::vector<uint64_t>& elements) {
    auto options = Make<offload_changes_options_t>();
    options.buffer = buffer.data();
    options.buffer_bytes = buffer.size() * 8;
    MUST(offload_optimizer_changes(rig.optimizer(), nullptr, 0, &options, &changes));
    const Bytes now = rig.Read(rig.data[0], kElements * 2);
    ASSERT_EQ(changes.params[0].dense, 0);
    ExpectElements(changes.params[0], reinterpret_cast<const std::byte*>(buffer.data()), elements,
                   now);
  };
  const auto acknowledge = [&] {
    MUST(offload_optimizer_acknowledge_changes(rig.optimizer(), changes.take));
  };
  auto options = Make<offload_changes_options_t>();
  MUST(offload_optimizer_changes(rig.optimizer(), nullptr, 0, &options, &changes));
  acknowledge();
  step({7, 9000, 50'000, 61'000, 99'999});
  take({7, 9000, 50'000, 61'000, 99'999});
  acknowledge();
  take({});
  step({8, 61'001});
  take({8, 61'001});
  take({8, 61'001});
  step({50'001});
  take({8, 50'001, 61'001});
  acknowledge();
  step({99'998});  // only the host has changed something
  take({99'998});
  take({99'998});
  acknowledge();
  take({});
  MUST(offload_optimizer_mark_changed(rig.optimizer(), nullptr, 0));
  MUST(offload_optimizer_changes(rig.optimizer(), nullptr, 0, &options, &changes));
  acknowledge();
  step({3});
  take({3});
  take({3});
}

INSTANTIATE_TEST_SUITE_P(Devices, LargeTakeTest, testing::ValuesIn(DevicesUnderTest()),
                         [](const auto& info) { return std::string(DeviceText(info.param)); });

// Indices in the whole tensor, for boxes that are not in the order of the tensor, and for a range
// that begins inside of a box.
TEST(ChangeIndicesTest, IndicesInTheTensorAreThoseOfTheShardsElements) {
  Piece piece;
  piece.shape = {7, 30};
  piece.offsets = {4, 3, 0, 10};
  piece.extents = {2, 20, 3, 5};
  piece.box_count = 2;
  piece.ranged = true;
  piece.range_begin = 11;
  piece.count = 40;
  const Shard shard = ValidateShard(piece.Abi(), piece.count).value();
  const std::vector<uint64_t> elements = {0, 1, 8, 9, 28, 29, 33, 34, 39};
  std::vector<uint64_t> words(1, 0);
  std::vector<uint32_t> expected, local;
  for (uint64_t element : elements) {
    words[0] |= uint64_t{1} << element;
    expected.push_back(static_cast<uint32_t>(GlobalIndices(piece)[element]));
    local.push_back(static_cast<uint32_t>(element));
  }
  const std::vector<uint16_t> offsets(elements.begin(), elements.end());
  const auto written = [&](bool in_tensor, bool gaps) {
    ChangeIndices indices(shard, in_tensor);
    EXPECT_EQ(indices.needs_bits(gaps), in_tensor && gaps);
    if (in_tensor) indices.Choose(indices.Summary(ChangedBits{{words.data(), nullptr}}, 1), gaps);
    EXPECT_EQ(indices.bytes(), 4u);
    EXPECT_FALSE(indices.gaps());  // the second box lies before the first
    std::vector<uint32_t> stored(offsets.size());
    auto* const to = reinterpret_cast<std::byte*>(stored.data());
    // In two parts, as from two tiles.
    indices.Write(0, std::span(offsets).first(3), 0, to);
    indices.Write(0, std::span(offsets).subspan(3), offsets[2] + 1u, to + 3 * sizeof(uint32_t));
    return stored;
  };
  EXPECT_EQ(written(true, true), expected);
  EXPECT_EQ(written(true, false), expected);
  EXPECT_EQ(written(false, false), local);
}

}  // namespace
}  // namespace hybridopt
