/* Calls that are passed on: types, flags and structures are the same, or are cut to what the driver knows. */
#include "driver.h"

enum { EVENT_FLAGS = 7, REGISTER_FLAGS = 15, HOST_FLAGS = 7, UNIFIED = 4, IN_STREAM_ORDER = 1 };

/* --- memory --- */

FORWARD(hipMalloc, (ptr64 *out, size_t bytes), cuMemAlloc_v2, (out, bytes))
FORWARD(hipMallocManaged, (ptr64 *out, size_t bytes, unsigned flags), cuMemAllocManaged, (out, bytes, flags))
FORWARD(hipFree, (ptr64 pointer), cuMemFree_v2, (pointer))
FORWARD(hipHostMalloc, (void **out, size_t bytes, unsigned flags), cuMemHostAlloc, (out, bytes, flags & HOST_FLAGS))
FORWARD(hipHostFree, (void *pointer), cuMemFreeHost, (pointer))
FORWARD(hipHostRegister, (void *pointer, size_t bytes, unsigned flags), cuMemHostRegister_v2,
        (pointer, bytes, flags & REGISTER_FLAGS))
FORWARD(hipHostUnregister, (void *pointer), cuMemHostUnregister, (pointer))
FORWARD(hipHostGetDevicePointer, (ptr64 *out, void *pointer, unsigned flags), cuMemHostGetDevicePointer_v2,
        (out, pointer, flags))
FORWARD(hipMemGetAddressRange, (ptr64 *base, size_t *bytes, ptr64 pointer), cuMemGetAddressRange_v2,
        (base, bytes, pointer))
FORWARD(hipPointerGetAttribute, (void *out, int attribute, ptr64 pointer), cuPointerGetAttribute,
        (out, attribute, pointer))

/* --- handles --- */

FORWARD(hipIpcGetMemHandle, (hipHandle64 *handle, ptr64 pointer), cuIpcGetMemHandle, (handle, pointer))
FORWARD(hipIpcOpenMemHandle, (ptr64 *out, hipHandle64 handle, unsigned flags), cuIpcOpenMemHandle_v2,
        (out, handle, flags))
FORWARD(hipIpcCloseMemHandle, (ptr64 pointer), cuIpcCloseMemHandle, (pointer))
FORWARD(hipIpcGetEventHandle, (hipHandle64 *handle, event_t event), cuIpcGetEventHandle, (handle, event))
FORWARD(hipIpcOpenEventHandle, (event_t *out, hipHandle64 handle), cuIpcOpenEventHandle, (out, handle))
FORWARD(hipMemGetHandleForAddressRange, (void *out, ptr64 pointer, size_t bytes, int type, unsigned long long flags),
        cuMemGetHandleForAddressRange, (out, pointer, bytes, type, flags))
FORWARD(hipImportExternalMemory, (void **out, const hipExternalHandle *from), cuImportExternalMemory, (out, from))
FORWARD(hipExternalMemoryGetMappedBuffer, (ptr64 *out, void *memory, const hipExternalBuffer *part),
        cuExternalMemoryGetMappedBuffer, (out, memory, part))
FORWARD(hipDestroyExternalMemory, (void *memory), cuDestroyExternalMemory, (memory))

/* --- physical memory --- */

FORWARD(hipMemCreate, (ptr64 *out, size_t bytes, const hipAllocationProp *properties, unsigned long long flags),
        cuMemCreate, (out, bytes, properties, flags))
FORWARD(hipMemRelease, (ptr64 handle), cuMemRelease, (handle))
FORWARD(hipMemGetAllocationGranularity, (size_t *bytes, const hipAllocationProp *properties, int option),
        cuMemGetAllocationGranularity, (bytes, properties, option))
FORWARD(hipMemExportToShareableHandle, (void *out, ptr64 handle, int type, unsigned long long flags),
        cuMemExportToShareableHandle, (out, handle, type, flags))
FORWARD(hipMemImportFromShareableHandle, (ptr64 *out, void *source, int type), cuMemImportFromShareableHandle,
        (out, source, type))
FORWARD(hipMemRetainAllocationHandle, (ptr64 *out, void *address), cuMemRetainAllocationHandle, (out, address))
FORWARD(hipMemAddressReserve, (ptr64 *out, size_t bytes, size_t align, ptr64 hint, unsigned long long flags),
        cuMemAddressReserve, (out, bytes, align, hint, flags))
