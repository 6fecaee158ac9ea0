/*
 * offload_simple.h: what most programs begin and end with, in one call each. On top of offload.h,
 * which is the manual; C99 or C++20, nothing to link beside -lhybridopt.
 */
#ifndef OFFLOAD_SIMPLE_H
#define OFFLOAD_SIMPLE_H

#include <offload.h>
#include <string.h>

/* A struct of offload.h whose fields have the values that are named; all others have their
 * defaults.
 *
 *   C    offload_group_t group = OFFLOAD_INIT(offload_group_t, .lr = 1e-3, .eps = 1e-8);
 *   C++  auto group = offload_init<offload_group_t>();
 *        group.lr = 1e-3;
 *        group.eps = 1e-8;
 */
#ifdef __cplusplus
template <typename Struct>
Struct offload_init() {
  Struct value{};
  value.struct_size = sizeof(Struct);
  return value;
}
#else
#define OFFLOAD_INIT(type, ...) ((type){.struct_size = sizeof(type), __VA_ARGS__})
#endif

/* Destroys an optimizer and its context, after queued work has finished. Each may be NULL: then
 * there is nothing to destroy.
 * Errors: those of offload_optimizer_destroy and offload_context_destroy. */
static inline int32_t offload_destroy_all(offload_context_t context,
                                          offload_optimizer_t optimizer) {
  int32_t status = OFFLOAD_OK;
  if (optimizer != NULL) status = offload_optimizer_destroy(optimizer);
  if (status == OFFLOAD_OK && context != NULL) status = offload_context_destroy(context);
  return status;
}

/* Makes a context, and on it an optimizer with one group and these params, ready for its first
 * step: offload_context_create, offload_optimizer_create, _add_group, _add_params and _commit.
 * `params` is an array of `param_count` structs, whose `group` is 0. Their data and gradients are
 * in memory of the device; context_options NULL: of the host. On a failure nothing is left,
 * *context and *optimizer are NULL, and offload_last_error() tells the reason.
 * Errors: those of the five calls. */
static inline int32_t offload_create_all(const offload_context_options_t* context_options,
                                         const offload_optimizer_options_t* options,
                                         const offload_group_t* group,
                                         const offload_param_t* params, uint32_t param_count,
                                         offload_context_t* context,
                                         offload_optimizer_t* optimizer) {
  offload_context_options_t on_host;
  uint32_t first_group = 0;
  int32_t status;
  memset(&on_host, 0, sizeof on_host);
  on_host.struct_size = sizeof on_host;
  *context = NULL;
  *optimizer = NULL;
  status = offload_context_create(context_options != NULL ? context_options : &on_host, context);
  if (status == OFFLOAD_OK) status = offload_optimizer_create(*context, options, optimizer);
  if (status == OFFLOAD_OK) status = offload_optimizer_add_group(*optimizer, group, &first_group);
  if (status == OFFLOAD_OK)
    status = offload_optimizer_add_params(*optimizer, params, param_count, NULL);
  if (status == OFFLOAD_OK) status = offload_optimizer_commit(*optimizer, NULL);
  if (status != OFFLOAD_OK) {
    (void)offload_destroy_all(*context, *optimizer);
    *context = NULL;
    *optimizer = NULL;
  }
  return status;
}

#endif
