/* Events. */
#include "front.h"

/* An event brings its context along; a destroyed one is known to be gone. */
static int find(CUevent event) {
  TRY(cu_demanded());
  if (!event)
    return CU_INVALID_HANDLE;
  if (!ds_event_exists(event))
    return CU_CONTEXT_IS_DESTROYED;
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
  TRY(find(event));
  return cu_code(ds_event_destroy(event), NULL);
}

static int record(CUevent event, CUstream handle) {
  struct ds_stream *stream = NULL;
  int code = CU_OK;
  TRY(cu_stream(handle, &stream));
  TRY(find(event));
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
  struct ds_stream *found = NULL;
  if (flags > 1)
    return CU_INVALID_VALUE;
  TRY(cu_stream(stream, &found));
  if (flags && !found->capture)
    return CU_ILLEGAL_STATE; /* an external record is for graphs */
  return record(event, stream);
}

API(cuStreamWaitEvent, 3020, cuStreamWaitEvent, (CUstream handle, CUevent event, unsigned flags),
    (handle, event, flags)) {
  struct ds_stream *stream = NULL;
  int code = CU_OK;
  TRY(cu_stream(handle, &stream));
  TRY(find(event));
  if (flags > 1)
    return CU_INVALID_VALUE;
  if (cu_capturing(stream, &code))
    return code;
  return cu_code(ds_event_wait(stream, event), stream->device);
}

API(cuEventQuery, 2000, cuEventQuery, (CUevent event), (event)) {
  TRY(find(event));
  TRY(cu_not_capturing());
  return cu_code(ds_event_query(event), ds_event_device(event));
}

API(cuEventSynchronize, 2000, cuEventSynchronize, (CUevent event), (event)) {
  TRY(find(event));
  TRY(cu_not_capturing());
  return cu_code(ds_event_sync(event), ds_event_device(event));
}

static int elapsed(float *ms, CUevent from, CUevent to) {
  TRY(find(from));
  TRY(find(to));
  if (!ms)
    return CU_INVALID_VALUE;
  return cu_code(ds_event_elapsed(from, to, ms), ds_event_device(from));
}

API(cuEventElapsedTime, 2000, cuEventElapsedTime, (float *ms, CUevent from, CUevent to), (ms, from, to)) {
  return elapsed(ms, from, to);
}

API(cuEventElapsedTime, 12080, cuEventElapsedTime_v2, (float *ms, CUevent from, CUevent to), (ms, from, to)) {
  return elapsed(ms, from, to);
}
