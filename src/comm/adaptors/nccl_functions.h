// NCCL's functions, from the copy of NCCL that this process uses.
#pragma once

#include <cuda_runtime_api.h>
#include <offload_nccl.h>

#include <cstddef>
#include <string>

namespace hybridopt::adaptor {

// The types of NCCL that the adaptor needs, so that it can be built without NCCL's headers.
struct NcclCommunicator;
enum NcclOutcome : int { kNcclSuccess = 0, kNcclInProgress = 7 };  // others are errors
constexpr int kNcclBytes = 0;                                      // ncclInt8
struct NcclConfig {  // the struct of 2.14, which later releases accept
  size_t size = sizeof(NcclConfig);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = 0;
};

struct NcclFunctions {
  NcclOutcome (*get_version)(int*);
  NcclOutcome (*get_unique_id)(offload_nccl_id_t*);
  NcclOutcome (*init_rank)(NcclCommunicator**, int world, offload_nccl_id_t, int rank, NcclConfig*);
  NcclOutcome (*async_error)(NcclCommunicator*, NcclOutcome*);
  NcclOutcome (*all_gather)(const void*, void*, size_t, int, NcclCommunicator*, cudaStream_t);
  NcclOutcome (*group_start)();
  NcclOutcome (*send)(const void*, size_t, int type, int rank, NcclCommunicator*, cudaStream_t);
  NcclOutcome (*receive)(void*, size_t, int type, int rank, NcclCommunicator*, cudaStream_t);
  NcclOutcome (*group_end)();
  NcclOutcome (*abort)(NcclCommunicator*);
  const char* (*error_string)(NcclOutcome);
};

// NULL if no NCCL can be used; *why then says where it was searched. Once found it stays loaded.
const NcclFunctions* FindNccl(std::string* why);

}  // namespace hybridopt::adaptor
