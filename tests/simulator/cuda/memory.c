/* Classic, managed and host memory, and what a pointer is. */
#include "front.h"

#include <string.h>

/* Freeing waits for the queued work of the context, as the driver does. */
void cu_settle(void *owner) {
  ds_drain_waits();
  if (ds_switch(DS_drain) > 1 && owner)
    ds_sync_owner(owner);
}

/* Calls that take a context from what they are given, yet fail under a dead or lost one. */
static int healthy(void) {
  struct context *context = NULL;
  TRY(cu_demanded());
  return cu_current_or_null() ? cu_current(&context) : CU_OK;
}

API(cuMemAlloc, 3020, cuMemAlloc_v2, (CUdeviceptr *out, size_t bytes), (out, bytes)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (!out)
    return CU_INVALID_VALUE;
  TRY(cu_not_capturing());
  return cu_code(ds_alloc(context->device, context, bytes, out), context->device);
}

API(cuMemAllocManaged, 6000, cuMemAllocManaged, (CUdeviceptr *out, size_t bytes, unsigned flags), (out, bytes, flags)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (!out || !bytes || flags < 1 || flags > 2)
    return CU_INVALID_VALUE;
  return cu_code(ds_alloc_managed(context->device, context, bytes, out), context->device);
}

API(cuMemFree, 3020, cuMemFree_v2, (CUdeviceptr pointer), (pointer)) {
  TRY(healthy());
  if (!pointer)
    return CU_OK;
  TRY(cu_not_capturing());
  ds_lock();
  struct ds_range *range = ds_find(pointer);
  bool pooled = range && range->kind == DS_POOL && range->start == pointer;
  void *owner = range ? range->owner : NULL;
  ds_unlock();
  cu_settle(owner ? owner : cu_current_or_null());
  return cu_code(pooled ? ds_pool_free(pointer) : ds_free(pointer), NULL);
}

static int host_alloc(void **out, size_t bytes, unsigned flags) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (!out || flags > 7)
    return CU_INVALID_VALUE;
  *out = NULL;
  if (!bytes)
    return CU_OK;
  return cu_code(ds_host_alloc(context, bytes, flags, out), context->device);
}

API(cuMemHostAlloc, 2020, cuMemHostAlloc, (void **out, size_t bytes, unsigned flags), (out, bytes, flags)) {
  return host_alloc(out, bytes, flags);
}

API(cuMemAllocHost, 3020, cuMemAllocHost_v2, (void **out, size_t bytes), (out, bytes)) {
  return host_alloc(out, bytes, 0);
}

API(cuMemFreeHost, 2000, cuMemFreeHost, (void *pointer), (pointer)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (!pointer)
    return CU_OK;
  cu_settle(context);
  return cu_code(ds_host_free(pointer), context->device);
}

API(cuMemHostRegister, 6050, cuMemHostRegister_v2, (void *pointer, size_t bytes, unsigned flags),
    (pointer, bytes, flags)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (flags > 15)
    return CU_INVALID_VALUE;
  return cu_code(ds_host_register(context, pointer, bytes, flags), context->device);
}

API(cuMemHostUnregister, 4000, cuMemHostUnregister, (void *pointer), (pointer)) {
  TRY(healthy());
  if (!pointer)
    return CU_INVALID_VALUE;
  ds_lock();
  struct ds_range *range = ds_find_host((uint64_t)pointer, 1);
  bool whole = range && range->host == pointer && range->registered;
  bool other = range ? !whole : ds_find((uint64_t)pointer) != NULL;
  void *owner = range ? range->owner : NULL;
  ds_unlock();
  if (other)
    return CU_INVALID_VALUE; /* known memory, but no registered base */
  cu_settle(owner);
  return cu_code(ds_host_unregister(pointer), NULL);
}

API(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2, (CUdeviceptr *out, void *pointer, unsigned flags),
    (out, pointer, flags)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (!out || !pointer || flags)
    return CU_INVALID_VALUE;
  ds_lock();
  struct ds_range *range = ds_find_host((uint64_t)pointer, 1);
  if (range)
    *out = range->start + ((uint64_t)pointer - (uint64_t)range->host);
  ds_unlock();
  return range ? CU_OK : CU_INVALID_VALUE;
}

API(cuMemHostGetFlags, 2030, cuMemHostGetFlags, (unsigned *flags, void *pointer), (flags, pointer)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (!flags)
    return CU_INVALID_VALUE;
  ds_lock();
  struct ds_range *range = ds_find_host((uint64_t)pointer, 1);
  if (range)
    *flags = range->flags | 2; /* always mapped where addresses are unified */
  ds_unlock();
  return range ? CU_OK : CU_INVALID_VALUE;
}

