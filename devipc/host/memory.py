"""DeviceMemoryIPC on sealed memory files: allocate, describe, export, open.

Owns the blocks (memory files) behind allocations and mappings. Knows no stream; that memory stays mapped while queued
work uses it is the rule of :mod:`devipc.host.ranges`: :meth:`HostMemory.free` and :meth:`HostMemory.close` never block,
refuse new work on the range at once, and the last queued work that uses it unmaps it.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from devipc.host.driver import BACKEND, HostDriver, whole
from devipc.host.maps import Part, map_side_by_side
from devipc.host.meminfo import memory_info
from devipc.host.ranges import Range, next_identity
from devipc.spi import (
    PAGE_NBYTES,
    Allocation,
    AllocationInfo,
    BoundsError,
    Capability,
    CapabilityError,
    Chunk,
    ClosedError,
    DevIPCError,
    ExportedExtent,
    HandleError,
    HandleKind,
    MemoryKind,
    OpenedExtent,
    ResourceExhausted,
    UsageError,
    check_chunk,
    close_fds,
    create_memfd,
    round_up,
    try_each,
    undo,
    validate_memfd,
)

__all__ = ["HostMemory"]

_PAYLOAD = struct.Struct("<4sIQQ")
"""Magic, version, inode of the memory file, its size."""
_MAGIC = b"DHM\0"
_VERSION = 1

_WHY_NOT = {
    MemoryKind.IMPORTED: "this memory was opened from another process, which alone can export it",
    MemoryKind.HOST: "this is registered host memory, which the device did not allocate",
}
_UNKNOWN = "no live allocation, mapping or registration of this device contains this address"
_ALLOCATE = "allocate it with this backend's `allocate`"


@dataclass(frozen=True, slots=True)
class _Block:
    """One memory file of an allocation."""

    fd: int
    inode: int
    nbytes: int


class HostMemory:
    """Memory of the host device. Fulfils :class:`devipc.spi.DeviceMemoryIPC`."""

    def __init__(self, driver: HostDriver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._exported: dict[int, int] = {}

    def kinds(self) -> Mapping[HandleKind, Capability]:
        """Make one sealed memory file, look at it, and answer."""
        self._driver.enter("host_memfd_create")
        try:
            fd = create_memfd("devipc-host-check", PAGE_NBYTES)
            try:
                validate_memfd(fd, min_nbytes=PAGE_NBYTES)
            finally:
                os.close(fd)
        except DevIPCError as error:
            return {HandleKind.MEMFD: Capability.no(error.message, remedy=error.remedy)}
        return {HandleKind.MEMFD: Capability.yes("made a memory file and read its seals back")}

    def allocate(self, nbytes: int, *, kind: HandleKind | None = None, zero: bool = False) -> Allocation:
        """Allocate ``nbytes``, rounded up to whole pages. The memory is always zero."""
        return self.allocate_grown((nbytes,), kind=kind)

    def allocate_grown(self, blocks: Sequence[int], *, kind: HandleKind | None = None) -> Allocation:
        """Allocate one range from several blocks, as allocators do that grow a range; its exports have several chunks.

        A facility of the reference backend, so that the many-chunk form exists on every machine.

        Parameters
        ----------
        blocks : sequence of int
            Bytes of each block, each rounded up to whole pages.
        kind : HandleKind, optional
            ``memfd`` or None.
        """
        sizes = [round_up(whole("nbytes", nbytes, low=1, high=2**47), PAGE_NBYTES) for nbytes in blocks]
        if not sizes:
            raise UsageError("an allocation without blocks", remedy="pass at least one size")
        _check_kind(kind)
        self._driver.enter("host_allocate")
        free_nbytes = memory_info().free_nbytes
        if sum(sizes) > free_nbytes:
            # Asking the kernel for more than there is ends in its OOM killer instead of an error.
            raise ResourceExhausted(
                f"{sum(sizes)} bytes asked for, {free_nbytes} are free",
                code="host_memory",
                remedy="free host memory, raise the container's memory limit, or ask for less",
                backend=BACKEND,
                device=self._driver.device,
            )
        made: list[_Block] = []
        try:
            for size in sizes:
                fd = create_memfd("devipc-host", size)
                made.append(_Block(fd, os.fstat(fd).st_ino, size))
            parts = [Part(block.fd, 0, block.nbytes) for block in made]
            (found,) = self._add(MemoryKind.DEVICE, [parts], tuple(made))
        except BaseException:
            close_fds(block.fd for block in made)
            raise
        return Allocation(found.start, found.nbytes, HandleKind.MEMFD, found)

    def _add(self, kind: MemoryKind, extents: Sequence[Sequence[Part]], owner: tuple[_Block, ...]) -> list[Range]:
        reservation, places = map_side_by_side(extents)
        region = next_identity() if len(extents) > 1 else 0
        made = [
            Range(
                ptr,
                ptr + sum(part.nbytes for part in parts),
                kind,
                next_identity(),
                owner,
                dispose=partial(reservation.unmap, page, nbytes),
                region=region,
            )
            for (page, nbytes, ptr), parts in zip(places, extents, strict=True)
        ]
        added = 0
        try:
            for new in made:
                self._driver.ranges.add(new)
                added += 1
        except BaseException:
            for new in made[:added]:
                undo(self._driver.ranges.retire, new)
            for new in made[added:]:
                undo(new.dispose)
            raise
        return made

    def free(self, allocation: Allocation) -> None:
        """Give an allocation back. Never blocks: see the top of this module."""
        self._driver.enter("host_free", giving_back=True)
        self._retire(getattr(allocation, "token", None), MemoryKind.DEVICE, "allocation")

    def close(self, opened: OpenedExtent) -> None:
        """Unmap. Never blocks: see the top of this module."""
        self._driver.enter("host_close", giving_back=True)
        self._retire(getattr(opened, "token", None), MemoryKind.IMPORTED, "mapping")

    def _retire(self, token: object, kind: MemoryKind, what: str) -> None:
        if not isinstance(token, Range) or token.kind is not kind:
            raise UsageError(f"this is no {what} of the host backend", remedy=f"pass the {what} as it was returned")
        if not self._give_back(token):
            raise ClosedError(
                f"this {what} was given back already, or is another device's", remedy=f"give each {what} back once"
            )

    def _give_back(self, old: Range) -> bool:
        with self._lock:
            # Under the lock, so that no export duplicates a number that another file has by then.
            try:
                retired = self._driver.ranges.retire(old)
            except ResourceExhausted:  # the kernel keeps it mapped
                close_fds(block.fd for block in old.owner)
                raise
            if retired:
                close_fds(block.fd for block in old.owner)
            return retired

    def describe(self, ptr: int) -> AllocationInfo:
        """Say what ``ptr`` points into. Imported mappings are described by their shared part alone."""
        address = whole("ptr", ptr)
        self._driver.enter("host_describe")
        found = self._driver.ranges.find(address)
        if found is None:
            return AllocationInfo(0, 0, MemoryKind.UNKNOWN, 0, (), f"{_UNKNOWN}; {_ALLOCATE}")
        exportable = (HandleKind.MEMFD,) if found.kind is MemoryKind.DEVICE else ()
        reason = "" if exportable else f"{_WHY_NOT[found.kind]}; {_ALLOCATE}"
        return AllocationInfo(found.start, found.nbytes, found.kind, found.identity, exportable, reason)

    def export(self, ptr: int, nbytes: int, *, kind: HandleKind | None = None) -> ExportedExtent:
        """Share ``[ptr, ptr + nbytes)``, which need not begin or end on a page; each chunk carries a new descriptor."""
        start, length = whole("ptr", ptr), whole("nbytes", nbytes, low=1)
        _check_kind(kind)
        self._driver.enter("host_export")
        found = self._driver.ranges.find(start)
        if found is None or found.kind is not MemoryKind.DEVICE:
            reason = _UNKNOWN if found is None else _WHY_NOT[found.kind]
            raise CapabilityError(f"{start:#x} cannot be exported: {reason}", code="not_exportable", remedy=_ALLOCATE)
        if start + length > found.end:
            raise UsageError(
                f"[{start:#x}, {start + length:#x}) leaves its allocation [{found.start:#x}, {found.end:#x})",
                remedy="export allocations one by one",
            )
        return self._export(found, start, start + length)

    def _export(self, found: Range, start: int, end: int) -> ExportedExtent:
        chunks: list[Chunk] = []
        fds: list[int] = []
        base = found.start
        with self._lock:
            if not found.live:
                raise ClosedError("the allocation was freed meanwhile", remedy=_ALLOCATE)
            try:
                for block in found.owner:
                    low, high = max(start, base), min(end, base + block.nbytes)
                    if low < high:
                        fds.append(_duplicate(block))
                        payload = _PAYLOAD.pack(_MAGIC, _VERSION, block.inode, block.nbytes)
                        chunks.append(Chunk(block.nbytes, low - base, high - low, payload, has_fd=True))
                        self._exported[fds[-1]] = block.inode
                    base += block.nbytes
            except BaseException:
                close_fds(fds)
                raise
        return ExportedExtent(HandleKind.MEMFD, tuple(chunks), tuple(fds))

    def release(self, extent: ExportedExtent) -> None:
        """Close an export's descriptors; those that their holder closed already are passed over."""
        _check_extent(extent)
        self._driver.enter("host_release", giving_back=True)
        with self._lock:
            inodes = [self._exported.pop(fd, None) for fd in extent.fds]
        if None in inodes:
            raise ClosedError("this export was released already, or was not made here", remedy="release it once")
        _close_exported(zip(extent.fds, inodes, strict=True))

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        """Map a peer's extent. Every file is checked (seals, inode, size) before anything is mapped."""
        return self.open_side_by_side((extent,))[0]

    def side_by_side(self, kind: HandleKind) -> Capability:
        """Answer for one kind: the kernel maps memory files where it is told."""
        if kind is HandleKind.MEMFD:
            return Capability.yes("memory files are mapped where this process says")
        return Capability.no(f"the host backend has no {kind} handles", remedy="share memory of the host backend")

    def open_side_by_side(self, extents: Sequence[ExportedExtent]) -> tuple[OpenedExtent, ...]:
        """Map several extents one behind the other, each from a page of its own; checked as by :meth:`open`."""
        if not extents:
            return ()
        parts = [_checked_parts(extent) for extent in extents]
        self._driver.enter("host_open")
        made = self._add(MemoryKind.IMPORTED, parts, ())
        return tuple(OpenedExtent(found.start, found.nbytes, found, found.region) for found in made)

    def close_all(self) -> None:
        """Give back what the caller left, when the device is closed: exports too, which nobody can release then."""
        found = [left for left in self._driver.ranges.shut() if left.kind is not MemoryKind.HOST]
        with self._lock:
            exported, self._exported = self._exported, {}
        _close_exported(exported.items())
        try_each([partial(self._give_back, left) for left in found])


