// Random programs over the public ABI under the scheduler.
//
//   schedule_programs host|sim|ranks PROGRAMS    this number of programs, each in four schedules
//   schedule_programs NAME                       one run, or some of one program
//
// NAME is FAMILY.PROGRAM.SCHEDULE[+COUNT][-CALL,CALL...]: this program in this schedule (or in
// COUNT schedules from this one on), without these calls. A failure prints it, beside the seed and
// the program, and then leaves out calls while some schedule still fails. With GTEST_FAIL_FAST in
// the environment it leaves out none: a failure is all that scripts/mutate asks for.
//
// Each run is a process of its own, so a run depends on the seed and on its name alone.
#include <errno.h>
#include <malloc.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../scale.h"
#include "../temporary_directory.h"
#include "../thread_comm.h"
#include "array.h"
#include "problem.h"
#include "program.h"
#include "scheduler.h"
#include "stash_user.h"
#include "trainer.h"

namespace hybridopt::schedule {
namespace {

// ----------------------------------------------------------------------------- one program, run --

void DropLog(void*, int32_t, const char*) {}

offload_context_t CreateContext(const Program& program, uint32_t rank) {
  auto options = Make<offload_context_options_t>();
  options.device_kind = program.sim ? OFFLOAD_DEVICE_SIM : OFFLOAD_DEVICE_HOST;
  options.threads = program.threads;
  options.log = DropLog;
  options.local_world = 1;
  if (program.sim) {
    options.sim_memory_bytes = uint64_t{2} << 20;
    options.sim_seed = program.number + rank;
    options.sim_delay_ns_max = program.sim_delay_ns_max;
  }
  offload_context_t context = nullptr;
  if (offload_context_create(&options, &context) != OFFLOAD_OK)
    Fail(std::string("context_create: ") + offload_last_error());
  return context;
}

constexpr std::chrono::nanoseconds kHang{10 * kCommTimeoutNs};

void RunTrainers(const Program& program, std::vector<std::unique_ptr<Trainer>>& trainers,
                 std::vector<std::unique_ptr<StashUser>>& stash_users) {
  std::latch committed(program.trainers);
  std::vector<std::thread> threads;
  for (auto& user : stash_users) threads.emplace_back([&] { user->Run(); });
  for (const Script& script : program.observers)
    threads.emplace_back(
        [&] { Observe(script, trainers[script.trainer]->watched(), program.may_fail()); });
  for (auto& trainer : trainers) threads.emplace_back([&] { trainer->Run(committed); });
  for (std::thread& thread : threads) thread.join();
}

// Whether a rank that has waited for all of its work, or an observer, has got the error of rank 1's
// fault: a wait for everything returns the failure of a save only once.
void CheckAllTold(const Program& program, const ThreadComm& comm,
                  const std::vector<std::unique_ptr<Trainer>>& trainers) {
  if (!program.comm_may_fail() || !program.waits_at_end) return;
  if (comm.calls(1) <= program.comm_fault_call) return;
  for (size_t rank = 0; rank < trainers.size(); ++rank)
    if (!trainers[rank]->failed() && !trainers[rank]->watched().told)
      Fail("rank " + std::to_string(rank) + " has not been told of the failure of rank 1");
}

void DestroyContext(offload_context_t context, bool left_behind) {
  const int32_t status = offload_context_destroy(context);
  if (status != (left_behind ? OFFLOAD_INVALID_STATE : OFFLOAD_OK))
    Fail(std::string("context_destroy returns ") + offload_status_name(status) + ": " +
         offload_last_error());
}

// The first task of a run.
void RunProgram(const Program& program, const std::string& directory) {
  const bool ranks = program.world > 1;
  ThreadComm comm(static_cast<int32_t>(program.world));
  if (ranks) comm.Inject(1, program.comm_fault_call, program.comm_fault);
  comm.ReleaseAfter(kHang);
  std::vector<offload_context_t> contexts;
  for (uint32_t rank = 0; rank < program.world; ++rank)
    contexts.push_back(CreateContext(program, rank));
  std::vector<std::unique_ptr<Trainer>> trainers;
  for (uint32_t number = 0; number < program.trainers; ++number)
    trainers.push_back(std::make_unique<Trainer>(
        program, number, contexts[ranks ? number : 0], ranks ? &comm : nullptr,
        directory + "/" + std::to_string(ranks ? 0 : number)));
  std::unique_ptr<SharedStash> stash;
  std::vector<std::unique_ptr<StashUser>> stash_users;
  if (!program.stash_users.empty())
    stash = std::make_unique<SharedStash>(contexts[0],
                                          static_cast<uint32_t>(program.stash_users.size()));
  for (const Script& script : program.stash_users)
    stash_users.push_back(std::make_unique<StashUser>(*stash, script, program.may_fail()));
  RunTrainers(program, trainers, stash_users);
  CheckAllTold(program, comm, trainers);
  for (size_t i = 0; i < contexts.size(); ++i)
    DestroyContext(contexts[i], ranks && trainers[i]->left_behind());
}

// --------------------------------------------------------------------------------- a run's name --

constexpr const char* kFamilies[] = {"host", "sim", "ranks"};

struct Name {
  Program::Family family{};
  uint64_t program = 0;
  uint64_t schedule = 0;
  uint64_t count = 1;
  std::vector<uint32_t> removed;

