"""What the second process of a case does; each answers with something that is JSON."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cu

from .world import MIB, World, from_raw, need, raw, text

PEERS: dict[str, Callable[..., object]] = {}
FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def peer(function: Callable[..., object]) -> Callable[..., object]:
    """Registers a peer under its function's name."""
    PEERS[function.__name__] = function
    return function


def opened(data: str) -> tuple[World, Any]:
    """A world and the answer to opening a classic handle in it."""
    w = World()
    return w, cu.cuIpcOpenMemHandle(from_raw(cu.CUipcMemHandle, bytes.fromhex(data)), 1)


def first_byte(pointer: int) -> object:
    out = bytearray(1)
    answer = cu.cuMemcpyDtoH(out, pointer, 1)
    return out[0] if answer[0] == cu.CUresult.CUDA_SUCCESS else text(answer)


@peer
def classic(data: str) -> object:
    """Opens twice, reads, writes, asks, closes too often."""
    from .memory import questions

    w, answer = opened(data)
    pointer = int(need(answer))
    handle = from_raw(cu.CUipcMemHandle, bytes.fromhex(data))
    base, size = need(cu.cuMemGetAddressRange(pointer + 100))
    found: dict[str, object] = {
        "read": first_byte(pointer),
        "range": [int(base) - pointer, int(size)],
        "attributes": questions(pointer),
        "past": cu.cuMemcpyDtoH(bytearray(2), pointer + 4 * MIB - 1, 2),
        "flags_0": cu.cuIpcOpenMemHandle(handle, 0),
        "re_export": cu.cuIpcGetMemHandle(pointer),
        "free": cu.cuMemFree(pointer),
        "write": cu.cuMemsetD8(pointer, 9, 1),
        "close_interior": cu.cuIpcCloseMemHandle(pointer + 4096),
        "value": cu.cuStreamWriteValue32(w.stream, pointer + 64, 1, 0),
        "register": cu.cuMemHostRegister(pointer, 4096, 0),
    }
    again = cu.cuIpcOpenMemHandle(handle, 1)
    found["again"] = [text(again), again[1] is not None and int(again[1]) == pointer]
    found["close"] = cu.cuIpcCloseMemHandle(pointer)
    found["readable_after_one_close"] = cu.cuMemcpyDtoH(bytearray(1), pointer, 1)
    found["close_2"] = cu.cuIpcCloseMemHandle(pointer)
    found["close_3"] = cu.cuIpcCloseMemHandle(pointer)
    found["readable_after_close"] = cu.cuMemcpyDtoH(bytearray(1), pointer, 1)
    found["no_context"] = w.without_context(lambda: cu.cuIpcOpenMemHandle(handle, 1))
    return found


@peer
def classic_range(data: str) -> object:
    _, answer = opened(data)
    base, size = need(cu.cuMemGetAddressRange(need(answer)))
    return [int(base) - int(need(answer)), int(size)]


@peer
def classic_first(data: str) -> object:
    _, answer = opened(data)
    base, size = need(cu.cuMemGetAddressRange(need(answer)))
    return {"first": first_byte(int(need(answer))), "range": [int(base) - int(need(answer)), int(size)]}


@peer
def classic_small(data: str, offset: str) -> object:
    _, answer = opened(data)
    pointer = int(need(answer))
    base, size = need(cu.cuMemGetAddressRange(pointer))
    at_block = (first_byte(pointer + int(offset)) if int(size) > int(offset) else "outside") if int(offset) else "same"
    return {
        "first": first_byte(pointer),
        "at_block_offset": at_block,
        "aligned_2mib": pointer % (2 * MIB) == 0,
        "range": [int(base) - pointer, int(size)],
    }


