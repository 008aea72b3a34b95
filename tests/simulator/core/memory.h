/* Devices, pieces of device memory (memfds), and the map of device addresses.
 *
 * A device address lies in one big PROT_NONE reservation: a host that touches it
 * dies.  The bytes are mapped elsewhere (`ds_block.data`).  All of this is guarded
 * by one lock; nobody holds it while blocking. */
#pragma once

#include "core.h"

#include <pthread.h>

enum { DS_PAGE = 4096, DS_BLOCK = 2 << 20, DS_POOL_CHUNK = 32 << 20, DS_SMALL_ALIGN = 512, DS_PRIORITIES = 32 };

struct ds_device {
  int index;             /* position in this process's list */
  int physical, slice;   /* which part of the machine; slice -1: the whole device */
  uint8_t uuid[16];
  char name[64];
  uint64_t memory;       /* bytes */
  atomic_int lost;       /* the front's sticky code, 0 while healthy */
  pthread_mutex_t engine_lock;
  pthread_cond_t engine_free;
  int engines_busy;                    /* running copies */
  int engine_waiting[DS_PRIORITIES];   /* copies that wait, best priority first */
  int exclusive_fd;
};

/* First page of every memfd: what the file is, for whoever maps it. */
struct ds_header {
  uint32_t magic, kind;       /* kind: enum ds_file_kind */
  uint8_t id[16];
  uint64_t bytes;             /* size of the data behind this page */
  atomic_ulong used;          /* bytes that count as device memory */
  int32_t physical, slice;
  int32_t creator;            /* process id, informative and for accounting */
  uint32_t handle_types;
  atomic_uint freed;          /* the owner gave it back */
  uint32_t small;             /* a block that small allocations share */
};
enum ds_file_kind { DS_FILE_CLASSIC = 1, DS_FILE_PHYSICAL, DS_FILE_POOL, DS_FILE_EVENT };
enum { DS_MAGIC = 0x4d495344 };

struct ds_block {
  int fd;
  uint8_t *data;
  uint64_t bytes;
  struct ds_header *header;
  atomic_int refs;
  uint64_t number;     /* unique in the process */
  struct ds_device *device;
};

enum ds_kind {
  DS_CLASSIC = 1, /* dedicated or part of a shared small block */
  DS_MANAGED,
  DS_HOST,        /* pinned host memory of the driver, or registered: `host` is its address */
  DS_VMM,         /* one mapped chunk of physical memory */
  DS_POOL,        /* allocation from a pool */
  DS_IMPORT,      /* opened classic handle */
  DS_POOL_IMPORT,
};
enum { DS_READ = 1, DS_WRITE = 2 };

struct ds_range {
  uint64_t start, bytes;
  enum ds_kind kind;
  struct ds_block *block;  /* NULL for host memory */
  uint64_t offset;         /* of `start` in the block's data */
  uint8_t *host;
  uint8_t *view;           /* host memory as devices reach it */
  struct ds_device *device;
  void *owner;             /* context it belongs to, opaque here; NULL: none */
  uint64_t id;             /* unique in the process, never reused */
  unsigned access[16];     /* DS_READ | DS_WRITE per device index */
  unsigned handle_types, flags;
  uint64_t map_start, map_bytes; /* the mapping it is part of: a shared block, a pool's chunk */
  void *parent;            /* pool or physical handle */
  int opens;
  bool registered;         /* host range that was registered, not allocated */
  bool freeing;            /* a stream will free it */
};

/* device.c */
int ds_device_count(void);
struct ds_device *ds_device_at(int index);
struct ds_device *ds_device_of(int physical, int slice);
void ds_device_uuid(const struct ds_device *device, bool whole, uint8_t out[16]); /* whole: what it is a slice of */
void ds_devices_show(const int *indexes, int n); /* restricts and orders the list, before first use */
bool ds_peer(const struct ds_device *a, const struct ds_device *b);
enum ds_status ds_device_claim(struct ds_device *device);
uint64_t ds_used(int physical, int slice, int pid); /* bytes over all processes, or charged to one */
void ds_lose(struct ds_device *device, int code);

/* block.c */
enum ds_status ds_block_new(struct ds_device *device, enum ds_file_kind kind, uint64_t bytes, struct ds_block **out);
enum ds_status ds_block_from_fd(int fd, enum ds_file_kind kind, struct ds_block **out); /* takes the fd on success */
struct ds_block *ds_block_keep(struct ds_block *block);
void ds_block_drop(struct ds_block *block);
int ds_file_new(const char *what, uint64_t bytes);
int ds_hold_fd(int fd, int delta);  /* counts fds the simulator holds, returns fd */
enum ds_status ds_fetch_fd(int pid, int fd, uint64_t at, const uint8_t id[16], int *out); /* `at`: of the header */

