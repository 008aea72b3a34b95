/* The binary interface of the CUDA driver as far as the simulator speaks it:
 * numbers and layouts, checked against the size the bindings use. */
#pragma once

#include <stddef.h>
#include <stdint.h>

typedef int CUdevice;
typedef uint64_t CUdeviceptr;
typedef struct context *CUcontext;
typedef struct ds_stream *CUstream;
typedef struct ds_event *CUevent;
typedef struct ds_pool *CUmemoryPool;
typedef struct module *CUmodule;
typedef struct function *CUfunction;
typedef struct graph *CUgraph;
typedef void (*CUhostFn)(void *);

enum cu_result {
  CU_OK = 0, CU_INVALID_VALUE = 1, CU_OUT_OF_MEMORY = 2, CU_NOT_INITIALIZED = 3, CU_DEVICE_UNAVAILABLE = 46,
  CU_NO_DEVICE = 100, CU_INVALID_DEVICE = 101, CU_INVALID_IMAGE = 200, CU_INVALID_CONTEXT = 201, CU_MAP_FAILED = 205,
  CU_UNMAP_FAILED = 206, CU_ALREADY_MAPPED = 208, CU_PEER_UNSUPPORTED = 217, CU_INVALID_PTX = 218,
  CU_OPERATING_SYSTEM = 304, CU_INVALID_HANDLE = 400, CU_ILLEGAL_STATE = 401, CU_NOT_FOUND = 500, CU_NOT_READY = 600,
  CU_ILLEGAL_ADDRESS = 700, CU_PEER_ALREADY_ENABLED = 704, CU_PEER_NOT_ENABLED = 705, CU_PRIMARY_ACTIVE = 708,
  CU_CONTEXT_IS_DESTROYED = 709, CU_HOST_ALREADY_REGISTERED = 712, CU_HOST_NOT_REGISTERED = 713,
  CU_NOT_PERMITTED = 800, CU_NOT_SUPPORTED = 801, CU_CAPTURE_UNSUPPORTED = 900, CU_CAPTURE_INVALIDATED = 901,
  CU_CAPTURE_UNMATCHED = 903, CU_CAPTURE_IMPLICIT = 906, CU_CAPTURED_EVENT = 907, CU_CAPTURE_WRONG_THREAD = 908,
  CU_UNKNOWN = 999,
};

enum { CU_STREAM_LEGACY = 1, CU_STREAM_PER_THREAD = 2, CU_STREAM_NON_BLOCKING = 1 };
enum { CU_EVENT_INTERPROCESS = 4 };
enum { CU_MEM_HANDLE_NONE = 0, CU_MEM_HANDLE_FD = 1, CU_MEM_HANDLE_FABRIC = 8 };
enum { CU_MEM_LOCATION_DEVICE = 1, CU_MEM_LOCATION_HOST = 2 };
enum { CU_MEMORYTYPE_HOST = 1, CU_MEMORYTYPE_DEVICE = 2, CU_MEMORYTYPE_ARRAY = 3, CU_MEMORYTYPE_UNIFIED = 4 };

typedef struct { unsigned char bytes[16]; } CUuuid;
typedef struct { unsigned char bytes[64]; } CUhandle64; /* memory and event handles, pool pointers, fabric */
typedef struct { int type, id; } CUmemLocation;

typedef struct {
  int type, requestedHandleTypes;
  CUmemLocation location;
  void *win32HandleMetaData;
  struct { unsigned char compressionType, gpuDirectRDMACapable; unsigned short usage; unsigned char reserved[4]; } allocFlags;
} CUmemAllocationProp;

typedef struct { CUmemLocation location; int flags; } CUmemAccessDesc;

typedef struct {
  int allocType, handleTypes;
  CUmemLocation location;
  void *win32SecurityAttributes;
  size_t maxSize;
  unsigned short usage;
  unsigned char reserved[54];
} CUmemPoolProps;

typedef struct {
  size_t srcXInBytes, srcY;
  int srcMemoryType;
  const void *srcHost;
  CUdeviceptr srcDevice;
  void *srcArray;
  size_t srcPitch, dstXInBytes, dstY;
  int dstMemoryType;
  void *dstHost;
  CUdeviceptr dstDevice;
  void *dstArray;
  size_t dstPitch, WidthInBytes, Height;
} CUDA_MEMCPY2D;

typedef struct {
  size_t srcXInBytes, srcY, srcZ, srcLOD;
  int srcMemoryType;
  const void *srcHost;
  CUdeviceptr srcDevice;
  void *srcArray, *reserved0; /* the peer form keeps a context here */
  size_t srcPitch, srcHeight, dstXInBytes, dstY, dstZ, dstLOD;
  int dstMemoryType;
  void *dstHost;
  CUdeviceptr dstDevice;
  void *dstArray, *reserved1;
  size_t dstPitch, dstHeight, WidthInBytes, Height, Depth;
} CUDA_MEMCPY3D;

typedef struct {
  int srcAccessOrder;
  CUmemLocation srcLocHint, dstLocHint;
  unsigned int flags;
} CUmemcpyAttributes;

typedef struct {
  int type;
  union {
    struct { CUdeviceptr ptr; size_t rowLength, layerHeight; CUmemLocation locHint; } ptr;
    struct { void *array; size_t offset[3]; } array;
  } op;
} CUmemcpy3DOperand;

typedef struct {
  CUmemcpy3DOperand src, dst;
  size_t extent[3];
  int srcAccessOrder;
  unsigned int flags;
} CUDA_MEMCPY3D_BATCH_OP;

enum { CU_OP_WAIT_32 = 1, CU_OP_WRITE_32 = 2, CU_OP_FLUSH = 3, CU_OP_WAIT_64 = 4, CU_OP_WRITE_64 = 5, CU_OP_BARRIER = 6 };
typedef union {
  int operation;
  struct { int operation; CUdeviceptr address; uint64_t value; unsigned int flags; CUdeviceptr alias; } value;
  uint64_t pad[6];
} CUstreamBatchMemOpParams;

_Static_assert(sizeof(CUmemAllocationProp) == 32, "allocation properties");
_Static_assert(sizeof(CUmemAccessDesc) == 12, "access description");
_Static_assert(sizeof(CUmemPoolProps) == 88, "pool properties");
_Static_assert(sizeof(CUDA_MEMCPY2D) == 128, "2D copy");
_Static_assert(sizeof(CUDA_MEMCPY3D) == 200, "3D copy");
_Static_assert(sizeof(CUmemcpyAttributes) == 24, "copy attributes");
_Static_assert(sizeof(CUDA_MEMCPY3D_BATCH_OP) == 112, "3D batch item");
_Static_assert(sizeof(CUstreamBatchMemOpParams) == 48, "stream value operation");
