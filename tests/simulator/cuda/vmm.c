/* Virtual memory management: physical handles, reservations, mappings, access. */
#include "front.h"

#include <string.h>
#include <unistd.h>

static int check_properties(const CUmemAllocationProp *properties, struct ds_device **device) {
  TRY(cu_initialized());
  if (!ds_switch(DS_vmm))
    return CU_NOT_SUPPORTED;
  if (!properties || properties->type != 1 || properties->location.type != CU_MEM_LOCATION_DEVICE)
    return CU_INVALID_VALUE;
  return cu_device(properties->location.id, device);
}

API(cuMemCreate, 10020, cuMemCreate,
    (uint64_t *out, size_t bytes, const CUmemAllocationProp *properties, uint64_t flags),
    (out, bytes, properties, flags)) {
  struct ds_device *device = NULL;
  struct ds_physical *physical = NULL;
  TRY(check_properties(properties, &device));
  unsigned types = (unsigned)properties->requestedHandleTypes;
  if (!out || flags || types & ~(unsigned)(CU_MEM_HANDLE_FD | CU_MEM_HANDLE_FABRIC))
    return CU_INVALID_VALUE;
  long fabric = types & CU_MEM_HANDLE_FABRIC ? ds_switch(DS_fabric) : 1;
  if (fabric == 0)
    return CU_NOT_PERMITTED;
  if (fabric == 2 || (types & CU_MEM_HANDLE_FD && !ds_switch(DS_fd_handles)))
    return CU_NOT_SUPPORTED;
  TRY(cu_code(ds_physical_new(device, bytes, types, &physical), device));
  *out = (uint64_t)physical;
  return CU_OK;
}

API(cuMemRelease, 10020, cuMemRelease, (uint64_t handle), (handle)) {
  TRY(cu_initialized());
  return cu_code(ds_physical_release((struct ds_physical *)handle), NULL);
}

API(cuMemGetAllocationGranularity, 10020, cuMemGetAllocationGranularity,
    (size_t *bytes, const CUmemAllocationProp *properties, int option), (bytes, properties, option)) {
  struct ds_device *device = NULL;
  int code = check_properties(properties, &device);
  if (code != CU_OK && code != CU_INVALID_DEVICE)
    return code; /* which device does not matter */
  if (!bytes || option < 0 || option > 1)
    return CU_INVALID_VALUE;
  *bytes = DS_BLOCK;
  return CU_OK;
}

API(cuMemExportToShareableHandle, 10020, cuMemExportToShareableHandle,
    (void *out, uint64_t handle, int type, uint64_t flags), (out, handle, type, flags)) {
  TRY(cu_initialized());
  if (!out || flags || (type != CU_MEM_HANDLE_FD && type != CU_MEM_HANDLE_FABRIC))
    return CU_INVALID_VALUE;
  int fd = -1;
  TRY(cu_code(ds_physical_export((struct ds_physical *)handle, (unsigned)type, &fd), NULL));
  if (type == CU_MEM_HANDLE_FABRIC && ds_switch(DS_fabric) != 1) {
    close(fd);
    return CU_NOT_PERMITTED;
  }
  if (type == CU_MEM_HANDLE_FD)
    *(int *)out = fd;
  else
    ds_fabric_handle(fd, out);
  return CU_OK;
}

API(cuMemImportFromShareableHandle, 10020, cuMemImportFromShareableHandle, (uint64_t *out, void *source, int type),
    (out, source, type)) {
  struct ds_physical *physical = NULL;
  TRY(cu_initialized());
  if (!out || (type != CU_MEM_HANDLE_FD && type != CU_MEM_HANDLE_FABRIC))
    return CU_INVALID_VALUE;
  int fd = (int)(intptr_t)source;
  if (type == CU_MEM_HANDLE_FABRIC) {
    if (!source || ds_switch(DS_fabric) != 1)
      return ds_switch(DS_fabric) == 1 ? CU_INVALID_VALUE : CU_NOT_PERMITTED;
    TRY(cu_code(ds_fabric_fd(source, &fd), NULL));
  }
  enum ds_status status = ds_physical_import(fd, &physical);
  if (type == CU_MEM_HANDLE_FABRIC)
    close(fd);
  TRY(cu_code(status, NULL));
  *out = (uint64_t)physical;
  return CU_OK;
}

