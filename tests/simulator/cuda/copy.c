/* Copies and fills: linear, 2D, 3D, batches. */
#include "front.h"

#include <stdlib.h>
#include <string.h>

enum { STAGED = 64 << 10 };
enum { MUST_DST_DEVICE = 1, MUST_SRC_DEVICE = 2, WAIT = 4 };

static bool is_device(CUdeviceptr address) {
  ds_lock();
  bool known = ds_find(address) != NULL;
  ds_unlock();
  return known;
}

/* Pageable sources are read before the call returns, pageable targets are written before it
 * returns, and a copy from host to host is carried out by the caller when its turn comes. */
static int submit(struct ds_stream *stream, const struct ds_copy *copy, bool wait) {
  struct ds_op *op = ds_op_new(DS_COPY);
  uint64_t ticket;
  enum ds_place from = ds_place_of(copy->src), to = ds_place_of(copy->dst);
  op->copy = *copy;
  if (from == DS_AT_PAGEABLE && copy->height == 1 && copy->depth == 1 && copy->width <= STAGED) {
    op->staged = malloc(copy->width);
    if (op->staged)
      memcpy(op->staged, (const void *)copy->src, copy->width);
  }
  wait = wait || (from == DS_AT_PAGEABLE && !op->staged) || to == DS_AT_PAGEABLE || cu_copy_waits(copy);
  ds_submit(stream, op, &ticket);
  return wait ? cu_code(ds_wait_ticket(stream, ticket), stream->device) : CU_OK;
}

bool cu_copy_waits(const struct ds_copy *copy) {
  return ds_switch(DS_host_copy_waits) && ds_place_of(copy->src) != DS_AT_DEVICE &&
         ds_place_of(copy->dst) != DS_AT_DEVICE;
}

static int run(CUstream handle, const struct ds_copy *copy, int rules) {
  struct ds_stream *stream = NULL;
  int code = CU_OK;
  TRY(cu_stream(handle, &stream));
  if (!copy->width || !copy->height || !copy->depth)
    return CU_OK;
  if ((rules & MUST_DST_DEVICE && !is_device(copy->dst)) || (rules & MUST_SRC_DEVICE && !is_device(copy->src)))
    return CU_INVALID_VALUE;
  TRY(cu_code(ds_check_copy(copy), stream->device));
  if (cu_capturing(stream, &code))
    return code;
  return submit(stream, copy, rules & WAIT);
}

static int linear(CUstream handle, CUdeviceptr dst, CUdeviceptr src, size_t bytes, int rules) {
  struct ds_copy copy = {.dst = dst, .src = src, .width = bytes, .height = 1, .depth = 1};
  return run(handle, &copy, rules);
}

API(cuMemcpy, 4000, cuMemcpy, (CUdeviceptr dst, CUdeviceptr src, size_t bytes), (dst, src, bytes)) {
  return linear(NULL, dst, src, bytes, WAIT);
}

API(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2, (CUdeviceptr dst, const void *src, size_t bytes), (dst, src, bytes)) {
  return linear(NULL, dst, (CUdeviceptr)src, bytes, WAIT | MUST_DST_DEVICE);
}

API(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2, (void *dst, CUdeviceptr src, size_t bytes), (dst, src, bytes)) {
  return linear(NULL, (CUdeviceptr)dst, src, bytes, WAIT | MUST_SRC_DEVICE);
}

API(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2, (CUdeviceptr dst, CUdeviceptr src, size_t bytes), (dst, src, bytes)) {
  return linear(NULL, dst, src, bytes, WAIT | MUST_DST_DEVICE | MUST_SRC_DEVICE);
}

API(cuMemcpyAsync, 4000, cuMemcpyAsync, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream),
    (dst, src, bytes, stream)) {
  return linear(stream, dst, src, bytes, 0);
}

API(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2, (CUdeviceptr dst, const void *src, size_t bytes, CUstream stream),
    (dst, src, bytes, stream)) {
  return linear(stream, dst, (CUdeviceptr)src, bytes, MUST_DST_DEVICE);
}

API(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2, (void *dst, CUdeviceptr src, size_t bytes, CUstream stream),
    (dst, src, bytes, stream)) {
  return linear(stream, (CUdeviceptr)dst, src, bytes, MUST_SRC_DEVICE);
}

API(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2, (CUdeviceptr dst, CUdeviceptr src, size_t bytes, CUstream stream),
    (dst, src, bytes, stream)) {
  return linear(stream, dst, src, bytes, MUST_DST_DEVICE | MUST_SRC_DEVICE);
}

API(cuMemcpyPeerAsync, 4000, cuMemcpyPeerAsync,
    (CUdeviceptr dst, CUcontext to, CUdeviceptr src, CUcontext from, size_t bytes, CUstream stream),
    (dst, to, src, from, bytes, stream)) {
  if (!cu_context_exists(to) || !cu_context_exists(from))
    return CU_INVALID_CONTEXT;
  return linear(stream, dst, src, bytes, MUST_DST_DEVICE | MUST_SRC_DEVICE);
}

