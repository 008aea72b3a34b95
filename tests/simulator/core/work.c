/* What each piece of stream work does: copies with exact bounds, fills, values,
 * events and host functions.  Runs on the stream's worker, or on the late writer. */
#include "stream.h"

#include <fcntl.h>
#include <sched.h>
#include <string.h>

enum { SLICE = 256 << 10 };

/* Memory at an address: host bytes behind it and how far they go in one piece. */
struct view {
  uint8_t *host;
  uint64_t bytes;
  struct ds_block *block; /* kept while in use */
};

static unsigned any_access(const struct ds_range *range) {
  unsigned access = 0;
  for (int i = 0; i < ds_device_count(); i++)
    access |= range->access[i];
  return access;
}

/* Ranges of one reservation run on into each other only where physical memory is
 * mapped side by side; two classic allocations never form one span. */
static bool continues(const struct ds_range *range, const struct ds_range *next) {
  return next && next->start == range->start + range->bytes && range->kind == DS_VMM && next->kind == DS_VMM;
}

enum ds_status ds_check_span(uint64_t address, uint64_t bytes, unsigned access) {
  enum ds_status status = DS_OK;
  ds_lock();
  struct ds_range *range = ds_find(address);
  if (!range) {
    bool plain = !ds_is_device_address(address);
    ds_unlock();
    return plain && address ? DS_OK : DS_INVALID;
  }
  uint64_t left = bytes;
  for (uint64_t at = address; status == DS_OK;) {
    uint64_t here = range->start + range->bytes - at;
    if ((any_access(range) & access) != access)
      status = DS_INVALID;
    else if (left <= here)
      break;
    struct ds_range *next = ds_find(range->start + range->bytes);
    if (!continues(range, next))
      status = DS_INVALID;
    left -= here;
    at = range->start + range->bytes;
    range = next;
  }
  ds_unlock();
  return status;
}

static uint64_t span(uint64_t width, uint64_t height, uint64_t depth, uint64_t pitch, uint64_t layer) {
  return (depth - 1) * layer + (height - 1) * pitch + width;
}

enum ds_status ds_check_copy(const struct ds_copy *copy) {
  if (!copy->width || !copy->height || !copy->depth)
    return DS_OK;
  if ((copy->height > 1 && (copy->dst_pitch < copy->width || copy->src_pitch < copy->width)) ||
      (copy->depth > 1 && (copy->dst_layer < copy->width || copy->src_layer < copy->width)))
    return DS_INVALID;
  enum ds_status status = ds_check_span(
      copy->dst, span(copy->width, copy->height, copy->depth, copy->dst_pitch, copy->dst_layer), DS_WRITE);
  if (status != DS_OK)
    return status;
  return ds_check_span(copy->src, span(copy->width, copy->height, copy->depth, copy->src_pitch, copy->src_layer),
                       DS_READ);
}

enum ds_place ds_place_of(uint64_t address) {
  ds_lock();
  struct ds_range *range = ds_find(address);
  enum ds_place place = ds_is_device_address(address) ? DS_AT_DEVICE : DS_AT_PAGEABLE;
  if (range && range->kind != DS_HOST)
    place = DS_AT_DEVICE;
  else if (range || ds_find_host(address, 1))
    place = DS_AT_PINNED;
  ds_unlock();
  return place;
}

enum ds_status ds_check_value(uint64_t address, int size) {
  if (!address || address % (uint64_t)size)
    return DS_INVALID;
  ds_lock();
  struct ds_range *range = ds_find(address);
  bool pooled = range && (range->kind == DS_POOL || range->kind == DS_POOL_IMPORT);
  bool good = range && !pooled && range->kind != DS_MANAGED && range->start + range->bytes - address >= (uint64_t)size;
  ds_unlock();
  return good ? DS_OK : DS_INVALID;
}

static bool look(uint64_t address, unsigned access, struct view *view) {
  bool found = true;
  ds_lock();
  struct ds_range *range = ds_find(address);
  view->block = NULL;
  if (range && (any_access(range) & access) == access) {
    uint64_t at = address - range->start;
    view->host = range->block ? range->block->data + range->offset + at : range->view + at;
    view->bytes = range->bytes - at;
    if (range->block) {
      view->block = ds_block_keep(range->block);
      if (atomic_load(&range->block->header->freed))
        ds_count(access == DS_READ ? DS_C_reads_of_freed : DS_C_writes_of_freed, 1);
    }
  } else if (range || ds_is_device_address(address)) {
    found = false;
  } else {
    view->host = (uint8_t *)address;
    view->bytes = UINT64_MAX;
  }
  ds_unlock();
  return found;
}

