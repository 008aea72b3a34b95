/* What every part of the simulator shares: status words, switches, faults and
 * the call table.  It knows no vendor: fronts translate `enum ds_status`. */
#pragma once

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DS_EXPORT __attribute__((visibility("default")))

enum ds_status {
  DS_OK = 0,
  DS_INVALID,            /* an argument is wrong */
  DS_NOMEM,              /* device memory, addresses or a configured limit is used up */
  DS_NOT_READY,          /* the work is still running */
  DS_BAD_HANDLE,         /* no such object, or bytes that are no handle */
  DS_MAP_FAILED,         /* the peer's memory cannot be mapped */
  DS_ALREADY_MAPPED,     /* it is mapped here already */
  DS_SELF_OPEN,          /* the exporting process opens its own handle */
  DS_NO_PEER,            /* the two devices cannot reach each other */
  DS_BAD_DEVICE,         /* no such device, or not visible */
  DS_BUSY_DEVICE,        /* exclusive device held by another process */
  DS_UNSUPPORTED,        /* the platform cannot do this */
  DS_NOT_PERMITTED,
  DS_REGISTERED,         /* host memory is registered already */
  DS_NOT_REGISTERED,
  DS_NOT_FOUND,
  DS_OS,                 /* the operating system refused (no fd, no thread) */
  DS_ILLEGAL_ADDRESS,    /* work touched memory that is not there */
  DS_LOST,               /* the device is lost: see ds_device.lost */
  DS_UNKNOWN,            /* an fd that is nothing of a device's */
};

/* ---- switches (config.c) ---- */
enum ds_switch {
#define SWITCH(name, value, text) DS_##name,
#include "switches.def"
#undef SWITCH
  DS_SWITCH_COUNT
};
long ds_switch(enum ds_switch s);
bool ds_switch_set(const char *name, long value);
const char *ds_text(const char *name);  /* DEVSIM_<name> as text, "" when unset */
bool ds_listed(const char *list, const char *word);  /* comma list contains word */
int ds_switches_json(char *out, size_t size);

/* ---- counters (config.c) ---- */
enum ds_counter {
#define COUNTER(name, text) DS_C_##name,
#include "counters.def"
#undef COUNTER
  DS_COUNTER_COUNT
};
void ds_count(enum ds_counter c, long delta);
long ds_counter(enum ds_counter c);
int ds_counters_json(char *out, size_t size);
int ds_counter_by_name(const char *name, long *value);

/* ---- faults (fault.c) ---- */
enum ds_action { DS_GO = 0, DS_CODE, DS_AFTER, DS_STICKY, DS_HANG, DS_SLEEP, DS_KILL, DS_STOP, DS_SEGV, DS_ABORT };
struct ds_fault {
  enum ds_action action;
  long arg;
};
int ds_inject(const char *spec);  /* 0, or -1 for a spec it cannot read */
struct ds_fault ds_fault_at(const char *name);
void ds_act(struct ds_fault fault);  /* carries out sleep, hang and death */

/* ---- the call table (calls.c): fronts register each exported call ---- */
struct ds_call {
  const char *base;  /* name without version suffix */
  const char *name;  /* exported symbol */
  int since;         /* first driver version that has it */
  void *function;
  atomic_ulong calls;
  atomic_ulong failures;
};
enum { DS_PROCEED = -1 };
int ds_enter(struct ds_call *call);
int ds_leave(struct ds_call *call, int code);
const struct ds_call *ds_resolve(const char *base, int version, int driver_version, bool *known);
long ds_calls(const char *name);
int ds_calls_json(char *out, size_t size);

/* Supplied by the front: what a forked child gets, and whether a code is a plain result. */
extern const int ds_front_forked_code;
extern const int ds_front_out_of_memory;    /* what a failure left pending answers */
extern const int ds_front_illegal_address; /* sticky code of work that touched no memory */
bool ds_front_is_failure(int code);
void ds_front_sticky(int code);  /* put the calling thread's device into the lost state */

/* ---- small helpers (config.c) ---- */
uint64_t ds_now_us(void);
void ds_sleep_us(long us);
uint64_t ds_unique(void);            /* process-wide increasing id, from 1 */
void ds_random(void *out, size_t n); /* unpredictable bytes */
bool ds_forked(void);
/* A handle that never was one, or that drivers follow after its end: they crash, and so do we. */
void ds_wild(const char *what);
/* Appends to a bounded text; keeps the length right when it no longer fits. */
__attribute__((format(printf, 4, 5))) int ds_append(char *out, size_t size, int at, const char *format, ...);
