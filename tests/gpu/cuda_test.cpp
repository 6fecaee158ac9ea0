// Tests of what only a real GPU has: the caller's own use of the CUDA runtime, its streams,
// contexts and captures. Calls must not hang because of them.
#include <cuda.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "../differential/rig.h"
#include "cuda_calls.h"

namespace hybridopt {
namespace {

constexpr int64_t kLongNs = 10'000'000'000;  // no timed assertion: only the end of a hang

ContextSetting CudaSetting() {
  ContextSetting setting;
  setting.device_kind = OFFLOAD_DEVICE_CUDA;
  setting.threads = 2;
  setting.device_timeout_ns = kLongNs;
  return setting;
}

// Work on a stream that takes some 100 us a round.
class Work {
 public:
  Work() { MUST(cudaMalloc(&memory_, kBytes) == cudaSuccess ? OFFLOAD_OK : OFFLOAD_INTERNAL); }
  ~Work() { (void)cudaFree(memory_); }
  void On(cudaStream_t stream, int rounds) {
    for (int i = 0; i < rounds; ++i) (void)cudaMemsetAsync(memory_, i, kBytes, stream);
  }

 private:
  static constexpr size_t kBytes = size_t{256} << 20;
  void* memory_ = nullptr;
};

struct Streams {
  explicit Streams(size_t count, int priority = 0) : handles(count) {
    for (cudaStream_t& stream : handles)
      (void)cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority);
  }
  ~Streams() {
    for (cudaStream_t stream : handles) (void)cudaStreamDestroy(stream);
  }
  std::vector<cudaStream_t> handles;
};

Solved SmallProblem(uint64_t seed) {
  return Solved(RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 4, seed));
}

// ------------------------------------------------------------------------------------- contexts --

CUcontext CurrentContext() {
  CUcontext current = nullptr;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  if (cudaGetDriverEntryPointByVersion("cuCtxGetCurrent", &function, 12000, cudaEnableDefault,
                                       &found) == cudaSuccess)
    reinterpret_cast<CUresult (*)(CUcontext*)>(function)(&current);
  return current;
}

// A thread that had no CUDA context has none after any call.
TEST(CurrentDevice, IsLeftAsItWas) {
  const Solved solved = SmallProblem(1);
  std::thread([&] {
    ASSERT_EQ(CurrentContext(), nullptr);
    {
      const TestContext context(CudaSetting());
      EXPECT_EQ(CurrentContext(), nullptr);
      EXPECT_EQ(RunAll(context, solved, {0.4, 1024, 2}), "");
      EXPECT_EQ(CurrentContext(), nullptr);
    }
    EXPECT_EQ(CurrentContext(), nullptr);
  }).join();
}

TEST(DeviceIndex, BeyondWhatIsVisibleIsRefused) {
  auto options = Make<offload_context_options_t>();
  options.device_kind = OFFLOAD_DEVICE_CUDA;
  offload_context_t context = nullptr;
  int count = 0;
  ASSERT_CUDA(cudaGetDeviceCount(&count));
  for (int32_t index : {-1, count}) {
    options.device_index = index;
    EXPECT_EQ(offload_context_create(&options, &context), OFFLOAD_INVALID_ARGUMENT);
    EXPECT_TRUE(LastErrorHas("options.device_index is " + std::to_string(index)));
    EXPECT_TRUE(LastErrorHas("expected 0 to " + std::to_string(count - 1)));
  }
}

TEST(Info, NamesTheDevice) {
  const TestContext context(CudaSetting());
  auto info = Make<offload_context_info_t>();
  MUST(offload_context_get_info(context.handle(), &info));
  cudaDeviceProp properties{};
  ASSERT_CUDA(cudaGetDeviceProperties(&properties, 0));
  EXPECT_EQ(std::string(info.device_name), properties.name);
  EXPECT_EQ(info.device_memory_bytes, properties.totalGlobalMem);
  EXPECT_NE(std::string(offload_build_info()).find("cuda"), std::string::npos);
}

