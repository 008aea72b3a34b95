/* Immediate command lists, each a stream. Its work is ordered by barriers alone: a switch runs what lies between two of
 * them in reverse. Regular lists and queues are not here; nothing in this project uses them. */
#include "front.h"

#include <stdlib.h>
#include <string.h>

enum { STAGED = 64 << 10, LISTS = 256, HELD = 4096, ANY_FLAGS = 7 };

struct list {
  struct ds_stream *stream;
  struct ds_device *device;
  uint32_t ordinal;
  bool synchronous;
  int held;
  struct ds_op *waiting[HELD]; /* not in order yet */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct list *lists[LISTS];

static struct list *list_of(const struct ds_stream *stream) {
  struct list *found = NULL;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < LISTS && !found; i++)
    if (lists[i] && lists[i]->stream == stream)
      found = lists[i];
  pthread_mutex_unlock(&lock);
  if (!found)
    ds_wild("command list");
  return found;
}

API(zeCommandListCreateImmediate, ZE_API,
    (struct ze_context *context, struct ds_device *device, const ze_queue_desc *desc, struct ds_stream **out),
    (context, device, desc, out)) {
  ze_queue_group group;
  TRY(ze_context_check(context));
  TRY(ze_device_check(device));
  if (desc->ordinal >= ze_group(desc->ordinal, &group) || desc->index >= group.queues)
    return ZE_INVALID_ARGUMENT;
  if (desc->flags & ~(uint32_t)ANY_FLAGS || desc->priority < 0 || desc->priority > ZE_PRIORITY_HIGH)
    return ZE_UNSUPPORTED_ENUMERATION;
  int priority = desc->priority == ZE_PRIORITY_HIGH ? -1 : desc->priority == ZE_PRIORITY_LOW;
  struct ds_stream_wish wish = {.device = device, .owner = context, .priority = priority};
  struct list *list = calloc(1, sizeof *list);
  enum ds_status status = list ? ds_stream_new(&wish, &list->stream) : DS_OS;
  if (status != DS_OK) {
    free(list);
    return ze_code(status, device);
  }
  list->device = device;
  list->ordinal = desc->ordinal;
  list->synchronous = desc->mode == ZE_QUEUE_SYNCHRONOUS;
  int at = 0;
  pthread_mutex_lock(&lock);
  while (at < LISTS && lists[at])
    at++;
  if (at < LISTS)
    lists[at] = list;
  pthread_mutex_unlock(&lock);
  if (at == LISTS) {
    ds_stream_destroy(list->stream);
    free(list);
    return ZE_OUT_OF_HOST_MEMORY;
  }
  *out = list->stream;
  return ZE_OK;
}

/* ---- submission ---- */
static void settle(struct list *list) {
  while (list->held)
    ds_submit(list->stream, list->waiting[--list->held], NULL);
}

/* Sets an event's word, or waits for it; the pool's memory stays until that is over. */
static int touch(struct list *list, struct ze_event *event, enum ds_work work, uint64_t value) {
  if (!ze_event_exists(event))
    return ZE_INVALID_ARGUMENT;
  struct ds_op *op = ds_op_new(work);
  op->address = (uint64_t)ze_event_word(event);
  op->value = value;
  op->size = 8;
  op->kept = ds_block_keep(event->pool->block);
  return ze_code(ds_submit(list->stream, op, NULL), list->device);
}

static int wait_for(struct list *list, uint32_t n, struct ze_event **events) {
  for (uint32_t i = 0; i < n; i++)
    TRY(touch(list, events[i], DS_WAIT_VALUE, 1));
  return ZE_OK;
}

static int finish(struct list *list, struct ze_event *signal) {
  if (signal)
    TRY(touch(list, signal, DS_WRITE_VALUE, 1));
  return list->synchronous ? ze_code(ds_stream_sync(list->stream), list->device) : ZE_OK;
}

/* Copies are held back where order is off, unless they wait for an event or set one. */
static void submit(struct list *list, struct ds_op *op, bool ordered) {
  if (ds_switch(DS_unordered) && !ordered && list->held < HELD)
    list->waiting[list->held++] = op;
  else
    ds_submit(list->stream, op, NULL);
}

static struct list *ready(struct ds_stream *stream, int *code) {
  struct list *list = list_of(stream);
  *code = list ? ze_device_check(list->device) : ZE_INVALID_ARGUMENT;
  return list;
}

static int copy(struct ds_stream *stream, struct ds_copy copy, struct ze_event *signal, uint32_t n,
                struct ze_event **waits) {
  int code;
  struct list *list = ready(stream, &code);
  TRY(code);
  copy.dst = ze_in(copy.dst);
  copy.src = ze_in(copy.src);
  if (!copy.width || !copy.height || !copy.depth) {
    if (ds_switch(DS_count_zero_abort))
      ds_act((struct ds_fault){DS_ABORT, 0});
    return ZE_OK;
  }
  TRY(ze_code(ds_check_copy(&copy), list->device));
  TRY(wait_for(list, n, waits));
  struct ds_op *op = ds_op_new(DS_COPY);
  op->copy = copy;
  bool flat = copy.height == 1 && copy.depth == 1 && copy.width <= STAGED;
  if (ds_place_of(copy.src) == DS_AT_PAGEABLE && flat && (op->staged = malloc(copy.width)))
    memcpy(op->staged, (const void *)copy.src, copy.width);
  if (ds_place_of(copy.dst) == DS_AT_PAGEABLE && ds_switch(DS_private_copies))
    op->copy.width = 0; /* what is written there is seen by nobody */
  submit(list, op, signal || n);
  return finish(list, signal);
}