FORWARD(hipMemAddressFree, (ptr64 start_at, size_t bytes), cuMemAddressFree, (start_at, bytes))
FORWARD(hipMemMap, (ptr64 start_at, size_t bytes, size_t offset, ptr64 handle, unsigned long long flags), cuMemMap,
        (start_at, bytes, offset, handle, flags))
FORWARD(hipMemUnmap, (ptr64 start_at, size_t bytes), cuMemUnmap, (start_at, bytes))
FORWARD(hipMemGetAccess, (unsigned long long *flags, const hipLocation *location, ptr64 address), cuMemGetAccess,
        (flags, location, address))
FORWARD(hipMemSetAccess, (ptr64 start_at, size_t bytes, const hipAccessDesc *list, size_t count), cuMemSetAccess,
        (start_at, bytes, list, count))

/* --- pools --- */

FORWARD(hipMemPoolCreate, (void **out, const hipPoolProps *properties), cuMemPoolCreate, (out, properties))
FORWARD(hipMemPoolDestroy, (void *pool), cuMemPoolDestroy, (pool))
FORWARD(hipMemPoolSetAccess, (void *pool, const hipAccessDesc *list, size_t count), cuMemPoolSetAccess,
        (pool, list, count))
FORWARD(hipMemPoolExportToShareableHandle, (void *out, void *pool, int type, unsigned flags),
        cuMemPoolExportToShareableHandle, (out, pool, type, flags))
FORWARD(hipMemPoolImportFromShareableHandle, (void **out, void *source, int type, unsigned flags),
        cuMemPoolImportFromShareableHandle, (out, source, type, flags))
FORWARD(hipMemPoolExportPointer, (hipHandle64 *out, ptr64 pointer), cuMemPoolExportPointer, (out, pointer))
FORWARD(hipMemPoolImportPointer, (ptr64 *out, void *pool, hipHandle64 *source), cuMemPoolImportPointer,
        (out, pool, source))
FORWARD(hipMallocFromPoolAsync, (ptr64 *out, size_t bytes, void *pool, stream_t stream), cuMemAllocFromPoolAsync,
        (out, bytes, pool, stream))
FORWARD(hipFreeAsync, (ptr64 pointer, stream_t stream), cuMemFreeAsync, (pointer, stream))

/* --- streams and events --- */

FORWARD(hipStreamCreateWithFlags, (stream_t *out, unsigned flags), cuStreamCreate, (out, flags))
FORWARD(hipStreamCreateWithPriority, (stream_t *out, unsigned flags, int priority), cuStreamCreateWithPriority,
        (out, flags, priority))
FORWARD(hipStreamDestroy, (stream_t stream), cuStreamDestroy_v2, (stream))
FORWARD(hipStreamSynchronize, (stream_t stream), cuStreamSynchronize, (stream))
FORWARD(hipStreamQuery, (stream_t stream), cuStreamQuery, (stream))
FORWARD(hipStreamWaitEvent, (stream_t stream, event_t event, unsigned flags), cuStreamWaitEvent, (stream, event, flags))
FORWARD(hipStreamIsCapturing, (stream_t stream, int *status), cuStreamIsCapturing, (stream, status))
FORWARD(hipStreamBeginCapture, (stream_t stream, int mode), cuStreamBeginCapture_v2, (stream, mode))
FORWARD(hipStreamEndCapture, (stream_t stream, void **graph), cuStreamEndCapture, (stream, graph))
FORWARD(hipGraphDestroy, (void *graph), cuGraphDestroy, (graph))
FORWARD(hipThreadExchangeStreamCaptureMode, (int *mode), cuThreadExchangeStreamCaptureMode, (mode))
FORWARD(hipLaunchHostFunc, (stream_t stream, hipHostFn_t call, void *argument), cuLaunchHostFunc,
        (stream, call, argument))
FORWARD(hipEventCreateWithFlags, (event_t *out, unsigned flags), cuEventCreate, (out, flags & EVENT_FLAGS))
FORWARD(hipEventRecord, (event_t event, stream_t stream), cuEventRecord, (event, stream))
FORWARD(hipEventQuery, (event_t event), cuEventQuery, (event))
FORWARD(hipEventSynchronize, (event_t event), cuEventSynchronize, (event))
FORWARD(hipEventDestroy, (event_t event), cuEventDestroy_v2, (event))

/* --- values: the driver has no mask --- */

FORWARD(hipStreamWriteValue32, (stream_t stream, ptr64 at, uint32_t value, unsigned flags), cuStreamWriteValue32_v2,
        (stream, at, value, flags))
FORWARD(hipStreamWriteValue64, (stream_t stream, ptr64 at, uint64_t value, unsigned flags), cuStreamWriteValue64_v2,
        (stream, at, value, flags))
