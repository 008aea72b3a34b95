/* The binary interface of the HIP runtime (ROCm 6 and newer) as far as the simulator and the forwarding library speak
 * it: numbers and layouts, checked against the sizes that the bindings use. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef int hipDevice_t;
typedef void (*hipHostFn_t)(void *);

enum hip_result {
  HIP_OK = 0, HIP_INVALID_VALUE = 1, HIP_OUT_OF_MEMORY = 2, HIP_NOT_INITIALIZED = 3, HIP_INVALID_POINTER = 17,
  HIP_NO_DEVICE = 100, HIP_INVALID_DEVICE = 101, HIP_INVALID_CONTEXT = 201, HIP_MAP_FAILED = 205,
  HIP_ALREADY_MAPPED = 208, HIP_PEER_UNSUPPORTED = 217, HIP_INVALID_HANDLE = 400, HIP_ILLEGAL_STATE = 401,
  HIP_NOT_FOUND = 500, HIP_NOT_READY = 600, HIP_ILLEGAL_ADDRESS = 700, HIP_PEER_ENABLED = 704,
  HIP_HOST_REGISTERED = 712, HIP_HOST_NOT_REGISTERED = 713, HIP_LAUNCH_FAILED = 719, HIP_NOT_SUPPORTED = 801,
  HIP_CAPTURE_UNSUPPORTED = 900, HIP_CAPTURE_INVALIDATED = 901, HIP_CAPTURE_WRONG_THREAD = 908, HIP_UNKNOWN = 999,
};

enum { HIP_STREAM_NON_BLOCKING = 1, HIP_STREAM_LEGACY = 1, HIP_STREAM_PER_THREAD = 2 };
enum { HIP_HANDLE_FD = 1, HIP_LOCATION_DEVICE = 1, HIP_RANGE_DMABUF = 1, HIP_EXTERNAL_FD = 1 };
enum { HIP_MEMORY_HOST = 1, HIP_MEMORY_DEVICE = 2, HIP_MEMORY_MANAGED = 3 };
enum {
  HIP_ATTRIBUTE_HOST_POINTER = 4, HIP_ATTRIBUTE_COMPUTE_MODE = 6, HIP_ATTRIBUTE_MAX_PITCH = 58,
  HIP_ATTRIBUTE_PCI_BUS = 67, HIP_ATTRIBUTE_PCI_DEVICE = 68, HIP_ATTRIBUTE_PCI_DOMAIN = 69, HIP_ATTRIBUTE_POOLS = 88,
  HIP_ATTRIBUTE_VMM = 89, HIP_ATTRIBUTE_HOST_REGISTER = 90, HIP_ATTRIBUTE_POOL_HANDLES = 91, HIP_ATTRIBUTE_DMABUF = 93,
  HIP_ATTRIBUTE_WAIT_VALUE = 10013,
};

typedef struct { unsigned char bytes[64]; } hipHandle64; /* memory and event handles, pool pointers */
typedef struct { unsigned char bytes[16]; } hipUuid;
typedef struct { int type, id; } hipLocation;

typedef struct {
  int type, requestedHandleTypes;
  hipLocation location;
  void *win32;
  unsigned char flags[8];
} hipAllocationProp;

typedef struct { hipLocation location; int flags; } hipAccessDesc;

typedef struct {
  int allocType, handleTypes;
  hipLocation location;
  void *win32;
  size_t maxSize;
  unsigned char reserved[56];
} hipPoolProps;

typedef struct {
  int type, device;
  void *devicePointer, *hostPointer;
  int isManaged;
  unsigned allocationFlags;
} hipPointerAttribute;

typedef struct {
  int type;
  union { int fd; struct { void *handle; const void *name; } win32; } handle;
  unsigned long long size;
  unsigned flags, reserved[16];
} hipExternalHandle;

typedef struct {
  unsigned long long offset, size;
  unsigned flags, reserved[16];
} hipExternalBuffer;

_Static_assert(sizeof(hipAllocationProp) == 32, "allocation properties");
_Static_assert(sizeof(hipAccessDesc) == 12, "access description");
_Static_assert(sizeof(hipPoolProps) == 88, "pool properties");
_Static_assert(sizeof(hipPointerAttribute) == 32, "pointer attributes");
_Static_assert(sizeof(hipExternalHandle) == 104, "external memory");
_Static_assert(sizeof(hipExternalBuffer) == 88, "buffer of external memory");
