/*
 * The training that every binding does in its test: two params, three AdamW steps with loss scale
 * and clipping, on the host device. The inputs are a formula whose values are exact in bf16. It
 * prints what a binding must print too, to the last bit:
 *
 *   params  FNV-1a of the bytes of weight, then bias
 *   states  FNV-1a of master, exp_avg and exp_avg_sq of weight, then of bias
 *   norm    the bits of the last step's grad_norm
 */
#include <offload.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { WEIGHTS = 5000, BIASES = 37, STEPS = 3 };

static void check(int32_t status) {
  if (status == OFFLOAD_OK) return;
  fprintf(stderr, "%s: %s\n", offload_status_name(status), offload_last_error());
  exit(1);
}

/* One of 251 multiples of 1/64 between -2 and 2. */
static float value(uint32_t i, uint32_t seed) {
  return (float)((int)((i * 37 + seed * 101) % 251) - 125) / 64;
}

/* Exact for those. */
static uint16_t bf16(float exact) {
  uint32_t bits;
  memcpy(&bits, &exact, sizeof bits);
  return (uint16_t)(bits >> 16);
}

static uint64_t hash(uint64_t hash, const void* data, uint64_t bytes) {
  const unsigned char* byte = data;
  uint64_t i;
  for (i = 0; i < bytes; i++) hash = (hash ^ byte[i]) * 0x100000001b3u;
  return hash;
}

int main(void) {
  static uint16_t weight[WEIGHTS], weight_grad[WEIGHTS];
  static float bias[BIASES], bias_grad[BIASES];
  const uint64_t start = 0xcbf29ce484222325u;
  uint64_t params = start, states = start, norm;
  uint32_t group_id, i, step, param;
  int32_t kind;
  offload_context_t context;
  offload_optimizer_t optimizer;
  offload_step_result_t result = {.struct_size = sizeof result};

  offload_context_options_t context_options = {.struct_size = sizeof context_options};
  check(offload_context_create(&context_options, &context));
  offload_optimizer_options_t options = {.struct_size = sizeof options, .algorithm = OFFLOAD_ADAMW};
  check(offload_optimizer_create(context, &options, &optimizer));
  offload_group_t group = {.struct_size = sizeof group,
                           .lr = 0.01,
                           .beta1 = 0.9,
                           .beta2 = 0.999,
                           .eps = 1e-8,
                           .weight_decay = 0.1,
                           .cautious_weight_decay = 1};
  check(offload_optimizer_add_group(optimizer, &group, &group_id));
  for (i = 0; i < WEIGHTS; i++) weight[i] = bf16(value(i, 1));
  for (i = 0; i < BIASES; i++) bias[i] = value(i, 2);
  offload_param_t both[2] = {{.struct_size = sizeof both[0],
                              .group = group_id,
                              .dtype = OFFLOAD_BF16,
                              .grad_dtype = OFFLOAD_BF16,
                              .name = "weight",
                              .data = weight,
                              .grad = weight_grad,
                              .count = WEIGHTS},
                             {.struct_size = sizeof both[0],
                              .group = group_id,
                              .dtype = OFFLOAD_FP32,
                              .grad_dtype = OFFLOAD_FP32,
                              .name = "bias",
                              .data = bias,
                              .grad = bias_grad,
                              .count = BIASES}};
  check(offload_optimizer_add_params(optimizer, both, 2, NULL));
  check(offload_optimizer_commit(optimizer, NULL));

  for (step = 1; step <= STEPS; step++) {
    for (i = 0; i < WEIGHTS; i++) weight_grad[i] = bf16(value(i, 10 + step));
    for (i = 0; i < BIASES; i++) bias_grad[i] = value(i, 20 + step);
    offload_step_options_t step_options = {
        .struct_size = sizeof step_options, .grad_scale = 4, .grad_norm_max = 1};
    check(offload_optimizer_step(optimizer, &step_options, NULL));
    check(offload_optimizer_wait(optimizer, 0, -1));
  }
  check(offload_optimizer_step_result(optimizer, 0, &result));

  params = hash(params, weight, sizeof weight);
  params = hash(params, bias, sizeof bias);
  for (param = 0; param < 2; param++) {
    for (kind = OFFLOAD_STATE_MASTER; kind <= OFFLOAD_STATE_EXP_AVG_SQ; kind++) {
      offload_state_view_t view = {.struct_size = sizeof view};
      check(offload_optimizer_state(optimizer, param, kind, &view));
      states = hash(states, view.host_data, view.host_count * sizeof(float));
    }
  }
  memcpy(&norm, &result.grad_norm, sizeof norm);
  printf("params %016llx\nstates %016llx\nnorm %016llx\n", (unsigned long long)params,
         (unsigned long long)states, (unsigned long long)norm);
  check(offload_optimizer_destroy(optimizer));
  check(offload_context_destroy(context));
  return 0;
}