def _check_extent(extent: object) -> None:
    if not isinstance(extent, ExportedExtent):
        raise UsageError(f"an extent is a {type(extent).__name__}", remedy="pass what `export` returned")


def _check_kind(kind: HandleKind | None) -> None:
    if kind not in (None, HandleKind.MEMFD):
        raise CapabilityError(f"the host backend has no {kind} handles", remedy="pass kind=None or memfd")


def _duplicate(block: _Block) -> int:
    try:
        return fcntl.fcntl(block.fd, fcntl.F_DUPFD_CLOEXEC, 0)
    except OSError as error:
        raise ResourceExhausted(
            f"no descriptor left for an export ({error.strerror})", code="fds", remedy="raise `ulimit -n`"
        ) from error


def _close_exported(fds: Iterable[tuple[int, int | None]]) -> None:
    """Close descriptors that are still the files with these inodes."""
    for fd, inode in fds:
        try:
            ours = os.fstat(fd).st_ino == inode
        except OSError:
            continue
        if ours:
            os.close(fd)


def _checked_parts(extent: ExportedExtent) -> list[Part]:
    _check_extent(extent)
    if extent.kind is not HandleKind.MEMFD:
        raise HandleError(f"this backend opens memfd handles, not {extent.kind}", remedy="use the exporter's backend")
    if not extent.chunks or len(extent.fds) != len(extent.chunks) or not all(one.has_fd for one in extent.chunks):
        raise HandleError(
            f"{len(extent.chunks)} chunks came with {len(extent.fds)} descriptors",
            remedy="the exporter's handle is damaged; export again",
        )
    parts = [_checked_part(chunk, fd) for chunk, fd in zip(extent.chunks, extent.fds, strict=True)]
    _check_borders(parts)
    return parts


