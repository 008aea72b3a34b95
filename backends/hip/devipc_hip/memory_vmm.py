"""Handle kind ``vmm_fd``: physical memory mapped into reserved addresses, exported as file descriptors.

Owns allocating, exporting, mapping and unmapping of that kind, for one block or for a grown range of many. All
functions expect the device to be current. Every step undoes the earlier ones when it fails.

Sources: the offset of ``hipMemMap`` must be 0; properties of an imported handle say size 0 and device 0
(ROCm/rocm-systems 11606), so they are not asked; a full descriptor table is reported as out of memory (10604); before
August 2025 ``hipMemImportFromShareableHandle`` took the address of the descriptor and follows it whatever it is, later
runtimes take its value (ROCm/clr 759, 1564).
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from functools import partial

from devipc.spi import (
    BoundsError,
    Capability,
    CapabilityError,
    Chunk,
    Descriptor,
    DeviceLostError,
    DevIPCError,
    ExportedExtent,
    HandleKind,
    OpenedExtent,
    ResourceExhausted,
    UsageError,
    Verdict,
    check_chunk,
    close_fds,
    explain_missing_fd,
    note_left,
    round_up,
    try_each,
    undo,
)
from devipc_hip import driver, layouts, payload
from devipc_hip.context import Context
from devipc_hip.memory_query import Mapping, mappings_from
from devipc_hip.opening import let_go, not_let_go, open_in_time
from devipc_hip.retaining import give_back, retain
from devipc_hip.status import INVALID_VALUE, NOT_SUPPORTED

__all__ = ["Reservation", "VmmImports", "allocate_vmm", "export_vmm"]

_GRANULARITY_MINIMUM = ("hipMemAllocationGranularity_flags", 0)
_NO_DESCRIPTOR_ABOVE = 2**20


class Reservation:
    """Reserved device addresses, and what is mapped into them.

    Parameters
    ----------
    nbytes : int
        Size, exactly what will be mapped; a multiple of the granularity.
    ordinal : int
        The device that gets access.
    """

    def __init__(self, nbytes: int, *, ordinal: int) -> None:
        self.nbytes = nbytes
        self.base = int(driver.call("hipMemAddressReserve", nbytes, 0, 0, 0))
        self._ordinal = ordinal
        self._mapped: list[Mapping] = []
        self._stuck = False

    def map(self, offset: int, handle: int, nbytes: int) -> None:
        """Map physical memory at ``offset``; it is reachable after :meth:`allow`."""
        driver.call("hipMemMap", self.base + offset, nbytes, 0, handle, 0)
        self._mapped.append(Mapping(self.base + offset, nbytes))

    def allow(self) -> None:
        """Let the device read and write all that is mapped."""
        driver.call("hipMemSetAccess", self.base, self.nbytes, layouts.access_desc(self._ordinal), 1)

    def release(self) -> None:
        """Unmap in reverse order and give the addresses back; every step is tried, the first failure is raised.

        What the runtime does not unmap keeps the addresses, so that nothing else is ever mapped there.
        """
        mapped, self._mapped = self._mapped, []
        try_each([*(partial(self._unmap, mapping) for mapping in reversed(mapped)), self._free_addresses])

    def _unmap(self, mapping: Mapping) -> None:
        try:
            driver.call("hipMemUnmap", mapping.base, mapping.nbytes)
        except BaseException:
            self._stuck = True
            raise

    def _free_addresses(self) -> None:
        if self._stuck or not self.base:
            return
        base, self.base = self.base, 0
        driver.call("hipMemAddressFree", base, self.nbytes)


def _granularity(ordinal: int) -> int:
    """Return the block size in which the device's memory is created and mapped."""
    return int(driver.call("hipMemGetAllocationGranularity", layouts.allocation_prop(ordinal), _GRANULARITY_MINIMUM))


