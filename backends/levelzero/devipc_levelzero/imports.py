"""Mappings made from handles of other processes.

Owns opening, checking and closing them, and the rule that one allocation is opened once: drivers were seen to leak a
descriptor with each open (compute-runtime issue 974). Calls about one allocation come one after the other; those about
others are not held up by an open that hangs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from devipc.spi import (
    DevIPCError,
    ExportedExtent,
    HandleError,
    HandleKind,
    OpenedExtent,
    PayloadShape,
    Turns,
    check_chunk,
    check_payloads,
    explain_missing_fd,
    undo,
)
from devipc_levelzero.abi import MemoryProperties, make
from devipc_levelzero.context import Context
from devipc_levelzero.exports import PAYLOAD_NBYTES, VERSION
from devipc_levelzero.handles import check_place, patched

__all__ = ["Imports"]

_SHAPES = {HandleKind.OPAQUE: PayloadShape(PAYLOAD_NBYTES, has_fd=True)}
_TYPES = {1: "host", 2: "device"}


@dataclass(slots=True, eq=False)
class _Mapped:
    identity: bytes
    ptr: int
    users: int = 0


class Imports:
    """Opened memory of one device in this process.

    Parameters
    ----------
    context : Context
        In which it is mapped.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._turns = Turns()
        self._mapped: dict[bytes, _Mapped] = {}

    @staticmethod
    def check(extent: ExportedExtent) -> None:
        """Check shape, size, version and type of a received extent; see :func:`devipc.spi.check_payloads`."""
        check_payloads(extent, _SHAPES, version=VERSION, package="devipc-levelzero", backend="levelzero")
        if extent.chunks[0].payload[1] not in _TYPES:
            raise HandleError(
                f"memory of type {extent.chunks[0].payload[1]}",
                code="malformed",
                remedy="both sides must run one version of devipc-levelzero",
                backend="levelzero",
            )

    def open(self, extent: ExportedExtent) -> OpenedExtent:
        """Map a checked extent and compare it with what this driver says of it."""
        (chunk,) = extent.chunks
        memory_type, identity, raw = chunk.payload[1], chunk.payload[2:18], chunk.payload[26:]
        with self._turns.of(identity):
            mapped = self._mapped.get(identity)
            if mapped is None:
                mapped = self._mapped[identity] = _Mapped(identity, self._open(raw, extent.fds[0]))
            mapped.users += 1
            try:
                check_chunk(chunk, driver_nbytes=self._reach(mapped.ptr, memory_type))
            except BaseException:
                undo(self._drop, mapped)
                raise
        return OpenedExtent(mapped.ptr + chunk.offset, chunk.nbytes, mapped)

    def _open(self, raw: bytes, fd: int) -> int:
        context, out = self._context, ctypes.c_void_p()
        check_place(raw, fd)
        with patched(raw, fd) as handle:
            try:
                context.call("zeMemOpenIpcHandle", context.handle, context.device, handle, 0, ctypes.byref(out))
            except DevIPCError as error:  # here, before the descriptor of the handle is given back
                raise explain_missing_fd(error, backend="levelzero") from error
        return int(out.value or 0)

    def _reach(self, ptr: int, memory_type: int) -> int:
        """Return how many bytes of the driver's allocation follow ``ptr``, after a look at what it is."""
        context, found = self._context, make(MemoryProperties)
        context.call("zeMemGetAllocProperties", context.handle, ptr, ctypes.byref(found), None)
        if found.type != memory_type:
            raise HandleError(
                f"a handle of {_TYPES[memory_type]} memory opened {_TYPES.get(found.type, 'other')} memory",
                code="wrong_memory",
                remedy="export again; the descriptor does not belong to the handle",
                backend="levelzero",
            )
        base, nbytes = ctypes.c_uint64(0), ctypes.c_size_t(0)
        context.call("zeMemGetAddressRange", context.handle, ptr, ctypes.byref(base), ctypes.byref(nbytes))
        return int(base.value + nbytes.value - ptr)

    def close(self, token: _Mapped) -> None:
        """Unmap when the last user of the allocation closes it."""
        with self._turns.of(token.identity):
            self._drop(token)

    def _drop(self, token: _Mapped) -> None:
        token.users -= 1
        if not token.users:
            del self._mapped[token.identity]
            self._context.call("zeMemCloseIpcHandle", self._context.handle, token.ptr)
