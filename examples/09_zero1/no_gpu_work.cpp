// Stands in for gpu_work.cu where the program is built without CUDA or NCCL.
#include "device_work.h"

std::unique_ptr<DeviceWork> make_gpu_work(offload_stream_t, MPI_Comm, int) {
  fail(
      "--gpu: this program was built without CUDA or NCCL; install both and build again, see "
      "HYBRIDOPT_NCCL_ROOT");
}
