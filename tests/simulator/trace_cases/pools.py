"""Cases: stream-ordered memory pools."""

from __future__ import annotations

import os
from typing import Any

from cuda.bindings import driver as cu

from .world import MIB, World, case, from_raw, isolated, need, raw

FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def made(answer: tuple[Any, ...]) -> object:
    if answer[0] == cu.CUresult.CUDA_SUCCESS:
        cu.cuMemPoolDestroy(answer[1])
    return answer


@case
def pool_create(w: World) -> object:
    bad = w.pool_properties()
    bad.location.id = 99
    return {
        "private": made(cu.cuMemPoolCreate(w.pool_properties(0))),
        "fd": made(cu.cuMemPoolCreate(w.pool_properties(1))),
        "win32": made(cu.cuMemPoolCreate(w.pool_properties(2))),
        "sized": made(cu.cuMemPoolCreate(w.pool_properties(1, 64 * MIB))),
        "bad_device": made(cu.cuMemPoolCreate(bad)),
    }


@case
def pool_create_fabric(w: World) -> object:
    return made(cu.cuMemPoolCreate(w.pool_properties(8)))


@case
def pool_alloc(w: World) -> object:
    pool = w.pool()
    good = w.pooled(1000, pool)
    base, size = need(cu.cuMemGetAddressRange(good + 10))
    return {
        "zero": cu.cuMemAllocFromPoolAsync(0, pool, w.stream),
        "huge": cu.cuMemAllocFromPoolAsync(1 << 45, pool, w.stream),
        "range": [int(base) == good, int(size)],
        "zero_default": cu.cuMemAllocAsync(0, w.stream),
    }


@case
def pool_free(w: World) -> object:
    pool, classic = w.pool(), w.alloc(4 * MIB)
    pointer = int(need(cu.cuMemAllocFromPoolAsync(4096, pool, w.stream)))
    found: dict[str, object] = {
        "null": cu.cuMemFreeAsync(0, w.stream),
        "interior": cu.cuMemFreeAsync(pointer + 8, w.stream),
        "good": cu.cuMemFreeAsync(pointer, w.stream),
        "again": cu.cuMemFreeAsync(pointer, w.stream),
        "sync": cu.cuStreamSynchronize(w.stream),
        "after": cu.cuMemFreeAsync(pointer, w.stream),
    }
    second = int(need(cu.cuMemAllocFromPoolAsync(4096, pool, w.stream)))
    found["synchronous"] = cu.cuMemFree(second)
    third = cu.cuMemFreeAsync(classic, w.stream)
    found["classic"] = third
    return found


@case
def pool_pointer_misused(w: World) -> object:
    pool, private = w.pool(), w.pool(0)
    pointer, hidden, classic = w.pooled(4096, pool), w.pooled(4096, private), w.alloc(100)
    os.close(int(need(cu.cuMemPoolExportToShareableHandle(pool, FD, 0))))
    return {
        "legacy": cu.cuIpcGetMemHandle(pointer),
        "export": cu.cuMemPoolExportPointer(pointer),
        "export_interior": cu.cuMemPoolExportPointer(pointer + 8),
        "export_private": cu.cuMemPoolExportPointer(hidden),
        "export_classic": cu.cuMemPoolExportPointer(classic),
        "export_null": cu.cuMemPoolExportPointer(0),
        "import_own": cu.cuMemPoolImportPointer(pool, need(cu.cuMemPoolExportPointer(pointer))),
        "same_bytes": raw(need(cu.cuMemPoolExportPointer(pointer))) == raw(need(cu.cuMemPoolExportPointer(pointer))),
    }


@case
def pool_pointer_before_pool(w: World) -> object:
    """A pointer's export before and after its pool's, for a small and a large one."""
    pool = w.pool()
    pointers = (w.pooled(4096, pool), w.pooled(4 * MIB, pool))
    before = [cu.cuMemPoolExportPointer(pointer) for pointer in pointers]
    os.close(int(need(cu.cuMemPoolExportToShareableHandle(pool, FD, 0))))
    return {"before": before, "after": [cu.cuMemPoolExportPointer(pointer) for pointer in pointers]}


@case
def pool_export(w: World) -> object:
    private = cu.cuMemPoolExportToShareableHandle(w.pool(0), FD, 0)
    shared = cu.cuMemPoolExportToShareableHandle(w.pool(1), FD, 0)
    os.close(int(need(shared)))
    default = cu.cuMemPoolExportToShareableHandle(need(cu.cuDeviceGetDefaultMemPool(w.device)), FD, 0)
    flags = cu.cuMemPoolExportToShareableHandle(w.pool(1), FD, 1)
    return {"private": private, "shared": shared, "default": default, "flags": flags}


@case
def pool_access(w: World) -> object:
    pool = w.pool()
    own, bad = w.access(), w.access()
    location = own.location  # a view into `own`
    bad.location.id = 99
    return {
        "default": int(need(cu.cuMemPoolGetAccess(pool, location))),
        "own_none": cu.cuMemPoolSetAccess(pool, [w.access(0)], 1),
        "own_read": cu.cuMemPoolSetAccess(pool, [w.access(1)], 1),
        "own_both": cu.cuMemPoolSetAccess(pool, [w.access(3)], 1),
        "bad_device": cu.cuMemPoolSetAccess(pool, [bad], 1),
        "empty": cu.cuMemPoolSetAccess(pool, [], 0),
    }


