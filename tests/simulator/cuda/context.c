/* Contexts: primary ones per device, created ones, and each thread's stack. */
#include "front.h"

#include <stdlib.h>

enum { DEPTH = 64 };
static _Thread_local struct context *stack[DEPTH];
static _Thread_local int depth;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct context *contexts;
static struct context *primaries[16];

static struct context *context_new(struct ds_device *device, unsigned flags, bool primary) {
  struct context *context = calloc(1, sizeof *context);
  if (!context)
    abort();
  context->device = device;
  context->flags = flags;
  context->primary = primary;
  context->dead = primary; /* alive once retained */
  context->id = ds_unique();
  context->next = contexts;
  contexts = context;
  if (!primary)
    ds_count(DS_C_live_contexts, 1);
  return context;
}

struct context *cu_primary(struct ds_device *device) {
  pthread_mutex_lock(&lock);
  struct context **place = &primaries[device->index];
  if (!*place)
    *place = context_new(device, 0, true);
  struct context *context = *place;
  pthread_mutex_unlock(&lock);
  return context;
}

bool cu_context_exists(const struct context *wanted) {
  pthread_mutex_lock(&lock);
  const struct context *at = contexts;
  while (at && at != wanted)
    at = at->next;
  pthread_mutex_unlock(&lock);
  return at != NULL;
}

static struct context *any_live(void) {
  pthread_mutex_lock(&lock);
  struct context *at = contexts;
  while (at && at->dead)
    at = at->next;
  pthread_mutex_unlock(&lock);
  return at;
}

struct context *cu_current_or_null(void) {
  if (depth)
    return stack[depth - 1];
  return ds_switch(DS_need_context) ? NULL : any_live();
}

int cu_current_even_dead(struct context **out) {
  TRY(cu_initialized());
  *out = cu_current_or_null();
  return *out ? CU_OK : CU_INVALID_CONTEXT;
}

int cu_current(struct context **out) {
  TRY(cu_current_even_dead(out));
  if ((*out)->dead)
    return CU_CONTEXT_IS_DESTROYED;
  return atomic_load(&(*out)->device->lost);
}

int cu_demanded(void) {
  struct context *unused = NULL;
  TRY(cu_initialized());
  return ds_switch(DS_need_context) > 1 ? cu_current(&unused) : CU_OK;
}

static void end(struct context *context) {
  if (!atomic_load(&context->device->lost))
    ds_sync_owner(context);
  context->dead = true;
  ds_destroy_events(context);
  ds_destroy_streams(context);
  atomic_store(&context->legacy, NULL);
  atomic_store(&context->per_thread, NULL);
  ds_free_owner(context);
  ds_count(DS_C_live_contexts, -1);
}

API(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain, (CUcontext *out, CUdevice ordinal), (out, ordinal)) {
  struct ds_device *device = NULL;
  TRY(cu_device(ordinal, &device));
  if (!out)
    return CU_INVALID_VALUE;
  TRY(cu_code(ds_device_claim(device), device));
  struct context *context = cu_primary(device);
  pthread_mutex_lock(&lock);
  if (context->retained++ == 0) {
    context->dead = false;
    ds_count(DS_C_live_contexts, 1);
  }
  pthread_mutex_unlock(&lock);
  *out = context;
  return CU_OK;
}

static int release_primary(CUdevice ordinal, bool all) {
  struct ds_device *device = NULL;
  TRY(cu_device(ordinal, &device));
  struct context *context = cu_primary(device);
  pthread_mutex_lock(&lock);
  bool was_live = context->retained > 0;
  if (was_live)
    context->retained = all ? 0 : context->retained - 1;
  bool last = was_live && context->retained == 0;
  pthread_mutex_unlock(&lock);
  if (last)
    end(context);
  return was_live || all ? CU_OK : CU_INVALID_CONTEXT;
}

API(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2, (CUdevice device), (device)) {
  return release_primary(device, false);
}

API(cuDevicePrimaryCtxReset, 11000, cuDevicePrimaryCtxReset_v2, (CUdevice device), (device)) {
  return release_primary(device, true);
}

API(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState, (CUdevice ordinal, unsigned *flags, int *active),
    (ordinal, flags, active)) {
  struct ds_device *device = NULL;
  TRY(cu_device(ordinal, &device));
  if (!flags || !active)
    return CU_INVALID_VALUE;
  struct context *context = cu_primary(device);
  *flags = context->flags;
  *active = context->retained > 0;
  return CU_OK;
}

API(cuDevicePrimaryCtxSetFlags, 11000, cuDevicePrimaryCtxSetFlags_v2, (CUdevice ordinal, unsigned flags),
    (ordinal, flags)) {
  struct ds_device *device = NULL;
  TRY(cu_device(ordinal, &device));
  if (flags > 0xff)
    return CU_INVALID_VALUE;
  cu_primary(device)->flags = flags;
  return CU_OK;
}

static int create(CUcontext *out, unsigned flags, CUdevice ordinal) {
  struct ds_device *device = NULL;
  TRY(cu_device(ordinal, &device));
  if (!out || flags > 0xff)
    return CU_INVALID_VALUE;
  TRY(cu_code(ds_device_claim(device), device));
  if (depth == DEPTH)
    return CU_OUT_OF_MEMORY;
  pthread_mutex_lock(&lock);
  *out = context_new(device, flags, false);
  pthread_mutex_unlock(&lock);
  stack[depth++] = *out;
  return CU_OK;
}

