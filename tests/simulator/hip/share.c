/* Handles for other processes: classic ones of memory and events, dma-bufs, pools. */
#include "front.h"

#include <stdlib.h>
#include <string.h>

/* --- classic handles --- */

API(hipIpcGetMemHandle, (hipHandle64 *handle, void *pointer), (handle, pointer)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!handle)
    return HIP_INVALID_VALUE;
  return hip_code(ds_export((uint64_t)pointer, handle->bytes), place->device);
}

API(hipIpcOpenMemHandle, (void **out, hipHandle64 handle, unsigned flags), (out, handle, flags)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!out || flags != 1)
    return HIP_INVALID_VALUE;
  if (ds_switch(DS_same_pid))
    return HIP_INVALID_CONTEXT;
  enum ds_status status = ds_open(place->device, place, handle.bytes, (uint64_t *)out);
  if (status == DS_MAP_FAILED || status == DS_BAD_HANDLE)
    return HIP_INVALID_POINTER; /* the attach failed */
  return hip_code(status, place->device);
}

API(hipIpcCloseMemHandle, (void *pointer), (pointer)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  hip_settle(place);
  return hip_code(ds_close((uint64_t)pointer), place->device);
}

API(hipIpcGetEventHandle, (hipHandle64 *handle, struct ds_event *event), (handle, event)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!handle || !ds_event_exists(event))
    return HIP_INVALID_HANDLE;
  return hip_code(ds_event_export(event, handle->bytes), place->device);
}

API(hipIpcOpenEventHandle, (struct ds_event **out, hipHandle64 handle), (out, handle)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!out)
    return HIP_INVALID_VALUE;
  if (ds_switch(DS_same_pid))
    return HIP_INVALID_CONTEXT;
  enum ds_status status = ds_event_open(place->device, &place->imported_event, handle.bytes, out);
  bool gone = status == DS_MAP_FAILED || status == DS_BAD_HANDLE;
  if (gone && ds_switch(DS_event_stale_opens))
    status = ds_event_new(place->device, &place->imported_event, DS_EVENT_SHARED | DS_EVENT_NO_TIMING, out);
  return hip_code(status, place->device);
}

/* --- dma-buf --- */

API(hipMemGetHandleForAddressRange, (void *out, void *pointer, size_t bytes, int type, unsigned long long flags),
    (out, pointer, bytes, type, flags)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!ds_switch(DS_dmabuf))
    return HIP_NOT_SUPPORTED;
  if (!out || type != HIP_RANGE_DMABUF || flags || !bytes || bytes % DS_PAGE || (uint64_t)pointer % DS_PAGE)
    return HIP_INVALID_VALUE;
  return hip_code(ds_export_fd((uint64_t)pointer, bytes, out), place->device);
}

struct external {
  uint64_t start;
};

/* Buffers mapped from external memory. Each keeps the memory until it is freed, also when that is destroyed. */
static struct buffer {
  uint64_t pointer, start;
  struct buffer *next;
} *buffers;

bool hip_is_buffer(uint64_t start) {
  struct buffer *at = buffers;
  while (at && at->start != start)
    at = at->next;
  return at;
}

bool hip_take_buffer(uint64_t pointer, uint64_t *start) {
  ds_lock();
  struct buffer **at = &buffers;
  while (*at && (*at)->pointer != pointer)
    at = &(*at)->next;
  struct buffer *found = *at;
  if (found) {
    *at = found->next;
    *start = found->start;
  }
  ds_unlock();
  free(found);
  return found;
}

API(hipImportExternalMemory, (struct external **out, const hipExternalHandle *from), (out, from)) {
  struct place *place = NULL;
  uint64_t start = 0;
  TRY(hip_place(&place));
  if (!out || !from || from->type != HIP_EXTERNAL_FD || !from->size)
    return HIP_INVALID_VALUE;
  TRY(hip_code(ds_open_fd(place->device, place, from->handle.fd, from->size, &start), place->device));
  *out = malloc(sizeof **out);
  if (!*out)
    abort();
  (*out)->start = start;
  return HIP_OK;
}

API(hipExternalMemoryGetMappedBuffer, (void **out, struct external *memory, const hipExternalBuffer *part),
    (out, memory, part)) {
  if (!out || !memory || !part || part->flags)
    return HIP_INVALID_VALUE;
  ds_lock();
  struct ds_range *range = ds_find(memory->start);
  bool inside = range && part->size && part->offset <= range->bytes && part->size <= range->bytes - part->offset;
  if (inside) {
    *out = (void *)(memory->start + part->offset);
    range->opens++;
    struct buffer *buffer = malloc(sizeof *buffer);
    if (!buffer)
      abort();
    *buffer = (struct buffer){(uint64_t)*out, memory->start, buffers};
    buffers = buffer;
  }
  ds_unlock();
  return inside ? HIP_OK : HIP_INVALID_VALUE;
}

