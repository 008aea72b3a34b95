/* Streams: a queue and a worker thread each, stalls, and waiting for work.
 * What a piece of work does is in work.c. */
#include "stream.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static struct ds_stream *streams;
static struct ds_stream *outlived; /* handles that callers still hold though their context ended */
static atomic_bool all_stalled;

/* Work items are recycled, never given back: the late writer may still read them. */
static pthread_mutex_t spare_lock = PTHREAD_MUTEX_INITIALIZER;
static struct ds_op *spare;

struct ds_op *ds_op_new(enum ds_work work) {
  pthread_mutex_lock(&spare_lock);
  struct ds_op *op = spare;
  if (op)
    spare = atomic_load(&op->next);
  pthread_mutex_unlock(&spare_lock);
  if (!op && !(op = malloc(sizeof *op)))
    abort();
  memset(op, 0, sizeof *op);
  op->work = work;
  return op;
}

static void op_done(struct ds_op *op) {
  free(op->staged);
  if (op->event)
    ds_event_drop(op->event);
  ds_block_drop(op->kept);
  if (op->other)
    ds_stream_drop(op->other);
  pthread_mutex_lock(&spare_lock);
  atomic_store(&op->next, spare);
  spare = op;
  pthread_mutex_unlock(&spare_lock);
}

static bool is_fence(const struct ds_op *op) {
  return op->work == DS_WRITE_VALUE || op->work == DS_RECORD || op->work == DS_HOST_CALL;
}

/* Whether the worker has to leave the oldest work alone for now. */
static bool held(const struct ds_stream *stream, const struct ds_op *op) {
  if (atomic_load(&stream->device->lost))
    return false;
  if (stream->stalled || atomic_load(&all_stalled))
    return true;
  bool lazy = op->work == DS_COPY && ds_switch(DS_lazy_writes);
  return lazy && !stream->fences && !stream->wanted && !stream->closing;
}

static void *work(void *argument) {
  struct ds_stream *stream = argument;
  pthread_mutex_lock(&stream->lock);
  for (;;) {
    struct ds_op *op = atomic_load(&stream->head);
    if (!op && stream->closing)
      break;
    if (!op || held(stream, op)) {
      pthread_cond_wait(&stream->changed, &stream->lock);
      continue;
    }
    pthread_mutex_unlock(&stream->lock);
    ds_sleep_us(ds_switch(DS_delay_us));
    ds_run(stream, op);
    pthread_mutex_lock(&stream->lock);
    atomic_store(&stream->head, atomic_load(&op->next));
    if (!atomic_load(&stream->head))
      stream->tail = NULL;
    stream->fences -= is_fence(op);
    atomic_store(&stream->completed, op->ticket);
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
    op_done(op);
    pthread_mutex_lock(&stream->lock);
  }
  pthread_mutex_unlock(&stream->lock);
  ds_stream_drop(stream);
  return NULL;
}

static int start_worker(struct ds_stream *stream) {
  sigset_t all, before;
  pthread_attr_t attributes;
  sigfillset(&all);
  const int faults[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE}; /* a handler should tell of these */
  for (size_t i = 0; i < sizeof faults / sizeof *faults; i++)
    sigdelset(&all, faults[i]);
  pthread_attr_init(&attributes);
  pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
  pthread_attr_setstacksize(&attributes, 256 << 10);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  int failed = pthread_create(&stream->thread, &attributes, work, stream);
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  pthread_attr_destroy(&attributes);
  return failed;
}

enum ds_status ds_stream_new(const struct ds_stream_wish *wish, struct ds_stream **out) {
  struct ds_stream *stream = calloc(1, sizeof *stream);
  if (!stream)
    return DS_NOMEM;
  stream->device = wish->device;
  stream->owner = wish->owner;
  stream->flags = wish->flags;
  stream->priority = wish->priority;
  stream->blocking = wish->blocking;
  stream->is_default = wish->is_default;
  stream->internal = wish->internal;
  stream->id = ds_unique();
  pthread_mutex_init(&stream->lock, NULL);
  pthread_cond_init(&stream->changed, NULL);
  atomic_store(&stream->refs, 2); /* the list's and the worker's */
  if (start_worker(stream) != 0) {
    free(stream);
    return DS_OS;
  }
  pthread_mutex_lock(&list_lock);
  stream->next = streams;
  streams = stream;
  pthread_mutex_unlock(&list_lock);
  ds_count(DS_C_live_streams, !stream->internal);
  *out = stream;
  return DS_OK;
}

struct ds_stream *ds_streams_head(void) { return streams; }

bool ds_stream_exists(const struct ds_stream *wanted) {
  pthread_mutex_lock(&list_lock);
  const struct ds_stream *at = streams;
  while (at && at != wanted)
    at = at->next;
  pthread_mutex_unlock(&list_lock);
  return at != NULL;
}

bool ds_stream_outlived(const struct ds_stream *wanted) {
  pthread_mutex_lock(&list_lock);
  const struct ds_stream *at = outlived;
  while (at && at != wanted)
    at = at->next;
  pthread_mutex_unlock(&list_lock);
  return at != NULL;
}

void ds_stream_drop(struct ds_stream *stream) {
  if (atomic_fetch_sub(&stream->refs, 1) == 1)
    free(stream);
}

