/*
 * 11_publish_weights.c shows a trainer that sends the weights which its steps have changed to a
 * follower, which is another process. On the way the trainer is killed in the middle of a message,
 * and later the follower before it has answered. Both are started again, and after every
 * publication the follower's hash is the trainer's.
 *
 *   cc -std=c99 11_publish_weights.c $(pkg-config --cflags --libs hybridopt) -lm -o publish_weights
 *   ./publish_weights
 *
 * Takes less than a second. Expect a line for each of 12 publications, which says how many weights
 * went and that the follower's hash is equal.
 */
#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <math.h>
#include <offload_simple.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { COUNT = 100000, PUBLICATIONS = 12, TRAINER_DIES_IN = 5, FOLLOWER_DIES_IN = 9 };

static char folder[] = "/tmp/hybridopt-publish-XXXXXX";
static char socket_path[64];

static void check(int32_t status) {
  if (status == OFFLOAD_OK) return;
  fprintf(stderr, "publish_weights: %s: %s\n", offload_status_name(status), offload_last_error());
  _exit(1);
}

static void must(int ok, const char* what) {
  if (ok) return;
  fprintf(stderr, "publish_weights: %s: %s\n", what, strerror(errno));
  _exit(1);
}

/* What a message begins with. Then come the indices and the values, or the whole weights. */
typedef struct message {
  uint32_t publication;
  int32_t dense;
  uint64_t count;
  uint64_t hash; /* what the follower must have afterwards */
} message_t;

/* Both return 0 if the other process is gone. */
static int send_all(int to, const void* data, size_t bytes) {
  for (const char* next = data; bytes > 0;) {
    const ssize_t sent = send(to, next, bytes, MSG_NOSIGNAL);
    if (sent <= 0) return 0;
    next += sent;
    bytes -= (size_t)sent;
  }
  return 1;
}
static int receive_all(int from, void* data, size_t bytes) {
  for (char* next = data; bytes > 0;) {
    const ssize_t got = recv(from, next, bytes, 0);
    if (got <= 0) return 0;
    next += got;
    bytes -= (size_t)got;
  }
  return 1;
}

static struct sockaddr_un address(void) {
  struct sockaddr_un name;
  memset(&name, 0, sizeof(name));
  name.sun_family = AF_UNIX;
  strncpy(name.sun_path, socket_path, sizeof(name.sun_path) - 1);
  return name;
}

/* --------------------------------------------------------------------------------- the follower */

/* Reads one message whole, then applies it: of one that is cut off nothing is applied. */
static int follow_once(int trainer, uint16_t* weights, int may_die) {
  static uint32_t indices[COUNT];
  static uint16_t values[COUNT];
  message_t message;
  uint64_t hash = 0;
  if (!receive_all(trainer, &message, sizeof(message)) || message.count > COUNT) return 0;
  if (!message.dense && !receive_all(trainer, indices, message.count * sizeof(*indices))) return 0;
  if (!receive_all(trainer, values, message.count * sizeof(*values))) return 0;
  for (uint64_t i = 0; i < message.count; ++i)
    weights[message.dense ? i : indices[i] % COUNT] = values[i];
  check(offload_content_hash(weights, COUNT * sizeof(*weights), &hash));
  if (may_die && message.publication == FOLLOWER_DIES_IN) raise(SIGKILL);
  return send_all(trainer, &hash, sizeof(hash));
}

static void follow(int may_die) {
  static uint16_t weights[COUNT];
  const struct sockaddr_un name = address();
  const int listener = socket(AF_UNIX, SOCK_STREAM, 0);
  unlink(socket_path);
  must(bind(listener, (const struct sockaddr*)&name, sizeof(name)) == 0, "bind");
  must(listen(listener, 1) == 0, "listen");
  for (;;) {
    const int trainer = accept(listener, NULL, NULL);
    must(trainer >= 0, "accept");
    while (follow_once(trainer, weights, may_die)) continue;
    close(trainer);
  }
}

/* ---------------------------------------------------------------------------------- the trainer */

typedef struct trainer {
  offload_context_t context;
  offload_optimizer_t optimizer;
  uint16_t weights[COUNT]; /* bf16 */
  float gradient[COUNT];
  uint64_t buffer[COUNT];
  int follower; /* the connection; -1: none */
} trainer_t;

static void start_training(trainer_t* trainer) {
  const offload_optimizer_options_t options =
      OFFLOAD_INIT(offload_optimizer_options_t, .algorithm = OFFLOAD_ADAMW, .track_changes = 1);
  const offload_group_t group =
      OFFLOAD_INIT(offload_group_t, .lr = 1e-5, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-8);
  const offload_param_t param = OFFLOAD_INIT(
      offload_param_t, .name = "weights", .data = trainer->weights, .grad = trainer->gradient,
      .count = COUNT, .dtype = OFFLOAD_BF16, .grad_dtype = OFFLOAD_FP32);
  for (int i = 0; i < COUNT; ++i) trainer->weights[i] = (uint16_t)(0x3C00 + i % 700);
  check(offload_create_all(NULL, &options, &group, &param, 1, &trainer->context,
                           &trainer->optimizer));
  trainer->follower = -1;
}

