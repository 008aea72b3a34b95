/* Memory of devices and of the host, what a pointer is, physical handles and mappings. */
#include "front.h"

#include <string.h>

void hip_settle(void *owner) {
  ds_drain_waits();
  if (ds_switch(DS_drain) > 1 && owner)
    ds_sync_owner(owner);
}

API(hipMalloc, (void **out, size_t bytes), (out, bytes)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!out)
    return HIP_INVALID_VALUE;
  TRY(hip_not_capturing());
  return hip_code(ds_alloc(place->device, place, bytes, (uint64_t *)out), place->device);
}

API(hipMallocManaged, (void **out, size_t bytes, unsigned flags), (out, bytes, flags)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!out || !bytes || flags < 1 || flags > 2)
    return HIP_INVALID_VALUE;
  return hip_code(ds_alloc_managed(place->device, place, bytes, (uint64_t *)out), place->device);
}

API(hipFree, (void *pointer), (pointer)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!pointer)
    return HIP_OK;
  TRY(hip_not_capturing());
  ds_lock();
  struct ds_range *range = ds_find((uint64_t)pointer);
  bool pooled = range && range->kind == DS_POOL && range->start == (uint64_t)pointer;
  ds_unlock();
  hip_settle(place);
  uint64_t start = 0;
  if (hip_take_buffer((uint64_t)pointer, &start))
    return hip_code(ds_close(start), NULL);
  return hip_code(pooled ? ds_pool_free((uint64_t)pointer) : ds_free((uint64_t)pointer), NULL);
}

API(hipHostMalloc, (void **out, size_t bytes, unsigned flags), (out, bytes, flags)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!out || !bytes)
    return HIP_INVALID_VALUE;
  return hip_code(ds_host_alloc(place, bytes, flags, out), place->device);
}

API(hipHostFree, (void *pointer), (pointer)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!pointer)
    return HIP_OK;
  hip_settle(place);
  return hip_code(ds_host_free(pointer), place->device);
}

API(hipHostRegister, (void *pointer, size_t bytes, unsigned flags), (pointer, bytes, flags)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  return hip_code(ds_host_register(place, pointer, bytes, flags), place->device);
}

API(hipHostUnregister, (void *pointer), (pointer)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  ds_lock();
  struct ds_range *range = pointer ? ds_find_host((uint64_t)pointer, 1) : NULL;
  bool whole = range && range->host == pointer && range->registered;
  ds_unlock();
  if (!whole)
    return range ? HIP_INVALID_VALUE : HIP_HOST_NOT_REGISTERED;
  hip_settle(place);
  return hip_code(ds_host_unregister(pointer), NULL);
}

API(hipHostGetDevicePointer, (void **out, void *pointer, unsigned flags), (out, pointer, flags)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!out || !pointer || flags)
    return HIP_INVALID_VALUE;
  ds_lock();
  struct ds_range *range = ds_find_host((uint64_t)pointer, 1);
  if (range)
    *out = (void *)(range->start + ((uint64_t)pointer - (uint64_t)range->host));
  ds_unlock();
  return range ? HIP_OK : HIP_INVALID_VALUE;
}

/* Null out-pointers are followed, as by the real runtime. */
API(hipMemGetAddressRange, (void **base, size_t *bytes, void *pointer), (base, bytes, pointer)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  ds_lock();
  struct ds_range *range = ds_find((uint64_t)pointer);
  if (range) {
    *base = hip_is_buffer(range->start) ? NULL : (void *)range->start; /* the runtime keeps no base of those */
    *bytes = range->bytes;
  }
  ds_unlock();
  return range ? HIP_OK : HIP_NOT_FOUND;
}

static struct ds_range *find(uint64_t pointer) {
  struct ds_range *range = ds_find(pointer);
  return range || ds_is_device_address(pointer) ? range : ds_find_host(pointer, 1);
}

