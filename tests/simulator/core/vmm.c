/* Physical memory and the addresses it is mapped at.  A handle counts its holders;
 * a mapping keeps the memory without the handle, as drivers do. */
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

struct ds_physical {
  struct ds_physical *next;
  struct ds_block *block; /* NULL while an fd waits to be read at the first map */
  int lazy_fd;
  struct ds_device *device;
  uint64_t bytes;
  unsigned handle_types;
  int holders, maps;
  bool imported;
};

struct reservation {
  struct reservation *next;
  uint64_t start, bytes;
};

static struct ds_physical *all;     /* with holders or maps */
static struct ds_physical *retired; /* kept, so that a stale handle is told from a wild one */
static struct reservation *reservations;

/* Caller holds the lock; a handle without holders is no handle. */
static bool valid(const struct ds_physical *physical) {
  for (const struct ds_physical *at = all; at; at = at->next)
    if (at == physical)
      return at->holders > 0;
  return false;
}

static bool was(const struct ds_physical *physical) {
  const struct ds_physical *at = retired;
  while (at && at != physical)
    at = at->next;
  for (const struct ds_physical *one = all; !at && one; one = one->next)
    at = one == physical ? one : NULL;
  return at != NULL;
}

static void settle(struct ds_physical *physical) {
  if (physical->holders || physical->maps)
    return;
  struct ds_physical **link = &all;
  while (*link != physical)
    link = &(*link)->next;
  *link = physical->next;
  ds_block_drop(physical->block);
  physical->block = NULL;
  physical->next = retired;
  retired = physical;
}

static enum ds_status adopt(struct ds_block *block, int lazy_fd, struct ds_device *device, uint64_t bytes,
                            unsigned handle_types, struct ds_physical **out) {
  struct ds_physical *physical = calloc(1, sizeof *physical);
  if (!physical)
    return DS_NOMEM;
  physical->block = block;
  physical->lazy_fd = lazy_fd;
  physical->device = device;
  physical->bytes = bytes;
  physical->handle_types = handle_types;
  physical->holders = 1;
  physical->next = all;
  all = physical;
  ds_count(DS_C_live_physical, 1);
  *out = physical;
  return DS_OK;
}

enum ds_status ds_physical_new(struct ds_device *device, uint64_t bytes, unsigned handle_types,
                               struct ds_physical **out) {
  struct ds_block *block = NULL;
  if (!bytes || bytes % DS_BLOCK)
    return DS_INVALID;
  ds_lock();
  enum ds_status status = ds_block_new(device, DS_FILE_PHYSICAL, bytes, &block);
  if (status == DS_OK) {
    block->header->handle_types = handle_types;
    status = adopt(block, -1, device, bytes, handle_types, out);
    if (status != DS_OK)
      ds_block_drop(block);
  }
  ds_unlock();
  return status;
}

/* The caller keeps its fd, unless a switch makes us take it or read it only at map time. */
enum ds_status ds_physical_import(int fd, struct ds_physical **out) {
  struct ds_block *block = NULL;
  int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (own < 0)
    return errno == EMFILE ? DS_OS : DS_UNKNOWN;
  enum ds_status status = ds_block_from_fd(own, DS_FILE_PHYSICAL, &block);
  if (status != DS_OK) {
    close(own);
    return status;
  }
  struct ds_device *device = block->device;
  uint64_t bytes = block->bytes;
  bool lazy = ds_switch(DS_fd_mode) == 2;
  if (lazy) {
    ds_block_drop(block);
    block = NULL;
  }
  ds_lock();
  status = adopt(block, lazy ? fd : -1, device, bytes, 0, out); /* an imported handle cannot be exported again */
  ds_unlock();
  if (status != DS_OK) {
    ds_block_drop(block);
    return status;
  }
  (*out)->imported = true;
  if (ds_switch(DS_fd_mode) == 1)
    close(fd);
  ds_count(DS_C_opens, 1);
  ds_count(DS_C_driver_opens, 1);
  return DS_OK;
}