def _checked_part(chunk: Chunk, fd: int) -> Part:
    if len(chunk.payload) != _PAYLOAD.size:
        raise HandleError(
            f"a payload of {len(chunk.payload)} bytes, {_PAYLOAD.size} expected", remedy="both sides need one version"
        )
    magic, version, inode, nbytes = _PAYLOAD.unpack(chunk.payload)
    if (magic, version) != (_MAGIC, _VERSION):
        raise HandleError("the payload is not one of this backend", remedy="both sides need one version")
    size = validate_memfd(fd, min_nbytes=1)
    if os.fstat(fd).st_ino != inode:
        raise HandleError("the descriptor is not the one of this chunk", remedy="pass descriptors in chunk order")
    check_chunk(chunk, driver_nbytes=size)
    if (chunk.allocation_nbytes, nbytes) != (size, size):
        raise BoundsError(
            f"the file has {size} bytes, {chunk.allocation_nbytes} were announced", remedy="export the memory again"
        )
    return Part(fd, chunk.offset, chunk.nbytes)


def _check_borders(parts: Sequence[Part]) -> None:
    """Chunks meet on pages: nothing else can be mapped side by side at its exact size."""
    meets = [part.offset % PAGE_NBYTES == 0 for part in parts[1:]]
    meets += [(part.offset + part.nbytes) % PAGE_NBYTES == 0 for part in parts[:-1]]
    if not all(meets):
        raise HandleError("the chunks do not meet on whole pages", remedy="export one range, not pieces of several")
