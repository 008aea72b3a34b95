/* Allocations and what is said of an address. Host and shared memory may be touched by the host, device memory not. */
#include "front.h"

static const uint64_t HIGH = 0xff00000000000000;
enum { HOST_FLAG = 16, SHARED_FLAG = 32, PAGE_REPORTED = 65536 };

uint64_t ze_out(uint64_t address) {
  return ds_is_device_address(address) && ds_switch(DS_high_addresses) ? address | HIGH : address;
}

uint64_t ze_in(uint64_t address) { return (address & HIGH) == HIGH ? address & ~HIGH : address; }

int ze_memory_type(const struct ds_range *range) {
  if (!range)
    return ZE_TYPE_UNKNOWN;
  if (range->kind == DS_HOST)
    return ZE_TYPE_HOST_IMPORTED;
  if (range->flags & HOST_FLAG)
    return ZE_TYPE_HOST;
  return range->flags & SHARED_FLAG ? ZE_TYPE_SHARED : ZE_TYPE_DEVICE;
}

/* Remembers what an opened range is; false for a place that is not in it. */
bool ze_mark(uint64_t start, uint64_t offset, int type) {
  ds_lock();
  struct ds_range *range = ds_find(start);
  bool inside = offset < range->bytes;
  range->flags = type == ZE_TYPE_HOST ? HOST_FLAG : type == ZE_TYPE_SHARED ? SHARED_FLAG : 0;
  ds_unlock();
  return inside;
}

static int check(struct ze_context *context, size_t bytes, size_t alignment) {
  TRY(ze_context_check(context));
  if (!bytes || bytes > 1ull << 46)
    return ZE_UNSUPPORTED_SIZE;
  return alignment & (alignment - 1) ? ZE_UNSUPPORTED_ALIGNMENT : ZE_OK;
}

API(zeMemAllocDevice, ZE_API,
    (struct ze_context *context, const ze_flags *desc, size_t bytes, size_t alignment, struct ds_device *device,
     uint64_t *out),
    (context, desc, bytes, alignment, device, out)) {
  uint64_t address = 0;
  TRY(check(context, bytes, alignment));
  TRY(ze_device_check(device));
  if (!desc)
    ds_wild("description");
  TRY(ze_code(ds_alloc(device, context, bytes, &address), device));
  *out = ze_out(address);
  return ZE_OK;
}

/* Memory that the host may touch; what is on the host does not count as the device's. */
static int alloc_reachable(struct ze_context *context, struct ds_device *device, size_t bytes, unsigned flag,
                           uint64_t *out) {
  TRY(ze_code(ds_alloc_managed(device, context, bytes, out), device));
  ds_lock();
  struct ds_range *range = ds_find(*out);
  range->flags |= flag;
  if (flag == HOST_FLAG)
    atomic_store(&range->block->header->used, 0);
  ds_unlock();
  return ZE_OK;
}

API(zeMemAllocHost, ZE_API,
    (struct ze_context *context, const ze_flags *desc, size_t bytes, size_t alignment, uint64_t *out),
    (context, desc, bytes, alignment, out)) {
  (void)desc;
  TRY(check(context, bytes, alignment));
  return alloc_reachable(context, ze_any_device(), bytes, HOST_FLAG, out);
}

API(zeMemAllocShared, ZE_API,
    (struct ze_context *context, const ze_flags *desc, const ze_flags *host, size_t bytes, size_t alignment,
     struct ds_device *device, uint64_t *out),
    (context, desc, host, bytes, alignment, device, out)) {
  (void)desc, (void)host;
  TRY(check(context, bytes, alignment));
  return alloc_reachable(context, device ? device : ze_any_device(), bytes, SHARED_FLAG, out);
}

API(zeMemFree, ZE_API, (struct ze_context *context, uint64_t pointer), (context, pointer)) {
  TRY(ze_context_check(context));
  uint64_t address = ze_in(pointer);
  ds_lock();
  struct ds_range *range = ds_find(address);
  if (range && range->start == address && range->block)
    ze_forget_exports(range->block, range->offset);
  ds_unlock();
  return ze_code(ds_free(address), NULL);
}

/* Unknown memory is an answer here, not an error. */
API(zeMemGetAllocProperties, ZE_API,
    (struct ze_context *context, uint64_t pointer, ze_memory_properties *out, struct ds_device **device),
    (context, pointer, out, device)) {
  TRY(ze_context_check(context));
  ds_lock();
  struct ds_range *range = ds_find(ze_in(pointer));
  out->type = ze_memory_type(range);
  out->id = range ? range->id : 0;
  out->page = range ? PAGE_REPORTED : 0;
  if (device)
    *device = range && out->type != ZE_TYPE_HOST && out->type != ZE_TYPE_HOST_IMPORTED ? range->device : NULL;
  ds_unlock();
  return ZE_OK;
}

API(zeMemGetAddressRange, ZE_API, (struct ze_context *context, uint64_t pointer, uint64_t *base, size_t *bytes),
    (context, pointer, base, bytes)) {
  TRY(ze_context_check(context));
  ds_lock();
  struct ds_range *range = ds_find(ze_in(pointer));
  if (range && base)
    *base = ze_out(range->start);
  if (range && bytes)
    *bytes = range->bytes;
  ds_unlock();
  return range ? ZE_OK : ZE_ADDRESS_NOT_FOUND;
}
