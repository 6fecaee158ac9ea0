/*
 * 01_hello.c shows the smallest useful program: one fp32 param in host memory, AdamW, and the line
 * y = 3 x - 1 to find from ten points.
 *
 *   cc -std=c99 01_hello.c $(pkg-config --cflags --libs hybridopt) -o hello && ./hello
 *
 * Takes less than a second. Expect nine lines of falling losses; the last one ends with y = 3.000 x
 * -1.000.
 */
#include <offload_simple.h>
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

  /* Fields that are not named have their defaults: all state is on the host. */
  const offload_optimizer_options_t options =
      OFFLOAD_INIT(offload_optimizer_options_t, .algorithm = OFFLOAD_ADAMW);
  const offload_group_t group =
      OFFLOAD_INIT(offload_group_t, .lr = 0.1, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8);
  const offload_param_t param =
      OFFLOAD_INIT(offload_param_t, .name = "line.weight", .data = weights, .grad = gradient,
                   .count = 2, .dtype = OFFLOAD_FP32, .grad_dtype = OFFLOAD_FP32);
  check(offload_create_all(NULL, &options, &group, &param, 1, &context, &optimizer));

  for (int step = 0; step <= 200; ++step) {
    const float loss = loss_and_gradient(weights, gradient);
    if (step % 25 == 0) {
      printf("step %3d  loss %.6f  y = %.3f x %+.3f\n", step, loss, weights[0], weights[1]);
    }
    check(offload_optimizer_step(optimizer, NULL, NULL));
    check(offload_optimizer_wait(optimizer, 0, -1)); /* from here on weights may be read */
  }

  check(offload_destroy_all(context, optimizer));
  return 0;
}
