// Every call of the ABI that takes a handle, with arguments that are good otherwise.
#pragma once

#include <functional>
#include <vector>

#include "trainer.h"

namespace hybridopt::fault {

struct HandleCall {
  const char* name;
  std::function<int32_t(void*)> call;
};

// Every call that takes a context, with arguments that are good otherwise.
inline std::vector<HandleCall> ContextCalls() {
  static offload_context_info_t info;
  static offload_optimizer_options_t options;
  static offload_optimizer_t optimizer;
  static offload_stash_options_t stash_options;
  static offload_stash_plan_t stash_plan;
  static offload_stash_t stash;
  static offload_pool_t pool;
  static void* data;
  static offload_stream_t stream;
  info = Make<offload_context_info_t>();
  options = Make<offload_optimizer_options_t>();
  options.algorithm = OFFLOAD_ADAMW;
  stash_plan = Make<offload_stash_plan_t>();
  stash_options = Make<offload_stash_options_t>();
  stash_options.budget_bytes = 4096;
  const auto as = [](void* handle) { return static_cast<offload_context_t>(handle); };
  return {
      {"info", [=](void* h) { return offload_context_get_info(as(h), &info); }},
      {"create", [=](void* h) { return offload_optimizer_create(as(h), &options, &optimizer); }},
      {"stash_plan",
       [=](void* h) { return offload_stash_plan(as(h), &stash_options, &stash_plan); }},
      {"stash_create",
       [=](void* h) { return offload_stash_create(as(h), &stash_options, &stash); }},
      {"alloc", [=](void* h) { return offload_device_alloc(as(h), 64, &data); }},
      {"free", [=](void* h) { return offload_device_free(as(h), nullptr); }},
      {"upload",
       [=](void* h) { return offload_device_upload(as(h), nullptr, nullptr, 0, nullptr); }},
      {"download",
       [=](void* h) { return offload_device_download(as(h), nullptr, nullptr, 0, nullptr); }},
      {"map", [=](void* h) { return offload_device_map(as(h), &options, 4, &data); }},
      {"stream_create", [=](void* h) { return offload_stream_create(as(h), &stream); }},
      {"stream_destroy", [=](void* h) { return offload_stream_destroy(as(h), nullptr); }},
      {"synchronize", [=](void* h) { return offload_stream_synchronize(as(h), nullptr, 0); }},
      {"run",
       [=](void* h) {
         return offload_stream_run(
             as(h), nullptr, [](void*) {}, nullptr);
       }},
      {"pool_create", [=](void* h) { return offload_pool_create(as(h), &pool); }},
      {"destroy", [=](void* h) { return offload_context_destroy(as(h)); }},
  };
}

// Every call about changes.
inline std::vector<HandleCall> ChangesCalls() {
  static offload_changes_options_t options;
  static offload_changes_t changes;
  options = Make<offload_changes_options_t>();
  changes = Make<offload_changes_t>();
  const auto as = [](void* handle) { return static_cast<offload_optimizer_t>(handle); };
  return {
      {"changes",
       [=](void* h) { return offload_optimizer_changes(as(h), nullptr, 0, &options, &changes); }},
      {"acknowledge_changes",
       [=](void* h) { return offload_optimizer_acknowledge_changes(as(h), 1); }},
      {"mark_changed", [=](void* h) { return offload_optimizer_mark_changed(as(h), nullptr, 0); }},
  };
}

// Every call about traces.
inline std::vector<HandleCall> TraceCalls() {
  const auto as = [](void* handle) { return static_cast<offload_optimizer_t>(handle); };
  return {
      {"trace_start", [=](void* h) { return offload_optimizer_trace_start(as(h), 0); }},
      {"trace_stop",
       [=](void* h) { return offload_optimizer_trace_stop(as(h), nullptr, nullptr); }},
  };
}

// Every call that changes where state is.
inline std::vector<HandleCall> FractionCalls() {
  const auto as = [](void* handle) { return static_cast<offload_optimizer_t>(handle); };
  return {
      {"set_device_fraction",
       [=](void* h) { return offload_optimizer_set_device_fraction(as(h), 0.5, nullptr); }},
      {"set_fractions",
       [=](void* h) { return offload_optimizer_set_fractions(as(h), 0.5, 0, nullptr); }},
  };
}

inline std::vector<HandleCall> WithOtherCalls(std::vector<HandleCall> calls) {
  for (const auto& others : {ChangesCalls(), TraceCalls(), FractionCalls()})
    calls.insert(calls.end(), others.begin(), others.end());
  return calls;
}

// Every call that takes an optimizer.
inline std::vector<HandleCall> OptimizerCalls() {
  static float values[1];
  static offload_group_t group;
  static offload_plan_t plan;
  static offload_step_result_t result;
  static offload_state_view_t view;
  static offload_stats_t stats;
  static offload_move_options_t accumulate, drop;
  static offload_save_options_t save;
  static offload_load_options_t load;
  static uint32_t id;
  save = Make<offload_save_options_t>();
  load = Make<offload_load_options_t>();
  save.path = load.path = "checkpoint";
  group = Make<offload_group_t>();
  plan = Make<offload_plan_t>();
  result = Make<offload_step_result_t>();
  view = Make<offload_state_view_t>();
  stats = Make<offload_stats_t>();
  accumulate = drop = Make<offload_move_options_t>();
  accumulate.flags = OFFLOAD_MOVE_ACCUMULATE;
  drop.flags = OFFLOAD_MOVE_DROP;
  const auto as = [](void* handle) { return static_cast<offload_optimizer_t>(handle); };
  return WithOtherCalls({
      {"add_group", [=](void* h) { return offload_optimizer_add_group(as(h), &group, &id); }},
      {"set_group", [=](void* h) { return offload_optimizer_set_group(as(h), 0, &group); }},
      {"add_params", [=](void* h) { return offload_optimizer_add_params(as(h), nullptr, 0, &id); }},
      {"bind", [=](void* h) { return offload_optimizer_bind(as(h), nullptr, 0); }},
      {"plan", [=](void* h) { return offload_optimizer_plan(as(h), &plan); }},
      {"commit", [=](void* h) { return offload_optimizer_commit(as(h), nullptr); }},
      {"step", [=](void* h) { return offload_optimizer_step(as(h), nullptr, nullptr); }},
      {"step_result", [=](void* h) { return offload_optimizer_step_result(as(h), 0, &result); }},
      {"wait", [=](void* h) { return offload_optimizer_wait(as(h), 0, 0); }},
      {"stream_wait",
       [=](void* h) { return offload_optimizer_stream_wait(as(h), 0, nullptr, nullptr, 0); }},
      {"offload_params",
       [=](void* h) { return offload_optimizer_offload_params(as(h), nullptr, nullptr); }},
      {"reload_params",
       [=](void* h) { return offload_optimizer_reload_params(as(h), nullptr, nullptr); }},
      {"offload_grads",
       [=](void* h) { return offload_optimizer_offload_grads(as(h), nullptr, nullptr); }},
      {"offload_grads, accumulate",
       [=](void* h) { return offload_optimizer_offload_grads(as(h), &accumulate, nullptr); }},
      {"offload_grads, drop",
       [=](void* h) { return offload_optimizer_offload_grads(as(h), &drop, nullptr); }},
      {"reload_grads",
       [=](void* h) { return offload_optimizer_reload_grads(as(h), nullptr, nullptr); }},
      {"offload_states",
       [=](void* h) { return offload_optimizer_offload_states(as(h), nullptr, nullptr); }},
      {"reload_states",
       [=](void* h) { return offload_optimizer_reload_states(as(h), nullptr, nullptr); }},
      {"refresh_masters",
       [=](void* h) { return offload_optimizer_refresh_masters(as(h), nullptr, nullptr); }},
      {"undo_early_updates",
       [=](void* h) { return offload_optimizer_undo_early_updates(as(h), nullptr); }},
      {"state",
       [=](void* h) { return offload_optimizer_state(as(h), 0, OFFLOAD_STATE_MASTER, &view); }},
      {"read_state",
       [=](void* h) { return offload_optimizer_read_state(as(h), 0, 0, 0, 1, values); }},
      {"write_state",
       [=](void* h) { return offload_optimizer_write_state(as(h), 0, 0, 0, 0, values); }},
      {"set_step_count", [=](void* h) { return offload_optimizer_set_step_count(as(h), 0, 0); }},
      {"get_stats", [=](void* h) { return offload_optimizer_get_stats(as(h), &stats); }},
      {"save", [=](void* h) { return offload_optimizer_save(as(h), &save, nullptr); }},
      {"load", [=](void* h) { return offload_optimizer_load(as(h), &load, nullptr); }},
      {"destroy", [=](void* h) { return offload_optimizer_destroy(as(h)); }},
  });
}

// Every call that takes a stash.
inline std::vector<HandleCall> StashCalls() {
  static offload_stash_stats_t stats;
  static offload_stash_ticket_t ticket;
  static offload_stash_mark_t mark;
  stats = Make<offload_stash_stats_t>();
  const auto as = [](void* handle) { return static_cast<offload_stash_t>(handle); };
  return {
      {"push", [=](void* h) { return offload_stash_push(as(h), 0, &stats, 64, nullptr, &ticket); }},
      {"release", [=](void* h) { return offload_stash_release(as(h), 1, nullptr); }},
      {"prefetch", [=](void* h) { return offload_stash_prefetch(as(h), 1, &stats, 64, nullptr); }},
      {"pop", [=](void* h) { return offload_stash_pop(as(h), 1, nullptr, 0); }},
      {"drop", [=](void* h) { return offload_stash_drop(as(h), 1, nullptr); }},
      {"mark", [=](void* h) { return offload_stash_mark(as(h), 0, &mark); }},
      {"rollback", [=](void* h) { return offload_stash_rollback(as(h), 0, nullptr); }},
      {"wait", [=](void* h) { return offload_stash_wait(as(h), 0, 0); }},
      {"get_stats", [=](void* h) { return offload_stash_get_stats(as(h), &stats); }},
      {"destroy", [=](void* h) { return offload_stash_destroy(as(h)); }},
  };
}

// Every call that takes a pool.
inline std::vector<HandleCall> PoolCalls() {
  static void* data;
  const auto as = [](void* handle) { return static_cast<offload_pool_t>(handle); };
  return {
      {"alloc", [=](void* h) { return offload_pool_alloc(as(h), 64, &data); }},
      {"release_memory", [=](void* h) { return offload_pool_release_memory(as(h)); }},
      {"take_memory", [=](void* h) { return offload_pool_take_memory(as(h)); }},
      {"destroy", [=](void* h) { return offload_pool_destroy(as(h)); }},
  };
}

}  // namespace hybridopt::fault
