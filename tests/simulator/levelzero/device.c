/* Devices: identity, engines, peers, and what the management interface says of them. */
#include "front.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool exists(const struct ds_device *device) {
  for (int i = 0; i < ds_device_count(); i++)
    if (ds_device_at(i) == device)
      return true;
  return false;
}

int ze_device_check(struct ds_device *device) {
  if (!exists(device)) {
    ds_wild("device");
    return ZE_INVALID_ARGUMENT;
  }
  return atomic_load(&device->lost);
}

static int list_devices(uint32_t *count, struct ds_device **out) {
  int all = ds_device_count();
  if (!*count && out && ds_switch(DS_count_zero_abort))
    ds_act((struct ds_fault){DS_ABORT, 0});
  for (int i = 0; out && i < all && (uint32_t)i < *count; i++)
    out[i] = ds_device_at(i);
  if (!*count || *count > (uint32_t)all)
    *count = (uint32_t)all;
  return ZE_OK;
}

API(zeDeviceGet, ZE_API, (const void *driver, uint32_t *count, struct ds_device **out), (driver, count, out)) {
  return ze_is_driver(driver) ? list_devices(count, out) : ZE_INVALID_ARGUMENT;
}

API(zeDeviceGetSubDevices, ZE_API, (struct ds_device *device, uint32_t *count, struct ds_device **out),
    (device, count, out)) {
  (void)out;
  *count = 0;
  return exists(device) ? ZE_OK : ZE_INVALID_ARGUMENT;
}

static void describe(const struct ds_device *device, ze_device_properties *out) {
  out->type = ZE_DEVICE_GPU;
  out->vendor = 0x8086;
  out->device = 0x0bd5;
  out->flags = device->slice < 0 ? 0 : ZE_DEVICE_IS_SUBDEVICE;
  out->subdevice = device->slice < 0 ? 0 : (uint32_t)device->slice;
  out->max_alloc = device->memory;
  out->slices = 1;
  memcpy(out->uuid, device->uuid, sizeof out->uuid);
  snprintf(out->name, sizeof out->name, "%s", device->name);
}

/* Whole devices of which only parts are listed: asked for by their parts, good for nothing but to say who they are. */
static struct ds_device roots[16];

static bool is_root(const struct ds_device *device) { return device >= roots && device < roots + 16 && device->slice < 0; }

API(zeDeviceGetProperties, ZE_API, (struct ds_device *device, ze_device_properties *out), (device, out)) {
  if (!exists(device) && !is_root(device))
    return ZE_INVALID_ARGUMENT;
  describe(device, out);
  return ZE_OK;
}

/* The whole device that a part belongs to; a whole device has none. */
API(zeDeviceGetRootDevice, ZE_API_7, (struct ds_device *device, struct ds_device **out), (device, out)) {
  *out = NULL;
  if (!exists(device))
    return ZE_INVALID_ARGUMENT;
  if (device->slice >= 0) {
    struct ds_device *root = &roots[device->physical % 16];
    root->physical = device->physical;
    root->slice = -1;
    ds_device_uuid(device, true, root->uuid);
    *out = root;
  }
  return ZE_OK;
}

static uint32_t groups(ze_queue_group out[4]) {
  long copying = ds_switch(DS_copy_groups);
  uint32_t n = 0;
  out[n++] = (ze_queue_group){.flags = ZE_GROUP_COMPUTE | ZE_GROUP_COPY | ZE_GROUP_COOPERATIVE, .max_fill = SIZE_MAX, .queues = 1};
  if (copying > 0)
    out[n++] = (ze_queue_group){.flags = ZE_GROUP_COPY, .max_fill = 1, .queues = 1};
  if (copying > 1)
    out[n++] = (ze_queue_group){.flags = ZE_GROUP_COPY, .max_fill = 1, .queues = 8};
  return n;
}

uint32_t ze_group(uint32_t ordinal, ze_queue_group *out) {
  ze_queue_group all[4];
  uint32_t n = groups(all);
  if (ordinal < n)
    *out = all[ordinal];
  return n;
}

API(zeDeviceGetCommandQueueGroupProperties, ZE_API, (struct ds_device *device, uint32_t *count, ze_queue_group *out),
    (device, count, out)) {
  ze_queue_group all[4];
  uint32_t n = groups(all);
  if (!exists(device))
    return ZE_INVALID_ARGUMENT;
  for (uint32_t i = 0; out && i < n && i < *count; i++) {
    all[i].base = out[i].base;
    out[i] = all[i];
  }
  if (!*count || *count > n)
    *count = n;
  return ZE_OK;
}

