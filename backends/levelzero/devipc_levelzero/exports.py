"""Handles that this process gave away: one get of the driver for each export, matched by one put.

Owns the count of gets for each allocation and the duplicates of the driver's descriptors. Knows no importer.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from devipc.spi import (
    AllocationInfo,
    CapabilityError,
    Chunk,
    ClosedError,
    ExportedExtent,
    HandleKind,
    explain_missing_fd,
    undo,
)
from devipc_levelzero import driver
from devipc_levelzero.abi import HANDLE_NBYTES, IpcHandle
from devipc_levelzero.context import Context
from devipc_levelzero.handles import duplicate, number_in, to_handle
from devipc_levelzero.status import UNSUPPORTED_FEATURE, error_for

__all__ = ["PAYLOAD_NBYTES", "VERSION", "Exports"]

VERSION = 1
"""First byte of every payload."""
PAYLOAD_NBYTES = 1 + 1 + 16 + 8 + HANDLE_NBYTES
"""Version, type of the memory, identity of the allocation, number of the export, the driver's handle."""

_NUMBER = slice(18, 26)


@dataclass(slots=True)
class _Got:
    base: int
    number: int
    raw: bytes


class Exports:
    """Exports of one device in this process.

    Parameters
    ----------
    context : Context
        Whose memory they are of.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._process = os.urandom(8)
        self._lock = threading.Lock()
        self._got: dict[bytes, _Got] = {}  # by number of the export
        self._numbers = itertools.count(1)

    def export(self, ptr: int, nbytes: int, *, info: AllocationInfo, memory_type: int) -> ExportedExtent:
        """Get a handle of the allocation that ``info`` describes, for a part of it."""
        raw = self._get(info.base)
        try:
            fd = self._descriptor(raw)
        except BaseException:
            undo(self._put, raw)
            raise
        number = next(self._numbers).to_bytes(8, "little")
        with self._lock:
            self._got[number] = _Got(info.base, info.allocation_id, raw)
        identity = self._process + info.allocation_id.to_bytes(8, "little")
        payload = bytes((VERSION, memory_type)) + identity + number + raw
        chunk = Chunk(info.nbytes, ptr - info.base, nbytes, payload, has_fd=True)
        return ExportedExtent(HandleKind.OPAQUE, (chunk,), (fd,))

    def _get(self, base: int) -> bytes:
        """Return the driver's handle: by the newer call where loader and driver have it."""
        context, handle = self._context, IpcHandle()
        status = UNSUPPORTED_FEATURE
        if driver.has("zeMemGetIpcHandleWithProperties"):
            status = driver.attempt("zeMemGetIpcHandleWithProperties", context.handle, base, None, ctypes.byref(handle))
        if status == UNSUPPORTED_FEATURE:
            status = driver.attempt("zeMemGetIpcHandle", context.handle, base, ctypes.byref(handle))
        if status:
            raise explain_missing_fd(error_for("zeMemGetIpcHandle", status, device=context.uuid), backend="levelzero")
        raw = bytes(handle)
        if not any(raw):
            driver.quietly(self._put, raw)
            raise CapabilityError(
                "the driver gave an empty handle and called it a success",
                code="empty_handle",
                remedy="update the GPU driver; one without a kernel driver behind it was seen to do this",
                backend="levelzero",
                device=context.uuid,
            )
        return raw

    def _descriptor(self, raw: bytes) -> int:
        """Return a descriptor of our own: asked for where that is possible, else by the number in the handle."""
        number = ctypes.c_uint64(number_in(raw))
        driver.question(
            "zeMemGetFileDescriptorFromIpcHandleExp", self._context.handle, to_handle(raw), ctypes.byref(number)
        )
        return duplicate(number.value)

    def put(self, extent: ExportedExtent, *, still_there: Callable[[int, int], bool]) -> None:
        """Match the get of ``extent``, unless the memory was freed, which did that already."""
        with self._lock:
            got = self._got.pop(extent.chunks[0].payload[_NUMBER], None)
        try:
            if got is not None and still_there(got.base, got.number):
                self._put(got.raw)
        except ClosedError:  # the device was closed, and everything of it with it
            pass

    def put_all(self, base: int) -> None:
        """Match all gets of one allocation, before it is freed; its extents keep their descriptors."""
        with self._lock:
            found = [number for number, got in self._got.items() if got.base == base]
            gone = [self._got.pop(number) for number in found]
        for got in gone:
            driver.quietly(self._put, got.raw)  # freeing does what is missing

    def _put(self, raw: bytes) -> None:
        """Put a handle back; where loader or driver lack the call, freeing the memory does it."""
        if not driver.has("zeMemPutIpcHandle"):
            return
        status = driver.attempt("zeMemPutIpcHandle", self._context.handle, to_handle(raw))
        if status not in (0, UNSUPPORTED_FEATURE):
            raise error_for("zeMemPutIpcHandle", status, device=self._context.uuid)