/* The address of an operand's origin, or 0 for a memory type that is not offered. */
static CUdeviceptr origin(int type, const void *host, CUdeviceptr device) {
  if (type == CU_MEMORYTYPE_HOST)
    return (CUdeviceptr)host;
  return type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_UNIFIED ? device : 0;
}

static int must(int dst_type, int src_type) {
  return (dst_type == CU_MEMORYTYPE_DEVICE ? MUST_DST_DEVICE : 0) | (src_type == CU_MEMORYTYPE_DEVICE ? MUST_SRC_DEVICE : 0);
}

static int copy_2d(CUstream stream, const CUDA_MEMCPY2D *p, int rules) {
  TRY(cu_initialized());
  if (!p)
    return CU_INVALID_VALUE;
  CUdeviceptr dst = origin(p->dstMemoryType, p->dstHost, p->dstDevice);
  CUdeviceptr src = origin(p->srcMemoryType, p->srcHost, p->srcDevice);
  size_t dst_pitch = p->dstPitch ? p->dstPitch : p->dstXInBytes + p->WidthInBytes;
  size_t src_pitch = p->srcPitch ? p->srcPitch : p->srcXInBytes + p->WidthInBytes;
  if (!dst || !src || p->dstXInBytes + p->WidthInBytes > dst_pitch || p->srcXInBytes + p->WidthInBytes > src_pitch)
    return CU_INVALID_VALUE;
  struct ds_copy copy = {.dst = dst + p->dstY * dst_pitch + p->dstXInBytes,
                         .src = src + p->srcY * src_pitch + p->srcXInBytes,
                         .width = p->WidthInBytes,
                         .height = p->Height,
                         .depth = 1,
                         .dst_pitch = dst_pitch,
                         .src_pitch = src_pitch};
  return run(stream, &copy, rules | must(p->dstMemoryType, p->srcMemoryType));
}

API(cuMemcpy2D, 3020, cuMemcpy2D_v2, (const CUDA_MEMCPY2D *p), (p)) { return copy_2d(NULL, p, WAIT); }

API(cuMemcpy2DUnaligned, 3020, cuMemcpy2DUnaligned_v2, (const CUDA_MEMCPY2D *p), (p)) {
  return copy_2d(NULL, p, WAIT);
}

API(cuMemcpy2DAsync, 3020, cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *p, CUstream stream), (p, stream)) {
  return copy_2d(stream, p, 0);
}

static int copy_3d(CUstream stream, const CUDA_MEMCPY3D *p, int rules) {
  TRY(cu_initialized());
  if (!p)
    return CU_INVALID_VALUE;
  CUdeviceptr dst = origin(p->dstMemoryType, p->dstHost, p->dstDevice);
  CUdeviceptr src = origin(p->srcMemoryType, p->srcHost, p->srcDevice);
  size_t dst_pitch = p->dstPitch ? p->dstPitch : p->dstXInBytes + p->WidthInBytes;
  size_t src_pitch = p->srcPitch ? p->srcPitch : p->srcXInBytes + p->WidthInBytes;
  size_t dst_height = p->dstHeight ? p->dstHeight : p->dstY + p->Height;
  size_t src_height = p->srcHeight ? p->srcHeight : p->srcY + p->Height;
  if (!dst || !src || p->dstXInBytes + p->WidthInBytes > dst_pitch ||
      p->srcXInBytes + p->WidthInBytes > src_pitch || (p->Depth > 1 && (p->dstY + p->Height > dst_height ||
                                                                        p->srcY + p->Height > src_height)))
    return CU_INVALID_VALUE;
  struct ds_copy copy = {.dst = dst + (p->dstZ * dst_height + p->dstY) * dst_pitch + p->dstXInBytes,
                         .src = src + (p->srcZ * src_height + p->srcY) * src_pitch + p->srcXInBytes,
                         .width = p->WidthInBytes,
                         .height = p->Height,
                         .depth = p->Depth,
                         .dst_pitch = dst_pitch,
                         .src_pitch = src_pitch,
                         .dst_layer = dst_pitch * dst_height,
                         .src_layer = src_pitch * src_height};
  return run(stream, &copy, rules | must(p->dstMemoryType, p->srcMemoryType));
}

API(cuMemcpy3D, 3020, cuMemcpy3D_v2, (const CUDA_MEMCPY3D *p), (p)) { return copy_3d(NULL, p, WAIT); }

API(cuMemcpy3DAsync, 3020, cuMemcpy3DAsync_v2, (const CUDA_MEMCPY3D *p, CUstream stream), (p, stream)) {
  return copy_3d(stream, p, 0);
}
