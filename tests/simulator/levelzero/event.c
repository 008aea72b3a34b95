/* Event pools and events. An event is one word in its pool's memory, which other processes may share: set or not. It
 * is set by a device or a host, and stays set until somebody resets it. A new one is not set. */
#include "front.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SLOT = 64, MOST = 1 << 20 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ze_event_pool *pools;
static struct ze_event *events;

static bool has_pool(const struct ze_event_pool *wanted) {
  pthread_mutex_lock(&lock);
  const struct ze_event_pool *at = pools;
  while (at && at != wanted)
    at = at->next;
  pthread_mutex_unlock(&lock);
  return at != NULL;
}

static int add_pool(struct ds_block *block, uint32_t count, uint32_t flags, bool imported, struct ze_event_pool **out) {
  struct ze_event_pool *pool = calloc(1, sizeof *pool);
  if (!pool) {
    ds_block_drop(block);
    return ZE_OUT_OF_HOST_MEMORY;
  }
  pool->block = block;
  pool->count = count;
  pool->flags = flags;
  pool->imported = imported;
  pool->export_fd = -1;
  pthread_mutex_lock(&lock);
  pool->next = pools;
  pools = pool;
  pthread_mutex_unlock(&lock);
  ds_count(DS_C_live_pools, 1);
  *out = pool;
  return ZE_OK;
}

API(zeEventPoolCreate, ZE_API,
    (struct ze_context *context, const ze_pool_desc *desc, uint32_t devices, struct ds_device **list,
     struct ze_event_pool **out),
    (context, desc, devices, list, out)) {
  struct ds_block *block = NULL;
  TRY(ze_context_check(context));
  if (!desc->count && ds_switch(DS_count_zero_abort))
    ds_act((struct ds_fault){DS_ABORT, 0});
  if (!desc->count || desc->count > MOST)
    return ZE_INVALID_SIZE;
  if (desc->flags & ZE_POOL_IPC && !ds_switch(DS_ipc_events))
    return ZE_UNSUPPORTED;
  long limit = ds_switch(DS_event_limit);
  if (desc->flags & ZE_POOL_IPC && limit && ds_counter(DS_C_live_ipc_events) + (long)desc->count > limit)
    return ZE_OUT_OF_DEVICE_MEMORY;
  struct ds_device *device = devices && list ? list[0] : ze_any_device();
  TRY(ze_device_check(device));
  TRY(ze_code(ds_block_new(device, DS_FILE_EVENT, (uint64_t)desc->count * SLOT, &block), device));
  if (desc->flags & ZE_POOL_IPC)
    ds_count(DS_C_live_ipc_events, (long)desc->count);
  return add_pool(block, desc->count, desc->flags, false, out);
}

static void close_export(struct ze_event_pool *pool) {
  if (pool->export_fd >= 0)
    close(ds_hold_fd(pool->export_fd, -1));
  ds_count(DS_C_unreturned_handles, -pool->exports);
  pool->export_fd = -1;
  pool->exports = 0;
}

static int end_pool(struct ze_event_pool *pool, bool imported) {
  if (!has_pool(pool)) {
    ds_wild("event pool");
    return ZE_INVALID_ARGUMENT;
  }
  if (pool->imported != imported)
    return ZE_INVALID_ARGUMENT;
  pthread_mutex_lock(&lock);
  bool used = pool->events != 0;
  struct ze_event_pool **link = &pools;
  while (*link != pool)
    link = &(*link)->next;
  if (!used)
    *link = pool->next;
  pthread_mutex_unlock(&lock);
  if (used)
    return ZE_IN_USE;
  close_export(pool);
  if (!imported && pool->flags & ZE_POOL_IPC)
    ds_count(DS_C_live_ipc_events, -(long)pool->count);
  ds_block_drop(pool->block);
  free(pool);
  ds_count(DS_C_live_pools, -1);
  return ZE_OK;
}

API(zeEventPoolDestroy, ZE_API, (struct ze_event_pool *pool), (pool)) { return end_pool(pool, false); }
API(zeEventPoolCloseIpcHandle, ZE_API, (struct ze_event_pool *pool), (pool)) { return end_pool(pool, true); }

API(zeEventPoolGetIpcHandle, ZE_API, (struct ze_event_pool *pool, ze_handle64 *out), (pool, out)) {
  if (!has_pool(pool))
    return ZE_INVALID_ARGUMENT;
  if (!(pool->flags & ZE_POOL_IPC) || pool->imported || !ds_switch(DS_ipc_events))
    return ZE_UNSUPPORTED;
  pthread_mutex_lock(&lock);
  if (pool->export_fd < 0 && (pool->export_fd = fcntl(pool->block->fd, F_DUPFD_CLOEXEC, 3)) >= 0)
    ds_hold_fd(pool->export_fd, 1);
  bool good = pool->export_fd >= 0;
  pool->exports += good;
  pthread_mutex_unlock(&lock);
  if (!good)
    return ZE_OUT_OF_HOST_MEMORY;
  uint64_t fd = (uint64_t)pool->export_fd;
  ze_pool_handle handle = {fd, fd, pool->count, (uint32_t)getpid()};
  memset(out, 0, sizeof *out);
  memcpy(out, &handle, sizeof handle);
  ds_count(DS_C_unreturned_handles, 1);
  ds_count(DS_C_exports, 1);
  return ZE_OK;
}