@peer
def neighbours(first: str, second: str) -> object:
    """Two handles of one block: mappings, bounds, and closing one of them."""
    _, answer = opened(first)
    other = cu.cuIpcOpenMemHandle(from_raw(cu.CUipcMemHandle, bytes.fromhex(second)), 1)
    a, b = int(need(answer)), int(need(other))
    found: dict[str, object] = {
        "apart": b - a if abs(b - a) < 2 * MIB else "far",
        "read": [first_byte(a), first_byte(b)],
        "ranges": [int(need(cu.cuMemGetAddressRange(pointer))[1]) for pointer in (a, b)],
        "over": cu.cuMemcpyDtoH(bytearray(2000), a, 2000),
        "close": cu.cuIpcCloseMemHandle(a),
    }
    found["read_after"] = [first_byte(a), first_byte(b)]
    found["close_other"] = cu.cuIpcCloseMemHandle(b)
    return found


@peer
def classic_open(data: str) -> object:
    return opened(data)[1]


@peer
def make_classic() -> object:
    World()
    return raw(need(cu.cuIpcGetMemHandle(need(cu.cuMemAlloc(4 * MIB))))).hex()


@peer
def event_open(data: str) -> object:
    World()
    return cu.cuIpcOpenEventHandle(from_raw(cu.CUipcEventHandle, bytes.fromhex(data)))


@peer
def event(data: str) -> object:
    """Everything an imported event is asked for."""
    w = World()
    handle = from_raw(cu.CUipcEventHandle, bytes.fromhex(data))
    imported = need(cu.cuIpcOpenEventHandle(handle))
    again = cu.cuIpcOpenEventHandle(handle)
    return {
        "query": cu.cuEventQuery(imported),
        "sync": cu.cuEventSynchronize(imported),
        "wait": cu.cuStreamWaitEvent(w.stream, imported, 0),
        "elapsed": cu.cuEventElapsedTime(imported, imported),
        "re_export": cu.cuIpcGetEventHandle(imported),
        "again": again,
        "record": cu.cuEventRecord(imported, w.stream),
        "sync_own": cu.cuEventSynchronize(imported),
        "destroy": cu.cuEventDestroy(imported),
    }


@peer
def physical(fd: str) -> object:
    """Maps a shared fd, reads, writes, asks."""
    from .memory import questions

    w = World()
    handle = need(cu.cuMemImportFromShareableHandle(int(fd), FD))
    start = w.reserve(2 * MIB)
    need(cu.cuMemMap(start, 2 * MIB, 0, handle, 0))
    need(cu.cuMemSetAccess(start, 2 * MIB, [w.access()], 1))
    found: dict[str, object] = {"read": first_byte(start), "attributes": questions(start)}
    found["write"] = cu.cuMemsetD8(start, 8, 1)
    found["release"] = cu.cuMemRelease(handle)
    found["unmap"] = cu.cuMemUnmap(start, 2 * MIB)
    return found


@peer
def pooled(fd: str, data: str) -> object:
    """Imports a pool and a pointer, reads, writes, asks."""
    from .memory import questions

    w = World()
    pool = need(cu.cuMemPoolImportFromShareableHandle(int(fd), FD, 0))
    handle = from_raw(cu.CUmemPoolPtrExportData, bytes.fromhex(data))
    own = w.access()
    found: dict[str, object] = {"access": int(need(cu.cuMemPoolGetAccess(pool, own.location)))}
    found["set_access"] = cu.cuMemPoolSetAccess(pool, [w.access()], 1)
    pointer = int(need(cu.cuMemPoolImportPointer(pool, handle)))
    base, size = need(cu.cuMemGetAddressRange(pointer))
    found["range"] = [int(base) - pointer, int(size)]
    found["attributes"] = questions(pointer)
    found["read"] = first_byte(pointer)
    found["write"] = cu.cuMemsetD8(pointer, 7, 1)
    again = cu.cuMemPoolImportPointer(pool, handle)
    found["again"] = [text(again), again[1] is not None and int(again[1]) == pointer]
    found["alloc"] = cu.cuMemAllocFromPoolAsync(100, pool, w.stream)
    found["free"] = [cu.cuMemFreeAsync(pointer, w.stream), cu.cuStreamSynchronize(w.stream)]
    found["free_again"] = cu.cuMemFreeAsync(pointer, w.stream)
    found["destroy"] = cu.cuMemPoolDestroy(pool)
    return found
