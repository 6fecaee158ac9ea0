// NCCL's functions, from the copy of it that this process uses.
#pragma once

#include <cuda_runtime_api.h>
#include <offload_nccl.h>

#include <cstddef>
#include <string>

namespace hybridopt::nccl {

// The few of NCCL's types that are needed. Its headers need not be there.
struct Communicator;
enum Outcome : int { kSuccess = 0, kInProgress = 7 };  // others are errors
constexpr int kBytesType = 0;                          // ncclInt8
struct Config {                                        // as of 2.14; later releases take it
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = 21400;
  int blocking = 0;
};
using UniqueId = offload_nccl_id_t;

struct Functions {
  Outcome (*get_version)(int*);
  Outcome (*get_unique_id)(UniqueId*);
  Outcome (*init_rank)(Communicator**, int world, UniqueId, int rank, Config*);
  Outcome (*async_error)(Communicator*, Outcome*);
  Outcome (*all_gather)(const void*, void*, size_t, int, Communicator*, cudaStream_t);
  Outcome (*abort)(Communicator*);
  const char* (*error_string)(Outcome);
};

// NULL if there is none to use; *why then says where it was looked for. Found once, it stays.
const Functions* Find(std::string* why);

}  // namespace hybridopt::nccl
