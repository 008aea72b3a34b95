/* Legacy inter-process handles of memory and events. */
#include "front.h"

#include <string.h>

API(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle, (CUhandle64 *handle, CUdeviceptr pointer), (handle, pointer)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (!handle)
    return CU_INVALID_VALUE;
  return cu_code(ds_export(pointer, handle->bytes), context->device);
}

static int open_memory(CUdeviceptr *out, CUhandle64 handle, unsigned flags) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (!out || flags != 1)
    return CU_INVALID_VALUE;
  return cu_code(ds_open(context->device, context, handle.bytes, out), context->device);
}

API(cuIpcOpenMemHandle, 4010, cuIpcOpenMemHandle, (CUdeviceptr *out, CUhandle64 handle, unsigned flags),
    (out, handle, flags)) {
  return open_memory(out, handle, flags);
}

API(cuIpcOpenMemHandle, 11000, cuIpcOpenMemHandle_v2, (CUdeviceptr *out, CUhandle64 handle, unsigned flags),
    (out, handle, flags)) {
  return open_memory(out, handle, flags);
}

API(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle, (CUdeviceptr pointer), (pointer)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  cu_settle(context);
  return cu_code(ds_close(pointer), context->device);
}

API(cuIpcGetEventHandle, 4010, cuIpcGetEventHandle, (CUhandle64 *handle, CUevent event), (handle, event)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (!handle || !event)
    return CU_INVALID_VALUE;
  if (!ds_event_exists(event))
    return CU_CONTEXT_IS_DESTROYED;
  return cu_code(ds_event_export(event, handle->bytes), context->device);
}

API(cuIpcOpenEventHandle, 4010, cuIpcOpenEventHandle, (CUevent *out, CUhandle64 handle), (out, handle)) {
  struct context *context = NULL;
  TRY(cu_current(&context));
  if (!out)
    return CU_INVALID_VALUE;
  return cu_code(ds_event_open(context->device, context, handle.bytes, out), context->device);
}
