"""Memory IPC of one device: allocating, asking what a pointer is, and handles whose descriptor travels beside them.

Owns what this process allocated, exported and opened. Identity, generations and leases are the core's. Kind ``opaque``:
64 bytes of the driver and one descriptor.

Sources (Level Zero core specification, and compute-runtime where named): only memory of ``zeMemAllocDevice`` and
``zeMemAllocHost`` is exported; a handle names the allocation, or the driver's pool around it with the distance inside
(compute-runtime); each get wants one put, which loaders below 1.20 lack, and freeing does those that are missing; every
open gives another address; both may be called by several threads at once.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from devipc.spi import (
    Allocation,
    AllocationInfo,
    Capability,
    CapabilityError,
    ClosedError,
    ExportedExtent,
    HandleKind,
    MemoryKind,
    OpenedExtent,
    UsageError,
    Verdict,
    close_fds,
    round_up,
)
from devipc_levelzero import driver
from devipc_levelzero.abi import DeviceMemoryDesc, IpcFlags, MemoryProperties, make
from devipc_levelzero.context import BLOCK_NBYTES, Context
from devipc_levelzero.exports import Exports
from devipc_levelzero.imports import Imports

__all__ = ["TYPE_DEVICE", "TYPE_HOST", "LevelZeroMemory"]

TYPE_HOST = 1
"""ZE_MEMORY_TYPE_HOST."""
TYPE_DEVICE = 2
"""ZE_MEMORY_TYPE_DEVICE."""
_TYPE_SHARED = 3
_IPC_MEMORY = 1
_HOST_DESC = 0x16

_REASONS = {
    0: (
        MemoryKind.UNKNOWN,
        "the driver does not know the address in this context: use memory of allocate(), and none that was freed",
    ),
    _TYPE_SHARED: (MemoryKind.MANAGED, "shared memory migrates and has no handle: use device or host memory"),
    4: (MemoryKind.HOST, "it is host memory of this process: share its file (memfd) instead"),
}
_IMPORTED = "it was opened from another process: export it where it was allocated"
_ELSEWHERE = "it lies on another device: export it on the device that it is on"


@dataclass(slots=True, eq=False)
class _Opened:
    base: int
    nbytes: int
    inner: Any
    serial: int


class LevelZeroMemory:
    """Memory IPC by driver handles with a descriptor: kind ``opaque``.

    Parameters
    ----------
    context : Context
        The device's context.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._owned: dict[int, Allocation] = {}
        self._opened: dict[int, _Opened] = {}
        self._serials = itertools.count(2**62)
        self._exports = Exports(context)
        self._imports = Imports(context)

    def kinds(self) -> Mapping[HandleKind, Capability]:
        """Return the one kind. The driver's property is a claim, never a verdict."""
        found = make(IpcFlags)
        claimed = driver.question("zeDriverGetIpcProperties", self._context.driver, ctypes.byref(found))
        says = "no answer" if not claimed else "yes" if found.flags & _IPC_MEMORY else "no"
        put = "has" if driver.has("zeMemPutIpcHandle") else "lacks"
        return {
            HandleKind.OPAQUE: Capability(
                Verdict.UNTESTED,
                f"property: memory handles {says}; the loader {put} zeMemPutIpcHandle; small memory that was allocated"
                " elsewhere may lie in a pool of the driver, which peers get whole; allocate() rounds up to blocks",
                f"the driver's property says {says}; a live check decides",
            )
        }

    def allocate(self, nbytes: int, *, kind: HandleKind | None = None, zero: bool = False) -> Allocation:
        """Allocate whole blocks of device memory. Blocks while ``zero`` fills. The caller frees with :meth:`free`."""
        self._check_request(nbytes, kind)
        size, made = round_up(nbytes, BLOCK_NBYTES), ctypes.c_void_p()
        context, desc = self._context, make(DeviceMemoryDesc)
        context.check_alive()
        context.call(
            "zeMemAllocDevice", context.handle, ctypes.byref(desc), size, 0, context.device, ctypes.byref(made)
        )
        allocation = Allocation(int(made.value or 0), size, HandleKind.OPAQUE, MemoryKind.DEVICE)
        if zero:
            context.fill_zero(allocation.ptr, size)
        return self._remember(allocation)

    def allocate_host(self, nbytes: int) -> Allocation:
        """Allocate host memory of the driver, pinned, which the host may touch at ``ptr`` and which can be exported.

        What a peer opens of it is for its device alone. The caller frees with :meth:`free`.
        """
        self._check_request(nbytes, None)
        size, made = round_up(nbytes, BLOCK_NBYTES), ctypes.c_void_p()
        desc = DeviceMemoryDesc(stype=_HOST_DESC)
        self._context.check_alive()
        self._context.call("zeMemAllocHost", self._context.handle, ctypes.byref(desc), size, 0, ctypes.byref(made))
        return self._remember(Allocation(int(made.value or 0), size, HandleKind.OPAQUE, MemoryKind.HOST))

    def _check_request(self, nbytes: int, kind: HandleKind | None) -> None:
        if nbytes <= 0:
            raise UsageError(f"allocation of {nbytes} bytes", remedy="ask for at least one byte", backend="levelzero")
        if kind not in (None, HandleKind.OPAQUE):
            raise CapabilityError(
                f"this backend cannot allocate memory of kind {kind}",
                code="kind",
                remedy="use opaque",
                backend="levelzero",
                device=self._context.uuid,
            )

    def _remember(self, allocation: Allocation) -> Allocation:
        with self._lock:
            self._owned[allocation.ptr] = allocation
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Give an allocation back. The caller guarantees that no queued work uses it and that every peer closed it.

        Raises
        ------
        UsageError
            When it was freed before, or comes from elsewhere.
        """
        with self._lock:
            if self._owned.get(allocation.ptr) is not allocation:
                raise UsageError(
                    "the allocation was freed before, or was not made by this device",
                    remedy="free each allocation once, on the device that made it",
                    backend="levelzero",
                    device=self._context.uuid,
                )
            del self._owned[allocation.ptr]
        self._exports.put_all(allocation.ptr)
        self._context.call("zeMemFree", self._context.handle, allocation.ptr)

    def describe(self, ptr: int) -> AllocationInfo:
        """Ask the driver what ``ptr`` points into. Does not block."""
        with self._lock:
            opened = next((o for o in self._opened.values() if o.base <= ptr < o.base + o.nbytes), None)
        if opened is not None:
            return AllocationInfo(opened.base, opened.nbytes, MemoryKind.IMPORTED, opened.serial, (), _IMPORTED)
        context, found, device = self._context, make(MemoryProperties), ctypes.c_void_p()
        context.check_alive()
        if not 0 < ptr < 2**64:
            return AllocationInfo(ptr, 0, MemoryKind.UNKNOWN, 0, (), _REASONS[0][1])
        known = driver.question(
            "zeMemGetAllocProperties", context.handle, ptr, ctypes.byref(found), ctypes.byref(device)
        )
        base, nbytes = ctypes.c_uint64(0), ctypes.c_size_t(0)
        if not known or not driver.question(
            "zeMemGetAddressRange", context.handle, ptr, ctypes.byref(base), ctypes.byref(nbytes)
        ):
            return AllocationInfo(ptr, 0, MemoryKind.UNKNOWN, 0, (), _REASONS[0][1])
        number = int(found.id) or next(self._serials)
        if found.type not in (TYPE_DEVICE, TYPE_HOST):
            kind, reason = _REASONS.get(found.type, _REASONS[0])
            return AllocationInfo(base.value, nbytes.value, kind, number, (), reason)
        kind = MemoryKind.DEVICE if found.type == TYPE_DEVICE else MemoryKind.HOST
        if kind is MemoryKind.DEVICE and device.value not in (None, context.device):
            return AllocationInfo(base.value, nbytes.value, kind, number, (), _ELSEWHERE)
        return AllocationInfo(base.value, nbytes.value, kind, number, (HandleKind.OPAQUE,))

    def export(self, ptr: int, nbytes: int, *, kind: HandleKind | None = None) -> ExportedExtent:
        """Export ``[ptr, ptr + nbytes)``; the driver is given the base, the result owns one descriptor."""
        if nbytes <= 0:
            raise UsageError(
                f"export of {nbytes} bytes",
                remedy="there is no handle for nothing; skip empty ranges",
                backend="levelzero",
            )
        info = self.describe(ptr)
        if not info.exportable:
            raise self._not_exportable(info.kind.value, info.reason)
        if kind not in (None, *info.exportable):
            raise self._not_exportable(info.kind.value, f"it can be exported as opaque, not as {kind}")
        if ptr + nbytes > info.base + info.nbytes:
            raise UsageError(
                f"the range ends {ptr + nbytes - info.base - info.nbytes} bytes behind its allocation",
                remedy="export only the part that was allocated",
                backend="levelzero",
                device=self._context.uuid,
            )
        memory_type = TYPE_DEVICE if info.kind is MemoryKind.DEVICE else TYPE_HOST
        return self._exports.export(ptr, nbytes, info=info, memory_type=memory_type)

    def _not_exportable(self, kind: str, reason: str) -> CapabilityError:
        reason, _, remedy = reason.partition(": ")
        return CapabilityError(
            f"{kind} memory cannot be exported: {reason}",
            code="not_exportable",
            remedy=remedy,
            backend="levelzero",
            device=self._context.uuid,
        )

    def release(self, extent: ExportedExtent) -> None:
        """Close the extent's descriptor and put its handle back. Does not free the memory."""
        try:
            self._exports.put(extent, still_there=self._is_same)
        finally:
            close_fds(extent.fds)

    def _is_same(self, base: int, number: int) -> bool:
        """Return whether an allocation still is where it was: a freed one has put its handles back already."""
        info = self.describe(base)
        return info.base == base and info.allocation_id == number

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        """Map an extent of another process. May block in the driver; descriptors stay the caller's."""
        self._imports.check(extent)
        self._context.check_alive()
        opened = self._imports.open(extent)
        chunk = extent.chunks[0]
        token = _Opened(opened.ptr - chunk.offset, chunk.allocation_nbytes, opened.token, next(self._serials))
        with self._lock:
            self._opened[token.serial] = token
        return OpenedExtent(opened.ptr, opened.nbytes, token)

    def close(self, opened: OpenedExtent) -> None:
        """Unmap; the caller guarantees that no queued work of this process still uses the range.

        Raises
        ------
        ClosedError
            When it was closed before.
        """
        token = opened.token
        with self._lock:
            if not isinstance(token, _Opened) or self._opened.pop(token.serial, None) is not token:
                raise ClosedError(
                    "the mapping was closed before, or was not opened by this device",
                    remedy="close each mapping once",
                    backend="levelzero",
                    device=self._context.uuid,
                )
        self._imports.close(token.inner)
