/* Streams, host functions and capture.  Capture records nothing: it exists so that
 * callers can be refused the way the driver refuses them. */
#include "front.h"

#include <stdlib.h>

struct graph {
  uint64_t id;
};

static _Thread_local int capture_mode; /* 0 global, 1 thread-local, 2 relaxed: this thread's own rule */
static atomic_int captures;

static struct ds_stream *default_stream(struct context *context, struct ds_stream *_Atomic *place, bool is_default) {
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  pthread_mutex_lock(&lock);
  struct ds_stream *stream = atomic_load(place);
  struct ds_stream_wish wish = {.device = context->device, .owner = context, .blocking = true,
                                .is_default = is_default, .internal = true};
  if (!stream && ds_stream_new(&wish, &stream) == DS_OK)
    atomic_store(place, stream);
  pthread_mutex_unlock(&lock);
  return stream;
}

static int absent(CUstream handle) {
  struct context *context = cu_current_or_null();
  bool outlived = ds_stream_outlived(handle);
  if (!outlived)
    ds_wild("stream");
  else if (!context || context->dead)
    ds_wild("stream any more"); /* seen to crash, and to answer an error: its memory was given back */
  return outlived ? CU_INVALID_CONTEXT : CU_INVALID_HANDLE;
}

/* A stream brings its context along; the default ones need a current one. */
int cu_stream(CUstream handle, struct ds_stream **out) {
  struct context *context = NULL;
  if ((uint64_t)handle > CU_STREAM_PER_THREAD) {
    TRY(cu_demanded());
    if (!ds_stream_exists(handle))
      return absent(handle);
    *out = handle;
    return atomic_load(&handle->device->lost);
  }
  TRY(cu_current(&context));
  if ((uint64_t)handle <= CU_STREAM_LEGACY)
    *out = default_stream(context, &context->legacy, true);
  else
    *out = default_stream(context, &context->per_thread, false);
  return *out ? CU_OK : CU_OPERATING_SYSTEM;
}

static int create(CUstream *out, unsigned flags, int priority) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (!out || flags > CU_STREAM_NON_BLOCKING)
    return CU_INVALID_VALUE;
  priority = priority > 0 ? 0 : priority < -5 ? -5 : priority;
  struct ds_stream_wish wish = {.device = context->device, .owner = context, .flags = flags, .priority = priority,
                                .blocking = !(flags & CU_STREAM_NON_BLOCKING)};
  return cu_code(ds_stream_new(&wish, out), context->device);
}

API(cuStreamCreate, 2000, cuStreamCreate, (CUstream *out, unsigned flags), (out, flags)) {
  return create(out, flags, 0);
}

API(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority, (CUstream *out, unsigned flags, int priority),
    (out, flags, priority)) {
  return create(out, flags, priority);
}

API(cuStreamDestroy, 4000, cuStreamDestroy_v2, (CUstream handle), (handle)) {
  struct ds_stream *stream = NULL;
  TRY(cu_initialized());
  if ((uint64_t)handle <= CU_STREAM_PER_THREAD)
    return CU_INVALID_HANDLE;
  TRY(cu_stream(handle, &stream));
  if (stream->capture)
    atomic_fetch_sub(&captures, 1);
  return cu_code(ds_stream_destroy(stream), NULL);
}

/* An unsafe call on a capturing stream breaks the capture. */
static int refuse_capture(struct ds_stream *stream) {
  if (stream->capture == DS_CAPTURE_BROKEN)
    return CU_CAPTURE_INVALIDATED;
  if (stream->capture != DS_CAPTURING)
    return CU_OK;
  stream->capture = DS_CAPTURE_BROKEN;
  return CU_CAPTURE_UNSUPPORTED;
}

bool cu_capturing(struct ds_stream *stream, int *code) {
  if (stream->capture == DS_NOT_CAPTURING)
    return false;
  *code = stream->capture == DS_CAPTURING ? CU_OK : CU_CAPTURE_INVALIDATED;
  return true;
}

/* Breaks captures that forbid a call: those of `owner`, or those whose mode does. */
static int forbid(const void *owner, bool by_mode) {
  int code = CU_OK;
  if (!atomic_load(&captures))
    return CU_OK;
  for (struct ds_stream *at = ds_next_stream(owner, 0), *next; at; at = next) {
    bool mine = pthread_equal(at->capture_thread, pthread_self());
    bool strict = at->capture_mode != 2 && (mine || (at->capture_mode == 0 && capture_mode == 0));
    if (at->capture == DS_CAPTURING && (strict || !by_mode) && code == CU_OK)
      code = refuse_capture(at);
    next = ds_next_stream(owner, at->id);
    ds_stream_drop(at);
  }
  return code;
}

int cu_not_capturing(void) { return capture_mode == 2 ? CU_OK : forbid(NULL, true); }

int cu_no_capture_in(struct context *context) { return forbid(context, false); }

API(cuStreamSynchronize, 2000, cuStreamSynchronize, (CUstream handle), (handle)) {
  struct ds_stream *stream = NULL;
  TRY(cu_stream(handle, &stream));
  TRY(refuse_capture(stream));
  return cu_code(ds_stream_sync(stream), stream->device);
}

