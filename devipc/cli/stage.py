"""A piece of pinned host memory beside a device, to look at shared pages on any backend."""

from __future__ import annotations

import os
from types import TracebackType

from devipc.errors import CapabilityError
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
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        if device.transfer is None:
            raise CapabilityError("this device offers no copies", remedy="use a backend with a transfer interface")
        self.transfer: DeviceTransfer = device.transfer
        size = round_up(nbytes, PAGE_NBYTES)
        fd = create_memfd("devipc-stage", size)
        try:
            self._map = SharedMap(fd, size)
        finally:
            os.close(fd)
        self.view = self._map.view
        self._registration = self.transfer.register_host(self._map.address, size)
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
