"""Handle kind ``pool``: stream-ordered memory, a pool by descriptor and each pointer in it by 64 bytes.

Owns this process's exportable pools, the pools imported from peers and the pointers imported from those. All functions
expect the context to be current. An importer must free a pointer before the exporter does, and the last one of a pool
gives the pool back; two imports of one pointer would be undone by the first free, so one import serves both.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from functools import partial

from devipc.spi import (
    AllocationInfo,
    Chunk,
    Descriptor,
    DevIPCError,
    ExportedExtent,
    HandleKind,
    OpenedExtent,
    Turns,
    check_chunk,
    explain_missing_fd,
    round_up,
    try_each,
    undo,
)
from devipc_hip import driver, layouts, payload
from devipc_hip.context import Context
from devipc_hip.memory_plain import BLOCK_NBYTES
from devipc_hip.opening import open_in_time

__all__ = ["PoolExports", "PoolImports", "allocate_from_pool", "free_with_pool"]


@dataclass(slots=True)
class _Exported:
    identity: bytes
    live: int = 0


def allocate_from_pool(nbytes: int, *, ordinal: int, stream: int) -> tuple[int, int, int]:
    """Allocate from a new exportable pool; return address, size and pool.

    A pool is shared whole and gives its memory back only when it is destroyed, so each allocation gets its own.
    """
    pool = int(driver.call("hipMemPoolCreate", layouts.pool_props(ordinal)))
    try:
        nbytes = round_up(nbytes, BLOCK_NBYTES)
        ptr = int(driver.call("hipMallocFromPoolAsync", nbytes, pool, stream))
    except BaseException:
        undo(driver.call, "hipMemPoolDestroy", pool)
        raise
    try:
        driver.call("hipStreamSynchronize", stream)
    except BaseException:
        undo(partial(free_with_pool, ptr, pool, stream=stream))
        raise
    return ptr, nbytes, pool


def free_with_pool(ptr: int, pool: int, *, stream: int) -> None:
    """Give an allocation and its pool back."""
    try_each([partial(_free_in_order, ptr, stream), partial(driver.call, "hipMemPoolDestroy", pool)])


class PoolExports:
    """The identities under which pools of this process are exported."""

    def __init__(self) -> None:
        self._process = os.urandom(8)
        self._lock = threading.Lock()
        self._exported: dict[int, _Exported] = {}

    def export(self, ptr: int, nbytes: int, *, info: AllocationInfo, pool: int) -> ExportedExtent:
        """Export ``[ptr, ptr + nbytes)`` of ``pool``, which was created exportable."""
        try:
            fd = driver.export_fd("hipMemPoolExportToShareableHandle", pool, after=(driver.FD, 0))
        except DevIPCError as error:
            raise explain_missing_fd(error, backend="hip") from error
        try:
            data: bytes = driver.call("hipMemPoolExportPointer", info.base)
        except BaseException:
            os.close(fd)
            raise
        with self._lock:
            exported = self._exported.setdefault(pool, _Exported(os.urandom(16)))
            exported.live += 1
            identity = exported.identity
        allocation = self._process + info.allocation_id.to_bytes(8, "little")
        chunk = Chunk(info.nbytes, ptr - info.base, nbytes, payload.pack(identity, allocation, data), has_fd=True)
        return ExportedExtent(HandleKind.POOL, (chunk,), (fd,))

    def release(self, extent: ExportedExtent) -> None:
        """Take an export back. A pool's identity ends with its last export: a later pool may have the same handle."""
        identity = payload.unpack(extent.chunks[0])[:16]
        with self._lock:
            for address, exported in list(self._exported.items()):
                if exported.identity == identity:
                    exported.live -= 1
                    if exported.live <= 0:
                        del self._exported[address]


@dataclass(slots=True, eq=False)
class _Pool:
    identity: bytes
    handle: int
    pointers: int = 0


@dataclass(slots=True, eq=False)
class _Pointer:
    pool: _Pool
    allocation: bytes
    ptr: int
    users: int = 0


