"""Handle kind ``vmm_fd``: physical memory mapped into reserved addresses, exported as file descriptors.

Owns allocating, exporting, mapping and unmapping of that kind, for one block or for a grown range of many. All
functions expect the context to be current. Every step undoes the earlier ones when it fails.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

from devipc.spi import (
    BoundsError,
    CapabilityError,
    Chunk,
    Descriptor,
    DevIPCError,
    DriverError,
    ExportedExtent,
    HandleError,
    HandleKind,
    OpenedExtent,
    UsageError,
    check_chunk,
    close_fds,
    explain_missing_fd,
    note_left,
    round_up,
    try_each,
    undo,
)
from devipc_cuda import driver, payload
from devipc_cuda.memory_query import Mapping, mappings_from
from devipc_cuda.status import INVALID_VALUE, NOT_SUPPORTED, error_for

__all__ = ["Placed", "Reservation", "allocate_vmm", "export_vmm", "open_vmm"]

_GRANULARITY_MINIMUM = 0


class Reservation:
    """Reserved device addresses, and what is mapped into them.

    Chunks are placed by the caller, so that several extents can share one reservation at a constant stride.

    Parameters
    ----------
    nbytes : int
        Size, exactly what will be mapped; a multiple of the granularity.
    ordinal : int
        The device that gets access.
    """

    def __init__(self, nbytes: int, *, ordinal: int) -> None:
        self.nbytes = nbytes
        self.base = int(driver.call("cuMemAddressReserve", nbytes, 0, 0, 0))
        self._ordinal = ordinal
        self._lock = threading.Lock()
        self._mapped: list[Mapping] = []
        self._busy = 0
        self._stuck = False

    def map(self, offset: int, handle: Any, nbytes: int) -> None:
        """Map physical memory at ``offset``; it is reachable after :meth:`allow`."""
        driver.call("cuMemMap", self.base + offset, nbytes, 0, handle, 0)
        self._mapped.append(Mapping(self.base + offset, nbytes))

    def allow(self) -> None:
        """Let the device read and write all that is mapped."""
        driver.call("cuMemSetAccess", self.base, self.nbytes, [driver.access_desc(self._ordinal)], 1)

    def release(self, start: int = 0, nbytes: int | None = None) -> None:
        """Unmap in reverse order what begins in ``[start, start + nbytes)``, everything by default.

        The addresses go back with the last mapping. Every step is tried, the first failure is raised. What the driver
        does not unmap keeps the addresses, so that nothing else is ever mapped there.
        """
        end = self.nbytes if nbytes is None else start + nbytes
        with self._lock:
            gone: list[Mapping] = []
            kept: list[Mapping] = []
            for mapping in self._mapped:
                (gone if start <= mapping.base - self.base < end else kept).append(mapping)
            self._mapped = kept
            self._busy += 1
        try_each([*(partial(self._unmap, mapping) for mapping in reversed(gone)), self._leave])

    def _unmap(self, mapping: Mapping) -> None:
        try:
            driver.call("cuMemUnmap", mapping.base, mapping.nbytes)
        except BaseException:
            self._stuck = True
            raise

    def _leave(self) -> None:
        """Free the addresses as the last one, once nobody unmaps in them any more."""
        with self._lock:
            self._busy -= 1
            if self._mapped or self._busy or self._stuck or not self.base:
                return
            base, self.base = self.base, 0
        driver.call("cuMemAddressFree", base, self.nbytes)


class Placed:
    """One extent's part of a reservation that several share.

    Parameters
    ----------
    reservation : Reservation
        Whose addresses it lies at.
    start, nbytes : int
        Its place, in bytes from the reservation's base, and its mapped length.
    """

    def __init__(self, reservation: Reservation, start: int, nbytes: int) -> None:
        self._reservation = reservation
        self._start = start
        self._nbytes = nbytes

    def release(self) -> None:
        """Unmap it; the last one gives the addresses back."""
        self._reservation.release(self._start, self._nbytes)


def granularity(ordinal: int) -> int:
    """Return the block size in which the device's memory is created and mapped."""
    flag = driver.make("CUmemAllocationGranularity_flags", _GRANULARITY_MINIMUM)
    return int(driver.call("cuMemGetAllocationGranularity", driver.allocation_prop(ordinal), flag))


def allocate_vmm(sizes: Sequence[int], *, ordinal: int) -> Reservation:
    """Create exportable blocks of at least these sizes, map them side by side and allow access; all or nothing."""
    blocks: list[tuple[Any, int]] = []
    try:
        for nbytes in sizes:
            blocks.append(_create_block(nbytes, ordinal=ordinal))
        reservation = map_side_by_side(blocks, ordinal=ordinal)
    except BaseException:
        undo(_let_go, blocks)
        raise
    return _alone(reservation, blocks)


def _alone(reservation: Reservation, blocks: Sequence[tuple[Any, int]]) -> Reservation:
    """Let go of the handles of what was mapped: the mapping keeps the memory, unmapping frees it; all or nothing."""
    try:
        _let_go(blocks)
    except DevIPCError as error:
        undo(reservation.release)
        refused = DriverError(
            "the driver does not let go of a handle of memory that it has mapped",
            code="not_let_go",
            remedy="restart this process: it keeps the memory from its owner",
            status=error.status,
        )
        note_left(refused, error)
        raise refused from error
    except BaseException:
        undo(reservation.release)
        raise
    return reservation


def _let_go(blocks: Sequence[tuple[Any, int]]) -> None:
    try_each([partial(driver.call, "cuMemRelease", handle) for handle, _ in reversed(blocks)])


