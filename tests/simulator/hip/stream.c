/* Streams, events, values, copies and host functions. Capture records nothing: it exists so that callers can be
 * refused the way the runtime refuses them. */
#include "front.h"

#include <stdlib.h>
#include <string.h>

enum { STAGED = 64 << 10 };

static _Thread_local int capture_mode; /* 0 global, 1 thread-local, 2 relaxed: this thread's own rule */
static atomic_int captures;

static struct ds_stream *default_stream(struct place *place, struct ds_stream *_Atomic *at, bool is_default) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&lock);
  struct ds_stream *stream = atomic_load(at);
  struct ds_stream_wish wish = {.device = place->device, .owner = place, .blocking = true, .is_default = is_default,
                                .internal = true};
  if (!stream && ds_stream_new(&wish, &stream) == DS_OK)
    atomic_store(at, stream);
  pthread_mutex_unlock(&lock);
  return stream;
}

int hip_stream(struct ds_stream *handle, struct ds_stream **out) {
  struct place *place = NULL;
  if ((uint64_t)handle > HIP_STREAM_PER_THREAD) {
    if (!ds_stream_exists(handle)) {
      ds_wild("stream");
      return HIP_INVALID_HANDLE;
    }
    *out = handle;
    return atomic_load(&handle->device->lost);
  }
  TRY(hip_place(&place));
  bool null = (uint64_t)handle != HIP_STREAM_PER_THREAD;
  *out = default_stream(place, null ? &place->null_stream : &place->per_thread, null);
  return *out ? HIP_OK : HIP_OUT_OF_MEMORY;
}

static int create(struct ds_stream **out, unsigned flags, int priority) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!out || flags > HIP_STREAM_NON_BLOCKING)
    return HIP_INVALID_VALUE;
  priority = priority > 1 ? 1 : priority < -1 ? -1 : priority;
  struct ds_stream_wish wish = {.device = place->device, .owner = place, .flags = flags, .priority = priority,
                                .blocking = !(flags & HIP_STREAM_NON_BLOCKING)};
  return hip_code(ds_stream_new(&wish, out), place->device);
}

API(hipStreamCreateWithFlags, (struct ds_stream **out, unsigned flags), (out, flags)) { return create(out, flags, 0); }

API(hipStreamCreateWithPriority, (struct ds_stream **out, unsigned flags, int priority), (out, flags, priority)) {
  return create(out, flags, priority);
}

API(hipStreamDestroy, (struct ds_stream *handle), (handle)) {
  struct ds_stream *stream = NULL;
  if ((uint64_t)handle <= HIP_STREAM_PER_THREAD)
    return HIP_INVALID_HANDLE;
  TRY(hip_stream(handle, &stream));
  if (stream->capture)
    atomic_fetch_sub(&captures, 1);
  return hip_code(ds_stream_destroy(stream), NULL);
}

/* --- capture --- */

static int refuse_capture(struct ds_stream *stream) {
  if (stream->capture == DS_CAPTURE_BROKEN)
    return HIP_CAPTURE_INVALIDATED;
  if (stream->capture != DS_CAPTURING)
    return HIP_OK;
  stream->capture = DS_CAPTURE_BROKEN;
  return HIP_CAPTURE_UNSUPPORTED;
}

bool hip_capturing(struct ds_stream *stream, int *code) {
  *code = stream->capture == DS_CAPTURE_BROKEN ? HIP_CAPTURE_INVALIDATED : HIP_OK;
  return stream->capture != DS_NOT_CAPTURING;
}

int hip_not_capturing(void) {
  int code = HIP_OK;
  if (capture_mode == 2 || !atomic_load(&captures))
    return HIP_OK;
  for (struct ds_stream *at = ds_next_stream(NULL, 0), *next; at; at = next) {
    bool mine = pthread_equal(at->capture_thread, pthread_self());
    bool strict = at->capture_mode != 2 && (mine || (at->capture_mode == 0 && capture_mode == 0));
    if (at->capture == DS_CAPTURING && strict && code == HIP_OK)
      code = refuse_capture(at);
    next = ds_next_stream(NULL, at->id);
    ds_stream_drop(at);
  }
  return code;
}

API(hipStreamBeginCapture, (struct ds_stream *handle, int mode), (handle, mode)) {
  struct ds_stream *stream = NULL;
  TRY(hip_stream(handle, &stream));
  if (mode < 0 || mode > 2)
    return HIP_INVALID_VALUE;
  if (stream->is_default)
    return HIP_CAPTURE_UNSUPPORTED;
  if (stream->capture != DS_NOT_CAPTURING)
    return HIP_ILLEGAL_STATE;
  stream->capture = DS_CAPTURING;
  stream->capture_mode = mode;
  stream->capture_thread = pthread_self();
  atomic_fetch_add(&captures, 1);
  return HIP_OK;
}

