"""Handle kind ``dmabuf``: memory of ``hipMalloc`` as a dma-buf, opened as external memory.

Owns exporting, opening and closing of that kind, and where it is not offered. All functions expect the device to be
current.

Sources: ``hipMemGetHandleForAddressRange`` came with runtime 7.0; on 7.2 the allocation after an export may crash in
the layer below (ROCm/rocm-systems 8517). A dma-buf tells its size to ``lseek`` (Linux, dma-buf documentation). A mapped
buffer keeps the memory until ``hipFree``, also when the external memory is destroyed (ROCm/clr, hip_memory.cpp).
"""

from __future__ import annotations

import os
import threading
from functools import partial

from devipc.spi import (
    PAGE_NBYTES,
    AllocationInfo,
    BoundsError,
    Capability,
    CapabilityError,
    Chunk,
    Descriptor,
    DeviceLostError,
    DevIPCError,
    ExportedExtent,
    HandleKind,
    MemoryKind,
    OpenedExtent,
    ResourceExhausted,
    Verdict,
    close_fds,
    explain_missing_fd,
    note_left,
    round_up,
    try_each,
    undo,
)
from devipc_hip import driver, layouts, payload
from devipc_hip.context import Context
from devipc_hip.memory_plain import NO_CANARY, TAIL_NBYTES, allocate_plain, attach, check_opened
from devipc_hip.memory_query import Mapping, mapping_at
from devipc_hip.opening import let_go, not_let_go, open_in_time
from devipc_hip.status import INVALID_VALUE

__all__ = ["DmabufKind", "DmabufMapping", "close_dmabuf", "export_dmabuf", "open_dmabuf"]

_KNOWN_BAD = range(70_200_000, 70_300_000)
_NEEDED = ("hipMemGetHandleForAddressRange", "hipImportExternalMemory", "hipExternalMemoryGetMappedBuffer")
_REMEDY = "use kind 'legacy' or 'vmm_fd'"


class DmabufKind:
    """Whether dma-bufs can be had: not where a symbol is missing, nor on a runtime that crashes behind one.

    Elsewhere one is exported and opened in this process, once, when the kind is first asked for. May be used from any
    thread.

    Parameters
    ----------
    context : Context
        The device.
    version : int
        The runtime's version.
    """

    def __init__(self, context: Context, version: int) -> None:
        self._context = context
        self._lock = threading.Lock()
        self._proven = False
        self._refusal = _why_not(version)

    def capability(self) -> Capability:
        """Return what is known. Cheap, tries nothing."""
        if self._refusal is not None:
            return self._refusal
        claimed = driver.device_attribute("DmaBufSupported", self._context.ordinal)
        said = {None: "is not known", 0: "says no"}.get(claimed, "says yes")
        tried = "one was opened in this process" if self._proven else f"the attribute {said}; a live check decides"
        return Capability(Verdict.UNTESTED, f"attribute DmaBufSupported: {claimed}", tried)

    def demand(self) -> None:
        """Try the kind when nobody did yet; the device is current.

        Raises
        ------
        CapabilityError
            When it cannot be had here.
        ResourceExhausted
            When memory or descriptors ran out, which says nothing about the kind.
        """
        failed: DevIPCError | None = None
        with self._lock:
            if not self._proven and self._refusal is None:
                failed = self._try()
        if self._refusal is None:
            return
        refused = CapabilityError(self._refusal.reason, code="no_dmabuf", remedy=self._refusal.remedy, backend="hip")
        for one in failed.left if failed is not None else ():
            note_left(refused, one)
        raise refused from failed

    def _try(self) -> DevIPCError | None:
        """Find out, and return why not; the lock is held."""
        ptr, nbytes, canary = allocate_plain(1, self._context)
        try:
            try:
                self._open_own(ptr, nbytes, canary)
            except BaseException:
                undo(driver.call, "hipFree", ptr)
                raise
        except (ResourceExhausted, DeviceLostError):
            raise
        except DevIPCError as error:
            self._refusal = Capability.no(
                f"a dma-buf of this process's own memory cannot be used: {error.message}",
                remedy=_REMEDY,
                evidence=str(error if error.left else error.status or error.code),
            )
            return error
        self._proven = True
        let_go("hipFree", ptr)
        return None

    def _open_own(self, ptr: int, nbytes: int, canary: bytes) -> None:
        info = AllocationInfo(ptr, nbytes, MemoryKind.DEVICE, 0, (HandleKind.DMABUF,))
        extent = export_dmabuf(ptr, nbytes, info=info, canary=canary)
        try:
            mapping = open_dmabuf(extent, self._context).token
            assert isinstance(mapping, DmabufMapping)
            try:
                close_dmabuf(mapping)
            except DevIPCError as error:
                raise not_let_go(error) from error
        finally:
            close_fds(extent.fds)


