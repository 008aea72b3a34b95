"""Memory IPC: allocations are sealed memory files, and a handle is such a file with a few words about it."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Mapping

from devipc.spi import (
    PAGE_NBYTES,
    Allocation,
    AllocationInfo,
    BoundsError,
    Capability,
    CapabilityError,
    Chunk,
    ClosedError,
    ExportedExtent,
    HandleError,
    HandleKind,
    MemoryInfo,
    MemoryKind,
    OpenedExtent,
    PayloadShape,
    ResourceExhausted,
    SharedMap,
    UsageError,
    check_chunk,
    check_payloads,
    close_fds,
    create_memfd,
    round_up,
    undo,
    validate_memfd,
)

from .driver import NAME, Driver, Range

__all__ = ["AcornMemory", "memory_info"]

_VERSION = 1
_PAYLOAD = struct.Struct("<B7sQ")
"""Version, magic, inode of the file: what tells a wrong descriptor from the right one."""
_MAGIC = b"acorn\0\0"
_SHAPES = {HandleKind.MEMFD: PayloadShape(_PAYLOAD.size, has_fd=True)}
_REMEDY = "allocate the memory with this backend"


def memory_info() -> MemoryInfo:
    """Return what the machine has free and in total."""
    return MemoryInfo(os.sysconf("SC_AVPHYS_PAGES") * PAGE_NBYTES, os.sysconf("SC_PHYS_PAGES") * PAGE_NBYTES)


class AcornMemory:
    """Fulfils :class:`devipc.spi.DeviceMemoryIPC`."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._exported: dict[int, int] = {}

    def kinds(self) -> Mapping[HandleKind, Capability]:
        """Answer for the one kind; a yes says what it rests on."""
        self._driver.enter("kinds")
        return {HandleKind.MEMFD: Capability.yes("every Linux that devipc runs on seals memory files")}

    def allocate(self, nbytes: int, *, kind: HandleKind | None = None, zero: bool = False) -> Allocation:
        """Allocate whole pages; memory files are always zero at first."""
        _check_kind(kind)
        if nbytes <= 0:
            raise UsageError(f"an allocation of {nbytes} bytes", remedy="ask for at least one", backend=NAME)
        self._driver.enter("allocate")
        size = round_up(nbytes, PAGE_NBYTES)
        if size > (free := memory_info().free_nbytes):
            raise ResourceExhausted(
                f"{size} bytes asked for, {free} are free", code="memory", remedy="ask for less", backend=NAME
            )
        fd = create_memfd("devipc-acorn", size)
        try:
            mapping = SharedMap(fd, size)
            made = self._driver.add(Range(mapping.address, mapping.address + size, MemoryKind.DEVICE, mapping, fd))
        except BaseException:
            undo(os.close, fd)  # the mapping goes with its last user
            raise
        return Allocation(made.start, size, HandleKind.MEMFD, made.number)

    def free(self, allocation: Allocation) -> None:
        """Give an allocation back. Never blocks: work that is queued on it keeps it mapped."""
        self._driver.enter("free")
        self._driver.retire(allocation.token, MemoryKind.DEVICE)

    def describe(self, ptr: int) -> AllocationInfo:
        """Say what ``ptr`` points into."""
        self._driver.enter("describe")
        found = self._driver.find(ptr)
        if found is None:
            return AllocationInfo(0, 0, MemoryKind.UNKNOWN, 0, (), f"no memory of this device; {_REMEDY}")
        size = found.end - found.start
        if found.kind is MemoryKind.DEVICE:
            return AllocationInfo(found.start, size, found.kind, found.number, (HandleKind.MEMFD,))
        return AllocationInfo(found.start, size, found.kind, found.number, (), f"{found.kind} memory; {_REMEDY}")

    def export(self, ptr: int, nbytes: int, *, kind: HandleKind | None = None) -> ExportedExtent:
        """Share ``[ptr, ptr + nbytes)``: the whole file travels, and where the range lies in it."""
        _check_kind(kind)
        if nbytes <= 0:
            raise UsageError(f"an export of {nbytes} bytes", remedy="share at least one", backend=NAME)
        self._driver.enter("export")
        found = self._driver.find(ptr)
        if found is None or found.kind is not MemoryKind.DEVICE:
            raise CapabilityError(
                f"{ptr:#x} cannot be exported: it is no allocation of this device",
                code="not_exportable",
                remedy=_REMEDY,
                backend=NAME,
            )
        if ptr + nbytes > found.end:
            raise UsageError("the range leaves its allocation", remedy="export allocations one by one", backend=NAME)
        with self._lock:
            fd = self._driver.duplicate(found)
            inode = os.fstat(fd).st_ino
            self._exported[fd] = inode
        payload = _PAYLOAD.pack(_VERSION, _MAGIC, inode)
        chunk = Chunk(found.end - found.start, ptr - found.start, nbytes, payload, has_fd=True)
        return ExportedExtent(HandleKind.MEMFD, (chunk,), (fd,))

    def release(self, extent: ExportedExtent) -> None:
        """Take an export back. Its holder may have closed the descriptor, and the number may be another file's now."""
        self._driver.enter("release")
        (fd,) = extent.fds
        with self._lock:
            inode = self._exported.pop(fd, None)
            if inode is None:
                raise ClosedError("this export was released before", remedy="release it once", backend=NAME)
            try:
                ours = os.fstat(fd).st_ino == inode
            except OSError:
                return
            if ours:
                close_fds(extent.fds)

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        """Map a peer's file. Nothing that came is believed: shape, seals, inode and bounds are checked before."""
        check_payloads(extent, _SHAPES, version=_VERSION, package="devipc-acorn", backend=NAME)
        (chunk,), (fd,) = extent.chunks, extent.fds
        _, magic, inode = _PAYLOAD.unpack(chunk.payload)
        size = validate_memfd(fd, min_nbytes=1)
        if magic != _MAGIC or os.fstat(fd).st_ino != inode:
            raise HandleError(
                "payload and descriptor do not belong together", remedy="export the memory again", backend=NAME
            )
        check_chunk(chunk, driver_nbytes=size)
        if chunk.allocation_nbytes != size:
            raise BoundsError(
                f"{chunk.allocation_nbytes} bytes were announced, the file has {size}",
                remedy="export the memory again",
                backend=NAME,
            )
        self._driver.enter("open")
        mapping = SharedMap(fd, size)
        start = mapping.address + chunk.offset
        made = self._driver.add(Range(start, start + chunk.nbytes, MemoryKind.IMPORTED, mapping))
        return OpenedExtent(start, chunk.nbytes, made.number)

    def close(self, opened: OpenedExtent) -> None:
        """Unmap, behind the work that is queued on it."""
        self._driver.enter("close")
        self._driver.retire(opened.token, MemoryKind.IMPORTED)


def _check_kind(kind: HandleKind | None) -> None:
    if kind not in (None, HandleKind.MEMFD):
        raise CapabilityError(f"there are no {kind} handles here", remedy="pass kind=None or memfd", backend=NAME)
