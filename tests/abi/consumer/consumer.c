/* A C99 program with nothing but the installed library: one SGD step on the host. */
#include <offload_simple.h>
#include <stdio.h>
#include <string.h>

static int failed(const char* call, int32_t status) {
  if (status == OFFLOAD_OK) return 0;
  printf("%s: %s: %s\n", call, offload_status_name(status), offload_last_error());
  return 1;
}

#define TRY(call) \
  if (failed(#call, call)) return 1

int main(void) {
  float weight[3] = {1.0f, 2.0f, 3.0f};
  const float gradient[3] = {1.0f, 0.0f, -2.0f};
  offload_context_t context;
  offload_optimizer_t optimizer;
  const offload_optimizer_options_t options =
      OFFLOAD_INIT(offload_optimizer_options_t, .algorithm = OFFLOAD_SGD);
  offload_group_t group = OFFLOAD_INIT(offload_group_t, .lr = -1);
  const offload_param_t param =
      OFFLOAD_INIT(offload_param_t, .dtype = OFFLOAD_FP32, .grad_dtype = OFFLOAD_FP32,
                   .name = "weight", .data = weight, .grad = gradient, .count = 3);

  if (offload_create_all(NULL, &options, &group, &param, 1, &context, &optimizer) !=
          OFFLOAD_INVALID_ARGUMENT ||
      context != NULL || optimizer != NULL || strstr(offload_last_error(), "lr is -1") == NULL) {
    printf("a wrong group: %s\n", offload_last_error());
    return 1;
  }
  group.lr = 0.5;
  TRY(offload_create_all(NULL, &options, &group, &param, 1, &context, &optimizer));
  TRY(offload_optimizer_step(optimizer, NULL, NULL));
  TRY(offload_optimizer_wait(optimizer, 0, -1));
  TRY(offload_destroy_all(context, optimizer));
  if (weight[0] != 0.5f || weight[1] != 2.0f || weight[2] != 4.0f) {
    printf("got %g %g %g, expected 0.5 2 4\n", weight[0], weight[1], weight[2]);
    return 1;
  }
  return 0;
}