API(hipDestroyExternalMemory, (struct external *memory), (memory)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!memory)
    return HIP_INVALID_VALUE;
  hip_settle(place);
  enum ds_status status = ds_close(memory->start);
  free(memory);
  return hip_code(status, place->device);
}

/* --- pools --- */

API(hipMemPoolCreate, (struct ds_pool **out, const hipPoolProps *properties), (out, properties)) {
  struct ds_device *device = NULL;
  if (!ds_switch(DS_pools))
    return HIP_NOT_SUPPORTED;
  if (!out || !properties || properties->allocType != 1 || properties->location.type != HIP_LOCATION_DEVICE)
    return HIP_INVALID_VALUE;
  unsigned types = (unsigned)properties->handleTypes;
  if (types & ~(unsigned)HIP_HANDLE_FD)
    return HIP_INVALID_VALUE;
  if (types && !ds_switch(DS_fd_handles))
    return HIP_NOT_SUPPORTED;
  TRY(hip_device(properties->location.id, &device));
  return hip_code(ds_pool_new(device, properties->maxSize, types, out), device);
}

API(hipMemPoolDestroy, (struct ds_pool *pool), (pool)) { return hip_code(ds_pool_destroy(pool), NULL); }

API(hipMallocFromPoolAsync, (void **out, size_t bytes, struct ds_pool *pool, struct ds_stream *handle),
    (out, bytes, pool, handle)) {
  struct ds_stream *stream = NULL;
  TRY(hip_stream(handle, &stream));
  if (!out)
    return HIP_INVALID_VALUE;
  return hip_code(ds_pool_alloc(pool, NULL, bytes, (uint64_t *)out), stream->device);
}

API(hipMallocAsync, (void **out, size_t bytes, struct ds_stream *handle), (out, bytes, handle)) {
  struct ds_stream *stream = NULL;
  struct ds_pool *pool = NULL;
  TRY(hip_stream(handle, &stream));
  TRY(hip_code(ds_pool_default(stream->device, &pool), stream->device));
  return hip_code(ds_pool_alloc(pool, NULL, bytes, (uint64_t *)out), stream->device);
}

API(hipFreeAsync, (void *pointer, struct ds_stream *handle), (pointer, handle)) {
  struct ds_stream *stream = NULL;
  TRY(hip_stream(handle, &stream));
  TRY(hip_code(ds_can_free_later((uint64_t)pointer), stream->device));
  struct ds_op *op = ds_op_new(DS_FREE_POINTER);
  op->address = (uint64_t)pointer;
  return hip_code(ds_submit(stream, op, NULL), stream->device);
}

API(hipMemPoolSetAccess, (struct ds_pool *pool, const hipAccessDesc *list, size_t count), (pool, list, count)) {
  struct ds_device *device = NULL;
  for (size_t i = 0; list && i < count; i++) {
    unsigned access = (unsigned)list[i].flags;
    TRY(hip_device(list[i].location.id, &device));
    TRY(hip_code(ds_pool_access(pool, device, &access, true), device));
  }
  return list ? HIP_OK : HIP_INVALID_VALUE;
}

API(hipMemPoolExportToShareableHandle, (void *out, struct ds_pool *pool, int type, unsigned flags),
    (out, pool, type, flags)) {
  if (!out || type != HIP_HANDLE_FD || flags)
    return HIP_INVALID_VALUE;
  return hip_code(ds_pool_export(pool, out), NULL);
}

API(hipMemPoolImportFromShareableHandle, (struct ds_pool **out, void *source, int type, unsigned flags),
    (out, source, type, flags)) {
  if (!out || type != HIP_HANDLE_FD || flags)
    return HIP_INVALID_VALUE;
  return hip_code(ds_pool_import((int)(intptr_t)source, out), NULL);
}

API(hipMemPoolExportPointer, (hipHandle64 *out, void *pointer), (out, pointer)) {
  return out ? hip_code(ds_pool_export_pointer((uint64_t)pointer, out->bytes), NULL) : HIP_INVALID_VALUE;
}

API(hipMemPoolImportPointer, (void **out, struct ds_pool *pool, hipHandle64 *source), (out, pool, source)) {
  if (!out || !source)
    return HIP_INVALID_VALUE;
  return hip_code(ds_pool_import_pointer(pool, source->bytes, (uint64_t *)out), NULL);
}