@case
def pool_attributes(w: World) -> object:
    pool = w.pool()
    which = cu.CUmemPool_attribute
    threshold = which.CU_MEMPOOL_ATTR_RELEASE_THRESHOLD
    used, high = which.CU_MEMPOOL_ATTR_USED_MEM_CURRENT, which.CU_MEMPOOL_ATTR_USED_MEM_HIGH
    found: dict[str, object] = {"threshold": int(need(cu.cuMemPoolGetAttribute(pool, threshold)))}
    found["set_threshold"] = cu.cuMemPoolSetAttribute(pool, threshold, cu.cuuint64_t(1 << 30))
    found["threshold_now"] = int(need(cu.cuMemPoolGetAttribute(pool, threshold)))
    w.pooled(4 * MIB, pool)
    found["used"] = int(need(cu.cuMemPoolGetAttribute(pool, used)))
    found["set_used"] = cu.cuMemPoolSetAttribute(pool, used, cu.cuuint64_t(0))
    found["reset_high"] = cu.cuMemPoolSetAttribute(pool, high, cu.cuuint64_t(0))
    found["set_high"] = cu.cuMemPoolSetAttribute(pool, high, cu.cuuint64_t(5))
    found["trim"] = cu.cuMemPoolTrimTo(pool, 0)
    return found


@case
def pool_destroy_edges(w: World) -> object:
    pool = need(cu.cuMemPoolCreate(w.pool_properties(0)))
    pointer = int(need(cu.cuMemAllocFromPoolAsync(4096, pool, w.stream)))
    return {
        "with_live": cu.cuMemPoolDestroy(pool),
        "use": cu.cuMemsetD8Async(pointer, 1, 4096, w.stream),
        "free_after": cu.cuMemFreeAsync(pointer, w.stream),
        "sync": cu.cuStreamSynchronize(w.stream),
        "default": cu.cuMemPoolDestroy(need(cu.cuDeviceGetDefaultMemPool(w.device))),
    }


@isolated
def pool_destroyed_twice(w: World) -> object:
    pool = need(cu.cuMemPoolCreate(w.pool_properties(0)))
    return [cu.cuMemPoolDestroy(pool), cu.cuMemPoolDestroy(pool)]


@isolated
def pool_bogus(w: World) -> object:
    return cu.cuMemPoolTrimTo(cu.CUmemoryPool(0x1234560), 0)


@isolated
def pool_import_bad_fds(w: World) -> object:
    null = os.open("/dev/null", os.O_RDWR)
    memory = os.memfd_create("plain")
    os.ftruncate(memory, 2 * MIB)
    found = {}
    for name, fd in {"null": null, "memfd": memory, "minus_1": -1}.items():
        try:
            found[name] = made(cu.cuMemPoolImportFromShareableHandle(fd, FD, 0))
        except Exception as error:
            found[name] = type(error).__name__
    return found


@isolated
def pool_import_same_process(w: World) -> object:
    pool = w.pool()
    pointer = w.pooled(4 * MIB, pool)
    need(cu.cuMemsetD8(pointer, 5, 64))
    fd = w.fd(int(need(cu.cuMemPoolExportToShareableHandle(pool, FD, 0))))
    other = need(cu.cuMemPoolImportFromShareableHandle(fd, FD, 0))
    data = need(cu.cuMemPoolExportPointer(pointer))
    found: dict[str, object] = {"alloc": cu.cuMemAllocFromPoolAsync(100, other, w.stream)}
    found["re_export_pool"] = cu.cuMemPoolExportToShareableHandle(other, FD, 0)
    answer = cu.cuMemPoolImportPointer(other, data)
    found["import"] = answer
    if answer[0] == cu.CUresult.CUDA_SUCCESS:
        again = cu.cuMemPoolImportPointer(other, data)
        found["import_again"] = [again, again[1] is not None and int(again[1]) == int(answer[1])]
        out = bytearray(64)
        found["read"] = [cu.cuMemcpyDtoH(out, answer[1], 64), out[0]]
        found["re_export"] = cu.cuMemPoolExportPointer(answer[1])
        found["free"] = [cu.cuMemFreeAsync(answer[1], w.stream), cu.cuStreamSynchronize(w.stream)]
        found["read_after_one_free"] = cu.cuMemcpyDtoH(out, answer[1], 64)
    found["junk"] = cu.cuMemPoolImportPointer(other, from_raw(cu.CUmemPoolPtrExportData, bytes(range(64))))
    found["destroy"] = cu.cuMemPoolDestroy(other)
    return found


@case
def pool_peer(w: World) -> object:
    """Another process imports pool and pointer; the exporter sees what it wrote."""
    pool = w.pool()
    pointer = w.pooled(4 * MIB, pool)
    need(cu.cuMemsetD8(pointer, 4, 64))
    fd = w.fd(int(need(cu.cuMemPoolExportToShareableHandle(pool, FD, 0))))
    data = raw(need(cu.cuMemPoolExportPointer(pointer))).hex()
    answer = w.peer("pooled", str(fd), data, fds=(fd,))
    out = bytearray(2)
    need(cu.cuMemcpyDtoH(out, pointer, 2))
    return {"peer": answer, "seen": list(out)}