enum ds_status ds_physical_export(struct ds_physical *physical, unsigned type, int *fd) {
  ds_lock();
  enum ds_status status = !valid(physical) ? DS_INVALID : !(physical->handle_types & type) ? DS_INVALID : DS_OK;
  if (status == DS_OK && physical->block) {
    *fd = fcntl(physical->block->fd, F_DUPFD_CLOEXEC, 3);
    status = *fd < 0 ? DS_OS : DS_OK;
  }
  ds_unlock();
  if (status == DS_OK)
    ds_count(DS_C_exports, 1);
  return status;
}

enum ds_status ds_physical_release(struct ds_physical *physical) {
  ds_lock();
  bool good = valid(physical), known = good || was(physical);
  if (good && --physical->holders == 0) {
    ds_count(DS_C_live_physical, -1);
    settle(physical);
  }
  ds_unlock();
  if (!known)
    ds_wild("physical memory handle");
  return good ? DS_OK : DS_INVALID;
}

enum ds_status ds_physical_retain(uint64_t address, struct ds_physical **out) {
  ds_lock();
  struct ds_range *range = ds_find(address);
  bool good = range && range->kind == DS_VMM;
  if (good) {
    *out = range->parent;
    if ((*out)->holders++ == 0)
      ds_count(DS_C_live_physical, 1);
  }
  ds_unlock();
  return good ? DS_OK : DS_INVALID;
}

/* Takes hold of what a mapping keeps, for a front whose handles stay good without a holder. */
bool ds_physical_hold(struct ds_physical *physical) {
  ds_lock();
  struct ds_physical *at = all;
  while (at && at != physical)
    at = at->next;
  if (at && at->holders++ == 0)
    ds_count(DS_C_live_physical, 1);
  ds_unlock();
  return at;
}

enum ds_status ds_physical_info(struct ds_physical *physical, struct ds_device **device, unsigned *types,
                                uint64_t *bytes) {
  ds_lock();
  bool good = valid(physical);
  if (good) {
    *device = physical->device;
    *types = physical->handle_types;
    *bytes = physical->bytes;
  }
  ds_unlock();
  return good ? DS_OK : DS_INVALID;
}

enum ds_status ds_range_reserve(uint64_t bytes, uint64_t align, uint64_t hint, uint64_t *out) {
  if (!bytes || bytes % DS_BLOCK || (align & (align - 1)))
    return DS_INVALID;
  struct reservation *reservation = calloc(1, sizeof *reservation);
  if (!reservation)
    return DS_NOMEM;
  ds_lock();
  uint64_t start = ds_reserve(bytes, align > DS_BLOCK ? align : DS_BLOCK, hint);
  if (start) {
    *reservation = (struct reservation){reservations, start, bytes};
    reservations = reservation;
    ds_count(DS_C_live_reservations, 1);
    *out = start;
  }
  ds_unlock();
  if (!start)
    free(reservation);
  return start ? DS_OK : DS_NOMEM;
}

static bool anything_in(uint64_t start, uint64_t bytes) {
  struct ds_range *range = ds_find_next(start);
  return range && range->start < start + bytes;
}

enum ds_status ds_range_free(uint64_t start, uint64_t bytes) {
  ds_lock();
  struct reservation **link = &reservations, *found = NULL;
  while (*link && (*link)->start != start)
    link = &(*link)->next;
  if (*link && (*link)->bytes == bytes && !anything_in(start, bytes)) {
    found = *link;
    *link = found->next;
    ds_unreserve(start);
    ds_count(DS_C_live_reservations, -1);
  }
  ds_unlock();
  free(found);
  return found ? DS_OK : DS_INVALID;
}

static bool inside(uint64_t start, uint64_t bytes, struct reservation *out) {
  for (struct reservation *at = reservations; at; at = at->next)
    if (start >= at->start && bytes <= at->bytes && start - at->start <= at->bytes - bytes) {
      *out = *at;
      return true;
    }
  return false;
}

uint64_t ds_range_of(uint64_t address, uint64_t *start) {
  struct reservation room;
  if (!inside(address, 1, &room))
    return 0;
  *start = room.start;
  return room.bytes;
}

