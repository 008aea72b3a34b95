/* Devices: identity, attributes, peers, memory in use. */
#include "front.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int cu_device(int ordinal, struct ds_device **out) {
  TRY(cu_initialized());
  *out = ds_device_at(ordinal);
  return *out ? CU_OK : CU_INVALID_DEVICE;
}

API(cuDeviceGetCount, 2000, cuDeviceGetCount, (int *count), (count)) {
  TRY(cu_initialized());
  if (!count)
    return CU_INVALID_VALUE;
  *count = ds_device_count();
  return CU_OK;
}

API(cuDeviceGet, 2000, cuDeviceGet, (CUdevice *out, int ordinal), (out, ordinal)) {
  struct ds_device *device = NULL;
  TRY(cu_device(ordinal, &device));
  if (!out)
    return CU_INVALID_VALUE;
  *out = ordinal;
  return CU_OK;
}

API(cuDeviceGetName, 2000, cuDeviceGetName, (char *name, int size, CUdevice ordinal), (name, size, ordinal)) {
  struct ds_device *device = NULL;
  TRY(cu_device(ordinal, &device));
  if (!name || size <= 0)
    return CU_INVALID_VALUE;
  if (device->slice < 0) /* the name is where a program sees that it got a slice */
    snprintf(name, (size_t)size, "%s", device->name);
  else
    snprintf(name, (size_t)size, "Simulated accelerator %d MIG 1g.%lugb", device->physical,
             (unsigned long)(device->memory >> 30));
  return CU_OK;
}

static int uuid_of(CUuuid *uuid, CUdevice ordinal, bool whole) {
  struct ds_device *device = NULL;
  TRY(cu_device(ordinal, &device));
  if (!uuid)
    return CU_INVALID_VALUE;
  ds_device_uuid(device, whole, uuid->bytes);
  return CU_OK;
}

/* The first form answers for the device that a slice was cut from. */
API(cuDeviceGetUuid, 9020, cuDeviceGetUuid, (CUuuid *uuid, CUdevice device), (uuid, device)) {
  return uuid_of(uuid, device, true);
}

API(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2, (CUuuid *uuid, CUdevice device), (uuid, device)) {
  return uuid_of(uuid, device, false);
}

API(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2, (size_t *bytes, CUdevice ordinal), (bytes, ordinal)) {
  struct ds_device *device = NULL;
  TRY(cu_device(ordinal, &device));
  if (!bytes)
    return CU_INVALID_VALUE;
  *bytes = device->memory;
  return CU_OK;
}

API(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId, (char *out, int size, CUdevice ordinal), (out, size, ordinal)) {
  struct ds_device *device = NULL;
  TRY(cu_device(ordinal, &device));
  if (!out || size < 13)
    return CU_INVALID_VALUE;
  snprintf(out, (size_t)size, "0000:%02X:00.0", 0x40 + device->physical);
  return CU_OK;
}

API(cuDeviceGetByPCIBusId, 4010, cuDeviceGetByPCIBusId, (CUdevice *out, const char *bus), (out, bus)) {
  TRY(cu_initialized());
  if (!out || !bus)
    return CU_INVALID_VALUE;
  char name[16];
  for (int i = 0; i < ds_device_count(); i++) {
    snprintf(name, sizeof name, "0000:%02X:00.0", 0x40 + ds_device_at(i)->physical);
    if (!strcmp(name, bus)) {
      *out = i;
      return CU_OK;
    }
  }
  return CU_INVALID_DEVICE;
}

/* DEVSIM_ATTRIBUTES="125=0,122=1" makes single answers lie; behaviour stays what the switches say. */
static bool lie(int attribute, int *value) {
  for (const char *at = ds_text("attributes"); *at;) {
    char *end = NULL;
    long which = strtol(at, &end, 10);
    if (*end != '=')
      return false;
    long answer = strtol(end + 1, &end, 10);
    if (which == attribute) {
      *value = (int)answer;
      return true;
    }
    at = end + (*end == ',');
  }
  return false;
}

