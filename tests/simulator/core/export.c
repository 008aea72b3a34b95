/* Classic handles: 64 bytes that name the exporter's process, its fd, the memory's id and
 * the allocation's place in it.  They resolve only while the exporter lives.  What is
 * mapped is a whole block; what a peer may reach through calls is the allocation. */
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

struct handle {
  uint32_t magic;
  int32_t pid;
  int32_t fd;
  uint16_t broken, small;
  uint8_t id[16];
  uint64_t offset; /* of the allocation in its block */
  uint64_t bytes;
  uint8_t noise[16];
};
_Static_assert(sizeof(struct handle) == DS_HANDLE_BYTES, "handle size");
enum { HANDLE_MAGIC = 0x6d656d31 };

static void pin_for_ever(struct ds_range *range) {
  if (!ds_switch(DS_leak_export))
    return;
  ds_block_keep(range->block);
  ds_count(DS_C_leaked, 1);
}

enum ds_status ds_export(uint64_t address, uint8_t out[DS_HANDLE_BYTES]) {
  if (!ds_switch(DS_ipc))
    return DS_UNSUPPORTED;
  ds_lock();
  struct ds_range *range = ds_find(address);
  bool classic = range && range->kind == DS_CLASSIC;
  bool other = range && !classic;
  enum ds_status status = DS_INVALID;
  if (other)
    ds_count(DS_C_legacy_exports_of_other_kinds, 1);
  bool broken = other && range->block && ds_switch(DS_legacy_any_kind);
  bool refused = range && address != range->start && !ds_switch(DS_handle_interior);
  if ((classic || broken) && !refused) {
    struct handle handle = {.magic = HANDLE_MAGIC, .pid = getpid(), .fd = range->block->fd, .broken = broken,
                            .small = range->block->header->small != 0};
    memcpy(handle.id, range->block->header->id, sizeof handle.id);
    handle.offset = range->offset;
    handle.bytes = range->bytes;
    if (ds_switch(DS_handle_random))
      ds_random(handle.noise, sizeof handle.noise);
    memcpy(out, &handle, sizeof handle);
    if (range->block->header->small)
      range->flags = 1;
    pin_for_ever(range);
    ds_count(DS_C_exports, 1);
    status = DS_OK;
  }
  ds_unlock();
  return status;
}

/* An open mapping of the same memory in the same context; caller holds the lock. */
static struct ds_range *opened(void *owner, const struct handle *handle) {
  struct ds_range *range;
  for (size_t i = 0; (range = ds_range_at(i)); i++)
    if (range->kind == DS_IMPORT && range->owner == owner &&
        !memcmp(range->block->header->id, handle->id, sizeof handle->id) && range->offset == handle->offset)
      return range;
  return NULL;
}

static void leak_fd(int fd) {
  if (ds_switch(DS_leak_open) && fcntl(fd, F_DUPFD_CLOEXEC, 0) >= 0)
    ds_count(DS_C_leaked, 1);
}

/* Other memory of the same shape: what a racing driver once attached. */
static struct ds_block *attach_wrong(struct ds_block *block) {
  static atomic_long opens;
  long every = ds_switch(DS_wrong_attach);
  struct ds_block *wrong = NULL;
  if (!every || (atomic_fetch_add(&opens, 1) + 1) % every)
    return block;
  if (ds_block_new(block->device, DS_FILE_CLASSIC, block->bytes, &wrong) != DS_OK)
    return block;
  memset(wrong->data, 0xee, wrong->bytes < (4u << 20) ? wrong->bytes : (4u << 20));
  memcpy(wrong->header->id, block->header->id, sizeof wrong->header->id);
  ds_block_drop(block);
  ds_count(DS_C_wrong_attaches, 1);
  return wrong;
}

/* Where this context has the block mapped already: every small allocation of it opens inside one
 * mapping.  0: nowhere, or what was there when it was opened lies in the way; caller holds the lock. */
