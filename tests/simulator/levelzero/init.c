/* Start-up, the driver and what it says of itself, contexts, extension functions. */
#include "front.h"

#include <stdlib.h>
#include <string.h>

const int ds_front_forked_code = ZE_UNINITIALIZED;
const int ds_front_illegal_address = ZE_DEVICE_LOST;
const int ds_front_out_of_memory = ZE_OUT_OF_HOST_MEMORY;

static atomic_bool started;
static const char the_driver[] = "driver"; /* its address is the handle */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ze_context *contexts;

bool ds_front_is_failure(int code) { return code != ZE_OK && code != ZE_NOT_READY; }

void ds_front_sticky(int code) {
  for (int i = 0; i < ds_device_count(); i++)
    ds_lose(ds_device_at(i), code);
}

int ze_code(enum ds_status status, const struct ds_device *device) {
  switch (status) {
    case DS_OK: return ZE_OK;
    case DS_NOT_READY: return ZE_NOT_READY;
    case DS_NOMEM: return ZE_OUT_OF_DEVICE_MEMORY;
    case DS_OS: return ZE_OUT_OF_HOST_MEMORY;
    case DS_UNSUPPORTED: return ZE_UNSUPPORTED;
    case DS_NOT_PERMITTED: return ZE_NOT_PERMITTED;
    case DS_BUSY_DEVICE: return ZE_NOT_AVAILABLE;
    case DS_ILLEGAL_ADDRESS: return ZE_DEVICE_LOST;
    case DS_LOST: return device ? atomic_load(&((struct ds_device *)device)->lost) : ZE_DEVICE_LOST;
    default: return ZE_INVALID_ARGUMENT;
  }
}

int ze_started(void) { return atomic_load(&started) ? ZE_OK : ZE_UNINITIALIZED; }
bool ze_is_driver(const void *driver) { return driver == the_driver; }
struct ds_device *ze_any_device(void) { return ds_device_at(0); }

/* ZE_AFFINITY_MASK: whole devices by number; what it does not name is hidden. */
static void apply_mask(void) {
  const char *list = getenv("ZE_AFFINITY_MASK");
  int chosen[16], n = 0;
  if (!list || !*list)
    return;
  while (*list && n < 16) {
    char *end = NULL;
    long ordinal = strtol(list, &end, 10);
    if (end == list)
      break;
    if (ordinal >= 0 && ordinal < ds_device_count())
      chosen[n++] = (int)ordinal;
    list = end + strcspn(end, ",");
    list += *list == ',';
  }
  ds_devices_show(chosen, n);
}

static int start(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, apply_mask);
  if (!ds_device_count())
    return ZE_UNINITIALIZED;
  ds_late_start();
  atomic_store(&started, true);
  return ZE_OK;
}

API(zeInit, ZE_API, (uint32_t flags), (flags)) {
  (void)flags;
  return start();
}

static int give_driver(uint32_t *count, const void **drivers) {
  if (!count)
    return ZE_NULL_POINTER;
  if (drivers && *count)
    drivers[0] = the_driver;
  *count = 1;
  return ZE_OK;
}

API(zeInitDrivers, ZE_API_10, (uint32_t *count, const void **drivers, const void *desc), (count, drivers, desc)) {
  (void)desc;
  TRY(start());
  return give_driver(count, drivers);
}

API(zeDriverGet, ZE_API, (uint32_t *count, const void **drivers), (count, drivers)) {
  TRY(ze_started());
  return give_driver(count, drivers);
}

API(zeDriverGetApiVersion, ZE_API, (const void *driver, int *version), (driver, version)) {
  if (!ze_is_driver(driver))
    return ZE_INVALID_ARGUMENT;
  *version = (int)ds_switch(DS_api_version);
  return ZE_OK;
}

API(zeDriverGetProperties, ZE_API, (const void *driver, ze_driver_properties *out), (driver, out)) {
  if (!ze_is_driver(driver))
    return ZE_INVALID_ARGUMENT;
  memcpy(out->uuid, "devipc simulator", sizeof out->uuid);
  out->version = 0x01030000;
  return ZE_OK;
}

