/*
 * hello.c: the smallest useful program. One fp32 param in host memory, AdamW, and the line
 * y = 3 x - 1 to find from ten points.
 *
 *   cc -std=c99 hello.c -lhybridopt -o hello && ./hello
 */
#include <offload.h>
#include <stdio.h>
#include <stdlib.h>

/* Every call of the library goes through here. */
static void check(int32_t status) {
  if (status == OFFLOAD_OK) return;
  fprintf(stderr, "hello: %s: %s\n", offload_status_name(status), offload_last_error());
  exit(1);
}

/* Mean squared error of weights[0] x + weights[1], and its gradient. */
static float loss_and_gradient(const float weights[2], float gradient[2]) {
  enum { POINTS = 10 };
  float loss = 0;
  gradient[0] = gradient[1] = 0;
  for (int i = 0; i < POINTS; ++i) {
    const float x = (float)i / POINTS, error = weights[0] * x + weights[1] - (3 * x - 1);
    loss += error * error / POINTS;
    gradient[0] += 2 * error * x / POINTS;
    gradient[1] += 2 * error / POINTS;
  }
  return loss;
}

int main(void) {
  float weights[2] = {0, 0}, gradient[2];
  offload_context_t context;
  offload_optimizer_t optimizer;
  uint32_t group_id;

  /* Fields that are not named are zero, and zero means the default: the host device. */
  offload_context_options_t context_options = {.struct_size = sizeof context_options};
  check(offload_context_create(&context_options, &context));
  offload_optimizer_options_t options = {.struct_size = sizeof options, .algorithm = OFFLOAD_ADAMW};
  check(offload_optimizer_create(context, &options, &optimizer));
  offload_group_t group = {
      .struct_size = sizeof group, .lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8};
  check(offload_optimizer_add_group(optimizer, &group, &group_id));
  offload_param_t param = {.struct_size = sizeof param,
                           .group = group_id,
                           .name = "line.weight",
                           .dtype = OFFLOAD_FP32,
                           .data = weights,
                           .count = 2,
                           .grad_dtype = OFFLOAD_FP32,
                           .grad = gradient};
  check(offload_optimizer_add_params(optimizer, &param, 1, NULL));
  check(offload_optimizer_commit(optimizer, NULL));

  for (int step = 0; step <= 200; ++step) {
    const float loss = loss_and_gradient(weights, gradient);
    if (step % 25 == 0) {
      printf("step %3d  loss %.6f  y = %.3f x %+.3f\n", step, loss, weights[0], weights[1]);
    }
    check(offload_optimizer_step(optimizer, NULL, NULL));
    check(offload_optimizer_wait(optimizer, 0, -1)); /* from here on weights may be read */
  }

  check(offload_optimizer_destroy(optimizer));
  check(offload_context_destroy(context));
  return 0;
}
