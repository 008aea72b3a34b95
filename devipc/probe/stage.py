"""Pinned host memory beside a device, to look at its memory and to fill it on any backend.

Owns the registration, its stream and their end. It knows no other process.
"""

from __future__ import annotations

import os
from types import TracebackType

from devipc.absence import need_transfer
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import DeviceTransfer
from devipc.memfd import PAGE_NBYTES, SharedMap, create_memfd, round_up

__all__ = ["Stage"]


class Stage:
    """Registered host memory with one stream of its own.

    Parameters
    ----------
    device : Device
        Needs a transfer interface.
    nbytes : int
        Size; rounded up to whole pages.
    fd : int, optional
        A sealed memory file of at least that size to use, so that another process can share it; it stays the caller's.

    Raises
    ------
    CapabilityError, ResourceExhausted
        When the device has no transfer interface, or does not let host memory be registered.
    """

    def __init__(self, device: Device, nbytes: int, *, fd: int | None = None) -> None:
        self.transfer: DeviceTransfer = need_transfer(device)
        size = round_up(nbytes, PAGE_NBYTES)
        own = create_memfd("devipc-stage", size) if fd is None else os.dup(fd)
        try:
            self._map = SharedMap(own, size)
        finally:
            os.close(own)
        self.view = self._map.view
        try:
            self._registration = self.transfer.register_host(self._map.address, size)
        except BaseException:
            self._map.close()
            raise
        self.ptr = self._registration.device_ptr
        self.stream = self.transfer.create_stream()

    def load(self, ptr: int, nbytes: int, *, at: int = 0) -> None:
        """Enqueue a copy from device memory to the stage."""
        self.transfer.copy(self.stream, self.ptr + at, ptr, nbytes)

    def store(self, ptr: int, nbytes: int, *, at: int = 0) -> None:
        """Enqueue a copy from the stage to device memory."""
        self.transfer.copy(self.stream, ptr, self.ptr + at, nbytes)

    def synchronize(self) -> None:
        """Block until everything enqueued is done."""
        self.transfer.synchronize_stream(self.stream)

    def get(self, ptr: int, nbytes: int) -> bytes:
        """Return ``nbytes`` of device memory, in pieces of the stage's size. Blocks until they are here."""
        pieces = []
        for at in range(0, nbytes, len(self.view)):
            size = min(nbytes - at, len(self.view))
            self.load(ptr + at, size)
            self.synchronize()
            pieces.append(bytes(self.view[:size]))
        return b"".join(pieces)

    def put(self, ptr: int, content: bytes) -> None:
        """Bring ``content`` to device memory, in pieces of the stage's size. Blocks until it is there."""
        for at in range(0, len(content), len(self.view)):
            piece = content[at : at + len(self.view)]
            self.view[: len(piece)] = piece
            self.store(ptr + at, len(piece))
            self.synchronize()

    def close(self) -> None:
        """Give stream, registration and memory back."""
        self.transfer.destroy_stream(self.stream)
        self.transfer.unregister_host(self._registration)
        self.view = memoryview(b"")
        self._map.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