// -------------------------------------------------------------------------------------- streams --

// The caller's own streams as producers: blocking, non-blocking, NULL; the work on them is late.
TEST(CallersStreams, AStepWaitsForWorkOnAnyOfThem) {
  const Solved solved = SmallProblem(2);
  const TestContext context(CudaSetting());
  Work work;
  cudaStream_t blocking = nullptr;
  ASSERT_CUDA(cudaStreamCreate(&blocking));
  Streams streams(1);
  for (cudaStream_t stream : {blocking, streams.handles[0], cudaStream_t{nullptr}, cudaStreamLegacy,
                              cudaStreamPerThread}) {
    for (double fraction : {0.0, 0.3, 1.0}) {
      Rig rig(context, solved.problem, {fraction, 1024, 2});
      Model model(solved.problem);
      for (const StepInput& input : solved.problem.steps) {
        // The bound memory has arbitrary bytes until the stream copies the gradients there.
        const size_t late = rig.AddBlock(7);
        rig.PutGrads(0, input);
        rig.Bind(0, late, input);
        rig.SetGroups(input.groups);
        work.On(stream, 10);
        for (size_t id = 0; id < solved.problem.params.size(); ++id) {
          if (!input.grads[id].has_value()) continue;
          ASSERT_CUDA(cudaMemcpyAsync(rig.GradAddress(late, id), rig.GradAddress(0, id),
                                      input.grads[id]->size(), cudaMemcpyDeviceToDevice, stream));
        }
        const offload_ticket_t ticket = rig.Queue(input, stream);
        MUST(offload_optimizer_wait(rig.handle(), ticket, kLongNs));
        model.Step(input);
        rig.ExpectGrads(late, input);
        ASSERT_EQ(rig.Difference(model), "") << "fraction " << fraction;
        rig.FreeBlock(late);
      }
    }
  }
  ASSERT_CUDA(cudaStreamDestroy(blocking));
}

// More streams than the hardware has queues wait for a step whose own work is queued after them. If
// such a stream shared a queue with the step, neither would go on.
TEST(CallersStreams, ManyThatWaitDoNotStandInTheWay) {
  const Solved solved = SmallProblem(3);
  const TestContext context(CudaSetting());
  Work work;
  int lowest = 0, highest = 0;
  ASSERT_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  for (int priority : {lowest, highest}) {
    Streams producers(1, priority);
    Streams waiting(100, priority);
    Rig rig(context, solved.problem, {0.3, 1024, 2});
    Model model(solved.problem);
    for (const StepInput& input : solved.problem.steps) {
      rig.PutGrads(0, input);
      rig.Bind(0, 0, input);
      rig.SetGroups(input.groups);
      work.On(producers.handles[0], 20);
      const offload_ticket_t ticket = rig.Queue(input, producers.handles[0]);
      for (cudaStream_t stream : waiting.handles) {
        MUST(offload_optimizer_stream_wait(rig.handle(), ticket, stream, nullptr, 0));
        work.On(stream, 1);
      }
      ASSERT_EQ(offload_optimizer_wait(rig.handle(), ticket, kLongNs), OFFLOAD_OK)
          << offload_last_error() << ", priority " << priority;
      model.Step(input);
      for (cudaStream_t stream : waiting.handles)
        MUST(offload_stream_synchronize(context.handle(), stream, kLongNs));
      ASSERT_EQ(rig.Difference(model), "");
    }
  }
}

