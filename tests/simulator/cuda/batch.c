/* Batched copies and fills. */
#include "front.h"

static int check_batch(CUstream stream, size_t count, struct ds_stream **found) {
  TRY(cu_stream(stream, found));
  if (!count && ds_switch(DS_count_zero_abort))
    ds_act((struct ds_fault){DS_ABORT, 0});
  return (uint64_t)stream <= CU_STREAM_LEGACY || !count ? CU_INVALID_VALUE : CU_OK;
}

static int check_attributes(const CUmemcpyAttributes *attributes, const size_t *starts, size_t n, size_t count) {
  if (!n || !attributes || !starts || n > count || starts[0])
    return CU_INVALID_VALUE;
  for (size_t i = 0; i < n; i++) {
    if (attributes[i].srcAccessOrder < 1 || attributes[i].srcAccessOrder > 3 || starts[i] >= count)
      return CU_INVALID_VALUE;
    if (i && starts[i] <= starts[i - 1])
      return CU_INVALID_VALUE;
  }
  return CU_OK;
}

static int submit(struct ds_stream *stream, const struct ds_copy *copy) {
  struct ds_op *op = ds_op_new(DS_COPY);
  uint64_t ticket;
  bool waits = cu_copy_waits(copy);
  op->copy = *copy;
  ds_submit(stream, op, &ticket);
  return waits ? cu_code(ds_wait_ticket(stream, ticket), stream->device) : CU_OK;
}

/* A batch has no order: it runs from the last item to the first, so that nobody relies on one. */
static int linear_batch(CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
                        size_t *starts, size_t n, size_t *failed, CUstream handle) {
  struct ds_stream *stream = NULL;
  int code = CU_OK;
  if (failed)
    *failed = SIZE_MAX;
  TRY(check_batch(handle, count, &stream));
  if (!dsts || !srcs || !sizes)
    return CU_INVALID_VALUE;
  TRY(check_attributes(attributes, starts, n, count));
  for (size_t i = 0; i < count; i++) {
    struct ds_copy copy = {.dst = dsts[i], .src = srcs[i], .width = sizes[i], .height = 1, .depth = 1};
    if (!sizes[i] || ds_check_copy(&copy) != DS_OK) {
      if (failed)
        *failed = i;
      return CU_INVALID_VALUE;
    }
  }
  if (cu_capturing(stream, &code))
    return code;
  for (size_t i = count; i-- > 0;) {
    struct ds_copy copy = {.dst = dsts[i], .src = srcs[i], .width = sizes[i], .height = 1, .depth = 1};
    TRY(submit(stream, &copy));
  }
  return CU_OK;
}

API(cuMemcpyBatchAsync, 12080, cuMemcpyBatchAsync,
    (CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attributes, size_t *starts,
     size_t n, size_t *failed, CUstream stream),
    (dsts, srcs, sizes, count, attributes, starts, n, failed, stream)) {
  return linear_batch(dsts, srcs, sizes, count, attributes, starts, n, failed, stream);
}

API(cuMemcpyBatchAsync, 13000, cuMemcpyBatchAsync_v2,
    (CUdeviceptr *dsts, CUdeviceptr *srcs, size_t *sizes, size_t count, CUmemcpyAttributes *attributes, size_t *starts,
     size_t n, CUstream stream),
    (dsts, srcs, sizes, count, attributes, starts, n, stream)) {
  return linear_batch(dsts, srcs, sizes, count, attributes, starts, n, NULL, stream);
}

/* Only pointer operands; lengths are in elements of one byte. */
static int to_copy(const CUDA_MEMCPY3D_BATCH_OP *item, struct ds_copy *copy) {
  if (item->src.type != 1 || item->dst.type != 1 || item->flags || item->srcAccessOrder < 1 || item->srcAccessOrder > 3)
    return CU_INVALID_VALUE;
  size_t src_row = item->src.op.ptr.rowLength ? item->src.op.ptr.rowLength : item->extent[0];
  size_t dst_row = item->dst.op.ptr.rowLength ? item->dst.op.ptr.rowLength : item->extent[0];
  size_t src_rows = item->src.op.ptr.layerHeight ? item->src.op.ptr.layerHeight : item->extent[1];
  size_t dst_rows = item->dst.op.ptr.layerHeight ? item->dst.op.ptr.layerHeight : item->extent[1];
  *copy = (struct ds_copy){.dst = item->dst.op.ptr.ptr, .src = item->src.op.ptr.ptr,
                           .width = item->extent[0], .height = item->extent[1], .depth = item->extent[2],
                           .dst_pitch = dst_row, .src_pitch = src_row,
                           .dst_layer = dst_row * dst_rows, .src_layer = src_row * src_rows};
  return cu_code(ds_check_copy(copy), NULL);
}

