/* What the parts of the CUDA front share: the export macro, contexts, result codes. */
#pragma once

#include "../core/stream.h"
#include "abi.h"

/* Puts a call into the table from which names are resolved. */
#define LISTED(base_, since_, name_)                                                           \
  static struct ds_call name_##_call = {#base_, #name_, since_, (void *)name_, 0, 0};          \
  static struct ds_call *name_##_entry __attribute__((used, section("devsim_calls"))) = &name_##_call

/* Defines an exported driver call: counted, traced, open to faults, resolved by name and version. */
#define API(base_, since_, name_, parameters, arguments)                                       \
  static int name_##_body parameters;                                                          \
  DS_EXPORT int name_ parameters;                                                              \
  LISTED(base_, since_, name_);                                                                \
  int name_ parameters {                                                                       \
    int code = ds_enter(&name_##_call);                                                        \
    if (code == DS_PROCEED)                                                                    \
      code = name_##_body arguments;                                                           \
    return ds_leave(&name_##_call, code);                                                      \
  }                                                                                            \
  static int name_##_body parameters

struct context {
  struct context *next;
  struct ds_device *device;
  unsigned flags;
  bool primary, dead;
  int retained;                    /* primary contexts */
  unsigned peers;                  /* devices whose memory it may reach */
  uint64_t id;
  struct ds_stream *_Atomic legacy, *_Atomic per_thread;
};

#define TRY(expression)          \
  do {                           \
    int code_ = (expression);    \
    if (code_ != CU_OK)          \
      return code_;              \
  } while (0)

int cu_code(enum ds_status status, const struct ds_device *device);
int cu_initialized(void);
int cu_demanded(void);                        /* whether a switch demands a context where hardware does not */
int cu_current(struct context **out);         /* the live current context, or why there is none */
int cu_device(int ordinal, struct ds_device **out);
struct context *cu_primary(struct ds_device *device);
struct context *cu_current_or_null(void);
int cu_current_even_dead(struct context **out);
void cu_settle(void *owner);                  /* blocks as a free does: for value waits and an owner's queued work */
bool cu_context_exists(const struct context *context);
int cu_stream(CUstream handle, struct ds_stream **out); /* default handles resolved, existence checked */
int cu_not_capturing(void);                   /* refuses what an active capture forbids, breaking it */
int cu_no_capture_in(struct context *context); /* refuses whatever the captures' modes are */
bool cu_capturing(struct ds_stream *stream, int *code); /* true: only record; *code is the result */
bool cu_copy_waits(const struct ds_copy *copy); /* host to host: it blocks its caller */