API(zeCommandListAppendMemoryCopy, ZE_API,
    (struct ds_stream *stream, uint64_t dst, uint64_t src, size_t bytes, struct ze_event *signal, uint32_t n,
     struct ze_event **waits),
    (stream, dst, src, bytes, signal, n, waits)) {
  struct ds_copy one = {.dst = dst, .src = src, .width = bytes, .height = 1, .depth = 1};
  return copy(stream, one, signal, n, waits);
}

static uint64_t place(uint64_t pointer, const ze_region *region, uint64_t pitch, uint64_t layer) {
  return pointer + region->z * layer + region->y * pitch + region->x;
}

API(zeCommandListAppendMemoryCopyRegion, ZE_API,
    (struct ds_stream *stream, uint64_t dst, const ze_region *to, uint32_t dst_pitch, uint32_t dst_layer, uint64_t src,
     const ze_region *from, uint32_t src_pitch, uint32_t src_layer, struct ze_event *signal, uint32_t n,
     struct ze_event **waits),
    (stream, dst, to, dst_pitch, dst_layer, src, from, src_pitch, src_layer, signal, n, waits)) {
  if (to->width != from->width || to->height != from->height || to->depth != from->depth)
    return ZE_INVALID_SIZE;
  struct ds_copy one = {.dst = place(ze_in(dst), to, dst_pitch, dst_layer),
                        .src = place(ze_in(src), from, src_pitch, src_layer),
                        .width = to->width,
                        .height = to->height,
                        .depth = to->depth ? to->depth : 1, /* 0: two dimensions */
                        .dst_pitch = dst_pitch,
                        .src_pitch = src_pitch,
                        .dst_layer = dst_layer,
                        .src_layer = src_layer};
  return copy(stream, one, signal, n, waits);
}

API(zeCommandListAppendMemoryFill, ZE_API,
    (struct ds_stream *stream, uint64_t dst, const void *pattern, size_t size, size_t bytes, struct ze_event *signal,
     uint32_t n, struct ze_event **waits),
    (stream, dst, pattern, size, bytes, signal, n, waits)) {
  int code;
  ze_queue_group group;
  struct list *list = ready(stream, &code);
  TRY(code);
  ze_group(list->ordinal, &group);
  if (size > group.max_fill || size > 8 || size & (size - 1) || !size)
    return ZE_INVALID_SIZE;
  uint64_t address = ze_in(dst);
  TRY(ze_code(ds_check_span(address, bytes, DS_WRITE), list->device));
  TRY(wait_for(list, n, waits));
  struct ds_op *op = ds_op_new(DS_FILL);
  op->copy = (struct ds_copy){.dst = address, .width = bytes, .height = 1, .depth = 1};
  memcpy(&op->value, pattern, size);
  op->size = (int)size;
  submit(list, op, signal || n);
  return finish(list, signal);
}

API(zeCommandListAppendBarrier, ZE_API,
    (struct ds_stream *stream, struct ze_event *signal, uint32_t n, struct ze_event **waits),
    (stream, signal, n, waits)) {
  int code;
  struct list *list = ready(stream, &code);
  TRY(code);
  settle(list);
  TRY(wait_for(list, n, waits));
  return finish(list, signal);
}

API(zeCommandListAppendSignalEvent, ZE_API, (struct ds_stream *stream, struct ze_event *event), (stream, event)) {
  int code;
  struct list *list = ready(stream, &code);
  TRY(code);
  return finish(list, event);
}

API(zeCommandListAppendWaitOnEvents, ZE_API, (struct ds_stream *stream, uint32_t n, struct ze_event **events),
    (stream, n, events)) {
  int code;
  struct list *list = ready(stream, &code);
  TRY(code);
  TRY(wait_for(list, n, events));
  return finish(list, NULL);
}

API(zeCommandListAppendEventReset, ZE_API, (struct ds_stream *stream, struct ze_event *event), (stream, event)) {
  int code;
  struct list *list = ready(stream, &code);
  TRY(code);
  return touch(list, event, DS_WRITE_VALUE, 0);
}

API(zeCommandListHostSynchronize, ZE_API_6, (struct ds_stream *stream, uint64_t timeout_ns), (stream, timeout_ns)) {
  int code;
  struct list *list = ready(stream, &code);
  TRY(code);
  settle(list);
  if (timeout_ns == UINT64_MAX)
    return ze_code(ds_stream_sync(stream), list->device);
  uint64_t began = ds_now_us();
  enum ds_status status;
  while ((status = ds_stream_query(stream)) == DS_NOT_READY && ds_now_us() - began < timeout_ns / 1000)
    ds_sleep_us(50);
  return ze_code(status, list->device);
}

/* A list that is still at work must not be destroyed; once the device is lost, nothing is at work. */
API(zeCommandListDestroy, ZE_API, (struct ds_stream *stream), (stream)) {
  struct list *list = list_of(stream);
  if (!list)
    return ZE_INVALID_ARGUMENT;
  settle(list);
  uint64_t began = ds_now_us(); /* a list counts its last work a moment after it set that one's event */
  while (ds_stream_query(stream) == DS_NOT_READY) {
    if (ds_now_us() - began > 20000)
      return ZE_IN_USE;
    ds_sleep_us(50);
  }
  pthread_mutex_lock(&lock);
  for (int i = 0; i < LISTS; i++)
    if (lists[i] == list)
      lists[i] = NULL;
  pthread_mutex_unlock(&lock);
  ds_stream_destroy(stream);
  free(list);
  return ZE_OK;
}
