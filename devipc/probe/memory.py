"""Memory checks: what one process shares is what the other sees, both ways, and nothing else changes.

Owns both sides of the check of one handle kind. It knows no fence: every copy is waited for.
"""

from __future__ import annotations

import os

from devipc import absence
from devipc.errors import CapabilityError, ResourceExhausted
from devipc.interfaces.backend import Device
from devipc.interfaces.memory import DeviceMemoryIPC
from devipc.probe.partner import CheckFailed, NotTried, Partner
from devipc.probe.stage import Stage
from devipc.spi import close_fds
from devipc.types import HandleKind, OpenedExtent
from devipc.wire import MemoryHandle, Reader, decode_memory_handle, encode_memory_handle

__all__ = ["OpenedMemory", "check_memory", "need_memory", "need_stage"]

_ASKED_NBYTES = 256 * 1024
_STAGE_NBYTES = 128 * 1024
"""Little, so that sharing can be looked at where little may be pinned."""
_MAX_NBYTES = 4 << 20
"""Largest part of an allocation that is looked at, when the backend rounds up by that much."""
_OFFSET = 4096 + 64
_NBYTES = 64 * 1024 + 192
"""Neither begins nor ends on a page."""


def need_stage(device: Device, nbytes: int, *, fd: int | None = None) -> Stage:
    """Return a stage, or say that nothing can be looked at.

    Raises
    ------
    NotTried
        When the device has no copies, or registers no host memory.
    """
    try:
        return Stage(device, nbytes, fd=fd)
    except (CapabilityError, ResourceExhausted) as error:
        reason = f"content cannot be compared without registered host memory: {error.message}"
        raise NotTried(reason, remedy=error.remedy) from error


def need_memory(device: Device) -> DeviceMemoryIPC:
    """Return the device's memory interface, or say that nothing can be tried, and why."""
    try:
        return absence.need_memory(device)
    except CapabilityError as error:
        raise NotTried(error.message, remedy=error.remedy) from error


def check_memory(device: Device, partner: Partner, backend: str, kind: HandleKind) -> str:
    """Share a part of an allocation with the importer, compare all of it, and return what was seen.

    Raises
    ------
    CheckFailed
        For the first byte that is not what it must be.
    DevIPCError, NotTried
        As the backend answers; what was made is left to the end of this process.
    """
    memory = need_memory(device)
    stage = need_stage(device, _STAGE_NBYTES)
    allocation = memory.allocate(_ASKED_NBYTES, kind=kind, zero=True)
    nbytes = min(allocation.nbytes, _MAX_NBYTES)
    own = _Own(stage, allocation.ptr, nbytes)
    own.expect(bytes(nbytes), "memory that was asked for zeroed holds old bytes")
    content = own.fill()
    extent = memory.export(allocation.ptr + _OFFSET, _NBYTES, kind=kind)
    handle = MemoryHandle(backend, device.info.uuid, os.urandom(16), 1, os.urandom(16), extent)
    partner.ask("memory.open", encode_memory_handle(handle), fds=extent.fds)

    _expect_seen(partner, content, "the importer sees other bytes than were shared")
    own.expect(content, "the exporter's own data changed when the memory was opened")
    content = own.fill()
    _expect_seen(partner, content, "the importer does not see what the exporter wrote later")
    back = os.urandom(_NBYTES)
    partner.ask("memory.write", back)
    content = content[:_OFFSET] + back + content[_OFFSET + _NBYTES :]
    own.expect(content, "the exporter does not see what the importer wrote, and nothing but that")
    partner.ask("memory.close")
    own.expect(content, "the exporter's own data changed when the importer closed")

    memory.release(extent)
    close_fds(extent.fds)
    memory.free(allocation)
    stage.close()
    return (
        f"{_NBYTES} random bytes at offset {_OFFSET} compared both ways, a later write seen,"
        f" the other {nbytes - _NBYTES} bytes and the exporter's data unchanged"
    )


def _expect_seen(partner: Partner, content: bytes, reason: str) -> None:
    _compare(partner.ask("memory.read")["data"], content[_OFFSET : _OFFSET + _NBYTES], reason)


def _compare(seen: bytes, expected: bytes, reason: str) -> None:
    if seen != expected:
        wrong = [at for at, (one, other) in enumerate(zip(seen, expected, strict=True)) if one != other]
        raise CheckFailed(
            reason,
            evidence=f"{len(wrong)} of {len(expected)} bytes differ, the first at {wrong[0]}",
            remedy="do not use this handle kind here; report it with `devipc env` and the driver's version",
        )


class _Own:
    """The exporter's view of its own allocation."""

    def __init__(self, stage: Stage, ptr: int, nbytes: int) -> None:
        self._stage, self._ptr, self._nbytes = stage, ptr, nbytes

    def fill(self) -> bytes:
        """Fill it with random bytes and return them."""
        content = os.urandom(self._nbytes)
        self._stage.put(self._ptr, content)
        return content

    def expect(self, content: bytes, reason: str) -> None:
        _compare(self._stage.get(self._ptr, self._nbytes), content, reason)


class OpenedMemory:
    """The importer's side: one extent of the exporter, mapped here."""

    def __init__(self, device: Device, body: bytes, fds: list[int]) -> None:
        self._memory = need_memory(device)
        self._stage = need_stage(device, _STAGE_NBYTES)
        self._opened: OpenedExtent = self._memory.open(decode_memory_handle(Reader(body), fds).extent)

    def read(self) -> bytes:
        """Return what is there now."""
        return self._stage.get(self._opened.ptr, self._opened.nbytes)

    def write(self, content: bytes) -> None:
        """Replace it."""
        self._stage.put(self._opened.ptr, content)

    def close(self) -> None:
        """Unmap."""
        self._memory.close(self._opened)
        self._stage.close()
