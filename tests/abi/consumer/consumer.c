/* A C99 program with nothing but the installed library: one SGD step on the host. */
#include <offload.h>
#include <stdio.h>

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
  offload_context_t context = NULL;
  offload_optimizer_t optimizer = NULL;
  offload_context_options_t context_options = {0};
  offload_optimizer_options_t options = {0};
  offload_group_t group = {0};
  offload_param_t param = {0};

  context_options.struct_size = sizeof(context_options);
  options.struct_size = sizeof(options);
  options.algorithm = OFFLOAD_SGD;
  group.struct_size = sizeof(group);
  group.lr = 0.5;
  param.struct_size = sizeof(param);
  param.dtype = OFFLOAD_FP32;
  param.grad_dtype = OFFLOAD_FP32;
  param.name = "weight";
  param.data = weight;
  param.grad = gradient;
  param.count = 3;

  TRY(offload_context_create(&context_options, &context));
  TRY(offload_optimizer_create(context, &options, &optimizer));
  TRY(offload_optimizer_add_group(optimizer, &group, &param.group));
  TRY(offload_optimizer_add_params(optimizer, &param, 1, NULL));
  TRY(offload_optimizer_commit(optimizer, NULL));
  TRY(offload_optimizer_step(optimizer, NULL, NULL));
  TRY(offload_optimizer_wait(optimizer, 0, -1));
  TRY(offload_optimizer_destroy(optimizer));
  TRY(offload_context_destroy(context));
  if (weight[0] != 0.5f || weight[1] != 2.0f || weight[2] != 4.0f) {
    printf("got %g %g %g, expected 0.5 2 4\n", weight[0], weight[1], weight[2]);
    return 1;
  }
  return 0;
}