  std::string Text() const {
    std::string text = std::string(kFamilies[static_cast<size_t>(family)]) + "." +
                       std::to_string(program) + "." + std::to_string(schedule);
    if (count > 1) text += "+" + std::to_string(count);
    for (size_t i = 0; i < removed.size(); ++i)
      text += (i == 0 ? "-" : ",") + std::to_string(removed[i]);
    return text;
  }
};

bool ParseFamily(const std::string& text, Program::Family* family) {
  const auto* const found = std::find(std::begin(kFamilies), std::end(kFamilies), text);
  *family = static_cast<Program::Family>(found - std::begin(kFamilies));
  return found != std::end(kFamilies);
}

bool ParseName(const char* text, Name* name) {
  const char* at = std::strchr(text, '.');
  if (at == nullptr || !ParseFamily(std::string(text, at), &name->family)) return false;
  const auto number = [&] {
    char* end = nullptr;
    const uint64_t value = std::strtoull(at + 1, &end, 10);
    at = end;
    return value;
  };
  name->program = number();
  if (*at != '.') return false;
  name->schedule = number();
  if (*at == '+') name->count = number();
  while (*at == '-' || *at == ',') name->removed.push_back(static_cast<uint32_t>(number()));
  return *at == '\0';
}

Program ProgramOf(const Name& name) {
  Program program(name.family, name.program);
  program.Remove(name.removed);
  return program;
}

// -------------------------------------------------------------------------- a process for a run --
// A run may depend on addresses, since threads that wait for atomics share queues by address.
// So the process that forks the runs, the nursery, does nothing else: its memory is the same every
// time.

constexpr unsigned kHungSeconds = 300;  // without an end outside of the scheduler

// The request of a run, in memory that all processes share.
struct Request {
  Program::Family family;
  uint64_t program;
  uint64_t schedule;
  uint32_t removed_count;
  uint32_t removed[100];
  bool quietly;
  char directory[100];
  int status;  // of the run's process
  Summary summary;
};

Request* const request = static_cast<Request*>(
    mmap(nullptr, sizeof(Request), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
int to_nursery[2], from_nursery[2];  // pipes: a byte for each run

[[noreturn]] void RunRequest() {
  if (request->quietly && std::freopen("/dev/null", "w", stderr) == nullptr) _exit(2);
  alarm(kHungSeconds);
  WatchArrays();
  Program program(request->family, request->program);
  program.Remove({request->removed, request->removed + request->removed_count});
  const std::string directory = request->directory;
  request->summary = RunSchedule(request->schedule, [&] { RunProgram(program, directory); });
  _exit(0);
}

// Ends when there are no more requests.
void BeNursery() {
  char byte = 0;
  while (read(to_nursery[0], &byte, 1) == 1) {
    const pid_t run = fork();
    if (run == 0) RunRequest();
    request->status = -1;
    while (run > 0 && waitpid(run, &request->status, 0) < 0 && errno == EINTR) continue;
    if (write(from_nursery[1], &byte, 1) != 1) return;
  }
}

// Runs the program in a new directory, which is in memory if there is a file system for that.
// Returns whether the run had no error.
bool Passes(const Name& name, bool quietly) {
  const std::string memory = "/dev/shm";
  const TemporaryDirectory directory(
      access(memory.c_str(), W_OK) == 0 ? memory : std::filesystem::temp_directory_path().string());
  for (uint32_t number = 0; number < kWorldMax; ++number)
    std::filesystem::create_directory(directory / std::to_string(number));
  request->family = name.family;
  request->program = name.program;
  request->schedule = name.schedule;
  request->removed_count = static_cast<uint32_t>(name.removed.size());
  std::copy(name.removed.begin(), name.removed.end(), request->removed);
  request->quietly = quietly;
  std::snprintf(request->directory, sizeof(request->directory), "%s", directory.path().c_str());
  char byte = 0;
  if (write(to_nursery[1], &byte, 1) != 1 || read(from_nursery[0], &byte, 1) != 1) std::abort();
  if (WIFSIGNALED(request->status) && !quietly)
    std::fprintf(stderr, "\nThe run has been ended by signal %d (%s)\n", WTERMSIG(request->status),
                 strsignal(WTERMSIG(request->status)));
  return request->status == 0;
}

// ------------------------------------------------------------------------------ after a failure --

void Tell(const Name& name) {
  std::fprintf(stderr, "%s\nTo repeat it: HYBRIDOPT_TEST_SEED=%" PRIu64 " %s %s\n",
               ProgramOf(name).Text().c_str(), TestSeed(), program_invocation_name,
               name.Text().c_str());
}

// Looks for a schedule in which the program fails, from this one on.
bool FindFailure(Name* name, uint64_t tries) {
  for (uint64_t left = tries; left > 0; --left, ++name->schedule)
    if (!Passes(*name, true)) return true;
  return false;
}

// Leaves out calls, many at a time and then one by one, while some schedule still fails.
Name Shrink(Name name) {
  constexpr uint64_t kTries = 200;
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(120);
  const uint32_t calls = Program(name.family, name.program).call_count();
  for (uint32_t size = (calls + 1) / 2; size > 0; size /= 2)
    for (uint32_t begin = 0; begin < calls; begin += size) {
      if (std::chrono::steady_clock::now() > end) return name;
      Name fewer = name;
      for (uint32_t call = begin; call < std::min(begin + size, calls); ++call)
        if (std::find(fewer.removed.begin(), fewer.removed.end(), call) == fewer.removed.end())
          fewer.removed.push_back(call);
      if (fewer.removed.size() > name.removed.size() && FindFailure(&fewer, kTries)) name = fewer;
    }
  return name;
}

// ----------------------------------------------------------------------------------------- main --

int RunOne(Name name) {
  for (uint64_t left = std::exchange(name.count, 1); left > 0; --left, ++name.schedule) {
    if (!Passes(name, false)) {
      Tell(name);
      return 1;
    }
    std::printf("%s: %" PRIu64 " points, %" PRIu64 " switches, trace %016" PRIx64 "\n",
                name.Text().c_str(), request->summary.points, request->summary.switches,
                request->summary.trace);
  }
  return 0;
}

// The same run once more must be the same to the last choice.
bool Repeats(const Name& name) {
  const Summary first = request->summary;
  if (Passes(name, false) && request->summary.trace == first.trace) return true;
  std::fprintf(stderr, "\n%s does not repeat: %" PRIu64 " points, then %" PRIu64 "\n",
               name.Text().c_str(), first.points, request->summary.points);
  return false;
}

int Explore(Program::Family family, uint64_t programs) {
  constexpr uint64_t kSchedules = 4;  // of each program
  constexpr uint64_t kRepeated = 50;  // each 50th run is made twice
  uint64_t points = 0, switches = 0;
  for (uint64_t run = 0; run < programs * kSchedules; ++run) {
    const Name name{family, run / kSchedules, run, 1, {}};
    if (!Passes(name, false)) {
      Tell(name);
      if (std::getenv("GTEST_FAIL_FAST") != nullptr) return 1;
      std::fprintf(stderr, "Leaving out calls (this takes two minutes at most) ...\n");
      Tell(Shrink(name));
      return 1;
    }
    points += request->summary.points;
    switches += request->summary.switches;
    if (run % kRepeated == 0 && !Repeats(name)) return 1;
  }
  std::printf("%" PRIu64 " schedules, %" PRIu64 " points, %" PRIu64 " switches\n",
              programs * kSchedules, points, switches);
  return 0;
}

// Starts this program again without address randomization. If the system forbids that, a seed
// repeats a run only most of the time.
void FixAddresses(char** arguments) {
  const int persona = personality(0xffffffff);
  if (persona == -1 || (persona & ADDR_NO_RANDOMIZE) != 0) return;
  if (personality(static_cast<unsigned long>(persona) | ADDR_NO_RANDOMIZE) == -1) return;
  execv("/proc/self/exe", arguments);
}

// Small stacks are quickest: the C library keeps them for the next threads.
void SetStackBytes(uint64_t bytes) {
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, bytes);
  pthread_setattr_default_np(&attributes);
  pthread_attr_destroy(&attributes);
}

int Explorer(int count, char** arguments) {
  Program::Family family{};
  if (Name name; count == 2 && ParseName(arguments[1], &name)) return RunOne(name);
  if (count == 3 && ParseFamily(arguments[1], &family))
    return Explore(family, Scaled<uint64_t>(std::strtoull(arguments[2], nullptr, 10)));
  std::fprintf(stderr, "Usage: %s host|sim|ranks PROGRAMS, or %s NAME\n", arguments[0],
               arguments[0]);
  return 2;
}

int Main(int count, char** arguments) {
  FixAddresses(arguments);
  mallopt(M_ARENA_MAX, 1);
  SetStackBytes(uint64_t{256} << 10);
  std::printf("What is drawn at random comes from HYBRIDOPT_TEST_SEED=%" PRIu64 "\n", TestSeed());
  std::fflush(stdout);
  (void)ExpectedAfter(0, 1, 0, 0);
  if (pipe(to_nursery) != 0 || pipe(from_nursery) != 0) return 2;
  const pid_t explorer = fork();
  if (explorer == 0) {
    const int status = Explorer(count, arguments);
    std::fflush(nullptr);
    _exit(status);
  }
  close(to_nursery[1]);
  BeNursery();
  int status = 0;
  while (waitpid(explorer, &status, 0) < 0 && errno == EINTR) continue;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 2;
}

}  // namespace
}  // namespace hybridopt::schedule

int main(int count, char** arguments) { return hybridopt::schedule::Main(count, arguments); }
