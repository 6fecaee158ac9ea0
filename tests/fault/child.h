// Runs a part of a test in a child process, which may give up things that a process can never get
// back: system calls, limits, CPUs.
#pragma once

#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace hybridopt::fault {

inline constexpr int kSkipped = 77;

// Failures of `body` print their text and fail the parent's test; _Exit(kSkipped) skips it. The
// parent must have no other threads.
template <typename Body>
void InChild(Body&& body) {
  std::fflush(nullptr);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(120);
    body();
    std::fflush(nullptr);
    std::_Exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (WIFEXITED(status) && WEXITSTATUS(status) == kSkipped)
    GTEST_SKIP() << "this system does not allow the test its restriction";
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "wait status " << status;
}

// The result of a forbidden system call: of all its uses, or only of those whose third argument is
// `third`.
struct Restriction {
  long call;
  unsigned action;
  int third = -1;
};

// Applies to this process, until its end.
inline void Restrict(const std::vector<Restriction>& restrictions) {
  std::vector<sock_filter> program;
  const auto load = [&](size_t offset) {
    program.push_back(BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<unsigned>(offset)));
  };
  for (const Restriction& restriction : restrictions) {
    const bool any = restriction.third < 0;
    load(offsetof(seccomp_data, nr));
    const unsigned char skipped = any ? 1 : 3;
    program.push_back(
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(restriction.call), 0, skipped));
    if (!any) {
      load(offsetof(seccomp_data, args[2]));
      program.push_back(
          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<unsigned>(restriction.third), 0, 1));
    }
    program.push_back(BPF_STMT(BPF_RET | BPF_K, restriction.action));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) != 0)
    std::_Exit(kSkipped);
}

}  // namespace hybridopt::fault