def _create_block(nbytes: int, *, ordinal: int) -> tuple[Any, int]:
    try:
        nbytes = round_up(nbytes, granularity(ordinal))
        return driver.call("cuMemCreate", nbytes, driver.allocation_prop(ordinal), 0), nbytes
    except DevIPCError as error:
        if error.status is not None and error.status.value == INVALID_VALUE:
            raise CapabilityError(
                "this device cannot create memory that is exported as a file descriptor",
                code="not_supported",
                remedy="use kind 'legacy'; on WSL and some virtual GPUs no descriptor can be had",
                status=error.status,
            ) from error
        raise


def map_side_by_side(blocks: Sequence[tuple[Any, int]], *, ordinal: int) -> Reservation:
    """Reserve exactly the blocks' size, map them one after the other, and allow access; all or nothing."""
    reservation = Reservation(sum(nbytes for _, nbytes in blocks), ordinal=ordinal)
    try:
        offset = 0
        for handle, nbytes in blocks:
            reservation.map(offset, handle, nbytes)
            offset += nbytes
        reservation.allow()
    except BaseException:
        undo(reservation.release)
        raise
    return reservation


def export_vmm(ptr: int, nbytes: int) -> ExportedExtent:
    """Export ``[ptr, ptr + nbytes)``: one descriptor for each mapping that the range touches."""
    end = ptr + nbytes
    chunks: list[Chunk] = []
    fds: list[int] = []
    try:
        reached = ptr
        for mapping in mappings_from(ptr, end=end):
            fds.append(_export_block(mapping.base))
            stop = min(end, mapping.end)
            chunks.append(Chunk(mapping.nbytes, reached - mapping.base, stop - reached, payload.pack(), has_fd=True))
            reached = stop
        if reached != end:
            raise UsageError(
                f"the range of {nbytes} bytes leaves what is mapped after {reached - ptr} bytes",
                remedy="export only memory that is mapped without holes",
            )
    except BaseException:
        close_fds(fds)
        raise
    return ExportedExtent(HandleKind.VMM_FD, tuple(chunks), tuple(fds))


def _export_block(base: int) -> int:
    """Return a descriptor for the physical memory behind ``base``; owned by the caller, closed on exec."""
    handle = driver.call("cuMemRetainAllocationHandle", base)
    try:
        fd = _export_handle(handle)
    except BaseException:
        undo(driver.call, "cuMemRelease", handle)
        raise
    try:
        driver.call("cuMemRelease", handle)
        os.set_inheritable(fd, False)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _export_handle(handle: Any) -> int:
    try:
        return int(driver.call("cuMemExportToShareableHandle", handle, driver.fd_handle_type(), 0))
    except DevIPCError as error:
        raise explain_missing_fd(error, backend="cuda") from error


def open_vmm(extents: Sequence[ExportedExtent], *, ordinal: int) -> list[OpenedExtent]:
    """Import every chunk of every extent, map all side by side, and let go of the handles; all or nothing.

    The descriptors stay the caller's: the driver is given duplicates, and has its own references once all is mapped.
    """
    chunks = [chunk for extent in extents for chunk in extent.chunks]
    for chunk in chunks:
        check_chunk(chunk, driver_nbytes=chunk.allocation_nbytes)
    blocks: list[tuple[Any, int]] = []
    own: list[Descriptor] = []
    try:
        try:
            for fd, chunk in zip((fd for extent in extents for fd in extent.fds), chunks, strict=True):
                own.append(Descriptor(fd, backend="cuda"))
                blocks.append((_import_block(own[-1].number, ordinal=ordinal), chunk.allocation_nbytes))
            reservation = _map_imported(blocks, ordinal=ordinal)
        except BaseException:
            undo(_let_go, blocks)
            raise
        _alone(reservation, blocks)
    finally:
        for descriptor in own:
            descriptor.close()
    opened, at = [], 0
    for extent in extents:
        nbytes = sum(chunk.allocation_nbytes for chunk in extent.chunks)
        ptr = reservation.base + at + extent.chunks[0].offset
        opened.append(OpenedExtent(ptr, extent.nbytes, Placed(reservation, at, nbytes)))
        at += nbytes
    return opened


def _map_imported(blocks: Sequence[tuple[Any, int]], *, ordinal: int) -> Reservation:
    try:
        return map_side_by_side(blocks, ordinal=ordinal)
    except DevIPCError as error:
        # An H200 (driver 580) answers "not supported" to a mapping larger than the block.
        if error.status is not None and error.status.value in (INVALID_VALUE, NOT_SUPPORTED):
            sizes = sorted({nbytes for _, nbytes in blocks})
            refused = BoundsError(
                f"the driver cannot map blocks of the sizes that the exporter announced: {sizes}",
                remedy="the exporter's handle is wrong or was changed on the way; export again",
                status=error.status,
            )
            for one in error.left:
                note_left(refused, one)
            raise refused from error
        raise


def _import_block(fd: int, *, ordinal: int) -> Any:
    try:
        handle = driver.call("cuMemImportFromShareableHandle", fd, driver.fd_handle_type())
    except DevIPCError as error:
        raise explain_missing_fd(error, backend="cuda") from error
    try:
        _check_imported(handle, ordinal=ordinal)
    except BaseException:
        undo(driver.call, "cuMemRelease", handle)
        raise
    return handle


def _check_imported(handle: Any, *, ordinal: int) -> None:
    status, prop = driver.attempt("cuMemGetAllocationPropertiesFromHandle", handle)
    if status == 0 and int(prop.location.type) == 1 and int(prop.location.id) != ordinal:
        raise HandleError(
            f"the memory is on device {prop.location.id} of this process, not on device {ordinal}",
            code="wrong_device",
            remedy="open the extent on the device that the exporter named",
        )
    if status not in (0, INVALID_VALUE):
        raise error_for("cuMemGetAllocationPropertiesFromHandle", status, driver.name_of(status))