// The caller's thread blocks in CUDA until a stream ends that waits for a step: the step goes on.
TEST(CallersStreams, TheCallerMayBlockOnOneThatWaits) {
  const Solved solved = SmallProblem(4);
  const TestContext context(CudaSetting());
  Work work;
  Streams streams(2);
  Rig rig(context, solved.problem, {0.3, 1024, 2});
  Model model(solved.problem);
  for (size_t i = 0; i < solved.problem.steps.size(); ++i) {
    const StepInput& input = solved.problem.steps[i];
    rig.PutGrads(0, input);
    rig.Bind(0, 0, input);
    rig.SetGroups(input.groups);
    void* scratch = nullptr;
    ASSERT_CUDA(cudaMalloc(&scratch, 1 << 20));
    work.On(streams.handles[0], 20);
    const offload_ticket_t ticket = rig.Queue(input, streams.handles[0]);
    MUST(offload_optimizer_stream_wait(rig.handle(), ticket, streams.handles[1], nullptr, 0));
    work.On(streams.handles[1], 1);
    if (i % 4 == 0) {
      ASSERT_CUDA(cudaDeviceSynchronize());
    }
    if (i % 4 == 1) {
      ASSERT_CUDA(cudaStreamSynchronize(streams.handles[1]));
    }
    if (i % 4 == 2) {
      void* pinned = nullptr;
      ASSERT_CUDA(cudaMallocHost(&pinned, 1 << 20));
      ASSERT_CUDA(cudaFreeHost(pinned));
    }
    ASSERT_CUDA(cudaFree(scratch));  // waits for all streams
    MUST(offload_optimizer_wait(rig.handle(), ticket, kLongNs));
    model.Step(input);
    ASSERT_EQ(rig.Difference(model), "");
  }
}

// Moves that free device memory, while a stream waits for their ticket: freeing must not wait for
// that stream.
TEST(CallersStreams, MayWaitForAMoveThatFreesMemory) {
  const Problem problem = RandomProblem(OFFLOAD_ADAMW, AllDtypePairs(), 1, 5);
  const TestContext context(CudaSetting());
  RankSetting movable;
  movable.movable = OFFLOAD_MOVABLE_STATES;
  Rig rig(context, problem, {1, 1024, 2}, movable);
  Model model(problem);
  Streams streams(1);
  Work work;
  for (int round = 0; round < 3; ++round) {
    offload_ticket_t ticket = 0;
    work.On(nullptr, 20);
    MUST(offload_optimizer_offload_states(rig.handle(), nullptr, &ticket));
    MUST(offload_optimizer_stream_wait(rig.handle(), ticket, streams.handles[0], nullptr, 0));
    work.On(streams.handles[0], 1);
    ASSERT_EQ(offload_optimizer_wait(rig.handle(), ticket, kLongNs), OFFLOAD_OK)
        << offload_last_error();
    MUST(offload_stream_synchronize(context.handle(), streams.handles[0], kLongNs));
    MUST(offload_optimizer_reload_states(rig.handle(), nullptr, &ticket));
    MUST(offload_optimizer_wait(rig.handle(), ticket, kLongNs));
    ASSERT_EQ(rig.Difference(model), "");
  }
}

TEST(CallersStreams, FunctionsAndMapsAreRefused) {
  const TestContext context(CudaSetting());
  void* data = nullptr;
  void* mapped = nullptr;
  MUST(offload_device_alloc(context.handle(), 100, &data));
  EXPECT_EQ(offload_device_map(context.handle(), data, 100, &mapped), OFFLOAD_UNSUPPORTED);
  EXPECT_TRUE(LastErrorHas("offload_device_upload"));
  EXPECT_EQ(offload_stream_run(
                context.handle(), nullptr, [](void*) {}, nullptr),
            OFFLOAD_UNSUPPORTED);
  EXPECT_TRUE(LastErrorHas("cudaLaunchHostFunc"));
  MUST(offload_device_free(context.handle(), data));
}

// ------------------------------------------------------------------------------------- captures --

