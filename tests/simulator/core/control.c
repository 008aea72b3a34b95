/* What tests call on the loaded library. */
#include "stream.h"

DS_EXPORT int devsim_inject(const char *spec) { return ds_inject(spec); }
DS_EXPORT int devsim_set(const char *name, long value) { return ds_switch_set(name, value) ? 0 : -1; }
DS_EXPORT void devsim_stall(int on) { ds_stall(NULL, on != 0); }

DS_EXPORT int devsim_stall_stream(void *stream, int on) {
  if (!ds_stream_exists(stream))
    return -1;
  ds_stall(stream, on != 0);
  return 0;
}

DS_EXPORT int devsim_lose(int device, int code) {
  if (!ds_device_at(device))
    return -1;
  ds_lose(ds_device_at(device), code);
  return 0;
}

DS_EXPORT long devsim_calls(const char *name) { return ds_calls(name); }

/* -1: there is no such counter. */
DS_EXPORT long devsim_counter(const char *name) {
  long value = -1;
  return ds_counter_by_name(name, &value) == 0 ? value : -1;
}

/* Objects that are live, summed over all kinds, mappings of imported memory included. */
DS_EXPORT long devsim_live(void) {
  static const enum ds_counter kinds[] = {
      DS_C_live_allocations, DS_C_live_mappings,      DS_C_live_physical, DS_C_live_reservations,
      DS_C_live_maps,        DS_C_live_pools,         DS_C_live_pool_pointers, DS_C_live_streams,
      DS_C_live_events,      DS_C_live_registrations, DS_C_live_modules};
  long sum = 0;
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++)
    sum += ds_counter(kinds[i]);
  return sum;
}

/* Bytes of a device in use: by all processes of the room (pid 0), or charged to one. */
DS_EXPORT long devsim_used(int device, int pid) {
  struct ds_device *found = ds_device_at(device);
  return found ? (long)ds_used(found->physical, found->slice, pid) : -1;
}

/* JSON texts; each returns the length, which may be more than fitted. */
DS_EXPORT int devsim_switches(char *out, size_t size) { return ds_switches_json(out, size); }

DS_EXPORT int devsim_report(char *out, size_t size) {
  int at = ds_append(out, size, 0, "{\"counters\": ");
  at += ds_counters_json(at < (int)size ? out + at : NULL, at < (int)size ? size - (size_t)at : 0);
  at = ds_append(out, size, at, ", \"calls\": ");
  at += ds_calls_json(at < (int)size ? out + at : NULL, at < (int)size ? size - (size_t)at : 0);
  return ds_append(out, size, at, "}");
}
