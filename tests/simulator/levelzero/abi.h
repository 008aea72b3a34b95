/* The binary interface of a Level Zero driver as far as the simulator speaks it: numbers and
 * layouts of versions 1.0 to 1.17, checked against the sizes in their headers. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum ze_result {
  ZE_OK = 0, ZE_NOT_READY = 1, ZE_DEVICE_LOST = 0x70000001, ZE_OUT_OF_HOST_MEMORY = 0x70000002,
  ZE_OUT_OF_DEVICE_MEMORY = 0x70000003, ZE_NOT_PERMITTED = 0x70010000, ZE_NOT_AVAILABLE = 0x70010001,
  ZE_UNINITIALIZED = 0x78000001, ZE_UNSUPPORTED_VERSION = 0x78000002, ZE_UNSUPPORTED = 0x78000003,
  ZE_INVALID_ARGUMENT = 0x78000004, ZE_NULL_HANDLE = 0x78000005, ZE_IN_USE = 0x78000006, ZE_NULL_POINTER = 0x78000007,
  ZE_INVALID_SIZE = 0x78000008, ZE_UNSUPPORTED_SIZE = 0x78000009, ZE_UNSUPPORTED_ALIGNMENT = 0x7800000a,
  ZE_UNSUPPORTED_ENUMERATION = 0x7800000d, ZE_ADDRESS_NOT_FOUND = 0x78000021, ZE_UNKNOWN = 0x7ffffffe,
};
enum { ZE_API = 0x10000, ZE_API_5 = 0x10005, ZE_API_6 = 0x10006, ZE_API_7 = 0x10007, ZE_API_10 = 0x1000a, ZE_API_15 = 0x1000f };

enum { ZE_GROUP_COMPUTE = 1, ZE_GROUP_COPY = 2, ZE_GROUP_COOPERATIVE = 4 };
enum { ZE_POOL_HOST_VISIBLE = 1, ZE_POOL_IPC = 2 };
enum { ZE_IPC_MEMORY = 1, ZE_IPC_EVENT_POOL = 2 };
enum { ZE_HANDLE_DEFAULT = 1 };
enum { ZE_TYPE_UNKNOWN, ZE_TYPE_HOST, ZE_TYPE_DEVICE, ZE_TYPE_SHARED, ZE_TYPE_HOST_IMPORTED };
enum { ZE_DEVICE_GPU = 1, ZE_DEVICE_IS_SUBDEVICE = 2 };
enum { ZE_QUEUE_SYNCHRONOUS = 1, ZE_PRIORITY_LOW = 1, ZE_PRIORITY_HIGH = 2 };

typedef struct { int stype; void *next; } ze_base;
typedef struct { unsigned char bytes[64]; } ze_handle64; /* passed by value */

typedef struct {
  ze_base base;
  int type;
  uint32_t vendor, device, flags, subdevice, clock;
  uint64_t max_alloc;
  uint32_t max_contexts, max_priority, threads, simd, eus, subslices, slices;
  uint64_t timer_resolution;
  uint32_t timestamp_bits, kernel_timestamp_bits;
  uint8_t uuid[16];
  char name[256];
} ze_device_properties;

typedef struct { ze_base base; uint8_t uuid[16]; uint32_t version; } ze_driver_properties;
typedef struct { ze_base base; uint32_t flags; } ze_flags; /* IPC properties, context and memory descriptions */
typedef struct { ze_base base; uint32_t flags; size_t max_fill; uint32_t queues; } ze_queue_group;
typedef struct { ze_base base; uint32_t ordinal, index, flags; int mode, priority; } ze_queue_desc;
typedef struct { ze_base base; uint32_t flags, count; } ze_pool_desc;
typedef struct { ze_base base; uint32_t index, signal, wait; } ze_event_desc;
typedef struct { ze_base base; int type; uint64_t id, page; } ze_memory_properties;
typedef struct { uint32_t x, y, z, width, height, depth; } ze_region;
typedef struct { char name[256]; uint32_t version; } ze_extension;
typedef struct { ze_base base; uint32_t domain, bus, device, function; int32_t gen, width; int64_t bandwidth; } ze_pci;
typedef struct { ze_base base; uint32_t flags, clock, width; uint64_t bytes; char name[256]; } ze_device_memory;

typedef struct { ze_base base; ze_device_properties core; uint32_t subdevices; char texts[6][64]; } zes_device_properties;
typedef struct { ze_base base; uint32_t domain, bus, device, function; int32_t gen, width; int64_t bandwidth;
                 uint8_t counters[3]; } zes_pci;
typedef struct { ze_base base; int type; uint8_t on_subdevice; uint32_t subdevice; int location; uint64_t bytes;
                 int32_t width, channels; } zes_memory_properties;
typedef struct { ze_base base; int health; uint64_t free, size; } zes_memory_state;

_Static_assert(sizeof(ze_device_properties) == 368, "device properties");
_Static_assert(sizeof(ze_driver_properties) == 40, "driver properties");
_Static_assert(sizeof(ze_flags) == 24, "descriptions of one word");
_Static_assert(sizeof(ze_queue_group) == 40, "queue group");
_Static_assert(sizeof(ze_queue_desc) == 40, "queue description");
_Static_assert(sizeof(ze_pool_desc) == 24, "event pool description");
_Static_assert(sizeof(ze_event_desc) == 32, "event description");
_Static_assert(sizeof(ze_memory_properties) == 40, "memory properties");
_Static_assert(sizeof(ze_region) == 24, "copy region");
_Static_assert(sizeof(ze_pci) == 48, "bus properties");
_Static_assert(sizeof(zes_device_properties) == 776, "device properties of Sysman");

/* The bytes of an IPC handle, packed: the opaque form, of which the older one is the beginning. */
typedef struct __attribute__((packed)) {
  uint64_t fd, pool_offset;
  uint32_t pid;     /* opaque form only; the older one has the memory's type here */
  uint8_t kind, memory;
  uint64_t fd_copy; /* equal to fd: to be fetched from pid; else fd is the caller's */
  uint8_t reserved[32];
  uint8_t compressed;
} ze_memory_handle;
typedef struct __attribute__((packed)) { uint64_t fd, pool_offset; uint8_t memory; } ze_older_handle;
typedef struct __attribute__((packed)) { uint64_t fd, fd_copy; uint32_t count, pid; } ze_pool_handle;
_Static_assert(sizeof(ze_memory_handle) == 63, "memory handle");