API(zeDriverGetIpcProperties, ZE_API, (const void *driver, ze_flags *out), (driver, out)) {
  if (!ze_is_driver(driver))
    return ZE_INVALID_ARGUMENT;
  long claim = ds_switch(DS_ipc_claim);
  uint32_t truth = (ds_switch(DS_ipc) ? ZE_IPC_MEMORY : 0) | (ds_switch(DS_ipc_events) ? ZE_IPC_EVENT_POOL : 0);
  out->flags = claim < 0 ? truth : (uint32_t)claim;
  return ZE_OK;
}

API(zeDriverGetExtensionProperties, ZE_API, (const void *driver, uint32_t *count, ze_extension *out),
    (driver, count, out)) {
  if (!ze_is_driver(driver))
    return ZE_INVALID_ARGUMENT;
  if (out && *count) {
    memset(out, 0, sizeof *out);
    strcpy(out->name, "ZE_extension_pci_properties");
    out->version = ZE_API;
  }
  *count = 1;
  return ZE_OK;
}

/* ---- extension functions: they get the driver's own handle, whatever the loader made of it ---- */
API(zexDriverImportExternalPointer, ZE_API, (const void *driver, void *address, size_t bytes),
    (driver, address, bytes)) {
  if (!ze_is_driver(driver))
    return ZE_INVALID_ARGUMENT;
  return ze_code(ds_host_register(NULL, address, bytes, 0), NULL);
}

API(zexDriverReleaseImportedPointer, ZE_API, (const void *driver, void *address), (driver, address)) {
  if (!ze_is_driver(driver))
    return ZE_INVALID_ARGUMENT;
  return ze_code(ds_host_unregister(address), NULL);
}

API(zeDriverGetExtensionFunctionAddress, ZE_API, (const void *driver, const char *name, void **out),
    (driver, name, out)) {
  bool unused;
  if (!ze_is_driver(driver))
    return ZE_INVALID_ARGUMENT;
  const struct ds_call *call = !strncmp(name, "zex", 3) && ds_switch(DS_host_register)
                                   ? ds_resolve(name, ZE_API, ZE_API, &unused)
                                   : NULL;
  if (!call)
    return ZE_INVALID_ARGUMENT;
  *out = call->function;
  return ZE_OK;
}

/* ---- contexts ---- */
int ze_context_check(const struct ze_context *wanted) {
  pthread_mutex_lock(&lock);
  const struct ze_context *at = contexts;
  while (at && at != wanted)
    at = at->next;
  pthread_mutex_unlock(&lock);
  if (!at)
    ds_wild("context");
  return at ? ZE_OK : ZE_INVALID_ARGUMENT;
}

API(zeContextCreate, ZE_API, (const void *driver, const ze_flags *desc, struct ze_context **out),
    (driver, desc, out)) {
  (void)desc;
  if (!ze_is_driver(driver))
    return ZE_INVALID_ARGUMENT;
  struct ze_context *context = calloc(1, sizeof *context);
  if (!context)
    return ZE_OUT_OF_HOST_MEMORY;
  pthread_mutex_lock(&lock);
  context->next = contexts;
  contexts = context;
  pthread_mutex_unlock(&lock);
  ds_count(DS_C_live_contexts, 1);
  *out = context;
  return ZE_OK;
}

API(zeContextDestroy, ZE_API, (struct ze_context *context), (context)) {
  TRY(ze_context_check(context));
  pthread_mutex_lock(&lock);
  struct ze_context **link = &contexts;
  while (*link != context)
    link = &(*link)->next;
  *link = context->next;
  pthread_mutex_unlock(&lock);
  ds_free_owner(context);
  free(context);
  ds_count(DS_C_live_contexts, -1);
  return ZE_OK;
}

API(zeContextGetStatus, ZE_API, (struct ze_context *context), (context)) { return ze_context_check(context); }
