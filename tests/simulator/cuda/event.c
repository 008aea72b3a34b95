/* Events. */
#include "front.h"

static int find(CUevent event, struct context **context) {
  TRY(cu_current(context));
  if (!event || !ds_event_exists(event))
    return CU_INVALID_HANDLE;
  return atomic_load(&ds_event_device(event)->lost);
}

API(cuEventCreate, 2000, cuEventCreate, (CUevent *out, unsigned flags), (out, flags)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  bool untimed = flags & DS_EVENT_NO_TIMING;
  if (!out || flags > 7 || ((flags & CU_EVENT_INTERPROCESS) && !untimed))
    return CU_INVALID_VALUE;
  return cu_code(ds_event_new(context->device, context, flags, out), context->device);
}

API(cuEventDestroy, 4000, cuEventDestroy_v2, (CUevent event), (event)) {
  struct context *context = NULL;
  TRY(find(event, &context));
  return cu_code(ds_event_destroy(event), context->device);
}

static int record(CUevent event, CUstream handle) {
  struct context *context = NULL;
  struct ds_stream *stream = NULL;
  int code = CU_OK;
  TRY(cu_stream(handle, &stream));
  TRY(find(event, &context));
  if (cu_capturing(stream, &code))
    return code;
  if (ds_event_owner(event) != stream->owner)
    return CU_INVALID_HANDLE; /* both have to belong to one context */
  return cu_code(ds_event_record(event, stream), stream->device);
}

API(cuEventRecord, 2000, cuEventRecord, (CUevent event, CUstream stream), (event, stream)) {
  return record(event, stream);
}

API(cuEventRecordWithFlags, 11010, cuEventRecordWithFlags, (CUevent event, CUstream stream, unsigned flags),
    (event, stream, flags)) {
  return flags > 1 ? CU_INVALID_VALUE : record(event, stream);
}

API(cuStreamWaitEvent, 3020, cuStreamWaitEvent, (CUstream handle, CUevent event, unsigned flags),
    (handle, event, flags)) {
  struct context *context = NULL;
  struct ds_stream *stream = NULL;
  int code = CU_OK;
  TRY(cu_stream(handle, &stream));
  TRY(find(event, &context));
  if (flags > 1)
    return CU_INVALID_VALUE;
  if (cu_capturing(stream, &code))
    return code;
  return cu_code(ds_event_wait(stream, event), stream->device);
}

API(cuEventQuery, 2000, cuEventQuery, (CUevent event), (event)) {
  struct context *context = NULL;
  TRY(find(event, &context));
  TRY(cu_not_capturing());
  return cu_code(ds_event_query(event), ds_event_device(event));
}

API(cuEventSynchronize, 2000, cuEventSynchronize, (CUevent event), (event)) {
  struct context *context = NULL;
  TRY(find(event, &context));
  TRY(cu_not_capturing());
  return cu_code(ds_event_sync(event), ds_event_device(event));
}

static int elapsed(float *ms, CUevent from, CUevent to) {
  struct context *context = NULL;
  TRY(find(from, &context));
  TRY(find(to, &context));
  if (!ms)
    return CU_INVALID_VALUE;
  return cu_code(ds_event_elapsed(from, to, ms), context->device);
}

API(cuEventElapsedTime, 2000, cuEventElapsedTime, (float *ms, CUevent from, CUevent to), (ms, from, to)) {
  return elapsed(ms, from, to);
}

API(cuEventElapsedTime, 12080, cuEventElapsedTime_v2, (float *ms, CUevent from, CUevent to), (ms, from, to)) {
  return elapsed(ms, from, to);
}
