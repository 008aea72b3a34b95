/* Memory pools: one sparse file each, allocations are offsets in it.  An exported
 * pool is that file's fd; an exported pointer is its offset and length. */
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct ds_pool {
  struct ds_pool *next;
  struct ds_block *block;
  struct ds_device *device;
  uint64_t start, limit;
  unsigned handle_types;
  bool imported, destroyed, exported;
  int live;
  uint64_t used, used_high, reserved, reserved_high, threshold;
  unsigned access[16];
};

struct pointer {
  uint32_t magic, spare;
  uint8_t pool[16];
  uint64_t offset, bytes;
  uint8_t noise[24];
};
_Static_assert(sizeof(struct pointer) == DS_HANDLE_BYTES, "pointer export size");
enum { POINTER_MAGIC = 0x70747231 };

static struct ds_pool *pools;
static struct ds_pool *retired; /* kept, so that a stale handle is told from a wild one */
static struct ds_pool *defaults[16];

static uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

static bool listed(const struct ds_pool *list, const struct ds_pool *pool) {
  while (list && list != pool)
    list = list->next;
  return list != NULL;
}

/* Caller holds the lock. */
static bool valid(const struct ds_pool *pool) {
  if (listed(pools, pool))
    return !pool->destroyed;
  if (!listed(retired, pool))
    ds_wild("memory pool");
  return false;
}

/* What the pool keeps from the device: what is used, and beyond it up to its threshold. */
static void account(struct ds_pool *pool, uint64_t keep) {
  uint64_t needed = round_up(pool->used, DS_POOL_CHUNK);
  if (pool->handle_types)
    keep = UINT64_MAX; /* what was shared once stays until the pool goes */
  uint64_t kept = pool->reserved < keep ? pool->reserved : keep;
  pool->reserved = needed > kept ? needed : kept;
  if (pool->used > pool->used_high)
    pool->used_high = pool->used;
  if (pool->reserved > pool->reserved_high)
    pool->reserved_high = pool->reserved;
  if (!pool->imported)
    atomic_store(&pool->block->header->used, pool->reserved);
}

static enum ds_status adopt(struct ds_block *block, bool imported, struct ds_pool **out) {
  struct ds_pool *pool = calloc(1, sizeof *pool);
  uint64_t start = pool ? ds_reserve(block->bytes, DS_POOL_CHUNK, 0) : 0;
  if (!start) {
    free(pool);
    return DS_NOMEM;
  }
  pool->block = block;
  pool->device = block->device;
  pool->start = start;
  pool->limit = block->bytes;
  pool->handle_types = block->header->handle_types;
  pool->imported = imported;
  pool->access[block->device->index] = DS_READ | DS_WRITE;
  pool->next = pools;
  pools = pool;
  *out = pool;
  return DS_OK;
}

static enum ds_status pool_new(struct ds_device *device, uint64_t max_bytes, unsigned types, struct ds_pool **out) {
  struct ds_block *block = NULL;
  uint64_t limit = max_bytes ? round_up(max_bytes, DS_POOL_CHUNK) : device->memory / DS_POOL_CHUNK * DS_POOL_CHUNK;
  if (limit > device->memory)
    return DS_INVALID;
  enum ds_status status = ds_block_new(device, DS_FILE_POOL, limit, &block);
  if (status != DS_OK)
    return status;
  block->header->handle_types = types;
  status = adopt(block, false, out);
  if (status != DS_OK)
    ds_block_drop(block);
  return status;
}

enum ds_status ds_pool_new(struct ds_device *device, uint64_t max_bytes, unsigned types, struct ds_pool **out) {
  ds_lock();
  enum ds_status status = pool_new(device, max_bytes, types, out);
  ds_unlock();
  if (status == DS_OK)
    ds_count(DS_C_live_pools, 1);
  return status;
}

enum ds_status ds_pool_default(struct ds_device *device, struct ds_pool **out) {
  enum ds_status status = DS_OK;
  ds_lock();
  if (!defaults[device->index])
    status = pool_new(device, 0, 0, &defaults[device->index]);
  *out = defaults[device->index];
  ds_unlock();
  return status;
}

static void settle(struct ds_pool *pool) {
  if (!pool->destroyed || pool->live)
    return;
  struct ds_pool **link = &pools;
  while (*link != pool)
    link = &(*link)->next;
  *link = pool->next;
  ds_unreserve(pool->start);
  ds_block_drop(pool->block);
  pool->next = retired;
  retired = pool;
}

enum ds_status ds_pool_destroy(struct ds_pool *pool) {
  ds_lock();
  bool good = valid(pool) && pool != defaults[pool->device->index];
  if (good) {
    pool->destroyed = true;
    if (!pool->imported)
      atomic_store(&pool->block->header->freed, 1);
    settle(pool);
    ds_count(DS_C_live_pools, -1);
  }
  ds_unlock();
  return good ? DS_OK : DS_INVALID;
}

