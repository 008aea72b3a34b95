/* The driver's calls that are forwarded to, found by name in the libcuda of the process, and what each call needs
 * first: a started driver and the thread's device made current. */
#pragma once

#include "../hip/abi.h"

#include <stdbool.h>

typedef uint64_t ptr64;
typedef struct stream *stream_t;
typedef struct event *event_t;

struct copy_2d {
  size_t src_x, src_y;
  int src_type;
  const void *src_host;
  ptr64 src;
  void *src_array;
  size_t src_pitch, dst_x, dst_y;
  int dst_type;
  void *dst_host;
  ptr64 dst;
  void *dst_array;
  size_t dst_pitch, width, height;
};
struct copy_attributes {
  int order;
  hipLocation src, dst;
  unsigned flags;
};
_Static_assert(sizeof(struct copy_2d) == 128, "2D copy");
_Static_assert(sizeof(struct copy_attributes) == 24, "copy attributes");

/* name, arguments */
#define DRIVER_CALLS(CALL)                                                                                            \
  CALL(cuInit, (unsigned))                                                                                            \
  CALL(cuDriverGetVersion, (int *))                                                                                   \
  CALL(cuDeviceGetCount, (int *))                                                                                     \
  CALL(cuDeviceGet, (int *, int))                                                                                     \
  CALL(cuDeviceGetName, (char *, int, int))                                                                           \
  CALL(cuDeviceGetUuid_v2, (hipUuid *, int))                                                                          \
  CALL(cuDeviceGetPCIBusId, (char *, int, int))                                                                       \
  CALL(cuDeviceTotalMem_v2, (size_t *, int))                                                                          \
  CALL(cuDeviceGetAttribute, (int *, int, int))                                                                       \
  CALL(cuDeviceCanAccessPeer, (int *, int, int))                                                                      \
  CALL(cuDevicePrimaryCtxRetain, (void **, int))                                                                      \
  CALL(cuCtxSetCurrent, (void *))                                                                                     \
  CALL(cuCtxSynchronize, (void))                                                                                      \
  CALL(cuMemGetInfo_v2, (size_t *, size_t *))                                                                         \
  CALL(cuMemAlloc_v2, (ptr64 *, size_t))                                                                              \
  CALL(cuMemAllocManaged, (ptr64 *, size_t, unsigned))                                                                \
  CALL(cuMemFree_v2, (ptr64))                                                                                         \
  CALL(cuMemHostAlloc, (void **, size_t, unsigned))                                                                   \
  CALL(cuMemFreeHost, (void *))                                                                                       \
  CALL(cuMemHostRegister_v2, (void *, size_t, unsigned))                                                              \
  CALL(cuMemHostUnregister, (void *))                                                                                 \
  CALL(cuMemHostGetDevicePointer_v2, (ptr64 *, void *, unsigned))                                                     \
  CALL(cuMemGetAddressRange_v2, (ptr64 *, size_t *, ptr64))                                                           \
  CALL(cuPointerGetAttribute, (void *, int, ptr64))                                                                   \
  CALL(cuIpcGetMemHandle, (hipHandle64 *, ptr64))                                                                     \
  CALL(cuIpcOpenMemHandle_v2, (ptr64 *, hipHandle64, unsigned))                                                       \
  CALL(cuIpcCloseMemHandle, (ptr64))                                                                                  \
  CALL(cuIpcGetEventHandle, (hipHandle64 *, event_t))                                                                 \
  CALL(cuIpcOpenEventHandle, (event_t *, hipHandle64))                                                                \
  CALL(cuMemCreate, (ptr64 *, size_t, const hipAllocationProp *, unsigned long long))                                 \
  CALL(cuMemRelease, (ptr64))                                                                                         \
  CALL(cuMemGetAllocationGranularity, (size_t *, const hipAllocationProp *, int))                                     \
  CALL(cuMemExportToShareableHandle, (void *, ptr64, int, unsigned long long))                                        \
  CALL(cuMemImportFromShareableHandle, (ptr64 *, void *, int))                                                        \
  CALL(cuMemRetainAllocationHandle, (ptr64 *, void *))                                                                \
  CALL(cuMemAddressReserve, (ptr64 *, size_t, size_t, ptr64, unsigned long long))                                     \
  CALL(cuMemAddressFree, (ptr64, size_t))                                                                             \
  CALL(cuMemMap, (ptr64, size_t, size_t, ptr64, unsigned long long))                                                  \
  CALL(cuMemUnmap, (ptr64, size_t))                                                                                   \
  CALL(cuMemSetAccess, (ptr64, size_t, const hipAccessDesc *, size_t))                                                \
  CALL(cuMemGetAccess, (unsigned long long *, const hipLocation *, ptr64))                                            \
  CALL(cuMemGetHandleForAddressRange, (void *, ptr64, size_t, int, unsigned long long))                               \
  CALL(cuImportExternalMemory, (void **, const hipExternalHandle *))                                                  \
  CALL(cuExternalMemoryGetMappedBuffer, (ptr64 *, void *, const hipExternalBuffer *))                                 \
  CALL(cuDestroyExternalMemory, (void *))                                                                             \
  CALL(cuMemPoolCreate, (void **, const hipPoolProps *))                                                              \
  CALL(cuMemPoolDestroy, (void *))                                                                                    \
  CALL(cuMemPoolSetAccess, (void *, const hipAccessDesc *, size_t))                                                   \
  CALL(cuMemPoolExportToShareableHandle, (void *, void *, int, unsigned long long))                                   \
  CALL(cuMemPoolImportFromShareableHandle, (void **, void *, int, unsigned long long))                                \
  CALL(cuMemPoolExportPointer, (hipHandle64 *, ptr64))                                                                \
  CALL(cuMemPoolImportPointer, (ptr64 *, void *, hipHandle64 *))                                                      \
  CALL(cuMemAllocFromPoolAsync, (ptr64 *, size_t, void *, stream_t))                                                  \
  CALL(cuMemFreeAsync, (ptr64, stream_t))                                                                             \
  CALL(cuStreamCreate, (stream_t *, unsigned))                                                                        \
  CALL(cuStreamCreateWithPriority, (stream_t *, unsigned, int))                                                       \
  CALL(cuStreamDestroy_v2, (stream_t))                                                                                \
  CALL(cuStreamSynchronize, (stream_t))                                                                               \
  CALL(cuStreamQuery, (stream_t))                                                                                     \
  CALL(cuStreamWaitEvent, (stream_t, event_t, unsigned))                                                              \
  CALL(cuStreamIsCapturing, (stream_t, int *))                                                                        \
  CALL(cuStreamBeginCapture_v2, (stream_t, int))                                                                      \
  CALL(cuStreamEndCapture, (stream_t, void **))                                                                       \
  CALL(cuGraphDestroy, (void *))                                                                                      \
  CALL(cuThreadExchangeStreamCaptureMode, (int *))                                                                    \
  CALL(cuLaunchHostFunc, (stream_t, hipHostFn_t, void *))                                                             \
  CALL(cuEventCreate, (event_t *, unsigned))                                                                          \
  CALL(cuEventRecord, (event_t, stream_t))                                                                            \
  CALL(cuEventQuery, (event_t))                                                                                       \
  CALL(cuEventSynchronize, (event_t))                                                                                 \
  CALL(cuEventDestroy_v2, (event_t))                                                                                  \
  CALL(cuStreamWriteValue32_v2, (stream_t, ptr64, uint32_t, unsigned))                                                \
  CALL(cuStreamWriteValue64_v2, (stream_t, ptr64, uint64_t, unsigned))                                                \
  CALL(cuStreamWaitValue32_v2, (stream_t, ptr64, uint32_t, unsigned))                                                 \
  CALL(cuStreamWaitValue64_v2, (stream_t, ptr64, uint64_t, unsigned))                                                 \
  CALL(cuMemcpy, (ptr64, ptr64, size_t))                                                                              \
  CALL(cuMemcpyAsync, (ptr64, ptr64, size_t, stream_t))                                                               \
  CALL(cuMemcpy2DAsync_v2, (const struct copy_2d *, stream_t))                                                        \
  CALL(cuMemsetD8Async, (ptr64, unsigned char, size_t, stream_t))                                                     \
  CALL(cuMemcpyBatchAsync, (ptr64 *, ptr64 *, size_t *, size_t, struct copy_attributes *, size_t *, size_t, size_t *, \
                            stream_t))                                                                                \
  CALL(cuMemcpyBatchAsync_v2, (ptr64 *, ptr64 *, size_t *, size_t, struct copy_attributes *, size_t *, size_t, stream_t))

struct driver {
#define CALL(name, arguments) int(*name) arguments;
  DRIVER_CALLS(CALL)
#undef CALL
};
extern struct driver driver;

int begin(void);     /* loads and starts the driver; the thread's device becomes current */
int start(void);     /* the same without a device */
int note(int code);  /* the driver's status as a HIP one, remembered when it is a failure */
int thread_device(void);
int choose_device(int ordinal);

#define EXPORT __attribute__((visibility("default")))

/* A call that is passed on as it is. An entry point that the driver lacks is not supported. */
#define FORWARD(name, parameters, call, arguments)                                   \
  EXPORT int name parameters;                                                        \
  int name parameters {                                                              \
    int code = begin();                                                              \
    if (code)                                                                        \
      return note(code);                                                             \
    return note(driver.call ? driver.call arguments : HIP_NOT_SUPPORTED);            \
  }
