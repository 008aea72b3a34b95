/* What the parts of the HIP front share: the export macro, the place of a device, result codes. */
#pragma once

#include "../core/stream.h"
#include "abi.h"

/* Defines an exported call: counted, traced, open to faults, and remembered as the thread's last error. */
#define API(name_, parameters, arguments)                                                      \
  static int name_##_body parameters;                                                          \
  DS_EXPORT int name_ parameters;                                                              \
  static struct ds_call name_##_call = {#name_, #name_, 0, (void *)name_, 0, 0};               \
  static struct ds_call *name_##_entry __attribute__((used, section("devsim_calls"))) = &name_##_call; \
  int name_ parameters {                                                                       \
    int code = ds_enter(&name_##_call);                                                        \
    if (code == DS_PROCEED)                                                                    \
      code = name_##_body arguments;                                                           \
    return hip_note(ds_leave(&name_##_call, code));                                            \
  }                                                                                            \
  static int name_##_body parameters

/* A device as this process uses it. Events tell by their owner what they are. */
struct place {
  struct ds_device *device;
  struct ds_stream *_Atomic null_stream, *_Atomic per_thread;
  char plain_event, shared_event, imported_event;
};

#define TRY(expression)          \
  do {                           \
    int code_ = (expression);    \
    if (code_ != HIP_OK)         \
      return code_;              \
  } while (0)

int hip_note(int code);                           /* remembers a failure for hipGetLastError */
int hip_code(enum ds_status status, const struct ds_device *device);
int hip_device(int ordinal, struct ds_device **out); /* starts the runtime if need be */
int hip_place(struct place **out);                /* of the thread's device, unless that is lost */
int hip_stream(struct ds_stream *handle, struct ds_stream **out);
bool hip_capturing(struct ds_stream *stream, int *code); /* true: only record; *code is the result */
int hip_not_capturing(void);                      /* refuses what an active capture forbids, breaking it */
bool hip_is_buffer(uint64_t start);               /* mapped from external memory; the caller holds the lock */
bool hip_take_buffer(uint64_t pointer, uint64_t *start); /* forgets what was mapped there from external memory */
void hip_settle(void *owner);                     /* blocks as a free does */