TEST(Capture, OnAStreamOfTheCallRefusesTheCallAndGoesOn) {
  const Solved solved = SmallProblem(6);
  const TestContext context(CudaSetting());
  Streams streams(1);
  const cudaStream_t stream = streams.handles[0];
  Rig rig(context, solved.problem, {0.3, 1024, 2});
  Work work;
  const StepInput& input = solved.problem.steps[0];
  rig.PutGrads(0, input);
  rig.Bind(0, 0, input);
  rig.SetGroups(input.groups);
  auto step = Make<offload_step_options_t>();
  step.stream = stream;
  auto move = Make<offload_move_options_t>();
  const offload_stream_t producers[] = {stream};
  move.streams = producers;
  move.stream_count = 1;
  int value = 0;
  void* data = nullptr;
  MUST(offload_device_alloc(context.handle(), 4, &data));
  for (cudaStreamCaptureMode mode : {cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal,
                                     cudaStreamCaptureModeRelaxed}) {
    ASSERT_CUDA(cudaStreamBeginCapture(stream, mode));
    work.On(stream, 1);
    const int32_t statuses[] = {offload_optimizer_step(rig.handle(), &step, nullptr),
                                offload_optimizer_refresh_masters(rig.handle(), &move, nullptr),
                                offload_optimizer_stream_wait(rig.handle(), 0, stream, nullptr, 0),
                                offload_device_upload(context.handle(), data, &value, 4, stream)};
    for (int32_t status : statuses) EXPECT_EQ(status, OFFLOAD_INVALID_STATE);
    EXPECT_TRUE(LastErrorHas("is capturing a graph")) << offload_last_error();
    work.On(stream, 1);
    cudaGraph_t graph = nullptr;
    ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
    size_t nodes = 0;
    ASSERT_CUDA(cudaGraphGetNodes(graph, nullptr, &nodes));
    EXPECT_EQ(nodes, 2u);
    ASSERT_CUDA(cudaGraphDestroy(graph));
  }
  MUST(offload_device_free(context.handle(), data));
  Model model(solved.problem);
  MUST(offload_optimizer_wait(rig.handle(), rig.Queue(input, stream), kLongNs));
  model.Step(input);
  EXPECT_EQ(rig.Difference(model), "");
}

TEST(Capture, OfAStashIsRefused) {
  constexpr uint64_t kBytes = 10'000;
  const TestContext context(CudaSetting());
  Streams streams(1);
  const cudaStream_t stream = streams.handles[0];
  auto options = Make<offload_stash_options_t>();
  options.budget_bytes = kBytes;
  options.slab_bytes = 4096;
  options.min_bytes = 1;
  offload_stash_t stash = nullptr;
  MUST(offload_stash_create(context.handle(), &options, &stash));
  void* data = nullptr;
  MUST(offload_device_alloc(context.handle(), kBytes, &data));
  std::vector<unsigned char> content(kBytes, 0x5a), got(kBytes);
  MUST(offload_device_upload(context.handle(), data, content.data(), kBytes, stream));
  offload_stash_ticket_t ticket = 0, other = 0;
  offload_stash_mark_t mark = 0;
  MUST(offload_stash_mark(stash, 0, &mark));
  MUST(offload_stash_push(stash, 0, data, kBytes, stream, &ticket));
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const int32_t statuses[] = {offload_stash_push(stash, 0, data, kBytes, stream, &other),
                              offload_stash_release(stash, ticket, stream),
                              offload_stash_prefetch(stash, ticket, data, kBytes, stream),
                              offload_stash_drop(stash, ticket, stream),
                              offload_stash_rollback(stash, mark, stream),
                              offload_stash_pop(stash, ticket, stream, 0)};
  for (int32_t status : statuses) EXPECT_EQ(status, OFFLOAD_INVALID_STATE);
  EXPECT_TRUE(LastErrorHas("is capturing a graph")) << offload_last_error();
  cudaGraph_t graph = nullptr;
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  size_t nodes = 9;
  ASSERT_CUDA(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, 0u);
  ASSERT_CUDA(cudaGraphDestroy(graph));
  MUST(offload_stash_release(stash, ticket, stream));
  MUST(offload_device_upload(context.handle(), data, got.data(), kBytes, stream));
  MUST(offload_stash_prefetch(stash, ticket, data, kBytes, stream));
  MUST(offload_stash_pop(stash, ticket, stream, 0));
  MUST(offload_device_download(context.handle(), got.data(), data, kBytes, stream));
  EXPECT_EQ(got, content);
  MUST(offload_stash_destroy(stash));
  MUST(offload_device_free(context.handle(), data));
}

