"""Cases: stream writes and waits on memory values, capture."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from cuda.bindings import driver as cu

from .world import World, case, isolated, need


@isolated
def value_addresses(w: World) -> object:
    """What may hold a value."""
    plain = ctypes.create_string_buffer(64)
    small = w.alloc(1000)
    addresses = {
        "device": small, "pinned": w.pinned(4096), "registered": w.registered(4096), "managed": w.managed(4096),
        "physical": w.mapped(1), "pooled": w.pooled(4096, w.pool()), "plain": ctypes.addressof(plain) // 8 * 8 + 8,
        "null": 0, "last": small + 992, "past": small + 1000, "padding": small + 1016, "freed": w.freed(),
    }  # fmt: skip
    found: dict[str, object] = {}
    for name, address in addresses.items():
        found[name] = [
            cu.cuStreamWriteValue32(w.stream, address, 1, 0),
            cu.cuStreamWriteValue64(w.stream, address, 1, 0),
            cu.cuStreamWaitValue64(w.stream, address, 1, 0),
        ]
        found[f"{name}_sync"] = cu.cuStreamSynchronize(w.stream)
    return found


@case
def value_alignment(w: World) -> object:
    small = w.alloc(1000)
    return {
        "write32_1": cu.cuStreamWriteValue32(w.stream, small + 1, 1, 0),
        "write32_2": cu.cuStreamWriteValue32(w.stream, small + 2, 1, 0),
        "write32_4": cu.cuStreamWriteValue32(w.stream, small + 4, 1, 0),
        "write64_4": cu.cuStreamWriteValue64(w.stream, small + 4, 1, 0),
        "write64_8": cu.cuStreamWriteValue64(w.stream, small + 8, 1, 0),
        "wait32_2": cu.cuStreamWaitValue32(w.stream, small + 2, 0, 0),
        "wait64_4": cu.cuStreamWaitValue64(w.stream, small + 4, 0, 0),
        "sync": cu.cuStreamSynchronize(w.stream),
    }


@case
def value_write_flags(w: World) -> object:
    small = w.alloc(1000)
    return {
        "default": cu.cuStreamWriteValue64(w.stream, small, 5, 0),
        "no_barrier": cu.cuStreamWriteValue64(w.stream, small, 5, 1),
        "bad": cu.cuStreamWriteValue64(w.stream, small, 5, 2),
        "sync": cu.cuStreamSynchronize(w.stream),
        "null_stream": cu.cuStreamWriteValue32(w.null, small, 1, 0),
    }


def settled(stream: Any) -> str:
    """Whether a stream comes to its end within a second; a wait might never."""
    deadline = time.monotonic() + 1
    while (answer := cu.cuStreamQuery(stream)[0]) == cu.CUresult.CUDA_ERROR_NOT_READY:
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    return str(answer.name)


def wait_for(w: World, value: int, flags: int) -> object:
    """A wait on a word that holds 5, released by the host if nothing else does."""
    word, stream = w.registered(4096), need(cu.cuStreamCreate(1))
    ctypes.c_uint64.from_address(word).value = 5
    answer = cu.cuStreamWaitValue64(stream, word, value, flags)
    end = settled(stream)
    for release in (value, 0, 2**63 - 1, 2**64 - 1):  # one of them ends any comparison
        ctypes.c_uint64.from_address(word).value = release
        if settled(stream) != "CUDA_ERROR_NOT_READY":
            break
    return [answer, end]


@case
def value_wait_flags(w: World) -> object:
    return {
        "at_least": wait_for(w, 5, 0), "at_least_more": wait_for(w, 6, 0), "equal": wait_for(w, 5, 1),
        "equal_other": wait_for(w, 4, 1), "and": wait_for(w, 4, 2), "and_none": wait_for(w, 8, 2),
        "nor": wait_for(w, 4, 3), "bad_4": wait_for(w, 5, 4), "bad_8": wait_for(w, 5, 8),
        "flush": wait_for(w, 5, 1 << 30),
    }  # fmt: skip


@isolated
def value_cyclic(w: World) -> object:
    """A value a little below zero counts as reached by a small one."""
    small = w.alloc(1000)
    need(cu.cuMemsetD8(small, 0, 1000))
    return [
        cu.cuStreamWaitValue32(w.stream, small, 0xFFFFFFF0, 0),
        cu.cuStreamWaitValue64(w.stream, small, (1 << 64) - 16, 0),
        cu.cuStreamSynchronize(w.stream),
    ]


def item(kind: str, operation: int, address: int, value: int, flags: int = 0) -> Any:
    made = cu.CUstreamBatchMemOpParams()
    made.operation = cu.CUstreamBatchMemOpType(operation)
    part = getattr(made, kind)
    part.operation = cu.CUstreamBatchMemOpType(operation)
    part.address = cu.CUdeviceptr(address)
    if operation >= 4:
        part.value64 = cu.cuuint64_t(value)
    else:
        part.value = cu.cuuint32_t(value)
    part.flags = flags
    return made


@case
def value_batch(w: World) -> object:
    small = w.alloc(4096)
    write, wait = item("writeValue", 2, small, 7), item("waitValue", 1, small, 7)
    wide = item("writeValue", 5, small + 8, 7)
    barrier = cu.CUstreamBatchMemOpParams()
    barrier.operation = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_FLUSH_REMOTE_WRITES
    return {
        "good": cu.cuStreamBatchMemOp(w.stream, 2, [write, wait], 0),
        "wide": cu.cuStreamBatchMemOp(w.stream, 1, [wide], 0),
        "zero": cu.cuStreamBatchMemOp(w.stream, 0, [], 0),
        "flags": cu.cuStreamBatchMemOp(w.stream, 1, [write], 1),
        "misaligned": cu.cuStreamBatchMemOp(w.stream, 1, [item("writeValue", 2, small + 2, 7)], 0),
        "flush": cu.cuStreamBatchMemOp(w.stream, 1, [barrier], 0),
        "many": cu.cuStreamBatchMemOp(w.stream, 256, [write] * 256, 0),
        "too_many": cu.cuStreamBatchMemOp(w.stream, 257, [write] * 257, 0),
        "sync": cu.cuStreamSynchronize(w.stream),
    }


def begin(w: World, mode: int = 1) -> Any:
    return cu.cuStreamBeginCapture(w.stream, cu.CUstreamCaptureMode(mode))


def finish(w: World) -> object:
    answer = cu.cuStreamEndCapture(w.stream)
    if answer[0] == cu.CUresult.CUDA_SUCCESS and answer[1] is not None and int(answer[1]):
        cu.cuGraphDestroy(answer[1])
    return answer


def status(w: World) -> object:
    answer = cu.cuStreamIsCapturing(w.stream)
    return str(answer[1].name) if answer[0] == cu.CUresult.CUDA_SUCCESS else answer


@isolated
def capture_states(w: World) -> object:
    return {
        "before": status(w),
        "end_first": finish(w),
        "null": cu.cuStreamBeginCapture(w.null, cu.CUstreamCaptureMode(1)),
        "begin": begin(w),
        "during": status(w),
        "again": begin(w),
        "still": status(w),
        "end": finish(w),
        "after": status(w),
    }


@isolated
def capture_work(w: World) -> object:
    """Work that a capturing stream takes or refuses."""
    small, other, event, pinned = w.alloc(1000), w.alloc(1000), w.event(), w.pinned(4096)
    registered = w.registered(4096)
    works: dict[str, Any] = {
        "copy": lambda: cu.cuMemcpyAsync(other, small, 1000, w.stream),
        "copy_pinned": lambda: cu.cuMemcpyAsync(pinned, small, 1000, w.stream),
        "fill": lambda: cu.cuMemsetD8Async(small, 1, 1000, w.stream),
        "write_value": lambda: cu.cuStreamWriteValue64(w.stream, registered, 1, 0),
        "wait_value": lambda: cu.cuStreamWaitValue64(w.stream, registered, 1, 0),
        "record": lambda: cu.cuEventRecord(event, w.stream),
        "query_event": lambda: cu.cuEventQuery(event),
        "sync_stream": lambda: cu.cuStreamSynchronize(w.stream),
        "query_stream": lambda: cu.cuStreamQuery(w.stream),
        "alloc_async": lambda: cu.cuMemAllocAsync(4096, w.stream),
        "sync_context": cu.cuCtxSynchronize,
        "alloc": lambda: cu.cuMemAlloc(100),
        "copy_sync": lambda: cu.cuMemcpyDtoH(bytearray(10), small, 10),
        "write_other_stream": lambda: cu.cuStreamWriteValue32(w.null, small, 1, 0),
    }
    found: dict[str, object] = {}
    for mode in (0, 1, 2):
        for name, work in works.items():
            need(begin(w, mode))
            found[f"{name}_{mode}"] = [work(), status(w), finish(w)]
            cu.cuEventRecord(event, w.null)
            cu.cuCtxSynchronize()
    return found
