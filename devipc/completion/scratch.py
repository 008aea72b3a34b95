"""A little device memory, through which a stream carries bytes from host memory to host memory.

Owns the detour and its reason: a copy between two places of host memory may block the caller until the stream gets
there (see :meth:`devipc.interfaces.transfer.DeviceTransfer.copy`). Knows no fence.
"""

from __future__ import annotations

from devipc.absence import need_memory, need_transfer
from devipc.completion.half import give_back
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import Stream

__all__ = ["Scratch"]


class Scratch:
    """Device memory for copies of one stream.

    Raises
    ------
    CapabilityError
        When the device has no memory interface.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._transfer = need_transfer(device)
        self._memory = need_memory(device)
        self._allocation = self._memory.allocate(nbytes)
        self.ptr = self._allocation.ptr

    def carry(self, stream: Stream, dst: int, src: int, nbytes: int) -> None:
        """Enqueue two copies that bring ``nbytes`` of registered host memory from ``src`` to ``dst``."""
        self._transfer.copy(stream, self.ptr, src, nbytes)
        self._transfer.copy(stream, dst, self.ptr, nbytes)

    def close(self) -> None:
        """Free the memory; the copies are over."""
        give_back(self._memory.free, self._allocation)