static void train(trainer_t* trainer, uint32_t publication) {
  for (int i = 0; i < COUNT; ++i) trainer->gradient[i] = sinf((float)(i + 31 * (int)publication));
  check(offload_optimizer_step(trainer->optimizer, NULL, NULL));
  check(offload_optimizer_wait(trainer->optimizer, 0, -1));
}

/* A follower that has just been reached may have nothing: it gets all weights. */
static void reach_follower(trainer_t* trainer) {
  const struct sockaddr_un name = address();
  const struct timespec pause = {0, 20000000};
  while (trainer->follower < 0) {
    const int to = socket(AF_UNIX, SOCK_STREAM, 0);
    must(to >= 0, "socket");
    if (connect(to, (const struct sockaddr*)&name, sizeof(name)) == 0) {
      trainer->follower = to;
    } else {
      close(to);
      nanosleep(&pause, NULL);
    }
  }
  check(offload_optimizer_mark_changed(trainer->optimizer, NULL, 0));
}

/* Returns 0 if the follower is gone. Then nothing has been acknowledged, so nothing is lost. */
static int publish(trainer_t* trainer, uint32_t publication, int may_die) {
  const offload_changes_options_t options =
      OFFLOAD_INIT(offload_changes_options_t, .buffer = trainer->buffer,
                   .buffer_bytes = sizeof(trainer->buffer), .dense_above = 0.5);
  offload_changes_t changes = OFFLOAD_INIT(offload_changes_t, .take = 0);
  uint64_t hash = 0;
  check(offload_optimizer_changes(trainer->optimizer, NULL, 0, &options, &changes));
  const offload_change_t* change = &changes.params[0];
  const char* buffer = (const char*)trainer->buffer;
  const message_t message = {publication, change->dense, change->count, change->hash};
  const void* values =
      change->dense ? (const void*)trainer->weights : buffer + change->values_offset;
  int sent = send_all(trainer->follower, &message, sizeof(message));
  if (may_die && publication == TRAINER_DIES_IN) raise(SIGKILL); /* half way */
  if (!change->dense)
    sent = sent && send_all(trainer->follower, buffer + change->indices_offset,
                            change->count * change->index_bytes);
  sent = sent && send_all(trainer->follower, values, change->count * sizeof(uint16_t));
  if (!sent || !receive_all(trainer->follower, &hash, sizeof(hash))) return 0;
  printf("publication %2u: %6llu of %d weights%s, the follower's hash %s\n", publication,
         (unsigned long long)change->count, COUNT, change->dense ? ", all" : "",
         hash == change->hash ? "is equal" : "DIFFERS");
  fflush(stdout);
  if (hash != change->hash) _exit(1);
  check(offload_optimizer_acknowledge_changes(trainer->optimizer, changes.take));
  return 1;
}

static void run_trainer(uint32_t begin, int may_die) {
  trainer_t* const trainer = malloc(sizeof(*trainer));
  must(trainer != NULL, "malloc");
  start_training(trainer);
  for (uint32_t step = 1; step < begin; ++step) train(trainer, step); /* or load a checkpoint */
  reach_follower(trainer);
  for (uint32_t publication = begin; publication <= PUBLICATIONS; ++publication) {
    train(trainer, publication);
    while (!publish(trainer, publication, may_die)) {
      close(trainer->follower);
      trainer->follower = -1;
      reach_follower(trainer);
    }
  }
  check(offload_destroy_all(trainer->context, trainer->optimizer));
  free(trainer);
}

/* ---------------------------------------------------------------------------------------- both */

static pid_t start_follower(int may_die) {
  const pid_t child = fork();
  must(child >= 0, "fork");
  if (child == 0) follow(may_die);
  return child;
}
static pid_t start_trainer(uint32_t begin, int may_die) {
  const pid_t child = fork();
  must(child >= 0, "fork");
  if (child == 0) {
    run_trainer(begin, may_die);
    _exit(0);
  }
  return child;
}

int main(void) {
  must(mkdtemp(folder) != NULL, folder);
  snprintf(socket_path, sizeof(socket_path), "%s/socket", folder);
  pid_t follower = start_follower(1), trainer = start_trainer(1, 1);
  int status = 1;
  for (;;) {
    const pid_t ended = wait(&status);
    if (ended == follower && WIFSIGNALED(status)) {
      printf("the follower was killed; another one starts with nothing\n");
      fflush(stdout);
      follower = start_follower(0);
    } else if (ended == trainer && WIFSIGNALED(status)) {
      printf("the trainer was killed in publication %d; another one goes on\n", TRAINER_DIES_IN);
      fflush(stdout);
      trainer = start_trainer(TRAINER_DIES_IN, 0);
    } else {
      break; /* the trainer has published everything, or one of them has failed */
    }
  }
  kill(follower, SIGKILL);
  unlink(socket_path);
  rmdir(folder);
  return WEXITSTATUS(status);
}
