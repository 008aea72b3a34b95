/* The table of exported calls: counts them, lets faults in, writes the trace and
 * resolves names by version.  It knows no argument and no result but success. */
#include "memory.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The linker gathers the fronts' entries between these two. */
extern struct ds_call *__start_devsim_calls[], *__stop_devsim_calls[];

static atomic_long inside;
static atomic_int trace_fd = -2;
static _Thread_local uint64_t began_us;
static _Thread_local struct ds_fault pending;

static int trace(void) {
  int fd = atomic_load(&trace_fd);
  if (fd != -2)
    return fd;
  const char *path = ds_text("trace");
  fd = *path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600) : -1;
  atomic_store(&trace_fd, fd);
  return fd;
}

static void note_entry(void) {
  long now = atomic_fetch_add(&inside, 1) + 1;
  if (now > 1)
    ds_count(DS_C_concurrent_entries, 1);
  long peak = ds_counter(DS_C_concurrent_peak);
  if (now > peak)
    ds_count(DS_C_concurrent_peak, now - peak);
}

int ds_enter(struct ds_call *call) {
  note_entry();
  atomic_fetch_add(&call->calls, 1);
  began_us = trace() >= 0 ? ds_now_us() : 0;
  pending = (struct ds_fault){DS_GO, 0};
  if (ds_forked())
    return ds_front_forked_code;
  if (ds_take_pending_failure())
    return ds_front_out_of_memory;
  struct ds_fault fault = ds_fault_at(call->name);
  if (fault.action == DS_GO)
    return DS_PROCEED;
  if (fault.action == DS_AFTER) {
    pending = fault;
    return DS_PROCEED;
  }
  if (fault.action == DS_STICKY)
    ds_front_sticky((int)fault.arg);
  if (fault.action == DS_CODE || fault.action == DS_STICKY)
    return (int)fault.arg;
  ds_act(fault);
  return DS_PROCEED;
}

int ds_leave(struct ds_call *call, int code) {
  if (pending.action == DS_AFTER)
    code = (int)pending.arg;
  pending.action = DS_GO;
  if (ds_front_is_failure(code))
    atomic_fetch_add(&call->failures, 1);
  if (trace() >= 0) {
    char line[200];
    int n = snprintf(line, sizeof line, "%d %ld %s %d %lu\n", getpid(), syscall(SYS_gettid), call->name, code,
                     (unsigned long)(ds_now_us() - began_us));
    if (n > 0 && write(trace(), line, (size_t)n) != n)
      atomic_store(&trace_fd, -1);
  }
  atomic_fetch_sub(&inside, 1);
  return code;
}

/* The newest form that the caller knows; none for a caller that asks beyond the driver,
 * since what it expects may have another signature. */
const struct ds_call *ds_resolve(const char *base, int version, int driver_version, bool *known) {
  const struct ds_call *best = NULL;
  const char *missing = ds_text("missing");
  *known = false;
  for (struct ds_call **at = __start_devsim_calls; at < __stop_devsim_calls; at++) {
    struct ds_call *call = *at;
    if (strcmp(call->base, base) || ds_listed(missing, base) || ds_listed(missing, call->name))
      continue;
    *known = true;
    bool fits = call->since <= version && version <= driver_version;
    if (fits && (!best || call->since > best->since))
      best = call;
  }
  return best;
}

long ds_calls(const char *name) {
  long sum = -1;
  size_t n = strlen(name);
  bool prefix = n && name[n - 1] == '*';
  for (struct ds_call **at = __start_devsim_calls; at < __stop_devsim_calls; at++)
    if (prefix ? !strncmp((*at)->name, name, n - 1) : (!strcmp((*at)->name, name) || !strcmp((*at)->base, name)))
      sum = (sum < 0 ? 0 : sum) + (long)atomic_load(&(*at)->calls);
  return sum;
}

int ds_calls_json(char *out, size_t size) {
  int at = ds_append(out, size, 0, "{");
  bool first = true;
  for (struct ds_call **entry = __start_devsim_calls; entry < __stop_devsim_calls; entry++) {
    unsigned long calls = atomic_load(&(*entry)->calls);
    if (!calls)
      continue;
    at = ds_append(out, size, at, "%s\"%s\": {\"calls\": %lu, \"failures\": %lu}", first ? "" : ", ", (*entry)->name,
                   calls, atomic_load(&(*entry)->failures));
    first = false;
  }
  return ds_append(out, size, at, "}");
}
