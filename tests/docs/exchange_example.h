/* What the example of docs/RANKS.md needs of its trainer. */
#include <stddef.h>

#include "offload.h"

#ifdef __cplusplus
extern "C" {
#endif

void check(int32_t status);
void backward(int step, const void* param, void* grad);
offload_optimizer_t make_optimizer(offload_context_t context, const offload_comm_t* steps,
                                   const offload_shard_t* rows, void* whole,
                                   const void* whole_grad);

/* The example. */
void train(offload_context_t context, const offload_comm_t* parts, const offload_comm_t* steps,
           const offload_shard_t* shard, void* param, void* grad, int step_count);

#ifdef __cplusplus
}
#endif
