"""What several tests do: host memory to copy through, patterns, and reading device memory back.

Knows the contracts of devipc only, so that it serves the simulated driver and a real one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from devipc.spi import ExportedExtent, HostRegistration

STAGING_NBYTES = 2**20


class Staging:
    """A registered host buffer and a stream: blocking reads and writes of device memory."""

    def __init__(self, device: Any, nbytes: int = STAGING_NBYTES) -> None:
        self.transfer = device.transfer
        self.memory = mmap.mmap(-1, nbytes)
        self.view = memoryview(self.memory)
        self._pin = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(self._pin)
        self.registration: HostRegistration = self.transfer.register_host(self.address, nbytes)
        self.device_ptr = self.registration.device_ptr
        self.stream: Any = self.transfer.create_stream()

    def write(self, ptr: int, data: bytes) -> None:
        """Put ``data`` at a device address, and wait."""
        self.view[: len(data)] = data
        self.transfer.copy(self.stream, ptr, self.device_ptr, len(data))
        self.transfer.synchronize_stream(self.stream)

    def read(self, ptr: int, nbytes: int) -> bytes:
        """Return bytes of device memory, after all work of the stream."""
        self.transfer.copy(self.stream, self.device_ptr, ptr, nbytes)
        self.transfer.synchronize_stream(self.stream)
        return bytes(self.view[:nbytes])

    def close(self) -> None:
        self.transfer.destroy_stream(self.stream)
        self.transfer.unregister_host(self.registration)
        self.view.release()
        del self._pin
        self.memory.close()


@contextmanager
def staging(device: Any, nbytes: int = STAGING_NBYTES) -> Iterator[Staging]:
    """Give a :class:`Staging` and take it back."""
    made = Staging(device, nbytes)
    try:
        yield made
    finally:
        made.close()


def pattern(seed: int, nbytes: int) -> bytes:
    """Return bytes that differ at every place and for every seed."""
    block = bytes((seed * 37 + i * 11 + (i >> 8) * 7) % 251 for i in range(min(nbytes, 4096)))
    return (block * (nbytes // len(block) + 1))[:nbytes]


def changed(extent: ExportedExtent, **changes: Any) -> ExportedExtent:
    """Return the extent with changed fields of its first chunk."""
    return replace(extent, chunks=(replace(extent.chunks[0], **changes), *extent.chunks[1:]))


@contextmanager
def few_descriptors(left: int) -> Iterator[None]:
    """Let this process have no more than ``left`` descriptors to open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    taken: list[int] = []
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(left):
            os.close(taken.pop())
        yield
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
