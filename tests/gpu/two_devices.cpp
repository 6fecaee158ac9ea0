// Two GPUs in one process. Exit status 77 (skipped) where there are not two.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../differential/rig.h"
#include "cuda_calls.h"

namespace hybridopt {
namespace {

ContextSetting OnDevice(int32_t index) {
  ContextSetting setting;
  setting.device_kind = OFFLOAD_DEVICE_CUDA;
  setting.device_index = index;
  return setting;
}

int CurrentDevice() {
  int device = -1;
  (void)cudaGetDevice(&device);
  return device;
}

// The calling thread keeps the other device all the time. Steps of both are under way at once.
TEST(TwoDevices, EachHasItsOwnBitsAndNoneIsMadeCurrent) {
  const Solved solved(RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 6, 1));
  for (int current : {0, 1}) {
    ASSERT_CUDA(cudaSetDevice(current));
    const TestContext first(OnDevice(0)), second(OnDevice(1));
    for (double fraction : {0.0, 0.3, 1.0}) {
      Rig rigs[] = {{first, solved.problem, {fraction, 1024, 2}},
                    {second, solved.problem, {fraction, 1024, 2}}};
      for (size_t step = 0; step < solved.problem.steps.size(); ++step) {
        const StepInput& input = solved.problem.steps[step];
        for (Rig& rig : rigs) {
          rig.PutGrads(0, input);
          rig.Bind(0, 0, input);
          rig.SetGroups(input.groups);
          rig.Queue(input);
          ASSERT_EQ(CurrentDevice(), current);
        }
        for (Rig& rig : rigs) {
          MUST(offload_optimizer_wait(rig.handle(), 0, -1));
          ASSERT_EQ(rig.Difference(solved.trace[step + 1]), "") << "fraction " << fraction;
        }
      }
      ASSERT_EQ(CurrentDevice(), current);
    }
  }
}

TEST(TwoDevices, StreamsOfTheOtherAreRefused) {
  const TestContext context(OnDevice(0));
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 1, 2);
  Rig rig(context, problem, {0.3, 1024, 2});
  cudaStream_t stream = nullptr;
  ASSERT_CUDA(cudaSetDevice(1));
  ASSERT_CUDA(cudaStreamCreate(&stream));
  auto options = Make<offload_step_options_t>();
  options.stream = stream;
  EXPECT_EQ(offload_optimizer_step(rig.handle(), &options, nullptr), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_TRUE(LastErrorHas("is of CUDA device 1, but the context is on device 0"))
      << offload_last_error();
  ASSERT_CUDA(cudaStreamDestroy(stream));
}

TEST(TwoDevices, ParamsInMemoryOfTheOtherAreRefused) {
  const TestContext context(OnDevice(0));
  const offload_optimizer_t optimizer = NewAdamW(context, 0);
  auto param = Make<offload_param_t>();
  param.name = "weight";
  param.dtype = param.grad_dtype = OFFLOAD_FP32;
  param.count = 1024;
  ASSERT_CUDA(cudaSetDevice(1));
  ASSERT_CUDA(cudaMalloc(&param.data, 4096));
  int32_t status = offload_optimizer_add_params(optimizer, &param, 1, nullptr);
  if (status == OFFLOAD_OK) status = offload_optimizer_commit(optimizer, nullptr);
  EXPECT_EQ(status, OFFLOAD_INVALID_ARGUMENT);
  EXPECT_TRUE(LastErrorHas("memory of another CUDA device")) << offload_last_error();
  EXPECT_TRUE(LastErrorHas("'weight'")) << offload_last_error();
  MUST(offload_optimizer_destroy(optimizer));
  ASSERT_CUDA(cudaFree(param.data));
}

}  // namespace
}  // namespace hybridopt

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count < 2) {
    std::printf("skipped: %d GPUs, expected at least 2\n", count);
    return 77;
  }
  return RUN_ALL_TESTS();
}