API(cuCtxCreate, 3020, cuCtxCreate_v2, (CUcontext *out, unsigned flags, CUdevice device), (out, flags, device)) {
  return create(out, flags, device);
}

API(cuCtxCreate, 11040, cuCtxCreate_v3, (CUcontext *out, void *affinity, int n, unsigned flags, CUdevice device),
    (out, affinity, n, flags, device)) {
  return affinity || n ? CU_NOT_SUPPORTED : create(out, flags, device);
}

API(cuCtxCreate, 12050, cuCtxCreate_v4, (CUcontext *out, void *parameters, unsigned flags, CUdevice device),
    (out, parameters, flags, device)) {
  (void)parameters;
  return create(out, flags, device);
}

API(cuCtxDestroy, 4000, cuCtxDestroy_v2, (CUcontext context), (context)) {
  TRY(cu_initialized());
  if (!context)
    return CU_INVALID_VALUE;
  if (!cu_context_exists(context) || context->primary || context->dead)
    return CU_INVALID_CONTEXT;
  end(context);
  if (depth && stack[depth - 1] == context)
    depth--;
  return CU_OK;
}

static int check(CUcontext context) {
  if (!cu_context_exists(context))
    return CU_INVALID_CONTEXT;
  return context->dead ? CU_CONTEXT_IS_DESTROYED : CU_OK;
}

API(cuCtxSetCurrent, 4000, cuCtxSetCurrent, (CUcontext context), (context)) {
  TRY(cu_initialized());
  if (!context) {
    depth -= depth > 0;
    return CU_OK;
  }
  TRY(check(context));
  if (!depth)
    depth = 1;
  stack[depth - 1] = context;
  return CU_OK;
}

API(cuCtxGetCurrent, 4000, cuCtxGetCurrent, (CUcontext *out), (out)) {
  TRY(cu_initialized());
  if (!out)
    return CU_INVALID_VALUE;
  *out = depth ? stack[depth - 1] : NULL;
  return CU_OK;
}

API(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2, (CUcontext context), (context)) {
  TRY(cu_initialized());
  if (!context)
    return CU_INVALID_VALUE;
  TRY(check(context));
  if (depth == DEPTH)
    return CU_OUT_OF_MEMORY;
  stack[depth++] = context;
  return CU_OK;
}

API(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2, (CUcontext *out), (out)) {
  TRY(cu_initialized());
  if (!depth)
    return CU_INVALID_CONTEXT;
  depth--;
  if (out)
    *out = stack[depth];
  return CU_OK;
}

API(cuCtxGetDevice, 2000, cuCtxGetDevice, (CUdevice *out), (out)) {
  struct context *context = NULL;
  TRY(cu_current_even_dead(&context));
  if (!out)
    return CU_INVALID_VALUE;
  *out = context->device->index;
  return CU_OK;
}

API(cuCtxGetDevice, 13000, cuCtxGetDevice_v2, (CUdevice *out, CUcontext context), (out, context)) {
  if (!context)
    TRY(cu_current_even_dead(&context));
  if (!cu_context_exists(context))
    return CU_INVALID_CONTEXT;
  if (!out)
    return CU_INVALID_VALUE;
  *out = context->device->index;
  return CU_OK;
}

API(cuCtxGetFlags, 7000, cuCtxGetFlags, (unsigned *flags), (flags)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (!flags)
    return CU_INVALID_VALUE;
  *flags = context->flags;
  return CU_OK;
}

API(cuCtxGetId, 12000, cuCtxGetId, (CUcontext context, uint64_t *id), (context, id)) {
  if (!context)
    TRY(cu_current(&context));
  TRY(check(context));
  *id = context->id;
  return CU_OK;
}

API(cuCtxGetApiVersion, 3020, cuCtxGetApiVersion, (CUcontext context, unsigned *version), (context, version)) {
  if (!context)
    TRY(cu_current(&context));
  TRY(check(context));
  *version = 3020;
  return CU_OK;
}

static int synchronize(struct context *context) {
  TRY(cu_no_capture_in(context));
  return cu_code(ds_sync_owner(context), context->device);
}

API(cuCtxSynchronize, 2000, cuCtxSynchronize, (void), ()) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  return synchronize(context);
}

API(cuCtxSynchronize, 13000, cuCtxSynchronize_v2, (CUcontext context), (context)) {
  if (!context)
    TRY(cu_current(&context));
  TRY(check(context));
  return synchronize(context);
}

API(cuCtxGetStreamPriorityRange, 5050, cuCtxGetStreamPriorityRange, (int *least, int *greatest), (least, greatest)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (least)
    *least = 0;
  if (greatest)
    *greatest = -5;
  return CU_OK;
}

API(cuCtxEnablePeerAccess, 4000, cuCtxEnablePeerAccess, (CUcontext peer, unsigned flags), (peer, flags)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (flags)
    return CU_INVALID_VALUE;
  TRY(check(peer));
  if (peer->device == context->device || !ds_peer(context->device, peer->device))
    return CU_PEER_UNSUPPORTED;
  if (context->peers & (1u << peer->device->index))
    return CU_PEER_ALREADY_ENABLED;
  context->peers |= 1u << peer->device->index;
  return CU_OK;
}

API(cuCtxDisablePeerAccess, 4000, cuCtxDisablePeerAccess, (CUcontext peer), (peer)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  TRY(check(peer));
  if (!(context->peers & (1u << peer->device->index)))
    return CU_PEER_NOT_ENABLED;
  context->peers &= ~(1u << peer->device->index);
  return CU_OK;
}