static enum ds_status copy_row(uint64_t dst, uint64_t src, const uint8_t *staged, uint64_t width) {
  for (uint64_t done = 0; done < width;) {
    struct view to, from = {.host = NULL, .bytes = UINT64_MAX, .block = NULL};
    if (!look(dst + done, DS_WRITE, &to))
      return DS_ILLEGAL_ADDRESS;
    if (!staged && !look(src + done, DS_READ, &from)) {
      ds_block_drop(to.block);
      return DS_ILLEGAL_ADDRESS;
    }
    uint64_t n = width - done;
    n = n < to.bytes ? n : to.bytes;
    n = n < from.bytes ? n : from.bytes;
    n = n < SLICE ? n : SLICE;
    uint64_t began = ds_now_us();
    memmove(to.host, staged ? staged + done : from.host, n);
    ds_block_drop(to.block);
    ds_block_drop(from.block);
    long rate = ds_switch(DS_copy_mbps);
    if (rate)
      ds_sleep_us((long)(n / (uint64_t)rate) - (long)(ds_now_us() - began));
    done += n;
    if (!ds_late_pace(n))
      return DS_NOT_READY;
  }
  return DS_OK;
}

enum ds_status ds_run_copy(const struct ds_copy *copy, void *staged) {
  for (uint64_t z = 0; z < copy->depth; z++)
    for (uint64_t y = 0; y < copy->height; y++) {
      enum ds_status status =
          copy_row(copy->dst + z * copy->dst_layer + y * copy->dst_pitch,
                   copy->src + z * copy->src_layer + y * copy->src_pitch, staged, copy->width);
      if (status != DS_OK)
        return status;
    }
  return DS_OK;
}

/* Copies run on a few engines of the device; the best priority takes the next free one. */
static bool better_waits(const struct ds_device *device, int level) {
  for (int i = 0; i < level; i++)
    if (device->engine_waiting[i])
      return true;
  return false;
}

static void take_engine(struct ds_device *device, int priority) {
  int level = priority + DS_PRIORITIES / 2;
  level = level < 0 ? 0 : level >= DS_PRIORITIES ? DS_PRIORITIES - 1 : level;
  pthread_mutex_lock(&device->engine_lock);
  device->engine_waiting[level]++;
  while (device->engines_busy >= ds_switch(DS_engines) || better_waits(device, level))
    pthread_cond_wait(&device->engine_free, &device->engine_lock);
  device->engine_waiting[level]--;
  device->engines_busy++;
  pthread_cond_broadcast(&device->engine_free);
  pthread_mutex_unlock(&device->engine_lock);
}

static void give_engine(struct ds_device *device) {
  pthread_mutex_lock(&device->engine_lock);
  device->engines_busy--;
  pthread_cond_broadcast(&device->engine_free);
  pthread_mutex_unlock(&device->engine_lock);
}

static enum ds_status run_copy(struct ds_stream *stream, struct ds_op *op) {
  take_engine(stream->device, stream->priority);
  enum ds_status status = ds_run_copy(&op->copy, op->staged);
  give_engine(stream->device);
  ds_count(DS_C_copies, 1);
  ds_count(DS_C_copied_bytes, (long)(op->copy.width * op->copy.height * op->copy.depth));
  if (ds_switch(DS_leak_copy) && fcntl(0, F_DUPFD_CLOEXEC, 3) >= 0)
    ds_count(DS_C_leaked, 1);
  return status;
}

enum ds_status ds_run_fill(const struct ds_op *op) {
  for (uint64_t z = 0; z < op->copy.height; z++) {
    uint64_t row = op->copy.dst + z * op->copy.dst_pitch;
    for (uint64_t done = 0; done < op->copy.width;) {
      struct view to;
      if (!look(row + done, DS_WRITE, &to))
        return DS_ILLEGAL_ADDRESS;
      uint64_t n = op->copy.width - done < to.bytes ? op->copy.width - done : to.bytes;
      if (op->size == 1)
        memset(to.host, (uint8_t)op->value, n);
      for (uint64_t i = 0; i < n && op->size != 1; i++)
        to.host[i] = (uint8_t)(op->value >> (8 * ((done + i) % (uint64_t)op->size)));
      ds_block_drop(to.block);
      done += n;
    }
  }
  return DS_OK;
}