def _why_not(version: int) -> Capability | None:
    missing = [name for name in _NEEDED if not driver.has(name)]
    if missing:
        return Capability.no(f"the runtime has no {', '.join(missing)}", remedy=f"update ROCm, or {_REMEDY}")
    if version in _KNOWN_BAD:
        return Capability.no(
            f"runtime {driver.version_text(version)} may crash at the allocation after a dma-buf was exported",
            remedy=f"update ROCm, or {_REMEDY}",
            evidence="ROCm/rocm-systems 8517",
        )
    return None


def export_dmabuf(ptr: int, nbytes: int, *, info: AllocationInfo, canary: bytes) -> ExportedExtent:
    """Export ``[ptr, ptr + nbytes)`` by a dma-buf of its whole allocation, which the extent owns."""
    try:
        fd = driver.export_fd(
            "hipMemGetHandleForAddressRange", info.base, _whole(info.nbytes, canary), after=(driver.DMABUF, 0)
        )
    except DevIPCError as error:
        raise explain_missing_fd(error, backend="hip") from error
    chunk = Chunk(info.nbytes, ptr - info.base, nbytes, payload.pack(canary), has_fd=True)
    return ExportedExtent(HandleKind.DMABUF, (chunk,), (fd,))


def _whole(nbytes: int, canary: bytes) -> int:
    return round_up(nbytes, PAGE_NBYTES) + (0 if canary == NO_CANARY else TAIL_NBYTES)


class DmabufMapping:
    """An opened dma-buf: the runtime's external memory, and where it lies."""

    __slots__ = ("memory", "ptr")

    def __init__(self, memory: int, ptr: int) -> None:
        self.memory = memory
        self.ptr = ptr


def open_dmabuf(extent: ExportedExtent, context: Context) -> OpenedExtent:
    """Map a checked extent, within a deadline, and compare it with what was announced; the descriptor is borrowed."""
    (chunk,) = extent.chunks
    canary = payload.unpack(chunk)
    whole = _whole(chunk.allocation_nbytes, canary)
    _check_fd(extent.fds[0], whole)
    mapping = attach(lambda: _open_once(extent.fds[0], chunk, canary, whole, context))
    return OpenedExtent(mapping.ptr + chunk.offset, chunk.nbytes, mapping)


def _check_fd(fd: int, nbytes: int) -> None:
    """Refuse a descriptor that says that it is smaller than announced; one that does not tell passes."""
    try:
        size = os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        return
    if size < nbytes:
        raise BoundsError(
            f"the descriptor has {size} bytes, the exporter announced {nbytes}",
            remedy="the exporter's handle is wrong or was changed on the way; export again",
        )


def _open_once(fd: int, chunk: Chunk, canary: bytes, whole: int, context: Context) -> DmabufMapping:
    own = Descriptor(fd, backend="hip")
    try:
        memory = open_in_time(
            context,
            lambda: int(driver.call("hipImportExternalMemory", layouts.external_fd(own.number, whole))),
            lambda opened: driver.call("hipDestroyExternalMemory", opened),
            "hipImportExternalMemory",
        )
    except DevIPCError as failed:
        error = explain_missing_fd(failed, backend="hip")  # before one is given back
        own.close(after=failed)
        if error is failed and error.status is not None and error.status.value == INVALID_VALUE:
            raise BoundsError(
                f"the runtime cannot map {whole} bytes of the descriptor",
                remedy="the exporter's handle is wrong or was changed on the way; export again",
                status=error.status,
            ) from error
        raise error from failed
    try:
        mapping = _map(memory, whole)
    finally:
        own.close()
    try:
        check_opened(mapping.ptr, chunk, canary, _opened(mapping.ptr, chunk, canary, whole), context)
    except BaseException:
        undo(close_dmabuf, mapping)
        raise
    return mapping


def _map(memory: int, whole: int) -> DmabufMapping:
    try:
        ptr = driver.call("hipExternalMemoryGetMappedBuffer", memory, layouts.external_part(whole))
    except BaseException:
        undo(driver.call, "hipDestroyExternalMemory", memory)
        raise
    return DmabufMapping(memory, int(ptr))


def _opened(ptr: int, chunk: Chunk, canary: bytes, whole: int) -> Mapping:
    """Return what the runtime says about a mapping; without an answer it is what was asked for.

    It has the size of such a mapping, and base 0 (ROCm/clr: hipMemGetAddressRange takes a pointer that only memory of
    its own has).
    """
    if canary == NO_CANARY:  # rounded up to pages, so that its end is not the allocation's
        return Mapping(ptr, chunk.allocation_nbytes)
    return mapping_at(ptr) or Mapping(ptr, whole)


def close_dmabuf(mapping: DmabufMapping) -> None:
    """Unmap; blocks for all work of the device."""
    try_each(
        [
            partial(driver.call, "hipFree", mapping.ptr),
            partial(driver.call, "hipDestroyExternalMemory", mapping.memory),
        ]
    )
