"""Work that keeps a stream busy, with a number at its end, so that whoever claims that it is done can be checked.

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
_WORD = 8
_SLOTS = 64
_ARRIVED = _SLOTS


def loads() -> Iterator[int]:
    """Yield ever larger numbers of copies, for a check that ends when it saw its work run."""
    copies = _FIRST
    while copies <= _LARGEST:
        yield copies
        copies *= 4


class Load:
    """Copies of 1 MiB, there and back, and then one number to a place in host memory.

    Raises
    ------
    NotTried
        When the device has no memory or copies to keep a stream busy with.
    """

    def __init__(self, device: Device) -> None:
        try:
            self._stage = Stage(device, _NBYTES)
            self._scratch = Scratch(device, _NBYTES)
        except (CapabilityError, ResourceExhausted) as error:
            raise NotTried(f"there is no work to look at: {error.message}", remedy=error.remedy) from error
        self._words = self._stage.view.cast("Q")
        self.stream: Stream = self._stage.stream
        """The stream that is kept busy."""

    @property
    def arrived(self) -> int:
        """The number of the last work that is done for sure: its copies have put it here."""
        return self._words[_ARRIVED]

    def submit(self, copies: int, number: int, *, to: int | None = None) -> None:
        """Enqueue ``copies`` round trips, then ``number`` (1 .. 63) to :attr:`arrived`, or to the address ``to``."""
        self._words[number] = number
        half = _NBYTES // 2  # the numbers stand in the other one
        for _ in range(copies):
            self._scratch.carry(self.stream, self._stage.ptr + half, self._stage.ptr + half, half)
        target = self._stage.ptr + _ARRIVED * _WORD if to is None else to
        self._scratch.carry(self.stream, target, self._stage.ptr + number * _WORD, _WORD)

    def close(self) -> None:
        """Wait for the copies and give everything back."""
        self._stage.synchronize()
        self._words.release()
        self._scratch.close()
        self._stage.close()
