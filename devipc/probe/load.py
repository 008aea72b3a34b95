"""Work that keeps a stream busy, so that what comes behind it can be seen not to be there yet.

Owns the copies and how many of them are tried. It knows no check.
"""

from __future__ import annotations

from collections.abc import Iterator

from devipc.completion.scratch import Scratch
from devipc.errors import CapabilityError, ResourceExhausted
from devipc.interfaces.backend import Device
from devipc.interfaces.transfer import Stream
from devipc.probe.partner import NotTried
from devipc.probe.stage import Stage

__all__ = ["Load", "loads"]

_NBYTES = 2 << 20
_FIRST, _LARGEST = 8, 512


def loads() -> Iterator[int]:
    """Yield ever larger numbers of copies, for a check that ends when it saw its work run."""
    copies = _FIRST
    while copies <= _LARGEST:
        yield copies
        copies *= 4


class Load:
    """Copies of 2 MiB, there and back.

    Raises
    ------
    NotTried
        When the device has no memory or copies to keep a stream busy with.
    """

    def __init__(self, device: Device) -> None:
        try:
            self._stage = Stage(device, 2 * _NBYTES)
            self._scratch = Scratch(device, _NBYTES)
        except (CapabilityError, ResourceExhausted) as error:
            raise NotTried(f"there is no work to look at: {error.message}", remedy=error.remedy) from error
        self.stream: Stream = self._stage.stream
        """The stream that is kept busy."""

    def submit(self, copies: int) -> None:
        """Enqueue ``copies`` round trips."""
        for _ in range(copies):
            self._scratch.carry(self.stream, self._stage.ptr, self._stage.ptr + _NBYTES, _NBYTES)

    def close(self) -> None:
        """Wait for the copies and give everything back."""
        self._stage.synchronize()
        self._scratch.close()
        self._stage.close()