API(cuMemRetainAllocationHandle, 11000, cuMemRetainAllocationHandle, (uint64_t *out, void *address), (out, address)) {
  struct ds_physical *physical = NULL;
  TRY(cu_initialized());
  if (!out)
    return CU_INVALID_VALUE;
  TRY(cu_code(ds_physical_retain((uint64_t)address, &physical), NULL));
  *out = (uint64_t)physical;
  return CU_OK;
}

API(cuMemGetAllocationPropertiesFromHandle, 10020, cuMemGetAllocationPropertiesFromHandle,
    (CUmemAllocationProp *out, uint64_t handle), (out, handle)) {
  struct ds_device *device = NULL;
  unsigned types = 0;
  uint64_t bytes = 0;
  TRY(cu_initialized());
  if (!out)
    return CU_INVALID_VALUE;
  TRY(cu_code(ds_physical_info((struct ds_physical *)handle, &device, &types, &bytes), NULL));
  memset(out, 0, sizeof *out);
  out->type = 1;
  out->requestedHandleTypes = (int)types;
  out->location = (CUmemLocation){CU_MEM_LOCATION_DEVICE, device->index};
  return CU_OK;
}

API(cuMemAddressReserve, 10020, cuMemAddressReserve,
    (CUdeviceptr *out, size_t bytes, size_t align, CUdeviceptr hint, uint64_t flags), (out, bytes, align, hint, flags)) {
  TRY(cu_initialized());
  if (!out || flags)
    return CU_INVALID_VALUE;
  return cu_code(ds_range_reserve(bytes, align, hint, out), NULL);
}

API(cuMemAddressFree, 10020, cuMemAddressFree, (CUdeviceptr start, size_t bytes), (start, bytes)) {
  TRY(cu_initialized());
  return cu_code(ds_range_free(start, bytes), NULL);
}

API(cuMemMap, 10020, cuMemMap, (CUdeviceptr start, size_t bytes, size_t offset, uint64_t handle, uint64_t flags),
    (start, bytes, offset, handle, flags)) {
  TRY(cu_initialized());
  if (flags)
    return CU_INVALID_VALUE;
  if (offset)
    return CU_NOT_SUPPORTED;
  return cu_code(ds_map(start, bytes, (struct ds_physical *)handle), NULL);
}

API(cuMemUnmap, 10020, cuMemUnmap, (CUdeviceptr start, size_t bytes), (start, bytes)) {
  TRY(cu_initialized());
  return cu_code(ds_unmap(start, bytes), NULL);
}

API(cuMemSetAccess, 10020, cuMemSetAccess, (CUdeviceptr start, size_t bytes, const CUmemAccessDesc *list, size_t count),
    (start, bytes, list, count)) {
  TRY(cu_initialized());
  if (!list || !count)
    return CU_INVALID_VALUE;
  for (size_t i = 0; i < count; i++) {
    struct ds_device *device = NULL;
    int flags = list[i].flags;
    if (list[i].location.type != CU_MEM_LOCATION_DEVICE || (flags != 0 && flags != 1 && flags != 3))
      return CU_INVALID_VALUE;
    if (cu_device(list[i].location.id, &device) != CU_OK)
      return CU_INVALID_VALUE;
    TRY(cu_code(ds_set_access(start, bytes, device, (unsigned)flags), device));
  }
  return CU_OK;
}

API(cuMemGetAccess, 10020, cuMemGetAccess, (uint64_t *flags, const CUmemLocation *location, CUdeviceptr pointer),
    (flags, location, pointer)) {
  struct ds_device *device = NULL;
  TRY(cu_initialized());
  if (!flags || !location || location->type != CU_MEM_LOCATION_DEVICE)
    return CU_INVALID_VALUE;
  TRY(cu_device(location->id, &device));
  ds_lock();
  struct ds_range *range = ds_find(pointer);
  bool mapped = range && range->kind == DS_VMM;
  if (mapped)
    *flags = range->access[device->index];
  ds_unlock();
  return mapped ? CU_OK : CU_INVALID_VALUE;
}
