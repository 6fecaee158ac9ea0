#include "own_folder.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <system_error>
#include <utility>

namespace tool {
namespace {

constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
constexpr unsigned char kNoSignal = 0;
constexpr int kTries = 1000;  // threads of the library may still make files

int write_end = -1;  // of the pipe on which the thread waits

void Tell(unsigned char number) {
  const int error = errno;
  while (write(write_end, &number, 1) < 0 && errno == EINTR) {
  }
  errno = error;
}

void Handle(int signal) { Tell(static_cast<unsigned char>(signal)); }

// Leaves a signal that is ignored, as under nohup, as it is.
void SetHandlers(void (*from)(int), void (*to)(int)) {
  for (const int signal : kSignals) {
    struct sigaction action {};
    if (sigaction(signal, nullptr, &action) != 0 || action.sa_handler != from) continue;
    action.sa_handler = to;
    action.sa_flags = SA_RESTART;
    (void)sigaction(signal, &action, nullptr);
  }
}

}  // namespace

OwnFolder::OwnFolder(const std::string& path) : path_(path) {
  // If the system refuses a pipe or a thread, a signal ends the process at once and leaves the
  // folder.
  if (pipe2(pipe_, O_CLOEXEC) != 0) return;
  write_end = pipe_[1];
  auto thread =
      hybridopt::system::Thread::Start<&OwnFolder::WaitForSignal>("hybridopt/folder", this);
  if (!thread.ok()) return;
  thread_ = std::move(thread.value());
  SetHandlers(SIG_DFL, Handle);
}

OwnFolder::~OwnFolder() {
  if (thread_.joinable()) {
    SetHandlers(Handle, SIG_DFL);
    Tell(kNoSignal);
    thread_.Join();  // after a signal it does not return
  }
  for (const int end : pipe_)
    if (end >= 0) close(end);
}

void OwnFolder::WaitForSignal() {
  unsigned char number = kNoSignal;
  while (read(pipe_[0], &number, 1) < 0 && errno == EINTR) {
  }
  if (number == kNoSignal) return;
  std::error_code error;
  for (int i = 0; i < kTries; ++i) {
    std::filesystem::remove_all(path_, error);
    if (!error) break;
  }
  SetHandlers(Handle, SIG_DFL);
  kill(getpid(), number);  // this thread blocks signals
  for (;;) pause();
}

}  // namespace tool
