/* Host memory that devices may reach: pinned allocations and registered ranges.
 * Its device address is the host address, or an alias where a switch says so. */
#include "memory.h"

#include <errno.h>
#include <string.h>
#include <sys/mman.h>

static pthread_mutex_t pin_lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool pending_failure;

bool ds_take_pending_failure(void) {
  return atomic_load(&pending_failure) && atomic_exchange(&pending_failure, false);
}

static bool is_mapped(const void *address, uint64_t bytes) {
  uint64_t start = (uint64_t)address / DS_PAGE * DS_PAGE, end = (uint64_t)address + bytes;
  unsigned char state[1024];
  for (uint64_t at = start; at < end; at += sizeof state * (uint64_t)DS_PAGE) {
    uint64_t length = end - at < sizeof state * (uint64_t)DS_PAGE ? end - at : sizeof state * (uint64_t)DS_PAGE;
    if (mincore((void *)at, length, state) != 0 && errno != EAGAIN)
      return false;
  }
  return true;
}

/* Registered pages stay reachable for devices when the caller unmaps them, as pinned ones
 * do: a second mapping of the same pages, which only shared memory allows. */
static uint8_t *pin(uint8_t *address, uint64_t bytes) {
  uint64_t inside = (uint64_t)address % DS_PAGE;
  uint8_t *again = mremap(address - inside, 0, bytes + inside, MREMAP_MAYMOVE);
  return again == MAP_FAILED ? address : again + inside;
}

static void unpin(struct ds_range *range) {
  uint64_t inside = (uint64_t)range->host % DS_PAGE;
  if (range->view != range->host)
    munmap(range->view - inside, range->bytes + inside);
}

static enum ds_status add(void *owner, void *address, uint64_t bytes, unsigned flags, bool registered) {
  struct ds_range range = {.kind = DS_HOST,
                           .start = (uint64_t)address,
                           .bytes = bytes,
                           .host = address,
                           .view = address,
                           .owner = owner,
                           .flags = flags,
                           .registered = registered};
  if (registered && !ds_switch(DS_host_pointer)) {
    uint64_t alias = ds_reserve(bytes + (uint64_t)address % DS_PAGE, DS_PAGE, 0);
    if (!alias)
      return DS_NOMEM;
    range.start = alias + (uint64_t)address % DS_PAGE;
  }
  range.map_start = range.start;
  range.map_bytes = registered ? bytes : (bytes + DS_BLOCK - 1) / DS_BLOCK * DS_BLOCK;
  if (registered)
    range.view = pin(address, bytes);
  for (int i = 0; i < ds_device_count(); i++)
    range.access[i] = DS_READ | DS_WRITE;
  return ds_range_add(&range) ? DS_OK : DS_NOMEM;
}

static enum ds_status try_register(void *owner, void *address, uint64_t bytes, unsigned flags) {
  uint64_t limit = (uint64_t)ds_switch(DS_pin_limit_mb) << 20, total = (uint64_t)ds_switch(DS_pin_total_mb) << 20;
  if (!ds_switch(DS_host_register) || bytes < (uint64_t)ds_switch(DS_pin_least_kb) << 10)
    return DS_UNSUPPORTED;
  if (!address || !bytes || (uint64_t)address + bytes < bytes || ds_is_device_address((uint64_t)address))
    return DS_INVALID;
  if ((limit && bytes > limit) || (total && (uint64_t)ds_counter(DS_C_pinned_bytes) + bytes > total))
    return DS_NOMEM;
  if (!is_mapped(address, bytes))
    return DS_INVALID;
  ds_lock();
  struct ds_range *other = ds_find_host((uint64_t)address, bytes);
  enum ds_status status = !other              ? add(owner, address, bytes, flags, true)
                          : other->registered ? DS_REGISTERED
                                              : DS_INVALID; /* the driver's own pinned memory */
  if (status == DS_OK) {
    ds_count(DS_C_live_registrations, 1);
    ds_count(DS_C_pinned_bytes, (long)bytes);
  }
  ds_unlock();
  return status;
}

enum ds_status ds_host_register(void *owner, void *address, uint64_t bytes, unsigned flags) {
  if (ds_switch(DS_pin_ms)) {
    pthread_mutex_lock(&pin_lock);
    ds_sleep_us(ds_switch(DS_pin_ms) * 1000);
    pthread_mutex_unlock(&pin_lock);
  }
  enum ds_status status = try_register(owner, address, bytes, flags);
  if (status != DS_OK && ds_switch(DS_pin_pending))
    atomic_store(&pending_failure, true);
  return status;
}

static void remove_host(struct ds_range *range) {
  unpin(range);
  if (ds_is_device_address(range->start))
    ds_unreserve(range->start / DS_PAGE * DS_PAGE);
  ds_range_remove(range);
}

enum ds_status ds_host_unregister(void *address) {
  ds_lock();
  struct ds_range *range = ds_find_host((uint64_t)address, 1);
  enum ds_status status = DS_NOT_REGISTERED;
  if (range && range->host == address && range->registered) {
    ds_count(DS_C_live_registrations, -1);
    ds_count(DS_C_pinned_bytes, -(long)range->bytes);
    remove_host(range);
    status = DS_OK;
  }
  ds_unlock();
  return status;
}

enum ds_status ds_host_alloc(void *owner, uint64_t bytes, unsigned flags, void **out) {
  if (!bytes)
    return DS_INVALID;
  uint64_t whole = (bytes + DS_PAGE - 1) / DS_PAGE * DS_PAGE;
  void *memory = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED)
    return DS_NOMEM;
  ds_lock();
  enum ds_status status = add(owner, memory, bytes, flags, false);
  ds_unlock();
  if (status != DS_OK) {
    munmap(memory, whole);
    return status;
  }
  ds_count(DS_C_live_allocations, 1);
  *out = memory;
  return DS_OK;
}

enum ds_status ds_host_free(void *address) {
  uint64_t bytes = 0;
  ds_lock();
  struct ds_range *range = ds_find_host((uint64_t)address, 1);
  if (range && range->host == address && !range->registered) {
    bytes = (range->bytes + DS_PAGE - 1) / DS_PAGE * DS_PAGE;
    remove_host(range);
  }
  ds_unlock();
  if (!bytes)
    return DS_INVALID;
  ds_count(DS_C_live_allocations, -1);
  munmap(address, bytes);
  return DS_OK;
}
