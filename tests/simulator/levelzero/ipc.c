/* Handles of memory: bytes that hold the number of an fd, and who may follow it where.
 *
 * The fd belongs to the driver: one for each exported allocation, counted by gets and puts, closed by the last put or
 * by freeing. In the older form an open takes the number as one of its own process, whatever that is there. In the
 * opaque form equal copies of the number send the driver to the exporting process; a changed first copy is local. */
#include "front.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

struct export {
  struct export *next;
  const struct ds_block *block;
  uint64_t offset;
  int fd, gets;
  ino_t inode;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct export *exports;

static ino_t inode_of(int fd) {
  struct stat info;
  return fstat(fd, &info) == 0 ? info.st_ino : 0;
}

/* Caller holds the lock. An fd that the program closed behind the driver's back is told, not closed again. */
static void end(struct export **link) {
  struct export *gone = *link;
  *link = gone->next;
  if (inode_of(gone->fd) == gone->inode)
    close(ds_hold_fd(gone->fd, -1));
  else
    ds_count(DS_C_double_closes, 1);
  free(gone);
}

void ze_forget_exports(const struct ds_block *block, uint64_t offset) {
  pthread_mutex_lock(&lock);
  for (struct export **link = &exports; *link;) {
    if ((*link)->block != block || (*link)->offset != offset) {
      link = &(*link)->next;
      continue;
    }
    ds_count(DS_C_unreturned_handles, -(*link)->gets);
    end(link);
  }
  pthread_mutex_unlock(&lock);
}

static int export_of(const struct ds_block *block, uint64_t offset, int *fd) {
  int code = ZE_OK;
  pthread_mutex_lock(&lock);
  struct export *at = exports;
  while (at && (at->block != block || at->offset != offset))
    at = at->next;
  if (!at) {
    int copy = fcntl(block->fd, F_DUPFD_CLOEXEC, 3);
    at = copy < 0 ? NULL : calloc(1, sizeof *at);
    if (at) {
      *at = (struct export){exports, block, offset, ds_hold_fd(copy, 1), 0, inode_of(copy)};
      exports = at;
    }
  }
  if (at) {
    at->gets++;
    *fd = at->fd;
    ds_count(DS_C_unreturned_handles, 1);
    ds_count(DS_C_exports, 1);
  } else {
    code = ZE_OUT_OF_HOST_MEMORY;
  }
  pthread_mutex_unlock(&lock);
  return code;
}

static void write_handle(uint64_t fd, uint64_t offset, int memory, ze_handle64 *out) {
  memset(out, 0, sizeof *out);
  if (ds_switch(DS_handle_format)) {
    ze_memory_handle handle = {.fd = fd, .pool_offset = offset, .pid = (uint32_t)getpid(), .memory = (uint8_t)memory,
                               .fd_copy = fd};
    if (ds_switch(DS_handle_random))
      ds_random(handle.reserved, sizeof handle.reserved);
    memcpy(out, &handle, sizeof handle);
  } else {
    ze_older_handle handle = {fd, offset, (uint8_t)memory};
    memcpy(out, &handle, sizeof handle);
  }
}

static int get_handle(struct ze_context *context, uint64_t pointer, ze_handle64 *out) {
  int fd = -1, code = ZE_INVALID_ARGUMENT;
  TRY(ze_context_check(context));
  if (!ds_switch(DS_ipc))
    return ZE_UNSUPPORTED;
  uint64_t address = ze_in(pointer);
  ds_lock();
  struct ds_range *range = ds_find(address);
  bool own = range && (range->kind == DS_CLASSIC || range->kind == DS_MANAGED);
  bool inside = own && (address == range->start || ds_switch(DS_handle_interior));
  if (inside && (code = export_of(range->block, range->offset, &fd)) == ZE_OK) {
    write_handle((uint64_t)fd, range->offset, ze_memory_type(range), out);
    if (ds_switch(DS_leak_export)) {
      ds_block_keep(range->block);
      ds_count(DS_C_leaked, 1);
    }
  }
  ds_unlock();
  return code;
}

API(zeMemGetIpcHandle, ZE_API, (struct ze_context *context, uint64_t pointer, ze_handle64 *out),
    (context, pointer, out)) {
  return get_handle(context, pointer, out);
}

API(zeMemGetIpcHandleWithProperties, ZE_API_15,
    (struct ze_context *context, uint64_t pointer, const ze_flags *wish, ze_handle64 *out),
    (context, pointer, wish, out)) {
  if (wish && wish->flags & ~(uint32_t)ZE_HANDLE_DEFAULT)
    return ZE_UNSUPPORTED;
  return get_handle(context, pointer, out);
}

/* A handle that is not known is taken back without a word, as real drivers do. */
API(zeMemPutIpcHandle, ZE_API_6, (struct ze_context *context, ze_handle64 handle), (context, handle)) {
  uint64_t fd, offset;
  TRY(ze_context_check(context));
  memcpy(&fd, handle.bytes, sizeof fd);
  memcpy(&offset, handle.bytes + sizeof fd, sizeof offset);
  pthread_mutex_lock(&lock);
  for (struct export **link = &exports; *link; link = &(*link)->next)
    if ((uint64_t)(*link)->fd == fd && (*link)->offset == offset) {
      ds_count(DS_C_unreturned_handles, -1);
      if (--(*link)->gets == 0)
        end(link);
      break;
    }
  pthread_mutex_unlock(&lock);
  return ZE_OK;
}

API(zeMemGetFileDescriptorFromIpcHandleExp, ZE_API_6, (struct ze_context *context, ze_handle64 handle, uint64_t *out),
    (context, handle, out)) {
  TRY(ze_context_check(context));
  memcpy(out, handle.bytes, sizeof *out);
  return ZE_OK;
}

API(zeMemGetIpcHandleFromFileDescriptorExp, ZE_API_6, (struct ze_context *context, uint64_t fd, ze_handle64 *out),
    (context, fd, out)) {
  TRY(ze_context_check(context));
  write_handle(fd, 0, ZE_TYPE_DEVICE, out);
  return ZE_OK;
}

/* The fd that a number and its copy stand for, as one of our own. */
int ze_take_fd(uint64_t fd, uint64_t copy, uint32_t pid, int *out) {
  bool elsewhere = ds_switch(DS_handle_format) && fd == copy;
  if (fd > INT32_MAX)
    return ZE_INVALID_ARGUMENT;
  if (!elsewhere) {
    *out = fcntl((int)fd, F_DUPFD_CLOEXEC, 3);
    if (*out >= 0 && ds_switch(DS_fd_mode) == 1)
      close((int)fd);
  } else {
    if (!ds_switch(DS_pidfd))
      return ZE_INVALID_ARGUMENT;
    int owner = ds_switch(DS_pid_clash) ? getpid() : (int)pid;
    int process = (int)syscall(SYS_pidfd_open, owner, 0);
    *out = process < 0 ? -1 : (int)syscall(SYS_pidfd_getfd, process, (int)fd, 0);
    if (process >= 0)
      close(process);
  }
  return *out < 0 ? ZE_INVALID_ARGUMENT : ZE_OK;
}

API(zeMemOpenIpcHandle, ZE_API,
    (struct ze_context *context, struct ds_device *device, ze_handle64 bytes, uint32_t flags, uint64_t *out),
    (context, device, bytes, flags, out)) {
  ze_memory_handle handle;
  uint64_t start = 0;
  int fd = -1;
  (void)flags;
  TRY(ze_context_check(context));
  TRY(ze_device_check(device));
  if (!ds_switch(DS_ipc))
    return ZE_UNSUPPORTED;
  memcpy(&handle, bytes.bytes, sizeof handle);
  if (!ds_switch(DS_handle_format))
    handle.memory = ((ze_older_handle *)&bytes)->memory;
  TRY(ze_take_fd(handle.fd, handle.fd_copy, handle.pid, &fd));
  enum ds_status status = ds_open_fd(device, context, fd, 0, &start);
  close(fd);
  if (status == DS_OK && !ze_mark(start, handle.pool_offset, handle.memory)) {
    ds_close(start);
    status = DS_INVALID;
  }
  if (status == DS_OK)
    *out = ze_out(start + handle.pool_offset);
  return ze_code(status, device);
}

API(zeMemCloseIpcHandle, ZE_API, (struct ze_context *context, uint64_t pointer), (context, pointer)) {
  TRY(ze_context_check(context));
  ds_lock();
  struct ds_range *range = ds_find(ze_in(pointer));
  uint64_t start = range ? range->start : 0;
  ds_unlock();
  return ze_code(ds_close(start), NULL);
}
