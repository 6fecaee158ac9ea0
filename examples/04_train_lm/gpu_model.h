// gpu_model.h: the model of byte_model.h on a GPU, as what is queued on a stream.
#ifndef HYBRIDOPT_EXAMPLES_TRAIN_LM_GPU_MODEL_H
#define HYBRIDOPT_EXAMPLES_TRAIN_LM_GPU_MODEL_H

#include <functional>
#include <memory>

#include "shape.h"

class GpuModel {
 public:
  virtual ~GpuModel() = default;

  virtual void* stream() const = 0;  // a cudaStream_t of the program's own

  // Where the bf16 params and gradients of all tensors lie, one behind the other.
  virtual void place(uint16_t* params, uint16_t* grads) = 0;

  // Queues a forward, and a backward if it is to train. Then *loss, which must be one of losses(),
  // gets the mean loss in nats per byte. Calls before_layer(layer) before it queues what reads that
  // layer's params: 0 is what looks up rows of tables, then each block, then the head.
  virtual void queue(const Batch& batch, bool train, double* loss,
                     const std::function<void(int layer)>& before_layer) = 0;

  static constexpr int kLosses = 3;
  virtual double* losses() = 0;  // pinned: a copy to other memory would wait for the stream

  virtual uint64_t free_bytes() const = 0;  // of the GPU, as cudaMemGetInfo says
};

// NULL where the program was built without cuBLAS.
std::unique_ptr<GpuModel> make_gpu_model();

#endif  // HYBRIDOPT_EXAMPLES_TRAIN_LM_GPU_MODEL_H
