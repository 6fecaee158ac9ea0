/* Stands for libnccl: of one rank. FAKE_NCCL_VERSION is what it calls itself; FAKE_NCCL=hang or
 * =error in the environment makes gathers and groups do that; FAKE_NCCL=refuse makes sends fail. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

typedef struct {
  char bytes[128];
} UniqueId;

static int hangs(void) { return getenv("FAKE_NCCL") && !strcmp(getenv("FAKE_NCCL"), "hang"); }
static int fails(void) { return getenv("FAKE_NCCL") && !strcmp(getenv("FAKE_NCCL"), "error"); }
static int refuses(void) { return getenv("FAKE_NCCL") && !strcmp(getenv("FAKE_NCCL"), "refuse"); }
static int gathered = 0;

EXPORT int fake_nccl_aborted = 0;
EXPORT int fake_nccl_groups = 0; /* that have begun and not ended */

EXPORT int ncclGetVersion(int* version) {
  *version = FAKE_NCCL_VERSION;
  return 0;
}
EXPORT int ncclGetUniqueId(UniqueId* id) {
  const int version = FAKE_NCCL_VERSION;
  memset(id, 0, sizeof(*id));
  memcpy(id, &version, sizeof(version));
  return 0;
}
EXPORT int ncclCommGetAsyncError(void* comm, int* error) {
  (void)comm;
  *error = gathered && hangs() ? 7 : gathered && fails() ? 6 : 0;
  return 0;
}
EXPORT int ncclCommInitRankConfig(void** comm, int world, UniqueId id, int rank, void* config) {
  static int one;
  size_t size = 0;
  (void)id;
  memcpy(&size, config, sizeof(size));
  *comm = &one;
  return world == 1 && rank == 0 && size == 24 ? 7 : 4; /* in progress, then done */
}
EXPORT int ncclAllGather(const void* send, void* receive, size_t count, int type, void* comm,
                         void* stream) {
  (void)send, (void)receive, (void)count, (void)type, (void)comm, (void)stream;
  gathered = 1;
  return 7;
}
EXPORT int ncclGroupStart(void) {
  fake_nccl_groups += 1;
  return 0;
}
EXPORT int ncclSend(const void* data, size_t count, int type, int rank, void* comm, void* stream) {
  (void)data, (void)count, (void)type, (void)comm, (void)stream;
  return refuses() || rank != 0 || fake_nccl_groups != 1 ? 4 : 7;
}
EXPORT int ncclRecv(void* data, size_t count, int type, int rank, void* comm, void* stream) {
  (void)data, (void)count, (void)type, (void)comm, (void)stream;
  return rank != 0 || fake_nccl_groups != 1 ? 4 : 7;
}
EXPORT int ncclGroupEnd(void) {
  fake_nccl_groups -= 1;
  gathered = 1;
  return 7;
}
EXPORT int ncclCommAbort(void* comm) {
  (void)comm;
  fake_nccl_aborted += 1;
  return 0;
}
#ifndef FAKE_NCCL_INCOMPLETE
EXPORT const char* ncclGetErrorString(int error) { return error == 6 ? "remote error" : "error"; }
#endif
