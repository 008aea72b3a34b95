/* Events.  A record takes a ticket, a wait remembers the newest ticket it saw; a
 * never-recorded event counts as done.  Shared events keep their tickets in pages of
 * one memfd per process, where others see them, even for a while after the event was
 * destroyed; nothing finishes a dead process's ticket. */
#include "stream.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { RING = 256, SLOTS = 8192 }; /* outstanding records that are told apart; shared events of a process */

struct page {
  struct ds_header header;
  _Atomic uint64_t recorded;
  _Atomic uint64_t done[RING]; /* newest finished ticket of each place */
};

struct ds_event {
  struct ds_event *next;
  struct ds_device *device;
  void *owner;
  unsigned flags;
  bool imported;
  long slot; /* of an own shared event, else -1 */
  struct page *page;
  atomic_int refs;
  _Atomic uint64_t finished_us;
};

struct handle {
  uint32_t magic;
  int32_t pid;
  int32_t fd;
  uint32_t shm_device; /* both processes have to see the same shared memory file system */
  uint8_t id[16];
  uint64_t shm_inode;
  uint64_t slot;
  uint8_t noise[16];
};
_Static_assert(sizeof(struct handle) == DS_HANDLE_BYTES, "handle size");
_Static_assert(sizeof(struct page) <= DS_PAGE, "event page size");
enum { HANDLE_MAGIC = 0x65767431 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct ds_event *events;
static int arena_fd = -1;
static struct page *arena; /* every slot a page apart */
static uint8_t slot_used[SLOTS];
static long last_slot;

static void enlist(struct ds_event *event) {
  pthread_mutex_lock(&lock);
  event->next = events;
  events = event;
  pthread_mutex_unlock(&lock);
  ds_count(DS_C_live_events, 1);
  if (event->flags & DS_EVENT_SHARED)
    ds_count(DS_C_live_ipc_events, 1);
}

static bool delist(struct ds_event *event) {
  pthread_mutex_lock(&lock);
  struct ds_event **link = &events;
  while (*link && *link != event)
    link = &(*link)->next;
  bool found = *link != NULL;
  if (found)
    *link = event->next;
  pthread_mutex_unlock(&lock);
  return found;
}

bool ds_event_exists(const struct ds_event *wanted) {
  pthread_mutex_lock(&lock);
  const struct ds_event *at = events;
  while (at && at != wanted)
    at = at->next;
  pthread_mutex_unlock(&lock);
  return at != NULL;
}

void ds_events_start(void) {
  pthread_mutex_lock(&lock);
  if (arena_fd < 0 && (arena_fd = ds_file_new("events", (uint64_t)SLOTS * DS_PAGE)) >= 0) {
    arena = mmap(NULL, (size_t)SLOTS * DS_PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, arena_fd, 0);
    if (arena == MAP_FAILED) {
      close(ds_hold_fd(arena_fd, -1));
      arena_fd = -1;
    }
  }
  pthread_mutex_unlock(&lock);
}

static struct page *slot_page(long slot) { return (struct page *)((uint8_t *)arena + slot * DS_PAGE); }

/* Slots go round, so that the page of a destroyed event is reused as late as possible. */
static long take_slot(void) {
  long found = -1;
  pthread_mutex_lock(&lock);
  for (long i = 1; arena_fd >= 0 && i <= SLOTS && found < 0; i++)
    if (!slot_used[(last_slot + i) % SLOTS])
      found = (last_slot + i) % SLOTS;
  if (found >= 0)
    slot_used[last_slot = found] = 1;
  pthread_mutex_unlock(&lock);
  return found;
}

static struct ds_event *event_new(struct ds_device *device, void *owner, unsigned flags, long slot, int fd,
                                  uint64_t at) {
  struct ds_event *event = calloc(1, sizeof *event);
  int sharing = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void *page = slot >= 0 ? slot_page(slot) : mmap(NULL, DS_PAGE, PROT_READ | PROT_WRITE, sharing, fd, (off_t)at);
  if (!event || page == MAP_FAILED) {
    free(event);
    return NULL;
  }
  event->device = device;
  event->owner = owner;
  event->flags = flags;
  event->slot = slot;
  event->page = page;
  atomic_store(&event->refs, 1);
  return event;
}

static void announce(struct page *page, const struct ds_device *device) {
  memset(page, 0, sizeof *page);
  page->header.kind = DS_FILE_EVENT;
  page->header.physical = device->physical;
  page->header.slice = device->slice;
  ds_random(page->header.id, sizeof page->header.id);
  page->header.magic = DS_MAGIC;
}

enum ds_status ds_event_new(struct ds_device *device, void *owner, unsigned flags, struct ds_event **out) {
  long slot = -1;
  if (flags & DS_EVENT_SHARED) {
    long limit = ds_switch(DS_event_limit);
    if (!ds_switch(DS_ipc_events))
      return DS_UNSUPPORTED;
    if ((limit && ds_counter(DS_C_live_ipc_events) >= limit) || (slot = take_slot()) < 0)
      return DS_NOMEM;
    announce(slot_page(slot), device);
  }
  struct ds_event *event = event_new(device, owner, flags, slot, -1, 0);
  if (!event)
    return DS_NOMEM;
  enlist(event);
  *out = event;
  return DS_OK;
}

void ds_event_keep(struct ds_event *event) { atomic_fetch_add(&event->refs, 1); }

void ds_event_drop(struct ds_event *event) {
  if (atomic_fetch_sub(&event->refs, 1) != 1)
    return;
  if (event->slot < 0) {
    munmap(event->page, DS_PAGE);
  } else {
    pthread_mutex_lock(&lock);
    slot_used[event->slot] = 0;
    pthread_mutex_unlock(&lock);
  }
  free(event);
}

enum ds_status ds_event_destroy(struct ds_event *event) {
  if (!delist(event))
    return DS_BAD_HANDLE;
  ds_count(DS_C_live_events, -1);
  if (event->flags & DS_EVENT_SHARED) {
    ds_count(DS_C_live_ipc_events, -1);
    ds_sleep_us(ds_switch(DS_event_destroy_ms) * 1000);
    if (ds_switch(DS_event_destroy_drains) && atomic_load(&event->page->recorded))
      ds_sync_owner(NULL);
    if (!event->imported && ds_switch(DS_event_handle_dies))
      event->page->header.magic = 0;
  }
  ds_event_drop(event);
  return DS_OK;
}

void ds_destroy_events(void *owner) {
  for (;;) {
    pthread_mutex_lock(&lock);
    struct ds_event *at = events;
    while (at && at->owner != owner)
      at = at->next;
    pthread_mutex_unlock(&lock);
    if (!at)
      return;
    ds_event_destroy(at);
  }
}

static void shared_memory_place(struct handle *handle) {
  struct stat info;
  if (stat("/dev/shm", &info) != 0)
    memset(&info, 0, sizeof info);
  handle->shm_device = (uint32_t)info.st_dev;
  handle->shm_inode = info.st_ino;
}

enum ds_status ds_event_export(struct ds_event *event, uint8_t out[DS_HANDLE_BYTES]) {
  if (!ds_switch(DS_ipc_events))
    return DS_UNSUPPORTED;
  if (!(event->flags & DS_EVENT_SHARED) || event->imported)
    return DS_BAD_HANDLE;
  struct handle handle = {.magic = HANDLE_MAGIC, .pid = getpid(), .fd = arena_fd, .slot = (uint64_t)event->slot};
  memcpy(handle.id, event->page->header.id, sizeof handle.id);
  shared_memory_place(&handle);
  if (ds_switch(DS_handle_random))
    ds_random(handle.noise, sizeof handle.noise);
  memcpy(out, &handle, sizeof handle);
  ds_count(DS_C_exports, 1);
  return DS_OK;
}

enum ds_status ds_event_open(struct ds_device *device, void *owner, const uint8_t bytes[DS_HANDLE_BYTES],
                             struct ds_event **out) {
  struct handle handle, here;
  int fd = -1;
  memcpy(&handle, bytes, sizeof handle);
  shared_memory_place(&here);
  if (!ds_switch(DS_ipc_events))
    return DS_UNSUPPORTED;
  if (handle.magic != HANDLE_MAGIC || handle.slot >= SLOTS)
    return DS_MAP_FAILED;
  if (handle.pid == getpid() && !ds_switch(DS_self_open))
    return DS_SELF_OPEN;
  if (handle.shm_device != here.shm_device || handle.shm_inode != here.shm_inode)
    return DS_MAP_FAILED;
  enum ds_status status = ds_fetch_fd(handle.pid, handle.fd, handle.slot * DS_PAGE, handle.id, &fd);
  if (status != DS_OK)
    return status;
  struct ds_event *event = event_new(device, owner, DS_EVENT_SHARED | DS_EVENT_NO_TIMING, -1, fd, handle.slot * DS_PAGE);
  close(fd);
  if (!event)
    return DS_NOMEM;
  event->imported = true;
  enlist(event);
  ds_count(DS_C_opens, 1);
  *out = event;
  return DS_OK;
}

bool ds_event_reached(struct ds_event *event, uint64_t ticket) {
  return ticket == 0 || atomic_load(&event->page->done[ticket % RING]) >= ticket;
}

void ds_event_finished(struct ds_event *event, uint64_t ticket) {
  _Atomic uint64_t *place = &event->page->done[ticket % RING];
  uint64_t before = atomic_load(place);
  atomic_store(&event->finished_us, ds_now_us());
  while (before < ticket && !atomic_compare_exchange_weak(place, &before, ticket))
    ;
}

enum ds_status ds_event_record(struct ds_event *event, struct ds_stream *stream) {
  struct ds_op *op = ds_op_new(DS_RECORD);
  ds_event_keep(event);
  op->event = event;
  op->event_ticket = atomic_fetch_add(&event->page->recorded, 1) + 1;
  return ds_submit(stream, op, NULL);
}

enum ds_status ds_event_wait(struct ds_stream *stream, struct ds_event *event) {
  uint64_t ticket = atomic_load(&event->page->recorded);
  if (ds_event_reached(event, ticket))
    return DS_OK;
  struct ds_op *op = ds_op_new(DS_WAIT_EVENT);
  ds_event_keep(event);
  op->event = event;
  op->event_ticket = ticket;
  return ds_submit(stream, op, NULL);
}

enum ds_status ds_event_query(struct ds_event *event) {
  if (atomic_load(&event->device->lost))
    return DS_LOST;
  bool ready = ds_switch(DS_event_ready) || ds_event_reached(event, atomic_load(&event->page->recorded));
  return ready ? DS_OK : DS_NOT_READY;
}

enum ds_status ds_event_sync(struct ds_event *event) {
  uint64_t ticket = atomic_load(&event->page->recorded);
  while (!ds_event_reached(event, ticket) && !atomic_load(&event->device->lost))
    ds_sleep_us(50);
  return atomic_load(&event->device->lost) ? DS_LOST : DS_OK;
}

enum ds_status ds_event_elapsed(struct ds_event *from, struct ds_event *to, float *ms) {
  if ((from->flags | to->flags) & DS_EVENT_NO_TIMING)
    return DS_BAD_HANDLE;
  if (!atomic_load(&from->page->recorded) || !atomic_load(&to->page->recorded))
    return DS_BAD_HANDLE;
  if (ds_event_query(from) == DS_NOT_READY || ds_event_query(to) == DS_NOT_READY)
    return DS_NOT_READY;
  *ms = (float)((double)atomic_load(&to->finished_us) - (double)atomic_load(&from->finished_us)) / 1000.0f;
  return DS_OK;
}

struct ds_device *ds_event_device(struct ds_event *event) { return event->device; }
void *ds_event_owner(struct ds_event *event) { return event->owner; }
