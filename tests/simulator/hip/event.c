/* Events, and how inter-process ones misbehave on request. */
#include "front.h"

#include <stdlib.h>

enum { EVENT_FLAGS = 7, EVENT_RELEASE = (int)0x80000000, EVENT_DEVICE = 0x40000000, EVENT_NO_FENCE = 0x20000000 };

static int find(struct ds_event *event) {
  if (!ds_event_exists(event))
    return HIP_INVALID_HANDLE;
  return atomic_load(&ds_event_device(event)->lost);
}

static bool shared(struct ds_event *event) {
  struct place *place = NULL;
  if (hip_place(&place) != HIP_OK)
    return false;
  void *owner = ds_event_owner(event);
  return owner == &place->shared_event || owner == &place->imported_event;
}

API(hipEventCreateWithFlags, (struct ds_event **out, unsigned flags), (out, flags)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  unsigned known = EVENT_FLAGS | (unsigned)EVENT_RELEASE | EVENT_DEVICE | EVENT_NO_FENCE;
  bool interprocess = flags & DS_EVENT_SHARED;
  if (!out || flags & ~known || (interprocess && !(flags & DS_EVENT_NO_TIMING)))
    return HIP_INVALID_VALUE;
  void *owner = interprocess ? &place->shared_event : &place->plain_event;
  return hip_code(ds_event_new(place->device, owner, flags & EVENT_FLAGS, out), place->device);
}

API(hipEventDestroy, (struct ds_event *event), (event)) {
  TRY(find(event));
  return hip_code(ds_event_destroy(event), NULL);
}

/* Records since the event was last seen done. The runtime spins while the oldest place of its ring is not free. */
static void wait_for_place(struct ds_event *event) {
  static struct outstanding {
    struct outstanding *next;
    struct ds_event *event;
    long records;
  } *list;
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  long ring = ds_switch(DS_event_ring);
  if (!ring || !shared(event))
    return;
  bool done = ds_event_query(event) == DS_OK;
  pthread_mutex_lock(&lock);
  struct outstanding *at = list;
  while (at && at->event != event)
    at = at->next;
  if (!at && (at = calloc(1, sizeof *at))) {
    at->event = event;
    at->next = list;
    list = at;
  }
  if (!at)
    abort();
  at->records = done ? 1 : at->records + 1;
  bool full = at->records > ring;
  pthread_mutex_unlock(&lock);
  if (full)
    ds_event_sync(event);
}

API(hipEventRecord, (struct ds_event *event, struct ds_stream *handle), (event, handle)) {
  struct ds_stream *stream = NULL;
  int code = HIP_OK;
  TRY(hip_stream(handle, &stream));
  TRY(find(event));
  if (hip_capturing(stream, &code))
    return code;
  wait_for_place(event);
  return hip_code(ds_event_record(event, stream), stream->device);
}

API(hipStreamWaitEvent, (struct ds_stream *handle, struct ds_event *event, unsigned flags), (handle, event, flags)) {
  struct ds_stream *stream = NULL;
  int code = HIP_OK;
  TRY(hip_stream(handle, &stream));
  TRY(find(event));
  if (flags > 1)
    return HIP_INVALID_VALUE;
  if (hip_capturing(stream, &code))
    return code;
  if (ds_switch(DS_event_wait_blocks) && shared(event))
    return hip_code(ds_event_sync(event), stream->device);
  return hip_code(ds_event_wait(stream, event), stream->device);
}

API(hipEventQuery, (struct ds_event *event), (event)) {
  TRY(find(event));
  TRY(hip_not_capturing());
  return hip_code(ds_event_query(event), ds_event_device(event));
}

API(hipEventSynchronize, (struct ds_event *event), (event)) {
  TRY(find(event));
  TRY(hip_not_capturing());
  return hip_code(ds_event_sync(event), ds_event_device(event));
}
