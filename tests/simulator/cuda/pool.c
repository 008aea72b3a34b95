/* Stream-ordered memory pools. */
#include "front.h"

#include <string.h>

static struct ds_pool *chosen[16]; /* per device, set by the caller */

API(cuMemPoolCreate, 11020, cuMemPoolCreate, (CUmemoryPool *out, const CUmemPoolProps *properties), (out, properties)) {
  struct ds_device *device = NULL;
  TRY(cu_initialized());
  if (!ds_switch(DS_pools))
    return CU_NOT_SUPPORTED;
  if (!out || !properties || properties->allocType != 1 || properties->location.type != CU_MEM_LOCATION_DEVICE)
    return CU_INVALID_VALUE;
  unsigned types = (unsigned)properties->handleTypes;
  if (types & ~(unsigned)(CU_MEM_HANDLE_FD | CU_MEM_HANDLE_FABRIC))
    return CU_INVALID_VALUE;
  if (types & CU_MEM_HANDLE_FD && !ds_switch(DS_fd_handles))
    return CU_NOT_SUPPORTED;
  if (cu_device(properties->location.id, &device) != CU_OK)
    return CU_INVALID_VALUE;
  return cu_code(ds_pool_new(device, properties->maxSize, types, out), device);
}

API(cuMemPoolDestroy, 11020, cuMemPoolDestroy, (CUmemoryPool pool), (pool)) {
  TRY(cu_initialized());
  return cu_code(ds_pool_destroy(pool), NULL);
}

static int device_pool(CUmemoryPool *out, CUdevice ordinal, bool standard) {
  struct ds_device *device = NULL;
  TRY(cu_device(ordinal, &device));
  if (!out)
    return CU_INVALID_VALUE;
  if (!ds_switch(DS_pools))
    return CU_NOT_SUPPORTED;
  *out = chosen[device->index];
  if (!standard && *out && ds_pool_device(*out))
    return CU_OK;
  return cu_code(ds_pool_default(device, out), device);
}

API(cuDeviceGetDefaultMemPool, 11020, cuDeviceGetDefaultMemPool, (CUmemoryPool *out, CUdevice device), (out, device)) {
  return device_pool(out, device, true);
}

API(cuDeviceGetMemPool, 11020, cuDeviceGetMemPool, (CUmemoryPool *out, CUdevice device), (out, device)) {
  return device_pool(out, device, false);
}

API(cuDeviceSetMemPool, 11020, cuDeviceSetMemPool, (CUdevice ordinal, CUmemoryPool pool), (ordinal, pool)) {
  struct ds_device *device = NULL;
  TRY(cu_device(ordinal, &device));
  if (!pool || ds_pool_device(pool) != device)
    return CU_INVALID_VALUE;
  chosen[device->index] = pool;
  return CU_OK;
}

static int alloc(CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream handle) {
  struct ds_stream *stream = NULL;
  TRY(cu_stream(handle, &stream));
  if (!out)
    return CU_INVALID_VALUE;
  if (stream->capture) {
    *out = 0; /* the graph would allocate when it is launched */
    return stream->capture == DS_CAPTURING ? CU_OK : CU_CAPTURE_INVALIDATED;
  }
  return cu_code(ds_pool_alloc(pool, NULL, bytes, out), stream->device);
}

API(cuMemAllocFromPoolAsync, 11020, cuMemAllocFromPoolAsync,
    (CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream), (out, bytes, pool, stream)) {
  return alloc(out, bytes, pool, stream);
}

API(cuMemAllocAsync, 11020, cuMemAllocAsync, (CUdeviceptr *out, size_t bytes, CUstream handle), (out, bytes, handle)) {
  struct ds_stream *stream = NULL;
  CUmemoryPool pool = NULL;
  TRY(cu_stream(handle, &stream));
  TRY(device_pool(&pool, stream->device->index, false));
  return alloc(out, bytes, pool, handle);
}

API(cuMemFreeAsync, 11020, cuMemFreeAsync, (CUdeviceptr pointer, CUstream handle), (pointer, handle)) {
  struct ds_stream *stream = NULL;
  TRY(cu_stream(handle, &stream));
  if (!pointer || stream->capture == DS_CAPTURING)
    return CU_OK;
  TRY(cu_code(ds_can_free_later(pointer), stream->device));
  struct ds_op *op = ds_op_new(DS_FREE_POINTER);
  op->address = pointer;
  return cu_code(ds_submit(stream, op, NULL), stream->device);
}

API(cuMemPoolTrimTo, 11020, cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep), (pool, keep)) {
  TRY(cu_initialized());
  return cu_code(ds_pool_trim(pool, keep), NULL);
}

