"""How many bytes a second one direction may move.

Owns the arithmetic of a budget that refills with time. It moves nothing and never waits: whoever asks asks again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Pace"]

_BURST_S = 0.1


class Pace:
    """A budget of bytes that refills at a rate, up to a tenth of a second's worth. One thread.

    An operation may begin while the budget is not overdrawn, and may overdraw it: however large operations are, the
    average keeps to the rate.

    Parameters
    ----------
    nbytes_per_s : int
        0: no limit.
    clock : callable
        Monotonic seconds.
    """

    def __init__(self, nbytes_per_s: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = nbytes_per_s
        self._clock = clock
        self._most = nbytes_per_s * _BURST_S
        self._left, self._at = self._most, clock()

    def allows(self) -> bool:
        """Return True when the next operation may begin."""
        if not self._rate:
            return True
        now = self._clock()
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        return self._left >= 0

    def spend(self, nbytes: int) -> None:
        """Note that so many bytes are being moved."""
        if self._rate:
            self._left -= nbytes
