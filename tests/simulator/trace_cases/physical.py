"""Cases: physical handles, reservations, mappings, shareable fds."""

from __future__ import annotations

import os
from typing import Any

from cuda.bindings import driver as cu

from .world import MIB, World, case, isolated, need

FD = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
FABRIC = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
CHUNK = 2 * MIB


def made(answer: tuple[Any, ...]) -> object:
    """A creation's answer; what it made is released again."""
    if answer[0] == cu.CUresult.CUDA_SUCCESS:
        cu.cuMemRelease(answer[1])
    return answer


@case
def physical_create(w: World) -> object:
    bad_device, bad_type, host = w.properties(), w.properties(), w.properties()
    bad_device.location.id = 99
    bad_type.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID
    host.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_HOST
    host.location.id = 0
    create = cu.cuMemCreate
    return {
        "good": made(create(CHUNK, w.properties(), 0)),
        "zero": made(create(0, w.properties(), 0)),
        "one_byte": made(create(1, w.properties(), 0)),
        "half": made(create(MIB, w.properties(), 0)),
        "huge": made(create(1 << 46, w.properties(), 0)),
        "flags": made(create(CHUNK, w.properties(), 1)),
        "bad_device": made(create(CHUNK, bad_device, 0)),
        "bad_type": made(create(CHUNK, bad_type, 0)),
        "private": made(create(CHUNK, w.properties(0), 0)),
        "win32": made(create(CHUNK, w.properties(2), 0)),
    }


@case
def physical_create_fabric(w: World) -> object:
    answer = cu.cuMemCreate(CHUNK, w.properties(8), 0)
    if answer[0] != cu.CUresult.CUDA_SUCCESS:
        return answer
    shared = cu.cuMemExportToShareableHandle(answer[1], FABRIC, 0)
    cu.cuMemRelease(answer[1])
    return {"create": "CUDA_SUCCESS", "export": shared}


@case
def physical_granularity(w: World) -> object:
    flags = cu.CUmemAllocationGranularity_flags
    bad = w.properties()
    bad.location.id = 99
    return {
        "minimum": int(need(cu.cuMemGetAllocationGranularity(w.properties(), flags(0)))),
        "recommended": int(need(cu.cuMemGetAllocationGranularity(w.properties(), flags(1)))),
        "bad_device": cu.cuMemGetAllocationGranularity(bad, flags(0)),
    }


@case
def reserve_edges(w: World) -> object:
    def trial(nbytes: int, align: int = 0, hint: int = 0, flags: int = 0) -> object:
        answer = cu.cuMemAddressReserve(nbytes, align, hint, flags)
        if answer[0] == cu.CUresult.CUDA_SUCCESS:
            cu.cuMemAddressFree(answer[1], nbytes)
        return answer

    start = w.reserve(CHUNK)
    return {
        "zero": trial(0), "page": trial(4096), "odd": trial(CHUNK + 4096), "align_3": trial(CHUNK, 3),
        "align_1gib": trial(CHUNK, 1 << 30), "flags": trial(CHUNK, flags=1), "hint_taken": trial(CHUNK, hint=start),
        "huge": trial(1 << 56), "free_wrong_size": cu.cuMemAddressFree(start, 2 * CHUNK),
        "free_interior": cu.cuMemAddressFree(start + MIB, CHUNK), "free_null": cu.cuMemAddressFree(0, CHUNK),
        "terabyte": trial(1 << 40),
    }  # fmt: skip


@case
def reserve_freed_twice(w: World) -> object:
    start = int(need(cu.cuMemAddressReserve(CHUNK, 0, 0, 0)))
    return [cu.cuMemAddressFree(start, CHUNK), cu.cuMemAddressFree(start, CHUNK)]


@case
def map_edges(w: World) -> object:
    start, handle, other = w.reserve(2 * CHUNK), w.physical(), w.physical()
    outside = w.alloc(4 * MIB)
    answers: dict[str, object] = {
        "offset": cu.cuMemMap(start, CHUNK, MIB, handle, 0),
        "half": cu.cuMemMap(start, MIB, 0, handle, 0),
        "too_big": cu.cuMemMap(start, 2 * CHUNK, 0, handle, 0),
        "flags": cu.cuMemMap(start, CHUNK, 0, handle, 1),
        "unaligned": cu.cuMemMap(start + 4096, CHUNK, 0, handle, 0),
        "past_end": cu.cuMemMap(start + 2 * CHUNK, CHUNK, 0, handle, 0),
        "on_classic": cu.cuMemMap(outside, CHUNK, 0, handle, 0),
        "null": cu.cuMemMap(0, CHUNK, 0, handle, 0),
        "good": cu.cuMemMap(start, CHUNK, 0, handle, 0),
        "live": cu.cuMemMap(start, CHUNK, 0, other, 0),
        "same_twice": cu.cuMemMap(start + CHUNK, CHUNK, 0, handle, 0),
        "free_mapped": cu.cuMemAddressFree(start, 2 * CHUNK),
        "unmap_half": cu.cuMemUnmap(start, MIB),
        "unmap_both": cu.cuMemUnmap(start, 2 * CHUNK),
        "unmap_again": cu.cuMemUnmap(start, CHUNK),
        "unmap_null": cu.cuMemUnmap(0, CHUNK),
    }
    return answers


