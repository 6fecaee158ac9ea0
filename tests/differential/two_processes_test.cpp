// Two processes share a host, as two ranks do: the executors of each process find their own
// division of the work, without any communication, and the bits are the same. If there are two GPUs
// each process has its own, otherwise both use the first one.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>

#include "holding_device.h"
#include "lifecycle_rig.h"
#include "machine/lanes.h"

namespace hybridopt {
namespace {

constexpr uint64_t kChunkElements = 1024;
constexpr uint64_t kElements = 24 * kChunkElements;
constexpr size_t kSteps = 4;

Solved SolvedProblem() {
  Problem problem = RandomProblem(
      OFFLOAD_ADAMW, {{OFFLOAD_BF16, OFFLOAD_BF16, OFFLOAD_PLACE_AUTO, 0, kElements}}, kSteps, 5);
  Random random(6);
  for (StepInput& step : problem.steps)  // every one has a gradient, and none is skipped
    step.grads[0] = RandomArray(OFFLOAD_BF16, kElements, false, random);
  return Solved(std::move(problem));
}

// The second GPU for the second process, if there is one.
int32_t CudaIndex(size_t process) {
  if (!TestsRunOnCuda() || process == 0) return 0;
  return MakeAccelerator({}, ReferenceKernels(), 1).ok() ? 1 : 0;
}

LifecycleSetting SettingOf(size_t process) {
  LifecycleSetting setting;
  setting.cuda_index = CudaIndex(process);
  setting.optimizer.chunk_elements = kChunkElements;
  setting.optimizer.host_executors = OFFLOAD_EXECUTORS_AUTO;
  setting.movable = 0;
  setting.seed = process;
  setting.delay_ns_max = 20'000;
  return setting;
}

// One of two processes. Neither has threads of its parent.
class Process {
 public:
  // `run` returns an error text, or an empty one.
  explicit Process(const std::function<std::string()>& run) {
    std::fflush(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    const std::string wrong = run();
    if (!wrong.empty()) std::fprintf(stderr, "%s\n", wrong.c_str());
    std::_Exit(wrong.empty() ? 0 : 1);
  }
  int ExitStatus() const {
    int status = 0;
    if (pid_ < 0 || waitpid(pid_, &status, 0) != pid_ || !WIFEXITED(status)) return -1;
    return WEXITSTATUS(status);
  }

 private:
  pid_t pid_;
};

// Each process waits for the other before its first step and before its last one, so that their
// steps are under way at the same time. A process whose other one has ended ends too.
class Meeting {
 public:
  Meeting() {
    for (auto& ends : pipes_)
      if (pipe(ends.data()) != 0) std::abort();
  }
  ~Meeting() {
    for (const auto& ends : pipes_) close(ends[0]);
  }
  // To be called by each process first, and by their parent when it has made both.
  void Join(size_t process) const { close(pipes_[1 - process][1]); }
  void Leave() const {
    for (const auto& ends : pipes_) close(ends[1]);
  }
  void Meet(size_t process) const {
    char byte = 0;
    if (write(pipes_[process][1], &byte, 1) != 1) std::_Exit(2);
    if (read(pipes_[1 - process][0], &byte, 1) != 1) std::_Exit(2);
  }

 private:
  std::array<std::array<int, 2>, 2> pipes_;
};

// In one process the workers are slow and in the other the device: in each step the other executor
// of the same process updates the rest.
std::string TrainWithOneHeldUp(size_t process, const Meeting& meeting) {
  const Solved solved = SolvedProblem();
  const bool workers = process == 0;
  const uint32_t held_chunks =
      workers ? 2 : kDefaultStreamChunks;  // those in the ring of the one held up
  LifecycleSetting setting = SettingOf(process);
  HoldingDevice* holding = nullptr;
  setting.WrapIn(&holding, workers ? "gradients landed" : "state down",
                 workers ? "state down" : "params uploaded");
  LifecycleRig rig(solved.problem, setting);
  for (size_t i = 0; i < kSteps; ++i) {
    if (i == 0 || i + 1 == kSteps) meeting.Meet(process);
    holding->Close(static_cast<int>(2 * (rig.Plan().chunk_count - held_chunks)));
    const offload_step_result_t result = rig.StepOnce(solved.problem.steps[i]);
    const std::string difference = rig.Difference(solved.trace[i + 1]);
    if (!difference.empty()) return difference;
    const uint64_t held = workers ? result.cpu_elements : result.streamed_elements;
    const uint64_t done = workers ? result.streamed_elements : result.cpu_elements;
    if (held != held_chunks * kChunkElements || done != kElements - held)
      return "process " + std::to_string(process) + ", step " + std::to_string(i) + ": " +
             std::to_string(held) + " elements by the one held up, " + std::to_string(done) +
             " by the other";
  }
  return "";
}

std::string Train(size_t process, const Meeting& meeting) {
  const Solved solved = SolvedProblem();
  LifecycleRig rig(solved.problem, SettingOf(process));
  meeting.Meet(process);
  for (size_t i = 0; i < kSteps; ++i) {
    const offload_step_result_t result = rig.StepOnce(solved.problem.steps[i]);
    const std::string difference = rig.Difference(solved.trace[i + 1]);
    if (!difference.empty()) return difference;
    if (result.cpu_elements + result.streamed_elements != kElements) return "elements";
  }
  return "";
}

void RunBoth(std::string (*train)(size_t process, const Meeting& meeting)) {
  const Meeting meeting;
  const auto run = [&](size_t process) {
    meeting.Join(process);
    return train(process, meeting);
  };
  const Process first([&] { return run(0); });
  const Process second([&] { return run(1); });
  meeting.Leave();
  EXPECT_EQ(first.ExitStatus(), 0);
  EXPECT_EQ(second.ExitStatus(), 0);
}

TEST(TwoProcesses, EachDoesWhatItsHeldUpExecutorLeaves) { RunBoth(TrainWithOneHeldUp); }

TEST(TwoProcesses, EachHasItsBitsWhateverItsSplit) { RunBoth(Train); }

}  // namespace
}  // namespace hybridopt