/* Attribute numbers 4 to 8 are sizes; 1 to 3 are reuse rules, remembered by nobody. */
static int attribute(CUmemoryPool pool, int which, void *value, bool set) {
  static const enum ds_pool_value sizes[] = {DS_POOL_THRESHOLD, DS_POOL_RESERVED, DS_POOL_RESERVED_HIGH, DS_POOL_USED,
                                             DS_POOL_USED_HIGH};
  TRY(cu_initialized());
  struct ds_device *device = ds_pool_device(pool);
  if (!value || !device || which < 1 || which > 14 || (set && which > 8))
    return CU_INVALID_VALUE;
  if (which >= 4 && which <= 8)
    return cu_code(ds_pool_value(pool, sizes[which - 4], value, set), NULL);
  if (set)
    return CU_OK;
  switch (which) {
    case 10: *(int *)value = (int)ds_pool_handle_types(pool); break;
    case 11: *(int *)value = device->index; break;
    case 13: *(uint64_t *)value = 0; break;
    default: *(int *)value = 1; break; /* reuse rules, pinned, device location */
  }
  return CU_OK;
}

API(cuMemPoolSetAttribute, 11020, cuMemPoolSetAttribute, (CUmemoryPool pool, int which, void *value),
    (pool, which, value)) {
  return attribute(pool, which, value, true);
}

API(cuMemPoolGetAttribute, 11020, cuMemPoolGetAttribute, (CUmemoryPool pool, int which, void *value),
    (pool, which, value)) {
  return attribute(pool, which, value, false);
}

API(cuMemPoolSetAccess, 11020, cuMemPoolSetAccess, (CUmemoryPool pool, const CUmemAccessDesc *list, size_t count),
    (pool, list, count)) {
  TRY(cu_initialized());
  if (!list)
    return CU_INVALID_VALUE;
  for (size_t i = 0; i < count; i++) {
    struct ds_device *device = NULL;
    unsigned access = (unsigned)list[i].flags;
    if (list[i].location.type != CU_MEM_LOCATION_DEVICE || access == 2 || access > 3)
      return CU_INVALID_VALUE;
    TRY(cu_device(list[i].location.id, &device));
    if (access == 1)
      return CU_NOT_SUPPORTED;
    TRY(cu_code(ds_pool_access(pool, device, &access, true), device));
  }
  return CU_OK;
}

API(cuMemPoolGetAccess, 11020, cuMemPoolGetAccess, (int *flags, CUmemoryPool pool, CUmemLocation *location),
    (flags, pool, location)) {
  struct ds_device *device = NULL;
  TRY(cu_initialized());
  if (!flags || !location || location->type != CU_MEM_LOCATION_DEVICE)
    return CU_INVALID_VALUE;
  TRY(cu_device(location->id, &device));
  unsigned access = 0;
  TRY(cu_code(ds_pool_access(pool, device, &access, false), device));
  *flags = (int)access;
  return CU_OK;
}

API(cuMemPoolExportToShareableHandle, 11020, cuMemPoolExportToShareableHandle,
    (void *out, CUmemoryPool pool, int type, uint64_t flags), (out, pool, type, flags)) {
  TRY(cu_initialized());
  if (!out || type != CU_MEM_HANDLE_FD || flags)
    return CU_INVALID_VALUE;
  return cu_code(ds_pool_export(pool, out), NULL);
}

API(cuMemPoolImportFromShareableHandle, 11020, cuMemPoolImportFromShareableHandle,
    (CUmemoryPool *out, void *source, int type, uint64_t flags), (out, source, type, flags)) {
  TRY(cu_initialized());
  if (!out || type != CU_MEM_HANDLE_FD || flags)
    return CU_INVALID_VALUE;
  return cu_code(ds_pool_import((int)(intptr_t)source, out), NULL);
}

API(cuMemPoolExportPointer, 11020, cuMemPoolExportPointer, (CUhandle64 *out, CUdeviceptr pointer), (out, pointer)) {
  TRY(cu_initialized());
  if (!out)
    return CU_INVALID_VALUE;
  return cu_code(ds_pool_export_pointer(pointer, out->bytes), NULL);
}

API(cuMemPoolImportPointer, 11020, cuMemPoolImportPointer, (CUdeviceptr *out, CUmemoryPool pool, CUhandle64 *source),
    (out, pool, source)) {
  TRY(cu_initialized());
  if (!out || !source)
    return CU_INVALID_VALUE;
  return cu_code(ds_pool_import_pointer(pool, source->bytes, out), NULL);
}
