/* Classic allocations.  Small ones share a 2 MiB block, so exporting one exports its
 * neighbours; freeing gives the address back at once. */
#include "memory.h"
#include "stream.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { SMALL_MOST = 1 << 20, SLOTS = DS_BLOCK / DS_SMALL_ALIGN };

struct shared_block {
  struct shared_block *next;
  struct ds_block *block;
  uint64_t start;
  int live;
  uint8_t used[SLOTS];
};
static struct shared_block *shared_blocks;

/* First run of free slots, or -1. */
static int free_run(const struct shared_block *shared, int slots) {
  for (int at = 0, run = 0; at < SLOTS; at++) {
    run = shared->used[at] ? 0 : run + 1;
    if (run == slots)
      return at - slots + 1;
  }
  return -1;
}

static enum ds_status add_shared(struct ds_device *device, struct shared_block **out) {
  struct ds_block *block = NULL;
  enum ds_status status = ds_block_new(device, DS_FILE_CLASSIC, DS_BLOCK, &block);
  if (status != DS_OK)
    return status;
  struct shared_block *shared = calloc(1, sizeof *shared);
  uint64_t start = shared ? ds_reserve(DS_BLOCK, DS_BLOCK, 0) : 0;
  if (!start) {
    free(shared);
    ds_block_drop(block);
    return DS_NOMEM;
  }
  block->header->small = 1;
  shared->block = block;
  shared->start = start;
  shared->next = shared_blocks;
  shared_blocks = shared;
  *out = shared;
  return DS_OK;
}

static enum ds_status alloc_small(struct ds_range *range) {
  int slots = (int)((range->bytes + DS_SMALL_ALIGN - 1) / DS_SMALL_ALIGN), at = -1;
  struct shared_block *shared = shared_blocks;
  for (; shared; shared = shared->next)
    if (shared->block->device == range->device && (at = free_run(shared, slots)) >= 0)
      break;
  if (!shared) {
    enum ds_status status = add_shared(range->device, &shared);
    if (status != DS_OK)
      return status;
    at = 0;
  }
  range->offset = (uint64_t)at * DS_SMALL_ALIGN;
  range->start = shared->start + range->offset;
  range->block = shared->block;
  range->map_start = shared->start;
  range->map_bytes = DS_BLOCK;
  if (!ds_range_add(range))
    return DS_NOMEM;
  memset(shared->used + at, 1, (size_t)slots);
  shared->live++;
  return DS_OK;
}

static enum ds_status alloc_own(struct ds_range *range) {
  enum ds_status status = ds_block_new(range->device, DS_FILE_CLASSIC, range->bytes, &range->block);
  if (status != DS_OK)
    return status;
  range->start = ds_reserve(range->bytes, DS_BLOCK, 0);
  range->map_start = range->start;
  range->map_bytes = (range->bytes + DS_BLOCK - 1) / DS_BLOCK * DS_BLOCK;
  if (range->start && ds_range_add(range))
    return DS_OK;
  if (range->start)
    ds_unreserve(range->start);
  ds_block_drop(range->block);
  return DS_NOMEM;
}

static enum ds_status alloc(struct ds_range *range, uint64_t *out) {
  if (!range->bytes)
    return DS_INVALID;
  ds_lock();
  bool small = range->kind == DS_CLASSIC && range->bytes <= SMALL_MOST;
  range->access[range->device->index] = DS_READ | DS_WRITE;
  enum ds_status status = small ? alloc_small(range) : alloc_own(range);
  if (status == DS_OK) {
    *out = range->start;
    ds_count(DS_C_live_allocations, 1);
  }
  ds_unlock();
  return status;
}

enum ds_status ds_alloc(struct ds_device *device, void *owner, uint64_t bytes, uint64_t *out) {
  struct ds_range range = {.kind = DS_CLASSIC, .device = device, .owner = owner, .bytes = bytes};
  return alloc(&range, out);
}

/* Managed memory is the one kind that the host may touch: its address is the data's. */
enum ds_status ds_alloc_managed(struct ds_device *device, void *owner, uint64_t bytes, uint64_t *out) {
  struct ds_range range = {.kind = DS_MANAGED, .device = device, .owner = owner, .bytes = bytes};
  if (!bytes)
    return DS_INVALID;
  ds_lock();
  enum ds_status status = ds_block_new(device, DS_FILE_CLASSIC, bytes, &range.block);
  if (status == DS_OK) {
    for (int i = 0; i < ds_device_count(); i++)
      range.access[i] = DS_READ | DS_WRITE;
    range.start = range.map_start = (uint64_t)range.block->data;
    range.map_bytes = (bytes + DS_BLOCK - 1) / DS_BLOCK * DS_BLOCK;
    *out = range.start;
    if (ds_range_add(&range)) {
      ds_count(DS_C_live_allocations, 1);
    } else {
      ds_block_drop(range.block);
      status = DS_NOMEM;
    }
  }
  ds_unlock();
  return status;
}

static void free_small(struct ds_range *range) {
  struct shared_block **link = &shared_blocks;
  while (*link && (*link)->block != range->block)
    link = &(*link)->next;
  struct shared_block *shared = *link;
  if (!shared)
    return;
  size_t slots = (range->bytes + DS_SMALL_ALIGN - 1) / DS_SMALL_ALIGN;
  memset(shared->used + range->offset / DS_SMALL_ALIGN, 0, slots);
  if (--shared->live)
    return;
  if (ds_switch(DS_leak_small) && range->flags) {
    ds_count(DS_C_leaked, 1);
    shared->live++; /* never empty again */
    return;
  }
  atomic_store(&shared->block->header->freed, 1);
  ds_unreserve(shared->start);
  *link = shared->next;
  ds_block_drop(shared->block);
  free(shared);
}

static void release(struct ds_range *range) {
  if (ds_switch(DS_poison_freed))
    memset(range->block->data + range->offset, 0xdb, range->bytes);
  if (range->block->header->small) {
    free_small(range);
  } else {
    atomic_store(&range->block->header->freed, 1);
    if (range->kind != DS_MANAGED)
      ds_unreserve(range->start);
    ds_block_drop(range->block);
  }
  ds_count(DS_C_live_allocations, -1);
  ds_range_remove(range);
}

enum ds_status ds_free(uint64_t start) {
  ds_lock();
  struct ds_range *range = ds_find(start);
  enum ds_status status = DS_INVALID;
  if (range && range->start == start && (range->kind == DS_CLASSIC || range->kind == DS_MANAGED)) {
    release(range);
    status = DS_OK;
  }
  ds_unlock();
  return status;
}

/* One range of a context, of the kinds that end with it; caller holds the lock. */
static struct ds_range *any_of(const void *owner) {
  struct ds_range *range;
  for (size_t i = 0; (range = ds_range_at(i)); i++)
    if (range->owner == owner &&
        (range->kind == DS_CLASSIC || range->kind == DS_MANAGED || range->kind == DS_IMPORT || range->kind == DS_HOST))
      return range;
  return NULL;
}

void ds_free_owner(void *owner) {
  for (;;) {
    ds_lock();
    struct ds_range *range = any_of(owner);
    struct ds_range found = range ? *range : (struct ds_range){0};
    if (range && range->kind == DS_IMPORT)
      range->opens = 1;
    ds_unlock();
    if (!range)
      return;
    if (found.kind == DS_IMPORT)
      ds_close(found.start);
    else if (found.kind == DS_HOST)
      found.registered ? ds_host_unregister(found.host) : ds_host_free(found.host);
    else
      ds_free(found.start);
  }
}