/* First gap between the pool's live ranges; caller holds the lock. */
static uint64_t gap(const struct ds_pool *pool, uint64_t bytes) {
  uint64_t at = pool->start, end = pool->start + pool->limit;
  while (at + bytes <= end) {
    struct ds_range *next = ds_find_next(at);
    if (!next || next->start >= end || next->start - at >= bytes)
      return at;
    at = next->start + round_up(next->bytes, DS_SMALL_ALIGN);
  }
  return 0;
}

static enum ds_status place(struct ds_pool *pool, void *owner, uint64_t start, uint64_t bytes, uint64_t *out) {
  struct ds_range range = {.kind = pool->imported ? DS_POOL_IMPORT : DS_POOL, .start = start, .bytes = bytes,
                           .block = pool->block, .offset = start - pool->start, .device = pool->device,
                           .owner = owner, .handle_types = pool->imported ? 0 : pool->handle_types, .parent = pool,
                           .opens = 1};
  range.map_start = start / DS_POOL_CHUNK * DS_POOL_CHUNK;
  range.map_bytes = round_up(start + bytes - range.map_start, DS_POOL_CHUNK);
  memcpy(range.access, pool->access, sizeof range.access);
  if (!ds_range_add(&range))
    return DS_NOMEM;
  pool->live++;
  ds_count(DS_C_live_pool_pointers, 1);
  *out = start;
  return DS_OK;
}

enum ds_status ds_pool_alloc(struct ds_pool *pool, void *owner, uint64_t bytes, uint64_t *out) {
  ds_lock();
  enum ds_status status = !valid(pool) || pool->imported ? DS_INVALID : DS_OK;
  uint64_t size = round_up(bytes, DS_SMALL_ALIGN), start = 0;
  if (status == DS_OK && !bytes) {
    ds_unlock();
    *out = 0;
    return DS_OK;
  }
  if (status == DS_OK && !(size <= pool->limit && (start = gap(pool, size))))
    status = DS_NOMEM;
  if (status == DS_OK && (status = place(pool, owner, start, bytes, out)) == DS_OK) {
    pool->used += size;
    account(pool, UINT64_MAX);
  }
  ds_unlock();
  return status;
}

/* Takes the pointer for a free that a stream will carry out: a second one is refused. */
enum ds_status ds_can_free_later(uint64_t start) {
  ds_lock();
  struct ds_range *range = ds_find(start);
  bool kind = range && (range->kind == DS_POOL || range->kind == DS_POOL_IMPORT || range->kind == DS_CLASSIC);
  bool good = kind && range->start == start && !range->freeing;
  if (good)
    range->freeing = true;
  ds_unlock();
  return good ? DS_OK : DS_INVALID;
}

static void give_pages_back(struct ds_pool *pool, uint64_t offset, uint64_t bytes) {
  uint64_t first = round_up(offset, DS_PAGE), end = (offset + bytes) / DS_PAGE * DS_PAGE;
  if (ds_switch(DS_poison_freed))
    memset(pool->block->data + offset, 0xdb, bytes);
  else if (end > first && !pool->threshold && !pool->handle_types)
    fallocate(pool->block->fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(DS_PAGE + first),
              (off_t)(end - first));
}

enum ds_status ds_pool_free(uint64_t start) {
  ds_lock();
  struct ds_range *range = ds_find(start);
  bool good = range && range->start == start && (range->kind == DS_POOL || range->kind == DS_POOL_IMPORT);
  if (good) {
    struct ds_pool *pool = range->parent;
    if (pool->imported) {
      ds_count(DS_C_live_mappings, -1);
      ds_count(DS_C_closes, 1);
    } else {
      pool->used -= round_up(range->bytes, DS_SMALL_ALIGN);
      give_pages_back(pool, range->offset, range->bytes);
      account(pool, pool->threshold);
    }
    ds_count(DS_C_live_pool_pointers, -1);
    ds_range_remove(range);
    pool->live--;
    settle(pool);
  }
  ds_unlock();
  return good ? DS_OK : DS_INVALID;
}

enum ds_status ds_pool_trim(struct ds_pool *pool, uint64_t keep) {
  ds_lock();
  bool good = valid(pool);
  if (good)
    account(pool, keep);
  ds_unlock();
  return good ? DS_OK : DS_INVALID;
}

enum ds_status ds_pool_value(struct ds_pool *pool, enum ds_pool_value which, uint64_t *value, bool set) {
  ds_lock();
  bool good = valid(pool);
  if (good) {
    uint64_t *places[] = {&pool->reserved, &pool->reserved_high, &pool->used, &pool->used_high, &pool->threshold};
    bool high = which == DS_POOL_RESERVED_HIGH || which == DS_POOL_USED_HIGH;
    if (set && high && *value == 0)
      *places[which] = *places[which - 1];
    else if (set && which == DS_POOL_THRESHOLD)
      *places[which] = *value;
    else
      good = !set;
    if (!set)
      *value = *places[which];
  }
  ds_unlock();
  return good ? DS_OK : DS_INVALID;
}

