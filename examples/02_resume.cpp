// 02_resume.cpp shows a training job that may be killed at any moment. Run it, kill it, run it
// again: it goes on from its newest checkpoint and ends with the bits of a run that nobody touched.
//
//   02_resume DIR               train to the end, from where DIR's newest checkpoint stands
//   02_resume --kill-at N DIR   kills itself, as the system would, in step N
//   02_resume --test DIR        kills and resumes itself three times and compares the ends
//
// Each takes less than a second; DIR is a folder that is there. Expect the hash of the params after
// step 40, and of --test the line "same bits: yes".
//
// The ten lines it takes are in save() and resume().
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "numbers.h"
#include "offload_simple.h"
#include "program.h"

namespace {

constexpr uint64_t kSteps = 40;
constexpr uint64_t kSaveEvery = 8;
constexpr uint64_t kCount = 20000;

class Job {
 public:
  Job() : weights_(kCount), grads_(kCount) {
    for (uint16_t& weight : weights_) weight = narrow(static_cast<float>(random_.normal()));
    auto options = offload_init<offload_optimizer_options_t>();
    options.algorithm = OFFLOAD_ADAMW;
    auto group = offload_init<offload_group_t>();
    group.lr = 1e-2;
    group.beta1 = 0.9;
    group.beta2 = 0.99;
    group.eps = 1e-8;
    auto param = offload_init<offload_param_t>();
    param.name = "weight";
    param.dtype = param.grad_dtype = OFFLOAD_BF16;
    param.data = weights_.data();
    param.grad = grads_.data();
    param.count = kCount;
    MUST(offload_create_all(nullptr, &options, &group, &param, 1, &context_, &optimizer_));
  }
  ~Job() { MUST(offload_destroy_all(context_, optimizer_)); }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Queued: training goes on while the files are written.
  void save(const std::string& directory, uint64_t step) {
    const std::string path = directory + "/step-" + std::to_string(step);
    auto options = offload_init<offload_save_options_t>();
    options.path = path.c_str();
    MUST(offload_optimizer_save(optimizer_, &options, nullptr));
  }

  // The step that the newest good checkpoint was saved after; 0 if there is none.
  uint64_t resume(const std::string& directory) {
    char path[4096];
    const int32_t found = offload_checkpoint_newest(directory.c_str(), nullptr, path, sizeof path);
    if (found == OFFLOAD_INVALID_STATE) return 0;
    must(found, "offload_checkpoint_newest");
    auto info = offload_init<offload_checkpoint_info_t>();
    MUST(offload_checkpoint_inspect(path, &info, nullptr, nullptr));
    auto options = offload_init<offload_load_options_t>();
    options.path = path;
    MUST(offload_optimizer_load(optimizer_, &options, nullptr));
    MUST(offload_optimizer_wait(optimizer_, 0, -1));
    return info.step;
  }

  void step(uint64_t number) {
    wait();  // gradients and weights are the library's until then
    Random noise{number};
    for (uint64_t i = 0; i < kCount; ++i)
      grads_[i] = narrow(widen(weights_[i]) + static_cast<float>(noise.normal()));
    MUST(offload_optimizer_step(optimizer_, nullptr, nullptr));
  }
  void wait() { MUST(offload_optimizer_wait(optimizer_, 0, -1)); }
  uint64_t hash() const {
    return hash_bytes(kHashStart, weights_.data(), kCount * sizeof(uint16_t));
  }

 private:
  Random random_{1};
  std::vector<uint16_t> weights_, grads_;  // bf16
  offload_context_t context_ = nullptr;
  offload_optimizer_t optimizer_ = nullptr;
};

uint64_t train(const std::string& directory, uint64_t kill_at) {
  Job job;
  uint64_t step = job.resume(directory);
  if (step > 0) printf("resumed after step %llu\n", static_cast<unsigned long long>(step));
  for (; step < kSteps; ++step) {
    job.step(step);
    if (step + 1 == kill_at) raise(SIGKILL);  // the step is under way, and so is a save perhaps
    if ((step + 1) % kSaveEvery == 0) job.save(directory, step + 1);
  }
  job.wait();
  printf("step %llu  params %016llx\n", static_cast<unsigned long long>(step),
         static_cast<unsigned long long>(job.hash()));
  return job.hash();
}

// This program again, in a process of its own; gives its wait status.
int run(const std::string& directory, uint64_t kill_at) {
  fflush(nullptr);
  const pid_t child = fork();
  if (child < 0) fail("fork failed");
  if (child == 0) {
    const std::string number = std::to_string(kill_at);
    execl("/proc/self/exe", "resume", "--kill-at", number.c_str(), directory.c_str(), nullptr);
    _exit(127);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return status;
}

int test(const std::string& directory) {
  const std::string killed = directory + "/killed", whole = directory + "/whole";
  for (const std::string& path : {killed, whole})
    if (mkdir(path.c_str(), 0777) != 0) fail("cannot make " + path);
  for (uint64_t kill_at : {3, 18, 25}) {
    const int status = run(killed, kill_at);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) fail("the job was not killed");
    printf("killed in step %llu\n", static_cast<unsigned long long>(kill_at));
  }
  const bool same = train(killed, 0) == train(whole, 0);
  printf("same bits: %s\n", same ? "yes" : "NO");
  return same ? 0 : 1;
}

}  // namespace

int main(int count, char** arguments) {
  const std::string flag = count > 1 ? arguments[1] : "";
  if (flag == "--test" && count == 3) return test(arguments[2]);
  if (flag == "--kill-at" && count == 4) {
    train(arguments[3], static_cast<uint64_t>(number(flag, arguments[2], 0, kSteps)));
    return 0;
  }
  if (count != 2 || flag[0] == '-') fail("usage: 02_resume [--kill-at N | --test] DIR");
  train(arguments[1], 0);
  return 0;
}