// A capture in the strictest mode on another stream, by the same thread and by another: steps go
// on, and the capture is not spoilt.
TEST(Capture, ElsewhereDisturbsNobody) {
  const Solved solved = SmallProblem(7);
  const TestContext context(CudaSetting());
  Streams streams(2);
  Work work;
  for (bool same_thread : {false, true}) {
    Rig rig(context, solved.problem, {0.3, 1024, 2});
    Model model(solved.problem);
    for (const StepInput& input : solved.problem.steps) {
      rig.PutGrads(0, input);
      rig.Bind(0, 0, input);
      rig.SetGroups(input.groups);
      ASSERT_CUDA(cudaStreamBeginCapture(streams.handles[0], cudaStreamCaptureModeGlobal));
      work.On(streams.handles[0], 1);
      const auto step = [&] {
        MUST(offload_optimizer_wait(rig.handle(), rig.Queue(input, streams.handles[1]), kLongNs));
      };
      if (same_thread) {
        step();
      } else {
        std::thread(step).join();
      }
      work.On(streams.handles[0], 1);
      cudaGraph_t graph = nullptr;
      ASSERT_CUDA(cudaStreamEndCapture(streams.handles[0], &graph));
      ASSERT_CUDA(cudaGraphDestroy(graph));
      model.Step(input);
      ASSERT_EQ(rig.Difference(model), "");
    }
  }
}

// --------------------------------------------------------------------------------------- memory --

TEST(FullDevice, CommitNamesTheBytesAndWorksOnceThereIsRoom) {
  const TestContext context(CudaSetting());
  constexpr uint64_t kCount = uint64_t{64} << 20;  // 768 MiB of state
  const ParamSpec spec = {OFFLOAD_BF16, OFFLOAD_BF16, OFFLOAD_PLACE_AUTO, 0, kCount};
  const offload_optimizer_t optimizer = NewAdamW(context, 1);
  auto param = Make<offload_param_t>();
  param.dtype = param.grad_dtype = OFFLOAD_BF16;
  param.name = "p";
  param.count = kCount;
  MUST(offload_device_alloc(context.handle(), spec.data_bytes(), &param.data));
  MUST(offload_optimizer_add_params(optimizer, &param, 1, nullptr));
  auto info = Make<offload_context_info_t>();
  MUST(offload_context_get_info(context.handle(), &info));
  void* ballast = nullptr;
  MUST(offload_device_alloc(context.handle(), info.device_memory_free_bytes - (512 << 20),
                            &ballast));
  auto plan = Make<offload_plan_t>();
  MUST(offload_optimizer_plan(optimizer, &plan));
  EXPECT_EQ(plan.fits, 0);
  EXPECT_EQ(offload_optimizer_commit(optimizer, nullptr), OFFLOAD_OUT_OF_DEVICE_MEMORY);
  EXPECT_TRUE(LastErrorHas("needs " + std::to_string(plan.device_bytes) + " bytes"))
      << offload_last_error();
  EXPECT_TRUE(LastErrorHas("lower device_fraction"));
  void* more = nullptr;
  EXPECT_EQ(offload_device_alloc(context.handle(), uint64_t{1} << 30, &more),
            OFFLOAD_OUT_OF_DEVICE_MEMORY);
  EXPECT_TRUE(LastErrorHas("asked for 1073741824 bytes")) << offload_last_error();
  MUST(offload_device_free(context.handle(), ballast));
  MUST(offload_optimizer_commit(optimizer, nullptr));
  MUST(offload_optimizer_destroy(optimizer));
  MUST(offload_device_free(context.handle(), param.data));
}