static int answer(const struct ds_range *range, int attribute, uint64_t pointer, void *out) {
  bool host = range->kind == DS_HOST, pooled = range->kind == DS_POOL || range->kind == DS_POOL_IMPORT;
  uint64_t start = range->start, bytes = range->bytes;
  if (range->kind == DS_VMM)
    bytes = ds_range_of(pointer, &start);
  if (ds_switch(DS_few_attributes) && (attribute == 10 || attribute == 14 || attribute == 17))
    return HIP_NOT_SUPPORTED;
  switch (attribute) {
    case 2: *(unsigned *)out = host ? HIP_MEMORY_HOST : HIP_MEMORY_DEVICE; return HIP_OK;
    case 3: *(uint64_t *)out = pointer; return HIP_OK;
    case 7: *(uint64_t *)out = range->id; return HIP_OK;
    case 8: *(unsigned *)out = range->kind == DS_MANAGED; return HIP_OK;
    case 9: *(int *)out = range->device ? range->device->index : 0; return HIP_OK;
    case 10: *(unsigned *)out = range->kind == DS_CLASSIC && ds_switch(DS_ipc); return HIP_OK;
    case 11: *(uint64_t *)out = start; return HIP_OK;
    case 12: *(uint64_t *)out = bytes; return HIP_OK;
    case 13: *(unsigned *)out = 1; return HIP_OK;
    case 14: *(uint64_t *)out = range->handle_types; return HIP_OK;
    case 17: *(void **)out = pooled ? range->parent : NULL; return HIP_OK;
    default: return HIP_INVALID_VALUE;
  }
}

API(hipPointerGetAttribute, (void *out, int attribute, void *pointer), (out, attribute, pointer)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!out || attribute < 1 || attribute > 17)
    return HIP_INVALID_VALUE;
  ds_lock();
  struct ds_range *range = find((uint64_t)pointer);
  int code = range ? answer(range, attribute, (uint64_t)pointer, out) : HIP_INVALID_VALUE;
  ds_unlock();
  return code;
}

/* An unknown pointer is an answer: type 0. */
API(hipPointerGetAttributes, (hipPointerAttribute *out, const void *pointer), (out, pointer)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!out)
    return HIP_INVALID_VALUE;
  memset(out, 0, sizeof *out);
  out->device = -2;
  ds_lock();
  struct ds_range *range = find((uint64_t)pointer);
  if (range) {
    out->type = range->kind == DS_HOST ? HIP_MEMORY_HOST : range->kind == DS_MANAGED ? HIP_MEMORY_MANAGED : HIP_MEMORY_DEVICE;
    out->device = range->device ? range->device->index : 0;
    out->devicePointer = (void *)pointer;
    out->isManaged = range->kind == DS_MANAGED;
  }
  ds_unlock();
  return HIP_OK;
}

/* --- physical handles and mappings --- */

static int check_properties(const hipAllocationProp *properties, struct ds_device **device) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!ds_switch(DS_vmm))
    return HIP_NOT_SUPPORTED;
  if (!properties || properties->type != 1 || properties->location.type != HIP_LOCATION_DEVICE)
    return HIP_INVALID_VALUE;
  return hip_device(properties->location.id, device);
}

API(hipMemCreate, (void **out, size_t bytes, const hipAllocationProp *properties, unsigned long long flags),
    (out, bytes, properties, flags)) {
  struct ds_device *device = NULL;
  TRY(check_properties(properties, &device));
  unsigned types = (unsigned)properties->requestedHandleTypes;
  if (!out || flags || types & ~(unsigned)HIP_HANDLE_FD)
    return HIP_INVALID_VALUE;
  if (types && !ds_switch(DS_fd_handles))
    return HIP_NOT_SUPPORTED;
  return hip_code(ds_physical_new(device, bytes, types, (struct ds_physical **)out), device);
}

API(hipMemRelease, (void *handle), (handle)) { return hip_code(ds_physical_release(handle), NULL); }

API(hipMemGetAllocationGranularity, (size_t *bytes, const hipAllocationProp *properties, int option),
    (bytes, properties, option)) {
  struct ds_device *device = NULL;
  TRY(check_properties(properties, &device));
  if (!bytes || option < 0 || option > 1)
    return HIP_INVALID_VALUE;
  *bytes = DS_BLOCK;
  return HIP_OK;
}