API(hipStreamEndCapture, (struct ds_stream *handle, void **graph), (handle, graph)) {
  struct ds_stream *stream = NULL;
  TRY(hip_stream(handle, &stream));
  if (!graph || stream->capture == DS_NOT_CAPTURING)
    return HIP_ILLEGAL_STATE;
  if (stream->capture_mode != 2 && !pthread_equal(stream->capture_thread, pthread_self()))
    return HIP_CAPTURE_WRONG_THREAD;
  bool broken = stream->capture == DS_CAPTURE_BROKEN;
  stream->capture = DS_NOT_CAPTURING;
  atomic_fetch_sub(&captures, 1);
  *graph = broken ? NULL : calloc(1, 8);
  return broken ? HIP_CAPTURE_INVALIDATED : HIP_OK;
}

API(hipGraphDestroy, (void *graph), (graph)) {
  free(graph);
  return graph ? HIP_OK : HIP_INVALID_VALUE;
}

API(hipStreamIsCapturing, (struct ds_stream *handle, int *status), (handle, status)) {
  struct ds_stream *stream = NULL;
  TRY(hip_stream(handle, &stream));
  *status = (int)stream->capture;
  return HIP_OK;
}

API(hipThreadExchangeStreamCaptureMode, (int *mode), (mode)) {
  if (!mode || *mode < 0 || *mode > 2)
    return HIP_INVALID_VALUE;
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return HIP_OK;
}

API(hipStreamSynchronize, (struct ds_stream *handle), (handle)) {
  struct ds_stream *stream = NULL;
  TRY(hip_stream(handle, &stream));
  TRY(refuse_capture(stream));
  return hip_code(ds_stream_sync(stream), stream->device);
}

API(hipStreamQuery, (struct ds_stream *handle), (handle)) {
  struct ds_stream *stream = NULL;
  TRY(hip_stream(handle, &stream));
  TRY(refuse_capture(stream));
  return hip_code(ds_stream_query(stream), stream->device);
}

API(hipLaunchHostFunc, (struct ds_stream *handle, hipHostFn_t call, void *argument), (handle, call, argument)) {
  struct ds_stream *stream = NULL;
  int code = HIP_OK;
  TRY(hip_stream(handle, &stream));
  if (!call)
    return HIP_INVALID_VALUE;
  if (hip_capturing(stream, &code))
    return code;
  struct ds_op *op = ds_op_new(DS_HOST_CALL);
  op->call = call;
  op->argument = argument;
  return hip_code(ds_submit(stream, op, NULL), stream->device);
}

/* --- values --- */

static int value(struct ds_stream *handle, void *address, uint64_t value, unsigned compare, uint64_t mask, int size,
                 bool write) {
  struct ds_stream *stream = NULL;
  int code = HIP_OK;
  TRY(hip_stream(handle, &stream));
  if (!ds_switch(DS_memops))
    return HIP_NOT_SUPPORTED;
  if (compare > DS_NOR || (mask != UINT64_MAX && mask != UINT32_MAX))
    return HIP_INVALID_VALUE;
  TRY(hip_code(ds_check_value((uint64_t)address, size), stream->device));
  if (hip_capturing(stream, &code))
    return code;
  struct ds_op *op = ds_op_new(write ? DS_WRITE_VALUE : DS_WAIT_VALUE);
  op->address = (uint64_t)address;
  op->value = value;
  op->size = size;
  op->compare = (enum ds_compare)compare;
  return hip_code(ds_submit(stream, op, NULL), stream->device);
}

API(hipStreamWriteValue32, (struct ds_stream *stream, void *address, uint32_t number, unsigned flags),
    (stream, address, number, flags)) {
  return flags ? HIP_INVALID_VALUE : value(stream, address, number, 0, UINT64_MAX, 4, true);
}

API(hipStreamWriteValue64, (struct ds_stream *stream, void *address, uint64_t number, unsigned flags),
    (stream, address, number, flags)) {
  return flags ? HIP_INVALID_VALUE : value(stream, address, number, 0, UINT64_MAX, 8, true);
}

API(hipStreamWaitValue32, (struct ds_stream *stream, void *address, uint32_t number, unsigned flags, uint32_t mask),
    (stream, address, number, flags, mask)) {
  return value(stream, address, number, flags, mask, 4, false);
}

