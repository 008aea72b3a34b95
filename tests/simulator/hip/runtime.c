/* Start-up, versions, errors and devices. The runtime starts by itself at the first call. */
#include "front.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const int ds_front_forked_code = HIP_NOT_INITIALIZED;
const int ds_front_illegal_address = HIP_ILLEGAL_ADDRESS;
const int ds_front_out_of_memory = HIP_OUT_OF_MEMORY;

static _Thread_local int current, last_error;
static struct place places[16];

bool ds_front_is_failure(int code) { return code != HIP_OK && code != HIP_NOT_READY; }

void ds_front_sticky(int code) {
  struct ds_device *device = ds_device_at(current);
  if (device)
    ds_lose(device, code);
}

int hip_note(int code) {
  if (code != HIP_OK)
    last_error = code;
  return code;
}

int hip_code(enum ds_status status, const struct ds_device *device) {
  static const int codes[] = {
      [DS_OK] = HIP_OK,
      [DS_INVALID] = HIP_INVALID_VALUE,
      [DS_NOMEM] = HIP_OUT_OF_MEMORY,
      [DS_NOT_READY] = HIP_NOT_READY,
      [DS_BAD_HANDLE] = HIP_INVALID_HANDLE,
      [DS_MAP_FAILED] = HIP_MAP_FAILED,
      [DS_ALREADY_MAPPED] = HIP_ALREADY_MAPPED,
      [DS_SELF_OPEN] = HIP_INVALID_CONTEXT,
      [DS_NO_PEER] = HIP_PEER_UNSUPPORTED,
      [DS_BAD_DEVICE] = HIP_INVALID_DEVICE,
      [DS_BUSY_DEVICE] = HIP_NO_DEVICE,
      [DS_UNSUPPORTED] = HIP_NOT_SUPPORTED,
      [DS_NOT_PERMITTED] = HIP_NOT_SUPPORTED,
      [DS_REGISTERED] = HIP_HOST_REGISTERED,
      [DS_NOT_REGISTERED] = HIP_HOST_NOT_REGISTERED,
      [DS_NOT_FOUND] = HIP_NOT_FOUND,
      [DS_OS] = HIP_OUT_OF_MEMORY, /* a full descriptor table is reported so */
      [DS_ILLEGAL_ADDRESS] = HIP_ILLEGAL_ADDRESS,
      [DS_LOST] = HIP_UNKNOWN,
      [DS_UNKNOWN] = HIP_INVALID_VALUE,
  };
  if (status == DS_LOST && device)
    return atomic_load(&((struct ds_device *)device)->lost);
  return codes[status];
}

/* HIP_VISIBLE_DEVICES: a list of ordinals that ends at the first bad one. */
static void start(void) {
  const char *list = getenv("HIP_VISIBLE_DEVICES");
  int chosen[16], n = 0;
  while (list && *list && n < 16) {
    char *end = NULL;
    long ordinal = strtol(list, &end, 10);
    if (end == list || ordinal < 0 || ordinal >= ds_device_count())
      break;
    chosen[n++] = (int)ordinal;
    list = end + (*end == ',');
  }
  if (list)
    ds_devices_show(chosen, n);
  ds_events_start();
  ds_late_start();
}

static int ready(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, start);
  return ds_device_count() ? HIP_OK : HIP_NO_DEVICE;
}

int hip_device(int ordinal, struct ds_device **out) {
  TRY(ready());
  *out = ds_device_at(ordinal);
  return *out ? HIP_OK : HIP_INVALID_DEVICE;
}

int hip_place(struct place **out) {
  struct ds_device *device = NULL;
  TRY(hip_device(current, &device));
  *out = &places[device->index];
  (*out)->device = device;
  return atomic_load(&device->lost);
}

API(hipInit, (unsigned flags), (flags)) { return flags ? HIP_INVALID_VALUE : ready(); }

static int version(int *out) {
  if (!out)
    return HIP_INVALID_VALUE;
  *out = (int)ds_switch(DS_driver_version);
  return HIP_OK;
}

API(hipDriverGetVersion, (int *out), (out)) { return version(out); }
API(hipRuntimeGetVersion, (int *out), (out)) { return version(out); }

/* Neither counted nor faulted: callers ask after each failure. */
DS_EXPORT int hipGetLastError(void);
int hipGetLastError(void) {
  int code = last_error;
  last_error = HIP_OK;
  return code;
}

DS_EXPORT int hipPeekAtLastError(void);
int hipPeekAtLastError(void) { return last_error; }

API(hipGetDeviceCount, (int *count), (count)) {
  if (!count)
    return HIP_INVALID_VALUE;
  *count = 0;
  TRY(ready());
  *count = ds_device_count();
  return HIP_OK;
}

API(hipSetDevice, (int ordinal), (ordinal)) {
  struct ds_device *device = NULL;
  TRY(hip_device(ordinal, &device));
  current = ordinal;
  return HIP_OK;
}

API(hipGetDevice, (int *out), (out)) {
  TRY(ready());
  if (!out)
    return HIP_INVALID_VALUE;
  *out = current;
  return HIP_OK;
}