API(cuStreamQuery, 2000, cuStreamQuery, (CUstream handle), (handle)) {
  struct ds_stream *stream = NULL;
  TRY(cu_stream(handle, &stream));
  TRY(refuse_capture(stream));
  return cu_code(ds_stream_query(stream), stream->device);
}

API(cuStreamGetPriority, 5050, cuStreamGetPriority, (CUstream handle, int *priority), (handle, priority)) {
  struct ds_stream *stream = NULL;
  TRY(cu_stream(handle, &stream));
  if (!priority)
    return CU_INVALID_VALUE;
  *priority = stream->priority;
  return CU_OK;
}

API(cuStreamGetFlags, 5050, cuStreamGetFlags, (CUstream handle, unsigned *flags), (handle, flags)) {
  struct ds_stream *stream = NULL;
  TRY(cu_stream(handle, &stream));
  if (!flags)
    return CU_INVALID_VALUE;
  *flags = stream->flags;
  return CU_OK;
}

API(cuStreamGetId, 12000, cuStreamGetId, (CUstream handle, uint64_t *id), (handle, id)) {
  struct ds_stream *stream = NULL;
  TRY(cu_stream(handle, &stream));
  *id = stream->id;
  return CU_OK;
}

API(cuStreamGetCtx, 9020, cuStreamGetCtx, (CUstream handle, CUcontext *out), (handle, out)) {
  struct ds_stream *stream = NULL;
  TRY(cu_stream(handle, &stream));
  if (!out)
    return CU_INVALID_VALUE;
  *out = stream->owner;
  return CU_OK;
}

API(cuStreamGetDevice, 12080, cuStreamGetDevice, (CUstream handle, CUdevice *out), (handle, out)) {
  struct ds_stream *stream = NULL;
  TRY(cu_stream(handle, &stream));
  if (!out)
    return CU_INVALID_VALUE;
  *out = stream->device->index;
  return CU_OK;
}

API(cuLaunchHostFunc, 10000, cuLaunchHostFunc, (CUstream handle, CUhostFn call, void *argument),
    (handle, call, argument)) {
  struct ds_stream *stream = NULL;
  int code = CU_OK;
  TRY(cu_stream(handle, &stream));
  if (!call)
    return CU_INVALID_VALUE;
  if (cu_capturing(stream, &code))
    return code;
  struct ds_op *op = ds_op_new(DS_HOST_CALL);
  op->call = call;
  op->argument = argument;
  return cu_code(ds_submit(stream, op, NULL), stream->device);
}

API(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2, (CUstream handle, int mode), (handle, mode)) {
  struct ds_stream *stream = NULL;
  TRY(cu_stream(handle, &stream));
  if (mode < 0 || mode > 2)
    return CU_INVALID_VALUE;
  if (stream->is_default)
    return CU_CAPTURE_UNSUPPORTED;
  if (stream->capture != DS_NOT_CAPTURING)
    return CU_ILLEGAL_STATE;
  stream->capture = DS_CAPTURING;
  stream->capture_mode = mode;
  stream->capture_id = ds_unique();
  stream->capture_thread = pthread_self();
  atomic_fetch_add(&captures, 1);
  return CU_OK;
}

API(cuStreamEndCapture, 10000, cuStreamEndCapture, (CUstream handle, CUgraph *out), (handle, out)) {
  struct ds_stream *stream = NULL;
  TRY(cu_stream(handle, &stream));
  if (!out)
    return CU_INVALID_VALUE;
  if (stream->capture == DS_NOT_CAPTURING)
    return CU_ILLEGAL_STATE;
  if (stream->capture_mode != 2 && !pthread_equal(stream->capture_thread, pthread_self()))
    return CU_CAPTURE_WRONG_THREAD;
  bool broken = stream->capture == DS_CAPTURE_BROKEN;
  stream->capture = DS_NOT_CAPTURING;
  atomic_fetch_sub(&captures, 1);
  *out = NULL;
  if (broken)
    return CU_CAPTURE_INVALIDATED;
  *out = calloc(1, sizeof **out);
  if (!*out)
    return CU_OUT_OF_MEMORY;
  (*out)->id = ds_unique();
  return CU_OK;
}

API(cuGraphDestroy, 10000, cuGraphDestroy, (CUgraph graph), (graph)) {
  TRY(cu_initialized());
  if (!graph)
    return CU_INVALID_VALUE;
  free(graph);
  return CU_OK;
}

API(cuStreamIsCapturing, 10000, cuStreamIsCapturing, (CUstream handle, int *status), (handle, status)) {
  struct ds_stream *stream = NULL;
  TRY(cu_stream(handle, &stream));
  if (!status)
    return CU_INVALID_VALUE;
  *status = (int)stream->capture;
  return CU_OK;
}

API(cuThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode, (int *mode), (mode)) {
  TRY(cu_initialized());
  if (!mode || *mode < 0 || *mode > 2)
    return CU_INVALID_VALUE;
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return CU_OK;
}