API(hipStreamWaitValue64, (struct ds_stream *stream, void *address, uint64_t number, unsigned flags, uint64_t mask),
    (stream, address, number, flags, mask)) {
  return value(stream, address, number, flags, mask, 8, false);
}

/* --- copies --- */

static int submit(struct ds_stream *handle, const struct ds_copy *copy) {
  struct ds_stream *stream = NULL;
  int code = HIP_OK;
  uint64_t ticket;
  TRY(hip_stream(handle, &stream));
  if (!copy->width || !copy->height)
    return HIP_OK;
  TRY(hip_code(ds_check_copy(copy), stream->device));
  if (hip_capturing(stream, &code))
    return code;
  if (ds_switch(DS_launch_blocks))
    ds_drain_waits();
  struct ds_op *op = ds_op_new(DS_COPY);
  enum ds_place from = ds_place_of(copy->src), to = ds_place_of(copy->dst);
  op->copy = *copy;
  if (from == DS_AT_PAGEABLE && copy->height == 1 && copy->width <= STAGED && (op->staged = malloc(copy->width)))
    memcpy(op->staged, (const void *)copy->src, copy->width);
  bool hosts = from != DS_AT_DEVICE && to != DS_AT_DEVICE && ds_switch(DS_host_copy_waits);
  bool wait = hosts || (from == DS_AT_PAGEABLE && !op->staged) || to == DS_AT_PAGEABLE;
  ds_submit(stream, op, &ticket);
  return wait ? hip_code(ds_wait_ticket(stream, ticket), stream->device) : HIP_OK;
}

static int linear(struct ds_stream *handle, void *dst, const void *src, size_t bytes) {
  struct ds_copy copy = {.dst = (uint64_t)dst, .src = (uint64_t)src, .width = bytes, .height = 1, .depth = 1};
  return submit(handle, &copy);
}

API(hipMemcpyAsync, (void *dst, const void *src, size_t bytes, int kind, struct ds_stream *stream),
    (dst, src, bytes, kind, stream)) {
  return kind < 0 || kind > 4 ? HIP_INVALID_VALUE : linear(stream, dst, src, bytes);
}

API(hipMemcpy, (void *dst, const void *src, size_t bytes, int kind), (dst, src, bytes, kind)) {
  struct ds_stream *stream = NULL;
  TRY(hip_stream(NULL, &stream));
  TRY(kind < 0 || kind > 4 ? HIP_INVALID_VALUE : linear(NULL, dst, src, bytes));
  return hip_code(ds_stream_sync(stream), stream->device);
}

API(hipMemcpy2DAsync,
    (void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height, int kind,
     struct ds_stream *stream),
    (dst, dst_pitch, src, src_pitch, width, height, kind, stream)) {
  if (kind < 0 || kind > 4 || width > dst_pitch || width > src_pitch)
    return HIP_INVALID_VALUE;
  struct ds_copy copy = {.dst = (uint64_t)dst, .src = (uint64_t)src, .width = width, .height = height, .depth = 1,
                         .dst_pitch = dst_pitch, .src_pitch = src_pitch};
  return submit(stream, &copy);
}

/* From the last item to the first, so that nobody relies on an order. Attributes are not supported. */
API(hipMemcpyBatchAsync,
    (void **dsts, void **srcs, size_t *sizes, size_t count, void *attributes, size_t *starts, size_t n, size_t *failed,
     struct ds_stream *stream),
    (dsts, srcs, sizes, count, attributes, starts, n, failed, stream)) {
  (void)attributes, (void)starts, (void)n;
  if (failed)
    *failed = SIZE_MAX;
  if (!count || !dsts || !srcs || !sizes || (uint64_t)stream <= HIP_STREAM_LEGACY)
    return HIP_INVALID_VALUE;
  for (size_t i = count; i-- > 0;)
    TRY(linear(stream, dsts[i], srcs[i], sizes[i]));
  return HIP_OK;
}

API(hipMemsetAsync, (void *dst, int byte, size_t bytes, struct ds_stream *handle), (dst, byte, bytes, handle)) {
  struct ds_stream *stream = NULL;
  int code = HIP_OK;
  TRY(hip_stream(handle, &stream));
  TRY(hip_code(ds_check_span((uint64_t)dst, bytes, DS_WRITE), stream->device));
  if (hip_capturing(stream, &code))
    return code;
  if (ds_switch(DS_launch_blocks))
    ds_drain_waits();
  struct ds_op *op = ds_op_new(DS_FILL);
  op->copy = (struct ds_copy){.dst = (uint64_t)dst, .width = bytes, .height = 1};
  op->value = (unsigned char)byte;
  op->size = 1;
  return hip_code(ds_submit(stream, op, NULL), stream->device);
}