FORWARD(wait32, (stream_t stream, ptr64 at, uint32_t value, unsigned flags), cuStreamWaitValue32_v2,
        (stream, at, value, flags))
FORWARD(wait64, (stream_t stream, ptr64 at, uint64_t value, unsigned flags), cuStreamWaitValue64_v2,
        (stream, at, value, flags))

EXPORT int hipStreamWaitValue32(stream_t stream, ptr64 at, uint32_t value, unsigned flags, uint32_t mask);
int hipStreamWaitValue32(stream_t stream, ptr64 at, uint32_t value, unsigned flags, uint32_t mask) {
  return mask == UINT32_MAX ? wait32(stream, at, value, flags) : note(HIP_NOT_SUPPORTED);
}

EXPORT int hipStreamWaitValue64(stream_t stream, ptr64 at, uint64_t value, unsigned flags, uint64_t mask);
int hipStreamWaitValue64(stream_t stream, ptr64 at, uint64_t value, unsigned flags, uint64_t mask) {
  return mask == UINT64_MAX ? wait64(stream, at, value, flags) : note(HIP_NOT_SUPPORTED);
}

/* --- copies: the driver finds out what an address is, as kind 4 asks for; other kinds promise no more --- */

#define COPY_KIND(kind) ((kind) >= 0 && (kind) <= 4)

FORWARD(copy, (ptr64 dst, ptr64 src, size_t bytes), cuMemcpy, (dst, src, bytes))
FORWARD(copy_async, (ptr64 dst, ptr64 src, size_t bytes, stream_t stream), cuMemcpyAsync, (dst, src, bytes, stream))
FORWARD(copy_2d_async, (const struct copy_2d *copy, stream_t stream), cuMemcpy2DAsync_v2, (copy, stream))
FORWARD(hipMemsetAsync, (ptr64 dst, int byte, size_t bytes, stream_t stream), cuMemsetD8Async,
        (dst, (unsigned char)byte, bytes, stream))

EXPORT int hipMemcpy(ptr64 dst, ptr64 src, size_t bytes, int kind);
int hipMemcpy(ptr64 dst, ptr64 src, size_t bytes, int kind) {
  return COPY_KIND(kind) ? copy(dst, src, bytes) : note(HIP_INVALID_VALUE);
}

EXPORT int hipMemcpyAsync(ptr64 dst, ptr64 src, size_t bytes, int kind, stream_t stream);
int hipMemcpyAsync(ptr64 dst, ptr64 src, size_t bytes, int kind, stream_t stream) {
  return COPY_KIND(kind) ? copy_async(dst, src, bytes, stream) : note(HIP_INVALID_VALUE);
}

EXPORT int hipMemcpy2DAsync(ptr64 dst, size_t dst_pitch, ptr64 src, size_t src_pitch, size_t width, size_t height,
                            int kind, stream_t stream);
int hipMemcpy2DAsync(ptr64 dst, size_t dst_pitch, ptr64 src, size_t src_pitch, size_t width, size_t height, int kind,
                     stream_t stream) {
  struct copy_2d box = {.src_type = UNIFIED, .src = src, .src_pitch = src_pitch, .dst_type = UNIFIED, .dst = dst,
                        .dst_pitch = dst_pitch, .width = width, .height = height};
  return COPY_KIND(kind) ? copy_2d_async(&box, stream) : note(HIP_INVALID_VALUE);
}

/* The driver wants attributes, HIP takes none. */
EXPORT int hipMemcpyBatchAsync(ptr64 *dsts, ptr64 *srcs, size_t *sizes, size_t count, void *attributes, size_t *starts,
                               size_t n, size_t *failed, stream_t stream);
int hipMemcpyBatchAsync(ptr64 *dsts, ptr64 *srcs, size_t *sizes, size_t count, void *attributes, size_t *starts,
                        size_t n, size_t *failed, stream_t stream) {
  struct copy_attributes order = {.order = IN_STREAM_ORDER};
  size_t first = 0;
  int code = begin();
  (void)attributes, (void)starts, (void)n;
  if (code)
    return note(code);
  if (driver.cuMemcpyBatchAsync_v2)
    return note(driver.cuMemcpyBatchAsync_v2(dsts, srcs, sizes, count, &order, &first, 1, stream));
  if (driver.cuMemcpyBatchAsync)
    return note(driver.cuMemcpyBatchAsync(dsts, srcs, sizes, count, &order, &first, 1, failed, stream));
  return note(HIP_NOT_SUPPORTED);
}