static int box_batch(size_t count, CUDA_MEMCPY3D_BATCH_OP *items, size_t *failed, uint64_t flags, CUstream handle) {
  struct ds_stream *stream = NULL;
  struct ds_copy copy;
  int code = CU_OK;
  if (failed)
    *failed = SIZE_MAX;
  TRY(check_batch(handle, count, &stream));
  if (!items || flags)
    return CU_INVALID_VALUE;
  for (size_t i = 0; i < count; i++)
    if (to_copy(&items[i], &copy) != CU_OK) {
      if (failed)
        *failed = i;
      return CU_INVALID_VALUE;
    }
  if (cu_capturing(stream, &code))
    return code;
  for (size_t i = count; i-- > 0;) {
    TRY(to_copy(&items[i], &copy));
    TRY(submit(stream, &copy));
  }
  return CU_OK;
}

API(cuMemcpy3DBatchAsync, 12080, cuMemcpy3DBatchAsync,
    (size_t count, CUDA_MEMCPY3D_BATCH_OP *items, size_t *failed, uint64_t flags, CUstream stream),
    (count, items, failed, flags, stream)) {
  return box_batch(count, items, failed, flags, stream);
}

API(cuMemcpy3DBatchAsync, 13000, cuMemcpy3DBatchAsync_v2,
    (size_t count, CUDA_MEMCPY3D_BATCH_OP *items, uint64_t flags, CUstream stream), (count, items, flags, stream)) {
  return box_batch(count, items, NULL, flags, stream);
}

static int fill(CUstream handle, CUdeviceptr dst, size_t pitch, uint64_t value, int size, size_t width, size_t height,
                bool wait) {
  struct ds_stream *stream = NULL;
  uint64_t ticket = 0;
  int code = CU_OK;
  TRY(cu_stream(handle, &stream));
  if (!width || !height)
    return CU_OK;
  uint64_t bytes = width * (uint64_t)size;
  if (dst % (uint64_t)size || (height > 1 && pitch < bytes))
    return CU_INVALID_VALUE;
  ds_lock();
  bool known = ds_find(dst) != NULL;
  ds_unlock();
  if (!known)
    return CU_INVALID_VALUE;
  TRY(cu_code(ds_check_span(dst, (height - 1) * pitch + bytes, DS_WRITE), stream->device));
  if (cu_capturing(stream, &code))
    return code;
  struct ds_op *op = ds_op_new(DS_FILL);
  op->copy = (struct ds_copy){.dst = dst, .width = bytes, .height = height, .dst_pitch = pitch};
  op->value = value;
  op->size = size;
  ds_submit(stream, op, &ticket);
  return wait ? cu_code(ds_wait_ticket(stream, ticket), stream->device) : CU_OK;
}

API(cuMemsetD8, 3020, cuMemsetD8_v2, (CUdeviceptr dst, unsigned char value, size_t n), (dst, value, n)) {
  return fill(NULL, dst, 0, value, 1, n, 1, true);
}

API(cuMemsetD32, 3020, cuMemsetD32_v2, (CUdeviceptr dst, unsigned value, size_t n), (dst, value, n)) {
  return fill(NULL, dst, 0, value, 4, n, 1, true);
}

API(cuMemsetD8Async, 3020, cuMemsetD8Async, (CUdeviceptr dst, unsigned char value, size_t n, CUstream stream),
    (dst, value, n, stream)) {
  return fill(stream, dst, 0, value, 1, n, 1, false);
}

API(cuMemsetD16Async, 3020, cuMemsetD16Async, (CUdeviceptr dst, unsigned short value, size_t n, CUstream stream),
    (dst, value, n, stream)) {
  return fill(stream, dst, 0, value, 2, n, 1, false);
}

API(cuMemsetD32Async, 3020, cuMemsetD32Async, (CUdeviceptr dst, unsigned value, size_t n, CUstream stream),
    (dst, value, n, stream)) {
  return fill(stream, dst, 0, value, 4, n, 1, false);
}

API(cuMemsetD2D8Async, 3020, cuMemsetD2D8Async,
    (CUdeviceptr dst, size_t pitch, unsigned char value, size_t width, size_t height, CUstream stream),
    (dst, pitch, value, width, height, stream)) {
  return fill(stream, dst, pitch, value, 1, width, height, false);
}