API(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2, (CUdeviceptr *base, size_t *bytes, CUdeviceptr pointer),
    (base, bytes, pointer)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  ds_lock();
  struct ds_range *range = ds_find(pointer);
  if (range && base)
    *base = range->start;
  if (range && bytes)
    *bytes = range->bytes;
  ds_unlock();
  return range ? CU_OK : CU_NOT_FOUND;
}

/* Answers about one pointer, in the sizes that the bindings read. */
static int answer(const struct ds_range *range, int attribute, uint64_t pointer, void *out) {
  bool host = range->kind == DS_HOST, pooled = range->kind == DS_POOL || range->kind == DS_POOL_IMPORT;
  uint64_t start = range->start, bytes = range->bytes, number = range->block ? range->block->number : range->id;
  if (range->kind == DS_VMM)
    bytes = ds_range_of(pointer, &start); /* the reservation; the mapping is the chunk */
  switch (attribute) {
    case 1: *(void **)out = range->owner; return CU_OK;
    case 2: *(unsigned *)out = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE; return CU_OK;
    case 3: *(uint64_t *)out = pointer; return CU_OK;
    case 4:
      if (!host && range->kind != DS_MANAGED)
        return CU_INVALID_VALUE;
      *(uint64_t *)out = host ? (uint64_t)range->host + (pointer - range->start) : pointer;
      return CU_OK;
    case 6: *(unsigned *)out = range->kind == DS_MANAGED; return CU_OK; /* the trace's; 1 for device memory was seen too */
    case 7: *(uint64_t *)out = range->id; return CU_OK;
    case 8: *(unsigned *)out = range->kind == DS_MANAGED; return CU_OK;
    case 9: *(int *)out = range->device ? range->device->index : 0; return CU_OK;
    case 10: *(unsigned *)out = range->kind == DS_CLASSIC && ds_switch(DS_ipc); return CU_OK;
    case 11: *(uint64_t *)out = start; return CU_OK;
    case 12: *(uint64_t *)out = bytes; return CU_OK;
    case 13: *(unsigned *)out = 1; return CU_OK;
    case 14: *(uint64_t *)out = range->handle_types; return CU_OK;
    case 15: *(unsigned *)out = range->kind == DS_CLASSIC; return CU_OK;
    case 16: *(unsigned *)out = 3; return CU_OK;
    case 17: *(void **)out = pooled ? range->parent : NULL; return CU_OK;
    case 18: *(uint64_t *)out = range->map_bytes; return CU_OK;
    case 19: *(uint64_t *)out = range->map_start; return CU_OK;
    case 20: *(uint64_t *)out = number; return CU_OK;
    case 21: *(unsigned *)out = range->kind == DS_CLASSIC; return CU_OK;
    default: return CU_INVALID_VALUE;
  }
}

static int attribute_of(void *out, int attribute, CUdeviceptr pointer) {
  if (!out || attribute < 1 || attribute > 21)
    return CU_INVALID_VALUE;
  ds_lock();
  struct ds_range *range = ds_find(pointer);
  if (!range && !ds_is_device_address(pointer))
    range = ds_find_host(pointer, 1); /* asked by the host address of aliased memory */
  int code = range ? answer(range, attribute, range->start <= pointer ? pointer : range->start, out) : CU_INVALID_VALUE;
  ds_unlock();
  return code;
}

API(cuPointerGetAttribute, 4000, cuPointerGetAttribute, (void *out, int attribute, CUdeviceptr pointer),
    (out, attribute, pointer)) {
  TRY(cu_initialized());
  return attribute_of(out, attribute, pointer);
}

static void blank(void *out, int attribute) {
  switch (attribute) {
    case 1: case 3: case 4: case 7: case 11: case 12: case 14: case 17: case 18: case 19: case 20:
      *(uint64_t *)out = 0;
      break;
    default: *(unsigned *)out = 0; break;
  }
}

API(cuPointerGetAttributes, 7000, cuPointerGetAttributes,
    (unsigned n, int *attributes, void **out, CUdeviceptr pointer), (n, attributes, out, pointer)) {
  TRY(cu_initialized());
  if (!n || !attributes || !out)
    return CU_INVALID_VALUE;
  for (unsigned i = 0; i < n; i++) {
    if (attributes[i] < 1 || attributes[i] > 21 || !out[i])
      return CU_INVALID_VALUE;
    if (attribute_of(out[i], attributes[i], pointer) != CU_OK)
      blank(out[i], attributes[i]);
  }
  return CU_OK;
}

API(cuPointerSetAttribute, 6000, cuPointerSetAttribute, (const void *value, int attribute, CUdeviceptr pointer),
    (value, attribute, pointer)) {
  TRY(cu_initialized());
  ds_lock();
  bool known = ds_find(pointer) != NULL;
  ds_unlock();
  return value && attribute == 6 && known ? CU_OK : CU_INVALID_VALUE;
}
