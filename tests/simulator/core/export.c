/* Classic handles: 64 bytes that name the exporter's process, its fd and the memory's
 * id.  They resolve only while the exporter lives, and always open a whole block. */
#include "memory.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

struct handle {
  uint32_t magic;
  int32_t pid;
  int32_t fd;
  int32_t broken;
  uint8_t id[16];
  uint64_t offset; /* of the allocation in its block, used where a switch says so */
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
    struct handle handle = {.magic = HANDLE_MAGIC, .pid = getpid(), .fd = range->block->fd, .broken = broken};
    memcpy(handle.id, range->block->header->id, sizeof handle.id);
    handle.offset = range->block->header->small ? range->offset : 0;
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
        !memcmp(range->block->header->id, handle->id, sizeof handle->id))
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

static enum ds_status add_mapping(struct ds_device *device, void *owner, struct ds_block *block,
                                  const struct handle *handle, uint64_t *out) {
  struct ds_range range = {.kind = DS_IMPORT, .block = block, .device = block->device, .owner = owner, .opens = 1};
  range.bytes = range.map_bytes = block->bytes;
  range.start = range.map_start = ds_reserve(block->bytes, DS_BLOCK, 0);
  for (int i = 0; i < ds_device_count(); i++)
    if (ds_peer(ds_device_at(i), block->device))
      range.access[i] = DS_READ | DS_WRITE;
  range.access[device->index] = DS_READ | DS_WRITE;
  if (!range.start || !ds_range_add(&range)) {
    if (range.start)
      ds_unreserve(range.start);
    return DS_NOMEM;
  }
  bool exact = block->header->small && ds_switch(DS_small_open);
  *out = range.start + (exact ? handle->offset : 0);
  ds_count(DS_C_live_mappings, 1);
  ds_count(DS_C_driver_opens, 1);
  return DS_OK;
}

static enum ds_status map_handle(struct ds_device *device, void *owner, const struct handle *handle, uint64_t *out) {
  struct ds_block *block = NULL;
  int fd = -1;
  enum ds_status status = ds_fetch_fd(handle->pid, handle->fd, handle->id, &fd);
  if (status != DS_OK)
    return status;
  leak_fd(fd);
  status = ds_block_from_fd(fd, DS_FILE_CLASSIC, &block);
  if (status != DS_OK) {
    close(fd);
    return status == DS_BAD_HANDLE ? DS_MAP_FAILED : status;
  }
  if (!ds_peer(device, block->device)) {
    ds_block_drop(block);
    return DS_NO_PEER;
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
  ds_lock();
  struct ds_range *open = ds_switch(DS_second_open) == 2 ? NULL : opened(owner, &handle);
  enum ds_status status = DS_ALREADY_MAPPED;
  if (open && ds_switch(DS_second_open) == 0) {
    bool exact = open->block->header->small && ds_switch(DS_small_open);
    *out = open->start + (exact ? handle.offset : 0);
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
  bool exact = range && ds_switch(DS_small_open) && range->block && range->block->header->small;
  if (range && range->kind == DS_IMPORT && (range->start == start || exact)) {
    ds_count(DS_C_closes, 1);
    status = DS_OK;
    if (--range->opens == 0) {
      atomic_store(&last_closed, range->start);
      ds_unreserve(range->start);
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
  return ds_fetch_fd(handle.pid, handle.fd, handle.id, fd);
}