API(hipMemExportToShareableHandle, (void *out, void *handle, int type, unsigned long long flags),
    (out, handle, type, flags)) {
  if (!out || flags || type != HIP_HANDLE_FD)
    return HIP_INVALID_VALUE;
  bool held = !ds_switch(DS_retains) && ds_physical_hold(handle);
  enum ds_status status = ds_physical_export(handle, (unsigned)type, out);
  if (held)
    ds_physical_release(handle);
  return hip_code(status, NULL);
}

/* Older runtimes take the address of the fd. A number is followed there like any address. */
API(hipMemImportFromShareableHandle, (void **out, void *source, int type), (out, source, type)) {
  if (!out || type != HIP_HANDLE_FD)
    return HIP_INVALID_VALUE;
  int fd = ds_switch(DS_fd_by_pointer) ? *(volatile int *)source : (int)(intptr_t)source;
  return hip_code(ds_physical_import(fd, (struct ds_physical **)out), NULL);
}

/* Older runtimes count nothing, and follow a null pointer for memory that is no mapping. */
API(hipMemRetainAllocationHandle, (void **out, void *address), (out, address)) {
  if (out && !ds_switch(DS_retains)) {
    ds_lock();
    struct ds_range *range = ds_find((uint64_t)address);
    bool mapped = range && range->kind == DS_VMM;
    if (mapped)
      *out = range->parent;
    ds_unlock();
    if (range && !mapped)
      ds_act((struct ds_fault){DS_SEGV, 0});
    return mapped ? HIP_OK : HIP_INVALID_VALUE;
  }
  return out ? hip_code(ds_physical_retain((uint64_t)address, (struct ds_physical **)out), NULL) : HIP_INVALID_VALUE;
}

API(hipMemAddressReserve, (void **out, size_t bytes, size_t align, void *hint, unsigned long long flags),
    (out, bytes, align, hint, flags)) {
  if (!out || flags)
    return HIP_INVALID_VALUE;
  return hip_code(ds_range_reserve(bytes, align, (uint64_t)hint, (uint64_t *)out), NULL);
}

API(hipMemAddressFree, (void *start, size_t bytes), (start, bytes)) {
  return hip_code(ds_range_free((uint64_t)start, bytes), NULL);
}

API(hipMemMap, (void *start, size_t bytes, size_t offset, void *handle, unsigned long long flags),
    (start, bytes, offset, handle, flags)) {
  if (flags || offset)
    return HIP_INVALID_VALUE;
  return hip_code(ds_map((uint64_t)start, bytes, handle), NULL);
}

API(hipMemUnmap, (void *start, size_t bytes), (start, bytes)) { return hip_code(ds_unmap((uint64_t)start, bytes), NULL); }

API(hipMemGetAccess, (unsigned long long *flags, const hipLocation *location, void *address), (flags, location, address)) {
  struct ds_device *device = NULL;
  if (!flags || !location || location->type != HIP_LOCATION_DEVICE)
    return HIP_INVALID_VALUE;
  TRY(hip_device(location->id, &device));
  ds_lock();
  struct ds_range *range = ds_find((uint64_t)address);
  bool mapped = range && range->kind == DS_VMM;
  if (mapped)
    *flags = range->access[device->index];
  ds_unlock();
  return mapped ? HIP_OK : HIP_INVALID_VALUE;
}

API(hipMemSetAccess, (void *start, size_t bytes, const hipAccessDesc *list, size_t count), (start, bytes, list, count)) {
  struct ds_device *device = NULL;
  if (!list || !count)
    return HIP_INVALID_VALUE;
  for (size_t i = 0; i < count; i++) {
    int flags = list[i].flags;
    if (list[i].location.type != HIP_LOCATION_DEVICE || (flags != 0 && flags != 1 && flags != 3))
      return HIP_INVALID_VALUE;
    TRY(hip_device(list[i].location.id, &device));
    TRY(hip_code(ds_set_access((uint64_t)start, bytes, device, (unsigned)flags), device));
  }
  return HIP_OK;
}
