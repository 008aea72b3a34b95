/* What the parts of the Level Zero front share: the call macro, handles, addresses, result codes. */
#pragma once

#include "../core/stream.h"
#include "abi.h"

/* Defines a driver call: counted, traced, open to faults. The loader finds it through a table only. */
#define API(name_, since_, parameters, arguments)                                                \
  static int name_##_body parameters;                                                            \
  static int name_ parameters;                                                                   \
  static struct ds_call name_##_call = {#name_, #name_, since_, (void *)name_, 0, 0};            \
  static struct ds_call *name_##_entry __attribute__((used, section("devsim_calls"))) = &name_##_call; \
  static int name_ parameters {                                                                  \
    int code = ds_enter(&name_##_call);                                                          \
    if (code == DS_PROCEED)                                                                      \
      code = name_##_body arguments;                                                             \
    return ds_leave(&name_##_call, code);                                                        \
  }                                                                                              \
  static int name_##_body parameters

#define TRY(expression)          \
  do {                           \
    int code_ = (expression);    \
    if (code_ != ZE_OK)          \
      return code_;              \
  } while (0)

struct ze_context {
  struct ze_context *next;
};
struct ze_event_pool {
  struct ze_event_pool *next;
  struct ds_block *block;
  uint32_t count, flags;
  bool imported;
  int events, exports, export_fd;
};
struct ze_event {
  struct ze_event *next;
  struct ze_event_pool *pool;
  uint32_t index;
};

int ze_code(enum ds_status status, const struct ds_device *device);
int ze_started(void);
bool ze_is_driver(const void *driver);
int ze_context_check(const struct ze_context *context);
int ze_device_check(struct ds_device *device); /* exists, and is not lost */
struct ds_device *ze_any_device(void);

/* Addresses as programs see them: device memory lies above 2^63, unless a switch says otherwise. */
uint64_t ze_out(uint64_t address);
uint64_t ze_in(uint64_t address);
int ze_memory_type(const struct ds_range *range);
bool ze_mark(uint64_t start, uint64_t offset, int type);

/* ipc.c: fds of handles */
int ze_take_fd(uint64_t fd, uint64_t copy, uint32_t pid, int *out);
void ze_forget_exports(const struct ds_block *block, uint64_t offset); /* freeing does the missing puts */

/* device.c: the number of engine groups, and one of them */
uint32_t ze_group(uint32_t ordinal, ze_queue_group *out);

/* event.c */
_Atomic uint64_t *ze_event_word(const struct ze_event *event);
bool ze_event_exists(const struct ze_event *event);
bool ze_event_is_set(const struct ze_event *event);