@case
def unmap_with_hole(w: World) -> object:
    start = w.reserve(3 * CHUNK)
    for place in (0, 2):
        need(cu.cuMemMap(start + place * CHUNK, CHUNK, 0, w.physical(), 0))
    answers: list[object] = [cu.cuMemUnmap(start, 3 * CHUNK)]
    return [*answers, cu.cuMemUnmap(start, CHUNK), cu.cuMemUnmap(start + 2 * CHUNK, CHUNK)]


@case
def access_edges(w: World) -> object:
    start = w.mapped(2, access=False)
    own, bad = w.access(), w.access()
    location = own.location  # a view into `own`
    bad.location.id = 99
    before = cu.cuMemGetAccess(location, start)
    answers: dict[str, object] = {
        "before": [before, int(before[1] or 0)],
        "none": cu.cuMemSetAccess(start, CHUNK, [], 0),
        "bad_device": cu.cuMemSetAccess(start, CHUNK, [bad], 1),
        "half": cu.cuMemSetAccess(start, MIB, [w.access()], 1),
        "read_only": cu.cuMemSetAccess(start, CHUNK, [w.access(1)], 1),
        "over": cu.cuMemSetAccess(start, 3 * CHUNK, [w.access()], 1),
        "both": cu.cuMemSetAccess(start, 2 * CHUNK, [w.access()], 1),
        "unaligned": cu.cuMemSetAccess(start + 4096, CHUNK, [w.access()], 1),
        "revoke": cu.cuMemSetAccess(start, CHUNK, [w.access(0)], 1),
    }
    after = cu.cuMemGetAccess(location, start + CHUNK)
    answers["after"] = [after, int(after[1] or 0)]
    answers["unmapped"] = cu.cuMemSetAccess(w.reserve(CHUNK), CHUNK, [w.access()], 1)
    return answers


@case
def release_edges(w: World) -> object:
    handle = need(cu.cuMemCreate(CHUNK, w.properties(), 0))
    start = w.reserve(CHUNK)
    need(cu.cuMemMap(start, CHUNK, 0, handle, 0))
    answers: dict[str, object] = {"release": cu.cuMemRelease(handle)}
    answers["access_after_release"] = cu.cuMemSetAccess(start, CHUNK, [w.access()], 1)
    answers["use"] = cu.cuMemsetD8(start, 1, CHUNK)
    retained = cu.cuMemRetainAllocationHandle(start)
    answers["retain"] = retained
    if retained[0] == cu.CUresult.CUDA_SUCCESS:
        answers["release_retained"] = cu.cuMemRelease(retained[1])
    answers["unmap"] = cu.cuMemUnmap(start, CHUNK)
    answers["retain_unmapped"] = cu.cuMemRetainAllocationHandle(start)
    return answers


@isolated
def release_twice(w: World) -> object:
    handle = need(cu.cuMemCreate(CHUNK, w.properties(), 0))
    return [cu.cuMemRelease(handle), cu.cuMemRelease(handle)]


@isolated
def release_bogus(w: World) -> object:
    return cu.cuMemRelease(cu.CUmemGenericAllocationHandle(0x1234560))


@isolated
def map_released(w: World) -> object:
    handle, start = need(cu.cuMemCreate(CHUNK, w.properties(), 0)), w.reserve(CHUNK)
    return [cu.cuMemRelease(handle), cu.cuMemMap(start, CHUNK, 0, handle, 0)]


@case
def retain_edges(w: World) -> object:
    start, classic, pinned = w.mapped(2), w.alloc(4 * MIB), w.pinned(4096)
    pooled, reserved = w.pooled(CHUNK, w.pool()), w.reserve(CHUNK)
    first = need(cu.cuMemRetainAllocationHandle(start))
    interior = need(cu.cuMemRetainAllocationHandle(start + CHUNK + 4096))
    found: dict[str, object] = {
        "interior_is_other_chunk": int(first) != int(interior),
        "classic": made(cu.cuMemRetainAllocationHandle(classic)),
        "pinned": made(cu.cuMemRetainAllocationHandle(pinned)),
        "pooled": made(cu.cuMemRetainAllocationHandle(pooled)),
        "reserved": made(cu.cuMemRetainAllocationHandle(reserved)),
        "null": made(cu.cuMemRetainAllocationHandle(0)),
    }
    properties = need(cu.cuMemGetAllocationPropertiesFromHandle(first))
    found["types"] = int(properties.requestedHandleTypes)
    found["location"] = [int(properties.location.type), int(properties.location.id)]
    found["release"] = [cu.cuMemRelease(first), cu.cuMemRelease(interior)]
    return found