static uint64_t mapped_at(const void *owner, const struct ds_block *block, const struct handle *handle) {
  struct ds_range *at;
  uint64_t start = 0;
  for (size_t i = 0; ds_switch(DS_second_open) != 2 && !start && (at = ds_range_at(i)); i++)
    if (at->kind == DS_IMPORT && at->owner == owner && !memcmp(at->block->header->id, block->header->id, 16))
      start = at->map_start;
  at = start ? ds_find_next(start + handle->offset) : NULL;
  return at && at->start < start + handle->offset + handle->bytes ? 0 : start;
}

/* Whether another open allocation lies in the mapping; caller holds the lock. */
static bool shared(const struct ds_range *range) {
  struct ds_range *at;
  for (size_t i = 0; (at = ds_range_at(i)); i++)
    if (at != range && at->kind == DS_IMPORT && at->map_start == range->map_start)
      return true;
  return false;
}

static enum ds_status add_mapping(struct ds_device *device, void *owner, struct ds_block *block,
                                  const struct handle *handle, uint64_t *out) {
  struct ds_range range = {.kind = DS_IMPORT, .block = block, .device = block->device, .owner = owner, .opens = 1,
                           .offset = handle->offset, .bytes = handle->bytes};
  range.map_bytes = (block->bytes + DS_BLOCK - 1) / DS_BLOCK * DS_BLOCK;
  uint64_t before = mapped_at(owner, block, handle);
  range.map_start = before ? before : ds_reserve(range.map_bytes, DS_BLOCK, 0);
  range.start = range.map_start + range.offset;
  for (int i = 0; i < ds_device_count(); i++)
    if (ds_peer(ds_device_at(i), block->device))
      range.access[i] = DS_READ | DS_WRITE;
  range.access[device->index] = DS_READ | DS_WRITE;
  if (!range.map_start || !ds_range_add(&range)) {
    if (range.map_start && !before)
      ds_unreserve(range.map_start);
    return DS_NOMEM;
  }
  *out = range.start;
  ds_count(DS_C_live_mappings, 1);
  ds_count(DS_C_driver_opens, 1);
  return DS_OK;
}

/* Why a handle does not resolve: its process is gone, or gave the memory back. */
static enum ds_status unresolved(int pid) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/exe", pid);
  return access(path, F_OK) != 0 && errno == ENOENT ? DS_BAD_HANDLE : DS_INVALID;
}

static enum ds_status map_handle(struct ds_device *device, void *owner, const struct handle *handle, uint64_t *out) {
  struct ds_block *block = NULL;
  int fd = -1;
  enum ds_status status = ds_fetch_fd(handle->pid, handle->fd, 0, handle->id, &fd);
  if (status != DS_OK)
    return status == DS_MAP_FAILED ? unresolved(handle->pid) : status;
  leak_fd(fd);
  status = ds_block_from_fd(fd, DS_FILE_CLASSIC, &block);
  if (status != DS_OK) {
    close(fd);
    return status == DS_UNKNOWN || status == DS_UNSUPPORTED ? DS_INVALID : status;
  }
  bool inside = handle->bytes && handle->offset <= block->bytes && handle->bytes <= block->bytes - handle->offset;
  if (!inside || !ds_peer(device, block->device)) {
    ds_block_drop(block);
    return inside ? DS_NO_PEER : DS_INVALID;
  }
  block = attach_wrong(block);
  status = add_mapping(device, owner, block, handle, out);
  if (status != DS_OK)
    ds_block_drop(block);
  return status;
}

enum ds_status ds_open(struct ds_device *device, void *owner, const uint8_t bytes[DS_HANDLE_BYTES], uint64_t *out) {
  struct handle handle;
  memcpy(&handle, bytes, sizeof handle);
  if (!ds_switch(DS_ipc))
    return DS_UNSUPPORTED;
  if (handle.magic != HANDLE_MAGIC)
    return DS_INVALID;
  if (handle.pid == getpid() && !ds_switch(DS_self_open))
    return DS_SELF_OPEN;
  if (handle.broken)
    return DS_MAP_FAILED;
  if (ds_switch(DS_small_open) && handle.small) {
    handle.offset = 0;
    handle.bytes = DS_BLOCK;
  }
  ds_lock();
  struct ds_range *open = ds_switch(DS_second_open) == 2 ? NULL : opened(owner, &handle);
  enum ds_status status = DS_ALREADY_MAPPED;
  if (open && ds_switch(DS_second_open) == 0) {
    *out = open->start;
    open->opens++;
    status = DS_OK;
  } else if (!open) {
    status = map_handle(device, owner, &handle, out);
  }
  ds_unlock();
  if (status == DS_OK)
    ds_count(DS_C_opens, 1);
  return status;
}

