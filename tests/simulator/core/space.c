/* The map of device addresses: one reservation that the host cannot touch, spans
 * handed out first-fit (a freed address is reused at once, as drivers do), and the
 * sorted list of live ranges.  It knows nothing of what a range is for. */
#include "memory.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

struct span {
  uint64_t start, bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t made = PTHREAD_ONCE_INIT;
static _Atomic uint64_t arena_start, arena_end;
static struct span *spans;
static size_t span_count, span_room;
static struct ds_range **ranges;
static size_t range_count, range_room;

void ds_lock(void) { pthread_mutex_lock(&lock); }
void ds_unlock(void) { pthread_mutex_unlock(&lock); }
void ds_locks_afresh(void) { pthread_mutex_init(&lock, NULL); }

static void make(void) {
  for (uint64_t size = 1ull << 43; size >= 1ull << 34; size >>= 1) {
    void *at = mmap(NULL, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
      continue;
    atomic_store(&arena_start, ((uint64_t)at + DS_BLOCK - 1) / DS_BLOCK * DS_BLOCK);
    atomic_store(&arena_end, (uint64_t)at + size);
    return;
  }
}

bool ds_is_device_address(uint64_t address) {
  return address >= atomic_load(&arena_start) && address < atomic_load(&arena_end);
}

/* Makes room for one more element; false when memory is out. */
static bool grow(void **items, size_t count, size_t *room, size_t size) {
  if (count < *room)
    return true;
  size_t wider = *room ? *room * 2 : 64;
  void *bigger = realloc(*items, wider * size);
  if (!bigger)
    return false;
  *items = bigger;
  *room = wider;
  return true;
}

static uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

/* The position at which a span of `bytes` fits, and its address; -1 for none. */
static long place(uint64_t bytes, uint64_t align, uint64_t hint, uint64_t *start) {
  uint64_t at = arena_start;
  long fallback = -1;
  for (size_t i = 0; i <= span_count; i++) {
    uint64_t gap_end = i < span_count ? spans[i].start : arena_end;
    uint64_t aligned = round_up(at, align);
    if (hint >= at && hint % align == 0 && hint < gap_end && gap_end - hint >= bytes) {
      *start = hint;
      return (long)i;
    }
    if (fallback < 0 && aligned < gap_end && gap_end - aligned >= bytes) {
      fallback = (long)i;
      *start = aligned;
      if (!hint)
        break;
    }
    if (i < span_count)
      at = spans[i].start + spans[i].bytes;
  }
  return fallback;
}

uint64_t ds_reserve(uint64_t bytes, uint64_t align, uint64_t hint) {
  pthread_once(&made, make);
  bytes = round_up(bytes, DS_PAGE);
  uint64_t limit = (uint64_t)ds_switch(DS_va_limit_mb) << 20, start = 0;
  if (limit && (uint64_t)ds_counter(DS_C_reserved_bytes) + bytes > limit)
    return 0;
  long i = place(bytes, align < DS_PAGE ? DS_PAGE : align, hint, &start);
  if (i < 0 || !grow((void **)&spans, span_count, &span_room, sizeof *spans))
    return 0;
  memmove(spans + i + 1, spans + i, (span_count - (size_t)i) * sizeof *spans);
  spans[i] = (struct span){start, bytes};
  span_count++;
  ds_count(DS_C_reserved_bytes, (long)bytes);
  return start;
}

void ds_unreserve(uint64_t start) {
  for (size_t i = 0; i < span_count; i++)
    if (spans[i].start == start) {
      ds_count(DS_C_reserved_bytes, -(long)spans[i].bytes);
      memmove(spans + i, spans + i + 1, (--span_count - i) * sizeof *spans);
      return;
    }
}

/* Index of the first range that ends above `address`. */
static size_t lower(uint64_t address) {
  size_t low = 0, high = range_count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (ranges[middle]->start + ranges[middle]->bytes <= address)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

struct ds_range *ds_range_add(const struct ds_range *like) {
  struct ds_range *range = malloc(sizeof *range);
  if (!range || !grow((void **)&ranges, range_count, &range_room, sizeof *ranges)) {
    free(range);
    return NULL;
  }
  *range = *like;
  range->id = ds_unique();
  size_t at = lower(range->start);
  memmove(ranges + at + 1, ranges + at, (range_count - at) * sizeof *ranges);
  ranges[at] = range;
  range_count++;
  return range;
}

void ds_range_remove(struct ds_range *range) {
  size_t at = lower(range->start);
  memmove(ranges + at, ranges + at + 1, (--range_count - at) * sizeof *ranges);
  free(range);
}

struct ds_range *ds_find_next(uint64_t address) {
  size_t at = lower(address);
  return at < range_count ? ranges[at] : NULL;
}

struct ds_range *ds_find(uint64_t address) {
  struct ds_range *range = ds_find_next(address);
  return range && range->start <= address ? range : NULL;
}

struct ds_range *ds_range_at(size_t i) { return i < range_count ? ranges[i] : NULL; }

/* By host address: the device address of host memory may be an alias. */
struct ds_range *ds_find_host(uint64_t host_address, uint64_t bytes) {
  for (size_t i = 0; i < range_count; i++) {
    uint64_t host = (uint64_t)ranges[i]->host;
    if (ranges[i]->kind == DS_HOST && host < host_address + bytes && host_address < host + ranges[i]->bytes)
      return ranges[i];
  }
  return NULL;
}
