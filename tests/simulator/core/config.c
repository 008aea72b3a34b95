/* Switches and counters: values the tests set and read.  No device state. */
#include "core.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

struct named {
  const char *name;
  long value;
  const char *text;
};

static const struct named switches[] = {
#define SWITCH(name, value, text) {#name, value, text},
#include "switches.def"
#undef SWITCH
};
static const struct named counters[] = {
#define COUNTER(name, text) {#name, 0, text},
#include "counters.def"
#undef COUNTER
};

static atomic_long switch_values[DS_SWITCH_COUNT];
static atomic_long counter_values[DS_COUNTER_COUNT];
static pthread_once_t loaded = PTHREAD_ONCE_INIT;
static atomic_bool forked;

static void after_fork(void) { atomic_store(&forked, true); }

const char *ds_text(const char *name) {
  char key[80] = "DEVSIM_";
  size_t at = strlen(key);
  for (; *name && at + 1 < sizeof key; name++)
    key[at++] = (*name >= 'a' && *name <= 'z') ? (char)(*name - 32) : *name;
  key[at] = 0;
  const char *value = getenv(key);
  return value ? value : "";
}

static void load(void) {
  for (int i = 0; i < DS_SWITCH_COUNT; i++) {
    const char *text = ds_text(switches[i].name);
    atomic_store(&switch_values[i], *text ? strtol(text, NULL, 0) : switches[i].value);
  }
  pthread_atfork(NULL, NULL, after_fork);
}

long ds_switch(enum ds_switch s) {
  pthread_once(&loaded, load);
  return atomic_load(&switch_values[s]);
}

bool ds_switch_set(const char *name, long value) {
  pthread_once(&loaded, load);
  for (int i = 0; i < DS_SWITCH_COUNT; i++)
    if (!strcmp(name, switches[i].name)) {
      atomic_store(&switch_values[i], value);
      return true;
    }
  return false;
}

bool ds_listed(const char *list, const char *word) {
  size_t n = strlen(word);
  for (const char *at = list; *at;) {
    size_t len = strcspn(at, ",");
    if (len == n && !strncmp(at, word, n))
      return true;
    at += len + (at[len] == ',');
  }
  return false;
}

int ds_append(char *out, size_t size, int at, const char *format, ...) {
  va_list list;
  va_start(list, format);
  bool fits = at >= 0 && (size_t)at < size;
  int n = vsnprintf(fits ? out + at : NULL, fits ? size - (size_t)at : 0, format, list);
  va_end(list);
  return at + n;
}

int ds_switches_json(char *out, size_t size) {
  int at = ds_append(out, size, 0, "{");
  for (int i = 0; i < DS_SWITCH_COUNT; i++)
    at = ds_append(out, size, at, "%s\"%s\": {\"value\": %ld, \"default\": %ld, \"text\": \"%s\"}", i ? ", " : "",
                   switches[i].name, ds_switch((enum ds_switch)i), switches[i].value, switches[i].text);
  return ds_append(out, size, at, "}");
}

void ds_count(enum ds_counter c, long delta) { atomic_fetch_add(&counter_values[c], delta); }

long ds_counter(enum ds_counter c) { return atomic_load(&counter_values[c]); }

int ds_counters_json(char *out, size_t size) {
  int at = ds_append(out, size, 0, "{");
  for (int i = 0; i < DS_COUNTER_COUNT; i++)
    at = ds_append(out, size, at, "%s\"%s\": %ld", i ? ", " : "", counters[i].name, ds_counter((enum ds_counter)i));
  return ds_append(out, size, at, "}");
}

int ds_counter_by_name(const char *name, long *value) {
  for (int i = 0; i < DS_COUNTER_COUNT; i++)
    if (!strcmp(name, counters[i].name)) {
      *value = ds_counter((enum ds_counter)i);
      return 0;
    }
  return -1;
}

uint64_t ds_now_us(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
}

void ds_sleep_us(long us) {
  if (us <= 0)
    return;
  struct timespec left = {us / 1000000, (us % 1000000) * 1000};
  while (nanosleep(&left, &left) != 0)
    ;
}

uint64_t ds_unique(void) {
  static atomic_ulong last;
  return atomic_fetch_add(&last, 1) + 1;
}

void ds_random(void *out, size_t n) {
  if (getrandom(out, n, 0) != (ssize_t)n)
    abort();
}

void ds_wild(const char *what) {
  if (!ds_switch(DS_wild_crash))
    return;
  fprintf(stderr, "devsim: no such %s; a driver would follow the pointer and crash\n", what);
  ds_act((struct ds_fault){DS_SEGV, 0});
}

bool ds_forked(void) { return atomic_load(&forked); }