/* Returns at once; the worker ends when its queue is empty. */
enum ds_status ds_stream_destroy(struct ds_stream *stream) {
  pthread_mutex_lock(&list_lock);
  struct ds_stream **link = &streams;
  while (*link && *link != stream)
    link = &(*link)->next;
  bool found = *link != NULL;
  if (found)
    *link = stream->next;
  pthread_mutex_unlock(&list_lock);
  if (!found)
    return DS_BAD_HANDLE;
  pthread_mutex_lock(&stream->lock);
  stream->closing = true;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
  ds_count(DS_C_live_streams, -(long)!stream->internal);
  ds_stream_drop(stream);
  return DS_OK;
}

static void enqueue(struct ds_stream *stream, struct ds_op *op, uint64_t *ticket) {
  pthread_mutex_lock(&stream->lock);
  uint64_t depth = (uint64_t)ds_switch(DS_queue_depth);
  while (depth && stream->submitted - atomic_load(&stream->completed) >= depth &&
         !atomic_load(&stream->device->lost))
    pthread_cond_wait(&stream->changed, &stream->lock);
  op->ticket = ++stream->submitted;
  if (ticket)
    *ticket = op->ticket;
  stream->fences += is_fence(op);
  if (stream->tail)
    atomic_store(&stream->tail->next, op);
  else
    atomic_store(&stream->head, op);
  stream->tail = op;
  pthread_cond_broadcast(&stream->changed);
  pthread_mutex_unlock(&stream->lock);
}

static uint64_t last_ticket(struct ds_stream *stream) {
  pthread_mutex_lock(&stream->lock);
  uint64_t last = stream->submitted;
  pthread_mutex_unlock(&stream->lock);
  return last;
}

/* Walks live streams; what the loop body sees cannot vanish under it. */
#define EACH_STREAM(at, owner)                                                        \
  for (struct ds_stream *at = ds_next_stream(owner, 0), *following_; at;              \
       following_ = ds_next_stream(owner, at->id), ds_stream_drop(at), at = following_)

struct ds_stream *ds_next_stream(const void *owner, uint64_t after) {
  struct ds_stream *best = NULL;
  pthread_mutex_lock(&list_lock);
  for (struct ds_stream *at = streams; at; at = at->next)
    if ((!owner || at->owner == owner) && at->id > after && (!best || at->id < best->id))
      best = at;
  if (best)
    atomic_fetch_add(&best->refs, 1);
  pthread_mutex_unlock(&list_lock);
  return best;
}

/* The default stream runs after all blocking streams of its owner, and they after it. */
static void order(struct ds_stream *stream) {
  if (!stream->blocking)
    return;
  EACH_STREAM(other, stream->owner) {
    uint64_t last = last_ticket(other);
    bool paired = other != stream && other->blocking && (stream->is_default || other->is_default);
    if (!paired || last <= atomic_load(&other->completed))
      continue;
    struct ds_op *join = ds_op_new(DS_JOIN);
    atomic_fetch_add(&other->refs, 1);
    join->other = other;
    join->other_ticket = last;
    enqueue(stream, join, NULL);
  }
}

enum ds_status ds_submit(struct ds_stream *stream, struct ds_op *op, uint64_t *ticket) {
  order(stream);
  enqueue(stream, op, ticket);
  return DS_OK;
}

enum ds_status ds_wait_ticket(struct ds_stream *stream, uint64_t ticket) {
  pthread_mutex_lock(&stream->lock);
  stream->wanted++;
  pthread_cond_broadcast(&stream->changed);
  while (atomic_load(&stream->completed) < ticket && !atomic_load(&stream->device->lost))
    pthread_cond_wait(&stream->changed, &stream->lock);
  stream->wanted--;
  pthread_mutex_unlock(&stream->lock);
  return atomic_load(&stream->device->lost) ? DS_LOST : DS_OK;
}

enum ds_status ds_stream_sync(struct ds_stream *stream) { return ds_wait_ticket(stream, last_ticket(stream)); }

enum ds_status ds_stream_query(struct ds_stream *stream) {
  if (atomic_load(&stream->device->lost))
    return DS_LOST;
  pthread_mutex_lock(&stream->lock);
  bool done = atomic_load(&stream->completed) == stream->submitted;
  pthread_mutex_unlock(&stream->lock);
  return done ? DS_OK : DS_NOT_READY;
}

enum ds_status ds_sync_owner(void *owner) {
  enum ds_status status = DS_OK;
  EACH_STREAM(at, owner) {
    enum ds_status one = ds_stream_sync(at);
    status = status == DS_OK ? one : status;
  }
  return status;
}

void ds_destroy_streams(void *owner) {
  EACH_STREAM(at, owner) {
    ds_stream_destroy(at);
    pthread_mutex_lock(&list_lock);
    atomic_fetch_add(&at->refs, 1); /* never freed: the handle must not come back as another stream */
    at->next = outlived;
    outlived = at;
    pthread_mutex_unlock(&list_lock);
  }
}

void ds_streams_kick(void) {
  EACH_STREAM(at, NULL) {
    pthread_mutex_lock(&at->lock);
    pthread_cond_broadcast(&at->changed);
    pthread_mutex_unlock(&at->lock);
  }
}

void ds_stall(struct ds_stream *stream, bool on) {
  if (stream) {
    pthread_mutex_lock(&stream->lock);
    stream->stalled = on;
    pthread_mutex_unlock(&stream->lock);
  } else {
    atomic_store(&all_stalled, on);
  }
  ds_streams_kick();
}

void ds_drain_waits(void) {
  if (!ds_switch(DS_drain) || !ds_counter(DS_C_pending_waits))
    return;
  ds_count(DS_C_drained_calls, 1);
  while (ds_counter(DS_C_pending_waits))
    ds_sleep_us(200);
}