def allocate_vmm(sizes: Sequence[int], *, ordinal: int) -> Reservation:
    """Create exportable blocks of at least these sizes, map them side by side and allow access; all or nothing."""
    blocks: list[tuple[int, int]] = []
    try:
        for nbytes in sizes:
            blocks.append(_create_block(nbytes, ordinal=ordinal))
        reservation = _map_side_by_side(blocks, ordinal=ordinal)
    except BaseException:
        undo(_let_go, blocks)
        raise
    return _alone(reservation, blocks)


def _alone(reservation: Reservation, blocks: Sequence[tuple[int, int]]) -> Reservation:
    """Let go of the handles of what was mapped: the mapping keeps the memory, unmapping frees it; all or nothing."""
    try:
        _let_go(blocks)
    except DevIPCError as error:
        undo(reservation.release)
        raise not_let_go(error) from error
    except BaseException:
        undo(reservation.release)
        raise
    return reservation


def _let_go(blocks: Sequence[tuple[int, int]]) -> None:
    try_each([partial(driver.call, "hipMemRelease", handle) for handle, _ in reversed(blocks)])


def _create_block(nbytes: int, *, ordinal: int) -> tuple[int, int]:
    try:
        nbytes = round_up(nbytes, _granularity(ordinal))
        return int(driver.call("hipMemCreate", nbytes, layouts.allocation_prop(ordinal), 0)), nbytes
    except DevIPCError as error:
        if error.status is not None and error.status.value == INVALID_VALUE:
            raise CapabilityError(
                "this device cannot create memory that is exported as a file descriptor",
                code="not_supported",
                remedy="use kind 'legacy'",
                status=error.status,
            ) from error
        raise explain_missing_fd(error, backend="hip") from error


def _map_side_by_side(blocks: Sequence[tuple[int, int]], *, ordinal: int) -> Reservation:
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
            fds.append(_export_mapped(mapping.base))
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


def _export_mapped(base: int) -> int:
    """Return a descriptor for the physical memory behind ``base``; owned by the caller, closed on exec."""
    handle = retain(base)
    try:
        fd = _export_handle(handle)
    except BaseException:
        undo(give_back, handle)
        raise
    try:
        give_back(handle)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _export_handle(handle: int) -> int:
    try:
        return driver.export_fd("hipMemExportToShareableHandle", handle, after=(driver.FD, 0))
    except DevIPCError as error:
        raise explain_missing_fd(error, backend="hip") from error


