/* Pieces of device memory: one memfd each, header page first, data behind it.
 * Sealed against resizing, so that a peer cannot make us fault. */
#include "memory.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int ds_hold_fd(int fd, int delta) {
  ds_count(DS_C_fds, delta);
  return fd;
}

/* The name tells the machine survey what belongs to this room. */
int ds_file_new(const char *what, uint64_t bytes) {
  char name[128];
  snprintf(name, sizeof name, "devsim.%.60s.%s", ds_text("room"), what);
  int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (fd < 0)
    return -1;
  if (ftruncate(fd, (off_t)bytes) != 0 || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    close(fd);
    return -1;
  }
  return ds_hold_fd(fd, 1);
}

static enum ds_status map_block(int fd, uint64_t bytes, struct ds_block **out) {
  struct ds_block *block = calloc(1, sizeof *block);
  uint8_t *memory = mmap(NULL, DS_PAGE + bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (!block || memory == MAP_FAILED) {
    free(block);
    return DS_NOMEM;
  }
  block->fd = fd;
  block->header = (struct ds_header *)memory;
  block->data = memory + DS_PAGE;
  block->bytes = bytes;
  block->number = ds_unique();
  atomic_store(&block->refs, 1);
  ds_count(DS_C_live_blocks, 1);
  ds_count(DS_C_live_bytes, (long)bytes);
  *out = block;
  return DS_OK;
}

static uint64_t charge(enum ds_file_kind kind, uint64_t bytes) {
  if (kind == DS_FILE_POOL || kind == DS_FILE_EVENT)
    return 0; /* a pool counts what it reserves */
  return (bytes + DS_BLOCK - 1) / DS_BLOCK * DS_BLOCK;
}

enum ds_status ds_block_new(struct ds_device *device, enum ds_file_kind kind, uint64_t bytes, struct ds_block **out) {
  uint64_t cost = charge(kind, bytes);
  if (bytes > (1ull << 46) || cost > device->memory)
    return DS_NOMEM;
  /* Asking the whole machine is slow: only where a test set the size of the memory. */
  if (cost && *ds_text("memory_mb") && ds_used(device->physical, device->slice, 0) + cost > device->memory)
    return DS_NOMEM;
  int fd = ds_file_new("block", DS_PAGE + bytes);
  if (fd < 0)
    return errno == EMFILE || errno == ENFILE ? DS_OS : DS_NOMEM;
  enum ds_status status = map_block(fd, bytes, out);
  if (status != DS_OK) {
    close(ds_hold_fd(fd, -1));
    return status;
  }
  struct ds_header *header = (*out)->header;
  header->kind = kind;
  ds_random(header->id, sizeof header->id);
  header->bytes = bytes;
  atomic_store(&header->used, cost);
  header->physical = device->physical;
  header->slice = device->slice;
  header->creator = getpid();
  header->magic = DS_MAGIC;
  (*out)->device = device;
  if (ds_switch(DS_dirty) && kind != DS_FILE_POOL)
    memset((*out)->data, 0xd1, bytes);
  return DS_OK;
}

/* Unknown: not ours at all; unsupported: ours, but of another kind. */
enum ds_status ds_block_from_fd(int fd, enum ds_file_kind kind, struct ds_block **out) {
  struct ds_header header;
  struct stat info;
  if (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode) || pread(fd, &header, sizeof header, 0) != sizeof header)
    return DS_UNKNOWN;
  if (header.magic != DS_MAGIC || (uint64_t)info.st_size != DS_PAGE + header.bytes)
    return DS_UNKNOWN;
  if (header.kind != kind)
    return DS_UNSUPPORTED;
  struct ds_device *device = ds_device_of(header.physical, header.slice);
  if (!device)
    return DS_BAD_DEVICE;
  enum ds_status status = map_block(fd, header.bytes, out);
  if (status == DS_OK) {
    (*out)->device = device;
    ds_hold_fd(fd, 1);
  }
  return status;
}

struct ds_block *ds_block_keep(struct ds_block *block) {
  atomic_fetch_add(&block->refs, 1);
  return block;
}

void ds_block_drop(struct ds_block *block) {
  if (!block || atomic_fetch_sub(&block->refs, 1) != 1)
    return;
  ds_count(DS_C_live_blocks, -1);
  ds_count(DS_C_live_bytes, -(long)block->bytes);
  munmap(block->header, DS_PAGE + block->bytes);
  close(ds_hold_fd(block->fd, -1));
  free(block);
}

/* Through /proc: works for one user without ptrace rights, fails once the owner is gone. */
enum ds_status ds_fetch_fd(int pid, int fd, uint64_t at, const uint8_t id[16], int *out) {
  char path[64];
  struct ds_header header;
  snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, fd);
  int found = open(path, O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK);
  if (found < 0)
    return errno == EMFILE || errno == ENFILE ? DS_OS : DS_MAP_FAILED;
  if (pread(found, &header, sizeof header, (off_t)at) != sizeof header || header.magic != DS_MAGIC ||
      memcmp(header.id, id, sizeof header.id) != 0) {
    close(found);
    return DS_MAP_FAILED;
  }
  *out = found;
  return DS_OK;
}