// Memory from the caller's own CUDA runtime is accepted; host memory is not.
TEST(Addresses, OfTheCallersAllocatorAreTakenAndHostMemoryIsNot) {
  const TestContext context(CudaSetting());
  auto options = Make<offload_optimizer_options_t>();
  options.algorithm = OFFLOAD_SGD;
  offload_optimizer_t optimizer = nullptr;
  MUST(offload_optimizer_create(context.handle(), &options, &optimizer));
  auto group = Make<offload_group_t>();
  uint32_t id = 0;
  MUST(offload_optimizer_add_group(optimizer, &group, &id));
  auto param = Make<offload_param_t>();
  param.dtype = param.grad_dtype = OFFLOAD_FP32;
  param.name = "p";
  param.count = 1000;
  std::vector<float> host(1000);
  param.data = host.data();
  EXPECT_EQ(offload_optimizer_add_params(optimizer, &param, 1, nullptr), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_TRUE(LastErrorHas("not in this device's memory")) << offload_last_error();
  ASSERT_CUDA(cudaMallocHost(&param.data, 4000));
  EXPECT_EQ(offload_optimizer_add_params(optimizer, &param, 1, nullptr), OFFLOAD_INVALID_ARGUMENT);
  EXPECT_TRUE(LastErrorHas("pinned host memory")) << offload_last_error();
  ASSERT_CUDA(cudaFreeHost(param.data));
  ASSERT_CUDA(cudaMalloc(&param.data, 4000));
  MUST(offload_optimizer_add_params(optimizer, &param, 1, nullptr));
  MUST(offload_optimizer_destroy(optimizer));
  ASSERT_CUDA(cudaFree(param.data));
}

// --------------------------------------------------------------------------------------- tables --

const StateChoice kSmallest = {OFFLOAD_MASTER_SPLIT, OFFLOAD_BF16, OFFLOAD_ROUND_STOCHASTIC, 3};

// More params than one table of a launch holds.
TEST(ManyParams, TakeSeveralTablesALaunch) {
  std::vector<ParamSpec> params;
  for (uint64_t i = 0; i < 5000; ++i)
    params.push_back({kDtypes[i % 3], kDtypes[i / 3 % 3], OFFLOAD_PLACE_AUTO, 0, i % 37});
  const TestContext context(CudaSetting());
  for (const StateChoice& choice : {StateChoice(), kSmallest}) {
    Problem problem = RandomProblem(OFFLOAD_ADAMW, params, 2, 8);
    problem.state = choice;
    const Solved solved(std::move(problem));
    for (double fraction : {0.5, 1.0})
      EXPECT_EQ(RunAll(context, solved, {fraction, 4096, 2}), "")
          << choice.Text() << ", fraction " << fraction;
  }
}

// Params of many tiles, blocks and chunks.
TEST(LargeParams, GiveTheModelsBits) {
  std::vector<ParamSpec> params;
  for (uint64_t count : {1'000'003, 262'144, 100'001})
    params.push_back({kDtypes[count % 3], OFFLOAD_BF16, OFFLOAD_PLACE_AUTO, 0, count});
  const TestContext context(CudaSetting());
  for (int32_t algorithm : kAlgorithmValues) {
    for (const StateChoice& choice : {StateChoice(), kSmallest}) {
      Problem problem = RandomProblem(algorithm, params, 3, 9);
      problem.state = choice;
      const Solved solved(std::move(problem));
      for (double fraction : {0.0, 0.3, 1.0})
        ASSERT_EQ(RunAll(context, solved, {fraction, 100'000, 3}), "")
            << "algorithm " << algorithm << ", " << choice.Text() << ", fraction " << fraction;
    }
  }
}

}  // namespace
}  // namespace hybridopt