/* space.c: addresses; the caller holds ds_lock() unless it says otherwise */
void ds_lock(void);
void ds_unlock(void);
void ds_locks_afresh(void); /* the late writer's: whoever held the lock is dead */
bool ds_is_device_address(uint64_t address); /* takes no lock */
uint64_t ds_reserve(uint64_t bytes, uint64_t align, uint64_t hint);
void ds_unreserve(uint64_t start);
struct ds_range *ds_range_add(const struct ds_range *like);
void ds_range_remove(struct ds_range *range);
struct ds_range *ds_find(uint64_t address);
struct ds_range *ds_find_next(uint64_t address); /* first range that ends above it */
struct ds_range *ds_find_host(uint64_t host_address, uint64_t bytes); /* host memory that overlaps these */
struct ds_range *ds_range_at(size_t i); /* in order of addresses; NULL past the end */

/* alloc.c, host.c */
enum ds_status ds_alloc(struct ds_device *device, void *owner, uint64_t bytes, uint64_t *out);
enum ds_status ds_alloc_managed(struct ds_device *device, void *owner, uint64_t bytes, uint64_t *out);
enum ds_status ds_free(uint64_t start);
void ds_free_owner(void *owner);
enum ds_status ds_host_alloc(void *owner, uint64_t bytes, unsigned flags, void **out);
enum ds_status ds_host_free(void *address);
enum ds_status ds_host_register(void *owner, void *address, uint64_t bytes, unsigned flags);
enum ds_status ds_host_unregister(void *address);
bool ds_take_pending_failure(void);

/* export.c: classic handles */
enum { DS_HANDLE_BYTES = 64 };
enum ds_status ds_export(uint64_t address, uint8_t out[DS_HANDLE_BYTES]);
enum ds_status ds_open(struct ds_device *device, void *owner, const uint8_t handle[DS_HANDLE_BYTES], uint64_t *out);
enum ds_status ds_close(uint64_t start);
/* A whole dedicated allocation as an fd of the caller's, and an opened one, closed by ds_close(); 0 bytes: all of it. */
enum ds_status ds_export_fd(uint64_t address, uint64_t bytes, int *fd);
enum ds_status ds_open_fd(struct ds_device *device, void *owner, int fd, uint64_t bytes, uint64_t *out);
/* A handle that names an fd of this process, which stays open as long as the process lives. */
void ds_fabric_handle(int fd, uint8_t out[DS_HANDLE_BYTES]);
enum ds_status ds_fabric_fd(const uint8_t handle[DS_HANDLE_BYTES], int *fd); /* the caller closes it */

/* vmm.c */
struct ds_physical;
enum ds_status ds_physical_new(struct ds_device *device, uint64_t bytes, unsigned handle_types, struct ds_physical **out);
enum ds_status ds_physical_import(int fd, struct ds_physical **out);
enum ds_status ds_physical_export(struct ds_physical *physical, unsigned type, int *fd);
enum ds_status ds_physical_release(struct ds_physical *physical);
bool ds_physical_hold(struct ds_physical *physical);
enum ds_status ds_physical_retain(uint64_t address, struct ds_physical **out);
enum ds_status ds_physical_info(struct ds_physical *physical, struct ds_device **device, unsigned *types, uint64_t *bytes);
enum ds_status ds_range_reserve(uint64_t bytes, uint64_t align, uint64_t hint, uint64_t *out);
enum ds_status ds_range_free(uint64_t start, uint64_t bytes);
uint64_t ds_range_of(uint64_t address, uint64_t *start); /* bytes of the reservation, 0: none; caller holds the lock */
enum ds_status ds_map(uint64_t start, uint64_t bytes, struct ds_physical *physical);
enum ds_status ds_unmap(uint64_t start, uint64_t bytes);
enum ds_status ds_set_access(uint64_t start, uint64_t bytes, struct ds_device *device, unsigned access);

/* pool.c */
struct ds_pool;
enum ds_pool_value { DS_POOL_RESERVED, DS_POOL_RESERVED_HIGH, DS_POOL_USED, DS_POOL_USED_HIGH, DS_POOL_THRESHOLD };
enum ds_status ds_pool_new(struct ds_device *device, uint64_t max_bytes, unsigned handle_types, struct ds_pool **out);
enum ds_status ds_pool_default(struct ds_device *device, struct ds_pool **out);
enum ds_status ds_pool_destroy(struct ds_pool *pool);
enum ds_status ds_pool_alloc(struct ds_pool *pool, void *owner, uint64_t bytes, uint64_t *out);
enum ds_status ds_pool_free(uint64_t start);       /* at once; streams queue it */
enum ds_status ds_can_free_later(uint64_t start); /* pool memory and classic allocations */
enum ds_status ds_pool_trim(struct ds_pool *pool, uint64_t keep);
enum ds_status ds_pool_value(struct ds_pool *pool, enum ds_pool_value which, uint64_t *value, bool set);
enum ds_status ds_pool_access(struct ds_pool *pool, struct ds_device *device, unsigned *access, bool set);
enum ds_status ds_pool_export(struct ds_pool *pool, int *fd);
enum ds_status ds_pool_import(int fd, struct ds_pool **out);
enum ds_status ds_pool_export_pointer(uint64_t address, uint8_t out[DS_HANDLE_BYTES]);
enum ds_status ds_pool_import_pointer(struct ds_pool *pool, const uint8_t handle[DS_HANDLE_BYTES], uint64_t *out);
struct ds_device *ds_pool_device(struct ds_pool *pool); /* NULL: no such pool */
unsigned ds_pool_handle_types(struct ds_pool *pool);
