// device_work.h: what a rank of 09_zero1 queues on its device's stream. Nothing here waits.
#ifndef HYBRIDOPT_EXAMPLES_ZERO1_DEVICE_WORK_H
#define HYBRIDOPT_EXAMPLES_ZERO1_DEVICE_WORK_H

#include <mpi.h>

#include <memory>

#include "../program.h"
#include "network.h"

class DeviceWork {
 public:
  virtual ~DeviceWork() = default;

  virtual void queue(const MicroBatch& micro_batch) = 0;
  virtual void add(float* sum, const float* other, uint64_t count) = 0;

  // All-to-all: piece r of `mine`, of `count` elements, goes to rank r; piece r of `received` comes
  // from rank r.
  virtual void exchange(const float* mine, float* received, uint64_t count) = 0;

  // All-gather in place: piece r of `params`, of `count` elements, comes from rank r.
  virtual void gather(uint16_t* params, uint64_t count) = 0;
};

// On the simulated device, where functions that call MPI stand for kernels.
std::unique_ptr<DeviceWork> make_sim_work(offload_context_t context, offload_stream_t stream,
                                          MPI_Comm ranks);

// On a GPU, the context's, with NCCL between the ranks; MPI only tells them NCCL's id. Ends the
// program where it was built without NCCL.
std::unique_ptr<DeviceWork> make_gpu_work(offload_stream_t stream, MPI_Comm ranks, int device);

#endif  // HYBRIDOPT_EXAMPLES_ZERO1_DEVICE_WORK_H