enum ds_status ds_value_word(const struct ds_op *op, uint64_t *now, bool write) {
  struct view view;
  if (!look(op->address, write ? DS_WRITE : DS_READ, &view))
    return DS_ILLEGAL_ADDRESS;
  if (op->size == 8) {
    _Atomic uint64_t *word = (_Atomic uint64_t *)view.host;
    write ? atomic_store(word, op->value) : (void)(*now = atomic_load(word));
  } else {
    _Atomic uint32_t *word = (_Atomic uint32_t *)view.host;
    write ? atomic_store(word, (uint32_t)op->value) : (void)(*now = atomic_load(word));
  }
  ds_block_drop(view.block);
  return DS_OK;
}

/* "At least" compares cyclically, as signed differences. */
bool ds_value_holds(const struct ds_op *op, uint64_t now) {
  bool wide = op->size == 8;
  switch (op->compare) {
    case DS_AT_LEAST: return wide ? (int64_t)(now - op->value) >= 0 : (int32_t)((uint32_t)now - (uint32_t)op->value) >= 0;
    case DS_EQUAL: return wide ? now == op->value : (uint32_t)now == (uint32_t)op->value;
    case DS_AND: return (now & op->value) != 0;
    default: return wide ? ~(now | op->value) != 0 : (uint32_t)~(now | op->value) != 0;
  }
}

static bool gone(struct ds_stream *stream) { return atomic_load(&stream->device->lost) != 0; }

static enum ds_status run_wait(struct ds_stream *stream, const struct ds_op *op) {
  enum ds_status status = DS_OK;
  uint64_t now = 0, spins = 0;
  bool counted = false;
  while (!gone(stream) && (status = ds_value_word(op, &now, false)) == DS_OK &&
         !(ds_switch(DS_memops_progress) && ds_value_holds(op, now))) {
    if (!counted)
      ds_count(DS_C_pending_waits, 1);
    counted = true;
    if (++spins < 50)
      sched_yield();
    else
      ds_sleep_us(50);
  }
  if (counted)
    ds_count(DS_C_pending_waits, -1);
  return status;
}

static void wait_event(struct ds_stream *stream, struct ds_op *op) {
  while (!gone(stream) && !ds_event_reached(op->event, op->event_ticket))
    ds_sleep_us(50);
}

static const char *work_name(enum ds_work work) {
  static const char *const names[] = {"", "work.copy", "work.fill", "work.write", "work.wait", "work.record",
                                      "work.wait_event", "work.host", "work.join", "work.kernel", "work.free"};
  return names[work];
}

static enum ds_status run(struct ds_stream *stream, struct ds_op *op) {
  uint64_t unused;
  switch (op->work) {
    case DS_COPY: return run_copy(stream, op);
    case DS_FILL: return ds_run_fill(op);
    case DS_WRITE_VALUE: return ds_value_word(op, &unused, true);
    case DS_WAIT_VALUE: return run_wait(stream, op);
    case DS_RECORD: ds_event_finished(op->event, op->event_ticket); return DS_OK;
    case DS_WAIT_EVENT: wait_event(stream, op); return DS_OK;
    case DS_HOST_CALL:
      ds_count(DS_C_host_calls, 1);
      op->call(op->argument);
      return DS_OK;
    case DS_JOIN: ds_wait_ticket(op->other, op->other_ticket); return DS_OK;
    case DS_KERNEL:
      ds_count(DS_C_launches, 1);
      ds_sleep_us(ds_switch(DS_kernel_us));
      return DS_OK;
    case DS_FREE_POINTER:
      if (ds_pool_free(op->address) != DS_OK)
        ds_free(op->address);
      return DS_OK;
  }
  return DS_OK;
}

void ds_run(struct ds_stream *stream, struct ds_op *op) {
  struct ds_fault fault = ds_fault_at(work_name(op->work));
  bool fails = fault.action == DS_CODE || fault.action == DS_STICKY;
  ds_act(fault);
  if (fails || gone(stream))
    ds_count(DS_C_dropped, 1);
  if (fails)
    ds_lose(stream->device, (int)fault.arg);
  if (gone(stream))
    return;
  if (run(stream, op) == DS_ILLEGAL_ADDRESS)
    ds_lose(stream->device, ds_front_illegal_address);
}