static enum ds_status load_lazy(struct ds_physical *physical) {
  if (physical->block)
    return DS_OK;
  int own = fcntl(physical->lazy_fd, F_DUPFD_CLOEXEC, 3);
  if (own < 0)
    return DS_MAP_FAILED;
  if (ds_block_from_fd(own, DS_FILE_PHYSICAL, &physical->block) == DS_OK)
    return DS_OK;
  close(own);
  return DS_MAP_FAILED;
}

static void drop_map(struct ds_range *range) {
  struct ds_physical *physical = range->parent;
  ds_range_remove(range);
  ds_count(DS_C_live_maps, -1);
  physical->maps--;
  settle(physical);
}

static enum ds_status map(uint64_t start, uint64_t bytes, struct ds_physical *physical) {
  struct reservation room;
  if (bytes != physical->bytes)
    return DS_UNSUPPORTED;
  if (start % DS_BLOCK || !inside(start, bytes, &room))
    return DS_INVALID;
  if (anything_in(start, bytes) && !ds_switch(DS_map_live))
    return DS_INVALID;
  for (struct ds_range *old; anything_in(start, bytes) && (old = ds_find_next(start));)
    drop_map(old);
  enum ds_status status = load_lazy(physical);
  if (status != DS_OK)
    return status;
  struct ds_range range = {.kind = DS_VMM, .start = start, .bytes = bytes, .block = physical->block,
                           .device = physical->device, .handle_types = physical->handle_types, .parent = physical,
                           .map_start = start, .map_bytes = bytes};
  if (!ds_range_add(&range))
    return DS_NOMEM;
  physical->maps++;
  ds_count(DS_C_live_maps, 1);
  if (physical->imported)
    ds_count(DS_C_live_mappings, 1);
  return DS_OK;
}

enum ds_status ds_map(uint64_t start, uint64_t bytes, struct ds_physical *physical) {
  ds_lock();
  bool known = valid(physical);
  enum ds_status status = known ? map(start, bytes, physical) : DS_INVALID;
  ds_unlock();
  if (!known)
    ds_wild("physical memory handle");
  return status;
}

/* Whether [start, start + bytes) is exactly covered by whole mappings; caller holds the lock. */
static bool covered(uint64_t start, uint64_t bytes) {
  for (uint64_t at = start; at < start + bytes;) {
    struct ds_range *range = ds_find(at);
    if (!range || range->kind != DS_VMM || range->start != at || range->bytes > start + bytes - at)
      return false;
    at += range->bytes;
  }
  return bytes > 0;
}

/* Holes may be unmapped, mappings may not be cut. */
static bool uncut(uint64_t start, uint64_t bytes) {
  struct reservation room;
  if (!bytes || !inside(start, bytes, &room))
    return false;
  struct ds_range *first = ds_find(start), *last = ds_find(start + bytes - 1);
  return (!first || first->start == start) && (!last || last->start + last->bytes == start + bytes);
}

enum ds_status ds_unmap(uint64_t start, uint64_t bytes) {
  ds_lock();
  bool good = uncut(start, bytes);
  for (struct ds_range *range; good && (range = ds_find_next(start)) && range->start < start + bytes;) {
    if (((struct ds_physical *)range->parent)->imported) {
      ds_count(DS_C_live_mappings, -1);
      ds_count(DS_C_closes, 1);
    }
    drop_map(range);
  }
  ds_unlock();
  return good ? DS_OK : DS_INVALID;
}

enum ds_status ds_set_access(uint64_t start, uint64_t bytes, struct ds_device *device, unsigned access) {
  enum ds_status status = DS_OK;
  ds_lock();
  if (!covered(start, bytes))
    status = DS_INVALID;
  for (uint64_t at = start; status == DS_OK && at < start + bytes;) {
    struct ds_range *range = ds_find(at);
    if (!ds_peer(range->device, device))
      status = DS_NO_PEER;
    else
      range->access[device->index] = access;
    at += range->bytes;
  }
  ds_unlock();
  return status;
}