class VmmImports:
    """Descriptors of peers as mapped memory, and how this runtime takes a descriptor.

    Parameters
    ----------
    context : Context
        The device.
    version : int
        The runtime's version, for words: builds between two releases differ, so that the runtime itself is tried.
    """

    def __init__(self, context: Context, version: int) -> None:
        self._context = context
        self._version = driver.version_text(version)
        self._lock = threading.Lock()
        self._by_address: bool | None = None

    def capability(self) -> Capability:
        """Return what is known about the kind here. Cheap, tries nothing."""
        claimed = driver.device_attribute("VirtualMemoryManagementSupported", self._context.ordinal)
        taken = {None: "not tried yet", True: "by address", False: "by value"}[self._by_address]
        said = {None: "is not known", 0: "says no"}.get(claimed, "says yes")
        return Capability(
            Verdict.UNTESTED,
            f"attribute VirtualMemoryManagementSupported: {claimed}; runtime {self._version}, descriptors: {taken}",
            f"the attribute {said}; a live check decides",
        )

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        """Import every chunk, map all side by side, and let go of the handles; all or nothing.

        The descriptors stay the caller's: the runtime has its own references once everything is mapped.
        """
        for chunk in extent.chunks:
            check_chunk(chunk, driver_nbytes=chunk.allocation_nbytes)
        blocks: list[tuple[int, int]] = []
        own: list[Descriptor] = []
        try:
            try:
                for fd, chunk in zip(extent.fds, extent.chunks, strict=True):
                    _check_size(fd, chunk.allocation_nbytes)
                    own.append(Descriptor(fd, backend="hip"))
                    blocks.append((self._import(own[-1]), chunk.allocation_nbytes))
                reservation = _map_imported(blocks, ordinal=self._context.ordinal)
            except BaseException:
                undo(_let_go, blocks)
                raise
            _alone(reservation, blocks)
        finally:
            for descriptor in own:
                descriptor.close()
        return OpenedExtent(reservation.base + extent.chunks[0].offset, extent.nbytes, reservation)

    def _import(self, own: Descriptor) -> int:
        by_address = self._is_by_address()
        try:
            return self._import_in_time(own, by_address=by_address)
        except DevIPCError as failed:
            error = explain_missing_fd(failed, backend="hip")  # before one is given back
            own.close(after=failed)
            raise error from failed

    def _import_in_time(self, own: Descriptor, *, by_address: bool) -> int:
        return open_in_time(
            self._context,
            lambda: _import_handle(own.number, by_address=by_address),
            lambda opened: driver.call("hipMemRelease", opened),
            "hipMemImportFromShareableHandle",
        )

    def _is_by_address(self) -> bool:
        """Find out how a descriptor is passed, with one of our own; the address first, which the other kind refuses."""
        with self._lock:
            if self._by_address is None:
                handle, _ = _create_block(1, ordinal=self._context.ordinal)
                try:
                    fd = _export_handle(handle)
                    try:
                        self._by_address = self._takes_address(Descriptor(fd, backend="hip"))
                    finally:
                        os.close(fd)
                except BaseException:
                    undo(driver.call, "hipMemRelease", handle)
                    raise
                let_go("hipMemRelease", handle)
            return self._by_address

    def _takes_address(self, own: Descriptor) -> bool:
        """Try it. What ran out, or was lost, says nothing, and a number where an address is taken ends the process."""
        try:
            handle = self._import_in_time(own, by_address=True)
        except DevIPCError as failed:
            error = explain_missing_fd(failed, backend="hip")
            own.close(after=failed)
            if error.code == "driver_blocked" or isinstance(error, ResourceExhausted | DeviceLostError):
                raise error from failed
            return False
        try:
            let_go("hipMemRelease", handle)
        finally:
            own.close()
        return True


def _map_imported(blocks: Sequence[tuple[int, int]], *, ordinal: int) -> Reservation:
    try:
        return _map_side_by_side(blocks, ordinal=ordinal)
    except DevIPCError as error:
        if error.status is not None and error.status.value in (INVALID_VALUE, NOT_SUPPORTED):
            sizes = sorted({nbytes for _, nbytes in blocks})
            refused = BoundsError(
                f"the runtime cannot map blocks of the sizes that the exporter announced: {sizes}",
                remedy="the exporter's handle is wrong or was changed on the way; export again",
                status=error.status,
            )
            for one in error.left:
                note_left(refused, one)
            raise refused from error
        raise explain_missing_fd(error, backend="hip") from error


def _import_handle(fd: int, *, by_address: bool) -> int:
    if not by_address:
        return int(driver.call("hipMemImportFromShareableHandle", fd, driver.FD))
    return int(driver.call("hipMemImportFromShareableHandle", _place(fd), driver.FD))


def _place(fd: int) -> ctypes.Array[ctypes.c_int]:
    """Return where ``fd`` is. Where a value is expected the address is cut to 32 bits: that must be no descriptor."""
    place = (ctypes.c_int * 1)(fd)
    if ctypes.addressof(place) % 2**32 < _NO_DESCRIPTOR_ABOVE:
        ends = ctypes.create_string_buffer(_NO_DESCRIPTOR_ABOVE + ctypes.sizeof(place))
        low = ctypes.addressof(ends) % 2**32 < _NO_DESCRIPTOR_ABOVE
        place = (ctypes.c_int * 1).from_buffer(ends, _NO_DESCRIPTOR_ABOVE if low else 0)
        place[0] = fd
    return place


def _check_size(fd: int, nbytes: int) -> None:
    """Refuse a descriptor that says that it is smaller than announced; not all tell."""
    try:
        size = os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        return
    if 0 < size < nbytes:
        raise BoundsError(
            f"the descriptor has {size} bytes, the exporter announced {nbytes}",
            remedy="the exporter's handle is wrong or was changed on the way; export again",
        )