API(zeEventPoolPutIpcHandle, ZE_API_6, (struct ze_context *context, ze_handle64 bytes), (context, bytes)) {
  ze_pool_handle handle;
  TRY(ze_context_check(context));
  memcpy(&handle, bytes.bytes, sizeof handle);
  pthread_mutex_lock(&lock);
  for (struct ze_event_pool *at = pools; at; at = at->next)
    if (at->export_fd >= 0 && (uint64_t)at->export_fd == handle.fd) {
      ds_count(DS_C_unreturned_handles, -1);
      if (--at->exports == 0)
        close_export(at);
      break;
    }
  pthread_mutex_unlock(&lock);
  return ZE_OK;
}

API(zeEventPoolOpenIpcHandle, ZE_API, (struct ze_context *context, ze_handle64 bytes, struct ze_event_pool **out),
    (context, bytes, out)) {
  ze_pool_handle handle;
  struct ds_block *block = NULL;
  int fd = -1;
  TRY(ze_context_check(context));
  if (!ds_switch(DS_ipc_events))
    return ZE_UNSUPPORTED;
  memcpy(&handle, bytes.bytes, sizeof handle);
  TRY(ze_take_fd(handle.fd, handle.fd_copy, handle.pid, &fd));
  enum ds_status status = ds_block_from_fd(fd, DS_FILE_EVENT, &block);
  if (status == DS_OK && (uint64_t)handle.count * SLOT > block->bytes) {
    ds_block_drop(block);
    return ZE_INVALID_ARGUMENT;
  }
  if (status != DS_OK) {
    close(fd);
    return ZE_INVALID_ARGUMENT;
  }
  ds_count(DS_C_opens, 1);
  return add_pool(block, handle.count, ZE_POOL_IPC, true, out);
}

/* ---- events ---- */
bool ze_event_exists(const struct ze_event *wanted) {
  pthread_mutex_lock(&lock);
  const struct ze_event *at = events;
  while (at && at != wanted)
    at = at->next;
  pthread_mutex_unlock(&lock);
  if (!at)
    ds_wild("event");
  return at != NULL;
}

_Atomic uint64_t *ze_event_word(const struct ze_event *event) {
  return (_Atomic uint64_t *)(event->pool->block->data + (uint64_t)event->index * SLOT);
}

bool ze_event_is_set(const struct ze_event *event) {
  return ds_switch(DS_event_ready) || atomic_load(ze_event_word(event));
}

API(zeEventCreate, ZE_API, (struct ze_event_pool *pool, const ze_event_desc *desc, struct ze_event **out),
    (pool, desc, out)) {
  if (!has_pool(pool) || desc->index >= pool->count)
    return ZE_INVALID_ARGUMENT;
  struct ze_event *event = calloc(1, sizeof *event);
  if (!event)
    return ZE_OUT_OF_HOST_MEMORY;
  event->pool = pool;
  event->index = desc->index;
  if (!pool->imported)
    atomic_store(ze_event_word(event), 0);
  pthread_mutex_lock(&lock);
  pool->events++;
  event->next = events;
  events = event;
  pthread_mutex_unlock(&lock);
  ds_count(DS_C_live_events, 1);
  *out = event;
  return ZE_OK;
}

API(zeEventDestroy, ZE_API, (struct ze_event *event), (event)) {
  if (!ze_event_exists(event))
    return ZE_INVALID_ARGUMENT;
  ds_sleep_us(ds_switch(DS_event_destroy_ms) * 1000);
  pthread_mutex_lock(&lock);
  struct ze_event **link = &events;
  while (*link != event)
    link = &(*link)->next;
  *link = event->next;
  event->pool->events--;
  pthread_mutex_unlock(&lock);
  free(event);
  ds_count(DS_C_live_events, -1);
  return ZE_OK;
}

static int set(struct ze_event *event, uint64_t value) {
  if (!ze_event_exists(event))
    return ZE_INVALID_ARGUMENT;
  atomic_store(ze_event_word(event), value);
  return ZE_OK;
}

API(zeEventHostSignal, ZE_API, (struct ze_event *event), (event)) { return set(event, 1); }
API(zeEventHostReset, ZE_API, (struct ze_event *event), (event)) { return set(event, 0); }

static int query(struct ze_event *event) {
  int lost = atomic_load(&event->pool->block->device->lost);
  return lost ? lost : ze_event_is_set(event) ? ZE_OK : ZE_NOT_READY;
}

API(zeEventQueryStatus, ZE_API, (struct ze_event *event), (event)) {
  return ze_event_exists(event) ? query(event) : ZE_INVALID_ARGUMENT;
}

API(zeEventHostSynchronize, ZE_API, (struct ze_event *event, uint64_t timeout_ns), (event, timeout_ns)) {
  uint64_t began = ds_now_us();
  int code = ZE_NOT_READY;
  while (ze_event_exists(event) && (code = query(event)) == ZE_NOT_READY) {
    if (timeout_ns != UINT64_MAX && ds_now_us() - began >= timeout_ns / 1000)
      break;
    ds_sleep_us(50);
  }
  return code;
}
