/* Start-up, version, error names and name resolution. */
#include "front.h"

#include <string.h>
#include <stdio.h>
#include <stdlib.h>

const int ds_front_forked_code = CU_NOT_INITIALIZED;
const int ds_front_illegal_address = CU_ILLEGAL_ADDRESS;
const int ds_front_out_of_memory = CU_OUT_OF_MEMORY;

static atomic_bool initialized;

bool ds_front_is_failure(int code) { return code != CU_OK && code != CU_NOT_READY; }

void ds_front_sticky(int code) {
  struct context *context = cu_current_or_null();
  if (context)
    ds_lose(context->device, code);
}

int cu_code(enum ds_status status, const struct ds_device *device) {
  static const int codes[] = {
      [DS_OK] = CU_OK,
      [DS_INVALID] = CU_INVALID_VALUE,
      [DS_NOMEM] = CU_OUT_OF_MEMORY,
      [DS_NOT_READY] = CU_NOT_READY,
      [DS_BAD_HANDLE] = CU_INVALID_HANDLE,
      [DS_MAP_FAILED] = CU_MAP_FAILED,
      [DS_ALREADY_MAPPED] = CU_ALREADY_MAPPED,
      [DS_SELF_OPEN] = CU_INVALID_CONTEXT,
      [DS_NO_PEER] = CU_PEER_UNSUPPORTED,
      [DS_BAD_DEVICE] = CU_INVALID_DEVICE,
      [DS_BUSY_DEVICE] = CU_DEVICE_UNAVAILABLE,
      [DS_UNSUPPORTED] = CU_NOT_SUPPORTED,
      [DS_NOT_PERMITTED] = CU_NOT_PERMITTED,
      [DS_REGISTERED] = CU_HOST_ALREADY_REGISTERED,
      [DS_NOT_REGISTERED] = CU_HOST_NOT_REGISTERED,
      [DS_NOT_FOUND] = CU_NOT_FOUND,
      [DS_OS] = CU_OPERATING_SYSTEM,
      [DS_ILLEGAL_ADDRESS] = CU_ILLEGAL_ADDRESS,
      [DS_LOST] = CU_UNKNOWN,
      [DS_UNKNOWN] = CU_UNKNOWN,
  };
  if (status == DS_LOST && device)
    return atomic_load(&((struct ds_device *)device)->lost);
  return codes[status];
}

int cu_initialized(void) { return atomic_load(&initialized) ? CU_OK : CU_NOT_INITIALIZED; }

/* CUDA_VISIBLE_DEVICES: ordinals and (shortened) UUIDs; the list ends at the first bad entry. */
static int visible_index(const char *entry, size_t length) {
  char *end = NULL, word[80] = "", uuid[64];
  if (length >= sizeof word)
    return -1;
  memcpy(word, entry, length);
  long ordinal = strtol(word, &end, 10);
  if (end != word && !*end)
    return ordinal >= 0 && ordinal < ds_device_count() ? (int)ordinal : -1;
  for (int i = 0; i < ds_device_count(); i++) {
    const struct ds_device *device = ds_device_at(i);
    int n = snprintf(uuid, sizeof uuid, "%s-", device->slice < 0 ? "GPU" : "MIG");
    for (int b = 0; b < 16; b++)
      n += snprintf(uuid + n, sizeof uuid - (size_t)n, "%s%02x", b == 4 || b == 6 || b == 8 || b == 10 ? "-" : "",
                    device->uuid[b]);
    if (length > 4 && !strncmp(uuid, word, length))
      return i;
  }
  return -1;
}

static void apply_visible(void) {
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  int chosen[16], n = 0;
  if (!list)
    return;
  while (*list && n < 16) {
    size_t length = strcspn(list, ",");
    int index = visible_index(list, length);
    for (int i = 0; i < n; i++)
      if (chosen[i] == index)
        index = -1;
    if (index < 0)
      break;
    chosen[n++] = index;
    list += length + (list[length] == ',');
  }
  ds_devices_show(chosen, n);
}

API(cuInit, 2000, cuInit, (unsigned flags), (flags)) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  if (flags)
    return CU_INVALID_VALUE;
  pthread_once(&once, apply_visible);
  if (!ds_device_count())
    return CU_NO_DEVICE;
  ds_events_start();
  ds_late_start();
  atomic_store(&initialized, true);
  return CU_OK;
}

API(cuDriverGetVersion, 2020, cuDriverGetVersion, (int *version), (version)) {
  if (!version)
    return CU_INVALID_VALUE;
  *version = (int)ds_switch(DS_driver_version);
  return CU_OK;
}

static const struct {
  int code;
  const char *name, *text;
} errors[] = {
#define ERROR(code, name) {code, "CUDA_ERROR_" #name, "simulated " #name},
    {0, "CUDA_SUCCESS", "simulated SUCCESS"},
#include "errors.def"
#undef ERROR
};

static int describe(int code, const char **out, bool text) {
  if (!out)
    return CU_INVALID_VALUE;
  *out = NULL;
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) {
      *out = text ? errors[i].text : errors[i].name;
      return CU_OK;
    }
  return CU_INVALID_VALUE;
}

API(cuGetErrorName, 6000, cuGetErrorName, (int error, const char **out), (error, out)) {
  return describe(error, out, false);
}

API(cuGetErrorString, 6000, cuGetErrorString, (int error, const char **out), (error, out)) {
  return describe(error, out, true);
}

/* Outside of faults and trace: bindings resolve hundreds of names before their first real call. */
DS_EXPORT int cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags, int *result);
LISTED(cuGetProcAddress, 12000, cuGetProcAddress_v2);

int cuGetProcAddress_v2(const char *symbol, void **out, int version, uint64_t flags, int *result) {
  bool known = false;
  atomic_fetch_add(&cuGetProcAddress_v2_call.calls, 1);
  if (!symbol || !out || flags > 3)
    return CU_INVALID_VALUE;
  const struct ds_call *call = ds_resolve(symbol, version, (int)ds_switch(DS_driver_version), &known);
  *out = call ? call->function : NULL;
  if (result)
    *result = call ? 0 : known ? 2 : 1;
  return call || result ? CU_OK : CU_NOT_FOUND;
}
