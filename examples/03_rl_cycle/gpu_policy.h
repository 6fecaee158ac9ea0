// gpu_policy.h: the policy of policy.h on a GPU, as what is queued on a stream.
#ifndef HYBRIDOPT_EXAMPLES_RL_CYCLE_GPU_POLICY_H
#define HYBRIDOPT_EXAMPLES_RL_CYCLE_GPU_POLICY_H

#include <memory>

#include "policy.h"

// Addresses are on the GPU. What each function queues must have ended before the next is called.
class GpuPolicy {
 public:
  virtual ~GpuPolicy() = default;

  virtual void* stream() const = 0;  // a cudaStream_t of the program's own

  virtual void copy(uint16_t* to, const uint16_t* from, uint64_t count) = 0;
  virtual void generate(const Prompts& prompts, const uint16_t* weights, float* cache) = 0;
  virtual const Scores& scores() const = 0;  // of the last generate
  virtual void learn(int step, const uint16_t* params, uint16_t* grads) = 0;  // from its prompts

  virtual uint64_t free_bytes() const = 0;  // of the GPU, as cudaMemGetInfo says
};

// NULL where the program was built without cuBLAS.
std::unique_ptr<GpuPolicy> make_gpu_policy();

#endif  // HYBRIDOPT_EXAMPLES_RL_CYCLE_GPU_POLICY_H
