// NCCL's functions, from the copy of it that this process uses.
#pragma once

#include <cuda_runtime_api.h>
#include <offload_nccl.h>

#include <cstddef>
#include <string>

namespace hybridopt::adaptor {

// The few of NCCL's types that are needed. Its headers need not be there.
struct NcclCommunicator;
enum NcclOutcome : int { kNcclSuccess = 0, kNcclInProgress = 7 };  // others are errors
constexpr int kNcclBytes = 0;                                      // ncclInt8
struct NcclConfig {  // as of 2.14; later releases take it
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
  NcclOutcome (*abort)(NcclCommunicator*);
  const char* (*error_string)(NcclOutcome);
};

// NULL if there is none to use; *why then says where it was looked for. Found once, it stays.
const NcclFunctions* FindNccl(std::string* why);

}  // namespace hybridopt::adaptor