enum ds_status ds_close(uint64_t start) {
  static _Atomic uint64_t last_closed;
  ds_lock();
  struct ds_range *range = ds_find(start);
  enum ds_status status = DS_INVALID;
  if (range && range->kind == DS_IMPORT && range->start == start) {
    ds_count(DS_C_closes, 1);
    status = DS_OK;
    if (--range->opens == 0) {
      atomic_store(&last_closed, range->start);
      if (!shared(range))
        ds_unreserve(range->map_start);
      ds_block_drop(range->block);
      ds_range_remove(range);
      ds_count(DS_C_live_mappings, -1);
    }
  }
  ds_unlock();
  if (status != DS_OK && start && start == atomic_load(&last_closed)) {
    ds_count(DS_C_double_closes, 1);
    if (ds_switch(DS_double_close_abort))
      ds_act((struct ds_fault){DS_ABORT, 0});
  }
  return status;
}

enum ds_status ds_export_fd(uint64_t address, uint64_t bytes, int *fd) {
  ds_lock();
  struct ds_range *range = ds_find(address);
  bool whole = range && range->kind == DS_CLASSIC && range->start == address && !range->offset &&
               !range->block->header->small && bytes <= range->map_bytes;
  enum ds_status status = DS_INVALID;
  if (whole) {
    *fd = fcntl(range->block->fd, F_DUPFD_CLOEXEC, 3);
    status = *fd < 0 ? DS_OS : DS_OK;
  }
  ds_unlock();
  if (status == DS_OK)
    ds_count(DS_C_exports, 1);
  return status;
}

enum ds_status ds_open_fd(struct ds_device *device, void *owner, int fd, uint64_t bytes, uint64_t *out) {
  struct ds_block *block = NULL;
  struct handle handle = {0};
  int own = fcntl(fd, F_DUPFD_CLOEXEC, 3);
  if (own < 0)
    return errno == EMFILE ? DS_OS : DS_UNKNOWN;
  enum ds_status status = ds_block_from_fd(own, DS_FILE_CLASSIC, &block);
  if (status != DS_OK) {
    close(own);
    return status;
  }
  leak_fd(fd);
  handle.bytes = bytes ? bytes : block->bytes;
  block = attach_wrong(block);
  ds_lock();
  status = bytes > block->bytes ? DS_INVALID : !ds_peer(device, block->device) ? DS_NO_PEER : DS_OK;
  if (status == DS_OK)
    status = add_mapping(device, owner, block, &handle, out);
  ds_unlock();
  if (status == DS_OK)
    ds_count(DS_C_opens, 1);
  else
    ds_block_drop(block);
  return status;
}

void ds_fabric_handle(int fd, uint8_t out[DS_HANDLE_BYTES]) {
  struct ds_header header = {0};
  struct handle handle = {.magic = HANDLE_MAGIC, .pid = getpid(), .fd = ds_hold_fd(fd, 1)};
  if (pread(fd, &header, sizeof header, 0) == sizeof header)
    memcpy(handle.id, header.id, sizeof handle.id);
  memcpy(out, &handle, sizeof handle);
}

enum ds_status ds_fabric_fd(const uint8_t bytes[DS_HANDLE_BYTES], int *fd) {
  struct handle handle;
  memcpy(&handle, bytes, sizeof handle);
  if (handle.magic != HANDLE_MAGIC)
    return DS_INVALID;
  return ds_fetch_fd(handle.pid, handle.fd, 0, handle.id, fd);
}
