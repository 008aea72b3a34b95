/* Stream writes and waits on memory values. */
#include "front.h"

static int submit(CUstream handle, CUdeviceptr address, uint64_t value, unsigned flags, int size, bool write) {
  struct ds_stream *stream = NULL;
  int code = CU_OK;
  TRY(cu_stream(handle, &stream));
  if (!ds_switch(DS_memops))
    return CU_NOT_SUPPORTED;
  unsigned compare = flags & ~(1u << 30);
  if (!write && flags & 1u << 30)
    return CU_NOT_SUPPORTED; /* remote writes cannot be flushed here */
  if (write ? flags != 0 : compare > DS_NOR) /* a write without barrier is refused on an H200 */
    return CU_INVALID_VALUE;
  TRY(cu_code(ds_check_value(address, size), stream->device));
  if (cu_capturing(stream, &code))
    return code;
  struct ds_op *op = ds_op_new(write ? DS_WRITE_VALUE : DS_WAIT_VALUE);
  op->address = address;
  op->value = value;
  op->size = size;
  op->compare = (enum ds_compare)compare;
  return cu_code(ds_submit(stream, op, NULL), stream->device);
}

API(cuStreamWriteValue32, 11070, cuStreamWriteValue32_v2,
    (CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags), (stream, address, value, flags)) {
  return submit(stream, address, value, flags, 4, true);
}

API(cuStreamWriteValue64, 11070, cuStreamWriteValue64_v2,
    (CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags), (stream, address, value, flags)) {
  return submit(stream, address, value, flags, 8, true);
}

API(cuStreamWaitValue32, 11070, cuStreamWaitValue32_v2,
    (CUstream stream, CUdeviceptr address, uint32_t value, unsigned flags), (stream, address, value, flags)) {
  return submit(stream, address, value, flags, 4, false);
}

API(cuStreamWaitValue64, 11070, cuStreamWaitValue64_v2,
    (CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags), (stream, address, value, flags)) {
  return submit(stream, address, value, flags, 8, false);
}

static int check_one(const CUstreamBatchMemOpParams *item) {
  switch (item->operation) {
    case CU_OP_WAIT_32: case CU_OP_WRITE_32: case CU_OP_WAIT_64: case CU_OP_WRITE_64: {
      int size = item->operation >= CU_OP_WAIT_64 ? 8 : 4;
      return cu_code(ds_check_value(item->value.address, size), NULL);
    }
    case CU_OP_FLUSH: return CU_NOT_SUPPORTED;
    case CU_OP_BARRIER: return CU_OK;
    default: return CU_INVALID_VALUE;
  }
}

API(cuStreamBatchMemOp, 11070, cuStreamBatchMemOp_v2,
    (CUstream stream, unsigned count, CUstreamBatchMemOpParams *items, unsigned flags), (stream, count, items, flags)) {
  struct ds_stream *found = NULL;
  TRY(cu_stream(stream, &found));
  if (!count)
    return CU_OK;
  if (count > 255 || !items || flags)
    return CU_INVALID_VALUE;
  for (unsigned i = 0; i < count; i++)
    TRY(check_one(&items[i]));
  for (unsigned i = 0; i < count; i++) {
    int operation = items[i].operation;
    if (operation == CU_OP_BARRIER)
      continue;
    bool write = operation == CU_OP_WRITE_32 || operation == CU_OP_WRITE_64;
    TRY(submit(stream, items[i].value.address, items[i].value.value, items[i].value.flags,
               operation >= CU_OP_WAIT_64 ? 8 : 4, write));
  }
  return CU_OK;
}
