// The NCCL adaptor, one mode in each run, because a process keeps the libnccl that it has found.
#include <dlfcn.h>
#include <offload_nccl.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr int64_t kLongNs = 60'000'000'000;

void Fail(const char* what) {
  std::printf("FAILED: %s; the last error is: %s\n", what, offload_nccl_last_error());
  std::exit(1);
}
#define EXPECT(condition) \
  if (!(condition)) Fail(#condition)

bool LastErrorHas(const std::string& words) {
  return std::string(offload_nccl_last_error()).find(words) != std::string::npos;
}

void NameLibrary(const char* path) { setenv("HYBRIDOPT_NCCL_PATH", path, 1); }

int VersionIn(const offload_nccl_id_t& id) {
  int version = 0;
  std::memcpy(&version, &id, sizeof(version));
  return version;
}

void Missing() {
  NameLibrary("/nonexistent/libnccl.so.2");
  offload_nccl_id_t id;
  EXPECT(offload_nccl_get_id(&id) == OFFLOAD_UNSUPPORTED);
  EXPECT(LastErrorHas("HYBRIDOPT_NCCL_PATH") && LastErrorHas("/nonexistent/libnccl.so.2"));
  offload_comm_t table{};
  EXPECT(offload_nccl_create(&id, 0, 1, 0, kLongNs, &table) == OFFLOAD_UNSUPPORTED);
  EXPECT(table.user == nullptr);
}

void Old(const char* library) {
  NameLibrary(library);
  offload_nccl_id_t id;
  EXPECT(offload_nccl_get_id(&id) == OFFLOAD_UNSUPPORTED);
  EXPECT(LastErrorHas("is NCCL 21304") && LastErrorHas("expected 21400"));
  EXPECT(LastErrorHas(library));
}

void Incomplete(const char* library) {
  NameLibrary(library);
  offload_nccl_id_t id;
  EXPECT(offload_nccl_get_id(&id) == OFFLOAD_UNSUPPORTED);
  EXPECT(LastErrorHas("has no ncclGetErrorString"));
}

// A libnccl that is loaded already is used, even if another one is named.
void Loaded(const char* loaded, const char* other) {
  EXPECT(dlopen(loaded, RTLD_NOW | RTLD_LOCAL) != nullptr);
  NameLibrary(other);
  offload_nccl_id_t id;
  EXPECT(offload_nccl_get_id(&id) == OFFLOAD_OK);
  EXPECT(VersionIn(id) == 22000);
}

void Arguments(const char* library) {
  NameLibrary(library);
  EXPECT(offload_nccl_get_id(nullptr) == OFFLOAD_INVALID_ARGUMENT && LastErrorHas("id is NULL"));
  offload_nccl_id_t id;
  EXPECT(offload_nccl_get_id(&id) == OFFLOAD_OK && VersionIn(id) == 22000);
  offload_comm_t table{};
  EXPECT(offload_nccl_create(nullptr, 0, 1, 0, 0, &table) == OFFLOAD_INVALID_ARGUMENT);
  EXPECT(LastErrorHas("id is NULL"));
  EXPECT(offload_nccl_create(&id, 0, 1, 0, 0, nullptr) == OFFLOAD_INVALID_ARGUMENT);
  EXPECT(LastErrorHas("table is NULL"));
  EXPECT(offload_nccl_create(&id, 1, 1, 0, 0, &table) == OFFLOAD_INVALID_ARGUMENT);
  EXPECT(LastErrorHas("rank is 1 of world 1"));
  EXPECT(offload_nccl_destroy(nullptr) == OFFLOAD_INVALID_ARGUMENT);
  EXPECT(LastErrorHas("table is NULL"));
  EXPECT(offload_nccl_destroy(&table) == OFFLOAD_INVALID_ARGUMENT);
  EXPECT(LastErrorHas("not such a one"));
}

// ---------------------------------------------------------------------------------- with a GPU --

offload_comm_t Create() {
  offload_nccl_id_t id;
  offload_comm_t table{};
  EXPECT(offload_nccl_get_id(&id) == OFFLOAD_OK);
  EXPECT(offload_nccl_create(&id, 0, 1, 0, kLongNs, &table) == OFFLOAD_OK);
  EXPECT(table.rank == 0 && table.world == 1);
  return table;
}

// A real libnccl, of one rank: found by its name or in HYBRIDOPT_NCCL_PATH.
void OneRank() {
  offload_comm_t table = Create();
  double sums[100];
  int32_t flags[3] = {-5, 0, 7};
  for (int i = 0; i < 100; ++i) sums[i] = 1.0 / (i + 1);
  EXPECT(table.sum(table.user, sums, 100, kLongNs) == OFFLOAD_OK);
  for (int i = 0; i < 100; ++i) EXPECT(sums[i] == 1.0 / (i + 1));
  EXPECT(table.max(table.user, flags, 3, kLongNs) == OFFLOAD_OK);
  EXPECT(flags[0] == -5 && flags[1] == 0 && flags[2] == 7);
  EXPECT(table.barrier(table.user, kLongNs) == OFFLOAD_OK);
  EXPECT(offload_nccl_destroy(&table) == OFFLOAD_OK);
  EXPECT(offload_nccl_destroy(&table) == OFFLOAD_INVALID_ARGUMENT);
}

// A gather that never ends, or ends in an error: the call fails in time, the communicator is
// aborted once, and later calls are refused.
void Broken(const char* library, const char* how, int32_t code, const char* words) {
  setenv("FAKE_NCCL", how, 1);
  NameLibrary(library);
  offload_comm_t table = Create();
  double sum = 1;
  EXPECT(table.sum(table.user, &sum, 1, 50'000'000) == code);
  EXPECT(LastErrorHas(words) && LastErrorHas("rank 0 of 1"));
  EXPECT(table.barrier(table.user, kLongNs) == OFFLOAD_COMM_FAILED);
  EXPECT(LastErrorHas("out of step for good"));
  void* const fake = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
  EXPECT(fake != nullptr);
  EXPECT(offload_nccl_destroy(&table) == OFFLOAD_OK);
  EXPECT(*static_cast<int*>(dlsym(fake, "fake_nccl_aborted")) == 1);
}

// The same for an exchange: the group is ended, and the communicator aborted once.
void BrokenExchange(const char* library, const char* how, int32_t code, const char* words) {
  setenv("FAKE_NCCL", how, 1);
  NameLibrary(library);
  offload_comm_t table = Create();
  EXPECT(table.exchange_on_host == 0);
  double data[2] = {};
  offload_message_t messages[2] = {};
  for (int i = 0; i < 2; ++i)
    messages[i] = {sizeof(messages[i]), 0, i, 0, &data[i], sizeof(data[i])};
  EXPECT(table.exchange(table.user, messages, 2, nullptr, 50'000'000) == code);
  EXPECT(LastErrorHas(words) && LastErrorHas("rank 0 of 1"));
  EXPECT(table.exchange(table.user, messages, 2, nullptr, kLongNs) == OFFLOAD_COMM_FAILED);
  EXPECT(LastErrorHas("out of step for good"));
  void* const fake = dlopen(library, RTLD_NOLOAD | RTLD_LAZY);
  EXPECT(fake != nullptr);
  EXPECT(offload_nccl_destroy(&table) == OFFLOAD_OK);
  EXPECT(*static_cast<int*>(dlsym(fake, "fake_nccl_aborted")) == 1);
  EXPECT(*static_cast<int*>(dlsym(fake, "fake_nccl_groups")) == 0);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "missing") {
    Missing();
  } else if (mode == "old" && argc == 3) {
    Old(argv[2]);
  } else if (mode == "incomplete" && argc == 3) {
    Incomplete(argv[2]);
  } else if (mode == "loaded" && argc == 4) {
    Loaded(argv[2], argv[3]);
  } else if (mode == "arguments" && argc == 3) {
    Arguments(argv[2]);
  } else if (mode == "one_rank") {
    OneRank();
  } else if (mode == "hang" && argc == 3) {
    Broken(argv[2], "hang", OFFLOAD_TIMED_OUT, "not all ranks came in time");
  } else if (mode == "error" && argc == 3) {
    Broken(argv[2], "error", OFFLOAD_COMM_FAILED, "remote error");
  } else if (mode == "hang_exchange" && argc == 3) {
    BrokenExchange(argv[2], "hang", OFFLOAD_TIMED_OUT, "not all ranks came in time");
  } else if (mode == "error_exchange" && argc == 3) {
    BrokenExchange(argv[2], "error", OFFLOAD_COMM_FAILED, "remote error");
  } else if (mode == "refuse_exchange" && argc == 3) {
    BrokenExchange(argv[2], "refuse", OFFLOAD_COMM_FAILED, "ncclSend and ncclRecv");
  } else {
    Fail("the arguments make no sense");
  }
  std::printf("%s: passed\n", mode.c_str());
}