def _free_in_order(ptr: int, stream: int) -> None:
    """Free on a stream of our own and wait: ``hipFree`` would block while any stream waits for a word."""
    driver.call("hipFreeAsync", ptr, stream)
    driver.call("hipStreamSynchronize", stream)


class PoolImports:
    """Pools and pointers imported from peers.

    Calls about one pointer come one after the other, since its import and free must not overlap, and so do those about
    one pool; those about others are not held up by one that hangs.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._pool_turns = Turns()
        self._pointer_turns = Turns()
        self._pools: dict[bytes, _Pool] = {}
        self._pointers: dict[bytes, _Pointer] = {}

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        """Map a checked extent and compare it with the size that this driver reports."""
        (chunk,) = extent.chunks
        body = payload.unpack(chunk)
        identity, allocation, data = body[:16], body[16:32], body[32:]
        with self._pointer_turns.of(allocation):
            pointer = self._pointers.get(allocation)
            if pointer is None:
                pointer = self._import(identity, allocation, data, fd=extent.fds[0])
            pointer.users += 1
            try:
                base, nbytes = driver.call("hipMemGetAddressRange", pointer.ptr)
                check_chunk(chunk, driver_nbytes=int(base) + int(nbytes) - pointer.ptr)
            except BaseException:
                undo(self._drop, pointer)
                raise
        return OpenedExtent(pointer.ptr + chunk.offset, chunk.nbytes, pointer)

    def close(self, token: _Pointer) -> None:
        """Free the import when its last user closes it, and give the pool back with its last import."""
        with self._pointer_turns.of(token.allocation):
            self._drop(token)

    def _import(self, identity: bytes, allocation: bytes, data: bytes, *, fd: int) -> _Pointer:
        pool = self._enter(identity, fd)
        try:
            ptr = open_in_time(
                self._context,
                lambda: int(driver.call("hipMemPoolImportPointer", pool.handle, data)),
                lambda opened: self._free(pool, opened),
                "hipMemPoolImportPointer",
            )
        except DevIPCError as error:
            if error.code != "driver_blocked":  # else the call uses the pool for as long as it has not returned
                undo(self._leave, pool)
            raise
        pointer = self._pointers[allocation] = _Pointer(pool, allocation, ptr)
        return pointer

    def _enter(self, identity: bytes, fd: int) -> _Pool:
        """Return the pool, imported by the first of its pointers."""
        with self._pool_turns.of(identity):
            pool = self._pools.get(identity) or self._import_pool(identity, fd)
            pool.pointers += 1
            return pool

    def _leave(self, pool: _Pool) -> None:
        """Give the pool back with the last of its pointers."""
        with self._pool_turns.of(pool.identity):
            pool.pointers -= 1
            if not pool.pointers:
                del self._pools[pool.identity]
                driver.call("hipMemPoolDestroy", pool.handle)

    def _import_pool(self, identity: bytes, fd: int) -> _Pool:
        own = Descriptor(fd, backend="hip")
        try:
            handle = open_in_time(
                self._context,
                lambda: int(driver.call("hipMemPoolImportFromShareableHandle", own.number, driver.FD, 0)),
                lambda opened: driver.call("hipMemPoolDestroy", opened),
                "hipMemPoolImportFromShareableHandle",
            )
        except DevIPCError as failed:
            error = explain_missing_fd(failed, backend="hip")  # before one is given back
            own.close(after=failed)
            raise error from failed
        own.close()
        try:
            # Access does not travel with the pool.
            driver.call("hipMemPoolSetAccess", handle, layouts.access_desc(self._context.ordinal), 1)
        except BaseException:
            undo(driver.call, "hipMemPoolDestroy", handle)
            raise
        pool = self._pools[identity] = _Pool(identity, handle)
        return pool

    def _drop(self, pointer: _Pointer) -> None:
        pointer.users -= 1
        if not pointer.users:
            del self._pointers[pointer.allocation]
            self._free(pointer.pool, pointer.ptr)

    def _free(self, pool: _Pool, ptr: int) -> None:
        try_each([lambda: _free_in_order(ptr, self._context.internal_stream()), partial(self._leave, pool)])