API(zeDeviceGetMemoryProperties, ZE_API, (struct ds_device *device, uint32_t *count, ze_device_memory *out),
    (device, count, out)) {
  if (!exists(device))
    return ZE_INVALID_ARGUMENT;
  if (out && *count)
    out->bytes = device->memory;
  *count = 1;
  return ZE_OK;
}

API(zeDeviceCanAccessPeer, ZE_API, (struct ds_device *device, struct ds_device *peer, uint8_t *out),
    (device, peer, out)) {
  if (!exists(device) || !exists(peer))
    return ZE_INVALID_ARGUMENT;
  *out = ds_switch(DS_peer_claim) < 0 ? ds_peer(device, peer) : ds_switch(DS_peer_claim) != 0;
  return ZE_OK;
}

API(zeDeviceGetStatus, ZE_API, (struct ds_device *device), (device)) { return ze_device_check(device); }

API(zeDevicePciGetPropertiesExt, ZE_API, (struct ds_device *device, ze_pci *out), (device, out)) {
  if (!exists(device))
    return ZE_INVALID_ARGUMENT;
  out->domain = out->device = out->function = 0;
  out->bus = 0x40 + (uint32_t)device->physical;
  return ZE_OK;
}

/* ---- management: after its own start, or in the older way by an environment variable ---- */
static atomic_bool managed;

static int manages(void) {
  const char *asked = getenv("ZES_ENABLE_SYSMAN");
  bool older = !ze_started() && asked && !strcmp(asked, "1");
  return ds_switch(DS_sysman) && (atomic_load(&managed) || older) ? ZE_OK : ZE_UNINITIALIZED;
}

API(zesInit, ZE_API_5, (uint32_t flags), (flags)) {
  (void)flags;
  if (!ds_switch(DS_sysman) || !ds_device_count())
    return ZE_UNINITIALIZED;
  atomic_store(&managed, true);
  return ZE_OK;
}

API(zesDriverGet, ZE_API_5, (uint32_t *count, const void **drivers), (count, drivers)) {
  TRY(manages());
  if (drivers && *count)
    drivers[0] = &managed;
  *count = 1;
  return ZE_OK;
}

API(zesDeviceGet, ZE_API_5, (const void *driver, uint32_t *count, struct ds_device **out), (driver, count, out)) {
  TRY(manages());
  return driver == &managed ? list_devices(count, out) : ZE_INVALID_ARGUMENT;
}

API(zesDeviceGetProperties, ZE_API, (struct ds_device *device, zes_device_properties *out), (device, out)) {
  TRY(manages());
  if (!exists(device))
    return ZE_INVALID_ARGUMENT;
  describe(device, &out->core);
  out->subdevices = 0;
  return ZE_OK;
}

API(zesDevicePciGetProperties, ZE_API, (struct ds_device *device, zes_pci *out), (device, out)) {
  TRY(manages());
  if (!exists(device))
    return ZE_INVALID_ARGUMENT;
  out->domain = out->device = out->function = 0;
  out->bus = 0x40 + (uint32_t)device->physical;
  return ZE_OK;
}

/* One module for each device, whose handle is the device's. */
API(zesDeviceEnumMemoryModules, ZE_API, (struct ds_device *device, uint32_t *count, struct ds_device **out),
    (device, count, out)) {
  TRY(manages());
  if (!exists(device))
    return ZE_INVALID_ARGUMENT;
  if (out && *count)
    out[0] = device;
  *count = 1;
  return ZE_OK;
}

API(zesMemoryGetProperties, ZE_API, (struct ds_device *device, zes_memory_properties *out), (device, out)) {
  TRY(manages());
  if (!exists(device))
    return ZE_INVALID_ARGUMENT;
  out->type = 0;
  out->on_subdevice = 0;
  out->location = 1; /* on the device */
  out->bytes = device->memory;
  return ZE_OK;
}

API(zesMemoryGetState, ZE_API, (struct ds_device *device, zes_memory_state *out), (device, out)) {
  TRY(manages());
  if (!exists(device))
    return ZE_INVALID_ARGUMENT;
  uint64_t used = ds_used(device->physical, device->slice, 0);
  out->health = 1;
  out->size = device->memory;
  out->free = used < device->memory ? device->memory - used : 0;
  return ZE_OK;
}