static int answer(int *value, int attribute, struct ds_device *device) {
  static const struct {
    int attribute, value;
  } fixed[] = {{1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 2147483647}, {6, 65535}, {7, 65535}, {8, 49152},
               {10, 32}, {11, 2147483647}, {12, 65536}, {13, 1980000}, {14, 512}, {15, 1}, {16, 132}, {17, 0}, {18, 0},
               {19, 1}, {31, 1}, {32, 1}, {34, 0}, {35, 0}, {38, 62914560}, {39, 2048}, {40, 3}, {41, 1}, {50, 0},
               {75, 9}, {76, 0}, {78, 1}, {83, 1}, {86, 0}, {88, 0}, {89, 1}, {90, 1}, {95, 1}, {100, 0}, {101, 0},
               {104, 0}, {105, 0}, {110, 1}, {113, 1}, {114, 1}, {116, 1}, {117, 1}, {118, 100}, {123, 1}, {124, 1}, {127, 1}, {132, 0}, {133, 0}, {134, 0}, {145, 1}};
  if (!value || attribute <= 0 || attribute > 161)
    return CU_INVALID_VALUE;
  if (lie(attribute, value))
    return CU_OK;
  *value = 0;
  for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
    if (fixed[i].attribute == attribute)
      *value = fixed[i].value;
  switch (attribute) {
    case 20: *value = (int)ds_switch(DS_compute_mode); break;
    case 33: *value = 0x40 + device->physical; break;
    case 91: *value = ds_switch(DS_host_pointer) != 0; break;
    case 122: case 123: *value = ds_switch(DS_memops) != 0; break;
    case 99: *value = 1; break;
    case 102: *value = ds_switch(DS_vmm) != 0; break;
    case 103: *value = ds_switch(DS_vmm) && ds_switch(DS_fd_handles); break;
    case 115: *value = ds_switch(DS_pools) != 0; break;
    case 119: *value = ds_switch(DS_pools) ? CU_MEM_HANDLE_FD | CU_MEM_HANDLE_FABRIC : 0; break;
    case 125: *value = ds_switch(DS_ipc_events) != 0; break;
    case 128: *value = ds_switch(DS_fabric) != 2; break; /* claimed where create is not permitted, too */
    default: break;
  }
  return CU_OK;
}

API(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute, (int *value, int attribute, CUdevice ordinal),
    (value, attribute, ordinal)) {
  struct ds_device *device = NULL;
  TRY(cu_device(ordinal, &device));
  return answer(value, attribute, device);
}

API(cuDeviceComputeCapability, 2000, cuDeviceComputeCapability, (int *major, int *minor, CUdevice ordinal),
    (major, minor, ordinal)) {
  struct ds_device *device = NULL;
  TRY(cu_device(ordinal, &device));
  if (!major || !minor)
    return CU_INVALID_VALUE;
  *major = 9;
  *minor = 0;
  return CU_OK;
}

static int peer_answer(struct ds_device *a, struct ds_device *b) {
  long claim = ds_switch(DS_peer_claim);
  return a != b && (claim < 0 ? ds_peer(a, b) : claim != 0);
}

API(cuDeviceCanAccessPeer, 4000, cuDeviceCanAccessPeer, (int *can, CUdevice one, CUdevice two), (can, one, two)) {
  struct ds_device *a = NULL, *b = NULL;
  TRY(cu_device(one, &a));
  TRY(cu_device(two, &b));
  if (!can)
    return CU_INVALID_VALUE;
  *can = peer_answer(a, b);
  return CU_OK;
}

API(cuDeviceGetP2PAttribute, 8000, cuDeviceGetP2PAttribute, (int *value, int attribute, CUdevice one, CUdevice two),
    (value, attribute, one, two)) {
  struct ds_device *a = NULL, *b = NULL;
  TRY(cu_device(one, &a));
  TRY(cu_device(two, &b));
  if (!value || attribute < 1 || attribute > 4)
    return CU_INVALID_VALUE;
  if (a == b)
    return CU_INVALID_DEVICE;
  *value = attribute == 1 ? 0 : peer_answer(a, b);
  return CU_OK;
}

API(cuMemGetInfo, 3020, cuMemGetInfo_v2, (size_t *free_bytes, size_t *total), (free_bytes, total)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (!free_bytes || !total)
    return CU_INVALID_VALUE;
  uint64_t used = ds_used(context->device->physical, context->device->slice, 0);
  *total = context->device->memory;
  *free_bytes = used < *total ? *total - used : 0;
  return CU_OK;
}
