#include "array.h"

#include <signal.h>
#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "scheduler.h"

namespace hybridopt::schedule {
namespace {

constexpr uint64_t kPage = 4096;

uint64_t Mapped(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

void Must(int32_t status, const char* call) {
  if (status == OFFLOAD_DEVICE_FAILED) throw DeviceFailed();
  if (status != OFFLOAD_OK)
    Fail(std::string(call) + ": " + offload_status_name(status) + ", " + offload_last_error());
}

struct Copy {
  void* to;
  Bytes bytes;
  static void Run(void* copy) {
    const std::unique_ptr<Copy> self(static_cast<Copy*>(copy));
    std::memcpy(self->to, self->bytes.data(), self->bytes.size());
  }
};

void OnFault(int, siginfo_t* info, void*) {
  char text[100];
  std::snprintf(text, sizeof(text), "a thread has accessed %p, which it may not", info->si_addr);
  if (IsTask()) Fail(text);
  std::fprintf(stderr, "%s\n", text);
  std::_Exit(1);
}

}  // namespace

Array::Array(offload_context_t context, bool sim, uint64_t bytes)
    : context_(context), sim_(sim), bytes_(bytes) {
  if (sim) {
    Must(offload_device_alloc(context, bytes, &data_), "offload_device_alloc");
  } else {
    data_ = mmap(nullptr, Mapped(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) Fail("no memory for an array");
  }
}

Array::~Array() {
  if (sim_)
    (void)offload_device_free(context_, data_);
  else
    munmap(data_, Mapped(bytes_));
}

void Array::Lend() {
  if (!sim_) mprotect(data_, Mapped(bytes_), PROT_READ | PROT_WRITE);
}

void Array::TakeBack() {
  if (!sim_) mprotect(data_, Mapped(bytes_), PROT_NONE);
}

// On the simulated device a function on the stream writes it, later.
void Array::Write(const Bytes& bytes, offload_stream_t stream) {
  if (!sim_) {
    std::memcpy(data_, bytes.data(), bytes.size());
    return;
  }
  void* mapped = nullptr;
  Must(offload_device_map(context_, data_, bytes_, &mapped), "offload_device_map");
  Must(offload_stream_run(context_, stream, Copy::Run, new Copy{mapped, bytes}),
       "offload_stream_run");
}

Bytes Array::Read() const {
  Bytes bytes(bytes_);
  Must(offload_device_download(context_, bytes.data(), data_, bytes_, nullptr),
       "offload_device_download");
  return bytes;
}

void WatchArrays() {
  struct sigaction action = {};
  action.sa_sigaction = OnFault;
  action.sa_flags = SA_SIGINFO;
  for (int fault : {SIGSEGV, SIGBUS}) sigaction(fault, &action, nullptr);
}

}  // namespace hybridopt::schedule