@case
def chunk_range(w: World) -> object:
    """What an address range is over mapped chunks."""
    start = w.mapped(3)
    found: dict[str, object] = {}
    for name, pointer in {"first": start, "second": start + CHUNK + 8, "last": start + 3 * CHUNK - 1}.items():
        base, size = need(cu.cuMemGetAddressRange(pointer))
        found[name] = [int(base) - start, int(size)]
    reserved = w.reserve(CHUNK)
    found["reserved"] = cu.cuMemGetAddressRange(reserved)
    return found


@case
def chunk_misused(w: World) -> object:
    start = w.mapped(1)
    return {
        "free": cu.cuMemFree(start),
        "legacy": cu.cuIpcGetMemHandle(start),
        "free_async": cu.cuMemFreeAsync(start, w.stream),
    }


@case
def export_edges(w: World) -> object:
    shared, private = w.physical(), w.physical(types=0)
    found: dict[str, object] = {
        "private": cu.cuMemExportToShareableHandle(private, FD, 0),
        "flags": cu.cuMemExportToShareableHandle(shared, FD, 1),
        "fabric": cu.cuMemExportToShareableHandle(shared, FABRIC, 0),
    }
    first = int(need(cu.cuMemExportToShareableHandle(shared, FD, 0)))
    second = int(need(cu.cuMemExportToShareableHandle(shared, FD, 0)))
    w.fd(first), w.fd(second)
    found["two_fds"] = first != second
    found["close_on_exec"] = not os.get_inheritable(first)
    return found


@case
def import_same_process(w: World) -> object:
    """Importing an own fd gives the same memory."""
    handle, start = w.physical(), w.reserve(2 * CHUNK)
    fd = w.fd(int(need(cu.cuMemExportToShareableHandle(handle, FD, 0))))
    imported = need(cu.cuMemImportFromShareableHandle(fd, FD))
    again = need(cu.cuMemImportFromShareableHandle(fd, FD))
    found: dict[str, object] = {"same_handle": int(imported) == int(handle), "again_same": int(imported) == int(again)}
    found["fd_open"] = os.fstat(fd).st_ino >= 0
    for i, one in enumerate((handle, imported)):
        need(cu.cuMemMap(start + i * CHUNK, CHUNK, 0, one, 0))
    need(cu.cuMemSetAccess(start, 2 * CHUNK, [w.access()], 1))
    need(cu.cuMemsetD8(start, 9, 64))
    out = bytearray(64)
    need(cu.cuMemcpyDtoH(out, start + CHUNK, 64))
    found["alias"] = bytes(out) == b"\x09" * 64
    properties = need(cu.cuMemGetAllocationPropertiesFromHandle(imported))
    found["types"] = int(properties.requestedHandleTypes)
    found["re_export"] = exported(cu.cuMemExportToShareableHandle(imported, FD, 0))
    found["unmap"] = cu.cuMemUnmap(start, 2 * CHUNK)
    found["release"] = [cu.cuMemRelease(imported), cu.cuMemRelease(again)]
    return found


def exported(answer: tuple[Any, ...]) -> object:
    """An export's answer; its fd is closed again."""
    if answer[0] == cu.CUresult.CUDA_SUCCESS:
        os.close(int(answer[1]))
    return answer


@isolated
def import_bad_fds(w: World) -> object:
    read, write = os.pipe()
    null = os.open("/dev/null", os.O_RDWR)
    memory = os.memfd_create("plain")
    os.ftruncate(memory, CHUNK)
    closed = os.dup(null)
    os.close(closed)
    found = {}
    for name, fd in {"pipe": read, "null": null, "memfd": memory, "closed": closed, "minus_1": -1}.items():
        try:
            found[name] = cu.cuMemImportFromShareableHandle(fd, FD)
        except Exception as error:
            found[name] = type(error).__name__
    for fd in (read, write, null, memory):
        os.close(fd)
    return found


@isolated
def import_pool_fd_as_memory(w: World) -> object:
    pool = w.pool()
    fd = w.fd(int(need(cu.cuMemPoolExportToShareableHandle(pool, FD, 0))))
    physical = w.fd(int(need(cu.cuMemExportToShareableHandle(w.physical(), FD, 0))))
    return [made(cu.cuMemImportFromShareableHandle(fd, FD)), cu.cuMemPoolImportFromShareableHandle(physical, FD, 0)]


@case
def physical_peer(w: World) -> object:
    """Another process maps the fd; the exporter sees what it wrote."""
    start = w.mapped(1)
    need(cu.cuMemsetD8(start, 3, CHUNK))
    handle = need(cu.cuMemRetainAllocationHandle(start))
    fd = w.fd(int(need(cu.cuMemExportToShareableHandle(handle, FD, 0))))
    need(cu.cuMemRelease(handle))
    answer = w.peer("physical", str(fd), fds=(fd,))
    out = bytearray(2)
    need(cu.cuMemcpyDtoH(out, start, 2))
    return {"peer": answer, "seen": list(out)}
