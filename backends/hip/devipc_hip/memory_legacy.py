"""Handle kind ``legacy``: memory of ``hipMalloc`` by a 64-byte handle.

Owns exporting, opening and closing of that kind. All functions expect the device to be current.

The handle's bytes are no identity: two of one allocation differ (Mooncake 3546). An export while a peer attaches the
same memory fails on either side, or attaches other memory (ROCm/rocm-systems 11892), and some releases leak at each
export: so an allocation is exported once and its handle is handed out again. Its base is exported, since the handle of
an interior pointer opens the base too.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass

from devipc.spi import (
    AllocationInfo,
    Chunk,
    DeviceLostError,
    DriverError,
    ExportedExtent,
    HandleKind,
    OpenedExtent,
    Turns,
    undo,
)
from devipc_hip import driver, payload
from devipc_hip.context import Context
from devipc_hip.memory_plain import attach, check_opened
from devipc_hip.memory_query import Mapping
from devipc_hip.opening import open_in_time
from devipc_hip.payload import CANARY_NBYTES, IDENTITY_NBYTES

__all__ = ["LegacyExports", "LegacyMappings"]

_LAZY_ENABLE_PEER_ACCESS = 1
_PAUSES_S = (0.02, 0.1)
_FRESH = 2**63  # ids from here on are this package's, and say nothing about the allocation


@dataclass(slots=True)
class _Exported:
    allocation_id: int
    nbytes: int
    identity: bytes
    handle: bytes
    extents: int = 0


class LegacyExports:
    """Handles of this process's allocations, one for each."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exported: dict[int, _Exported] = {}

    def export(self, ptr: int, nbytes: int, *, info: AllocationInfo, canary: bytes) -> ExportedExtent:
        """Export ``[ptr, ptr + nbytes)`` of the allocation that ``info`` describes."""
        with self._lock:
            found = self._exported.get(info.base)
            if found is None or not _is_same(found, info):
                handle = _handle_of(info.base)
                found = _Exported(info.allocation_id, info.nbytes, os.urandom(IDENTITY_NBYTES), handle)
                self._exported[info.base] = found
            found.extents += 1
        body = payload.pack(found.identity, canary, found.handle)
        return ExportedExtent(HandleKind.LEGACY, (Chunk(info.nbytes, ptr - info.base, nbytes, body),))

    def release(self, extent: ExportedExtent) -> None:
        """Take an export back. The handle stays while the runtime can tell that the allocation is still the same."""
        identity = payload.unpack(extent.chunks[0])[:IDENTITY_NBYTES]
        with self._lock:
            for base, found in list(self._exported.items()):
                if found.identity == identity:
                    found.extents -= 1
                    if found.extents <= 0 and found.allocation_id >= _FRESH:
                        del self._exported[base]

    def forget(self, base: int) -> None:
        """Drop the handle of an allocation that is being freed."""
        with self._lock:
            self._exported.pop(base, None)


def _handle_of(base: int) -> bytes:
    """Export an allocation; on some nodes that fails most of the time, and then works (ROCm/rccl 2188)."""
    for pause_s in _PAUSES_S:
        try:
            return bytes(driver.call("hipIpcGetMemHandle", base))
        except DriverError as error:
            if isinstance(error, DeviceLostError):
                raise
        time.sleep(pause_s)
    try:
        return bytes(driver.call("hipIpcGetMemHandle", base))
    except DriverError as error:
        error.message = f"{error.message}, {len(_PAUSES_S) + 1} times in a row"
        raise


def _is_same(found: _Exported, info: AllocationInfo) -> bool:
    """Return whether an allocation at this base is the one that was exported.

    Without an id of the runtime's it is while an export of it is out: freeing it then would break the contract.
    """
    same_id = found.allocation_id == info.allocation_id
    unknown = found.allocation_id >= _FRESH and info.allocation_id >= _FRESH and found.extents > 0
    return found.nbytes == info.nbytes and (same_id or unknown)


@dataclass(slots=True, eq=False)
class _Mapped:
    identity: bytes
    ptr: int
    users: int = 0


class LegacyMappings:
    """Mappings of this process made from legacy handles.

    Runtimes either count the opens of an allocation, refuse the second, or give another address: so one is opened once,
    and closed with its last user. Calls about one allocation come one after the other; those about others are not held
    up.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._turns = Turns()
        self._mapped: dict[bytes, _Mapped] = {}

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        """Map a checked extent, within a deadline, and compare it with what was announced."""
        (chunk,) = extent.chunks
        body = payload.unpack(chunk)
        identity, rest = body[:IDENTITY_NBYTES], body[IDENTITY_NBYTES:]
        canary, handle = rest[:CANARY_NBYTES], rest[CANARY_NBYTES:]
        with self._turns.of(identity):
            mapped = self._mapped.get(identity)
            if mapped is None:
                ptr = attach(lambda: self._open_once(handle, chunk, canary))
                mapped = self._mapped[identity] = _Mapped(identity, ptr)
            else:
                self._check(mapped.ptr, chunk, canary)
            mapped.users += 1
        return OpenedExtent(mapped.ptr + chunk.offset, chunk.nbytes, mapped)

    def _open_once(self, handle: bytes, chunk: Chunk, canary: bytes) -> int:
        ptr = open_in_time(
            self._context,
            lambda: int(driver.call("hipIpcOpenMemHandle", handle, _LAZY_ENABLE_PEER_ACCESS)),
            lambda opened: driver.call("hipIpcCloseMemHandle", opened),
            "hipIpcOpenMemHandle",
        )
        try:
            self._check(ptr, chunk, canary)
        except BaseException:
            undo(driver.call, "hipIpcCloseMemHandle", ptr)
            raise
        return ptr

    def _check(self, ptr: int, chunk: Chunk, canary: bytes) -> None:
        opened = Mapping(*(int(value) for value in driver.call("hipMemGetAddressRange", ptr)))
        check_opened(ptr, chunk, canary, opened, self._context)

    def close(self, token: _Mapped) -> None:
        """Unmap when the last user closes it."""
        with self._turns.of(token.identity):
            token.users -= 1
            if not token.users:
                del self._mapped[token.identity]
                driver.call("hipIpcCloseMemHandle", token.ptr)