enum ds_status ds_pool_access(struct ds_pool *pool, struct ds_device *device, unsigned *access, bool set) {
  ds_lock();
  enum ds_status status = !valid(pool) ? DS_INVALID : !ds_peer(pool->device, device) ? DS_NO_PEER : DS_OK;
  if (status == DS_OK && set && device == pool->device && !*access)
    status = DS_BAD_DEVICE; /* its own device always has it */
  if (status == DS_OK && set) {
    pool->access[device->index] = *access;
    for (struct ds_range *at = ds_find_next(pool->start); at && at->start < pool->start + pool->limit;
         at = ds_find_next(at->start + at->bytes))
      at->access[device->index] = *access;
  } else if (status == DS_OK) {
    *access = pool->access[device->index];
  }
  ds_unlock();
  return status;
}

enum ds_status ds_pool_export(struct ds_pool *pool, int *fd) {
  ds_lock();
  enum ds_status status = valid(pool) && !pool->imported && (pool->handle_types & 1) ? DS_OK : DS_INVALID;
  if (status == DS_OK && (*fd = fcntl(pool->block->fd, F_DUPFD_CLOEXEC, 3)) < 0)
    status = DS_OS;
  if (status == DS_OK)
    pool->exported = true;
  ds_unlock();
  if (status == DS_OK)
    ds_count(DS_C_exports, 1);
  return status;
}

enum ds_status ds_pool_import(int fd, struct ds_pool **out) {
  struct ds_block *block = NULL;
  int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (own < 0)
    return errno == EMFILE ? DS_OS : DS_UNKNOWN;
  ds_lock();
  enum ds_status status = ds_block_from_fd(own, DS_FILE_POOL, &block);
  if (status != DS_OK) {
    close(own);
  } else if ((status = adopt(block, true, out)) != DS_OK) {
    ds_block_drop(block);
  }
  ds_unlock();
  if (status != DS_OK)
    return status;
  if (ds_switch(DS_fd_mode) == 1)
    close(fd);
  ds_count(DS_C_live_pools, 1);
  ds_count(DS_C_opens, 1);
  return DS_OK;
}

enum ds_status ds_pool_export_pointer(uint64_t address, uint8_t out[DS_HANDLE_BYTES]) {
  ds_lock();
  struct ds_range *range = ds_find(address);
  bool good = range && range->kind == DS_POOL && range->start == address && (range->handle_types & 1) &&
              ((struct ds_pool *)range->parent)->exported;
  if (good) {
    struct pointer pointer = {.magic = POINTER_MAGIC, .offset = range->offset, .bytes = range->bytes};
    memcpy(pointer.pool, range->block->header->id, sizeof pointer.pool);
    if (ds_switch(DS_handle_random))
      ds_random(pointer.noise, sizeof pointer.noise);
    memcpy(out, &pointer, sizeof pointer);
    ds_count(DS_C_exports, 1);
  }
  ds_unlock();
  return good ? DS_OK : DS_INVALID;
}

enum ds_status ds_pool_import_pointer(struct ds_pool *pool, const uint8_t handle[DS_HANDLE_BYTES], uint64_t *out) {
  struct pointer pointer;
  memcpy(&pointer, handle, sizeof pointer);
  ds_lock();
  bool good = valid(pool) && pool->imported && pointer.magic == POINTER_MAGIC &&
              !memcmp(pointer.pool, pool->block->header->id, sizeof pointer.pool) && pointer.bytes &&
              pointer.offset <= pool->limit && pointer.bytes <= pool->limit - pointer.offset;
  enum ds_status status = good ? DS_OK : DS_INVALID;
  struct ds_range *open = good ? ds_find(pool->start + pointer.offset) : NULL;
  if (open && ds_switch(DS_second_open) == 1)
    status = DS_ALREADY_MAPPED;
  else if (open)
    *out = open->start; /* one mapping: the first free ends it for both */
  else if (good && (status = place(pool, NULL, pool->start + pointer.offset, pointer.bytes, out)) == DS_OK) {
    ds_count(DS_C_live_mappings, 1);
    ds_count(DS_C_driver_opens, 1);
  }
  ds_unlock();
  if (status == DS_OK)
    ds_count(DS_C_opens, 1);
  return status;
}

struct ds_device *ds_pool_device(struct ds_pool *pool) {
  ds_lock();
  struct ds_device *device = valid(pool) ? pool->device : NULL;
  ds_unlock();
  return device;
}

unsigned ds_pool_handle_types(struct ds_pool *pool) {
  ds_lock();
  unsigned types = valid(pool) ? pool->handle_types : 0;
  ds_unlock();
  return types;
}
