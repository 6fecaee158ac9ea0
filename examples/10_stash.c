/*
 * 10_stash.c shows a network of eight layers whose activations wait for the backward pass in host
 * memory. Each activation has 2 MiB; the device has room for three of them.
 *
 *   cc -std=c99 10_stash.c $(pkg-config --cflags --libs hybridopt) -o stash && ./stash
 *
 * Takes less than a second. Expect one line: put aside 12 MiB, at most 12 MiB at a time; same
 * bytes: yes
 */
#include <offload.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 8, KEPT = 2, BYTES = 2 << 20 };

/* Every call of the library goes through here. */
static void check(int32_t status) {
  if (status == OFFLOAD_OK) return;
  fprintf(stderr, "stash: %s: %s\n", offload_status_name(status), offload_last_error());
  exit(1);
}

static unsigned char bytes[BYTES];

int main(void) {
  offload_context_t context;
  offload_stash_t stash;
  offload_stream_t stream; /* on a GPU: the cudaStream_t on which the model runs */
  offload_stash_ticket_t tickets[LAYERS] = {0};
  void* activations[LAYERS];

  offload_context_options_t device = {.struct_size = sizeof device,
                                      .device_kind = OFFLOAD_DEVICE_SIM,
                                      .sim_memory_bytes = 3 * BYTES};
  check(offload_context_create(&device, &context));
  check(offload_stream_create(context, &stream));
  offload_stash_options_t options = {
      .struct_size = sizeof options, .budget_bytes = 32 << 20, .slab_bytes = 1 << 20};
  check(offload_stash_create(context, &options, &stash));

  /* Forward: each layer computes its activation, whose copy to the host begins at once. Two layers
   * later that copy has ended, or the stream waits for it; then the memory may be used again. The
   * last two layers are the first that the backward pass needs: they stay. */
  for (int layer = 0; layer < LAYERS; ++layer) {
    check(offload_device_alloc(context, BYTES, &activations[layer]));
    memset(bytes, layer + 1, BYTES);
    check(offload_device_upload(context, activations[layer], bytes, BYTES, stream));
    if (layer < LAYERS - KEPT)
      check(offload_stash_push(stash, 0, activations[layer], BYTES, stream, &tickets[layer]));
    const int left = layer - KEPT;
    if (left < 0 || tickets[left] == 0) continue; /* 0: there was no room, and it stays too */
    check(offload_stash_release(stash, tickets[left], stream));
    /* offload_device_free is for the host; who frees in the order of the stream need not wait. */
    check(offload_stream_synchronize(context, stream, -1));
    check(offload_device_free(context, activations[left]));
  }

  /* Backward: two layers ahead the copy back begins, and it runs while this layer computes. */
  int same = 1;
  for (int layer = LAYERS - 1; layer >= 0; --layer) {
    const int ahead = layer - KEPT;
    if (ahead >= 0 && tickets[ahead] != 0) {
      check(offload_device_alloc(context, BYTES, &activations[ahead]));
      check(offload_stash_prefetch(stash, tickets[ahead], activations[ahead], BYTES, stream));
    }
    if (tickets[layer] != 0) check(offload_stash_pop(stash, tickets[layer], stream, 0));
    check(offload_device_download(context, bytes, activations[layer], BYTES, stream));
    for (int i = 0; i < BYTES; ++i) same &= bytes[i] == layer + 1;
    check(offload_device_free(context, activations[layer]));
  }

  offload_stash_stats_t stats = {.struct_size = sizeof stats};
  check(offload_stash_get_stats(stash, &stats));
  printf("put aside %.0f MiB, at most %.0f MiB at a time; same bytes: %s\n",
         (double)stats.pushed_bytes / (1 << 20), (double)stats.used_bytes_max / (1 << 20),
         same ? "yes" : "no");
  check(offload_stash_destroy(stash));
  check(offload_context_destroy(context));
  return same ? 0 : 1;
}