API(hipDeviceGet, (hipDevice_t *out, int ordinal), (out, ordinal)) {
  struct ds_device *device = NULL;
  TRY(hip_device(ordinal, &device));
  *out = ordinal;
  return HIP_OK;
}

API(hipDeviceGetName, (char *name, int size, hipDevice_t ordinal), (name, size, ordinal)) {
  struct ds_device *device = NULL;
  TRY(hip_device(ordinal, &device));
  if (!name || size <= 0)
    return HIP_INVALID_VALUE;
  snprintf(name, (size_t)size, "%s", device->name);
  return HIP_OK;
}

/* Sixteen hexadecimal digits as text, without a closing NUL. */
API(hipDeviceGetUuid, (hipUuid *uuid, hipDevice_t ordinal), (uuid, ordinal)) {
  struct ds_device *device = NULL;
  char text[17];
  TRY(hip_device(ordinal, &device));
  if (!uuid)
    return HIP_INVALID_VALUE;
  memset(uuid, 0, sizeof *uuid);
  if (ds_switch(DS_no_uuid))
    return HIP_OK;
  for (int i = 0; i < 8; i++)
    snprintf(text + 2 * i, 3, "%02x", device->uuid[i < 6 ? i : 8 + i]);
  memcpy(uuid->bytes, text, sizeof uuid->bytes);
  return HIP_OK;
}

API(hipDeviceGetPCIBusId, (char *out, int size, int ordinal), (out, size, ordinal)) {
  struct ds_device *device = NULL;
  TRY(hip_device(ordinal, &device));
  if (!out || size < 13)
    return HIP_INVALID_VALUE;
  snprintf(out, (size_t)size, "0000:%02x:00.0", 0x40 + device->physical);
  return HIP_OK;
}

API(hipDeviceTotalMem, (size_t *bytes, hipDevice_t ordinal), (bytes, ordinal)) {
  struct ds_device *device = NULL;
  TRY(hip_device(ordinal, &device));
  *bytes = device->memory;
  return HIP_OK;
}

/* DEVSIM_ATTRIBUTES="10013=0" makes single answers lie; behaviour stays what the switches say. */
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

API(hipDeviceGetAttribute, (int *value, int attribute, int ordinal), (value, attribute, ordinal)) {
  struct ds_device *device = NULL;
  TRY(hip_device(ordinal, &device));
  if (!value)
    return HIP_INVALID_VALUE;
  if (lie(attribute, value))
    return HIP_OK;
  switch (attribute) {
    case HIP_ATTRIBUTE_HOST_POINTER: *value = ds_switch(DS_host_pointer) != 0; return HIP_OK;
    case HIP_ATTRIBUTE_COMPUTE_MODE: *value = (int)ds_switch(DS_compute_mode); return HIP_OK;
    case HIP_ATTRIBUTE_MAX_PITCH: *value = 2147483647; return HIP_OK;
    case HIP_ATTRIBUTE_PCI_BUS: *value = 0x40 + device->physical; return HIP_OK;
    case HIP_ATTRIBUTE_PCI_DEVICE: case HIP_ATTRIBUTE_PCI_DOMAIN: *value = 0; return HIP_OK;
    case HIP_ATTRIBUTE_POOLS: *value = ds_switch(DS_pools) != 0; return HIP_OK;
    case HIP_ATTRIBUTE_VMM: *value = ds_switch(DS_vmm) != 0; return HIP_OK;
    case HIP_ATTRIBUTE_HOST_REGISTER: *value = ds_switch(DS_host_register) != 0; return HIP_OK;
    case HIP_ATTRIBUTE_POOL_HANDLES: *value = ds_switch(DS_pools) && ds_switch(DS_fd_handles); return HIP_OK;
    case HIP_ATTRIBUTE_DMABUF: *value = ds_switch(DS_dmabuf) != 0; return HIP_OK;
    case HIP_ATTRIBUTE_WAIT_VALUE: *value = ds_switch(DS_memops) != 0; return HIP_OK;
    default: return HIP_INVALID_VALUE;
  }
}

API(hipDeviceCanAccessPeer, (int *can, int one, int two), (can, one, two)) {
  struct ds_device *a = NULL, *b = NULL;
  TRY(hip_device(one, &a));
  TRY(hip_device(two, &b));
  long claim = ds_switch(DS_peer_claim);
  *can = a != b && (claim < 0 ? ds_peer(a, b) : claim != 0);
  return HIP_OK;
}

API(hipMemGetInfo, (size_t *free_bytes, size_t *total), (free_bytes, total)) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  if (!free_bytes || !total)
    return HIP_INVALID_VALUE;
  uint64_t used = ds_used(place->device->physical, place->device->slice, 0);
  *total = place->device->memory;
  *free_bytes = used < *total ? *total - used : 0;
  return HIP_OK;
}

API(hipDeviceSynchronize, (void), ()) {
  struct place *place = NULL;
  TRY(hip_place(&place));
  return hip_code(ds_sync_owner(place), place->device);
}
