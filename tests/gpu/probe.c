/* Exit status 0 where a CUDA context can be made, 77 where there is no GPU for it. */
#include <stdio.h>

#include "offload.h"

int main(void) {
  offload_context_options_t options = {.struct_size = sizeof(options),
                                       .device_kind = OFFLOAD_DEVICE_CUDA};
  offload_context_info_t info = {.struct_size = sizeof(info)};
  offload_context_t context = NULL;
  const int32_t status = offload_context_create(&options, &context);
  if (status != OFFLOAD_OK) {
    printf("%s: %s\n", status == OFFLOAD_UNSUPPORTED ? "skipped" : "FAILED", offload_last_error());
    return status == OFFLOAD_UNSUPPORTED ? 77 : 1;
  }
  offload_context_get_info(context, &info);
  printf("%s\n", info.device_name);
  return offload_context_destroy(context) == OFFLOAD_OK ? 0 : 1;
}
